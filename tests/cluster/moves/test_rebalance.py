"""A shard joins, another is emptied, while all tables are read and written: rows follow the map, and nobody notices."""

import psycopg
import pytest
from fleet import KEYS, Fleet, Load

STRATEGIES = {"ring": {"vnodes": 16}, "modulo": {}}


def rebalance(fleet, conn):
    """Plans and runs what is to move; returns it as (source, target) by rows."""
    want = conn.execute("SELECT part, source, target, sum(rows), min(expected) >= '0', min(steps) ~ 'copy' FROM shardmap.rebalance(%s, dry_run => true) "
                        "GROUP BY part, source, target ORDER BY 1, 2, 3", (fleet.name,)).fetchall()
    planned = conn.execute("SELECT part, source, target, sum(rows), min(expected) >= '0', min(steps) ~ 'copy' FROM shardmap.rebalance(%s) "
                           "GROUP BY part, source, target ORDER BY 1, 2, 3", (fleet.name,)).fetchall()
    assert planned == want and all(row[4:] == (True, True) for row in planned)
    with pytest.raises(psycopg.errors.ObjectInUse, match="move .* is under way"):
        conn.execute("SELECT * FROM shardmap.rebalance(%s)", (fleet.name,))
    conn.execute(f"CALL shardmap.run_moves('{fleet.name}')")
    assert conn.execute("SELECT DISTINCT state FROM shardmap.moves WHERE keyspace = %s", (fleet.name,)).fetchall() == [("done",)]
    assert conn.execute("SELECT * FROM shardmap.rebalance(%s)", (fleet.name,)).fetchall() == []
    return {(source, target): rows for _, source, target, rows, *_ in planned}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_shard_joins_and_another_leaves_under_load(tenants, strategy):
    fleet = Fleet(tenants, f"fleet_{strategy}", KEYS, strategy=strategy, **STRATEGIES[strategy])
    with fleet.connect() as conn:
        fleet.fill(conn)
        country = f"country_{strategy}"
        conn.execute(f"CREATE TABLE {country} (code text PRIMARY KEY, name text)")
        conn.execute(f"INSERT INTO {country} VALUES ('nl', 'Nederland'), ('de', 'Deutschland')")
        conn.execute(f"SELECT shardmap.distribute_reference('{country}', '{fleet.name}')")
        pinned = f"fleet_{strategy}_int4"
        conn.execute("SELECT shardmap.move_key(7, %s, %s)", (f"{fleet.name}-1", fleet.name))
        conn.execute(f"CALL shardmap.run_moves('{fleet.name}')")
        with Load(fleet) as load:
            assert fleet.add_shard(conn) == "joining"
            # Before the first row.
            assert fleet.on_shard(3, f"SELECT count(*) FROM {country}") == [(2,)]
            moved = rebalance(fleet, conn)
            # Under modulo nearly all keys have another remainder.
            assert {target for _, target in moved} == {f"{fleet.name}-3"} or strategy == "modulo" and len(moved) > 3
            assert sum(moved.values()) > 0
            assert fleet.on_shard(3, f"SELECT count(*) > 0 FROM {pinned}") == [(True,)]
            fleet.check(conn)
            conn.execute("SELECT shardmap.drain_shard(%s)", (f"{fleet.name}-0",))
            moved = rebalance(fleet, conn)
            assert {source for source, _ in moved} == {f"{fleet.name}-0"} or strategy == "modulo" and len(moved) > 3
            assert sum(moved.values()) > 0
            assert load.failures == []
        fleet.check(conn)
        load.check(conn)
        assert conn.execute(f"SELECT shard_for(7, '{fleet.name}')").fetchone() == (f"{fleet.name}-1",)
        assert fleet.on_shard(1, f"SELECT count(*) FROM {pinned} WHERE k = 7") == [(4,)]
        conn.execute("SELECT shardmap.drop_shard(%s)", (f"{fleet.name}-0",))
        fleet.size = 0  # one of them is gone
        fleet.check(conn)
