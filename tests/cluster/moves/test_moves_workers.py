"""Background workers run moves, go on after every failure, and stop when they are told to."""

import concurrent.futures
import os
import signal

import psycopg
import pytest
from tenants import plan, run
from waiting import wait_for, wait_for_server

WORKERS = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_shardmap mover' AND datname = current_database()"


def state(tenants, number):
    with tenants.connect() as conn:
        return tenants.move(conn, number)["state"]


def wait_for_state(tenants, number, *states):
    wait_for(lambda: state(tenants, number) in states, lambda: ask(tenants, number))


def ask(tenants, number):
    with tenants.connect() as conn:
        return conn.execute("SELECT state, wish, attempts, next_attempt, last_error FROM shardmap.moves WHERE id = %s", (number,)).fetchone()


def check(tenants, tenant):
    assert tenants.stored(tenant) == {1: (40, 40)} and tenants.left_behind() == []
    with tenants.connect() as conn:
        assert conn.execute("SELECT shard_for(%s)", (tenant,)).fetchone() == ("shard-1",)
        assert conn.execute("SELECT count(*), sum(twice) FROM account WHERE tenant = %s", (tenant,)).fetchone() == (40, 0)


@pytest.fixture
def configured(tenants):
    """Changes settings of the server for a test."""
    names = []

    def change(**settings):
        with tenants.connect() as conn:
            for name, value in settings.items():
                names.append(name.replace("__", "."))
                conn.execute(f"ALTER SYSTEM SET {names[-1]} = '{value}'")
            conn.execute("SELECT pg_reload_conf()")
    yield change
    wait_for_server(tenants)
    with tenants.connect() as conn:
        for name in names:
            conn.execute(f"ALTER SYSTEM RESET {name}")
        conn.execute("SELECT pg_reload_conf()")


def test_a_worker_runs_a_move(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    assert conn.execute("SELECT shardmap.start_move(%s)", (number,)).fetchone() == ("planned",)
    wait_for_state(tenants, number, "done")
    check(tenants, tenant)
    assert tenants.move(conn, number)["last_error"] is None
    assert conn.execute("SELECT shardmap.start_move(%s)", (number,)).fetchone() == ("done",)


def test_no_more_workers_than_allowed(tenants, conn, configured):
    """Moves that wait for a slot get one when another has ended."""
    configured(shardmap__max_move_workers=1, shardmap__cleanup_delay="1h")
    movers = [tenants.fresh(0) for _ in range(3)]
    numbers = [plan(conn, tenant, 1) for tenant in movers]
    assert conn.execute("SELECT move, state FROM shardmap.start_moves()").fetchall() == [(number, "planned") for number in numbers]
    # Flipped, the first waits, and holds its slot.
    wait_for(lambda: sorted(state(tenants, number) for number in numbers) == ["flipped", "planned", "planned"],
             lambda: [ask(tenants, number) for number in numbers])
    assert len(conn.execute(WORKERS).fetchall()) == 1
    configured(shardmap__cleanup_delay="0")
    for number, tenant in zip(numbers, movers):
        wait_for_state(tenants, number, "done")
        assert tenants.stored(tenant) == {1: (40, 40)}


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_a_worker_that_dies_is_started_again(tenants, conn, configured, how):
    configured(shardmap__cleanup_delay="1h")
    tenant = tenants.fresh(2)
    number = plan(conn, tenant, 1)
    conn.execute("SELECT shardmap.start_move(%s)", (number,))
    wait_for_state(tenants, number, "flipped")
    before = conn.execute(WORKERS).fetchone()[0]
    if how == "kill":
        os.kill(before, signal.SIGKILL)
    else:
        conn.execute("SELECT pg_terminate_backend(%s)", (before,))

    def another():
        try:
            with tenants.connect() as again:
                return [pid for pid, in again.execute(WORKERS) if pid != before]
        except psycopg.OperationalError:
            return None  # the server may not have noticed yet that it is to start anew
    wait_for(another)
    configured(shardmap__cleanup_delay="0")
    wait_for_state(tenants, number, "done")
    check(tenants, tenant)


@pytest.mark.parametrize("point", ["move_batch:4", "move_fenced", "move_flip", "move_cleaning:2", "move_done"])
def test_the_server_crashes_in_a_step(tenants, conn, configured, point):
    tenant = tenants.fresh(2)
    number = plan(conn, tenant, 1)
    configured(shardmap__crash_point=point)
    try:
        conn.execute("SELECT shardmap.start_move(%s)", (number,))
        with pytest.raises(psycopg.OperationalError):
            wait_for(lambda: conn.execute("SELECT pg_sleep(0.1)").fetchone() is None)
    finally:
        wait_for_server(tenants)
        with tenants.connect() as again:
            again.execute("ALTER SYSTEM RESET shardmap.crash_point")
            again.execute("SELECT pg_reload_conf()")
    wait_for(lambda: wait_for_server(tenants) and state(tenants, number) == "done", lambda: ask(tenants, number))
    check(tenants, tenant)


def test_the_server_is_restarted(tenants, conn, configured):
    configured(shardmap__cleanup_delay="1h")
    tenant = tenants.fresh(2)
    number = plan(conn, tenant, 1)
    conn.execute("SELECT shardmap.start_move(%s)", (number,))
    wait_for_state(tenants, number, "flipped")
    tenants.cluster.coordinator.restart()
    configured(shardmap__cleanup_delay="0")
    wait_for_state(tenants, number, "done")
    check(tenants, tenant)


def test_a_shard_that_is_away_is_waited_for(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    server = tenants.cluster.shard_server(1)
    server.kill()
    try:
        conn.execute("SELECT shardmap.start_move(%s)", (number,))
        wait_for(lambda: (ask(tenants, number)[2] or 0) >= 2, lambda: ask(tenants, number))
        _, _, attempts, again, error = ask(tenants, number)
        assert "shard-1" in error and again is not None and attempts >= 2
    finally:
        server.start()
    conn.execute("SELECT shardmap.start_move(%s)", (number,))
    wait_for_state(tenants, number, "done")
    check(tenants, tenant)


def test_pause_resume_and_cancel(tenants, conn, configured):
    configured(shardmap__crash_point="move_caught_up=error")
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    conn.execute("SELECT shardmap.start_move(%s)", (number,))
    wait_for(lambda: (ask(tenants, number)[4] or "").endswith('crash point "move_caught_up"'), lambda: ask(tenants, number))
    conn.execute("SELECT shardmap.pause_move(%s)", (number,))
    wait_for(lambda: conn.execute(WORKERS).fetchall() == [])
    configured(shardmap__crash_point="")
    assert state(tenants, number) == "catching_up"
    # A paused move can be given up: a worker takes back what it has done.
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    wait_for_state(tenants, number, "rolled_back")
    assert tenants.stored(tenant) == {0: (40, 40)} and tenants.left_behind() == []
    number = plan(conn, tenant, 1)
    conn.execute("SELECT shardmap.pause_move(%s)", (number,))
    conn.execute("SELECT shardmap.start_move(%s)", (number,))
    wait_for_state(tenants, number, "done")


def test_two_runners_exclude_each_other(tenants, conn, configured):
    configured(shardmap__cleanup_delay="1h")
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    conn.execute("SELECT shardmap.start_move(%s)", (number,))
    wait_for_state(tenants, number, "flipped")
    worker = conn.execute(WORKERS).fetchone()[0]
    with pytest.raises(psycopg.errors.ObjectInUse, match=f"move {number} is being run by another session") as error:
        run(conn, number)
    assert str(worker) in error.value.diag.message_detail
    assert ask(tenants, number)[4] is None
    configured(shardmap__cleanup_delay="0")
    wait_for_state(tenants, number, "done")


def test_a_run_that_is_cancelled_lets_others_run(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__cleanup_delay="1h") as runner, concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, runner, number)
        wait_for_state(tenants, number, "flipped")
        runner.cancel()
        with pytest.raises(psycopg.errors.QueryCanceled):
            running.result()
        run(conn, number)  # while that session is still there
    check(tenants, tenant)


def test_drop_extension_does_not_wait_for_a_worker(tenants, configured):
    """In a database of its own: the worker's next step finds nothing, and that is all."""
    configured(shardmap__cleanup_delay="1h")
    server = tenants.cluster.coordinator
    server.psql("CREATE DATABASE apart")
    try:
        dsn = server.dsn("apart")
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("CREATE EXTENSION pg_shardmap CASCADE")
            for shard in range(2):
                shard_server = tenants.cluster.shard_server(shard)
                shard_server.psql("CREATE DATABASE apart")
                conn.execute("SELECT shardmap.add_shard(%s, '127.0.0.1', %s, 'apart')", (f"s{shard}", shard_server.port))
                conn.execute(f"CREATE USER MAPPING FOR PUBLIC SERVER s{shard} OPTIONS (user 'postgres')")
            conn.execute("CREATE TABLE t (k int PRIMARY KEY); SELECT shardmap.distribute_table('t', 'k'); INSERT INTO t SELECT generate_series(1, 50)")
            owner = conn.execute("SELECT shard_for(1)").fetchone()[0]
            conn.execute("SELECT shardmap.start_move(move) FROM shardmap.move_key(1, %s)", ("s1" if owner == "s0" else "s0",))
            wait_for(lambda: conn.execute("SELECT state FROM shardmap.moves").fetchone() == ("flipped",))
            assert len(conn.execute(WORKERS).fetchall()) == 1
            conn.execute("DROP EXTENSION pg_shardmap CASCADE")
            wait_for(lambda: conn.execute(WORKERS).fetchall() == [])
    finally:
        server.psql("DROP DATABASE apart WITH (FORCE)")
        for shard in range(2):
            tenants.cluster.shard_server(shard).psql("DROP DATABASE IF EXISTS apart WITH (FORCE)")
