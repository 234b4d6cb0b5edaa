"""A process or a server is killed in the middle of a move: the next run goes on, and nothing is lost or doubled."""

import contextlib
import time

import psycopg
import pytest
from patience import Running, crashing, lock_waiters, wait_until
from tenants import plan, run

POINTS = ("move_hidden", "move_logging", "move_batch:4", "prepare_sent", "after_local_commit", "move_caught_up", "move_verified", "move_fenced",
          "move_flip", "move_flipped", "move_cleaning:2", "move_done")


def finish(tenants, number):
    """Runs the move to its end, by as many runs as it takes a restarted server to be there."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with tenants.connect() as conn:
                run(conn, number)
                return tenants.move(conn, number)
        except psycopg.Error:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def check(tenants, tenant, move):
    assert move["state"] == "done" and move["rows_recopied"] <= 7
    assert tenants.stored(tenant) == {1: (40, 40)} and tenants.left_behind() == []
    with tenants.connect() as conn:
        assert conn.execute("SELECT count(*), sum(twice) FROM account WHERE tenant = %s", (tenant,)).fetchone() == (40, 0)
        assert conn.execute("SELECT shard_for(%s)", (tenant,)).fetchone() == ("shard-1",)


@pytest.mark.parametrize("point", POINTS)
def test_the_session_is_killed(tenants, point):
    tenant = tenants.fresh(2)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
    with crashing(tenants.cluster.coordinator), tenants.connect(shardmap__crash_point=point) as runner, pytest.raises(psycopg.OperationalError):
        run(runner, number)
    check(tenants, tenant, finish(tenants, number))


# Where a lock holds the move up: the shard, and what is locked there.
HOLDS = {
    "first table": (1, "LOCK TABLE account IN SHARE MODE"),
    "last table": (1, "LOCK TABLE entry IN SHARE MODE"),
    "clean-up": (2, "SELECT FROM account WHERE tenant = {tenant} AND id = 40 FOR UPDATE"),
}


@pytest.mark.parametrize(("shard", "hold"), [(2, "first table"), (1, "first table"), (2, "last table"), (1, "last table"), (2, "clean-up")])
def test_a_shard_is_killed(tenants, shard, hold):
    tenant = tenants.fresh(2)
    with tenants.connect(shardmap__move_batch_rows="1") as conn:
        number, (place, lock) = plan(conn, tenant, 1), HOLDS[hold]
        server = tenants.cluster.shard_server(shard)
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(tenants.cluster.shard_dsn(place)) as holder:
            holder.execute(lock.format(tenant=tenant))
            move = Running(lambda: run(conn, number))
            wait_until(lambda: lock_waiters(holder) or move.is_over())
            assert not move.is_over(), "the lock does not hold it up"
            server.kill()
        try:
            with pytest.raises(psycopg.Error):
                move.end()
        finally:
            server.start()
    check(tenants, tenant, finish(tenants, number))
