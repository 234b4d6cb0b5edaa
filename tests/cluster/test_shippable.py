"""What is not built in goes whole to a shard if it is marked, or of an extension that all servers list; else it stays here.

Shards have every function under the same name, where it says which side computed it: "here" or "there".
"""

import contextlib

import pytest
from psycopg import errors
from test_router import plan_of

OBJECTS = """
CREATE TYPE public.mood AS ENUM ('low', 'fine', 'high');
CREATE DOMAIN public.code AS text CHECK (value ~ '^[a-z]+$');
CREATE DOMAIN public.day AS timestamptz;
CREATE EXTENSION citext;
CREATE FUNCTION public.side_i(i int) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT '{0}'::text $$;
CREATE FUNCTION public.side_s(i int) RETURNS text LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN '{0}'; END $$;
CREATE FUNCTION public.side_v(i int DEFAULT 0) RETURNS text LANGUAGE plpgsql VOLATILE AS $$ BEGIN RETURN '{0}'; END $$;
CREATE FUNCTION public.calm(m public.mood) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN m < 'high'; END $$;
CREATE FUNCTION public.many() RETURNS SETOF text LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN NEXT '{0}'; END $$;
CREATE FUNCTION public.twice(int, int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN $1 = 2 * $2; END $$;
CREATE OPERATOR public.=== (FUNCTION = public.twice, LEFTARG = int, RIGHTARG = int);
CREATE AGGREGATE public.last_of(text) (SFUNC = textcat, STYPE = text, INITCOND = '{0}:');
"""


@pytest.fixture(scope="module", autouse=True)
def objects(db):
    """Made on the shards first, then here; then tables of the types."""
    for number in range(db.cluster.shards):
        with db.shard(number) as conn:
            conn.execute(OBJECTS.format("there"))
    with db.connect() as conn:
        conn.execute(OBJECTS.format("here"))
        conn.execute("CREATE TABLE t (k int, id int, m mood, c code, ci citext, at day, ms mood[], PRIMARY KEY (k, id));"
                     "SELECT shardmap.distribute_table('t', 'k');"
                     "INSERT INTO t SELECT k, id, (ARRAY['low', 'fine', 'high']::mood[])[id], 'c', 'Text ' || id, now(), '{low}'"
                     " FROM generate_series(1, 20) k, generate_series(1, 3) id")


@pytest.fixture
def marked(db):
    """Marks for one test: what they are marked with, in mark_shippable's own words."""
    with db.connect() as conn, contextlib.ExitStack() as undo:
        def mark(*arguments):
            for each in arguments:
                assert conn.execute(f"SELECT shardmap.mark_shippable({each})").fetchone() == (True,)
                undo.callback(conn.execute, f"SELECT shardmap.unmark_shippable({each})")
        yield mark


def is_routed(conn, sql):
    return "ShardRoute" in plan_of(conn, sql)


# (statement, marks that it needs, answer without them, answer with them)
FUNCTIONS = [
    ("SELECT DISTINCT side_s(id) FROM t WHERE k = 7", ["'side_s(int)'"], "here", "there"),
    ("SELECT DISTINCT side_v(id) FROM t WHERE k = 7", ["'side_v(int)'"], "here", "there"),
    ("SELECT DISTINCT side_v() FROM t WHERE k = 7", ["'side_v(int)'"], "here", "there"),
    ("SELECT side_v(id) FROM t WHERE k = 7 AND side_v(id) = side_v(id) LIMIT 1", ["'side_v(int)'"], "here", "there"),
    ("SELECT last_of(id::text ORDER BY id) FROM t WHERE k = 7", ["'last_of(text)'"], "here:123", "there:123"),
    ("SELECT x FROM t, many() x WHERE k = 7 AND id = 1", ["'many()'"], "here", "there"),
    ("SELECT count(*) FROM t WHERE k = 7 AND id === 1", ["operator => '===(int, int)'"], 1, 1),
    ("SELECT count(*) FROM t WHERE k = 7 AND twice(id, 1)", ["function => 'twice(int, int)'"], 1, 1),
    ("SELECT to_char(max(id), '9') FROM t WHERE k = 7", ["'to_char(int, text)'"], " 3", " 3"),
]
TYPES = [
    ("SELECT m FROM t WHERE k = 7 AND m > 'fine'", ["type => 'mood'"], "high"),
    ("SELECT m::text FROM t WHERE k = 7 ORDER BY t.m DESC LIMIT 1", ["type => 'mood'"], "high"),
    ("SELECT max(m) FROM t WHERE k = 7 AND ms @> ARRAY['low']::mood[]", ["type => 'mood'"], "high"),
    ("SELECT ms FROM t WHERE k = 7 AND m = ANY (ms)", ["type => 'mood'"], "{low}"),
    ("SELECT array_agg(m ORDER BY m)::text FROM t WHERE k = 7 GROUP BY c", ["type => 'mood'"], "{low,fine,high}"),
    ("SELECT c FROM t WHERE k = 7 AND calm(m) AND id = 1", ["type => 'mood'", "'calm(mood)'"], "c"),
]


@pytest.mark.parametrize("sql, marks, before, after", [*FUNCTIONS, *((*rest, want, want) for *rest, want in TYPES)])
def test_marked_objects_run_on_the_shard(db, conn, marked, sql, marks, before, after):
    """And a plan that is cached is made anew when the marks change."""
    conn.execute("SET plan_cache_mode = force_generic_plan")
    conn.execute("PREPARE q (int) AS " + sql.replace("k = 7", "k = $1"))
    assert not is_routed(conn, sql)
    assert conn.execute("EXECUTE q (7)").fetchone() == (before,)
    for mark in marks:
        assert not is_routed(conn, sql), mark
        marked(mark)
    assert is_routed(conn, sql) and is_routed(conn, "EXECUTE q (7)")
    for statement in (sql, "EXECUTE q (7)"):
        cursor, found = db.asked(lambda: conn.execute(statement))  # noqa: B023
        assert cursor.fetchone() == (after,) and set(found) == db.owners(7, key_type="int4")
    conn.execute(f"SELECT shardmap.unmark_shippable({marks[0]})")
    assert not is_routed(conn, "EXECUTE q (7)")
    assert conn.execute("EXECUTE q (7)").fetchone() == (before,)
    conn.execute(f"SELECT shardmap.mark_shippable({marks[0]})")


DOMAINS = [
    "SELECT c, id FROM t WHERE k = 7 AND c = 'c' ORDER BY c, id",
    "SELECT c || 'x', upper(c), c LIKE 'c%', c IS NULL, c::varchar(1) FROM t WHERE k = 7",
    "SELECT DISTINCT c FROM t WHERE k = 7",
    "SELECT c, count(*), max(c) FROM t WHERE k = 7 GROUP BY c",
    "SELECT x.c FROM (SELECT k, c FROM t WHERE k = 7) x JOIN t USING (k, c)",
    "SELECT id FROM t WHERE k = 7 AND at > now() - interval '1 day' AND c = ANY ('{c,d}')",
    "INSERT INTO t (k, id, c, at) VALUES (7, 60, 'abc', '2024-03-01 12:00+00'), (7, 61, 'def', now()) RETURNING c, at = now()",
    "UPDATE t SET c = 'other', at = '2024-03-01 12:00+00' WHERE k = 7 AND id = 2 RETURNING c, at < now()",
    "INSERT INTO t (k, id, c) VALUES (7, 1, 'abc') ON CONFLICT (k, id) DO UPDATE SET c = excluded.c RETURNING c",
    "INSERT INTO t (k, id, c) SELECT k, id + 100, c FROM t WHERE k = 7 RETURNING id, c",
    "SELECT 'abc'::code, id FROM t WHERE k = 7",
    "DELETE FROM t WHERE k = 7 AND c = 'c' RETURNING c",
]


@pytest.mark.parametrize("sql", DOMAINS)
def test_domains_over_built_in_types_need_no_mark(db, conn, sql):
    assert is_routed(conn, sql), plan_of(conn, sql)
    with db.connect(shardmap__enable_router="off") as off:
        outcomes = []
        for each in (conn, off):
            each.execute("SET DateStyle = 'SQL, DMY'; SET TimeZone = 'Asia/Tokyo'")
            if each is off and "ON CONFLICT" in sql:
                continue
            each.execute("BEGIN")
            found = sorted(each.execute(sql).fetchall())
            outcomes.append((found, each.execute("SELECT k, id, c, at::date FROM t WHERE k = 7 ORDER BY id").fetchall()))
            each.execute("ROLLBACK")
        assert outcomes[0][0] and all(outcome == outcomes[0] for outcome in outcomes)


def test_a_domain_is_checked_here(db, conn):
    for sql in ("INSERT INTO t (k, id, c) VALUES (7, 60, 'ABC')", "UPDATE t SET c = 'ABC' WHERE k = 7",
                "SELECT id FROM t WHERE k = 7 AND c = 'ABC'::code"):
        assert is_routed(conn, sql)

        def call():
            with pytest.raises(errors.CheckViolation):
                conn.execute(sql)  # noqa: B023
        assert db.asked(call)[1] == {}
    for sql in ("UPDATE t SET c = c || 'X' WHERE k = 7", "SELECT (c || 'X')::code FROM t WHERE k = 7"):
        assert "Not Routed Because: A function or type in it is not known to the shard." in plan_of(conn, sql)
        with pytest.raises(errors.CheckViolation):
            conn.execute(sql)


def test_what_depends_on_no_row_is_computed_here(conn, marked):
    """As for built-in functions: a stable one once for the statement, any in the values of an INSERT once for its row."""
    marked("'side_s(int)'", "'side_v(int)'", "type => 'code'", "type => 'mood'")
    assert conn.execute("SELECT count(*) FROM t WHERE k = 7 AND side_s(1) = 'here'").fetchone() == (3,)
    insert = "INSERT INTO t (k, id, c) VALUES (7, 50, side_v()), (7, 51, side_s(1)) RETURNING c"
    assert is_routed(conn, insert)
    conn.execute("BEGIN")
    assert conn.execute(insert).fetchall() == [("here",), ("here",)]
    conn.execute("ROLLBACK")


@pytest.mark.parametrize("mode", ["literals", "force_custom_plan", "force_generic_plan"])
def test_values_of_marked_types(db, marked, mode):
    """As parameters and constants, in rows, conditions and arrays; and a type's own errors."""
    marked("type => 'mood'", "type => 'code'")
    with db.connect(**({} if mode == "literals" else {"plan_cache_mode": mode})) as conn:
        def run(sql, *params):
            literals = sql % tuple(f"'{value}'" for value in params)
            assert is_routed(conn, literals)
            if mode == "literals":
                sql, params = literals, None
            return conn.execute(sql, params, prepare=params is not None)
        conn.execute("BEGIN")
        run("INSERT INTO t (k, id, m, c, ms) VALUES (7, 60, %s::mood, %s::code, %s::mood[]), (7, 61, NULL, 'b', '{}')",
            "high", "abc", "{low,high}")
        assert run("SELECT m, c, ms FROM t WHERE k = 7 AND m >= %s::mood AND id = 60 AND c = %s::code", "fine",
                   "abc").fetchall() == [("high", "abc", "{low,high}")]
        assert run("UPDATE t SET m = %s::mood, ms = ms || %s::mood WHERE k = 7 AND id = 60 RETURNING m, ms", "low",
                   "fine").fetchall() == [("low", "{low,high,fine}")]
        assert run("SELECT id FROM t WHERE k = 7 AND m = ANY (%s::mood[]) ORDER BY id", "{low,high}").fetchall() == [
            (1,), (3,), (60,)]
        with pytest.raises(errors.CheckViolation), conn.transaction():
            run("UPDATE t SET c = (%s::text || '1')::code WHERE k = 7 AND id = 60", "x")
        with pytest.raises(errors.InvalidTextRepresentation), conn.transaction():
            run("UPDATE t SET m = (c || %s::text)::mood WHERE k = 7 AND id = 60", "x")
        conn.execute("ROLLBACK")


def test_results_whose_text_depends_on_the_session_stay_here(conn, marked):
    marked("type => 'day'")
    conn.execute("SET datestyle = 'SQL, DMY'")
    sql = "SELECT at FROM t WHERE k = 7 AND id = 1"
    assert "depend on the session's DateStyle" in plan_of(conn, sql)
    assert conn.execute("SELECT at <= now() FROM t WHERE k = 7 AND id = 1").fetchone() == (True,)
    assert is_routed(conn, "SELECT at <= now() FROM t WHERE k = 7 AND id = 1")


def test_extensions_of_the_servers(db, conn):
    """All servers of the keyspace must list it. Conditions of fan-outs are then checked by the shards."""
    keyed = "SELECT ci FROM t WHERE k = 7 AND ci = 'TEXT 2'"
    fanned = "SELECT count(*) FROM t WHERE ci = 'text 2'"
    conn.execute("SET plan_cache_mode = force_generic_plan; PREPARE q (int, citext) AS"
                 " SELECT ci FROM t WHERE k = $1 AND ci = $2")
    for number in range(4):
        assert not is_routed(conn, keyed)
        assert conn.execute("EXECUTE q (7, 'TEXT 2')").fetchone() == ("Text 2",)
        assert conn.execute("SELECT * FROM shardmap.shippable").fetchall() == []
        db.psql(f"ALTER SERVER \"shard-{number}\" OPTIONS (ADD extensions 'citext')")
    try:
        assert is_routed(conn, keyed) and is_routed(conn, "EXECUTE q (7, 'TEXT 2')")
        assert conn.execute("SELECT * FROM shardmap.shippable").fetchall() == [("extension", "citext", "main")]
        for sql in (keyed, "EXECUTE q (7, 'TEXT 2')", "SELECT lower(ci)::citext FROM t WHERE k = 7 AND ci IN ('text 2', 'x')"
                    " GROUP BY ci ORDER BY ci"):
            assert is_routed(conn, sql)
            assert conn.execute(sql).fetchone()[0].lower() == "text 2"
        assert "ci OPERATOR(public.=) 'text 2'" in plan_of(conn, fanned)
        assert conn.execute(fanned).fetchone() == (20,)
    finally:
        db.psql("".join(f"ALTER SERVER \"shard-{number}\" OPTIONS (DROP extensions);" for number in range(4)))
    assert not is_routed(conn, keyed) and not is_routed(conn, "EXECUTE q (7, 'TEXT 2')")


def test_who_may_mark(db):
    for user in ("milo", "ada"):
        db.add_user(user)
    db.psql("GRANT shardmap_admin TO ada")
    with db.connect("milo") as conn:
        for sql in ("SELECT shardmap.mark_shippable('side_s(int)')", "SELECT shardmap.unmark_shippable('side_s(int)')",
                    "INSERT INTO shardmap.shippable_mark VALUES ('function', 'x')"):
            with pytest.raises(errors.InsufficientPrivilege):
                conn.execute(sql)
        assert conn.execute("SELECT * FROM shardmap.shippable").fetchall() == []
    with db.connect("ada") as conn:
        assert conn.execute("SELECT shardmap.mark_shippable('side_s(int)'), shardmap.mark_shippable('side_s(int)')"
                            ).fetchone() == (True, False)
        assert conn.execute("SELECT * FROM shardmap.shippable").fetchall() == [("function", "public.side_s(integer)", "main")]
        assert conn.execute("SELECT shardmap.unmark_shippable('side_s(int)'), shardmap.unmark_shippable('side_s(int)')"
                            ).fetchone() == (True, False)


@pytest.mark.parametrize("call, error", [
    ("", errors.InvalidParameterValue), ("'side_s(int)', 'mood'", errors.InvalidParameterValue),
    ("type => 'mood[]'", errors.FeatureNotSupported), ("type => 't'", errors.FeatureNotSupported),
    ("type => 'int4range'", errors.FeatureNotSupported), ("'missing(int)'", errors.UndefinedFunction),
])
def test_what_cannot_be_marked(conn, call, error):
    with pytest.raises(error) as caught:
        conn.execute(f"SELECT shardmap.mark_shippable({call})")
    assert caught.value.diag.message_hint or error is errors.UndefinedFunction


def test_a_mark_ends_with_what_it_names(conn):
    """A function that is made anew under the name is another one. Rolled back, the mark is still there."""
    conn.execute("CREATE SCHEMA \"Odd, one\"; CREATE TYPE \"Odd, one\".kind AS ENUM ('a');"
                 "CREATE FUNCTION \"Odd, one\".g(\"Odd, one\".kind, int) RETURNS int LANGUAGE sql AS 'SELECT 1'")
    name = '"Odd, one".g("Odd, one".kind,integer)'
    conn.execute("SELECT shardmap.mark_shippable(%s::text::regprocedure)", (name,))
    conn.execute("SELECT shardmap.mark_shippable(type => '\"Odd, one\".kind'), shardmap.mark_shippable('side_s(int)')")
    assert conn.execute("SELECT count(*) FROM t WHERE k = 7").fetchone() == (3,)
    with conn.transaction(force_rollback=True):
        conn.execute("DROP TYPE \"Odd, one\".kind CASCADE")
        assert conn.execute("SELECT name FROM shardmap.shippable").fetchall() == [("public.side_s(integer)",)]
    assert {name for name, in conn.execute("SELECT name FROM shardmap.shippable")} == {
        name, '"Odd, one".kind', "public.side_s(integer)"}
    conn.execute("DROP SCHEMA \"Odd, one\" CASCADE; DROP TABLE IF EXISTS nothing")
    assert conn.execute("SELECT name FROM shardmap.shippable").fetchall() == [("public.side_s(integer)",)]
    conn.execute("SELECT shardmap.unmark_shippable('side_s(int)')")


RENAMED = {
    "function": ("ALTER FUNCTION moved.f(int) RENAME TO g", "'moved.f(int)'"),
    "function's schema": ("ALTER FUNCTION moved.f(int) SET SCHEMA public", "'moved.f(int)'"),
    "aggregate": ("ALTER AGGREGATE moved.a(text) RENAME TO b", "'moved.a(text)'"),
    "argument's type": ("ALTER TYPE moved.kind RENAME TO sort", "'moved.h(moved.kind)'"),
    "type": ("ALTER TYPE moved.kind RENAME TO sort", "type => 'moved.kind'"),
    "domain": ("ALTER DOMAIN moved.code RENAME TO word", "type => 'moved.code'"),
    "operator": ("ALTER OPERATOR moved.=== (int, int) SET SCHEMA \"Odd\"", "operator => 'moved.===(int, int)'"),
    "schema": ("ALTER SCHEMA moved RENAME TO elsewhere", "'moved.f(int)'"),
}
MOVED = """
CREATE SCHEMA moved; CREATE SCHEMA "Odd"; CREATE TYPE moved.kind AS ENUM ('a'); CREATE DOMAIN moved.code AS text;
CREATE FUNCTION moved.f(int) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION moved.h(moved.kind) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION moved.twice(int, int) RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE OPERATOR moved.=== (FUNCTION = moved.twice, LEFTARG = int, RIGHTARG = int);
CREATE AGGREGATE moved.a(text) (SFUNC = textcat, STYPE = text, INITCOND = '');
"""


@pytest.mark.parametrize("change, mark", RENAMED.values(), ids=RENAMED)
def test_a_mark_is_lost_with_the_name(conn, change, mark):
    """And with nothing else: other marks and other changes leave it."""
    with conn.transaction(force_rollback=True):
        conn.execute(MOVED)
        conn.execute(f"SELECT shardmap.mark_shippable('side_s(int)'), shardmap.mark_shippable({mark})")
        conn.execute("ALTER FUNCTION moved.f(int) STABLE; ALTER TYPE moved.kind ADD VALUE 'b'")
        assert conn.execute("SELECT count(*) FROM shardmap.shippable").fetchone() == (2,)
        conn.execute(change)
        assert conn.execute("SELECT name FROM shardmap.shippable").fetchall() == [("public.side_s(integer)",)]


def test_all_sessions_forget_a_lost_mark_at_once(db, conn):
    """Neither the old function under its new name nor a new one under the old name goes to the shards."""
    sql = "SELECT side_s(id) FROM t WHERE k = 7 AND id = 1"
    with db.connect() as other:
        for session in (conn, other):
            session.execute("DEALLOCATE ALL; SET plan_cache_mode = force_generic_plan; PREPARE q (int) AS " + sql.replace("k = 7", "k = $1"))
        conn.execute("SELECT shardmap.mark_shippable('side_s(int)')")
        assert [session.execute(query).fetchone() for session in (conn, other) for query in (sql, "EXECUTE q (7)")] == [("there",)] * 4
        conn.execute("ALTER FUNCTION side_s(int) RENAME TO side_r")
        try:
            renamed = sql.replace("side_s", "side_r")
            assert [session.execute(renamed).fetchone() for session in (conn, other)] == [("here",)] * 2
            conn.execute("CREATE FUNCTION side_s(i int) RETURNS text LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN 'new'; END $$")
            assert [session.execute(sql).fetchone() for session in (conn, other)] == [("new",)] * 2
        finally:
            conn.execute("DROP FUNCTION IF EXISTS side_s(int)")
            conn.execute("ALTER FUNCTION side_r(int) RENAME TO side_s")


def test_a_mark_of_nothing_does_no_harm(conn):
    """As a restore in parts may leave it."""
    conn.execute("BEGIN; INSERT INTO shardmap.shippable_mark VALUES ('function', 'gone.f(gone.x)', 'gone.x'), ('type', 'gone.x', ''),"
                 " ('operator', 'gone.=(gone.x,integer)', E'gone.x\\ninteger'); SELECT shardmap.invalidate_caches()")
    assert conn.execute("SELECT count(*) FROM t WHERE k = 7").fetchone() == (3,)
    assert is_routed(conn, "SELECT id FROM t WHERE k = 7")
    conn.execute("ROLLBACK")


def test_a_table_with_a_type_that_is_not_marked(db):
    """What does not name the column goes whole; what does stays here."""
    db.psql("""CREATE TYPE temper AS ENUM ('well', 'ill');
               SELECT shardmap.run_on_shards($$CREATE TYPE public.temper AS ENUM ('well', 'ill')$$);
               CREATE TABLE moody (k int, id int, c text, m temper, PRIMARY KEY (k, id));
               SELECT shardmap.distribute_table('moody', 'k')""")
    with db.connect() as conn:
        for sql in ("INSERT INTO moody (k, id, c) VALUES (7, 1, 'a'), (7, 2, 'b')",
                    "INSERT INTO moody (k, id, c) VALUES (7, 1, 'x') ON CONFLICT (k, id) DO UPDATE SET c = moody.c || excluded.c",
                    "UPDATE moody SET c = c || id WHERE k = 7 AND id = 2"):
            assert is_routed(conn, sql), sql
            conn.execute(sql)
        for sql, count in (("UPDATE moody SET m = 'ill' WHERE k = 7 AND id = 2", 1), ("DELETE FROM moody WHERE k = 7 AND m > 'ill'", 0),
                           ("SELECT c FROM moody WHERE k = 7 AND m = 'ill'", 1), ("SELECT m FROM moody WHERE k = 7", 2)):
            assert "Not Routed Because" in plan_of(conn, sql), sql
            assert conn.execute(sql).rowcount == count
        rows = conn.execute("SELECT id, c, m FROM moody WHERE k = 7 ORDER BY id").fetchall()
        assert rows == [(1, "ax", None), (2, "b2", "ill")]
