"""Waits for conditions, with generous limits."""

import time

import psycopg

LIMIT = 120


def wait_for(condition, explain=lambda: ""):
    deadline = time.monotonic() + LIMIT
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"did not come: {explain()}"
        time.sleep(0.05)


def wait_for_server(tenants):
    def answers():
        try:
            with tenants.connect() as conn:
                return conn.execute("SELECT true").fetchone()
        except psycopg.OperationalError:
            return None
    return wait_for(answers)
