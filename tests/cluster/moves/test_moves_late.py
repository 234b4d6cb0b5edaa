"""A run is cut off from a shard that does not know: what it has begun there, or what of it comes late, is of no effect once another
run goes on."""

import contextlib

import psycopg
import pytest
from patience import Running, wait_until
from proxy import TO_SERVER, Proxy
from tenants import plan, run

LONG = "120s"  # for what would wait for ever


@contextlib.contextmanager
def through_proxy(tenants, shard):
    """The coordinator's way to that shard."""
    port = tenants.cluster.shard_server(shard).port
    lead = f"ALTER SERVER \"shard-{shard}\" OPTIONS (SET port '%s')"
    with Proxy(port=port) as proxy:
        tenants.cluster.psql(lead % proxy.port)
        try:
            yield proxy
        finally:
            tenants.cluster.psql(lead % port)


def run_to(tenants, number, point, **settings):
    with tenants.connect(shardmap__crash_point=f"{point}=error", **settings) as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)


def sessions(tenants, shard, query):
    """Those on the shard's database whose last statement was like that."""
    return [pid for (pid,) in tenants.on_shard(shard, "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND pid <> pg_backend_pid() AND query LIKE %s", query)]


def is_gone(tenants, shard, pid):
    return not tenants.on_shard(shard, "SELECT FROM pg_stat_activity WHERE pid = %s", pid)


def check(tenants, conn, tenant, number, rows=(40, 40)):
    assert tenants.move(conn, number)["state"] == "done"
    assert tenants.stored(tenant) == {1: rows} and tenants.left_behind() == []


def test_a_statement_comes_after_the_flip(tenants, conn):
    """What deletes rows on the target, under the fence, to write them anew: it commits by itself."""
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    run_to(tenants, number, "move_fenced")
    conn.execute("UPDATE account SET balance = 5 WHERE tenant = %s AND id <= 3", (tenant,))
    with through_proxy(tenants, 1) as proxy:
        late = proxy.on("hold", TO_SERVER, types="Q", text=b"DELETE FROM ONLY public.account t USING")
        with tenants.connect(shardmap__fence_timeout="100s", deadlock_timeout="100s") as runner:
            dead = Running(lambda: run(runner, number))
            late.wait()
            (pid,) = sessions(tenants, 1, f"%COPY shardmap_move_{number}.changes_1%")
            conn.execute("SELECT pg_terminate_backend(%s)", (runner.info.backend_pid,))
            with pytest.raises(psycopg.OperationalError):
                dead.end()
        wait_until(lambda: not conn.execute("SELECT FROM shardmap._move_locks(3)").fetchall())
        run_to(tenants, number, "move_flipped")
        proxy.release(late)
        wait_until(lambda: is_gone(tenants, 1, pid))
        want = [(id, 5 if id <= 3 else 0) for id in range(1, 41)]
        assert tenants.on_shard(1, "SELECT id, balance FROM account WHERE tenant = %s ORDER BY id", tenant) == want
        run(conn, number)
    check(tenants, conn, tenant, number)


# Where the connection is lost after what: the shard, the statement, and how far the move has come before.
CUTS = {
    "the fence": (0, b" IN SHARE MODE", "move_verified"),
    "rows copied": (1, b"COPY public.account", "move_logging"),
    "rows of the log": (1, b"COPY shardmap_move_", "move_copied"),
    "a snapshot": (0, b"pg_current_snapshot()", "move_copied"),
    "rows deleted": (0, b"gone AS (DELETE", "move_flipped"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_session_is_left_in_a_transaction(tenants, cut):
    """The server keeps it: as if the network were gone."""
    shard, statement, before = CUTS[cut]
    tenant = tenants.fresh(0)
    with tenants.connect(statement_timeout=LONG) as conn:
        number = plan(conn, tenant, 1)
        run_to(tenants, number, before)
        conn.execute("UPDATE account SET balance = 5 WHERE tenant = %s AND id <= 3", (tenant,))
        with through_proxy(tenants, shard) as proxy, tenants.connect(statement_timeout=LONG) as runner:
            lost = proxy.on("cut", TO_SERVER, types="Q", text=statement, after=True, sides="client")
            with pytest.raises(psycopg.Error):
                run(runner, number)
            lost.wait()
            run(runner, number)
        check(tenants, conn, tenant, number)
        assert conn.execute("SELECT sum(balance) FROM account WHERE tenant = %s", (tenant,)).fetchone() == (15,)


@pytest.mark.parametrize(("shard", "prepared"), [(0, 0), (1, 0), (1, 1), (1, 2)])
def test_a_step_is_committed_but_not_yet_on_a_shard(tenants, conn, shard, prepared):
    """The connection is lost before it hears COMMIT PREPARED: the run goes on when it is committed there, and not before."""
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with through_proxy(tenants, shard) as proxy, tenants.connect() as runner:
        lost = proxy.on("reset", TO_SERVER, types="Q", text=b"COMMIT PREPARED", skip=prepared)
        run(runner, number)
        assert lost.hit.is_set()
    check(tenants, conn, tenant, number)


def test_a_run_is_held_up_by_what_it_may_not_end(tenants, conn):
    """The session of another user."""
    number = plan(conn, tenants.fresh(0), 1)
    run_to(tenants, number, "move_verified")
    tenants.cluster.shard_psql(1, "CREATE ROLE another SUPERUSER LOGIN")
    try:
        with psycopg.connect(tenants.cluster.shard_dsn(1, user="another")) as other:
            (run_table,) = other.execute(f"SELECT relname FROM pg_class WHERE relnamespace = 'shardmap_move_{number}_run'::regnamespace").fetchone()
            other.execute(f"LOCK TABLE shardmap_move_{number}_run.{run_table} IN ROW SHARE MODE")
            with pytest.raises(psycopg.errors.ObjectInUse, match=f"a run of move {number} before this one"):
                run(conn, number)
            assert "before this one" in tenants.move(conn, number)["last_error"]
    finally:
        tenants.cluster.shard_psql(1, "DROP ROLE another")
    run(conn, number)
    assert tenants.move(conn, number)["state"] == "done"
