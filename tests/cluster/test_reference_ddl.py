"""Reference tables come and go whole, follow the shards, and cannot be altered into something that their copies are not."""

import os
import subprocess

import psycopg
import pytest
from psycopg import errors
from server import TOOLS, as_run_user

SETUP = """
CREATE SCHEMA elsewhere; CREATE SCHEMA "Odd";
CREATE TABLE kind (id int PRIMARY KEY, name text, price numeric(8, 2) DEFAULT 1, CHECK (id <> 666));
CREATE INDEX kind_name ON kind (name);
COMMENT ON COLUMN kind.name IS 'what it is';
INSERT INTO kind SELECT i, 'kind ' || i FROM generate_series(1, 30) i;
SELECT shardmap.distribute_reference('kind');
CREATE TABLE item (k int, kind int REFERENCES kind, PRIMARY KEY (k, kind));
INSERT INTO item SELECT k, 1 + k % 30 FROM generate_series(1, 60) k;
SELECT shardmap.distribute_table('item', 'k');
"""


def equal(conn, table="kind"):
    verified = conn.execute("SELECT * FROM shardmap.verify_reference(%s)", (table,)).fetchall()
    assert verified and all(row[1] for row in verified), verified
    return len(verified)


def test_what_a_copy_is(db, conn):
    """The same table, without what is looked after here."""
    assert conn.execute("SELECT relkind FROM pg_class WHERE oid = 'kind'::regclass").fetchone() == ("r",)
    assert conn.execute("SELECT table_name::text, keyspace, copies, routed FROM shardmap.reference_tables").fetchall() == [
        ("kind", "main", 4, True)]
    sql = """SELECT (SELECT string_agg(indexname, ',' ORDER BY indexname) FROM pg_indexes WHERE tablename = 'kind'),
        (SELECT string_agg(conname, ',' ORDER BY conname) FROM pg_constraint WHERE conrelid = 'kind'::regclass AND contype <> 'n'),
        (SELECT count(*) FROM pg_trigger WHERE tgrelid = 'kind'::regclass AND NOT tgisinternal), col_description('kind'::regclass, 2)"""
    assert set(map(tuple, (rows[0] for rows in db.shard_rows(sql).values()))) == {("kind_name,kind_pkey", "kind_pkey", 0, "what it is")}
    assert all(rows == [("item_kind_fkey",)] for rows in db.shard_rows(
        "SELECT conname FROM pg_constraint WHERE conrelid = 'item'::regclass AND contype = 'f'").values())


REFUSED = {
    "no primary key": ("CREATE TABLE x (a int)", "primary key"),
    "deferrable primary key": ("CREATE TABLE x (a int PRIMARY KEY DEFERRABLE)", "deferrable"),
    "partitioned": ("CREATE TABLE x (a int PRIMARY KEY) PARTITION BY HASH (a)", "partitioned"),
    "temporary": ("CREATE TEMP TABLE x (a int PRIMARY KEY)", "temporary"),
    "unlogged": ("CREATE UNLOGGED TABLE x (a int PRIMARY KEY)", "unlogged"),
    "a view": ("CREATE VIEW x AS SELECT 1 AS a", "a view"),
    "inherited": ("CREATE TABLE w (a int PRIMARY KEY); CREATE TABLE x (PRIMARY KEY (a)) INHERITS (w)", "inheritance"),
    "a type that shards lack": ("CREATE TYPE mine AS ENUM ('a'); CREATE TABLE x (a mine PRIMARY KEY)", "mine does not exist on shard"),
    "taken on a shard": ("CREATE TABLE x (a int PRIMARY KEY); SELECT shardmap.remote_execute('shard-2', 'CREATE TABLE public.x ()')",
                         "already exists on shard"),
    "distributed": ("CREATE TABLE x (a int PRIMARY KEY); SELECT shardmap.distribute_table('x', 'a')", "already distributed"),
    "a reference table already": ("CREATE TABLE x (a int PRIMARY KEY); SELECT shardmap.distribute_reference('x')", "already"),
}


@pytest.mark.parametrize(("setup", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(db, conn, setup, message):
    with pytest.raises(psycopg.Error, match=message) as refused, conn.transaction():
        conn.execute(setup)
        conn.execute("SELECT shardmap.distribute_reference('x')")
    assert refused.value.diag.message_hint
    assert all(rows == [(None,)] for rows in db.shard_rows("SELECT to_regclass('public.x')").values())


def test_a_reference_table_is_not_distributed(conn):
    for sql in ("SELECT shardmap.distribute_table('kind', 'id')", "SELECT shardmap.undistribute_table('kind')"):
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="is a reference table"):
            conn.execute(sql)
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="not a reference table"):
        conn.execute("SELECT shardmap.undistribute_reference('item')")
    with pytest.raises(errors.DependentObjectsStillExist, match="in use"):
        conn.execute("SELECT shardmap.drop_keyspace('main')")


BREAKS = {
    "column added": "ALTER TABLE kind ADD COLUMN extra int",
    "column dropped": "ALTER TABLE kind DROP COLUMN price",
    "column renamed": "ALTER TABLE kind RENAME name TO title",
    "type changed": "ALTER TABLE kind ALTER id TYPE bigint",
    "renamed": "ALTER TABLE kind RENAME TO other",
    "moved": "ALTER TABLE kind SET SCHEMA elsewhere",
    "schema renamed": "ALTER SCHEMA public RENAME TO other",
    "key dropped": "ALTER TABLE kind DROP CONSTRAINT kind_pkey CASCADE",
    "trigger disabled": "ALTER TABLE kind DISABLE TRIGGER shardmap_reference_row",
    "all triggers disabled": "ALTER TABLE kind DISABLE TRIGGER ALL",
    "user triggers disabled": "ALTER TABLE kind DISABLE TRIGGER USER",
    "trigger not always on": "ALTER TABLE kind ENABLE TRIGGER shardmap_reference_statement",
    "trigger dropped": "DROP TRIGGER shardmap_reference_row ON kind",
    "trigger replaced": "CREATE OR REPLACE TRIGGER shardmap_reference_row AFTER INSERT ON kind FOR EACH ROW"
                        " EXECUTE FUNCTION shardmap._replicate_reference()",
    "trigger renamed": "ALTER TRIGGER shardmap_reference_row ON kind RENAME TO zzz",
    "unlogged": "ALTER TABLE kind SET UNLOGGED",
    "a child": "CREATE TABLE child () INHERITS (kind)",
    "a parent": "CREATE TABLE parent (id int NOT NULL); ALTER TABLE kind INHERIT parent",
    "a partition": "CREATE TABLE whole (LIKE kind) PARTITION BY LIST (id); ALTER TABLE whole ATTACH PARTITION kind DEFAULT",
}


@pytest.mark.parametrize("sql", BREAKS.values(), ids=BREAKS)
def test_what_would_break_it_is_refused(conn, sql):
    with pytest.raises(errors.FeatureNotSupported, match="would break (reference|logical) table") as refused:
        conn.execute(sql)
    assert refused.value.diag.message_hint and refused.value.diag.message_detail
    conn.execute("UPDATE kind SET name = 'whole' WHERE id = 1")
    assert equal(conn) == 4


def test_what_else_is_altered_is_altered_here(conn):
    with conn.transaction(force_rollback=True):
        conn.execute("""CREATE INDEX ON kind (price); ALTER TABLE kind ADD CHECK (price > 0); ALTER TABLE kind ALTER price SET DEFAULT 5;
            ALTER TABLE kind ALTER name SET NOT NULL; ALTER TABLE kind ADD UNIQUE (name, id); COMMENT ON TABLE kind IS 'x';
            ALTER TABLE kind ALTER name SET STORAGE EXTERNAL; CREATE TABLE beside (a int); DROP TABLE beside;
            CREATE FUNCTION nop() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
            CREATE TRIGGER own AFTER INSERT ON kind EXECUTE FUNCTION nop(); DROP TRIGGER own ON kind""")
        assert conn.execute("INSERT INTO kind (id, name) VALUES (90, 'x') RETURNING price").fetchone() == (5,)


def test_altered_with_its_copies(db, conn):
    with conn.transaction():
        conn.execute("SELECT shardmap.alter_reference('kind', 'ADD COLUMN extra int DEFAULT 7, ADD COLUMN \"Odd name\" text')")
        conn.execute("UPDATE kind SET \"Odd name\" = 'odd', extra = id WHERE id = 5")
    equal(conn)
    sql = "SELECT extra, \"Odd name\" FROM item JOIN kind ON id = kind WHERE k = 4"
    assert conn.execute(sql).fetchone() == (5, "odd")
    conn.execute("""SELECT shardmap.alter_reference('kind', 'RENAME extra TO further')""")
    conn.execute("""SELECT shardmap.alter_reference('kind', 'DROP COLUMN "Odd name", ALTER COLUMN further TYPE text')""")
    conn.execute("UPDATE kind SET further = 'text' WHERE id = 6")
    equal(conn)
    for change in ("ADD COLUMN made timestamptz DEFAULT clock_timestamp()", "RENAME TO other", "DROP CONSTRAINT kind_pkey CASCADE",
                   "DISABLE TRIGGER ALL", "ADD COLUMN id int"):
        with pytest.raises(psycopg.Error):
            conn.execute("SELECT shardmap.alter_reference('kind', %s)", (change,))
    conn.execute("SELECT shardmap.alter_reference('kind', 'DROP COLUMN further')")
    assert equal(conn) == 4


@pytest.mark.parametrize("change", [
    "ADD COLUMN more int; DROP TABLE victim", "ADD COLUMN more int; ALTER TABLE kind ADD COLUMN less int", "; DROP TABLE victim",
    "", "-- ", "nonsense", ".elsewhere ADD COLUMN more int", "ADD COLUMN more int) --"])
def test_only_one_alter_table_is_run(db, conn, change):
    """Not a second statement, nor one that alters another table."""
    conn.execute("CREATE TABLE IF NOT EXISTS victim (a int)")
    with pytest.raises(errors.SyntaxError, match="cannot alter reference table public.kind in this way") as refused:
        conn.execute("SELECT shardmap.alter_reference('kind', %s)", (change,))
    assert refused.value.diag.message_hint and refused.value.diag.message_detail
    assert conn.execute("SELECT count(*) FROM victim").fetchone() == (0,)
    assert equal(conn) == 4


def test_a_change_may_end_like_a_statement(conn):
    with conn.transaction(force_rollback=True):
        conn.execute("SELECT shardmap.alter_reference('kind', 'ADD COLUMN more text DEFAULT ''; -- x''; -- more')")
        assert conn.execute("SELECT DISTINCT more FROM kind").fetchall() == [("; -- x",)]
    with pytest.raises(errors.NullValueNotAllowed, match="must not be NULL"):
        conn.execute("SELECT shardmap.alter_reference('kind', NULL)")


def test_drop_table(db, conn):
    conn.execute("""CREATE TABLE "Odd"."T able" ("I d" int PRIMARY KEY, "V" text); INSERT INTO "Odd"."T able" VALUES (1, 'x');
        SELECT shardmap.distribute_reference('"Odd"."T able"')""")
    conn.execute("""UPDATE "Odd"."T able" SET "I d" = 2, "V" = 'y'""")
    assert equal(conn, '"Odd"."T able"') == 4
    conn.execute("""DROP TABLE "Odd"."T able" """)
    assert all(rows == [(None,)] for rows in db.shard_rows("""SELECT to_regclass('"Odd"."T able"')""").values())
    assert conn.execute("SELECT count(*) FROM shardmap.reference_table").fetchone() == (1,)
    with pytest.raises(errors.DependentObjectsStillExist) as refused:
        conn.execute("DROP TABLE kind")
    assert "item_kind_fkey" in refused.value.diag.message_detail
    with pytest.raises(errors.DependentObjectsStillExist):
        conn.execute("SELECT shardmap.undistribute_reference('kind')")


def test_undistributed(db, conn):
    conn.execute("CREATE TABLE brief (id int PRIMARY KEY); INSERT INTO brief VALUES (1); SELECT shardmap.distribute_reference('brief')")
    conn.execute("SELECT shardmap.undistribute_reference('brief')")
    conn.execute("INSERT INTO brief VALUES (2)")
    assert conn.execute("SELECT count(*) FROM brief").fetchone() == (2,)
    assert all(rows == [(None,)] for rows in db.shard_rows("SELECT to_regclass('public.brief')").values())
    assert conn.execute("SELECT count(*) FROM pg_trigger WHERE tgrelid = 'brief'::regclass").fetchone() == (0,)
    conn.execute("SELECT shardmap.distribute_reference('brief')")
    conn.execute("DROP TABLE brief")


def test_all_or_nothing(db, conn):
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE TABLE brief (id int PRIMARY KEY); INSERT INTO brief VALUES (1); SELECT shardmap.distribute_reference('brief')")
        conn.execute("INSERT INTO brief VALUES (2)")
        assert equal(conn, "brief") == 4
    assert all(rows == [(None,)] for rows in db.shard_rows("SELECT to_regclass('public.brief')").values())
    with pytest.raises(errors.ActiveSqlTransaction), conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; CREATE TABLE brief (id int PRIMARY KEY)")
        conn.execute("SELECT shardmap.distribute_reference('brief')")


def test_a_new_shard_gets_the_copies_first(db, conn):
    """Writers wait while they are made: none misses a row."""
    server = db.cluster.shard_server(0)
    server.psql("CREATE DATABASE newcomer")
    try:
        with db.connect() as writer, db.connect() as admin:
            writer.execute("BEGIN")
            writer.execute("UPDATE kind SET name = 'before' WHERE id = 2")
            admin.execute("SET lock_timeout = '300ms'")
            add = "SELECT shardmap.add_shard('newcomer', '127.0.0.1', %s, 'newcomer')"
            with pytest.raises(errors.LockNotAvailable):
                admin.execute(add, (server.port,))
            writer.execute("COMMIT")
            admin.execute("SET lock_timeout = 0")
            admin.execute("BEGIN")
            admin.execute(add, (server.port,))
            writer.execute("SET lock_timeout = '300ms'")
            with pytest.raises(errors.LockNotAvailable):
                writer.execute("UPDATE kind SET name = 'during' WHERE id = 3")
            admin.execute("COMMIT")
            writer.execute("SET lock_timeout = 0")
            writer.execute("UPDATE kind SET name = 'after' WHERE id = 4")
        assert equal(conn) == 5
        with psycopg.connect(server.dsn("newcomer"), autocommit=True) as shard:
            assert shard.execute("SELECT id, name FROM kind WHERE id IN (2, 3, 4) ORDER BY 1").fetchall() == [
                (2, "before"), (3, "kind 3"), (4, "after")]
            assert shard.execute("SELECT conname FROM pg_constraint WHERE conrelid = 'item'::regclass AND contype = 'f'").fetchall() == [
                ("item_kind_fkey",)]
        conn.execute("SELECT shardmap.drop_shard('newcomer')")
        conn.execute("UPDATE kind SET name = 'without' WHERE id = 4")
        assert equal(conn) == 4
        with psycopg.connect(server.dsn("newcomer"), autocommit=True) as shard:
            assert shard.execute("SELECT to_regclass('public.kind')").fetchone() == (None,)
    finally:
        server.psql("DROP DATABASE newcomer WITH (FORCE)")


def test_ordinary_users_write(db, conn):
    """They have on the shards what they need, whatever rights of theirs it takes here."""
    shards = db.cluster.shard_server(0)
    shards.psql("CREATE ROLE writer LOGIN; CREATE ROLE late LOGIN")
    db.psql("""CREATE ROLE writer LOGIN; CREATE ROLE late LOGIN; CREATE ROLE owns LOGIN""")
    db.users.extend(("writer", "late", "owns"))
    for number in range(4):
        for role in ("writer", "late"):
            db.psql(f"CREATE USER MAPPING FOR {role} SERVER \"shard-{number}\" OPTIONS (user '{role}', password_required 'false')")
    try:
        db.psql("""CREATE TABLE ours (id int PRIMARY KEY, v text, w text); INSERT INTO ours VALUES (1, 'a', 'b'), (2, 'c', 'd');
            GRANT UPDATE (v) ON ours TO writer; SELECT shardmap.distribute_reference('ours')""")
        with db.connect("writer") as writer:
            writer.execute("UPDATE ours SET v = 'written'")
            for sql in ("SELECT * FROM ours", "UPDATE ours SET w = 'x'", "DELETE FROM ours", "INSERT INTO ours VALUES (3)", "TRUNCATE ours",
                        "SELECT shardmap.verify_reference('ours')", "ALTER TABLE ours DISABLE TRIGGER ALL"):
                with pytest.raises(errors.InsufficientPrivilege):
                    writer.execute(sql)
        assert equal(conn, "ours") == 4
        conn.execute("GRANT INSERT, DELETE, TRUNCATE ON ours TO late; SELECT shardmap.grant_on_shards('ours')")
        with db.connect("late") as late:
            late.execute("INSERT INTO ours VALUES (3, 'c')")
            late.execute("TRUNCATE ours")
            late.execute("INSERT INTO ours VALUES (4, 'd')")
        assert equal(conn, "ours") == 4
        # A function of another's: the copies are written as he.
        conn.execute("""CREATE FUNCTION add(int) RETURNS void LANGUAGE sql SECURITY DEFINER AS 'INSERT INTO public.ours VALUES ($1)'""")
        with db.connect("writer") as writer:
            writer.execute("SELECT add(10)")
        assert equal(conn, "ours") == 4
        conn.execute("DROP TABLE ours")
    finally:
        shards.psql("".join(f"DROP OWNED BY {role};" for role in ("writer", "late")), db.cluster.shard_database(0, db.name))
        for number in range(1, 4):
            shards.psql("DROP OWNED BY writer, late", db.cluster.shard_database(number, db.name))
        shards.psql("DROP ROLE writer, late")


def test_deleted_by_a_foreign_key_of_anothers(db, conn):
    """Postgres deletes what refers to a row as the referring table's owner, who has no way to the shards."""
    db.add_user("eraser")
    conn.execute("""CREATE ROLE nobody; CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY, a int REFERENCES a ON DELETE CASCADE);
        INSERT INTO a VALUES (1), (2); INSERT INTO b VALUES (1, 1), (2, 2); SELECT shardmap.distribute_reference(x) FROM unnest('{a,b}'::regclass[]) x;
        ALTER TABLE b OWNER TO nobody; GRANT SELECT, DELETE ON a TO eraser; GRANT SELECT ON a TO nobody""")
    with db.connect("eraser") as eraser:
        eraser.execute("DELETE FROM a WHERE id = 1")
    conn.execute("ALTER TABLE b OWNER TO postgres")
    assert equal(conn, "a") == equal(conn, "b") == 4
    assert conn.execute("SELECT id FROM b").fetchall() == [(2,)]
    conn.execute("DROP TABLE b; DROP TABLE a; DROP OWNED BY nobody; DROP ROLE nobody")


def tool(name, server, *arguments, **options):
    program = next((TOOLS / f"pg{os.environ.get('PG') or 16}").glob(f"**/bin/{name}"))
    return subprocess.run([str(program), "-h", str(server.sockets), "-p", str(server.port), "-U", "postgres", *arguments],
                          check=True, capture_output=True, **options).stdout


def test_dump_and_restore(db, conn):
    """The restored table follows its copies on the same shards: whoever restores drops the old coordinator."""
    server = db.cluster.coordinator
    dump = tool("pg_dump", server, "-Fc", db.name, **as_run_user())
    conn.execute("UPDATE kind SET name = 'after the dump' WHERE id = 9")
    server.psql("CREATE DATABASE restored")
    try:
        tool("pg_restore", server, "--exit-on-error", "-d", "restored", input=dump, **as_run_user())
        with db.connect(dbname="restored") as restored:
            assert restored.execute("SELECT table_name::text, copies, routed FROM shardmap.reference_tables").fetchall() == [
                ("kind", 4, True)]
            assert [row[1] for row in restored.execute("SELECT * FROM shardmap.verify_reference('kind')")] == [False] * 4
            restored.execute("SELECT shardmap.refresh_reference('kind')")
            assert equal(restored) == 4
            restored.execute("UPDATE kind SET name = 'restored' WHERE id = 10")
            assert equal(restored) == 4
            with pytest.raises(errors.FeatureNotSupported):
                restored.execute("ALTER TABLE kind DISABLE TRIGGER ALL")
            plan = restored.execute("EXPLAIN SELECT name FROM item JOIN kind ON id = kind WHERE k = 4").fetchone()[0]
            assert plan.startswith("Custom Scan (ShardRoute)")
    finally:
        server.psql("DROP DATABASE restored WITH (FORCE)")
    conn.execute("SELECT shardmap.refresh_reference('kind')")
    assert equal(conn) == 4


def test_without_the_catalog(db, conn):
    """A table with the triggers that the catalog does not know cannot be written in silence."""
    conn.execute("CREATE TABLE stray (id int PRIMARY KEY); CREATE TRIGGER shardmap_reference_row AFTER INSERT ON stray FOR EACH ROW"
                 " EXECUTE FUNCTION shardmap._replicate_reference()")
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="has the trigger of a reference table") as refused:
        conn.execute("INSERT INTO stray VALUES (1)")
    assert "distribute_reference" in refused.value.diag.message_hint
    conn.execute("DROP TABLE stray")
