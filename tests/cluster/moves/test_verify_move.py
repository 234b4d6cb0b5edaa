"""Both sides of a move compared while it is under way, in each state; and audits while rows are on two shards."""

import threading

import psycopg
import pytest
from psycopg import errors
from tenants import plan, run


def stopped_at(tenants, point, tenant=None):
    """A move from shard 0 to shard 1 that has come so far; the tenant and its number."""
    tenant = tenant or tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point=f"{point}=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    return tenant, number


def verify(conn, number):
    return conn.execute("SELECT relation::text, finding, row_id, source_rows, target_rows FROM shardmap.verify_move(%s)", (number,)).fetchall()


EQUAL = [("account", "equal", None, None, None), ("entry", "equal", None, None, None)]
STATES = {"move_batch:4": ("copying", [("account", "equal"), ("entry", "not copied")]), "move_caught_up": ("catching_up", None),
          "move_verified": ("verifying", None), "move_fenced": ("fencing", None), "move_flipped": ("flipped", None)}


@pytest.mark.parametrize("point", STATES)
def test_equal_in_every_state(tenants, conn, point):
    _, number = stopped_at(tenants, point)
    state, found = STATES[point]
    assert tenants.move(conn, number)["state"] == state
    assert [row[:2] for row in verify(conn, number)] == (found or [row[:2] for row in EQUAL])
    run(conn, number)
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="is done"):
        verify(conn, number)


def test_one_bad_row_is_named(tenants, conn):
    tenant, number = stopped_at(tenants, "move_verified")
    for sql, undo, want in (
            (f"UPDATE account SET note = 'x' WHERE tenant = {tenant} AND id = 7",
             f"UPDATE account SET note = repeat(E'\\t\\\\N\\n', 7 % 3) WHERE tenant = {tenant} AND id = 7", ("changed", 1, 1)),
            (f"DELETE FROM account WHERE tenant = {tenant} AND id = 7",
             f"INSERT INTO account SELECT {tenant}, 7, 0, repeat(E'\\t\\\\N\\n', 7 % 3)", ("missing", 1, 0)),
            (f"INSERT INTO account VALUES ({tenant}, 700, 0, 'x')", f"DELETE FROM account WHERE tenant = {tenant} AND id = 700", ("extra", 0, 1))):
        tenants.cluster.shard_psql(1, sql)
        row = f"({tenant},{700 if want[0] == 'extra' else 7})"
        assert verify(conn, number) == [("account", want[0], row, want[1], want[2]), EQUAL[1]]
        tenants.cluster.shard_psql(1, undo)
    assert verify(conn, number) == EQUAL
    run(conn, number)


def test_what_is_written_meanwhile_is_no_difference(tenants, conn):
    """Changes that are logged and not copied anew yet."""
    tenant, number = stopped_at(tenants, "move_verified")
    conn.execute("UPDATE account SET balance = balance + 1 WHERE tenant = %s AND id < 5", (tenant,))
    conn.execute("DELETE FROM account WHERE tenant = %s AND id = 9", (tenant,))
    conn.execute("INSERT INTO account VALUES (%s, 900, 0)", (tenant,))
    assert verify(conn, number) == EQUAL
    run(conn, number)
    assert tenants.stored(tenant) == {1: (40, 40)}


def test_while_it_runs_and_is_written_to(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    stop = threading.Event()

    def write():
        with tenants.connect() as writer:
            while not stop.is_set():
                writer.execute("UPDATE account SET balance = balance + 1 WHERE tenant = %s AND id = 3", (tenant,))

    def move():
        with tenants.connect() as runner:
            run(runner, number)

    threads = [threading.Thread(target=work) for work in (write, move)]
    for thread in threads:
        thread.start()
    found = set()
    try:
        while threads[1].is_alive():
            try:
                found |= {(row[1], tenants.move(conn, number)["state"]) for row in verify(conn, number)}
            except (errors.ObjectNotInPrerequisiteState, errors.SerializationFailure):
                pass  # planned, done, or flipped meanwhile
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert {each for each in found if each[0] not in ("equal", "not copied") and each[1] not in ("flipped", "cleaning", "done")} == set()


@pytest.mark.parametrize("point", STATES)
def test_audit_and_verify_set_moving_rows_apart(tenants, conn, point):
    _, number = stopped_at(tenants, point)
    assert conn.execute("SELECT kind, detail FROM shardmap.audit('main', 'full')").fetchall() == []
    for table in ("account", "entry"):
        assert {row[0] for row in conn.execute("SELECT finding FROM shardmap.verify(%s)", (table,)).fetchall()} == {"clean"}
    run(conn, number)
    assert conn.execute("SELECT kind, detail FROM shardmap.audit('main', 'full')").fetchall() == []


def test_refusals(tenants, conn):
    with pytest.raises(errors.UndefinedObject):
        conn.execute("SELECT shardmap.verify_move(-1)")
    number = plan(conn, tenants.fresh(0), 1)
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="is planned"):
        verify(conn, number)
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    run(conn, number)
