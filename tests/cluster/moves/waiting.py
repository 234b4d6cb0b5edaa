"""Waits for conditions, with generous limits."""

import psycopg
from patience import wait_until

LIMIT = 120


def wait_for(condition, explain=lambda: ""):
    return wait_until(condition, lambda: f"did not come: {explain()}", LIMIT)


def wait_for_server(tenants):
    def answers():
        try:
            with tenants.connect() as conn:
                return conn.execute("SELECT true").fetchone()
        except psycopg.OperationalError:
            return None
    return wait_for(answers)
