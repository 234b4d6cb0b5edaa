"""A tenant gets a shard of its own choosing: all its rows, and nothing else."""

import psycopg
import pytest
from tenants import plan, run

SUMS = "SELECT count(*), sum(hashtextextended(account::text, 0)) FROM account"
ALL = "SELECT id, balance, note, twice FROM account WHERE tenant = %s ORDER BY id"


def test_all_rows_of_a_key_move(tenants, conn):
    tenant = tenants.fresh(0)
    before, rows = conn.execute(SUMS).fetchall(), conn.execute(ALL, (tenant,)).fetchall()
    number = plan(conn, tenant, 1)
    run(conn, number)
    assert tenants.stored(tenant) == {1: (40, 40)}
    assert conn.execute("SELECT shard_for(%s)", (tenant,)).fetchone() == ("shard-1",)
    assert conn.execute(SUMS).fetchall() == before and conn.execute(ALL, (tenant,)).fetchall() == rows
    assert tenants.left_behind() == [] and conn.execute("SELECT count(*) FROM shardmap.hidden_rows").fetchone() == (0,)
    move = tenants.move(conn, number)
    assert (move["state"], move["rows_copied"], move["rows_recopied"], move["rows_deleted"]) == ("done", 80, 0, 80)
    assert move["pause"] is not None and move["last_error"] is None


def test_a_batch_enters_the_index_where_the_last_one_ended(tenants, conn):
    """And not at the key's first row, from where all rows that are copied would be read again: with many, that is most of a move."""
    beyond = ("SELECT shardmap._beyond(jsonb_populate_record(NULL::shardmap.move, jsonb_build_object('kind', %s::text)), jsonb_populate_record("
              "NULL::shardmap.move_table, jsonb_build_object('relation', 'account', 'key_columns', '[\"tenant\", \"id\"]'::jsonb,"
              " 'key_types', '[\"integer\", \"integer\"]'::jsonb, 'watermark', '[\"4\", \"17\"]'::jsonb)), '>')")
    assert conn.execute(beyond, ("arcs",)).fetchone()[0] == "(tenant, id) > ('4'::integer, '17'::integer)"
    condition = conn.execute(beyond, ("key",)).fetchone()[0]
    with psycopg.connect(tenants.cluster.shard_dsn(0)) as shard:
        shard.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
        explained = "\n".join(row[0] for row in shard.execute(
            f"EXPLAIN SELECT FROM account WHERE {condition} AND tenant = 4 ORDER BY tenant, id LIMIT 7"))
    assert "Index Cond: ((tenant = 4) AND (id > 17))" in explained


def test_a_key_that_is_the_primary_key_has_one_row(conn):
    """Whose copying is behind the watermark once there is one."""
    beyond = ("SELECT shardmap._beyond(jsonb_populate_record(NULL::shardmap.move, jsonb_build_object('kind', 'key')), jsonb_populate_record("
              "NULL::shardmap.move_table, jsonb_build_object('relation', 'account', 'key_columns', jsonb_build_array('tenant'),"
              " 'key_types', jsonb_build_array('integer'), 'watermark', jsonb_build_array('4'))), %s)")
    assert [conn.execute(beyond, (sign,)).fetchone()[0] for sign in (">", "<=")] == ["false", "true"]


def test_a_finished_move_is_run_again_for_nothing(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 2)
    run(conn, number)
    before = tenants.move(conn, number)
    run(conn, number)
    assert tenants.move(conn, number) == before
    assert conn.execute("SELECT * FROM shardmap.move_key(%s, 'shard-2')", (tenant,)).fetchall() == []


def test_a_dry_run_enters_nothing(tenants, conn):
    tenant = tenants.fresh(0)
    count = conn.execute("SELECT count(*) FROM shardmap.moves").fetchone()
    rows = conn.execute("SELECT move, relation::text, source, target, rows, bytes > 0 FROM shardmap.move_key(%s, 'shard-1', dry_run => true)",
                        (tenant,)).fetchall()
    assert rows == [(None, table, "shard-0", "shard-1", 40, True) for table in ("account", "entry")]
    assert conn.execute("SELECT count(*) FROM shardmap.moves").fetchone() == count


def test_there_and_back(tenants, conn):
    tenant = tenants.fresh(0)
    for target in (1, 0):
        run(conn, plan(conn, tenant, target))
        assert tenants.stored(tenant) == {target: (40, 40)}


def test_a_move_that_is_given_up_leaves_nothing(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point="move_caught_up=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    assert tenants.stored(tenant) == {0: (40, 40), 1: (40, 40)}
    assert "crash point" in tenants.move(conn, number)["last_error"]
    assert conn.execute("SELECT count(*) FROM account WHERE tenant = %s", (tenant,)).fetchone() == (40,)
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    run(conn, number)
    assert tenants.move(conn, number)["state"] == "rolled_back"
    assert tenants.stored(tenant) == {0: (40, 40)} and tenants.left_behind() == []
    run(conn, plan(conn, tenant, 1))
    assert tenants.stored(tenant) == {1: (40, 40)}


def test_a_flipped_move_cannot_be_given_up(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point="move_flipped=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="flipped"):
        conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    run(conn, number)
    assert tenants.stored(tenant) == {1: (40, 40)}


def test_a_paused_move_waits(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    assert conn.execute("SELECT shardmap.pause_move(%s)", (number,)).fetchone() == ("planned",)
    run(conn, number)
    assert tenants.move(conn, number)["state"] == "planned"
    conn.execute("SELECT shardmap.resume_move(%s)", (number,))
    run(conn, number)
    assert tenants.move(conn, number)["state"] == "done"


def test_what_would_leave_rows_behind_is_refused_meanwhile(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    for sql in (f"SELECT shardmap.pin_key({tenant}, 'shard-2')", "SELECT shardmap.undistribute_table('entry')", "DROP TABLE entry",
                "CREATE TABLE late (tenant int PRIMARY KEY); SELECT shardmap.distribute_table('late', 'tenant')",
                f"SELECT * FROM shardmap.move_key({tenant}, 'shard-2')", "SELECT shardmap.drop_shard('shard-2')"):
        with pytest.raises(psycopg.errors.ObjectInUse, match=f"move {number} of keyspace"):
            conn.execute(sql)
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    run(conn, number)


@pytest.mark.parametrize(("ddl", "undo", "message"), [
    ("ALTER TABLE entry DROP CONSTRAINT entry_pkey", "ALTER TABLE entry ADD PRIMARY KEY (id, tenant)", "no primary key"),
    ("ALTER TABLE entry ALTER account TYPE bigint", "ALTER TABLE entry ALTER account TYPE int", "differs on shards"),
    ("INSERT INTO entry VALUES (0, {tenant}, 1)", "DELETE FROM entry WHERE id = 0", "has rows of key"),
], ids=["no primary key", "another layout", "rows of the key"])
def test_prechecks_come_before_the_first_byte(tenants, conn, ddl, undo, message):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with psycopg.connect(tenants.cluster.shard_dsn(1), autocommit=True) as shard:
        shard.execute(ddl.format(tenant=tenant))
        try:
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=message):
                run(conn, number)
        finally:
            shard.execute(undo)
    assert tenants.move(conn, number)["state"] == "planned" and tenants.left_behind() == []
    run(conn, number)
    assert tenants.stored(tenant) == {1: (40, 40)}


def test_a_row_changed_behind_our_back_stops_the_flip(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point="move_caught_up=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    tenants.on_shard(1, "UPDATE account SET note = 'x' WHERE tenant = %s AND id = 7 RETURNING 1", tenant)
    with pytest.raises(psycopg.errors.DataCorrupted, match="differ on shards") as error:
        run(conn, number)
    assert error.value.diag.message_detail.startswith("Found: changed at token") and "7" in error.value.diag.message_detail
    assert conn.execute("SELECT shard_for(%s)", (tenant,)).fetchone() == ("shard-0",)
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    run(conn, number)
    assert tenants.stored(tenant) == {0: (40, 40)}


def test_what_changes_after_the_comparison_is_compared_too(tenants, conn):
    """More than is left for the fence, on a target that changes what it gets."""
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point="move_fenced=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    tenants.cluster.shard_psql(1, """CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.note := ''x''; RETURN NEW; END';
        CREATE TRIGGER spoil BEFORE INSERT ON account FOR EACH ROW WHEN (NEW.id = 7) EXECUTE FUNCTION spoil();
        ALTER TABLE account ENABLE ALWAYS TRIGGER spoil""")
    try:
        for _ in range(2):
            conn.execute("UPDATE account SET balance = balance WHERE tenant = %s", (tenant,))
        with pytest.raises(psycopg.errors.DataCorrupted, match="differ on shards"):
            run(conn, number)
        assert conn.execute("SELECT state FROM shardmap.moves WHERE id = %s", (number,)).fetchone() == ("catching_up",)
    finally:
        tenants.cluster.shard_psql(1, "DROP TRIGGER spoil ON account; DROP FUNCTION spoil()")
    run(conn, number)
    assert tenants.move(conn, number)["state"] == "done" and tenants.stored(tenant) == {1: (40, 40)}
