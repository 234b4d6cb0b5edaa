"""Pitfalls 1 to 18: which shard? Each line asserts the answer and the shards that were asked.

`db.check` runs a statement with literals and parameters, in text and binary, prepared with custom and generic plans,
with routing and without it (see asking.py).
"""

import functools
import uuid
from decimal import Decimal

import psycopg
import pytest
from asking import WAYS
from psycopg import errors

ALL = {0, 1, 2, 3}
# The plans for which the shards asked are looked at. The answer must be right in all.
PLANS = pytest.mark.parametrize("plan", ["custom", "generic"])
UUID = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"

SETUP = f"""
CREATE TABLE big (k bigint, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE also (k bigint, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE four (k int, id int, PRIMARY KEY (k, id));
CREATE TABLE num (k numeric, id int);
CREATE TABLE ids (k uuid, id int);
CREATE TABLE txt (k text, id int);
CREATE TABLE vary (k varchar(40), id int);
INSERT INTO big SELECT k, id, nullif((ARRAY['', 'x', 'null'])[id], 'null')
  FROM generate_series(1, 40) k, generate_series(1, 3) id;
INSERT INTO also SELECT * FROM big;
INSERT INTO four SELECT k, 1 FROM generate_series(1, 40) k;
INSERT INTO num SELECT k, 1 FROM generate_series(1, 40) k UNION ALL VALUES (1.5, 2);
INSERT INTO ids SELECT md5(k::text)::uuid, k FROM generate_series(1, 40) k UNION ALL VALUES ('{UUID}'::uuid, 100);
INSERT INTO txt SELECT k::text, k FROM generate_series(1, 40) k
  UNION ALL VALUES ('007', 107), ('123', 123), ('7.0', 70);
INSERT INTO vary SELECT 'v' || k, k FROM generate_series(1, 40) k;
SELECT shardmap.distribute_table(t, 'k') FROM unnest('{{big,also,four,num,ids,txt,vary}}'::regclass[]) t;
"""


@pytest.fixture
def check(db, plan):
    """db.check, which looks at the shards of plans of the kind."""
    return functools.partial(db.check, plan=plan)


def test_rows_are_spread(db):
    """Every shard has rows: otherwise the tests below would show nothing."""
    for table in ("big", "four", "ids", "txt"):
        counts = db.shard_rows(f"SELECT count(*) FROM {table}")
        assert min(count for ((count,),) in counts.values()) > 0, (table, counts)


@PLANS
def test_pitfall_01_numbers_of_other_types(db, check, plan):
    one = db.owners(7, key_type="int8")
    for value in ("7", "7::int2", "7::int8", "'7'::int4"):
        check(f"SELECT k FROM big WHERE k = {value}", None, [(7,)] * 3, one)
        check(f"SELECT k FROM four WHERE k = {value}", None, [(7,)], one)
    for value in ("7.0::numeric", "7.00", "7::numeric"):
        check(f"SELECT k FROM big WHERE k = {value}", None, [(7,)] * 3, one, native=False)
        check(f"SELECT k FROM four WHERE k = {value}", None, [(7,)], one, native=False)
        check(f"SELECT k FROM num WHERE k = {value}", None, [(7,)], one)
    check("SELECT k FROM big WHERE k = %s", (Decimal("7.00"),), [(7,)] * 3, one, native=False)
    check("SELECT k FROM num WHERE k = %s", (Decimal("7.000"),), [(7,)], one)
    check("SELECT k FROM num WHERE k = %s", (7,), [(7,)], one)
    check("SELECT id FROM num WHERE k = 1.50", None, [(2,)], db.owners("1.5", key_type="numeric"))
    check("SELECT k FROM big WHERE k = 7.5", None, [])
    check("SELECT k FROM big WHERE k = 7::float8", None, [(7,)] * 3)
    check("SELECT b.k FROM big b JOIN four f ON b.k = f.k WHERE f.k = 7 AND b.id = 1", None, [(7,)], one, native=False)
    check("SELECT b.k FROM big b JOIN num n ON b.k = n.k WHERE n.k = 7 AND b.id = 1", None, [(7,)])


@PLANS
def test_pitfall_02_spellings_of_a_uuid(db, check, plan):
    for text in (UUID, UUID.upper(), f"{{{UUID}}}", UUID.replace("-", ""), f"{{{UUID.upper().replace('-', '')}}}"):
        check(f"SELECT id FROM ids WHERE k = '{text}'", None, [(100,)], db.owners(UUID, key_type="uuid"))
        check("SELECT id FROM ids WHERE k = %s::uuid", (text,), [(100,)], db.owners(UUID, key_type="uuid"))
        check("SELECT id FROM ids WHERE k = %s::text::uuid", (text,), [(100,)], db.owners(UUID, key_type="uuid"))


@PLANS
def test_pitfall_03_binary_parameters(db, check, plan):
    """psycopg here; tokio-postgres, node-postgres and pgbench in tests/drivers."""
    for k in (7, 40):
        one = db.owners(k, key_type="int8")
        check("SELECT DISTINCT k FROM big WHERE k = %s", (psycopg.types.numeric.Int8(k),), [(k,)], one)
        check("SELECT k FROM four WHERE k = %b", (psycopg.types.numeric.Int8(k),), [(k,)], one)
    check("SELECT id FROM ids WHERE k = %b", (uuid.UUID(UUID),), [(100,)], db.owners(UUID, key_type="uuid"))
    check("SELECT id FROM ids WHERE k = %s", (uuid.UUID(UUID),), [(100,)], db.owners(UUID, key_type="uuid"))
    check("SELECT id FROM ids WHERE k = ANY(%b)", ([uuid.UUID(UUID)],), [(100,)], db.owners(UUID, key_type="uuid"))


@PLANS
def test_pitfall_04_text_that_looks_like_a_number(db, check, plan):
    for key, row in (("7", 7), ("007", 107), ("123", 123), ("7.0", 70)):
        check("SELECT id FROM txt WHERE k = %s", (key,), [(row,)], db.owners(key))
        check(f"SELECT id FROM txt WHERE k = '{key}'", None, [(row,)], db.owners(key))
    check("SELECT id FROM txt WHERE k = '0123'", None, [], db.owners("0123"))


@PLANS
def test_pitfall_05_varchar_and_text(db, check, plan):
    for value in ("'v7'", "'v7'::text", "'v7'::varchar", "'v7'::varchar(9)", "('v' || 7)"):
        check(f"SELECT id FROM vary WHERE k = {value}", None, [(7,)], db.owners("v7"))
    for placeholder in ("%s", "%s::text", "%s::varchar"):
        check(f"SELECT id FROM vary WHERE k = {placeholder}", ("v7",), [(7,)], db.owners("v7"))
    check("SELECT v.id FROM vary v JOIN txt t ON t.k = v.k WHERE v.k = %s", ("v7",), [], db.owners("v7"))


@PLANS
def test_pitfall_06_null(db, check, plan):
    check("SELECT count(*) FROM big WHERE k = NULL", None, [(0,)], set())
    for sql in ("SELECT count(*) FROM big WHERE k = %s::bigint", "SELECT count(*) FROM txt WHERE k = %s",
                "SELECT count(*), max(b.id) FROM big b JOIN also a USING (k) WHERE k = %s::bigint"):
        want = [(0,)] if "max" not in sql else [(0, None)]
        check(sql, (None,), want, set() if plan == "custom" else None)
        # A generic plan sends the statement whole, and its 0 has to be counted somewhere: on one shard, no more.
        for way in [way for way in WAYS if "generic" in way.name and plan == "generic"]:
            cursor, found = db.asked(lambda: way.run(db.way(way), sql, (None,)))  # noqa: B023
            assert (cursor.fetchall(), len(found)) == (want, 1 if way.routing else 0), f"{way.name}: {sql}"
    check("SELECT id FROM big WHERE k = %s::bigint", (None,), [], set())
    check("SELECT b.id FROM big b, also a WHERE a.k = b.k AND b.k = %s::bigint ORDER BY 1 LIMIT 1", (None,), [], set())
    check("SELECT count(*) FROM txt WHERE k IN ('7', NULL)", None, [(1,)], db.owners("7"))
    check("SELECT count(*) FROM txt WHERE k IN ('7', %s)", (None,), [(1,)], db.owners("7"))
    check("SELECT count(*) FROM txt WHERE k = ANY (%s::text[])", (["7", None],), [(1,)], db.owners("7"))
    check("SELECT count(*) FROM txt WHERE k = ANY (%s::text[])", (None,), [(0,)], set())
    check("SELECT count(*) FROM txt WHERE k = ANY (%s::text[])", ([],), [(0,)], set())
    check("SELECT k FROM big WHERE k = NULL", None, [], set())
    check("SELECT count(*) FROM big WHERE k IS NULL", None, [(0,)])
    check("SELECT count(*) FROM big WHERE k IS NOT DISTINCT FROM %s::bigint", (None,), [(0,)])
    for way in ("UPDATE big SET c = 'y' WHERE k = %s::bigint", "DELETE FROM big WHERE k = %s::bigint"):
        with db.connect(plan_cache_mode="force_generic_plan") as conn:
            cursor, found = db.asked(lambda: conn.execute(way, (None,), prepare=True))
            assert (cursor.rowcount, found) == (0, {})


def test_pitfall_07_row_without_key(db, conn):
    before = db.shard_rows("SELECT count(*) FROM txt")
    for values in ("(NULL, 1)", "('7', 1), (NULL, 1)"):
        with pytest.raises(errors.NotNullViolation):
            conn.execute(f"INSERT INTO txt VALUES {values}")
    with pytest.raises(errors.NotNullViolation):
        conn.execute("INSERT INTO txt (id) VALUES (%s)", (1,))
    with pytest.raises(errors.NotNullViolation):
        conn.execute("INSERT INTO txt VALUES (%s, 1)", (None,), prepare=True)
    with pytest.raises(errors.NotNullViolation):
        conn.execute("INSERT INTO txt SELECT NULL, 1")
    with pytest.raises(errors.NotNullViolation), conn.cursor().copy("COPY txt FROM STDIN") as copy:
        copy.write("7\t1\n\\N\t1\n")
    assert db.shard_rows("SELECT count(*) FROM txt") == before


@PLANS
def test_pitfall_08_in_and_or_on_another_column(db, check, plan):
    a, b = db.apart(key_type="int8")
    sql = "SELECT k, id FROM big WHERE k IN (%s, %s) AND (c = '' OR c IS NULL)"
    want = [(int(k), id) for k in (a, b) for id in (1, 3)]
    two = db.owners(a, b, key_type="int8")
    check(sql, (int(a), int(b)), want, two)
    check(sql % (a, b), None, want, two)
    check("SELECT k, id FROM big WHERE k = ANY(%s) AND (c = '' OR c IS NULL)", ([int(a), int(b)],), want, two)
    check("SELECT k, id FROM big WHERE (c = '' OR c IS NULL) AND k = %s", (int(a),), want[:2],
             db.owners(a, key_type="int8"))


@PLANS
def test_pitfall_09_or_and_precedence(db, check, plan):
    a, b = db.apart(key_type="int8")
    want = [(int(a), 1), (int(a), 2), (int(a), 3), (int(b), 3)]
    two = db.owners(a, b, key_type="int8")
    check(f"SELECT k, id FROM big WHERE k = {a} OR k = {b} AND id = 3", None, want, two)
    check("SELECT k, id FROM big WHERE k = %s OR k = %s AND id = 3", (int(a), int(b)), want, two)
    both = [(int(k), 1) for k in range(1, 41)] + [(int(a), 2), (int(a), 3)]
    check(f"SELECT k, id FROM big WHERE k = {a} OR id = 1", None, both, ALL)
    check(f"SELECT k, id FROM big WHERE (k = {a} OR k = {b}) AND k = {b} AND id = 2", None, [(int(b), 2)],
             db.owners(b, key_type="int8"))


@PLANS
@pytest.mark.parametrize("condition", [
    "((k = 7))", "7 = k", "k = '7'::bigint", "k = '7'", "k = bigint '7'", "k BETWEEN 7 AND 7", "k >= 7 AND k <= 7",
    "k = 3 + 4", "k = abs(-7)", "k IN (7)", "k IN (7, 7)", "k = ANY ('{7}')", "k = ANY (ARRAY[7])", "k = 7 AND true",
    "k = 7 AND k = 7", "k = CAST('7' AS bigint)", "(k, id) = (7, id)", "(k = 7 OR false)",
    "NOT (k <> 7)", "k = (SELECT 7)",
])
def test_pitfall_10_other_forms(db, check, condition, plan):
    check(f"SELECT k FROM big WHERE {condition} AND id = 1", None, [(7,)], db.owners(7, key_type="int8"),
          native=not any(word in condition for word in ("NOT", "BETWEEN", ">")))


def test_pitfall_10_range_of_one_written_as_negation(db):
    db.check("SELECT k FROM big WHERE NOT (k < 7 OR k > 7) AND id = 1", None, [(7,)])


@PLANS
@pytest.mark.parametrize("condition", ["k = %s::int4", "%s = k", "((k = %s))", "k IN (%s)", "k = %s::text::int8",
                                       "k = %s + 0", "k = ANY (ARRAY[%s::bigint])"])
def test_pitfall_10_other_forms_with_parameters(db, check, condition, plan):
    check(f"SELECT k FROM big WHERE {condition} AND id = 1", (7,), [(7,)], db.owners(7, key_type="int8"))


@PLANS
def test_pitfall_11_in_with_group_by(db, check, plan):
    a, b = db.apart(key_type="int8")
    two = db.owners(a, b, key_type="int8")
    for _ in range(3):
        check("SELECT k, count(*) FROM big WHERE k IN (%s, %s) GROUP BY k", (int(a), int(b)),
                 [(int(a), 3), (int(b), 3)], two)
        check(f"SELECT k, count(*) FROM big WHERE k IN ({a}, {b}) GROUP BY k", None, [(int(a), 3), (int(b), 3)], two)


@PLANS
def test_pitfall_12_correlated_subquery(db, check, plan):
    one = db.owners(7, key_type="int8")
    for sql, rows in (
            ("SELECT id, (SELECT count(*) FROM also a WHERE a.k = b.k AND a.id <= b.id) FROM big b WHERE b.k = %s",
             [(1, 1), (2, 2), (3, 3)]),
            ("SELECT id FROM big b WHERE k = %s AND EXISTS (SELECT FROM also a WHERE a.k = b.k AND a.id = b.id + 1)",
             [(1,), (2,)]),
            ("SELECT id FROM big b WHERE k = %s AND id NOT IN (SELECT id FROM also a WHERE a.k = b.k AND c = 'x')",
             [(1,), (3,)]),
            ("SELECT b.id, l.n FROM big b, LATERAL (SELECT max(a.id) AS n FROM also a WHERE a.k = b.k) l"
             " WHERE b.k = %s AND b.id = 1", [(1, 3)])):
        check(sql, (7,), rows, one, native=False)
        check(sql.replace("%s", "7"), None, rows, one, native=False)


def test_pitfall_13_tenth_run_is_keyed(db):
    one = db.owners(7, key_type="int8")
    for mode in ("auto", "force_generic_plan", "force_custom_plan"):
        with db.connect(shardmap__fanout_policy="error", plan_cache_mode=mode) as conn:
            conn.execute("""CREATE OR REPLACE FUNCTION count_of(key bigint) RETURNS bigint LANGUAGE plpgsql AS
                $$ BEGIN RETURN (SELECT count(*) FROM big WHERE k = key); END $$""")
            for _ in range(10):
                cursor, found = db.asked(lambda: conn.execute("SELECT id FROM big WHERE k = %s", (7,), prepare=True))
                assert (sorted(cursor.fetchall()), set(found)) == ([(1,), (2,), (3,)], one)
                cursor, found = db.asked(lambda: conn.execute("SELECT count_of(7)"))
                assert (cursor.fetchall(), set(found)) == ([(3,)], one)
                cursor = conn.execute("UPDATE big SET c = c WHERE k = %s AND id = %s", (7, 2), prepare=True)
                assert cursor.rowcount == 1


def test_pitfall_14_explain_generic_plan(db, conn):
    if conn.info.server_version < 160000:
        pytest.skip("GENERIC_PLAN is new in 16")
    for sql in ("SELECT * FROM big WHERE k = $1", "SELECT * FROM big WHERE k = $1::bigint AND id = $2",
                "UPDATE big SET c = $2 WHERE k = $1", "DELETE FROM big WHERE k = $1",
                "INSERT INTO big VALUES ($1, $2, $3)", "SELECT count(*) FROM big WHERE k = ANY ($1)"):
        plan, found = db.asked(lambda: conn.execute(f"EXPLAIN (GENERIC_PLAN, VERBOSE) {sql}").fetchall())
        assert plan and found == {}


def test_pitfall_15_key_that_no_range_covers(db, conn):
    """The ranges are those of keyspace dated; see shardmap.set_range."""
    conn.execute("SELECT shardmap.create_keyspace('dated', 'range', range_order => 'integer')")
    names = conn.execute("SELECT name FROM shardmap.shard ORDER BY number").fetchall()
    assert len(names) == 4
    port, database = db.cluster.shard_server(0).port, db.cluster.shard_database(0, db.name)
    conn.execute("SELECT shardmap.add_shard('first', host => '127.0.0.1', port => %s, dbname => %s,"
                 " keyspace => 'dated')", (port, database))
    conn.execute("SELECT shardmap.set_range('dated', NULL, '100', 'first', 0)")
    conn.execute("CREATE TABLE ranged (k bigint, id int)")
    conn.execute("SELECT shardmap.distribute_table('ranged', 'k', 'dated')")
    conn.execute("INSERT INTO ranged VALUES (99, 1)")
    for sql in ("SELECT * FROM ranged WHERE k = {}", "INSERT INTO ranged VALUES ({}, 1)",
                "UPDATE ranged SET id = 2 WHERE k = {}", "DELETE FROM ranged WHERE k = {}"):
        for value, params in (("100", None), ("%s", (100,))):
            with pytest.raises(psycopg.Error, match="100.*dated|dated.*100") as caught:
                conn.execute(sql.format(value), params, prepare=bool(params))
            assert not isinstance(caught.value, errors.InternalError_), caught.value


def test_pitfall_16_statement_after_a_failed_one(db):
    a, b = db.apart(key_type="int8")
    for settings in ({}, {"shardmap__enable_routing": "off"}):
        with db.connect(**settings) as conn:
            for bad in (f"SELECT 1 / (id - 1) FROM big WHERE k = {a}", f"INSERT INTO big VALUES ({a}, 1, 'twice')",
                        f"UPDATE big SET k = {b} WHERE k = {a}", "SELECT nope FROM big WHERE k = 1"):
                with pytest.raises(psycopg.Error):
                    conn.execute(bad)
                cursor, found = db.asked(lambda: conn.execute(f"SELECT k FROM big WHERE k = {b}"))
                assert (cursor.fetchall(), set(found)) == ([(int(b),)] * 3, db.owners(b, key_type="int8"))
                cursor, found = db.asked(lambda: conn.execute("SELECT count(*) FROM big"))
                assert (cursor.fetchall(), set(found)) == ([(120,)], ALL)


def filtered_there(found, column="k"):
    """Whether each statement that reads from a shard has a condition on the key."""
    reads = [sql for sqls in found.values() for sql in sqls if "SELECT" in sql]
    return bool(reads) and all(f"{column} = " in sql.split("WHERE")[-1] for sql in reads)


def test_pitfall_17_text_parameter_cast_to_the_key_type(db):
    for mode in ("force_generic_plan", "force_custom_plan"):
        with db.connect(plan_cache_mode=mode) as conn:
            conn.execute("PREPARE q (text) AS SELECT id FROM big WHERE k = $1::bigint")
            cursor, found = db.asked(lambda: conn.execute("EXECUTE q ('7')"))
            assert (sorted(cursor.fetchall()), set(found)) == ([(1,), (2,), (3,)], db.owners(7, key_type="int8"))
            assert filtered_there(found), found


def test_pitfall_18_current_setting(db):
    for mode in ("force_generic_plan", "force_custom_plan"):
        with db.connect(plan_cache_mode=mode, shardmap__fanout_policy="error") as conn:
            for key in ("7", "8", "7"):
                conn.execute("SELECT set_config('app.tenant', %s, false)", (key,))
                for sql in ("SELECT k::int FROM txt WHERE k = current_setting('app.tenant')",
                            "SELECT DISTINCT k::int FROM big WHERE k = current_setting('app.tenant')::bigint"):
                    cursor, found = db.asked(lambda: conn.execute(sql, prepare=True))
                    kind = "int8" if "big" in sql else "text"
                    assert (cursor.fetchall(), set(found)) == ([(int(key),)], db.owners(key, key_type=kind)), sql
                    assert filtered_there(found), found


# Conditions with values that are known only when the statement starts, on a table with column {k} of type {t}; the keys.
LATE_LISTS = [
    ("{k} IN (current_setting('app.a')::{t}, '7')", "a7"),
    ("{k} IN (current_setting('app.a')::{t}, current_setting('app.b')::{t})", "ab"),
    ("{k} IN (current_setting('app.a')::{t}, NULL)", "a"),
    ("{k} = ANY (string_to_array(current_setting('app.list'), ',')::{t}[])", "ab"),
    ("{k} = ANY (string_to_array(current_setting('app.nulls'), ',', '')::{t}[])", "a"),
    ("{k} = ANY (string_to_array(current_setting('app.none', true), ',')::{t}[])", ""),
    ("{k} = ANY (string_to_array('', current_setting('app.a'))::{t}[])", ""),
    ("{k} = current_setting('app.a')::{t} OR {k} = '7'", "a7"),
    ("'7' = {k} OR current_setting('app.a')::{t} = {k} OR {k} = ANY ('{{7,NULL}}'::{t}[])", "a7"),
    ("({k} = current_setting('app.a')::{t} AND random() < 2) OR {k} IN ('7', current_setting('app.b')::{t})", "ab7"),
    ("({k} = current_setting('app.a')::{t} OR {k} = '7') AND {k} = current_setting('app.a')::{t}", "a"),
]


@pytest.mark.parametrize("condition, keys", LATE_LISTS)
@pytest.mark.parametrize("table, key_type", [("txt", "text"), ("big", "bigint"), ("vary", "varchar")])
def test_pitfall_18_lists_of_late_values(db, condition, keys, table, key_type):
    prefix = "v" if table == "vary" else ""
    a, b = db.apart(key_type="int8")
    named = {"a": prefix + a, "b": prefix + b, "7": "7" if table != "vary" else None}
    wanted = [(key,) for key in sorted({named[key] for key in keys} - {None})]
    sql = f"SELECT DISTINCT k::text FROM {table} WHERE " + condition.format(k="k", t=key_type)
    for mode in ("force_generic_plan", "force_custom_plan"):
        with db.connect(plan_cache_mode=mode, shardmap__fanout_policy="error") as conn:
            conn.execute("SELECT set_config('app.a', %s, false), set_config('app.b', %s, false),"
                         " set_config('app.list', %s, false), set_config('app.nulls', %s, false)",
                         (prefix + a, prefix + b, f"{prefix}{a},{prefix}{b}", f"{prefix}{a},,"))
            for statement in (sql, f"WITH x AS MATERIALIZED ({sql}) TABLE x"):
                cursor, found = db.asked(lambda: conn.execute(statement, prepare=True))
                assert sorted(cursor.fetchall()) == wanted
                kind = "int8" if table == "big" else "text"
                assert set(found) == db.owners(*({named[key] or "7" for key in keys}), key_type=kind)
                assert not found or filtered_there(found), found


def test_pitfall_18_in_joins_writes_and_other_columns(db):
    a, b = db.apart(key_type="int8")
    with db.connect() as conn:
        conn.execute("SELECT set_config('app.list', %s, false), set_config('app.x', 'x', false)", (f"{a},{b}",))
        listed = "= ANY (string_to_array(current_setting('app.list'), ',')::bigint[])"
        two = db.owners(a, b, key_type="int8")
        for sql, rows in (
                (f"SELECT count(*) FROM big b JOIN also a ON a.k = b.k AND a.id = b.id AND b.k {listed} AND a.k {listed}", 6),
                (f"SELECT count(a.id) FROM big b LEFT JOIN also a ON a.k = b.k AND a.k {listed} WHERE b.k {listed}", 18),
                (f"WITH u AS (UPDATE big SET c = c WHERE k {listed} RETURNING 1) SELECT count(*) FROM u", 6),
                (f"WITH d AS (DELETE FROM big WHERE k {listed} AND id > 3 RETURNING 1) SELECT count(*) FROM d", 0),
                (f"SELECT count(*) FROM (SELECT k FROM big WHERE k {listed} FOR UPDATE) x", 6)):
            cursor, found = db.asked(lambda: conn.execute(sql))
            assert (cursor.fetchall(), set(found)) == ([(rows,)], two), sql
            assert filtered_there(found), (sql, found)
        # Not about the key: all shards, but each sends the wanted rows only.
        cursor, found = db.asked(lambda: conn.execute(
            f"SELECT count(*) FROM big WHERE k {listed} OR c = current_setting('app.x')"))
        assert (cursor.fetchall(), set(found)) == ([(44,)], ALL)
        assert filtered_there(found), found


def test_pitfall_18_policy_with_a_list(db):
    a, b = db.apart(key_type="int8")
    db.add_user("cleo")
    db.psql("""GRANT SELECT, UPDATE ON big TO cleo;
               CREATE POLICY own ON big USING (k = ANY (string_to_array(current_setting('app.list'), ',')::bigint[]));
               ALTER TABLE big ENABLE ROW LEVEL SECURITY""")
    try:
        for mode in ("force_generic_plan", "force_custom_plan"):
            with db.connect("cleo", plan_cache_mode=mode, shardmap__fanout_policy="error") as conn:
                for keys in ([a, b], [b], [a], []):
                    conn.execute("SELECT set_config('app.list', %s, false)", (",".join(keys),))
                    cursor, found = db.asked(lambda: conn.execute("SELECT count(*) FROM big", prepare=True))
                    assert (cursor.fetchall(), set(found)) == ([(3 * len(keys),)], db.owners(*keys, key_type="int8"))
                    assert not keys or filtered_there(found), found
                    cursor, found = db.asked(lambda: conn.execute("UPDATE big SET c = c", prepare=True))
                    assert (cursor.rowcount, set(found)) == (3 * len(keys), db.owners(*keys, key_type="int8"))
    finally:
        db.psql("ALTER TABLE big DISABLE ROW LEVEL SECURITY; DROP POLICY own ON big")
