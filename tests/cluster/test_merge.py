"""MERGE: whole on the shard of its one key, with the answer that one server would give; else refused, with a reason.

Each statement runs with literals and as a generic plan, on logical tables and on local tables of the same names and rows
(schema plain). Key 7 is the only one that the statements name; in a generic plan it is a parameter.
"""

import pytest
from psycopg import errors
from test_router import generic, is_routed, outcome, plan_of

TABLES = """
CREATE TABLE {0}.t (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE {0}.u (k int, id int DEFAULT 50, n numeric DEFAULT 1.5, PRIMARY KEY (k, id));
INSERT INTO {0}.t SELECT k, id, 'c' || id % 3 FROM generate_series(1, 20) k, generate_series(1, 5) id;
INSERT INTO {0}.u SELECT k, id + 2, id / 2.0 FROM {0}.t WHERE id < 5;
CREATE TABLE {0}.b (k bigint, id int, c text, PRIMARY KEY (k, id));
"""
SETUP = f"""
CREATE SCHEMA plain;
{TABLES.format("plain")}
{TABLES.format("public")}
CREATE TABLE numbered (k int, id serial, made text DEFAULT current_user, at timestamptz DEFAULT now(), PRIMARY KEY (k, id));
CREATE TABLE fired (k int, id int, PRIMARY KEY (k, id));
CREATE TABLE guarded (k int, id int, owner name, PRIMARY KEY (k, id));
CREATE TABLE local (k int, id int);
CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{{t,u,b,numbered,fired,guarded}}'::regclass[]) x;
CREATE TRIGGER f AFTER DELETE ON fired FOR EACH STATEMENT EXECUTE FUNCTION f();
CREATE POLICY own ON guarded USING (owner = current_user);
ALTER TABLE guarded ENABLE ROW LEVEL SECURITY;
"""

UPSERT = "ON t.k = s.k AND t.id = s.id WHEN MATCHED THEN UPDATE SET c = s.c WHEN NOT MATCHED THEN INSERT VALUES (s.k, s.id, s.c)"

MERGES = [
    f"MERGE INTO t USING (VALUES (7, 1, 'x')) s(k, id, c) {UPSERT}",
    f"MERGE INTO t USING (VALUES (7, 1, 'x'), (7, 10, NULL)) s(k, id, c) {UPSERT}",
    f"MERGE INTO t USING (SELECT 7 AS k, 10 AS id, 'x' || 1 AS c) s {UPSERT}",
    f"MERGE INTO t USING (SELECT k, id, n::text AS c FROM u WHERE k = 7) s {UPSERT}",
    f"MERGE INTO t USING (SELECT k, max(id) + 1 AS id, 'max' AS c FROM u WHERE k = 7 GROUP BY k) s {UPSERT}",
    f"WITH s AS (SELECT * FROM t WHERE k = 7 AND id > 3) MERGE INTO t USING s {UPSERT}",
    f"WITH s AS MATERIALIZED (SELECT 7 AS k, id, 'm' AS c FROM u WHERE k = 7) MERGE INTO t USING s {UPSERT}",
    "MERGE INTO t AS mine USING (SELECT * FROM u WHERE k = 7) s ON mine.k = s.k AND mine.id = s.id"
    " WHEN MATCHED AND s.n > 1 THEN DELETE WHEN MATCHED AND mine.c = 'c0' THEN DO NOTHING"
    " WHEN MATCHED THEN UPDATE SET c = mine.c || s.n, id = mine.id + 100"
    " WHEN NOT MATCHED AND s.id = 6 THEN INSERT (c, k, id) VALUES (upper('six'), s.k, s.id)"
    " WHEN NOT MATCHED THEN DO NOTHING",
    # As programs write it that save rows as a whole.
    "MERGE INTO t USING (VALUES (7, 1, 'x'), (7, 9, 'y')) s(k, id, c) ON t.k = s.k AND t.id = s.id"
    " WHEN MATCHED THEN UPDATE SET k = s.k, id = s.id, c = s.c WHEN NOT MATCHED THEN INSERT VALUES (s.k, s.id, s.c)",
    # No row of another key matches, and none is inserted.
    "MERGE INTO t USING u ON t.k = u.k AND t.id = u.id AND t.k = 7 WHEN MATCHED THEN UPDATE SET c = 'x' || u.n",
    "MERGE INTO t USING u ON t.k = u.k AND t.id = u.id AND u.k = 7 WHEN MATCHED AND u.n > 1 THEN DELETE",
    "MERGE INTO t USING (VALUES (1), (9)) s(id) ON t.k = 7 AND t.id = s.id WHEN MATCHED THEN DELETE"
    " WHEN NOT MATCHED THEN INSERT (id, k) VALUES (s.id, 7)",
    "MERGE INTO t USING (SELECT 7 AS k) s ON false WHEN NOT MATCHED THEN INSERT (k, id) VALUES (s.k, 77)",
    "MERGE INTO t USING (SELECT 7 AS k) s ON t.k = s.k AND t.id = 1 WHEN MATCHED THEN UPDATE SET c ="
    " (SELECT max(n)::text FROM u WHERE u.k = s.k) WHEN NOT MATCHED THEN DO NOTHING",
    "MERGE INTO t USING (SELECT * FROM u WHERE k = 7) s ON t.k = s.k AND t.id = s.id"
    " WHEN NOT MATCHED AND EXISTS (SELECT FROM t x WHERE x.k = s.k AND x.id = s.id - 1) THEN INSERT VALUES (s.k, s.id, 'next')",
    "MERGE INTO u USING (SELECT 7 AS k, 99 AS id) s ON u.k = s.k AND u.id = s.id"
    " WHEN NOT MATCHED THEN INSERT (k) VALUES (s.k) WHEN MATCHED THEN UPDATE SET n = DEFAULT",
    # Another integer type than the key's.
    "MERGE INTO t USING (SELECT 7::bigint AS k) s ON t.k = s.k AND t.id = 8"
    " WHEN NOT MATCHED THEN INSERT (k, id) VALUES (s.k, 8)",
    "MERGE INTO b USING t ON b.k = t.k AND t.k = 7 WHEN MATCHED THEN DELETE",
    "MERGE INTO b USING (SELECT * FROM t WHERE k = 7) s ON b.k = s.k WHEN NOT MATCHED THEN INSERT VALUES (s.k, s.id)",
]
LATER = [
    "MERGE INTO t USING (SELECT * FROM u WHERE k = 7) s ON t.k = s.k AND t.id = s.id WHEN MATCHED THEN UPDATE SET c = 'y'"
    " WHEN NOT MATCHED BY SOURCE AND t.k = 7 AND id < 2 THEN DELETE"
    " WHEN NOT MATCHED BY TARGET THEN INSERT VALUES (s.k, s.id) RETURNING merge_action(), t.*, s.n",
    "MERGE INTO t USING (SELECT 1 AS id WHERE false) s ON t.k = 7 AND t.id = s.id"
    " WHEN NOT MATCHED BY SOURCE AND k = 7 THEN UPDATE SET c = (SELECT max(n)::text FROM u WHERE k = 7) || t.c RETURNING c",
    "WITH m AS (MERGE INTO t USING (SELECT 7 AS k) s ON t.k = s.k AND t.id < 3 WHEN MATCHED THEN DELETE RETURNING id)"
    " SELECT sum(id), (SELECT count(*) FROM t WHERE k = 7) FROM m",
]


@pytest.fixture(scope="module")
def sessions(db):
    with db.connect() as routed, db.connect(search_path="plain") as local:
        for conn in (routed, local):
            conn.prepare_threshold = None
        yield routed, local


def same(sessions, sql):
    routed, local = sessions
    want = outcome(local, sql, False)
    for executed in (sql, generic(routed, sql)):
        assert is_routed(plan_of(routed, executed)), plan_of(routed, executed)
        assert outcome(routed, executed, False) == want
    return want


@pytest.mark.parametrize("sql", MERGES)
def test_on_one_shard(sessions, sql):
    _, count, *_ = same(sessions, sql)
    assert count > 0 or sql.startswith("MERGE INTO b USING t")


@pytest.mark.parametrize("sql", LATER)
def test_by_source_and_returning(sessions, sql):
    if sessions[0].info.server_version < 170000:
        pytest.skip("Postgres 17 and later")
    rows, *_ = same(sessions, sql)
    assert rows


MANY = "It is not about one shard."
KEY = "It assigns to the key."
NOT_KEYED = [
    ("MERGE INTO t USING (VALUES ({a}, 1), ({b}, 1)) s(k, id) ON t.k = s.k WHEN MATCHED THEN DELETE", MANY),
    # A row of u with another key matches nothing, and would be inserted.
    ("MERGE INTO t USING u ON t.k = u.k AND u.k = {a} WHEN NOT MATCHED THEN INSERT VALUES (u.k, u.id)", MANY),
    ("MERGE INTO t USING u ON t.k = u.k AND t.k = {a} WHEN NOT MATCHED THEN INSERT VALUES ({a}, u.id + 100)", MANY),
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.k = s.k AND t.id = 9 WHEN NOT MATCHED THEN INSERT VALUES ({b}, 9)", MANY),
    ("MERGE INTO t USING (SELECT {a} AS k, {b} AS o) s ON t.k = s.k AND t.id = 9 WHEN NOT MATCHED THEN INSERT VALUES (o, 9)",
     MANY),
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.k = s.k AND t.id = 9 WHEN NOT MATCHED THEN INSERT VALUES (s.k + 1, 9)", MANY),
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.id = 1 WHEN MATCHED THEN DELETE", MANY),
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.id = 1 AND t.k = s.k OR t.id = 2 WHEN MATCHED THEN DELETE", MANY),
    ("MERGE INTO t USING (SELECT {a} AS k GROUP BY ROLLUP (1)) s ON t.k = {a} AND t.id = 9"
     " WHEN NOT MATCHED THEN INSERT VALUES (coalesce(s.k, {b}), 9)", MANY),
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.k = s.k WHEN MATCHED AND EXISTS (SELECT FROM u WHERE id = t.id) THEN DELETE",
     MANY),
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.k = s.k WHEN MATCHED THEN UPDATE SET k = {b}", KEY),
    ("MERGE INTO t USING (SELECT {a} AS k, {b} AS o) s ON t.k = s.k WHEN MATCHED THEN UPDATE SET k = s.o", KEY),
    ("MERGE INTO t USING (SELECT {a} AS k, {b} AS o) s ON t.k = s.k AND (t.k = s.o OR t.id > 0)"
     " WHEN MATCHED THEN UPDATE SET k = s.o", KEY),
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.k = s.k WHEN MATCHED THEN UPDATE SET c = random()",
     "A function in it gives another value for each row."),
    ("MERGE INTO t USING local l ON t.k = {a} AND t.id = l.id WHEN MATCHED THEN DELETE",
     "There are other tables than logical ones in it."),
    ("MERGE INTO fired USING (SELECT {a} AS k) s ON fired.k = s.k WHEN MATCHED THEN DELETE",
     "The table written has triggers here."),
]
NOT_KEYED_LATER = [
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.k = s.k WHEN NOT MATCHED BY SOURCE THEN DELETE", MANY),
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.k = s.k WHEN NOT MATCHED BY SOURCE AND t.k = {b} THEN DELETE", MANY),
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.k = s.k WHEN NOT MATCHED BY SOURCE AND t.k = {a} THEN DELETE"
     " WHEN NOT MATCHED BY SOURCE AND t.id = 1 THEN DELETE", MANY),
    ("MERGE INTO t USING (SELECT {a} AS k, {a} AS id WHERE false) s ON t.k = s.k WHEN NOT MATCHED BY SOURCE AND t.k = {a}"
     " THEN UPDATE SET c = (SELECT count(*) FROM u)", MANY),
    ("MERGE INTO t USING (SELECT {a} AS k) s ON t.k = s.k AND t.id = {a} WHEN MATCHED THEN UPDATE SET id = {b}"
     " RETURNING (SELECT count(*) FROM u WHERE u.k = t.id)", MANY),
]


@pytest.mark.parametrize("sql, why", NOT_KEYED + NOT_KEYED_LATER)
def test_refused(db, conn, sql, why):
    if (sql, why) in NOT_KEYED_LATER and conn.info.server_version < 170000:
        pytest.skip("Postgres 17 and later")
    a, b = db.apart(key_type="int4")
    for given in (sql.format(a=a, b=b), sql.format(a="$1", b="$2")):
        conn.execute("SET plan_cache_mode = force_custom_plan; DEALLOCATE ALL")
        conn.execute(f"PREPARE q (int, int) AS {given}")
        before = db.shard_rows("SELECT * FROM t ORDER BY k, id")
        with pytest.raises(errors.FeatureNotSupported, match="MERGE into table public.* cannot run on one shard") as caught:
            conn.execute(f"EXECUTE q ({a}, {b})")
        assert caught.value.diag.message_detail == why
        assert "Let ON compare the key with a value" in caught.value.diag.message_hint
        assert db.shard_rows("SELECT * FROM t ORDER BY k, id") == before


def test_each_key_goes_to_its_shard(db):
    """By one generic plan, and every row is where its key belongs."""
    with db.connect(shardmap__fanout_policy="error", plan_cache_mode="force_generic_plan") as conn:
        merge = f"MERGE INTO t USING (SELECT %s::int AS k, %s::int AS id, %s::text AS c) s {UPSERT}"
        for key in range(101, 111):
            for c in ("first", "second"):
                cursor, found = db.asked(lambda: conn.execute(merge, (key, 1, c), prepare=True))  # noqa: B023
                assert cursor.rowcount == 1 and cursor.statusmessage == "MERGE 1"
                assert set(found) == db.owners(key, key_type="int4")
        stored = db.shard_rows("SELECT k, c FROM t WHERE k > 100")
        assert sorted(row for rows in stored.values() for row in rows) == [(key, "second") for key in range(101, 111)]
        for shard, rows in stored.items():
            assert all(shard == db.owner(key, "int4") for key, _ in rows)
        conn.execute("DELETE FROM t WHERE k = ANY (%s)", (list(range(101, 111)),))


def test_defaults_are_computed_here(db):
    """One of a sequence for each statement of one row; several rows cannot share one, and are refused."""
    with db.connect() as conn:
        merge = "MERGE INTO numbered USING (VALUES (7, 'x')) s(k, made) ON numbered.k = s.k AND numbered.made = s.made" \
            " WHEN NOT MATCHED THEN INSERT (k, made) VALUES (s.k, s.made) WHEN MATCHED THEN UPDATE SET at = now()"
        assert is_routed(plan_of(conn, merge))
        conn.execute("BEGIN")
        (now,), = conn.execute("SELECT now()").fetchall()
        assert conn.execute(merge).rowcount == 1
        (first, made, at), = conn.execute("SELECT id, made, at FROM numbered WHERE k = 7").fetchall()
        assert (made, at) == ("x", now)
        conn.execute("COMMIT")
        assert conn.execute(merge).rowcount == 1
        assert conn.execute("SELECT id, at > %s FROM numbered WHERE k = 7", (now,)).fetchall() == [(first, True)]
        conn.execute(merge.replace("'x'", "'y'"))
        assert conn.execute("SELECT count(*), count(DISTINCT id) FROM numbered WHERE k = 7").fetchone() == (2, 2)
        with pytest.raises(errors.FeatureNotSupported):
            conn.execute(merge.replace("(7, 'x')", "(7, 'x'), (7, 'z')"))


def test_row_security_is_refused(db):
    db.add_user("mila")
    db.psql("GRANT ALL ON guarded TO mila")
    with db.connect("mila") as conn, pytest.raises(errors.FeatureNotSupported) as caught:
        conn.execute("MERGE INTO guarded USING (SELECT 7 AS k) s ON guarded.k = s.k WHEN MATCHED THEN DELETE")
    assert caught.value.diag.message_detail == "Row security or a security barrier applies."


def test_privileges_are_asked_here(db):
    db.add_user("mona")
    db.psql("GRANT SELECT, UPDATE ON t TO mona")
    with db.connect("mona") as conn:
        merge = "MERGE INTO t USING (SELECT 7 AS k, 1 AS id) s ON t.k = s.k AND t.id = s.id WHEN MATCHED THEN {}"
        assert conn.execute(merge.format("UPDATE SET c = c")).rowcount == 1
        with pytest.raises(errors.InsufficientPrivilege):
            conn.execute(merge.format("DELETE"))
        with pytest.raises(errors.ReadOnlySqlTransaction):
            conn.execute("BEGIN READ ONLY;" + merge.format("UPDATE SET c = c"))


def test_values_that_are_joined_narrow_a_select(db, conn):
    """A single row of VALUES, or a subquery's constant, names the key too."""
    conn.execute("SET shardmap.fanout_policy = error")
    for sql in ("SELECT t.id FROM t JOIN (VALUES (7, 2)) v(k, id) USING (k, id)",
                "SELECT t.id FROM (SELECT 7 AS k, 2 AS id) v JOIN t USING (k, id)",
                "WITH v AS (SELECT 7 AS k) SELECT id FROM t JOIN v USING (k) WHERE id = 2"):
        assert is_routed(plan_of(conn, sql))
        cursor, found = db.asked(lambda: conn.execute(sql))  # noqa: B023
        assert cursor.fetchall() == [(2,)] and set(found) == db.owners(7, key_type="int4")
    conn.execute("SET shardmap.fanout_policy = allow")
    for sql in ("SELECT count(*) FROM t LEFT JOIN (SELECT 7 AS k) v ON v.k = t.k",
                "SELECT count(*) FROM t, (SELECT 7 AS k GROUP BY ROLLUP (1)) v WHERE t.k = v.k OR v.k IS NULL"):
        assert "Routing: all shards" in plan_of(conn, sql)
    assert conn.execute("SELECT count(*), count(v.k) FROM t LEFT JOIN (SELECT 7 AS k) v ON v.k = t.k").fetchone() == (100, 5)
