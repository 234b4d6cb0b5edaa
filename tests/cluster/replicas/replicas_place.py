"""How the tests of replicas look at them."""

from patience import eventually


def lag(conn, replica):
    return conn.execute("SELECT * FROM shardmap.replica_lag WHERE replica = %s", [replica]).fetchone()


def caught_up(conn, replica):
    return eventually(lambda: lag(conn, replica), lambda row: row["state"] == "replica" and not row["lag"] and row["lag_bytes"] == 0)


def standing(conn, replica, state, reason=None):
    return eventually(lambda: lag(conn, replica), lambda row: (row["state"], row["reason"]) == (state, reason))
