"""Statements that once got a wrong answer in silence: the same on shards as on plain tables, routing on and off."""

import psycopg
import pytest

TABLES = """
    CREATE TABLE orders (k bigint, id int, x int, PRIMARY KEY (k, id));
    CREATE TABLE person (k bigint, id int, r int, PRIMARY KEY (k, id));
    CREATE TABLE words (k text, id int, PRIMARY KEY (k, id));
    CREATE TABLE codes (k varchar(20), id int, PRIMARY KEY (k, id));
    CREATE TABLE hours (k timestamp, id int, PRIMARY KEY (k, id));
"""
ROWS = """
    INSERT INTO orders SELECT i % 50, i, CASE WHEN i % 50 = 1 THEN 7 ELSE i % 9 END FROM generate_series(1, 1000) i;
    INSERT INTO person SELECT i % 50, i, i % 9 FROM generate_series(1, 500) i;
    INSERT INTO words SELECT 'f' || i, i FROM generate_series(1, 40) i;
    INSERT INTO words VALUES ('F12', 1);
    INSERT INTO codes VALUES ('c', 1), ('a ', 2), ('b', 3);
    INSERT INTO hours SELECT timestamp '2024-01-01' + i * interval '1 hour', i FROM generate_series(1, 100) i;
    CREATE FUNCTION allrows() RETURNS SETOF orders LANGUAGE sql STABLE AS 'SELECT * FROM orders';
    CREATE FUNCTION onekey(key bigint) RETURNS SETOF orders LANGUAGE sql STABLE AS 'SELECT * FROM orders WHERE k = key';
"""
DISTRIBUTED = [("orders", "k"), ("person", "k"), ("words", "k"), ("codes", "k"), ("hours", "k")]
SETUP = (
    f"CREATE SCHEMA plain; SET search_path = plain; {TABLES} {ROWS} CREATE SCHEMA spread; SET search_path = spread; {TABLES}"
    + "".join(f"SELECT shardmap.distribute_table('{table}', '{key}');" for table, key in DISTRIBUTED)
    + ROWS
)

ANSWERS = {
    "a link to a nullable key is no condition": """
        SELECT count(*) FROM (SELECT c.k AS ck, o.id FROM orders o LEFT JOIN person c ON c.k = o.k AND o.k = 7) s""",
    "an aggregate's subquery hears nothing of its input": """
        SELECT count(*), (SELECT count(*) FROM person) FROM orders WHERE false""",
    "nor if it is correlated": """
        SELECT sum(n) FROM (SELECT o.id, (SELECT count(*) + (SELECT count(*) FROM person c WHERE c.k = o.k)
        FROM orders t WHERE t.k = o.k AND o.k = 7) n FROM orders o WHERE o.id < 200) s""",
    "a maximum has no ties": """
        SELECT max(x), (SELECT min(r) FROM person ORDER BY 1 FETCH FIRST 1 ROW WITH TIES) FROM orders
        ORDER BY 1 FETCH FIRST 2 ROWS WITH TIES""",
    "HAVING alone yields a row": """
        SELECT count(*) FROM orders o WHERE EXISTS (SELECT 1 FROM person c WHERE c.k = o.k AND c.k = 7 HAVING true)""",
    "RETURNING sees new values": """
        WITH u AS (UPDATE orders SET x = 8 WHERE k = 1 AND x = 7
        RETURNING (SELECT count(*) FROM person p WHERE p.k = orders.x) c) SELECT DISTINCT c FROM u""",
    "a fraction is no integer key": "SELECT count(*) FROM orders WHERE k IN (1.0, 2.5, 3.0)",
    "char(n) ignores blanks on the shard too": "SELECT id FROM codes WHERE k = 'a'::char(8)",
    "an aggregate that nobody reads is one row": """
        SELECT count(*) FROM (SELECT avg(o.id), count(*) FROM orders o JOIN person p USING (k) WHERE k = 3) q""",
    "a scan's own subquery runs first": """
        SELECT count(*) FROM orders t1 WHERE t1.k = 7 AND EXISTS (SELECT FROM orders t2)""",
    "a semi join with a condition that stays here": """
        SELECT t1.id FROM orders t1 WHERE t1.k = 1 AND EXISTS (
        SELECT FROM person p WHERE p.k = t1.k AND p.r < t1.x + length(current_setting('search_path')))""",
    "an inlined function": "SELECT count(*), sum(id) FROM allrows()",
    "an inlined function of one key": "SELECT count(*), sum(id) FROM onekey(5)",
    "an inlined function in a subquery": """
        SELECT count(*) FROM person p WHERE EXISTS (SELECT FROM onekey(p.k) f WHERE f.x > 1)""",
    "a key compared with a subquery": "SELECT count(*) FROM words WHERE k = (SELECT 'f1' || length(current_user)::text)",
    "the length of a cast in a condition": """
        SELECT id, k::varchar(2) FROM words WHERE k = 'f12' AND k::varchar(2) = 'f1' AND 'x12'::text::char(2) = 'x1'
        AND id::numeric(4, 1)::text = '12.0'""",
    "the field of EXTRACT in a condition": """
        SELECT id FROM hours WHERE k = '2024-01-01 05:00' AND extract(hour FROM k) = id AND extract(year FROM k) = 2024
        AND k::timestamp(0) = k AND k AT TIME ZONE 'UTC' > '2020-01-01'""",
    "a form of Unicode in a condition": """
        SELECT id FROM words WHERE k = 'f12' AND k IS NFC NORMALIZED AND normalize(k || 'ﬁ', NFKC) = 'f12fi'
        AND overlay(k PLACING 'xy' FROM 2 FOR 1) = 'fxy2' AND trim(LEADING 'f' FROM k) = '12'""",
    "hashed subqueries beside each other": """
        SELECT count(*) FROM orders o WHERE o.k <> ALL (SELECT p.k FROM person p WHERE p.r > 7 OR p.id = 3)""",
}
WRITES = {
    "INSERT .. SELECT from itself": "INSERT INTO orders SELECT k + 1000, id, x FROM orders",
    "INSERT .. SELECT from itself by a function": "INSERT INTO orders SELECT k + 1000, id, x FROM allrows()",
    "UPDATE by a subquery on itself": "UPDATE orders SET x = (SELECT max(o.x) + 1 FROM orders o WHERE o.k = orders.k)",
    "DELETE by a join with itself": "DELETE FROM orders USING orders o WHERE o.k = orders.k AND o.id < orders.id",
    "UPDATE with the length of a cast": "UPDATE orders SET x = ('12' || id)::varchar(2)::int WHERE k = 7",
    "UPDATE with the field of EXTRACT": "UPDATE orders SET x = extract(day FROM date '2024-01-01' + id) WHERE k = 7",
    "UPDATE by a join": "UPDATE orders SET x = p.r FROM person p WHERE p.k = orders.k AND p.id = orders.id AND orders.k = 7",
}


def answers(conn, sql, then=None):
    """The rows of `sql` (or of `then` after it) in each schema, rolled back."""
    found = {}
    for schema in ("plain", "spread"):
        with conn.transaction(force_rollback=True):
            conn.execute(f"SET LOCAL search_path = {schema}")
            cursor = conn.execute(sql)
            count = cursor.rowcount
            found[schema] = count, sorted((conn.execute(then) if then else cursor).fetchall())
    return found["plain"], found["spread"]


@pytest.mark.parametrize("routing", ["on", "off"])
@pytest.mark.parametrize("sql", ANSWERS.values(), ids=ANSWERS.keys())
def test_answers_are_those_of_plain_tables(conn, sql, routing):
    conn.execute(f"SET shardmap.enable_routing = {routing}")
    plain, spread = answers(conn, sql)
    assert spread == plain


@pytest.mark.parametrize("asynchronous", ["on", "off"])
@pytest.mark.parametrize("sql", WRITES.values(), ids=WRITES.keys())
def test_writes_leave_what_they_leave_in_plain_tables(conn, sql, asynchronous):
    conn.execute(f"SET enable_async_append = {asynchronous}")
    plain, spread = answers(conn, sql, "SELECT * FROM orders")
    assert spread == plain


def test_late_arrays_of_another_time_type(conn):
    conn.execute("SET timezone = 'America/New_York'")
    conn.execute("SET plan_cache_mode = force_generic_plan")
    conn.execute("SET search_path = spread")
    conn.execute("PREPARE late(timestamptz[]) AS SELECT id FROM hours WHERE k = ANY ($1)")
    found = conn.execute("EXECUTE late(ARRAY['2024-01-01 06:00'::timestamp::timestamptz])").fetchall()
    assert found == [(6,)]


def test_ranges_in_a_loose_collation(conn):
    with conn.transaction(force_rollback=True):
        conn.execute("SET LOCAL search_path = spread, public")
        try:
            conn.execute("CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
        except psycopg.errors.FeatureNotSupported:
            pytest.skip("this Postgres is built without ICU")
        found = conn.execute("SELECT k FROM words WHERE k >= ('f12' COLLATE loose) AND k <= ('f12' COLLATE loose)")
        assert sorted(found.fetchall()) == [("F12",), ("f12",)]


@pytest.mark.parametrize("router", ["on", "off"])
def test_a_stable_function_does_not_see_what_its_statement_writes(conn, router):
    with conn.transaction(force_rollback=True):
        conn.execute(f"SET LOCAL search_path = spread; SET LOCAL shardmap.enable_router = {router}")
        for kind in ("STABLE", "VOLATILE"):
            conn.execute(f"CREATE OR REPLACE FUNCTION pg_temp.many(key bigint) RETURNS bigint LANGUAGE plpgsql {kind} AS"
                         " 'BEGIN RETURN (SELECT count(*) FROM orders o WHERE o.k = key); END'")
            with conn.transaction(force_rollback=True):
                if kind == "VOLATILE":
                    found = conn.execute("DELETE FROM orders WHERE k = 7 AND pg_temp.many(k) > 15").rowcount
                    assert found == 5  # of 20
                    continue
                with pytest.raises(psycopg.errors.FeatureNotSupported, match="older than a write"):
                    conn.execute("DELETE FROM orders WHERE pg_temp.many(k) > 15")


def test_a_flag_after_copy(conn):
    conn.execute("SET search_path = spread")
    with conn.transaction(force_rollback=True):
        with conn.cursor().copy("COPY orders FROM STDIN") as copy:
            copy.write("7000\t1\t1\n")
        conn.execute("SET LOCAL shardmap.fanout_policy = error")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="asks all"):
            conn.execute("SELECT count(*) FROM orders")


def test_a_map_loaded_in_a_parallel_query_is_not_kept(db):
    """The leader reads it by the statement's snapshot, which may be older than a change it has heard of."""
    with db.connect() as reader, db.connect() as changer:
        changer.execute("CREATE TABLE IF NOT EXISTS big AS SELECT i FROM generate_series(1, 300000) i")
        changer.execute("ANALYZE big")
        for setting in ("min_parallel_table_scan_size = 0", "parallel_setup_cost = 0", "parallel_tuple_cost = 0"):
            reader.execute(f"SET {setting}")
        owner = reader.execute("SELECT shard_for('moved')").fetchone()[0]
        other = "shard-0" if owner != "shard-0" else "shard-1"
        query = "SELECT count(*) FILTER (WHERE shard_for(i::text) = 'shard-0'), sum(pg_relation_size('big')) FROM big"
        changer.execute("SELECT shardmap.pin_key('moved'::text, %s)", [other])
        reader.execute(query)
        assert reader.execute("SELECT shard_for('moved')").fetchone() == (other,)
        changer.execute("SELECT shardmap.unpin_key('moved'::text)")


def test_a_schema_of_our_name_is_not_ours(shared_cluster):
    """In a database without the extension, its owner's tables of our names are just tables."""
    shared_cluster.coordinator.psql("CREATE DATABASE impostor")
    try:
        with psycopg.connect(shared_cluster.dsn("impostor"), autocommit=True) as conn:
            conn.execute("CREATE SCHEMA shardmap")
            for name in ("keyspace", "shard", "pin", "key_range", "logical_table", "key_class"):
                conn.execute(f"CREATE VIEW shardmap.{name} AS SELECT 1 AS a")
            conn.execute("CREATE TABLE parts (a int) PARTITION BY HASH (a)")
            conn.execute("CREATE TABLE part PARTITION OF parts FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
            conn.execute("INSERT INTO parts VALUES (1)")
            assert conn.execute("SELECT * FROM parts").fetchall() == [(1,)]
    finally:
        shared_cluster.coordinator.psql("DROP DATABASE impostor WITH (FORCE)")


def test_a_cursor_rescanned_after_a_write(conn):
    with conn.transaction(force_rollback=True):
        conn.execute("SET LOCAL search_path = spread, plain")
        conn.execute("CREATE TEMP TABLE few AS SELECT i AS a FROM generate_series(1, 5) i")
        conn.execute("""DECLARE c CURSOR FOR SELECT f.a, o.x FROM few f,
            LATERAL (SELECT * FROM spread.orders o WHERE o.id = f.a LIMIT 1) o""")
        conn.execute("FETCH 2 FROM c")
        conn.execute("UPDATE spread.orders SET x = 1000")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="older than a write"):
            conn.execute("FETCH 3 FROM c")
