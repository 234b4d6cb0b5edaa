"""A move is taken back after the map has changed: what was written before and after is all there, once."""

import psycopg
import pytest
from patience import crashing
from test_moves_under_load import check as check_load, start
from tenants import plan, run
from waiting import wait_for

POINTS = ("move_reversed", "move_caught_up", "move_verified", "move_fenced", "move_flip", "prepare_sent", "after_local_commit",
          "move_rollback", "move_rollback:3", "move_done")


def flip(tenants, tenant, number):
    """Runs a move until its target owns the rows."""
    with tenants.connect(shardmap__crash_point="move_flipped=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    with tenants.connect() as conn:
        assert tenants.move(conn, number)["state"] == "flipped"
        assert conn.execute("SELECT shard_for(%s)", (tenant,)).fetchone() == ("shard-1",)


def write_after(conn, tenant):
    """Every kind of change, also twice of the same row."""
    conn.execute("UPDATE account SET balance = id + 1 WHERE tenant = %s AND id <= 5", (tenant,))
    conn.execute("UPDATE account SET balance = balance + 10 WHERE tenant = %s AND id = 3", (tenant,))
    conn.execute("DELETE FROM account WHERE tenant = %s AND id BETWEEN 6 AND 8", (tenant,))
    conn.execute("INSERT INTO account (tenant, id, balance) VALUES (%s, 8, 80), (%s, 100, 100)", (tenant, tenant))
    conn.execute("UPDATE account SET id = 101 WHERE tenant = %s AND id = 40", (tenant,))
    conn.execute("DELETE FROM entry WHERE tenant = %s", (tenant,))
    return sorted([(id, 0) for id in range(9, 40)] + [(1, 2), (2, 3), (3, 14), (4, 5), (5, 6), (8, 80), (100, 100), (101, 0)])


def check(tenants, tenant, number, rows):
    with tenants.connect() as conn:
        assert tenants.move(conn, number)["state"] == "rolled_back"
        assert conn.execute("SELECT shard_for(%s)", (tenant,)).fetchone() == ("shard-0",)
        assert conn.execute("SELECT id, balance FROM account WHERE tenant = %s ORDER BY id", (tenant,)).fetchall() == rows
        assert conn.execute("SELECT count(*) FROM shardmap.hidden_rows").fetchone() == (0,)
    assert tenants.stored(tenant) == {0: (len(rows), 0)} and tenants.left_behind() == []


def test_what_was_written_after_the_flip_goes_back(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    flip(tenants, tenant, number)
    rows = write_after(conn, tenant)
    assert conn.execute("SELECT shardmap.rollback_move(%s)", (number,)).fetchone() == ("flipped",)
    run(conn, number)
    check(tenants, tenant, number, rows)


@pytest.mark.parametrize("point", POINTS)
def test_the_session_is_killed_on_the_way_back(tenants, point):
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
        flip(tenants, tenant, number)
        rows = write_after(conn, tenant)
        conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
    with crashing(tenants.cluster.coordinator), tenants.connect(shardmap__crash_point=point) as runner, pytest.raises(psycopg.OperationalError):
        run(runner, number)
    with tenants.connect() as conn:
        run(conn, number)
    check(tenants, tenant, number, rows)


def test_the_session_is_killed_when_the_log_for_the_way_back_is_made(tenants):
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
    with crashing(tenants.cluster.coordinator), tenants.connect(shardmap__crash_point="move_logging_back") as runner, pytest.raises(psycopg.OperationalError):
        run(runner, number)
    flip(tenants, tenant, number)
    with tenants.connect() as conn:
        rows = write_after(conn, tenant)
        conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
        run(conn, number)
    check(tenants, tenant, number, rows)


@pytest.mark.parametrize("point", ["move_reversed", "move_caught_up", "move_fenced", "move_flip", "move_rollback:2", "move_done"])
def test_nobody_wavers_on_the_way_back(tenants, conn, crew, point):
    """Under load, and broken off once."""
    tenant = tenants.fresh(0)
    writers, readers = start(crew, tenants, tenant)
    number = plan(conn, tenant, 1)
    flip(tenants, tenant, number)
    before = [sum(writer.added.values()) for writer in writers]
    wait_for(lambda: crew.failures or all(sum(writer.added.values()) > one + 3 for writer, one in zip(writers, before)))
    conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
    with tenants.connect(shardmap__crash_point=f"{point}=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    run(conn, number)
    assert tenants.move(conn, number)["state"] == "rolled_back"
    wait_for(lambda: crew.failures or all(reader.rounds > 3 for reader in readers))
    crew.stop()
    check_load(tenants, conn, tenant, writers)
    assert set(tenants.stored(tenant)) == {0} and tenants.left_behind() == []


def test_the_way_back_can_be_given_up_and_taken_again(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    flip(tenants, tenant, number)
    conn.execute("UPDATE account SET balance = 1 WHERE tenant = %s AND id <= 20", (tenant,))
    conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
    with tenants.connect(shardmap__crash_point="move_verified=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    assert conn.execute("SELECT state, reversed FROM shardmap.moves WHERE id = %s", (number,)).fetchone() == ("verifying", True)
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    flip(tenants, tenant, number)  # it is again
    rows = write_after(conn, tenant)
    rows = [(id, 1 if balance == 0 and id <= 20 else balance) for id, balance in rows]
    conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
    run(conn, number)
    check(tenants, tenant, number, rows)


def test_the_way_back_is_given_up_for_good(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    flip(tenants, tenant, number)
    rows = write_after(conn, tenant)
    conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
    with tenants.connect(shardmap__crash_point="move_fenced=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    run(conn, number)
    assert tenants.move(conn, number)["state"] == "done"
    assert tenants.stored(tenant) == {1: (len(rows), 0)} and tenants.left_behind() == []
    assert conn.execute("SELECT id, balance FROM account WHERE tenant = %s ORDER BY id", (tenant,)).fetchall() == rows


def test_before_the_flip_it_is_given_up(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point="move_verified=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
    run(conn, number)
    assert tenants.move(conn, number)["state"] == "rolled_back" and tenants.stored(tenant) == {0: (40, 40)}


def test_it_is_too_late_when_cleaning_has_begun(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point="move_cleaning:2=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    for state in ("cleaning", "done"):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=f"cannot be rolled back any more: it is {state}") as error:
            conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
        assert "another move" in error.value.diag.message_hint
        run(conn, number)
    assert tenants.stored(tenant) == {1: (40, 40)}


def test_a_flipped_move_says_how_it_is_taken_back(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    flip(tenants, tenant, number)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as error:
        conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    assert "rollback_move" in error.value.diag.message_hint
    run(conn, number)


def test_a_worker_takes_it_back(tenants, conn):
    with tenants.connect() as setting:
        setting.execute("ALTER SYSTEM SET shardmap.cleanup_delay = '1h'")
        setting.execute("SELECT pg_reload_conf()")
        try:
            tenant = tenants.fresh(0)
            number = plan(conn, tenant, 1)
            conn.execute("SELECT shardmap.start_move(%s)", (number,))
            wait_for(lambda: tenants.move(conn, number)["state"] == "flipped")
            rows = write_after(conn, tenant)
            conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
            wait_for(lambda: tenants.move(conn, number)["state"] == "rolled_back")
        finally:
            setting.execute("ALTER SYSTEM RESET shardmap.cleanup_delay")
            setting.execute("SELECT pg_reload_conf()")
    check(tenants, tenant, number, rows)


def test_rows_changed_behind_our_back_stop_the_way_back(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    flip(tenants, tenant, number)
    tenants.on_shard(0, "UPDATE account SET note = 'x' WHERE tenant = %s AND id = 7 RETURNING 1", tenant)
    conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
    with pytest.raises(psycopg.errors.DataCorrupted, match="differ on shards"):
        run(conn, number)
    assert conn.execute("SELECT shard_for(%s)", (tenant,)).fetchone() == ("shard-1",)
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    run(conn, number)
    assert tenants.move(conn, number)["state"] == "done" and tenants.stored(tenant) == {1: (40, 40)}


def test_a_move_is_verified_on_its_way_back(tenants, conn):
    """What is not applied on the source yet is no difference."""
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    flip(tenants, tenant, number)
    rows = write_after(conn, tenant)
    conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
    with tenants.connect(shardmap__crash_point="move_reversed=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    with tenants.connect(shardmap__crash_point="move_caught_up=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    assert conn.execute("SELECT reversed FROM shardmap.moves WHERE id = %s", (number,)).fetchone() == (True,)
    assert conn.execute("SELECT DISTINCT finding FROM shardmap.verify_move(%s)", (number,)).fetchall() == [("equal",)]
    run(conn, number)
    check(tenants, tenant, number, rows)
