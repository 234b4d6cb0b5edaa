"""Pitfalls 26 and 27: answers over many shards are those of one server, in the coordinator's order.

Each query is asked twice: of the distributed tables (schema `far`) and of ordinary tables with the same rows (`near`).
"""

import psycopg
import pytest

SETUP = """
CREATE SCHEMA near; CREATE SCHEMA far;
CREATE TABLE near.t (k int, id int, a int, b numeric, c text, d date, PRIMARY KEY (k, id));
CREATE TABLE near.u (k int, id int, a int, PRIMARY KEY (k, id));
CREATE TABLE near.other (z text, a int);
INSERT INTO near.t SELECT k, id, CASE (k + id) % 5 WHEN 0 THEN NULL ELSE k * id % 11 END, k / 7.0, 'c' || (k + id) % 9,
       date '2024-01-01' + k FROM generate_series(1, 40) k, generate_series(1, 5) id;
INSERT INTO near.u SELECT k, id, k % 6 FROM generate_series(1, 50, 2) k, generate_series(1, 2) id;
INSERT INTO near.other SELECT 'c' || n, n FROM generate_series(1, 12) n;
CREATE TABLE far.t (LIKE near.t INCLUDING ALL); CREATE TABLE far.u (LIKE near.u INCLUDING ALL);
CREATE TABLE far.other (LIKE near.other INCLUDING ALL);
INSERT INTO far.t TABLE near.t; INSERT INTO far.u TABLE near.u; INSERT INTO far.other TABLE near.other;
SELECT shardmap.distribute_table('far.t', 'k'), shardmap.distribute_table('far.u', 'k');
SELECT shardmap.distribute_table('far.other', 'z');
"""

# Rows are compared as a list where the query orders them wholly, else sorted.
QUERIES = """
SELECT count(*), count(a), count(DISTINCT a), count(DISTINCT c) FROM t
SELECT sum(a) - sum(id), avg(a), avg(b), sum(b), min(b), max(d), stddev(a), variance(b) FROM t
SELECT avg(a) FROM t WHERE a > 1000
SELECT sum(a), count(*), max(c) FROM t WHERE k = -1
SELECT a, count(*), avg(b) FROM t GROUP BY a
SELECT DISTINCT a FROM t
SELECT DISTINCT a, c FROM t
SELECT DISTINCT count(*) FROM t GROUP BY c
SELECT DISTINCT ON (c) c, k, id FROM t ORDER BY c, k, id
SELECT a, count(*) FROM t GROUP BY a HAVING count(*) > 15
SELECT c, sum(a) FROM t GROUP BY c HAVING sum(a) > (SELECT avg(a) * 10 FROM t)
SELECT k, count(*) FROM t GROUP BY k HAVING count(a) < 4
SELECT a, c, count(*) FROM t GROUP BY ROLLUP (a, c)
SELECT a, d, grouping(a, d), count(*) FROM t GROUP BY GROUPING SETS ((a), (d), ())
SELECT count(*) FILTER (WHERE a > 3), sum(a) FILTER (WHERE c = 'c1') FROM t
SELECT array_agg(id ORDER BY k, id), string_agg(c, ',' ORDER BY k, id) FROM t WHERE a = 1
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY a), mode() WITHIN GROUP (ORDER BY c) FROM t
SELECT bool_and(a > 0), bool_or(a > 9), every(id < 6), bit_or(a), corr(a, b)::numeric(12, 6) FROM t
SELECT k, id, rank() OVER (ORDER BY a, k, id), sum(a) OVER (PARTITION BY c), lag(id) OVER (ORDER BY k, id) FROM t
SELECT c, sum(count(*)) OVER (ORDER BY c) FROM t GROUP BY c
SELECT k, max(count(*)) OVER (ORDER BY count(*)) FROM t WHERE k = 3 GROUP BY k
SELECT a, count(*) OVER (), k FROM t GROUP BY k, a HAVING k = 3
SELECT k, id FROM t ORDER BY b DESC, id LIMIT 7 OFFSET 9
SELECT k, id FROM t ORDER BY a NULLS FIRST, k DESC, id LIMIT 10
SELECT k, id FROM t ORDER BY d, id OFFSET 195
SELECT k, id FROM t ORDER BY k, id FETCH FIRST 3 ROWS ONLY
SELECT count(*) FROM (SELECT k FROM t ORDER BY b LIMIT 13) s
SELECT sum(a) FROM (SELECT a FROM t ORDER BY k, id LIMIT 20 OFFSET 5) s
SELECT k FROM t UNION SELECT k FROM u
SELECT a FROM t UNION ALL SELECT a FROM u
SELECT k FROM u EXCEPT SELECT k FROM t
SELECT k, id FROM t INTERSECT SELECT k, id FROM u
SELECT a FROM t EXCEPT ALL SELECT a FROM u
SELECT count(*) FROM t WHERE EXISTS (SELECT FROM u WHERE u.k = t.k)
SELECT count(*) FROM t WHERE NOT EXISTS (SELECT FROM u WHERE u.k = t.k AND u.id = t.id)
SELECT count(*) FROM t WHERE EXISTS (SELECT FROM u WHERE u.a = t.a)
SELECT count(*) FROM t WHERE a NOT IN (SELECT a FROM u WHERE a > 2)
SELECT EXISTS (SELECT FROM t WHERE a = 10), EXISTS (SELECT FROM t WHERE a = 99)
SELECT (SELECT max(a) FROM t), (SELECT count(*) FROM u)
SELECT count(*), sum(t.a * u.a) FROM t JOIN u USING (k)
SELECT count(*), count(u.k) FROM t LEFT JOIN u ON u.k = t.k AND u.id = t.id
SELECT count(*), count(t.k), count(u.k) FROM t FULL JOIN u ON u.k = t.k AND u.id = t.id
SELECT count(*) FROM t RIGHT JOIN u ON u.a = t.a
SELECT count(*) FROM t CROSS JOIN u WHERE t.id = 1 AND u.id = 1
SELECT o.z, count(*) FROM t JOIN other o ON o.z = t.c GROUP BY o.z
SELECT t.k, l.m FROM t, LATERAL (SELECT max(u.a) AS m FROM u WHERE u.k = t.k) l WHERE t.id = 1
WITH x AS (SELECT c, sum(a) AS s FROM t GROUP BY c) SELECT count(*), max(s) FROM x WHERE s > (SELECT avg(s) FROM x)
WITH RECURSIVE r (n) AS (SELECT min(k) FROM t UNION ALL SELECT n + 1 FROM r WHERE n < 5) SELECT * FROM r
SELECT k, count(DISTINCT c), max(a) FROM t WHERE k IN (1, 2, 3, 4) GROUP BY k ORDER BY k
SELECT count(*) FROM t TABLESAMPLE BERNOULLI (100)
""".strip().splitlines()


@pytest.fixture(scope="module")
def sessions(db):
    with db.connect() as on, db.connect(shardmap__enable_routing="off") as off:
        yield on, off


def asked_of(conn, schema, sql):
    conn.execute(f"SET search_path = {schema}")
    rows = conn.execute(sql).fetchall()
    return rows if ordered(sql) else sorted(rows, key=repr)


def ordered(sql):
    return "ORDER BY" in sql and "OVER" not in sql and "GROUP (ORDER" not in sql


@pytest.mark.parametrize("sql", QUERIES)
def test_pitfall_26_answer_of_one_server(sessions, sql):
    for conn in sessions:
        assert asked_of(conn, "far", sql) == asked_of(conn, "near", sql)
        conn.execute(f"SET search_path = far; SET plan_cache_mode = force_generic_plan; PREPARE q AS {sql}")
        assert asked_of(conn, "far", "EXECUTE q") == sorted(asked_of(conn, "near", sql), key=repr)
        conn.execute("DEALLOCATE q")


@pytest.fixture(scope="module")
def sorted_here(shared_cluster):
    """A database that sorts as English does, on shards that sort by bytes. C sorts B before a, English does not."""
    cluster, name = shared_cluster, "english"
    try:
        cluster.coordinator.psql(f"CREATE DATABASE {name} TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en'")
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"no ICU: {error}")
    adds = ""
    for number in range(2):
        server, database = cluster.shard_server(number), cluster.shard_database(number, name)
        server.psql(f'CREATE DATABASE "{database}"')
        adds += (f"SELECT shardmap.add_shard('shard-{number}', host => '127.0.0.1', port => {server.port},"
                 f" dbname => '{database}');")
    cluster.psql(f"""CREATE EXTENSION pg_shardmap CASCADE; {adds}
        CREATE SCHEMA near; CREATE SCHEMA far;
        CREATE TABLE near.w (k text PRIMARY KEY, c text NOT NULL, v varchar(9), n text COLLATE "C");
        INSERT INTO near.w SELECT x || n, x || n, x, x || n
          FROM unnest('{{a,B,c,D,É,é,e,f,_x,Z z,z z, y}}'::text[]) x, generate_series(1, 4) n;
        CREATE TABLE far.w (LIKE near.w INCLUDING ALL); INSERT INTO far.w TABLE near.w;
        SELECT shardmap.distribute_table('far.w', 'k')""", name)
    with psycopg.connect(cluster.dsn(name), autocommit=True, options="-c shardmap.fanout_policy=allow") as conn:
        yield conn
    cluster.drop_database(name)


@pytest.mark.parametrize("settings", ["RESET enable_hashagg", "SET shardmap.enable_routing = off",
                                      "SET enable_hashagg = off; SET enable_sort = off; SET enable_hashjoin = off"])
@pytest.mark.parametrize("sql", """
SELECT c FROM w ORDER BY c
SELECT c, k FROM w ORDER BY c DESC LIMIT 5 OFFSET 2
SELECT v, n FROM w ORDER BY v, n
SELECT n FROM w ORDER BY n
SELECT n FROM w ORDER BY n COLLATE "en-x-icu", n
SELECT c FROM w ORDER BY c COLLATE "C" LIMIT 6
SELECT min(c), max(c), min(v), max(n) FROM w
SELECT c FROM w WHERE c < 'B2' ORDER BY c
SELECT count(*) FROM w WHERE v BETWEEN 'a' AND 'd'
SELECT v, count(*), max(c) FROM w GROUP BY v ORDER BY v
SELECT DISTINCT v FROM w ORDER BY v
SELECT DISTINCT ON (v) v, c FROM w ORDER BY v, c DESC
SELECT c, row_number() OVER (ORDER BY c) FROM w ORDER BY 2
SELECT a.c, b.v FROM w a JOIN w b ON a.c = b.k ORDER BY a.c, b.v
SELECT string_agg(c, ',' ORDER BY c) FROM w
SELECT upper(c), initcap(v) FROM w ORDER BY upper(c), c
SELECT c FROM w WHERE c ILIKE 'É%' ORDER BY c
SELECT v FROM w UNION SELECT c FROM w ORDER BY v
SELECT greatest(c, 'C') FROM w ORDER BY 1, k
SELECT c FROM w WHERE k = 'B2' OR k = 'a1' ORDER BY c
""".strip().splitlines())
def test_pitfall_27_order_of_the_coordinator(sorted_here, sql, settings):
    conn = sorted_here
    conn.execute("RESET ALL; SET shardmap.fanout_policy = allow")
    conn.execute(settings)
    conn.execute("SET search_path = far")
    far = conn.execute(sql).fetchall()
    conn.execute("SET search_path = near")
    near = conn.execute(sql).fetchall()
    assert far == near
