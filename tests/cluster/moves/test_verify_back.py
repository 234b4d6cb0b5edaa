"""Both sides of a move compared after its flip, on its way back, and when that is over."""

import pytest
from patience import Running, lock_waiters, wait_until
from psycopg import connect, errors
from tenants import plan, run
from test_moves_rollback import flip, write_after
from test_verify_move import EQUAL, verify


def run_to(tenants, number, point):
    with tenants.connect(shardmap__crash_point=f"{point}=error") as runner, pytest.raises(errors.Error, match="crash point"):
        run(runner, number)


@pytest.fixture
def flipped(tenants):
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
    flip(tenants, tenant, number)
    return tenant, number


def test_what_was_written_since_the_flip_is_no_difference(tenants, conn, flipped):
    tenant, number = flipped
    write_after(conn, tenant)
    assert verify(conn, number) == EQUAL
    # The source's row is what the way back would bring.
    tenants.cluster.shard_psql(0, f"UPDATE account SET note = 'bad' WHERE tenant = {tenant} AND id = 20")
    assert verify(conn, number) == [("account", "changed", f"({tenant},20)", 1, 1), EQUAL[1]]
    run(conn, number)


@pytest.mark.parametrize("point", ["move_caught_up", "move_verified", "move_fenced"])
def test_on_the_way_back(tenants, conn, flipped, point):
    tenant, number = flipped
    write_after(conn, tenant)
    conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
    run_to(tenants, number, point)
    assert conn.execute("SELECT reversed FROM shardmap.moves WHERE id = %s", (number,)).fetchone() == (True,)
    assert verify(conn, number) == EQUAL
    tenants.cluster.shard_psql(0, f"DELETE FROM account WHERE tenant = {tenant} AND id = 20")
    assert verify(conn, number) == [("account", "missing", f"({tenant},20)", 1, 0), EQUAL[1]]
    tenants.cluster.shard_psql(0, f"INSERT INTO account SELECT {tenant}, 20, 0, repeat(E'\\t\\\\N\\n', 20 % 3)")
    assert verify(conn, number) == EQUAL
    run_to(tenants, number, "move_rollback")
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match=f"move {number} is rolling back"):
        verify(conn, number)
    run(conn, number)
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match=f"move {number} is rolled back"):
        verify(conn, number)


def test_it_turns_round_meanwhile(tenants, conn, flipped):
    _, number = flipped
    with connect(tenants.cluster.shard_dsn(1)) as holder:
        holder.execute("LOCK TABLE account")
        with tenants.connect() as other:
            verifying = Running(lambda: verify(other, number))
            wait_until(lambda: lock_waiters(holder))
            conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
            run_to(tenants, number, "move_caught_up")
            holder.rollback()
            with pytest.raises(errors.SerializationFailure, match="has become catching up, on its way back, while"):
                verifying.end()
    run(conn, number)
