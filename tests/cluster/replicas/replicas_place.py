"""How the tests of replicas look at them."""

from patience import eventually

# Bytes of WAL that an idle server may write at any moment.
ASIDE = 10_000


def lag(conn, replica):
    return conn.execute("SELECT * FROM shardmap.replica_lag WHERE replica = %s", [replica]).fetchone()


def caught_up(conn, replica):
    return eventually(lambda: lag(conn, replica), lambda row: row["state"] == "replica" and not row["lag"] and row["lag_bytes"] == 0)


def standing(conn, replica, state, reason=None):
    return eventually(lambda: lag(conn, replica), lambda row: (row["state"], row["reason"]) == (state, reason))


def pause_when_even(server, conn, replica):
    """Pauses a replica's replay at a moment when it has all that there is: an idle server, too, writes a little at times."""
    def attempt():
        server.psql("SELECT pg_wal_replay_resume()")
        caught_up(conn, replica)
        server.psql("SELECT pg_wal_replay_pause()")
        return eventually(lambda: lag(conn, replica), lambda row: row["replay_paused"])
    return eventually(attempt, lambda row: row["lag_bytes"] == 0)
