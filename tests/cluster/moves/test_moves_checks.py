"""What could stand in the way of a move is found before its first byte, and named."""

import psycopg
import pytest
from tenants import plan, run
from waiting import wait_for


def give_up(tenants, conn, number):
    assert tenants.move(conn, number)["state"] == "planned" and tenants.left_behind() == []
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    run(conn, number)


def test_a_target_without_room(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    size = tenants.on_shard(1, "SELECT pg_database_size(current_database())")[0][0]
    conn.execute("SELECT shardmap.set_shard_capacity('shard-1', %s)", (size,))
    with pytest.raises(psycopg.errors.DiskFull, match=f'shard "shard-1" has no room for the rows of move {number}') as error:
        run(conn, number)
    assert "set_shard_capacity('shard-1', ..)" in error.value.diag.message_hint
    conn.execute("SELECT shardmap.set_shard_capacity('shard-1', %s)", (size + 100_000_000,))
    run(conn, number)
    assert tenants.stored(tenant) == {1: (40, 40)}
    conn.execute("SELECT shardmap.set_shard_capacity('shard-1', NULL)")
    for arguments, message in (("'shard-9', 1", "does not exist"), ("'shard-1', 0", "invalid capacity")):
        with pytest.raises(psycopg.Error, match=message):
            conn.execute(f"SELECT shardmap.set_shard_capacity({arguments})")


@pytest.mark.parametrize("shard", [0, 1], ids=["source", "target"])
@pytest.mark.parametrize("prepared", [False, True], ids=["session", "prepared"])
def test_old_transactions_that_have_written_are_named(tenants, conn, shard, prepared):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    conn.execute("CREATE OR REPLACE FUNCTION shardmap._old_transaction() RETURNS interval LANGUAGE sql AS $$ SELECT interval '1 second' $$")
    try:
        with psycopg.connect(tenants.cluster.shard_dsn(shard), autocommit=True) as holder:
            pid = holder.execute("SELECT pg_backend_pid()").fetchone()[0]
            holder.execute("BEGIN; UPDATE account SET balance = 0 WHERE id = 1")
            if prepared:
                holder.execute("PREPARE TRANSACTION 'by hand'")
            table = "pg_prepared_xacts WHERE prepared" if prepared else f"pg_stat_activity WHERE pid = {pid} AND xact_start"
            wait_for(lambda: tenants.on_shard(shard, f"SELECT FROM {table} < now() - interval '1.5 s'"))
            with pytest.raises(psycopg.errors.ObjectInUse, match=f'transactions on shard "shard-{shard}" would hold move {number} up') as error:
                run(conn, number)
            who = "prepared transaction 'by hand'" if prepared else f"process {pid} of postgres"
            assert error.value.diag.message_detail.startswith(who) and "RowExclusiveLock on public.account since 00:" in error.value.diag.message_detail
    finally:
        if prepared:
            tenants.cluster.shard_psql(shard, "ROLLBACK PREPARED 'by hand'")
        conn.execute("CREATE OR REPLACE FUNCTION shardmap._old_transaction() RETURNS interval LANGUAGE sql AS $$ SELECT interval '1 minute' $$")
    give_up(tenants, conn, number)


def test_a_primary_key_that_is_ordered_differently(tenants, conn):
    """The source alone orders; what is dropped after a failure does not depend on the target's order."""
    names = "aBcDeFgHiJ"
    conn.execute('CREATE TABLE named (tenant int, name text COLLATE "C", PRIMARY KEY (tenant, name))')
    conn.execute("SELECT shardmap.distribute_table('named', 'tenant')")
    tenant = tenants.fresh(0)
    for name in names:
        conn.execute("INSERT INTO named VALUES (%s, %s), (%s, %s)", (tenant, name, tenant, name * 2))
    tenants.cluster.shard_psql(1, 'ALTER TABLE named ALTER name TYPE text COLLATE "und-x-icu"')
    number = plan(conn, tenant, 1)
    # In the third table; in "C" all of the upper case comes first, on the target "a" is before "B".
    with tenants.connect(shardmap__crash_point="move_batch:15=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    copied, watermark = conn.execute("SELECT rows_copied, watermark FROM shardmap.move_table WHERE move = %s AND relation = 'named'::regclass",
                                     (number,)).fetchone()
    assert copied == 14 and watermark[1] > "Z", "a second batch of it was copied"
    run(conn, number)
    assert tenants.move(conn, number)["state"] == "done"
    assert conn.execute("SELECT count(*) FROM named WHERE tenant = %s", (tenant,)).fetchone() == (20,)
    assert tenants.on_shard(1, "SELECT count(*) FROM named WHERE tenant = %s", tenant) == [(20,)]
    conn.execute("DROP TABLE named")


def test_procedures_that_commit_are_called_by_themselves(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    (verification,) = conn.execute("SELECT shardmap.start_verification('account')").fetchone()
    for call in (f"run_move({number})", "run_moves()", "canary()", f"run_verification({verification})", "run_repair(1, false)"):
        name = call.split("(", 1)[0]
        with conn.transaction(), pytest.raises(psycopg.errors.ActiveSqlTransaction, match=f"shardmap.{name[:8]}.* cannot run inside") as error:
            conn.execute(f"CALL shardmap.{call}")
        assert "by itself" in error.value.diag.message_hint
    give_up(tenants, conn, number)
