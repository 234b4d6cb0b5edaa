"""A process or a server is killed in the middle of a move: the next run goes on, and nothing is lost or doubled."""

import threading
import time

import psycopg
import pytest
from tenants import plan, run

POINTS = ("move_hidden", "move_logging", "move_batch:4", "prepare_sent", "after_local_commit", "move_caught_up", "move_verified", "move_fenced",
          "move_flip", "move_flipped", "move_cleaning:2", "move_done")


def wait_for(server):
    deadline = time.monotonic() + 60
    while True:
        try:
            return server.psql("SELECT 1")
        except Exception:  # pylint: disable=broad-except
            assert time.monotonic() < deadline, server.log_tail()
            time.sleep(0.1)


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
    with tenants.connect(shardmap__crash_point=point) as runner, pytest.raises(psycopg.OperationalError):
        run(runner, number)
    wait_for(tenants.cluster.coordinator)
    check(tenants, tenant, finish(tenants, number))


@pytest.mark.parametrize("shard", [2, 1], ids=["source", "target"])
@pytest.mark.parametrize("seconds", [0.1, 0.3])
def test_a_shard_is_killed(tenants, shard, seconds):
    tenant = tenants.fresh(2)
    with tenants.connect(shardmap__move_batch_rows="1") as conn:
        number = plan(conn, tenant, 1)
        failures = []

        def work():
            try:
                run(conn, number)
            except psycopg.Error as error:
                failures.append(error)
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(seconds)
        server = tenants.cluster.shard_server(shard)
        server.kill()
        thread.join()
        server.start()
    assert failures, "the move was over before"
    check(tenants, tenant, finish(tenants, number))
