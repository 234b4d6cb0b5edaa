"""Pitfalls 19 to 25: writes. Each row is written once, on the shard that owns it, and the count in the tag is true."""

import concurrent.futures
import contextlib
import re

import pytest
from patience import PATIENCE, wait_until
from psycopg import errors

SETUP = """
CREATE TABLE t (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE u (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE r (k int, x float8, PRIMARY KEY (k));
CREATE TABLE s (k text NOT NULL, id serial, c text DEFAULT 'none');
CREATE TABLE local (k int, id int, c text);
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{t,u,r,s}'::regclass[]) x;
"""

ROUTING = pytest.mark.parametrize("routing", ["on", "off"])


@pytest.fixture(autouse=True)
def rows(db):
    """t and u hold (k, id, 'old') for k 1 to 20 and id 1 to 2, r and local k 1 to 20; s is empty."""
    with db.connect() as conn:
        conn.execute("DELETE FROM t; DELETE FROM u; DELETE FROM r; DELETE FROM s; DELETE FROM local")
        conn.execute("INSERT INTO local SELECT k, id, 'old' FROM generate_series(1, 20) k, generate_series(1, 2) id")
        conn.execute("INSERT INTO t TABLE local; INSERT INTO u TABLE local; INSERT INTO r SELECT k, 0 FROM local"
                     " WHERE id = 1")


def stored(db, table):
    """All rows of the table as (shard, row), and a check that each is on the shard that owns its key."""
    found = [(shard, row) for shard, rows in db.shard_rows(f"SELECT * FROM {table}").items() for row in rows]
    kind = "text" if table == "s" else "int4"
    for shard, row in found:
        assert shard == db.owner(row[0], kind), (table, shard, row)
    return sorted(row for _, row in found)


def owners(db, *keys):
    return db.owners(*keys, key_type="int4")


VALUES = ", ".join(["(%s, %s, %s)"] * 4)


def insert(conn, kind, rows):
    """Inserts four rows in one statement of that kind and returns the count that its tag says."""
    flat = [value for row in rows for value in row]
    if kind == "literals":
        return conn.execute(f"INSERT INTO t VALUES {', '.join(map(str, rows))}").rowcount
    if kind == "prepared":
        return conn.execute(f"INSERT INTO t VALUES {VALUES}", flat, prepare=True).rowcount
    if kind == "select":
        return conn.execute(f"INSERT INTO t SELECT * FROM (VALUES {VALUES}) v", flat).rowcount
    if kind == "arrays":
        columns = [list(column) for column in zip(*rows)]
        return conn.execute("INSERT INTO t SELECT * FROM unnest(%s::int[], %s::int[], %s::text[])", columns).rowcount
    cursor = conn.cursor()
    if kind == "many":
        cursor.executemany("INSERT INTO t VALUES (%s, %s, %s)", rows)
    else:
        with cursor.copy("COPY t FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
    return cursor.rowcount


@pytest.mark.parametrize("kind", ["literals", "prepared", "select", "arrays", "many", "copy"])
@ROUTING
def test_pitfall_19_rows_of_several_shards(db, routing, kind):
    a, b = (int(k) for k in db.apart(key_type="int4"))
    before = stored(db, "t")
    new = [(a, 10, "x"), (b, 11, "x"), (a, 12, "x"), (b, 13, "x")]
    for mode in ("force_custom_plan", "force_generic_plan"):
        with db.connect(shardmap__enable_routing=routing, plan_cache_mode=mode) as conn:
            count, found = db.asked(lambda: insert(conn, kind, new))
            assert (count, set(found)) == (4, owners(db, a, b))
            assert stored(db, "t") == sorted(before + new)
            assert conn.execute("DELETE FROM t WHERE c = 'x'").rowcount == 4


@ROUTING
def test_pitfall_19_single_row_insert_asks_its_shard(db, routing):
    for mode in ("force_custom_plan", "force_generic_plan"):
        with db.connect(shardmap__enable_routing=routing, plan_cache_mode=mode) as conn:
            for k in range(1, 9):
                cursor, found = db.asked(lambda: conn.execute(
                    "INSERT INTO t VALUES (%s, 50, 'new') RETURNING id, c", (k,), prepare=True))
                assert (cursor.fetchall(), set(found)) == ([(50, "new")], owners(db, k))
                cursor, found = db.asked(lambda: conn.execute(f"INSERT INTO t VALUES ({k}, 51) RETURNING k, c"))
                assert (cursor.fetchall(), set(found)) == ([(k, None)], owners(db, k))
            assert [row[0] for row in stored(db, "t") if row[1] == 50] == list(range(1, 9))
            conn.execute("DELETE FROM t WHERE id >= 50")


@ROUTING
def test_pitfall_20_serial_default_under_a_cte(db, routing):
    with db.connect(shardmap__enable_routing=routing) as conn:
        for number in range(6):
            returned = conn.execute("WITH v AS (SELECT 'key' || %s::int AS k)"
                                    " INSERT INTO s (k) SELECT k FROM v RETURNING *", (number,)).fetchall()
            assert len(returned) == 1 and returned[0][0] == f"key{number}" and returned[0][2] == "none"
        conn.execute("WITH v AS (SELECT k FROM local WHERE id = 1) INSERT INTO s (k) SELECT 'l' || k FROM v")
        found = stored(db, "s")
        assert len(found) == 26
        assert len({row[1] for row in found}) == 26, "a serial value was used twice"
        # What RETURNING said is what is stored.
        assert returned[0] in found


@ROUTING
def test_pitfall_21_delete_with_subquery(db, routing):
    with db.connect(shardmap__enable_routing=routing) as conn:
        sql = "DELETE FROM t WHERE k = {0} AND id IN (SELECT id FROM u WHERE k = {0} AND id > 1)"
        cursor, found = db.asked(lambda: conn.execute(sql.format(3)))
        assert (cursor.rowcount, set(found)) == (1, owners(db, 3))
        cursor, found = db.asked(lambda: conn.execute(sql.format("%s"), (4, 4), prepare=True))
        assert (cursor.rowcount, set(found)) == (1, owners(db, 4))
        cursor = conn.execute("UPDATE t SET c = 'new' WHERE k = 5 AND EXISTS (SELECT FROM u WHERE u.k = t.k)")
        assert cursor.rowcount == 2
        assert conn.execute("DELETE FROM t WHERE id IN (SELECT id FROM u WHERE k = 1 AND id = 2)").rowcount == 18
        assert len(stored(db, "t")) == 20


@ROUTING
def test_pitfall_22_volatile_values_are_computed_for_each_row(db, routing):
    with db.connect(shardmap__enable_routing=routing) as conn:
        assert conn.execute("UPDATE r SET x = random()").rowcount == 20
        assert len({x for _, x in stored(db, "r")}) == 20
        conn.execute("UPDATE t SET c = random()::text WHERE k = 7")
        assert len({c for k, _, c in stored(db, "t") if k == 7}) == 2
        conn.execute("INSERT INTO r SELECT 100 + k, random() FROM generate_series(1, 20) k")
        assert len({x for k, x in stored(db, "r") if k > 100}) == 20
        counts = {conn.execute("SELECT count(*) FROM r WHERE 0.5 > random()").fetchone()[0] for _ in range(10)}
        assert len(counts) > 1 and counts - {0, 40}
        # A volatile key of its own for each row.
        conn.execute("INSERT INTO r SELECT (1000 + n * 1000 + random() * 500)::int, n FROM generate_series(1, 10) n")
        assert len([k for k, _ in stored(db, "r") if k >= 1000]) == 10


@ROUTING
def test_pitfall_23_true_count_with_do_nothing(db, routing):
    with db.connect(shardmap__enable_routing=routing) as conn:
        conn.execute("DELETE FROM t WHERE k <= 5")
        assert conn.execute("INSERT INTO t SELECT * FROM u ON CONFLICT DO NOTHING").rowcount == 10
        assert conn.execute("INSERT INTO t TABLE local ON CONFLICT DO NOTHING").rowcount == 0
        assert conn.execute("INSERT INTO t VALUES (1, 1), (1, 99), (2, 99) ON CONFLICT DO NOTHING").rowcount == 2
        assert conn.execute("INSERT INTO t VALUES (1, 1) ON CONFLICT DO NOTHING").rowcount == 0
        assert conn.execute("INSERT INTO t VALUES (1, 1) ON CONFLICT DO NOTHING RETURNING k").fetchall() == []
        assert len(stored(db, "t")) == 42


@ROUTING
def test_pitfall_24_explain_analyze_runs_once(db, routing):
    before = stored(db, "t")
    with db.connect(shardmap__enable_routing=routing) as conn:
        conn.execute("EXPLAIN INSERT INTO t VALUES (3, 30)")
        assert stored(db, "t") == before
        conn.execute("EXPLAIN (ANALYZE, VERBOSE) INSERT INTO t VALUES (3, 30)")
        conn.execute("EXPLAIN ANALYZE INSERT INTO t VALUES (3, 31), (4, 31), (5, 31)")
        assert stored(db, "t") == sorted(before + [(3, 30, None), (3, 31, None), (4, 31, None), (5, 31, None)])
        conn.execute("EXPLAIN ANALYZE UPDATE t SET c = c || '!' WHERE k = 7 AND id = 1")
        assert (7, 1, "old!") in stored(db, "t")
        conn.execute("EXPLAIN ANALYZE DELETE FROM t WHERE id >= 30")
        assert len(stored(db, "t")) == 40


@ROUTING
def test_pitfall_25_returning_from_using(db, routing):
    """ON CONFLICT and MERGE are below."""
    with db.connect(shardmap__enable_routing=routing) as conn:
        for sql, want in (
                ("UPDATE t SET c = 'new' WHERE k = 7 RETURNING k, id, c", [(7, 1, "new"), (7, 2, "new")]),
                ("UPDATE t SET c = u.c || '!' FROM u WHERE u.k = t.k AND u.id = t.id AND t.k = 7 RETURNING t.id, t.c",
                 [(1, "old!"), (2, "old!")]),
                ("UPDATE t SET c = l.c FROM local l WHERE l.k = t.k AND t.k = 7 AND l.id = 1 RETURNING t.id",
                 [(1,), (2,)]),
                ("DELETE FROM t USING u WHERE u.k = t.k AND t.k = 7 AND u.id = t.id AND u.id = 1 RETURNING t.*",
                 [(7, 1, "old")]),
                ("WITH gone AS (DELETE FROM t WHERE k = 7 RETURNING *) SELECT count(*) FROM gone", [(1,)]),
                ("INSERT INTO t VALUES (7, 1, 'back') RETURNING c, id + 1", [("back", 2)])):
            cursor, found = db.asked(lambda: conn.execute(sql))
            assert sorted(cursor.fetchall()) == want, sql
            assert set(found) == owners(db, 7), sql
        assert conn.execute("UPDATE t SET c = 'all' FROM u WHERE u.k = t.k AND u.id = t.id").rowcount == 39


@ROUTING
@pytest.mark.parametrize("sql", [
    "INSERT INTO t VALUES ({a}, 1, 'x'), ({b}, 1, 'x') ON CONFLICT (k, id) DO UPDATE SET c = excluded.c",
    "INSERT INTO t VALUES ({a}, 1, 'x'), ({b}, 1, 'x') ON CONFLICT (k, id) DO NOTHING",
    "INSERT INTO t VALUES ({a}, 1, 'x') ON CONFLICT (k, id) DO UPDATE SET k = {b}",
    "INSERT INTO t TABLE u ON CONFLICT (k, id) DO UPDATE SET c = 'x'",
    "WITH w AS (INSERT INTO t TABLE u ON CONFLICT (k, id) DO UPDATE SET c = 'x' RETURNING *) TABLE w",
    "UPDATE t SET c = 'x' RETURNING (SELECT count(*) FROM t x WHERE x.k = {a})",
    "MERGE INTO t USING u ON t.k = u.k AND t.id = u.id AND t.k = 7 WHEN NOT MATCHED THEN INSERT VALUES (u.k, 99)",
    "MERGE INTO t USING u ON t.k = u.k AND t.id = u.id WHEN MATCHED THEN DELETE",
    "MERGE INTO t USING (VALUES ({a})) v ON t.k = v.column1 WHEN NOT MATCHED THEN INSERT VALUES ({b}, 1)",
    "MERGE INTO t USING local l ON t.k = l.k WHEN NOT MATCHED THEN DO NOTHING",
])
def test_pitfall_25_refusals_have_a_code_and_a_hint(db, conn, routing, sql):
    before = stored(db, "t")
    a, b = db.apart(key_type="int4")
    conn.execute(f"SET shardmap.enable_routing = {routing}")
    with pytest.raises(errors.FeatureNotSupported) as caught:
        conn.execute(sql.format(a=a, b=b))
    assert caught.value.diag.message_hint, caught.value
    assert stored(db, "t") == before


# Statements about key 7 that only its shard can do: the tag's count, rows returned, and the rows of key 7 after it.
WHOLE = [
    ("INSERT INTO t VALUES (7, 1, 'new') ON CONFLICT (k, id) DO UPDATE SET c = excluded.c", 1, None,
     [(1, "new"), (2, "old")]),
    ("INSERT INTO t VALUES (7, 1, 'new'), (7, 3, 'new') ON CONFLICT (k, id) DO UPDATE SET c = t.c || excluded.c"
     " RETURNING id, c", 2, [(1, "oldnew"), (3, "new")], [(1, "oldnew"), (2, "old"), (3, "new")]),
    ("INSERT INTO t AS mine VALUES (7, 1, 'new'), (7, 2, 'new') ON CONFLICT (k, id) DO UPDATE SET c = excluded.c"
     " WHERE mine.id = 2", 1, None, [(1, "old"), (2, "new")]),
    ("INSERT INTO t VALUES (7, 1, 'new') ON CONFLICT (k, id) DO NOTHING", 0, None, [(1, "old"), (2, "old")]),
    ("INSERT INTO t VALUES (7, 1, 'new'), (7, 3, 'new') ON CONFLICT (k, id) DO NOTHING RETURNING id", 1, [(3,)],
     [(1, "old"), (2, "old"), (3, "new")]),
    ("WITH w AS (INSERT INTO t VALUES (7, 1) ON CONFLICT (k, id) DO UPDATE SET c = 'new' RETURNING *) TABLE w", 1,
     [(7, 1, "new")], [(1, "new"), (2, "old")]),
    ("UPDATE t SET c = 'new' WHERE k = 7 AND id = 1 RETURNING id, (SELECT count(*) FROM t x WHERE x.k = 7 AND c = 'old')",
     1, [(1, 2)], [(1, "new"), (2, "old")]),
    ("MERGE INTO t USING (VALUES (7, 1, 'new'), (7, 3, 'new')) s(k, id, c) ON t.k = s.k AND t.id = s.id"
     " WHEN MATCHED THEN UPDATE SET c = s.c WHEN NOT MATCHED THEN INSERT VALUES (s.k, s.id, s.c)", 2, None,
     [(1, "new"), (2, "old"), (3, "new")]),
    ("MERGE INTO t USING u ON t.k = u.k AND t.id = u.id AND t.k = 7 WHEN MATCHED AND u.id = 1 THEN DELETE", 1, None,
     [(2, "old")]),
    ("WITH w AS (DELETE FROM t WHERE k = 7 AND id = 1 RETURNING k) SELECT x.id FROM w JOIN t x USING (k) WHERE k = 7", 2,
     [(1,), (2,)], [(2, "old")]),
]


@pytest.mark.parametrize("mode", ["literals", "force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("sql, count, returned, after", WHOLE)
def test_pitfall_25_what_only_the_whole_shard_can_do(db, mode, sql, count, returned, after):
    """It works where the statement goes whole to its shard; else it is refused, and nothing is written."""
    before, params = stored(db, "t"), None
    if mode != "literals":
        sql, params = re.sub(r"\b7\b", "%(k)s", sql), {"k": 7}
    with db.connect(**({} if params is None else {"plan_cache_mode": mode})) as conn:
        for off in ("enable_router", "enable_routing"):
            conn.execute(f"SET shardmap.{off} = off")
            with pytest.raises(errors.FeatureNotSupported) as caught:
                conn.execute(sql, params, prepare=params is not None)
            assert caught.value.diag.message_hint
            assert stored(db, "t") == before
            conn.execute(f"SET shardmap.{off} = on")
        cursor, found = db.asked(lambda: conn.execute(sql, params, prepare=params is not None))
        assert (cursor.rowcount, set(found)) == (count, owners(db, 7))
        assert returned is None or sorted(cursor.fetchall()) == returned
        assert stored(db, "t") == sorted([row for row in before if row[0] != 7] + [(7, *row) for row in after])


@contextlib.contextmanager
def transaction(conn, level):
    conn.execute(f"BEGIN ISOLATION LEVEL {level}")
    yield
    conn.execute("ROLLBACK")


def test_pitfall_25b_read_committed_sees_what_was_committed(db):
    with db.connect() as one, db.connect() as other, transaction(one, "READ COMMITTED"):
        assert one.execute("SELECT c FROM t WHERE k = 7 AND id = 1").fetchone() == ("old",)
        other.execute("UPDATE t SET c = 'new' WHERE k = 7 AND id = 1")
        assert one.execute("SELECT c FROM t WHERE k = 7 AND id = 1").fetchone() == ("new",)
        assert one.execute("UPDATE t SET c = c || '!' WHERE k = 7 AND id = 1 RETURNING c").fetchone() == ("new!",)


SUM = "(SELECT sum(length(c)) FROM t WHERE {} AND id > {})"


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("where", ["k = 7", "k > 0", "k IN (7, 8)"])
def test_pitfall_25b_a_statement_by_itself_sees_one_moment_of_each_shard(db, where, prepare):
    """Though its scans are statements of their own there, between which others commit."""
    sql = f"SELECT {SUM.format(where, 0)}, pg_advisory_xact_lock(25) IS NULL, {SUM.format(where, '-1')}"
    waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with db.connect() as one, db.connect() as other, concurrent.futures.ThreadPoolExecutor(1) as pool:
        other.execute("SELECT pg_advisory_lock(25)")
        reading = pool.submit(lambda: one.execute(sql, prepare=prepare).fetchone())
        wait_until(lambda: other.execute(waits).fetchone() != (0,))
        other.execute("UPDATE t SET c = c || 'longer' WHERE k = 7")
        other.execute("SELECT pg_advisory_unlock(25)")
        first, _, second = reading.result(PATIENCE)
        assert first == second
        assert one.execute(f"SELECT {SUM.format(where, 0)}").fetchone()[0] > first


def test_pitfall_25b_repeatable_read_does_not(db):
    with db.connect() as one, db.connect() as other, transaction(one, "REPEATABLE READ"):
        assert one.execute("SELECT c FROM t WHERE k = 7 AND id = 1").fetchone() == ("old",)
        other.execute("UPDATE t SET c = 'new' WHERE k = 7 AND id = 1")
        assert one.execute("SELECT c FROM t WHERE k = 7 AND id = 1").fetchone() == ("old",)
        with pytest.raises(errors.SerializationFailure):
            one.execute("UPDATE t SET c = c || '!' WHERE k = 7 AND id = 1")
