"""Connections to shards are limited, shared by sessions that wait for each other, and closed when nobody needs them.

Sixteen shards are databases of one server that has few connections. One key of table t is on each shard.
"""

import contextlib
import os
import signal
import threading
import time

import psycopg
import pytest
from cluster import Cluster
from patience import PATIENCE, Running, wait_until
from psycopg import errors

SHARDS, MAX_CONNECTIONS = 16, 70
COUNT = "SELECT count(*), sum(v) FROM t"
ANSWER = (1600, 1600 * 1601 // 2)


@pytest.fixture(scope="module")
def cluster():
    with Cluster(shards=SHARDS, shard_settings={"max_connections": str(MAX_CONNECTIONS)}) as cluster:
        cluster.psql("CREATE TABLE t (k int PRIMARY KEY, v int); INSERT INTO t SELECT i, i FROM generate_series(1, 1600) i;"
                     "SELECT shardmap.distribute_table('t', 'k')")
        yield cluster


@pytest.fixture(scope="module")
def keys(cluster):
    """Keys by shard."""
    with connect(cluster) as conn:
        rows = conn.execute("SELECT shard_for(k), min(k) FROM generate_series(1, 1600) k GROUP BY 1").fetchall()
    return {shard: key for shard, key in rows}


def connect(cluster, **settings):
    settings = {"fanout_policy": "allow", **settings}
    options = " ".join(f"-c shardmap.{name}={value}" for name, value in settings.items())
    return psycopg.connect(cluster.dsn(), autocommit=True, options=options)


@contextlib.contextmanager
def limit(cluster, number):
    """As many connections to each shard, for all sessions."""
    cluster.coordinator.reload(**{"shardmap.max_connections_per_shard": number})
    try:
        yield
    finally:
        cluster.coordinator.reload(**{"shardmap.max_connections_per_shard": None})


def counted(conn, shard="shard-0"):
    return conn.execute("SELECT connections, waiting FROM shardmap.stat_connections WHERE shard = %s", (shard,)).fetchone()


def on_shard(cluster, number=0):
    """Sessions of coordinators on the shard, as the shard sees them."""
    return int(cluster.shard_psql(number, "SELECT count(*) FROM pg_stat_activity"
                                          " WHERE datname = current_database() AND starts_with(application_name, 'pg_shardmap ')"))


def run(function):
    """Runs it in a thread; what it returns or raises comes into the list."""
    outcome = []

    def call():
        try:
            outcome.append(function())
        except Exception as error:  # noqa: BLE001
            outcome.append(error)
    thread = threading.Thread(target=call)
    thread.start()
    return thread, outcome


def many(cluster, sessions, times, **settings):
    """Fan-outs by that many sessions at once: the outcome of each."""
    def session():
        found = []
        with connect(cluster, **settings) as conn:
            for _ in range(times):
                try:
                    found.append(conn.execute(COUNT).fetchone())
                except psycopg.Error as error:
                    found.append(error)
        return found
    running = [run(session) for _ in range(sessions)]
    for thread, _ in running:
        thread.join()
    return [each for _, outcome in running for each in outcome[0]]


def test_twenty_sessions_share_a_few_connections(cluster, keys):
    """Three of them have begun, and have all connections to one shard until another waits."""
    read = f"SELECT v FROM t WHERE k = {keys['shard-0']}"
    highest, over = 0, threading.Event()

    def watch():
        nonlocal highest
        with connect(cluster) as conn:
            while not over.is_set():
                highest = max(highest, conn.execute("SELECT max(connections) FROM shardmap.stat_connections").fetchone()[0])
                time.sleep(0.005)
    with limit(cluster, 3), contextlib.ExitStack() as holders:
        for holder in [holders.enter_context(connect(cluster)) for _ in range(3)]:
            holder.execute("BEGIN")
            holder.execute(read)
        watcher, caught = run(watch)
        crowd, outcome = run(lambda: many(cluster, 20, 4, connection_wait="200s"))
        try:
            with connect(cluster) as conn:
                wait_until(lambda: counted(conn)[1] > 0 and highest == 3)
        finally:
            holders.close()
            crowd.join()
            over.set()
            watcher.join()
        [outcomes] = outcome
        assert caught == [None] and outcomes == [ANSWER] * 80
        assert highest == 3


def test_who_comes_while_others_wait_for_what_nobody_holds_waits_too(cluster, keys):
    """All have been given back, and the session that waits for one has not run yet."""
    read = f"SELECT v FROM t WHERE k = {keys['shard-0']}"
    with limit(cluster, 1), connect(cluster) as watcher, connect(cluster, connection_wait="200s") as waiter, \
            connect(cluster, connection_wait="200s") as newcomer:
        with connect(cluster) as holder:
            holder.execute("BEGIN")
            holder.execute(read)
            first = Running(lambda: waiter.execute(read).fetchone())
            wait_until(lambda: counted(watcher) == (1, 1))
            os.kill(waiter.info.backend_pid, signal.SIGSTOP)
        try:
            wait_until(lambda: counted(watcher) == (0, 1))
            second = Running(lambda: newcomer.execute(read).fetchone())
            wait_until(lambda: counted(watcher) == (0, 2) or second.is_over())
        finally:
            os.kill(waiter.info.backend_pid, signal.SIGCONT)
        assert first.end() == second.end() == (keys["shard-0"],)


def test_a_shard_without_connections_is_a_clear_error(cluster):
    """Each session keeps 16 connections to a server that has 70, and nothing limits them here."""
    outcomes = []
    with contextlib.ExitStack() as open_ones:
        for _ in range(MAX_CONNECTIONS // SHARDS + 2):
            conn = open_ones.enter_context(connect(cluster, connection_wait="1s"))
            conn.execute("BEGIN")
            try:
                outcomes.append(conn.execute(COUNT).fetchone())
            except psycopg.Error as error:
                outcomes.append(error)
    failed = [each for each in outcomes if each != ANSWER]
    assert failed and len(failed) < len(outcomes)
    for error in failed:
        assert isinstance(error, errors.TooManyConnections), error
        assert "takes no more connections" in error.diag.message_primary
        assert "FATAL:" in error.diag.message_detail and "53300" not in error.diag.message_detail
        assert ".c:" not in error.diag.message_detail
        assert "max_connections_per_shard" in error.diag.message_hint
    with connect(cluster) as conn:
        assert conn.execute(COUNT).fetchone() == ANSWER


def test_an_idle_session_lets_go(cluster, keys):
    read = f"SELECT v FROM t WHERE k = {keys['shard-0']}"
    with limit(cluster, 1), connect(cluster) as one, connect(cluster) as other:
        for conn in (one, other, one, other):
            assert conn.execute(read).fetchone() == (keys["shard-0"],)
            assert counted(conn) == (1, 0)
        wait_until(lambda: on_shard(cluster) == 1)


def test_a_session_at_work_lets_go_after_its_transaction(cluster, keys):
    read = f"SELECT v FROM t WHERE k = {keys['shard-0']}"
    with limit(cluster, 1), connect(cluster) as one, connect(cluster) as other:
        one.execute("BEGIN")
        one.execute(read)
        thread, outcome = run(lambda: other.execute(read).fetchone())
        wait_until(lambda: counted(one) == (1, 1))
        one.execute("COMMIT")
        thread.join(PATIENCE)
        assert outcome == [(keys["shard-0"],)]
        assert counted(one) == (1, 0)


def test_an_open_transaction_does_not_let_go(cluster, keys):
    read = f"SELECT v FROM t WHERE k = {keys['shard-0']}"
    with limit(cluster, 1), connect(cluster) as one, connect(cluster, connection_wait="700ms") as other:
        one.execute("BEGIN")
        one.execute(f"UPDATE t SET v = v WHERE k = {keys['shard-0']}")
        with pytest.raises(errors.TooManyConnections, match='too many connections to shard "shard-0"') as caught:
            other.execute(read)
        assert "shardmap.connection_wait" in caught.value.diag.message_detail
        assert "max_connections_per_shard" in caught.value.diag.message_hint
        assert counted(one) == (1, 0)
        one.execute("COMMIT")
        other.execute("SET shardmap.connection_wait = '60s'")
        assert other.execute(read).fetchone() == (keys["shard-0"],)


def test_two_that_hold_what_the_other_wants_go_on(cluster, keys):
    update = "UPDATE t SET v = v WHERE k = {}"
    with limit(cluster, 1), connect(cluster, connection_wait="1s") as one, connect(cluster, connection_wait="60s") as other:
        for conn, shard in ((one, "shard-0"), (other, "shard-1")):
            conn.execute("BEGIN")
            conn.execute(update.format(keys[shard]))
        thread, outcome = run(lambda: other.execute(update.format(keys["shard-0"])).rowcount)
        with pytest.raises(errors.TooManyConnections):
            one.execute(update.format(keys["shard-1"]))
        one.execute("ROLLBACK")
        thread.join(PATIENCE)
        assert outcome == [1]
        other.execute("COMMIT")


def test_what_is_connected_ahead_of_its_use_is_given_up(cluster, keys):
    """Else two fan-outs that found different shards full would wait for each other."""
    read = "SELECT v FROM t WHERE k = {}"
    with limit(cluster, 1), connect(cluster) as one, connect(cluster, connection_wait="60s") as fanout, \
            connect(cluster, connection_wait="60s") as other:
        one.execute("BEGIN")
        one.execute(read.format(keys["shard-0"]))
        thread, outcome = run(lambda: fanout.execute(COUNT).fetchone())
        wait_until(lambda: counted(one) == (1, 1))
        assert other.execute(read.format(keys["shard-9"])).fetchone() == (keys["shard-9"],)
        assert outcome == []
        one.execute("COMMIT")
        thread.join(PATIENCE)
        assert outcome == [ANSWER]


def test_a_session_that_takes_all_is_told_at_once(cluster, keys):
    with limit(cluster, 1), connect(cluster, connection_wait="1h") as conn:
        conn.execute("BEGIN")
        conn.execute(f"SELECT v FROM t WHERE k = {keys['shard-0']}")
        with pytest.raises(errors.TooManyConnections) as caught:
            conn.execute("SELECT shardmap.remote_execute('shard-0', 'SELECT 1', false)")
        assert "This session alone" in caught.value.diag.message_detail
        conn.execute("ROLLBACK")
        # Out of the transaction it closes the one for the other.
        conn.execute("SELECT shardmap.remote_execute('shard-0', 'SELECT 1', false)")
        assert conn.execute("SELECT count(*) FROM shardmap.run_on_shards('SELECT 1') WHERE success").fetchone() == (SHARDS,)


def test_cancel_and_termination_end_the_wait(cluster, keys):
    read = f"SELECT v FROM t WHERE k = {keys['shard-0']}"
    with limit(cluster, 1), connect(cluster) as one, connect(cluster, connection_wait="1h") as other:
        one.execute("BEGIN")
        one.execute(read)
        other.execute("SET statement_timeout = '300ms'")
        with pytest.raises(errors.QueryCanceled):
            other.execute(read)
        assert counted(one) == (1, 0)
        other.execute("SET statement_timeout = 0")
        thread, outcome = run(lambda: other.execute(read))
        wait_until(lambda: counted(one) == (1, 1))
        one.execute("SELECT pg_terminate_backend(%s)", (other.info.backend_pid,))
        thread.join(PATIENCE)
        assert isinstance(outcome[0], psycopg.OperationalError)
        wait_until(lambda: counted(one) == (1, 0))


def test_a_session_that_ends_gives_back(cluster, keys):
    read = f"SELECT v FROM t WHERE k = {keys['shard-0']}"
    with limit(cluster, 1), connect(cluster) as other, connect(cluster) as killer:
        one = connect(cluster)
        one.execute("BEGIN")
        one.execute(read)
        thread, outcome = run(lambda: other.execute(read).fetchone())
        wait_until(lambda: counted(killer) == (1, 1))
        killer.execute("SELECT pg_terminate_backend(%s)", (one.info.backend_pid,))
        thread.join(PATIENCE)
        one.close()
        assert outcome == [(keys["shard-0"],)]


def test_a_crash_gives_back(cluster, keys):
    """A session that is killed takes all others with it; nobody holds anything when the server is there again."""
    read = f"SELECT v FROM t WHERE k = {keys['shard-0']}"
    with limit(cluster, 1):
        with contextlib.suppress(psycopg.Error), connect(cluster) as victim:
            victim.execute("BEGIN")
            victim.execute(read)
            os.kill(victim.info.backend_pid, signal.SIGKILL)
            victim.execute("SELECT 1")

        def is_given_back():
            with contextlib.suppress(psycopg.OperationalError), connect(cluster) as conn:
                return counted(conn) == (0, 0)
        wait_until(is_given_back, cluster.coordinator.log_tail)
        with connect(cluster) as conn:
            assert conn.execute(read).fetchone() == (keys["shard-0"],)
            assert counted(conn) == (1, 0)


@pytest.mark.parametrize("width, at_work", [(3, 3), (1, 1), (0, SHARDS)])
@pytest.mark.parametrize("statement, rows", [("TABLE t", 1600),
                                             ("SELECT shardmap.run_on_shards('SELECT count(*) FROM public.t')", SHARDS)])
def test_width(cluster, width, at_work, statement, rows):
    """Tables are locked on all shards: who waits for them is at work."""
    waiting = ("SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, 'pg_shardmap ') AND wait_event_type = 'Lock'")
    with connect(cluster, max_fanout_width=width) as conn, contextlib.ExitStack() as locks, \
            psycopg.connect(cluster.shard_dsn(0), autocommit=True) as watch:
        for number in range(SHARDS):
            locker = locks.enter_context(psycopg.connect(cluster.shard_dsn(number)))
            locker.execute("LOCK public.t")
        thread, outcome = run(lambda: len(conn.execute(statement).fetchall()))
        wait_until(lambda: watch.execute(waiting).fetchone()[0] >= at_work)
        time.sleep(0.5)
        assert watch.execute(waiting).fetchone() == (at_work,)
        locks.close()
        thread.join(PATIENCE)
        assert outcome == [rows]


def test_width_of_two_fan_outs_in_one_statement(cluster):
    with connect(cluster, max_fanout_width=2) as conn:
        joined = ("SELECT count(*) FROM t a JOIN t b ON b.v = a.v + 1", "SELECT count(*) FROM (TABLE t UNION ALL TABLE t) u")
        assert [conn.execute(sql).fetchone() for sql in joined] == [(1599,), (3200,)]


def test_an_idle_client_keeps_no_connection(cluster, keys):
    read = f"SELECT v FROM t WHERE k = {keys['shard-0']}"
    with connect(cluster) as conn:
        assert conn.execute(read).fetchone() == (keys["shard-0"],)
        assert on_shard(cluster) == 1
        conn.execute("SET shardmap.idle_timeout = '300ms'")
        for _ in range(2):
            assert conn.execute(read).fetchone() == (keys["shard-0"],)
            wait_until(lambda: on_shard(cluster) == 0)
        with connect(cluster) as other:
            wait_until(lambda: counted(other) == (0, 0))


def test_an_open_transaction_keeps_its_connection(cluster, keys):
    with connect(cluster, idle_timeout="200ms") as conn:
        conn.execute("BEGIN")
        conn.execute(f"UPDATE t SET v = -1 WHERE k = {keys['shard-0']}")
        time.sleep(0.8)
        assert on_shard(cluster) == 1
        assert conn.execute(f"SELECT v FROM t WHERE k = {keys['shard-0']}").fetchone() == (-1,)
        conn.execute("ROLLBACK")
        wait_until(lambda: on_shard(cluster) == 0)


def test_an_error_does_not_keep_a_connection(cluster, keys):
    """An error disables the timers of a session."""
    with connect(cluster, idle_timeout="300ms") as conn:
        with pytest.raises(errors.DivisionByZero):
            conn.execute(f"SELECT v / 0 FROM t WHERE k = {keys['shard-0']}")
        wait_until(lambda: on_shard(cluster) == 0)
        conn.execute(f"SELECT v FROM t WHERE k = {keys['shard-0']}")
        with pytest.raises(errors.DivisionByZero):
            conn.execute("SELECT 1 / 0")
        wait_until(lambda: on_shard(cluster) == 0)


def test_a_server_without_timeout_keeps_it(cluster, keys):
    with connect(cluster, idle_timeout=0) as conn:
        conn.execute(f"SELECT v FROM t WHERE k = {keys['shard-0']}")
        time.sleep(0.6)
        assert on_shard(cluster) == 1
