"""How the tests of replicas look at them."""

import time

# Nothing here decides a test: it is how long a state may take to show before the test gives up.
PATIENCE = 60


def lag(conn, replica):
    return conn.execute("SELECT * FROM shardmap.replica_lag WHERE replica = %s", [replica]).fetchone()


def eventually(look, wanted, patience=PATIENCE):
    """What `look` returns once `wanted` holds of it."""
    deadline = time.monotonic() + patience
    while True:
        seen = look()
        if wanted(seen):
            return seen
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)


def caught_up(conn, replica):
    return eventually(lambda: lag(conn, replica), lambda row: row["state"] == "replica" and not row["lag"] and row["lag_bytes"] == 0)


def standing(conn, replica, state, reason=None):
    return eventually(lambda: lag(conn, replica), lambda row: (row["state"], row["reason"]) == (state, reason))
