"""Audits while a rebalance goes on: they come to their end, and what is on its way is no finding."""

import psycopg
from fleet import Fleet
from patience import Running, lock_waiters, wait_until
from psycopg import errors


def audit(conn, fleet, mode):
    """The findings; None: the map changed meanwhile."""
    try:
        return conn.execute("SELECT kind, shard, detail FROM shardmap.audit(%s, %s)", (fleet.name, mode)).fetchall()
    except errors.SerializationFailure:
        return None


def states(conn, fleet):
    return [state for state, in conn.execute("SELECT state FROM shardmap.moves WHERE keyspace = %s", (fleet.name,))]


def test_audits_come_to_their_end_and_find_nothing(tenants):
    fleet = Fleet(tenants, "fleet_audited", ["int4", "text"], strategy="ring", vnodes=16)
    with fleet.connect() as conn, fleet.connect() as other:
        fleet.fill(conn)
        fleet.add_shard(conn)
        conn.execute("SELECT FROM shardmap.rebalance(%s)", (fleet.name,))
        with psycopg.connect(tenants.cluster.shard_server(0).dsn("fleet_audited_3")) as holder:
            # Neither can a first row be copied nor a move be over before this is let go.
            holder.execute("LOCK TABLE fleet_audited_text IN SHARE MODE")
            moving = Running(lambda: conn.execute(f"CALL shardmap.run_moves('{fleet.name}')"))
            wait_until(lambda: lock_waiters(holder) or moving.is_over())
            assert not moving.is_over(), "nothing is held up"
            for mode in ("sample", "full"):
                wait_until(lambda mode=mode: audit(other, fleet, mode) == [])
            assert set(states(other, fleet)) != {"done"}
        found = []
        while not moving.is_over():
            found.append(audit(other, fleet, "full"))
        moving.end()
        assert set(states(other, fleet)) == {"done"}
        assert [each for each in found if each] == []
        assert audit(other, fleet, "full") == []
        fleet.check(conn)
