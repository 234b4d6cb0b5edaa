"""What is written to a reference table is on every shard: whatever statement wrote it, and only if it was committed.

After every test each shard's copy has the rows of the table here, as the shards themselves say and as
shardmap.verify_reference() does.
"""

import random
import threading

import psycopg
import pytest
from psycopg import errors

SETUP = """
CREATE TYPE mood AS ENUM ('sad', 'happy');
SELECT shardmap.run_on_shards('CREATE TYPE public.mood AS ENUM (''sad'', ''happy'')');
CREATE TABLE city (id int PRIMARY KEY, name text, rank int UNIQUE, note varchar(20) DEFAULT 'none');
INSERT INTO city SELECT i, 'city ' || i, i FROM generate_series(1, 50) i;
CREATE TABLE every (a int, b text, t timestamptz, d date, i interval, f float8, n numeric(12, 3), y bytea, j jsonb, u uuid,
    m mood, arr text[], nums int[], r int4range, c char(5), bits bit(4), x text GENERATED ALWAYS AS (b || '!') STORED,
    ts timestamp(3), bo bool, v varchar(7), PRIMARY KEY (b, a));
CREATE TABLE only_key (a int, b text, PRIMARY KEY (a, b));
CREATE TABLE numbered (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text);
SELECT shardmap.distribute_reference(x) FROM unnest('{city,every,only_key,numbered}'::regclass[]) x;
CREATE TABLE person (k int, id int, city int, PRIMARY KEY (k, id));
INSERT INTO person SELECT k, id, k FROM generate_series(1, 40) k, generate_series(1, 3) id;
SELECT shardmap.distribute_table('person', 'k');
"""
TABLES = ("city", "every", "only_key", "numbered")


@pytest.fixture(autouse=True)
def equal_copies(db):
    yield
    for table in TABLES:
        check_copies(db, table)


def check_copies(db, table):
    with db.connect() as conn:
        verified = conn.execute("SELECT * FROM shardmap.verify_reference(%s)", (table,)).fetchall()
        assert len(verified) == db.cluster.shards and all(row[1] for row in verified), verified
        sql = f"SELECT t::text FROM {table} t ORDER BY 1"
        rows = conn.execute(sql).fetchall()
    assert all(found == rows for found in db.shard_rows(sql).values()), (table, rows, db.shard_rows(sql))


def copies(db, sql):
    """What all copies answer."""
    found = list(db.shard_rows(sql).values())
    assert all(each == found[0] for each in found), found
    return found[0]


STATEMENTS = {
    "insert": "INSERT INTO city VALUES (100, 'new', 100) RETURNING name",
    "insert, default": "INSERT INTO city (id, name) VALUES (101, 'new') RETURNING note",
    "insert many": "INSERT INTO city SELECT i, 'many', i FROM generate_series(1000, 4000) i",
    "update": "UPDATE city SET name = upper(name) WHERE id = 3 RETURNING name",
    "update all": "UPDATE city SET name = name || '?'",
    "update a unique column": "UPDATE city SET rank = rank - 1",
    "update nothing": "UPDATE city SET name = 'x' WHERE id < 0",
    "update from a distributed table": "UPDATE city SET name = 'from ' || p.id FROM person p WHERE p.city = city.id AND p.k = 7",
    "update from all shards": "UPDATE city SET name = 'from ' || p.id FROM person p WHERE p.city = city.id AND p.id = 2",
    "update the key": "UPDATE city SET id = 5000 WHERE id = 5",
    "update keys in a chain": "UPDATE city SET id = id - 1, rank = NULL",
    "delete": "DELETE FROM city WHERE id = 9 RETURNING *",
    "delete many": "DELETE FROM city WHERE id % 3 = 0",
    "do nothing": "INSERT INTO city VALUES (1, 'twice') ON CONFLICT DO NOTHING",
    "upsert": """INSERT INTO city SELECT i, 'upserted', i FROM generate_series(40, 60) i
        ON CONFLICT (id) DO UPDATE SET name = EXCLUDED.name, note = 'conflict' RETURNING id""",
    "modifying CTE": """WITH gone AS (DELETE FROM city WHERE id < 10 RETURNING id, name, rank)
        INSERT INTO only_key SELECT id, name FROM gone""",
    "a CTE that moves rows within": """WITH gone AS (DELETE FROM city WHERE id < 4 RETURNING *)
        INSERT INTO city SELECT id + 7000, name FROM gone""",
    "truncate": "TRUNCATE city",
    "only keys": "INSERT INTO only_key VALUES (1, 'a'), (2, 'b')",
    "identity": "INSERT INTO numbered (v) VALUES ('a'), ('b')",
    "overriding": "INSERT INTO numbered OVERRIDING SYSTEM VALUE VALUES (700, 'a')",
    "from a keyed query": "INSERT INTO only_key SELECT id, 'p' FROM person WHERE k = 7",
    "DO block": "DO $$ BEGIN FOR n IN 1..5 LOOP INSERT INTO only_key VALUES (n, 'do'); UPDATE city SET name = 'do' WHERE id = n; END LOOP; END $$",
}
MERGE = """MERGE INTO city USING (SELECT i FROM generate_series(45, 55) i) s ON city.id = s.i
    WHEN MATCHED AND s.i = 45 THEN DELETE WHEN MATCHED THEN UPDATE SET name = 'merged'
    WHEN NOT MATCHED THEN INSERT (id, name) VALUES (s.i, 'merged')"""


@pytest.mark.parametrize("sql", [*STATEMENTS.values(), MERGE], ids=[*STATEMENTS, "merge"])
def test_statements(db, conn, sql):
    before = conn.execute("SELECT count(*), sum(hashtext(c::text)) FROM city c").fetchone()
    with conn.transaction(force_rollback=True):
        conn.execute(sql)
    assert conn.execute("SELECT count(*), sum(hashtext(c::text)) FROM city c").fetchone() == before
    check_copies(db, "city")
    with conn.transaction():
        conn.execute(sql)
    check_copies(db, "city")
    conn.execute("TRUNCATE city, only_key")
    conn.execute("INSERT INTO city SELECT i, 'city ' || i, i FROM generate_series(1, 50) i")


VALUES = [
    (1, 'quote " back \\ brace { comma , \'', "2024-03-02 01:02:03.4567+00", "2024-02-03", "P1Y-2DT3H4M5.6S", "0.30000000000000004",
     "12345.678", b"\x00\xff\\", '{"a": ["\\"", null]}', "8d0bd3ae-7d1c-4d6f-9a75-2b1c9ee2a1c5", "happy",
     ["a,b", None, "{", "\\"], [1, None, 3], "[1,5)", "ab", "1010", "2024-02-03 04:05:06.789", True, "seven77"),
    (2, "", "infinity", "-infinity", "0", "NaN", "NaN", b"", '"null"', None, "sad", [], None, "empty", "", "0000", None, False, ""),
    (3, "NULL", None, None, None, "-Infinity", *[None] * 13),
    (4, "line\nfeed\ttab", None, None, None, "1e-300", "0.5", None, "null", None, None, "{{a,b},{c,d}}", "[0:1]={7,8}", *[None] * 6),
]


@pytest.mark.parametrize("settings", [{}, {"DateStyle": "SQL, DMY", "IntervalStyle": "sql_standard", "TimeZone": "Asia/Kolkata",
                                           "extra_float_digits": "-5", "bytea_output": "escape", "standard_conforming_strings": "off"}],
                         ids=["plain", "odd settings"])
def test_values(db, settings):
    with db.connect() as conn:
        for name, value in settings.items():
            conn.execute(f"SET {name} = '{value}'")
        conn.execute("TRUNCATE every")
        for row in VALUES:
            conn.execute("INSERT INTO every (a, b, t, d, i, f, n, y, j, u, m, arr, nums, r, c, bits, ts, bo, v) VALUES ("
                         + ", ".join(["%s"] * 19) + ")", row)
        check_copies(db, "every")
        conn.execute("UPDATE every SET m = 'sad', f = f / 3, b = b || ' moved' WHERE a <> 3")
        check_copies(db, "every")
        conn.execute("DELETE FROM every WHERE a IN (1, 2)")
    assert copies(db, "SELECT a FROM every ORDER BY 1") == [(3,), (4,)]


def test_copy(db, conn):
    with conn.cursor().copy("COPY only_key FROM STDIN") as copy:
        for number in range(5000):
            copy.write_row((number, f"row {number}"))
    assert copies(db, "SELECT count(*) FROM only_key WHERE b LIKE 'row %'") == [(5000,)]
    conn.execute("DELETE FROM only_key")


def test_an_error_leaves_nothing(db, conn):
    with pytest.raises(errors.UniqueViolation):
        conn.execute("INSERT INTO city SELECT i, 'x', i FROM generate_series(45, 3000) i")
    with pytest.raises(errors.DivisionByZero), conn.transaction():
        conn.execute("DELETE FROM city WHERE id < 40")
        conn.execute("SELECT 1 / 0")
    assert copies(db, "SELECT count(*) FROM city") == [(50,)]


def test_savepoints(db, conn):
    with conn.transaction():
        conn.execute("UPDATE city SET name = 'outer' WHERE id = 1")
        with conn.transaction(force_rollback=True):
            conn.execute("UPDATE city SET name = 'inner' WHERE id IN (1, 2)")
            conn.execute("INSERT INTO city VALUES (900, 'inner')")
        with conn.transaction():
            conn.execute("UPDATE city SET name = 'released' WHERE id = 3")
        conn.execute("""DO $$ BEGIN
            UPDATE city SET name = 'kept' WHERE id = 4;
            BEGIN
                UPDATE city SET name = 'lost' WHERE id = 4;
                PERFORM 1 / 0;
            EXCEPTION WHEN division_by_zero THEN NULL;
            END;
            UPDATE city SET name = 'after' WHERE id = 5;
            END $$""")
    assert copies(db, "SELECT name FROM city WHERE id IN (1, 2, 3, 4, 5, 900) ORDER BY id") == [
        ("outer",), ("city 2",), ("released",), ("kept",), ("after",)]
    conn.execute("UPDATE city SET name = 'city ' || id")


def test_own_writes_are_seen_by_routed_statements(db, conn):
    sql = "SELECT c.name FROM person p JOIN city c ON c.id = p.city WHERE p.k = 7 AND p.id = 1"
    for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"):
        with conn.transaction(force_rollback=True):
            conn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            conn.execute("UPDATE city SET name = 'mine' WHERE id = 7")
            _, asked = db.asked(lambda: conn.execute(sql))
            assert len(asked) == 1
            assert conn.execute(sql).fetchall() == [("mine",)]
            with conn.transaction(force_rollback=True):
                conn.execute("DELETE FROM city WHERE id = 7")
                assert conn.execute(sql).fetchall() == []
            assert conn.execute(sql).fetchall() == [("mine",)]
        assert conn.execute(sql).fetchall() == [("city 7",)]


def test_triggers_of_the_users_own(db, conn):
    conn.execute("""
        CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.note := 'stamped'; RETURN NEW; END $$;
        CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF pg_trigger_depth() = 1 THEN UPDATE city SET name = name || ' again' WHERE id IN (NEW.id, NEW.id + 1); END IF;
            RETURN NULL; END $$;
        CREATE FUNCTION back() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO city (id, name) VALUES (OLD.id, 'back'); RETURN NULL; END $$;""")
    names = ("Early", "late")
    for name in names:
        conn.execute(f"""CREATE TRIGGER "{name}" AFTER INSERT OR UPDATE ON city FOR EACH ROW EXECUTE FUNCTION again()""")
        conn.execute("UPDATE city SET name = 'first' WHERE id BETWEEN 10 AND 20")
        conn.execute("INSERT INTO city VALUES (800, 'one'), (801, 'two')")
        check_copies(db, "city")
        assert copies(db, "SELECT name FROM city WHERE id = 15") == [("first again again",)]
        conn.execute(f"""DELETE FROM city WHERE id >= 800; DROP TRIGGER "{name}" ON city""")
        conn.execute(f"""CREATE TRIGGER "{name}" AFTER DELETE ON city FOR EACH ROW WHEN (OLD.id < 3) EXECUTE FUNCTION back()""")
        conn.execute("DELETE FROM city WHERE id < 5")
        check_copies(db, "city")
        assert copies(db, "SELECT id, name FROM city WHERE id < 5 ORDER BY 1") == [(1, "back"), (2, "back")]
        conn.execute(f"""DROP TRIGGER "{name}" ON city""")
        conn.execute("TRUNCATE city; INSERT INTO city SELECT i, 'city ' || i, i FROM generate_series(1, 50) i")
    conn.execute("CREATE TRIGGER stamp BEFORE INSERT OR UPDATE ON city FOR EACH ROW EXECUTE FUNCTION stamp()")
    conn.execute("UPDATE city SET name = 'x' WHERE id = 30")
    assert copies(db, "SELECT note FROM city WHERE id = 30") == [("stamped",)]
    conn.execute("DROP TRIGGER stamp ON city")


def test_a_changed_key_beside_a_trigger_that_writes(db, conn):
    conn.execute("""CREATE FUNCTION swap() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            UPDATE city SET note = 'swapped' WHERE id = NEW.id AND note <> 'swapped'; RETURN NULL; END $$;
        CREATE TRIGGER a AFTER UPDATE ON city FOR EACH ROW EXECUTE FUNCTION swap()""")
    with pytest.raises(errors.FeatureNotSupported, match="changed primary key"):
        conn.execute("UPDATE city SET id = 600, rank = NULL WHERE id = 6")
    conn.execute("DROP TRIGGER a ON city")


def test_foreign_keys_between_reference_tables(db, conn):
    conn.execute("""CREATE TABLE land (id int PRIMARY KEY, name text);
        CREATE TABLE town (id int PRIMARY KEY, land int REFERENCES land ON DELETE CASCADE ON UPDATE CASCADE,
            next int REFERENCES town ON DELETE SET NULL, CHECK (id > 0));
        INSERT INTO land VALUES (1, 'a'), (2, 'b'), (3, 'c');
        INSERT INTO town SELECT i, i % 3 + 1, NULLIF(i - 1, 0) FROM generate_series(1, 30) i;
        SELECT shardmap.distribute_reference('town'), shardmap.distribute_reference('land')""")
    for sql in ("UPDATE land SET id = id + 10", "DELETE FROM land WHERE id = 12", "DELETE FROM town WHERE id = 3",
                "TRUNCATE land CASCADE"):
        conn.execute(sql)
        check_copies(db, "land")
        check_copies(db, "town")


@pytest.mark.parametrize("role", ["replica", "local"])
def test_session_replication_role(db, conn, role):
    conn.execute(f"SET session_replication_role = {role}")
    conn.execute("UPDATE city SET name = 'replicated' WHERE id = 8")
    assert copies(db, "SELECT name FROM city WHERE id = 8") == [("replicated",)]


def test_deferred_constraints(db, conn):
    conn.execute("""CREATE TABLE place (id int PRIMARY KEY, pos int UNIQUE DEFERRABLE);
        INSERT INTO place VALUES (1, 1), (2, 2); SELECT shardmap.distribute_reference('place')""")
    with conn.transaction():
        conn.execute("SET CONSTRAINTS ALL DEFERRED")
        conn.execute("UPDATE place SET pos = 2 WHERE id = 1")
        conn.execute("UPDATE place SET pos = 1 WHERE id = 2")
    assert copies(db, "SELECT pos FROM place ORDER BY id") == [(2,), (1,)]


def test_a_shards_refusal(db, conn):
    """A row to which a shard's rows refer."""
    conn.execute("""CREATE TABLE visit (k int, city int REFERENCES city, PRIMARY KEY (k, city));
        INSERT INTO visit SELECT k, 11 FROM generate_series(1, 20) k; SELECT shardmap.distribute_table('visit', 'k')""")
    with pytest.raises(errors.ForeignKeyViolation) as refused:
        conn.execute("DELETE FROM city WHERE id IN (10, 11)")
    assert refused.value.diag.constraint_name == "visit_city_fkey" and "shard" in refused.value.diag.context
    assert copies(db, "SELECT id FROM city WHERE id IN (10, 11) ORDER BY 1") == [(10,), (11,)]
    with pytest.raises(errors.ForeignKeyViolation):
        conn.execute("INSERT INTO visit VALUES (3, 77777)")
    for sql in ("TRUNCATE city", "TRUNCATE city CASCADE", "TRUNCATE city, visit"):
        with pytest.raises(errors.FeatureNotSupported, match="referenced in a foreign key") as refused:
            conn.execute(sql)
        assert "DELETE" in refused.value.diag.message_hint and "TRUNCATE" not in refused.value.diag.message_hint
        assert refused.value.diag.message_detail == 'Table "visit" references "city".' and "shard" in refused.value.diag.context
    with conn.transaction(force_rollback=True):
        conn.execute("DELETE FROM visit; DELETE FROM city")
        assert conn.execute("SELECT (SELECT count(*) FROM city), (SELECT count(*) FROM visit)").fetchone() == (0, 0)
    conn.execute("UPDATE city SET name = 'referred' WHERE id = 11")
    conn.execute("INSERT INTO city VALUES (77777, 'new'); INSERT INTO visit VALUES (3, 77777)")
    with pytest.raises(errors.ForeignKeyViolation):
        conn.execute("UPDATE city SET id = 12345 WHERE id = 11")
    conn.execute("DROP TABLE visit; DELETE FROM city WHERE id > 50")


def test_cascades_into_distributed_tables(db, conn):
    conn.execute("""CREATE TABLE lives (k int, city int REFERENCES city ON DELETE CASCADE ON UPDATE CASCADE, PRIMARY KEY (k, city));
        INSERT INTO lives SELECT k, 20 + k % 2 FROM generate_series(1, 20) k; SELECT shardmap.distribute_table('lives', 'k')""")
    conn.execute("UPDATE city SET id = 2021 WHERE id = 21")
    assert conn.execute("SELECT city, count(*) FROM lives GROUP BY 1 ORDER BY 1").fetchall() == [(20, 10), (2021, 10)]
    conn.execute("DELETE FROM city WHERE id = 20")
    assert conn.execute("SELECT city, count(*) FROM lives GROUP BY 1").fetchall() == [(2021, 10)]
    conn.execute("SELECT shardmap.undistribute_table('lives')")
    with pytest.raises(errors.ForeignKeyViolation):
        conn.execute("INSERT INTO lives VALUES (1, 99999)")
    conn.execute("DROP TABLE lives; TRUNCATE city; INSERT INTO city SELECT i, 'city ' || i, i FROM generate_series(1, 50) i")


def test_concurrent_writers(db):
    """Like a bank: what is added to one row is taken from another; copies are equal at the end, and the sum is as before."""
    db.psql("CREATE TABLE bank (id int PRIMARY KEY, v int); INSERT INTO bank SELECT i, 100 FROM generate_series(1, 20) i;"
            " SELECT shardmap.distribute_reference('bank')")
    failures = []

    def work(seed):
        chance, done = random.Random(seed), 0
        with db.connect() as conn:
            while done < 40:
                a, b = chance.sample(range(1, 21), 2)
                try:
                    with conn.transaction():
                        conn.execute("UPDATE bank SET v = v - 1 WHERE id = %s", (a,))
                        if chance.random() < 0.2:
                            conn.execute("INSERT INTO bank VALUES (%s, 0) ON CONFLICT (id) DO UPDATE SET v = bank.v", (b,))
                        conn.execute("UPDATE bank SET v = v + 1 WHERE id = %s", (b,))
                        if chance.random() < 0.2:
                            raise psycopg.Rollback
                        done += 1
                except errors.DeadlockDetected:
                    pass
                except Exception as error:  # a thread's error would go unseen
                    failures.append(repr(error))
                    return

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    check_copies(db, "bank")
    assert copies(db, "SELECT count(*), sum(v) FROM bank") == [(20, 2000)]


def test_a_copy_that_differs_is_found_and_made_anew(db, conn):
    with db.shard(2) as shard:
        shard.execute("UPDATE city SET name = 'tampered' WHERE id = 3; DELETE FROM city WHERE id = 4; INSERT INTO city VALUES (5555)")
    with db.shard(3) as shard:
        shard.execute("DROP TABLE city CASCADE")
    with pytest.raises(errors.UndefinedTable):
        conn.execute("SELECT * FROM shardmap.verify_reference('city')")
    conn.execute("SELECT shardmap.refresh_reference('city')")
    check_copies(db, "city")
    with db.shard(1) as shard:
        shard.execute("DELETE FROM city WHERE id = 40")
    verified = conn.execute("SELECT shard, equal, rows, rows_here FROM shardmap.verify_reference('city')").fetchall()
    assert verified == [("shard-0", True, 50, 50), ("shard-1", False, 49, 50), ("shard-2", True, 50, 50), ("shard-3", True, 50, 50)]
    conn.execute("UPDATE city SET name = 'city 40' WHERE id = 40")  # writing the row brings it back
    check_copies(db, "city")
    with db.shard(1) as shard:
        shard.execute("""
            DELETE FROM city WHERE id IN (41, 42);
            CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
            CREATE TRIGGER none BEFORE DELETE ON city FOR EACH ROW EXECUTE FUNCTION never()""")
    conn.execute("UPDATE city SET id = 4041 WHERE id = 41")
    with pytest.raises(errors.DataCorrupted, match="shard-1"):
        conn.execute("DELETE FROM city WHERE id > 41")
    with db.shard(1) as shard:
        shard.execute("DROP TRIGGER none ON city")
    conn.execute("DELETE FROM city WHERE id > 41")
