"""Audits and verifications while arcs, remainders or a range are on their way: rows on two shards are no finding, others are."""

import psycopg
import pytest
from cluster import Cluster

POINTS = ("move_hidden", "move_logging", "move_batch:2", "move_copied", "move_caught_up", "move_verified", "move_fenced", "move_flip",
          "move_flipped", "move_cleaning:2", "move_done")
STRATEGIES = ("ring", "modulo", "range")
PARTS = {"ring": "jsonb_build_object('kind', 'arcs', 'arcs', (shardmap._owned_tokens('shard-0') * '{[0,2147483648)}'::int8multirange)::text)",
         "modulo": "jsonb_build_object('kind', 'remainders', 'modulus', 6, 'remainders', '{0}'::int[])",
         "range": "jsonb_build_object('kind', 'range', 'lower', '0', 'upper', '300')"}
PLAN = """SELECT DISTINCT p.move FROM shardmap._plan_move(jsonb_populate_record(NULL::shardmap.move, {part}
    || jsonb_build_object('keyspace', '{strategy}', 'source', 'shard-0', 'target', 'shard-1')), false) p"""


@pytest.fixture(scope="module")
def cluster():
    with Cluster(shards=3, coordinator_settings={"shardmap.fanout_policy": "allow", "shardmap.cleanup_delay": "0",
                                                 "shardmap.move_batch_rows": "50", "shardmap.fence_timeout": "30s"},
                 shard_settings={"max_prepared_transactions": "20"}) as cluster:
        yield cluster


@pytest.fixture(params=STRATEGIES)
def moving(request, cluster):
    """A database whose keyspace has rows, and a pinned key on shard 0; its name, and a move of a part of it to shard 1."""
    strategy = request.param
    name = f"parts_{strategy}"
    if strategy == "range":
        cluster.new_database(name, shards=0)
        with psycopg.connect(cluster.dsn(name), autocommit=True) as conn:
            conn.execute("SELECT shardmap.create_keyspace('range', strategy => 'range', range_order => 'integer')")
            for number in range(3):
                cluster.shard_server(number).psql(f'CREATE DATABASE "{cluster.shard_database(number, name)}"')
                conn.execute("SELECT shardmap.add_shard(%s, host => '127.0.0.1', port => %s, dbname => %s, keyspace => 'range')",
                             (f"shard-{number}", cluster.shard_server(number).port, cluster.shard_database(number, name)))
                conn.execute("SELECT shardmap.set_range('range', %s, %s, %s)", (str(number * 400), str((number + 1) * 400), f"shard-{number}"))
    else:
        cluster.new_database(name, strategy=strategy)
    with psycopg.connect(cluster.dsn(name), autocommit=True) as conn:
        conn.execute("CREATE TABLE t (k int, id int, v text, PRIMARY KEY (k, id)); CREATE TABLE u (k int PRIMARY KEY, v text)")
        for table in ("t", "u"):
            conn.execute(f"SELECT shardmap.distribute_table('{table}', 'k', '{strategy}')")
        conn.execute("INSERT INTO t SELECT i % 1200, i, 'row ' || i FROM generate_series(0, 2399) i")
        conn.execute("INSERT INTO u SELECT i, 'row ' || i FROM generate_series(0, 1199) i")
        key = conn.execute("SELECT k FROM u WHERE shardmap.owner_of(k::text, %s) = 'shard-0' ORDER BY k LIMIT 1", (strategy,)).fetchone()[0]
        conn.execute("SELECT shardmap.pin_key(%s, 'shard-0', %s)", (key, strategy))
        with conn.transaction():
            conn.execute("SELECT shardmap._lock_keyspace(%s)", (strategy,))
            number = conn.execute(PLAN.format(part=PARTS[strategy], strategy=strategy)).fetchone()[0]
    yield strategy, name, number
    cluster.drop_database(name)


def findings(conn, strategy, mode):
    return conn.execute("SELECT kind, shard, rows FROM shardmap.audit(%s, %s)", (strategy, mode)).fetchall()


@pytest.mark.soak
def test_no_false_finding_and_no_true_one_missed(cluster, moving):
    strategy, name, number = moving
    with psycopg.connect(cluster.dsn(name), autocommit=True) as conn:
        for point in POINTS:
            with psycopg.connect(cluster.dsn(name), autocommit=True, options=f"-c shardmap.crash_point={point}=error") as runner:
                with pytest.raises(psycopg.Error, match="crash point"):
                    runner.execute(f"CALL shardmap.run_move({number})")
            for mode in ("sample", "full"):
                assert findings(conn, strategy, mode) == [], point
            for table in ("t", "u"):
                assert {row[0] for row in conn.execute("SELECT finding FROM shardmap.verify(%s)", (table,)).fetchall()} == {"clean"}, point
            state = conn.execute("SELECT state FROM shardmap.moves WHERE id = %s", (number,)).fetchone()[0]
            if state in ("catching_up", "verifying", "fencing", "flipped"):
                assert {row[0] for row in conn.execute("SELECT finding FROM shardmap.verify_move(%s)", (number,)).fetchall()} == {"equal"}, point
            # A row of another part is found all the same.
            stray = conn.execute("SELECT k FROM u WHERE shardmap.owner_of(k::text, %s) = 'shard-2' LIMIT 1", (strategy,)).fetchone()[0]
            cluster.shard_psql(0, f"INSERT INTO t VALUES ({stray}, -1, 'stray')", name)
            assert findings(conn, strategy, "full") == [("misplaced", "shard-0", 1)], point
            cluster.shard_psql(0, "DELETE FROM t WHERE id = -1", name)
        conn.execute(f"CALL shardmap.run_move({number})")
        assert conn.execute("SELECT state, rows_copied > 100 FROM shardmap.moves WHERE id = %s", (number,)).fetchone() == ("done", True)
        assert findings(conn, strategy, "full") == []
        assert conn.execute("SELECT count(*), count(DISTINCT id) FROM t").fetchone() == (2400, 2400)
