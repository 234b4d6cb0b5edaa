"""Step 1 of the ladder: a statement about one shard runs there as a whole, with the answer that one server would give.

Each statement runs with literals and as a generic plan, on the logical tables, on them with routing off, and on local
tables of the same names and rows (schema plain): answers, counts and tables afterwards are the same. What must not go whole says
why. Key 7 is the only one that the statements name; in a generic plan it is a parameter.
"""

import contextlib
import re

import psycopg
import pytest
from psycopg import errors

TABLES = """
CREATE TABLE {0}.t (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE {0}.u (k int, id int DEFAULT 50, n numeric DEFAULT 1.5, at timestamptz, doc jsonb, tags int[], PRIMARY KEY (k, id));
INSERT INTO {0}.t SELECT k, id, 'c' || id % 3 FROM generate_series(1, 20) k, generate_series(1, 5) id;
INSERT INTO {0}.u SELECT k, id, id / 2.0, '2024-03-01 12:00+00'::timestamptz + id * interval '13 hours',
    jsonb_build_object('id', id, 'list', ARRAY[k, id]), ARRAY[id, k] FROM {0}.t WHERE id < 4;
CREATE VIEW {0}.v AS SELECT k, id, upper(c) AS large FROM {0}.t WHERE id > 1;
CREATE VIEW {0}.w AS SELECT k, id AS number, c FROM {0}.t WHERE id < 9;
"""
SETUP = f"""
CREATE SCHEMA plain;
{TABLES.format("plain")}
{TABLES.format("public")}
CREATE TABLE numbered (k int, id serial, made text DEFAULT current_user, at timestamptz DEFAULT now(), PRIMARY KEY (k, id));
CREATE TABLE many (k int, id int, PRIMARY KEY (k, id));
INSERT INTO many SELECT 7, id FROM generate_series(1, 1500) id;
CREATE TABLE fired (k int, id int, PRIMARY KEY (k, id));
CREATE TABLE local (k int, id int);
CREATE VIEW barrier WITH (security_barrier) AS SELECT k, id, c FROM t;
CREATE VIEW checked AS SELECT k, id, c FROM t WHERE id < 9 WITH CHECK OPTION;
CREATE FUNCTION plus_one(i int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN i + 1; END';
CREATE FUNCTION two(high int DEFAULT 2, low int DEFAULT 0) RETURNS int LANGUAGE plpgsql STABLE AS 'BEGIN RETURN high + 0 * low; END';
CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{{t,u,numbered,many,fired}}'::regclass[]) x;
CREATE TRIGGER f AFTER DELETE ON fired FOR EACH STATEMENT EXECUTE FUNCTION f();
INSERT INTO local SELECT k, id FROM t WHERE id < 3;
"""

RECURSIVE = ("WITH RECURSIVE r AS (SELECT k, id FROM t WHERE k = 7 AND id < 3 UNION ALL"
             " SELECT t.k, t.id FROM t JOIN r ON t.k = r.k AND t.id = r.id {0} WHERE t.k = 7) {1}")

READS = [
    "SELECT id, row_number() OVER (PARTITION BY c ORDER BY id DESC), sum(id) OVER w FROM t WHERE k = 7"
    " WINDOW w AS (ORDER BY id ROWS 1 PRECEDING)",
    "SELECT id FROM t WHERE k = 7 UNION SELECT id FROM u WHERE k = 7",
    "SELECT id FROM t WHERE k = 7 EXCEPT ALL (SELECT id FROM u WHERE k = 7 INTERSECT SELECT 2)",
    "SELECT DISTINCT ON (c) c, id FROM t WHERE k = 7 ORDER BY c, id DESC",
    "SELECT DISTINCT c FROM t WHERE k = 7",
    "SELECT t.id, l.n FROM t, LATERAL (SELECT max(n) AS n FROM u WHERE u.k = t.k AND u.id <= t.id) l WHERE t.k = 7",
    "SELECT t.id, x.n FROM t CROSS JOIN LATERAL unnest(ARRAY[t.id, t.id + 1]) WITH ORDINALITY x(v, n) WHERE k = 7",
    "SELECT id FROM t WHERE k = 7 AND id > 2 FOR UPDATE",
    "SELECT t.id FROM t JOIN u USING (k, id) WHERE k = 7 FOR NO KEY UPDATE OF t SKIP LOCKED",
    "SELECT c, id, count(*), grouping(c, id) FROM t WHERE k = 7 GROUP BY GROUPING SETS ((c), (id), ())",
    "SELECT c, id % 2, sum(id) FROM t WHERE k = 7 GROUP BY CUBE (1, 2) HAVING sum(id) > 2",
    "SELECT json_agg(json_build_object('c', c, 'id', id) ORDER BY id)::text FROM t WHERE k = 7",
    "SELECT doc->'list'->>1, doc @> '{\"id\": 2}', jsonb_path_query_array(doc, '$.list[*]') FROM u WHERE k = 7",
    "SELECT u.id, e.key, e.value FROM u, jsonb_each(doc) e WHERE k = 7",
    "WITH a AS (SELECT * FROM t WHERE k = 7), b AS MATERIALIZED (SELECT * FROM u WHERE k = 7 AND n > 0.5)"
    " SELECT a.id, c, n FROM a LEFT JOIN b USING (id)",
    "WITH RECURSIVE r AS (SELECT k, id FROM t WHERE k = 7 AND id = 1 UNION ALL"
    " SELECT t.k, t.id FROM t JOIN r ON t.k = r.k AND t.id = r.id + 1 WHERE t.k = 7) SELECT * FROM r",
    RECURSIVE.format("+ 2", "SEARCH DEPTH FIRST BY id, k SET o SELECT id FROM r ORDER BY o, id"),
    RECURSIVE.format("% 3 + 1", "CYCLE id SET again USING way SELECT id, again FROM r"),
    RECURSIVE.format("% 3 + 1", "CYCLE k, id SET again TO 'y' DEFAULT 'n' USING way SELECT id, again, cardinality(way) FROM r"),
    RECURSIVE.format("% 3 + 1", "SEARCH DEPTH FIRST BY id SET o CYCLE id SET again USING way SELECT id FROM r WHERE NOT again ORDER BY o"),
    "SELECT (" + RECURSIVE.format("% 3 + 1", "CYCLE id SET again USING way SELECT count(*) FROM r WHERE again") + "), id FROM u WHERE k = 7",
    "SELECT count(*) FILTER (WHERE id > 2), string_agg(c, ',' ORDER BY id DESC), percentile_cont(0.5) WITHIN GROUP (ORDER BY id),"
    " array_agg(DISTINCT c) FROM t WHERE k = 7",
    "SELECT id FROM t WHERE k = 7 ORDER BY id DESC OFFSET 1 LIMIT 2",
    "SELECT c FROM t WHERE k = 7 ORDER BY c FETCH FIRST 1 ROW WITH TIES",
    "SELECT id, (SELECT sum(n) FROM u WHERE u.k = t.k AND u.id <= t.id) FROM t WHERE k = 7",
    "SELECT id FROM t WHERE k = 7 AND NOT EXISTS (SELECT FROM u WHERE u.k = t.k AND u.id = t.id)",
    "SELECT id FROM t WHERE k = 7 AND id NOT IN (SELECT id FROM u WHERE k = 7 AND n > 0.6)",
    "SELECT t.id, u.id FROM t LEFT JOIN u ON u.k = t.k AND u.id = t.id + 1 WHERE t.k = 7",
    "SELECT * FROM (SELECT * FROM t WHERE k = 7) a FULL JOIN (SELECT k, id + 2 AS id FROM u WHERE k = 7) b USING (k, id)",
    "SELECT t.id, x.w FROM t JOIN (VALUES (1, 'one'), (2, NULL)) x(id, w) USING (id) WHERE k = 7",
    "SELECT g, count(id) FROM generate_series(1, 3) g LEFT JOIN t ON id >= g AND k = 7 WHERE k = 7 GROUP BY g",
    "SELECT CASE WHEN id > 2 THEN c ELSE 'less' END, coalesce(nullif(id, 2), -1), greatest(id, 3), id IN (1, 2) FROM t WHERE k = 7",
    "SELECT 1, 'text' AS x, NULL AS y, true, ARRAY[id, 7], c || '''\\' FROM t WHERE (k, id) = (7, 2)",
    "SELECT date_trunc('day', at), extract(hour FROM at), at + interval '1 month', at::date, at::text FROM u WHERE k = 7",
    "SELECT id, at < now(), now() - now() = interval '0', current_user, current_setting('server_version') FROM u WHERE k = 7",
    "SELECT id, current_user = 'x' FROM u WHERE k = 7 AND at > now() - make_interval(days => 20, years => 200)",
    "SELECT id, make_interval(hours => id) FROM u WHERE k = 7 AND id = length(lpad('x', 2))",
    "SELECT id FROM u WHERE k = 7 AND at BETWEEN '2024-03-01' AND timestamptz '2024-03-02 20:00+00'",
    "SELECT large FROM v WHERE k = 7",
    "SELECT v.large, w.number FROM v JOIN w ON w.k = v.k AND w.number = v.id WHERE v.k = 7",
    "SELECT tags[1], tags || 7, id = ANY (tags), cardinality(tags) FROM u WHERE k = 7",
    "SELECT FROM t WHERE k = 7",
    # The columns that are sorted by are not those of the result that have their names.
    "SELECT -id AS id FROM t WHERE k = 7 ORDER BY t.id",
    "SELECT DISTINCT ON (t.c) id::text AS c FROM t WHERE k = 7 ORDER BY t.c DESC, id",
    "SELECT * FROM (SELECT -id AS id FROM t WHERE k = 7 ORDER BY t.id LIMIT 2) s",
    "SELECT -id AS id, count(*) FROM t WHERE k = 7 GROUP BY t.id ORDER BY t.id",
]

# (statement, whether a lower step can do it too)
WRITES = [
    ("INSERT INTO t (c, k, id) VALUES ('a', 7, 10), ('b', 7, 11), (NULL, 7, 12)", True),
    ("INSERT INTO u (n, k) VALUES (DEFAULT, 7)", True),
    ("INSERT INTO u (doc, id, k, n) VALUES ('{}', 60, 7, DEFAULT), (NULL, 61, 7, 2) RETURNING n, id, doc, at", True),
    ("INSERT INTO u (id, k, at) VALUES (62, 7, now() - now() + timestamptz '2024-01-01 00:00+00') RETURNING *", True),
    ("INSERT INTO w (c, number, k) VALUES ('through a view', 8, 7) RETURNING number, c", True),
    ("UPDATE t SET c = u.n || c FROM u WHERE u.k = t.k AND u.id = t.id AND t.k = 7 RETURNING t.id, t.c, u.n", True),
    ("UPDATE t SET c = upper(c), id = id + 100 WHERE k = 7 AND id > 2", True),
    ("UPDATE u SET (n, at) = (SELECT max(n), min(at) FROM u x WHERE x.k = 7) WHERE k = 7 AND id = 2 RETURNING n", False),
    ("UPDATE u SET tags[2] = 5, doc['id'] = '9', n = DEFAULT WHERE k = 7 AND id = 3 RETURNING tags, doc, n", True),
    ("UPDATE w SET c = 'by view' WHERE k = 7 AND number < 3", True),
    ("DELETE FROM t USING u WHERE u.k = t.k AND u.id = t.id AND u.n > 0.5 AND t.k = 7 RETURNING t.*, n", True),
    ("DELETE FROM t WHERE k = 7 AND id IN (SELECT id FROM u WHERE k = 7) RETURNING id, c", True),
    ("DELETE FROM w WHERE k = 7 AND number = 2 RETURNING c", True),
    ("DELETE FROM t WHERE k = 7 AND id = 99", True),
    ("INSERT INTO t VALUES (7, 1, 'x'), (7, 10, 'y') ON CONFLICT (k, id) DO UPDATE SET c = t.c || excluded.c RETURNING *", False),
    ("INSERT INTO t AS a VALUES (7, 1, 'x') ON CONFLICT (k, id) DO UPDATE SET c = excluded.c WHERE a.c = 'no' RETURNING c", False),
    ("INSERT INTO t VALUES (7, 1, 'x'), (7, 10, 'y') ON CONFLICT (k, id) DO NOTHING RETURNING id", False),
    ("INSERT INTO t VALUES (7, 1, 'x') ON CONFLICT DO NOTHING", True),
    ("WITH d AS (DELETE FROM t WHERE k = 7 AND id = 1 RETURNING id) UPDATE u SET n = n + d.id FROM d WHERE u.k = 7 RETURNING u.id, n",
     True),
    ("WITH i AS (INSERT INTO t VALUES (7, 10, 'x') RETURNING id), d AS (DELETE FROM u WHERE k = 7 RETURNING id)"
     " SELECT (SELECT sum(id) FROM i), (SELECT sum(id) FROM d), count(*) FROM t WHERE k = 7", False),
    ("UPDATE t SET c = 'n' WHERE k = 7 AND id < 3 RETURNING id, (SELECT count(*) FROM t x WHERE x.k = 7 AND x.c = 'n')", False),
]

ROUTED = "Routing: whole on one shard"


def plan_of(conn, sql, options="VERBOSE, COSTS OFF"):
    return "\n".join(line for (line,) in conn.execute(f"EXPLAIN ({options}) {sql}"))


def is_routed(plan):
    return "Custom Scan (ShardRoute)" in plan and ROUTED in plan and "Foreign" not in plan


def generic(conn, sql):
    """Prepares the statement with its key as a parameter, as a generic plan; what executes it."""
    conn.execute("SET plan_cache_mode = force_generic_plan; DEALLOCATE ALL")
    conn.execute("PREPARE q (int) AS " + re.sub(r"\b7\b", "$1", sql))
    return "EXECUTE q (7)"


@pytest.fixture(scope="module")
def sessions(db):
    """Sessions: on logical tables, on them with routing off, on local tables."""
    with (db.connect() as routed, db.connect(shardmap__enable_routing="off") as off,
          db.connect(search_path="plain") as local):
        for conn in (routed, off, local):
            conn.prepare_threshold = None
        yield routed, off, local


def outcome(conn, sql, ordered):
    """Answer, count and the tables' rows of key 7 afterwards; then all is rolled back."""
    with contextlib.ExitStack() as undo:
        conn.execute("BEGIN")
        undo.callback(conn.execute, "ROLLBACK")
        cursor = conn.execute(sql)
        rows = cursor.fetchall() if cursor.description else None
        if rows and not ordered:
            rows.sort(key=repr)
        return rows, cursor.rowcount, *(conn.execute(f"SELECT * FROM {table} ORDER BY k, id").fetchall() for table in "tu")


def same(sessions, sql, everywhere):
    ordered = re.search(r"ORDER BY [^()]*$", sql) is not None
    routed, off, local = sessions
    want = outcome(local, sql, ordered)
    assert is_routed(plan_of(routed, sql)), plan_of(routed, sql)
    assert outcome(routed, sql, ordered) == want
    executed = generic(routed, sql)
    assert is_routed(plan_of(routed, executed)), plan_of(routed, executed)
    assert outcome(routed, executed, ordered) == want
    if everywhere:
        assert outcome(off, sql, ordered) == want


@pytest.mark.parametrize("sql", READS)
def test_reads(sessions, sql):
    same(sessions, sql, True)


@pytest.mark.parametrize("sql, everywhere", WRITES)
def test_writes(sessions, sql, everywhere):
    same(sessions, sql, everywhere)


ROW_SECURITY = "Row security or a security barrier applies."
LEAKY = "Row security or a security barrier applies, and an expression might tell what it sees."
VOLATILE = "A function in it gives another value for each row."
UNKNOWN = "A function or type in it is not known to the shard."
SUBSTITUTED, NARROWED = "one shard, in place of the logical table", "only the shards of the keys named"


@pytest.mark.parametrize("sql, step, why", [
    ("SELECT id, c FROM barrier WHERE k = 7 AND c LIKE 'c%'", SUBSTITUTED, LEAKY),
    ("SELECT id FROM (SELECT k, id, 4 / id AS x FROM barrier) s WHERE k = 7 AND x > 1", SUBSTITUTED, LEAKY),
    (RECURSIVE.format("+ 2", "SEARCH BREADTH FIRST BY id SET o SELECT id FROM r ORDER BY o, id"), SUBSTITUTED,
     "It has a part that is not sent to shards."),
    (RECURSIVE.format("% 3 + 1", "CYCLE id SET again USING way SELECT id, way FROM r"), SUBSTITUTED,
     "A result's text would depend on the session's DateStyle."),
    ("INSERT INTO checked VALUES (7, 8, 'x')", SUBSTITUTED, ROW_SECURITY),
    ("UPDATE checked SET c = 'x' WHERE k = 7", SUBSTITUTED, ROW_SECURITY),
    ("DELETE FROM fired WHERE k = 7", NARROWED, "Table public.fired has triggers."),
    ("SELECT id FROM t WHERE k = 7 AND random() < 2", SUBSTITUTED, VOLATILE),
    ("UPDATE t SET c = CASE WHEN random() < 2 THEN 'x' END WHERE k = 7", SUBSTITUTED, VOLATILE),
    ("SELECT nextval('numbered_id_seq') > 0, id FROM t WHERE k = 7", SUBSTITUTED, VOLATILE),
    ("SELECT plus_one(id) FROM t WHERE k = 7", SUBSTITUTED, UNKNOWN),
    ("UPDATE t SET c = plus_one(id) WHERE k = 7", SUBSTITUTED, UNKNOWN),
    ("SELECT shard_for(k), id FROM t WHERE k = 7", SUBSTITUTED, UNKNOWN),
    ("SELECT to_char(at, 'Mon'), id FROM u WHERE k = 7", SUBSTITUTED, UNKNOWN),
    ("SELECT t FROM t WHERE k = 7", NARROWED, "Rows of public.t are used as values."),
    ("SELECT id, ctid IS NULL FROM t WHERE k = 7", SUBSTITUTED, "Whole rows or system columns are named."),
    ("SELECT array_agg(at ORDER BY id) FROM u WHERE k = 7", SUBSTITUTED,
     "A result's text would depend on the session's DateStyle."),
    ("SELECT t.id, l.id FROM t JOIN local l USING (k) WHERE k = 7", SUBSTITUTED,
     "There are other tables than logical ones in it."),
    ("DELETE FROM t USING local l WHERE l.k = t.k AND t.k = 7", SUBSTITUTED, "There are other tables than logical ones in it."),
    ("SELECT count(*) FROM t WHERE k IN ({a}, {b})", NARROWED, "The keys named of public.t are on several shards."),
    ("UPDATE t SET c = 'x' WHERE k IN ({a}, {b})", NARROWED, "The keys named of public.t are on several shards."),
    ("SELECT t.id, u.id FROM t, u WHERE t.k = {a} AND u.k = {b}", NARROWED, "The tables' keys are on different shards."),
])
def test_what_is_not_routed(db, sessions, sql, step, why):
    a, b = db.apart(key_type="int4")
    routed, off, _ = sessions
    sql = sql.format(a=a, b=b)
    plan = plan_of(routed, sql)
    assert "ShardRoute" not in plan and f"Routing: {step}" in plan and f"Because: {why}" in plan, plan
    assert outcome(routed, sql, False) == outcome(off, sql, False)


def test_functions_of_ones_own_are_computed_here_once(sessions):
    conn, _, _ = sessions
    for condition, want in (("id = two()", [(2,)]), ("id = two(low => 1) + 1", [(3,)]), ("id = plus_one(2)", [(3,)]), ("id < plus_one(two()) - 1", [(1,)])):
        sql = f"SELECT id FROM t WHERE k = 7 AND {condition}"
        assert is_routed(plan_of(conn, sql)) and "plus_one" not in plan_of(conn, sql).split("Remote SQL")[1]
        assert conn.execute(sql).fetchall() == want


def test_defaults_are_computed_here(db):
    """Sequences, current_user and now() are the coordinator's, and volatile values one for each row."""
    with db.connect() as conn:
        conn.execute("CREATE ROLE nora; GRANT ALL ON numbered, numbered_id_seq TO nora")
        db.users.append("nora")
        db.psql("".join(f"CREATE USER MAPPING FOR nora SERVER \"shard-{number}\" OPTIONS (user 'postgres', password_required 'false');"
                        for number in range(4)))
        conn.execute("BEGIN; SET LOCAL ROLE nora")
        made = conn.execute("SELECT current_user, now()").fetchone()
        seen = []
        insert = "INSERT INTO numbered (k) VALUES (%s), (%s) RETURNING id, made, at"
        assert is_routed(plan_of(conn, insert.replace("%s", "7")))
        for _ in range(7):  # also as a generic plan
            for id, *rest in conn.execute(insert, (7, 7), prepare=True):
                assert tuple(rest) == made
                seen.append(id)
        for sql in ("INSERT INTO numbered (id, k) VALUES (nextval('numbered_id_seq'), 7) RETURNING id",
                    "INSERT INTO numbered (k, id) VALUES (7, DEFAULT) RETURNING id"):
            assert is_routed(plan_of(conn, sql))
            seen += [id for _ in range(3) for (id,) in conn.execute(sql)]
        assert seen == list(range(seen[0], seen[0] + 20))
        conn.execute("UPDATE numbered SET made = current_user || session_user, at = now() WHERE k = 7 AND id = %s", seen[:1])
        row = conn.execute("SELECT made, at FROM numbered WHERE k = 7 AND id = %s", seen[:1]).fetchone()
        assert row == ("norapostgres", made[1])
        conn.execute("INSERT INTO numbered (k, made) VALUES (7, random()), (7, random())")
        assert conn.execute("SELECT count(DISTINCT made) FROM numbered WHERE k = 7 AND id > %s", seen[-1:]).fetchone() == (2,)
        conn.execute("COMMIT")


@pytest.mark.parametrize("kind", ["", "NO SCROLL", "SCROLL", "BINARY", "INSENSITIVE", "WITH HOLD", "SCROLL WITH HOLD"])
def test_cursors(sessions, kind):
    """Fetched in parts, between other statements and what they roll back."""
    conn, _, _ = sessions
    before, _, after = kind.partition("WITH") if "WITH" in kind else (kind, "", "")
    declare = f"DECLARE x {before} CURSOR {'WITH HOLD' if after else ''} FOR SELECT id FROM many WHERE k = 7 ORDER BY id"

    def fetch(what):
        return [id for (id,) in conn.execute(f"FETCH {what} FROM x").fetchall()]
    assert "ShardRoute" in plan_of(conn, declare) and ROUTED in plan_of(conn, declare)
    conn.execute("BEGIN")
    conn.execute(declare)
    assert fetch(3) == [1, 2, 3]
    conn.execute("SAVEPOINT s")
    assert conn.execute("DELETE FROM many WHERE k = 7").rowcount == 1500
    with pytest.raises(errors.DivisionByZero):
        conn.execute("SELECT 1 / (k - 7) FROM t WHERE k = 7")
    conn.execute("ROLLBACK TO s")
    assert fetch(600) == list(range(4, 604))
    assert conn.execute("SELECT count(*) FROM many WHERE k = 7").fetchone() == (1500,)
    conn.execute("MOVE 500 IN x")
    if "SCROLL" in kind and "NO" not in kind:
        assert fetch("BACKWARD 2") == [1102, 1101]
        assert fetch("FIRST") == [1] and fetch("LAST") == [1500] and fetch("ABSOLUTE 700") == [700]
        conn.execute("MOVE ABSOLUTE 1103 IN x")
    if after:
        conn.execute("COMMIT")
    assert fetch("ALL") == list(range(1104, 1501))
    conn.execute("CLOSE x")
    conn.execute("SELECT 1" if after else "COMMIT")


LOOP = """CREATE FUNCTION {schema}.loop(key int) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    row record;
    said text := '';
    n int;
    x CURSOR (low int) FOR SELECT id FROM t WHERE k = key AND id > low ORDER BY id;
BEGIN
    FOR row IN SELECT * FROM t WHERE k = key ORDER BY id LOOP
        UPDATE t SET c = row.c || '!' WHERE k = row.k AND id = row.id + 1 RETURNING id INTO n;
        said := said || row.c || coalesce(n, -1);
        BEGIN
            INSERT INTO t VALUES (key, row.id, 'again');
        EXCEPTION WHEN unique_violation THEN
            said := said || '.';
        END;
    END LOOP;
    FOR row IN x (3) LOOP
        said := said || row.id;
    END LOOP;
    EXECUTE 'SELECT string_agg(c, $2 ORDER BY id) FROM t WHERE k = $1' INTO row USING key, ',';
    DELETE FROM t WHERE k = key AND id > 4;
    GET DIAGNOSTICS n = ROW_COUNT;
    PERFORM FROM t WHERE k = key AND id = 5;
    RETURN said || row || n || FOUND || (SELECT count(*) FROM t WHERE k = key);
END $$"""


def test_plpgsql(sessions):
    """Loops, nested statements, caught errors, cursors, EXECUTE: seven calls, so that plans are generic in the end."""
    routed, off, local = sessions
    routed.execute(LOOP.format(schema="public"))
    local.execute(LOOP.format(schema="plain"))
    said = []
    for conn in sessions:
        conn.execute("SELECT shardmap.reset_stat_routing()")
        said.append([])
        for key in (7, 8, 9, 7, 7, 8, 11):
            conn.execute("BEGIN")
            said[-1].append(conn.execute("SELECT loop(%s)", (key,)).fetchone())
            conn.execute("ROLLBACK")
        if conn is routed:
            steps = dict(conn.execute("SELECT * FROM shardmap.stat_routing WHERE statements > 0").fetchall())
            assert set(steps) == {"routed"}
    assert said[0] == said[1] == said[2]


def test_ten_executions(db):
    """With another key each time: each goes to its own shard, by one generic plan."""
    with db.connect(shardmap__fanout_policy="error") as conn, db.connect(search_path="plain") as local:
        for session in (conn, local):
            session.execute("""PREPARE r (int, int) AS SELECT t.id, n, now() > at FROM t LEFT JOIN u USING (k, id)
                                 WHERE k = $1 AND id < $2 ORDER BY id;
                               PREPARE w (int, int) AS INSERT INTO t VALUES ($1, $2, 'a'), ($1, $2 + 1, current_user)
                                 ON CONFLICT (k, id) DO UPDATE SET c = excluded.c || t.c RETURNING id, c;
                               PREPARE d (int) AS DELETE FROM t WHERE k = $1 AND id > 5 RETURNING *""")
        for key in (7, 8, 9, 10, 7, 7, 11, 12, 13, 14):
            for execute in (f"EXECUTE r ({key}, 4)", f"EXECUTE w ({key}, 5)", f"EXECUTE d ({key})"):
                cursor, found = db.asked(lambda: conn.execute(execute))  # noqa: B023
                assert set(found) == db.owners(key, key_type="int4")
                assert cursor.fetchall() == local.execute(execute).fetchall(), execute
        for count, in conn.execute("SELECT generic_plans FROM pg_prepared_statements"):
            assert count > 0
        db.psql("UPDATE t SET c = 'c2' WHERE k BETWEEN 7 AND 14 AND id = 5; UPDATE plain.t SET c = 'c2' WHERE k BETWEEN 7 AND 14 AND id = 5")


def raw(conn, sql):
    """Rows as the server sent them."""
    result = conn.execute(sql).pgresult
    return [tuple(result.get_value(row, column) for column in range(result.nfields)) for row in range(result.ntuples)]


STYLES = [
    ("SET datestyle = 'SQL, DMY'", "SET timezone = 'Asia/Tokyo'"),
    ("SET datestyle = 'German'", "SET timezone = 'America/New_York'"),
    ("SET datestyle = 'Postgres, MDY'", "SET intervalstyle = 'sql_standard'"),
    ("SET datestyle = 'ISO, YMD'", "SET intervalstyle = 'iso_8601'", "SET timezone = 'UTC'"),
    ("SET bytea_output = 'escape'", "SET extra_float_digits = -8"),
    ("SET standard_conforming_strings = off", "SET escape_string_warning = off"),
]
STYLED = [
    "SELECT at, at::text, at::date, at::date::text, ('0' || id || '/02/2024')::date, at - '2024-01-01', n::float8 / 3 FROM u WHERE k = 7",
    "SELECT date '02/03/2024' + id, '02/03/2024 10:00'::timestamptz < at, interval '1 day -2 hours' * id, to_json(at) FROM u WHERE k = 7",
    "SELECT (n::float8 / 3)::text, (id::text || 'é')::bytea, '\\x41ff'::bytea, float8 '0.1234567890123456' FROM u WHERE k = 7",
    "SELECT 'a\\\\b', length('a\\\\b'), 'a\\\\b' || id FROM t WHERE k = 7 AND 'a\\\\b' <> c",
    "INSERT INTO u (k, id, at, doc) VALUES (7, 80, '02/03/2024 10:00', to_jsonb('02/03/2024 10:00'::timestamptz)) RETURNING *, at::text",
    "UPDATE u SET at = '02/03/2024'::timestamptz + (n || ' hours')::interval WHERE k = 7 AND at > '01/03/2024' RETURNING at, at::time",
]


def test_styles_of_the_session(db):
    """DateStyle, TimeZone and the like mean on the shard what they mean here, also right after they change."""
    with db.connect() as conn, db.connect(search_path="plain") as local:
        for sql in STYLED:
            assert is_routed(plan_of(conn, sql)), plan_of(conn, sql)

        def compare(sql):
            rows = []
            for session in (conn, local):
                session.execute("SAVEPOINT s")
                try:
                    rows.append(sorted(raw(session, sql)))
                except psycopg.Error as error:
                    rows.append(error.sqlstate)
                session.execute("ROLLBACK TO s")
            assert rows[0] == rows[1], sql
        for style in STYLES:
            for setting in style:
                for session in (conn, local):
                    session.execute("BEGIN")
                for sql in STYLED:
                    compare(sql)
                for session in (conn, local):
                    session.execute(setting)
                for sql in STYLED:
                    compare(sql)
                for session in (conn, local):
                    session.execute("ROLLBACK")
                for session in (conn, local):
                    session.execute("BEGIN")
                for sql in STYLED[:3]:
                    compare(sql)
                for session in (conn, local):
                    session.execute("ROLLBACK")
                    session.execute(setting)


def test_privileges_of_columns(db):
    db.add_user("tess")
    db.psql("GRANT SELECT (k, id), UPDATE (c) ON t TO tess; GRANT SELECT ON v TO tess; GRANT SELECT (k, number) ON w TO tess")
    with db.connect("tess", shardmap__fanout_policy="error") as conn:
        for sql, count in (("SELECT id FROM t WHERE k = 7 AND id > 1", 4), ("SELECT large FROM v WHERE k = 7", 4),
                           ("UPDATE t SET c = 'c1' WHERE k = 7 AND id = 1", 1), ("SELECT number FROM w WHERE k = 7", 5)):
            assert is_routed(plan_of(conn, sql))
            assert conn.execute(sql).rowcount == count
        for sql in ("SELECT c FROM t WHERE k = 7", "SELECT * FROM t WHERE k = 7", "SELECT count(*) FROM t WHERE k = 7 AND c = 'c1'",
                    "UPDATE t SET c = c || 'x' WHERE k = 7", "UPDATE t SET c = 'x' WHERE k = 7 RETURNING c",
                    "UPDATE t SET id = 8 WHERE k = 7", "DELETE FROM t WHERE k = 7", "INSERT INTO t VALUES (7, 9, 'x')",
                    "SELECT c FROM w WHERE k = 7", "UPDATE w SET c = 'x' WHERE k = 7", "SELECT id FROM t WHERE k = 7 FOR UPDATE OF t, u",
                    "SELECT t.id FROM t JOIN u USING (k) WHERE k = 7", "EXPLAIN SELECT c FROM t WHERE k = 7",
                    "WITH x AS (UPDATE t SET c = 'x' WHERE k = 7 RETURNING c) TABLE x"):
            def call():
                with pytest.raises((errors.InsufficientPrivilege, errors.UndefinedTable)):
                    conn.execute(sql)  # noqa: B023
            assert db.asked(call)[1] == {}, sql
        # As two users: not whole, and right.
        sql = "SELECT v.large, t.id FROM v JOIN t ON t.k = v.k AND t.id = v.id WHERE t.k = 7"
        assert "Not Routed Because: Its tables are used as different users." in plan_of(conn, sql)
        assert conn.execute(sql).rowcount == 4
        # A plan made before the right was taken away.
        for mode in ("force_custom_plan", "force_generic_plan"):
            conn.execute(f"SET plan_cache_mode = {mode}")
            db.psql("GRANT SELECT (c) ON t TO tess")
            conn.execute("PREPARE p (int) AS SELECT c FROM t WHERE k = $1")
            assert conn.execute("EXECUTE p (7)").rowcount == 5
            db.psql("REVOKE SELECT (c) ON t FROM tess")
            with pytest.raises(errors.InsufficientPrivilege):
                conn.execute("EXECUTE p (7)")
            conn.execute("DEALLOCATE p")


@pytest.mark.parametrize("sql", [
    "INSERT INTO t VALUES ($1, 1, 'x'), ($2, 10, 'y') ON CONFLICT (k, id) DO UPDATE SET c = excluded.c",
    "UPDATE t SET c = c WHERE k = $1 AND id = 1 RETURNING (SELECT count(*) FROM t x WHERE x.k = $2)",
])
def test_two_parameters_of_one_shard(db, sql):
    """What only a whole shard can do works as often as it is executed."""
    with db.connect() as conn:
        conn.execute("PREPARE p (int, int) AS " + sql)
        for _ in range(10):
            conn.execute("BEGIN; EXECUTE p (7, 7); ROLLBACK")
