"""A logical table cannot be altered into something that the shards do not hold; everything else can be altered."""

import psycopg
import pytest

BREAKS = {
    "key renamed": "ALTER TABLE guarded RENAME COLUMN k TO other",
    "table renamed": "ALTER TABLE guarded RENAME TO other",
    "table moved": "ALTER TABLE guarded SET SCHEMA elsewhere",
    "partition detached": "ALTER TABLE guarded DETACH PARTITION guarded_0",
    "partition dropped": "DROP FOREIGN TABLE guarded_0",
    "server dropped": 'DROP SERVER "shard-0" CASCADE',
    "server renamed": 'ALTER SERVER "shard-1" RENAME TO other',
    "schema renamed": "ALTER SCHEMA public RENAME TO other",
    "table attached": """CREATE TABLE whole (k int, v int) PARTITION BY RANGE (k);
        ALTER TABLE whole ATTACH PARTITION guarded FOR VALUES FROM (0) TO (1000)""",
    "partition added": "CREATE TABLE extra PARTITION OF guarded FOR VALUES WITH (MODULUS 1024, REMAINDER 77)",
}


SETUP = """
    CREATE SCHEMA elsewhere;
    CREATE TABLE guarded (k int PRIMARY KEY, v int);
    SELECT shardmap.distribute_table('guarded', 'k');
    INSERT INTO guarded SELECT i, i FROM generate_series(1, 100) i;
"""


def rows(conn):
    return conn.execute("SELECT count(*), sum(v) FROM guarded").fetchone()


@pytest.mark.parametrize("statement", BREAKS.values(), ids=BREAKS.keys())
def test_what_would_break_the_table_is_refused(conn, statement):
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="would break logical table") as refused:
        conn.execute(statement)
    assert refused.value.diag.message_hint and refused.value.diag.message_detail
    assert rows(conn) == (100, 5050)


@pytest.mark.parametrize("change", ["ADD CHECK (v <> 7)", "ALTER v SET NOT NULL", "ADD COLUMN w int NOT NULL DEFAULT 3"])
def test_constraints_that_no_shard_enforces_are_refused(conn, change):
    for table in ("TABLE guarded", "FOREIGN TABLE guarded_0"):
        if table.startswith("FOREIGN") and "COLUMN" in change:
            continue
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="would not be enforced"):
            conn.execute(f"ALTER {table} {change}")
    assert conn.execute("SELECT count(*) FROM guarded WHERE v = 7").fetchone() == (1,)


def test_a_table_without_a_shards_partition_is_not_read(conn):
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="no partition for shard"), conn.transaction():
        conn.execute("ALTER EVENT TRIGGER shardmap_guard_drop DISABLE")
        conn.execute("DROP FOREIGN TABLE guarded_0")
        conn.execute("CREATE TEMP TABLE unrelated (a int)")
        conn.execute("SELECT count(*) FROM guarded")
    assert rows(conn) == (100, 5050)


def test_other_changes_are_let_through(conn):
    conn.execute("ALTER TABLE guarded ADD COLUMN extra int")
    conn.execute("SELECT shardmap.run_on_shards('ALTER TABLE guarded ADD COLUMN extra int')")
    conn.execute("UPDATE guarded SET extra = 1 WHERE k = 7")
    conn.execute("ALTER TABLE guarded ALTER COLUMN extra SET DEFAULT 3")
    assert conn.execute("INSERT INTO guarded VALUES (101, 0) RETURNING extra").fetchone() == (3,)
    assert conn.execute("SELECT extra FROM guarded WHERE k = 7").fetchone() == (1,)
    conn.execute("CREATE TABLE beside (a int)")
    conn.execute("DROP TABLE beside")
