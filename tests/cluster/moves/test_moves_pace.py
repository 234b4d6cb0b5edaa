"""Moves go no faster than they may, wait for replicas, and say so."""

import concurrent.futures
import re
import time

import psycopg
import pytest
from cluster import Cluster
from tenants import plan, run
from waiting import wait_for

ASK = "SELECT state, rows_copied, last_error, remaining, change_lag FROM shardmap.moves WHERE id = %s"


def test_rows_per_second(tenants, conn):
    """80 rows at 20 a second, in batches of 7: what was copied is at no time more than that and a batch."""
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    notices, seen = [], []
    with tenants.connect(shardmap__move_rows_per_second="20") as runner, concurrent.futures.ThreadPoolExecutor(1) as pool:
        runner.add_notice_handler(lambda diag: notices.append(diag.message_primary))
        begin = time.monotonic()
        running = pool.submit(run, runner, number)
        while not running.done():
            seen.append((conn.execute(ASK, (number,)).fetchone(), time.monotonic() - begin))
            time.sleep(0.05)
        running.result()
        took = time.monotonic() - begin
    assert took >= 80 / 20 + 80 / 20 - 2, "copied and deleted at that rate"
    assert all(row[1] <= after * 20 + 7 for row, after in seen)
    halfway = [row for row, _ in seen if row[0] == "copying" and row[1] >= 40]
    assert halfway and all(row[3] is not None and row[4] is not None for row in halfway), seen
    assert not any("flipped:" in notice for notice in notices)
    assert tenants.stored(tenant) == {1: (40, 40)}


def test_progress_is_told(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    notices = []
    with tenants.connect(shardmap__move_rows_per_second="6") as runner:
        runner.add_notice_handler(lambda diag: notices.append(diag.message_primary))
        run(runner, number)
    copied = [re.match(rf"move {number} has copied (\d+) of 80 rows \((\d+) %\), 00:.* to go", notice) for notice in notices]
    copied = [int(found[1]) for found in copied if found]
    assert copied and copied == sorted(copied), notices
    assert any(re.match(rf"move {number} has deleted \d+ rows", notice) for notice in notices), notices


def test_a_pause_takes_effect_while_it_waits(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__move_rows_per_second="1") as runner, concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, runner, number)
        wait_for(lambda: conn.execute(ASK, (number,)).fetchone()[1] >= 1)
        conn.execute("SELECT shardmap.pause_move(%s)", (number,))
        running.result()
    assert conn.execute(ASK, (number,)).fetchone()[0] == "copying"
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    run(conn, number)


@pytest.fixture(scope="module")
def replicated():
    with Cluster(shards=2, replicas=1, layout="servers", coordinator_settings={
            "shardmap.lag_sample_interval": "200ms", "shardmap.cleanup_delay": "0", "shardmap.move_batch_rows": "100"}) as cluster:
        with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
            conn.execute("CREATE TABLE t (k int, id int, PRIMARY KEY (k, id)); SELECT shardmap.distribute_table('t', 'k');"
                         " INSERT INTO t SELECT i % 40, i FROM generate_series(1, 4000) i")
            wait_for(lambda: conn.execute("SELECT bool_and(lag IS NOT NULL) FROM shardmap.replica_lag").fetchone()[0])
        yield cluster


@pytest.fixture
def keys(replicated):
    """A key of shard 0 and the connection to move it."""
    with psycopg.connect(replicated.dsn(), autocommit=True) as conn:
        key = conn.execute("SELECT k FROM generate_series(1, 39) k WHERE shard_for(k) = 'shard-0' AND NOT EXISTS"
                           " (SELECT FROM shardmap.move m WHERE m.key = k::text) LIMIT 1").fetchone()[0]
        yield conn, key, plan(conn, key, 1)


def replica(replicated, shard):
    return psycopg.connect(replicated.replica_server(shard).dsn(), autocommit=True)


@pytest.mark.parametrize("shard", [0, 1], ids=["source", "target"])
def test_waits_for_a_replica_that_lags(replicated, keys, shard):
    conn, key, number = keys
    with replica(replicated, shard) as standby, psycopg.connect(replicated.dsn(), autocommit=True) as runner:
        standby.execute("SELECT pg_wal_replay_pause()")
        # Something that it has not replayed.
        conn.execute("UPDATE t SET id = id WHERE k = (SELECT min(k) FROM t WHERE shard_for(k) = %s)", (f"shard-{shard}",))
        wait_for(lambda: conn.execute("SELECT bool_or(lag > '1 s') FROM shardmap.replica_lag").fetchone()[0])
        runner.execute("SET shardmap.move_max_replica_lag = '1s'")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(run, runner, number)
            said = wait_for(lambda: conn.execute(ASK, (number,)).fetchone()[2])
            assert re.match(rf'waits: replica "shard-{shard}-replica-0" of shard "shard-{shard}" lags .* more than', said)
            assert conn.execute(ASK, (number,)).fetchone()[:2] == ("copying", 0)
            standby.execute("SELECT pg_wal_replay_resume()")
            running.result()
    assert conn.execute(ASK, (number,)).fetchone()[:3] == ("done", 100, None)


def test_an_unknown_lag_is_waited_for_and_then_told(replicated, keys):
    conn, key, number = keys
    def limit(seconds):
        conn.execute(f"CREATE OR REPLACE FUNCTION shardmap._unknown_lag_limit() RETURNS float8 LANGUAGE sql AS 'SELECT {seconds}::float8'")
    limit(3600)
    server = replicated.replica_server(1)
    server.stop()
    try:
        wait_for(lambda: conn.execute("SELECT bool_or(lag IS NULL) FROM shardmap.replica_lag").fetchone()[0])
        with psycopg.connect(replicated.dsn(), autocommit=True) as runner, concurrent.futures.ThreadPoolExecutor(1) as pool:
            runner.execute("SET shardmap.move_max_replica_lag = '1s'; SET shardmap.move_rows_per_second = 10")
            running = pool.submit(run, runner, number)
            said = wait_for(lambda: conn.execute(ASK, (number,)).fetchone()[2])
            assert re.match('waits: the lag of replica "shard-1-replica-0" of shard "shard-1" is unknown', said)
            assert conn.execute(ASK, (number,)).fetchone()[1] == 0
            limit(1)
            wait_for(lambda: conn.execute(ASK, (number,)).fetchone()[1] > 0)
            conn.execute("SELECT shardmap.pause_move(%s)", (number,))
            running.result()
        said = conn.execute(ASK, (number,)).fetchone()[2]
        assert said.startswith('WARNING: goes on although the lag of replica "shard-1-replica-0"')
    finally:
        server.start()
        limit(60)
    conn.execute("SELECT shardmap.resume_move(%s)", (number,))
    run(conn, number)
