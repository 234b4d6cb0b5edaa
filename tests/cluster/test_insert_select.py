"""INSERT .. SELECT: whole on one shard if what it reads and what it inserts is all of one key; else row by row, as ever.

As in test_router: with literals and as a generic plan, with routing off, and on local tables of the same names and rows.
"""

import pytest
from psycopg import errors
from test_router import is_routed, plan_of, same, sessions  # noqa: F401: a fixture

TABLES = """
CREATE TABLE {0}.t (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE {0}.u (k int, id int DEFAULT 50, n numeric(8, 2) DEFAULT 1.5, at timestamptz, doc jsonb, tags int[], PRIMARY KEY (k, id));
CREATE TABLE {0}.b (k bigint, id smallint, c varchar(6) DEFAULT 'none', PRIMARY KEY (k, id));
CREATE TABLE {0}.w (c text, gone int, k numeric, made text DEFAULT current_user, id int GENERATED ALWAYS AS (length(c)) STORED);
ALTER TABLE {0}.w DROP COLUMN gone;
INSERT INTO {0}.t SELECT k, id, 'c' || id % 3 FROM generate_series(1, 20) k, generate_series(1, 5) id;
INSERT INTO {0}.u SELECT k, id, id / 2.0, '2024-03-01 12:00+00'::timestamptz FROM {0}.t WHERE id < 4;
CREATE VIEW {0}.v AS SELECT c, k, id AS number FROM {0}.t WHERE id < 1000;
"""
SETUP = f"""
CREATE SCHEMA plain;
{TABLES.format("plain")}
{TABLES.format("public")}
CREATE TABLE numbered (k int, id serial, c text, PRIMARY KEY (k, id));
CREATE TABLE short (k varchar(3), id int, PRIMARY KEY (k, id));
CREATE TABLE local (k int, id int);
INSERT INTO local VALUES (7, 1);
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{{t,u,b,w,numbered,short}}'::regclass[]) x;
"""


# (statement, whether a lower step can do it too)
INSERTS = [
    ("INSERT INTO t SELECT k, id + 100, n::text FROM u WHERE k = 7", True),
    ("INSERT INTO t SELECT k, id + 100, c FROM t WHERE k = 7", True),
    # The columns in another order than the table's, and fewer.
    ("INSERT INTO t (c, id, k) SELECT c, id + 100, k FROM t WHERE k = 7", True),
    ("INSERT INTO t (id, k) SELECT id + 100, k FROM u WHERE k = 7 RETURNING id, c, k", True),
    ("INSERT INTO u (n, k) SELECT max(n), k FROM u WHERE k = 7 GROUP BY k RETURNING *", True),
    ("INSERT INTO u (k, id) SELECT DISTINCT k, id + 1000 FROM t WHERE k = 7", True),
    ("INSERT INTO u (id, k, at) SELECT id + 1000, k, now() - now() + timestamptz '2024-01-01 00:00+00' FROM t WHERE k = 7", True),
    # Literals, with a type and without; parameters.
    ("INSERT INTO t SELECT 7, id + 100, 'x' FROM u WHERE k = 7", True),
    ("INSERT INTO t (c, k, id) SELECT 'x', 7, id + 100 FROM u WHERE k = 7 ORDER BY id LIMIT 2", True),
    ("INSERT INTO u (doc, k, id, tags) SELECT '{\"a\": 1}', k, id + 100, '{1,2}' FROM u WHERE k = 7", True),
    ("INSERT INTO t SELECT 7, 70, 'x'", True),
    ("INSERT INTO t SELECT 7, 70, NULL WHERE EXISTS (SELECT FROM u WHERE k = 7 AND id = 3)", True),
    ("INSERT INTO t SELECT 7, 70, 'x' WHERE NOT EXISTS (SELECT FROM t WHERE k = 7 AND id = 5)", True),
    # Sources of all kinds.
    ("INSERT INTO t SELECT t.k, t.id + 100, u.n::text FROM t JOIN u USING (k, id) WHERE t.k = 7", True),
    ("WITH x AS (SELECT * FROM t WHERE k = 7) INSERT INTO t (k, c, id) SELECT k, c, id + 100 FROM x", True),
    ("INSERT INTO t WITH x AS MATERIALIZED (SELECT * FROM t WHERE k = 7) SELECT 7, id + 100, c FROM x", True),
    ("INSERT INTO t SELECT s.* FROM (SELECT k, id + 100, c FROM t WHERE k = 7) s", True),
    ("INSERT INTO t SELECT k, row_number() OVER (ORDER BY id) + 100, c FROM t WHERE k = 7", True),
    ("INSERT INTO t SELECT * FROM (VALUES (7, 70, 'x')) s", True),
    ("INSERT INTO t SELECT k, id + g, c FROM t, generate_series(100, 300, 100) g WHERE k = 7", True),
    ("INSERT INTO v (number, c, k) SELECT number + 100, c, k FROM v WHERE k = 7", True),
    ("WITH d AS (DELETE FROM u WHERE k = 7 RETURNING *) INSERT INTO t SELECT 7, id + 100, n::text FROM d", None),
    ("WITH i AS (INSERT INTO t SELECT k, id + 100, c FROM t WHERE k = 7 RETURNING id) SELECT sum(id) FROM i", None),
    # Other types.
    ("INSERT INTO b SELECT k, id, c FROM t WHERE k = 7", True),
    ("INSERT INTO b (id, k) SELECT id::bigint, k FROM t WHERE k = 7 RETURNING c, id", True),
    ("INSERT INTO t SELECT k, id + 100, n FROM (SELECT 7::bigint AS k, id, n FROM u WHERE k = 7::bigint) s", True),
    ("INSERT INTO w (k, c) SELECT k, c || n FROM t JOIN u USING (k, id) WHERE k = 7 RETURNING *", True),
    # What only a whole shard can do.
    ("INSERT INTO t SELECT k, id, 'x' FROM u WHERE k = 7 ON CONFLICT (k, id) DO UPDATE SET c = t.c || excluded.c RETURNING *", False),
    ("INSERT INTO t (id, k) SELECT id + 2, k FROM u WHERE k = 7 ON CONFLICT (k, id) DO NOTHING RETURNING id", False),
]


@pytest.mark.parametrize("sql, everywhere", INSERTS)
def test_on_one_shard(sessions, sql, everywhere):
    same(sessions, sql, bool(everywhere))


@pytest.mark.parametrize("sql", [
    "INSERT INTO t SELECT k + 1, id + 100, c FROM t WHERE k = 7",
    "INSERT INTO t SELECT id, 100, c FROM t WHERE k = 7",
    "INSERT INTO t SELECT {b}, id + 100, c FROM t WHERE k = {a}",
    "INSERT INTO t SELECT k, id + 100, c FROM t WHERE k IN ({a}, {b})",
    "INSERT INTO t SELECT k, id + 100, c FROM t WHERE k = {a} UNION ALL SELECT k, id + 100, c FROM t WHERE k = {b}",
    # A union's arms do not tell their key; a view's table is used as another user than the target.
    "INSERT INTO t SELECT k, id + 100, c FROM t WHERE k = 7 UNION ALL SELECT k, id + 200, c FROM t WHERE k = 7",
    "INSERT INTO t SELECT k, number + 100, c FROM v WHERE k = 7",
    "INSERT INTO t SELECT x.k, x.id + 100, c FROM t LEFT JOIN (SELECT {b} AS k, 1 AS id) x ON true WHERE t.k = {a} AND t.id = 1",
    "INSERT INTO t SELECT l.k, l.id + 100, 'x' FROM local l",
    "INSERT INTO t (k, id) SELECT k, id + 100 + (random() < 0)::int FROM t WHERE k = 7",
    "INSERT INTO numbered (k) SELECT k FROM t WHERE k = 7",
    "INSERT INTO short SELECT 'abc'::text || repeat(' ', id), id FROM t WHERE k = 7",
])
def test_what_is_not(db, conn, sql):
    """Rows are where their keys belong all the same."""
    a, b = db.apart(key_type="int4")
    sql = sql.format(a=a, b=b)
    assert "ShardRoute" not in plan_of(conn, sql), plan_of(conn, sql)
    before = {table: conn.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("t", "numbered", "short")}
    count = conn.execute(sql).rowcount
    after = {table: conn.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in before}
    assert count > 0 and sum(after.values()) == sum(before.values()) + count
    for table, kind in (("t", "int4"), ("numbered", "int4"), ("short", "text")):
        for shard, rows in db.shard_rows(f"SELECT k FROM {table}").items():
            assert all(shard == db.owner(str(key), kind) for key, in rows), (table, shard)
    for table in before:
        conn.execute(f"DELETE FROM {table} WHERE id > 5 OR '{table}' <> 't'")


def test_each_key_goes_to_its_shard(db):
    """By one generic plan."""
    with db.connect(shardmap__fanout_policy="error", plan_cache_mode="force_generic_plan") as conn:
        for key in range(1, 13):
            cursor, found = db.asked(lambda: conn.execute(
                "INSERT INTO t (c, k, id) SELECT %s, k, id + 100 FROM u WHERE k = %s", ("made", key), prepare=True))  # noqa: B023
            assert cursor.rowcount == 3 and set(found) == db.owners(key, key_type="int4")
        for shard, rows in db.shard_rows("SELECT k FROM t WHERE c = 'made'").items():
            assert all(shard == db.owner(key, "int4") for key, in rows)
        assert conn.execute("SELECT count(*) FROM t WHERE k = 3 AND c = 'made'").fetchone() == (3,)
        for key in range(1, 13):
            conn.execute("DELETE FROM t WHERE k = %s AND c = 'made'", (key,))


def test_errors_of_the_shard_come_back(conn):
    for sql, error in (("INSERT INTO t SELECT k, id, c FROM t WHERE k = 7", errors.UniqueViolation),
                       ("INSERT INTO b SELECT k, id, repeat(c, 9) FROM t WHERE k = 7", errors.StringDataRightTruncation),
                       ("INSERT INTO b SELECT k, id + 40000 FROM t WHERE k = 7", errors.NumericValueOutOfRange)):
        assert is_routed(plan_of(conn, sql)), sql
        with pytest.raises(error):
            conn.execute(sql)
