"""Statistics: fan-out queries and counters, who sees them, how they fill, and what a restart or a crash leaves of them.

One cluster of three shards for the module, with room for 20 fan-out queries. Each test resets the statistics first.
"""

import contextlib
import os
import signal
import threading

import psycopg
import pytest
from cluster import Cluster
from patience import wait_until
from psycopg import errors

PLACES = 20


@pytest.fixture(scope="module")
def cluster():
    with Cluster(shards=3, coordinator_settings={"shardmap.fanout_queries_max": PLACES}) as cluster:
        cluster.psql("""
            CREATE TABLE t (k text PRIMARY KEY, v int, c0 int, c1 int, c2 int, c3 int, c4 int, c5 int);
            INSERT INTO t SELECT i::text, i FROM generate_series(1, 60) i;
            SELECT shardmap.distribute_table('t', 'k');
            CREATE ROLE ann LOGIN; CREATE ROLE stat LOGIN IN ROLE pg_read_all_stats;
            CREATE ROLE adm LOGIN IN ROLE shardmap_admin;
            GRANT SELECT ON t TO ann;
            DO $$ BEGIN FOR i IN 0..2 LOOP
                EXECUTE format('CREATE USER MAPPING FOR ann SERVER %I'
                    ' OPTIONS (user ''postgres'', password_required ''false'')', 'shard-' || i);
            END LOOP; END $$""")
        yield cluster


@pytest.fixture
def conn(cluster):
    """A superuser's session; fan-outs are allowed, statistics empty."""
    with connect(cluster) as conn:
        conn.execute("SELECT shardmap.reset_fanout_queries(), shardmap.reset_stat_routing()")
        yield conn


def connect(cluster, user="postgres", dbname=None):
    dsn = cluster.dsn(dbname, user)
    return psycopg.connect(dsn, autocommit=True, options="-c shardmap.fanout_policy=allow")


def queries(conn):
    rows = conn.execute("SELECT query, calls, rows, shards FROM shardmap.fanout_queries ORDER BY query COLLATE \"C\"")
    return rows.fetchall()


def steps(conn):
    return {step: count for step, count in conn.execute("TABLE shardmap.stat_routing") if count}


def by_shard(conn):
    return {shard: count for _, shard, count, *_ in conn.execute("TABLE shardmap.stat_shards") if count}


def logged(cluster, since):
    return cluster.coordinator.log.read_text(errors="replace")[since:]


def log_size(cluster):
    return len(cluster.coordinator.log.read_text(errors="replace"))


def test_calls_of_one_shape_are_one_row(conn):
    for v in (1, 2, 3):
        conn.execute(f"SELECT k FROM t WHERE v = {v} -- number {v}")
    conn.execute("SELECT k FROM t WHERE v IN (4, 5)")
    conn.execute("select  k from t where v in (4, 5, 6, 7)")
    conn.execute("SELECT k FROM t WHERE v IN (4, 5, 6)")
    assert queries(conn) == [("SELECT k FROM t WHERE v = $1", 3, 3, 3),
                             ("SELECT k FROM t WHERE v IN ($1, ...)", 2, 5, 3),
                             ("select k from t where v in ($1, ...)", 1, 4, 3)]
    row = conn.execute("""
        SELECT user_name, tables, reason <> '', total_ms >= max_ms AND max_ms >= mean_ms AND mean_ms >= min_ms
               AND min_ms > 0, now() - first_seen < '1 min' AND first_seen < last_seen,
               fingerprint = ('x' || right(md5(query), 16))::bit(64)::bigint
          FROM shardmap.fanout_queries WHERE calls = 3""").fetchone()
    assert row[1] in ("t", "public.t"), row
    assert (row[0], *row[2:]) == ("postgres", True, True, True, True)


def test_prepared_statements_count_every_call(conn):
    for _ in range(10):
        conn.execute("SELECT k FROM t WHERE v = %s", (7,), prepare=True)
    assert queries(conn) == [("SELECT k FROM t WHERE v = $1", 10, 10, 3)]


def test_steps_and_shards(conn):
    owner = conn.execute("SELECT shard_for('7')").fetchone()[0]
    for _ in range(4):
        conn.execute("SELECT v FROM t WHERE k = '7'")
    conn.execute("SELECT count(*) FROM t")
    counted = steps(conn)
    assert counted.pop("fan_out") == 1
    assert sum(counted.values()) == 4, counted
    assert set(counted) <= {"routed", "substituted"}
    assert by_shard(conn)[owner] >= 4
    conn.execute("SELECT 1")
    assert sum(steps(conn).values()) == 5
    conn.execute("SELECT shardmap.reset_stat_routing()")
    assert (steps(conn), by_shard(conn)) == ({}, {})


def test_errors_and_waits_of_a_shard(cluster, conn):
    """Also of an error that is caught; of the shard that has met with it, and of no other."""
    owner = conn.execute("SELECT shard_for('7')").fetchone()[0]
    figures = "SELECT shard, errors, wait_ms FROM shardmap.stat_shards WHERE errors > 0 OR wait_ms > 200"
    assert conn.execute(figures).fetchall() == []
    with pytest.raises(errors.DivisionByZero):
        conn.execute("SELECT 1 / (v - 7) FROM t WHERE k = '7'")
    conn.execute("DO $$ BEGIN UPDATE t SET v = v / 0 WHERE k = '7'; EXCEPTION WHEN division_by_zero THEN END $$")
    assert [(shard, count) for shard, count, _ in conn.execute(figures)] == [(owner, 2)]
    with psycopg.connect(cluster.shard_dsn(int(owner.removeprefix("shard-")))) as locker:
        locker.execute("SELECT FROM public.t WHERE k = '7' FOR UPDATE")
        update = threading.Thread(target=conn.execute, args=("UPDATE t SET v = v WHERE k = '7'",))
        update.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, 'pg_shardmap') AND wait_event_type = 'Lock'"
        wait_until(lambda: int(cluster.shard_psql(int(owner.removeprefix("shard-")), waiting)) == 1)
        locker.execute("SELECT pg_sleep(0.3)")
        locker.commit()
        update.join()
    (shard, count, waited), = conn.execute(figures)
    assert (shard, count) == (owner, 2) and waited > 200
    conn.execute("SELECT shardmap.reset_stat_routing()")
    assert conn.execute(figures).fetchall() == []


def test_refused_statements_are_counted(conn):
    conn.execute("SET shardmap.fanout_policy = 'error'")
    with pytest.raises(errors.FeatureNotSupported):
        conn.execute("SELECT count(*) FROM t")
    assert steps(conn)["refused"] == 1
    assert queries(conn) == []


def test_text_is_for_its_user_and_those_who_may_read_all_statistics(cluster, conn):
    conn.execute("SELECT count(*) FROM t WHERE v = 1")
    with connect(cluster, "ann") as ann:
        ann.execute("SELECT max(v) FROM t")
        shown = ann.execute("SELECT user_name, query, tables IS NULL, reason IS NULL, fingerprint IS NULL, calls"
                            " FROM shardmap.fanout_queries ORDER BY 1").fetchall()
        assert shown == [("ann", "SELECT max(v) FROM t", False, False, False, 1),
                         ("postgres", "<insufficient privilege>", True, True, True, 1)]
        for function in ("reset_fanout_queries", "reset_stat_routing"):
            with pytest.raises(errors.InsufficientPrivilege):
                ann.execute(f"SELECT shardmap.{function}()")
    with connect(cluster, "stat") as stat:
        assert len(queries(stat)) == 2
        assert "<insufficient privilege>" not in {row[0] for row in queries(stat)}
    with connect(cluster, "adm") as admin:
        admin.execute("SELECT shardmap.reset_fanout_queries(), shardmap.reset_stat_routing()")
    assert queries(conn) == []


def test_full_table_keeps_the_often_called(conn):
    columns = [f"c{i}" for i in range(6)]
    for _ in range(3):
        conn.execute("SELECT k FROM t WHERE v = 1")
    before = conn.execute("SELECT fanout_queries_evicted FROM shardmap.stat_info").fetchone()[0]
    shapes = [f"SELECT {a}, {b} FROM t WHERE v = 0" for a in columns for b in columns]
    for shape in shapes:
        conn.execute(shape)
    kept = queries(conn)
    assert len(kept) == PLACES
    assert ("SELECT k FROM t WHERE v = $1", 3, 3, 3) in kept
    assert (shapes[-1].replace("0", "$1").replace("c$1", "c0"), 1, 0, 3) in kept
    used, places, after, uncounted = conn.execute(
        "SELECT fanout_queries, fanout_queries_max, fanout_queries_evicted, statements_uncounted"
        " FROM shardmap.stat_info").fetchone()
    assert (used, places, after - before, uncounted) == (PLACES, PLACES, len(shapes) + 1 - PLACES, 0)


def test_concurrent_sessions_lose_no_call(cluster, conn):
    def work(number):
        with connect(cluster) as own:
            for i in range(50):
                own.execute(f"SELECT c{number % 3} FROM t WHERE v = {i}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row[1] for row in queries(conn)] == [100, 100, 100]
    assert steps(conn)["fan_out"] == 300


def test_databases_are_apart(cluster, conn):
    conn.execute("SELECT count(*) FROM t")
    cluster.coordinator.psql("CREATE DATABASE apart")
    try:
        with connect(cluster, dbname="apart") as apart:
            apart.execute("CREATE EXTENSION pg_shardmap CASCADE")
            assert (queries(apart), steps(apart)) == ([], {})
            apart.execute("SELECT shardmap.reset_fanout_queries(), shardmap.reset_stat_routing()")
    finally:
        cluster.coordinator.psql("DROP DATABASE apart WITH (FORCE)")
    assert len(queries(conn)) == 1
    assert steps(conn)["fan_out"] == 1


def filled(cluster):
    """Makes some statistics and returns them."""
    with connect(cluster) as conn:
        conn.execute("SELECT shardmap.reset_fanout_queries(), shardmap.reset_stat_routing()")
        conn.execute("SELECT count(*) FROM t")
        conn.execute("SELECT v FROM t WHERE k = '7'")
        return state(conn)


def state(conn):
    return (conn.execute("TABLE shardmap.fanout_queries").fetchall(), steps(conn), by_shard(conn),
            conn.execute("TABLE shardmap.stat_info").fetchall())


def test_a_restart_keeps_everything(cluster):
    file = cluster.coordinator.data / "pg_stat" / "pg_shardmap.stat"
    before = filled(cluster)
    for _ in range(2):
        cluster.coordinator.stop()
        assert file.exists()
        assert file.stat().st_mode & 0o077 == 0
        cluster.coordinator.start()
        assert not file.exists()
        with connect(cluster) as conn:
            assert state(conn) == before


@pytest.mark.parametrize("damage, reason", [
    (lambda text: text.replace('"calls":1', '"calls":2', 1), "its checksum does not match"),
    (lambda text: text[:200], "its checksum does not match"),
    (lambda text: text.replace("statistics 1 ", "statistics 99 ", 1), "another version of pg_shardmap wrote it"),
    (lambda text: "", "it is no file of pg_shardmap statistics"),
], ids=["changed", "cut", "version", "empty"])
def test_a_damaged_file_costs_the_figures_only(cluster, damage, reason):
    file = cluster.coordinator.data / "pg_stat" / "pg_shardmap.stat"
    filled(cluster)
    cluster.coordinator.stop()
    file.write_text(damage(file.read_text()))
    since = log_size(cluster)
    cluster.coordinator.start()
    assert f'ignoring file "pg_stat/pg_shardmap.stat": {reason}' in logged(cluster, since)
    with connect(cluster) as conn:
        assert (queries(conn), steps(conn)) == ([], {})
    filled(cluster)


def test_a_killed_server_starts_empty_and_counts_again(cluster):
    filled(cluster)
    cluster.coordinator.kill()
    cluster.coordinator.start()
    with connect(cluster) as conn:
        assert (queries(conn), steps(conn)) == ([], {})
    assert len(filled(cluster)[0]) == 1


def test_a_killed_session_leaves_a_working_table(cluster):
    filled(cluster)
    with connect(cluster) as victim:
        os.kill(victim.info.backend_pid, signal.SIGKILL)

    def works():
        with contextlib.suppress(psycopg.OperationalError):
            return len(filled(cluster)[0]) == 1
    wait_until(works, cluster.coordinator.log_tail)


def test_without_preload_statements_run_and_views_say_why_they_are_empty(cluster):
    cluster.coordinator.configure(shared_preload_libraries=None)
    cluster.coordinator.restart()
    notices = []
    try:
        with connect(cluster) as conn:
            conn.add_notice_handler(lambda notice: notices.append((notice.severity, notice.message_hint)))
            # The library comes with the first use of a table, too late for that statement.
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
                conn.execute("SELECT count(*) FROM t")
            assert conn.execute("SELECT count(*) FROM t WHERE k = 'x'").fetchone() is not None
            assert notices == []
            for view in ("fanout_queries", "stat_routing", "stat_info"):
                assert conn.execute(f"TABLE shardmap.{view}").fetchall() == []
            assert by_shard(conn) == {}
            conn.execute("SELECT shardmap.reset_fanout_queries(), shardmap.reset_stat_routing()")
            hint = 'Add pg_shardmap to "shared_preload_libraries" and restart the server.'
            assert set(notices) == {("NOTICE", hint)}
            assert conn.execute("SHOW shardmap.fanout_queries_max").fetchone() == (str(PLACES),)
    finally:
        cluster.coordinator.configure(shared_preload_libraries="pg_shardmap")
        cluster.coordinator.restart()
