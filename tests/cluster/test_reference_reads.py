"""Statements that read reference tables: those about one shard run there whole, the others here, and all give what one
server gives.

Schema d has the tables on shards, schema p the same rows in ordinary tables; a statement is run with each as its search
path, in every way.
"""

import json

import pytest
from asking import WAYS
from psycopg import errors

SETUP = """
CREATE SCHEMA d; CREATE SCHEMA p;
CREATE TABLE d.country (id int PRIMARY KEY, code char(2) UNIQUE, name text, vat numeric);
CREATE TABLE d.tag (name text PRIMARY KEY, weight int);
INSERT INTO d.country SELECT i, chr(64 + i) || chr(90 - i), 'country ' || i, i / 4.0 FROM generate_series(1, 20) i;
INSERT INTO d.tag SELECT 'tag' || i, i % 5 FROM generate_series(1, 10) i;
CREATE TABLE d.person (k int, id int, country int, tag text, PRIMARY KEY (k, id));
INSERT INTO d.person SELECT k, id, (k + id) % 25, 'tag' || (k * id) % 12 FROM generate_series(1, 30) k, generate_series(1, 6) id;
CREATE TABLE d.local (id int PRIMARY KEY, v text);
INSERT INTO d.local SELECT i, 'local ' || i FROM generate_series(1, 20) i;
CREATE TABLE p.country (LIKE d.country INCLUDING ALL); INSERT INTO p.country TABLE d.country;
CREATE TABLE p.tag (LIKE d.tag INCLUDING ALL); INSERT INTO p.tag TABLE d.tag;
CREATE TABLE p.person (LIKE d.person INCLUDING ALL); INSERT INTO p.person TABLE d.person;
CREATE TABLE p.local (LIKE d.local INCLUDING ALL); INSERT INTO p.local TABLE d.local;
CREATE VIEW d.named AS SELECT p.k, p.id, c.name FROM d.person p LEFT JOIN d.country c ON c.id = p.country;
CREATE VIEW p.named AS SELECT p.k, p.id, c.name FROM p.person p LEFT JOIN p.country c ON c.id = p.country;
SELECT shardmap.distribute_reference('d.country'), shardmap.distribute_reference('d.tag');
SELECT shardmap.distribute_table('d.person', 'k');
CREATE TABLE d.lonely (k int PRIMARY KEY, country int);
INSERT INTO d.lonely SELECT i, i FROM generate_series(1, 5) i;
CREATE TABLE p.lonely (LIKE d.lonely INCLUDING ALL); INSERT INTO p.lonely TABLE d.lonely;
"""

ROUTED = [
    "SELECT p.id, c.name FROM person p JOIN country c ON c.id = p.country WHERE p.k = 7",
    "SELECT p.id, c.name FROM person p LEFT JOIN country c ON c.id = p.country WHERE p.k = 7",
    "SELECT c.id, p.id FROM country c LEFT JOIN person p ON p.country = c.id AND p.k = 7",
    "SELECT c.id, p.id FROM country c FULL JOIN (SELECT * FROM person WHERE k = 7) p ON p.country = c.id",
    "SELECT p.id, c.name, t.weight FROM person p JOIN country c ON c.id = p.country JOIN tag t ON t.name = p.tag WHERE p.k = 7",
    "SELECT c.name, count(*), sum(c.vat) FROM person p, country c WHERE c.id = p.country AND p.k = 7 GROUP BY c.name",
    "SELECT id FROM person WHERE k = 7 AND country IN (SELECT id FROM country WHERE vat > 2)",
    "SELECT id FROM person p WHERE k = 7 AND EXISTS (SELECT FROM country c WHERE c.id = p.country AND c.vat > 1)",
    "SELECT id FROM person p WHERE k = 20 AND NOT EXISTS (SELECT FROM country c WHERE c.id = p.country)",
    "SELECT id, (SELECT name FROM country c WHERE c.id = p.country) FROM person p WHERE k = 7",
    "WITH c AS (SELECT * FROM country WHERE vat > 1) SELECT p.id, c.name FROM person p JOIN c ON c.id = p.country WHERE k = 7",
    "WITH c AS MATERIALIZED (SELECT * FROM country) SELECT p.id, c.name FROM person p JOIN c ON c.id = p.country WHERE k = 7",
    "SELECT name FROM country WHERE id < 3 UNION ALL SELECT tag FROM person WHERE k = 7",
    "SELECT p.id, l.name FROM person p, LATERAL (SELECT name FROM country c WHERE c.id >= p.country ORDER BY id LIMIT 2) l WHERE p.k = 7",
    "SELECT * FROM named WHERE k = 7",
    "SELECT p.id, c.name, rank() OVER (PARTITION BY c.name ORDER BY p.id) FROM person p JOIN ONLY country c ON c.id = p.country WHERE p.k = 7",
    "SELECT count(*) FROM person p, country c, country e WHERE p.k = 7 AND c.id = p.country AND e.id = c.id + 1",
    "UPDATE person SET tag = c.name FROM country c WHERE c.id = person.country AND k = 7 RETURNING person.id, person.tag",
    "DELETE FROM person USING country c WHERE c.id = person.country AND k = 7 AND c.vat < 3 RETURNING person.id, c.code",
    "INSERT INTO person VALUES (7, (SELECT max(id) + 100 FROM country), 1, 'x') RETURNING id",
    "SELECT p.id, c.name FROM person p JOIN country c ON c.id = p.country WHERE p.k = 7 FOR UPDATE OF p",
    "SELECT p.id, c.name FROM person p JOIN country c ON c.id = p.k WHERE c.id = 7",
]
NOT_ROUTED = [
    "SELECT p.id, c.name FROM person p JOIN country c ON c.id = p.country WHERE p.k = 7 FOR UPDATE",
    "SELECT p.id, c.name FROM person p JOIN country c ON c.id = p.country WHERE p.k = 7 FOR SHARE OF c",
    "SELECT p.id, c.name, l.v FROM person p JOIN country c ON c.id = p.country JOIN local l ON l.id = c.id WHERE p.k = 7",
    "SELECT p.id, c.name FROM person p JOIN country c ON c.id = p.country WHERE p.k IN (1, 2, 7)",
    "SELECT c.name, count(*) FROM person p JOIN country c ON c.id = p.country GROUP BY c.name",
    "SELECT c.id, count(p.id) FROM country c LEFT JOIN person p ON p.country = c.id GROUP BY c.id",
    "SELECT count(*) FROM person p WHERE country IN (SELECT id FROM country WHERE vat > 2)",
    "SELECT * FROM named WHERE id = 3",
    "UPDATE person SET tag = c.name FROM country c WHERE c.id = person.country RETURNING person.k, person.id, person.tag",
    "UPDATE country SET name = p.tag FROM person p WHERE p.country = country.id AND p.k = 7 AND p.id = 2 RETURNING country.id, country.name",
    "WITH w AS (UPDATE country SET vat = 0 WHERE id = 3 RETURNING id) SELECT p.id, w.id FROM person p, w WHERE p.k = 7",
]
LOCAL = [
    "SELECT * FROM country WHERE id = 3",
    "SELECT c.name, l.v FROM country c JOIN local l USING (id)",
    "SELECT count(*) FROM country c, tag t",
]


def rows(cursor):
    return sorted(cursor.fetchall(), key=repr)


def answers(conn, way, sql):
    found = []
    for schema in ("p", "d"):
        with conn.transaction(force_rollback=True):
            conn.execute(f"SET LOCAL search_path = {schema}")
            found.append(rows(way.run(conn, sql, None)))
    return found


def step(conn, sql):
    plan = conn.execute(f"EXPLAIN (VERBOSE, FORMAT JSON) {sql}").fetchone()[0]
    return "ShardRoute" in json.dumps(plan)


@pytest.mark.parametrize("sql", ROUTED + NOT_ROUTED + LOCAL)
def test_as_on_one_server(db, sql):
    for way in WAYS:
        one, many = answers(db.way(way), way, sql)
        assert many == one, way.name
        assert one, "the statement has no rows to compare"


@pytest.mark.parametrize("sql", ROUTED)
def test_routed(db, conn, sql):
    conn.execute("SET search_path = d")
    assert step(conn, sql)
    with conn.transaction(force_rollback=True):
        _, asked = db.asked(lambda: conn.execute(sql))
    assert len(asked) == 1


@pytest.mark.parametrize("sql", NOT_ROUTED)
def test_not_routed(conn, sql):
    conn.execute("SET search_path = d")
    assert not step(conn, sql)


@pytest.mark.parametrize("sql", LOCAL)
def test_local(db, conn, sql):
    conn.execute("SET search_path = d")
    _, asked = db.asked(lambda: conn.execute(sql))
    assert not asked


def test_generic_plans(db, conn):
    """One plan serves all keys; a table that stops being a reference table is no longer read on shards."""
    conn.execute("SET search_path = d; SET plan_cache_mode = force_generic_plan")
    sql = "SELECT p.id, c.name FROM person p JOIN country c ON c.id = p.country WHERE p.k = %s AND p.id = %s"
    for key in (3, 4, 5, 9):
        found, asked = db.asked(lambda key=key: conn.execute(sql, (key, 1), prepare=True).fetchall())
        assert found == [(1, f"country {key + 1}")] and set(asked) == {db.owner(key, "int")}
    # A key that is NULL: the other side of the outer join has its rows.
    outer = "SELECT c.id, p.id FROM country c LEFT JOIN person p ON p.country = c.id AND p.k = %s"
    assert len(conn.execute(outer, (None,), prepare=True).fetchall()) == 20
    assert conn.execute("EXPLAIN EXECUTE " + conn.execute("SELECT name FROM pg_prepared_statements LIMIT 1").fetchone()[0]
                        + "(1, 1)").fetchall()[0][0].startswith("Custom Scan (ShardRoute)")
    with db.connect() as other:
        other.execute("SELECT shardmap.undistribute_reference('d.country')")
        other.execute("UPDATE d.country SET name = 'here only' WHERE id = 4")
        assert conn.execute(sql, (3, 1), prepare=True).fetchall() == [(1, "here only")]
        other.execute("UPDATE d.country SET name = 'country 4' WHERE id = 4")
        other.execute("SELECT shardmap.distribute_reference('d.country')")
    assert conn.execute(sql, (3, 1), prepare=True).fetchall() == [(1, "country 4")]


def test_row_security(db, conn):
    conn.execute("""CREATE ROLE reader LOGIN; GRANT USAGE ON SCHEMA d TO reader; GRANT SELECT ON d.person, d.country TO reader;
        ALTER TABLE d.country ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON d.country FOR SELECT USING (id < 10)""")
    db.users.append("reader")
    for number in range(4):
        conn.execute(f"CREATE USER MAPPING FOR reader SERVER \"shard-{number}\" OPTIONS (user 'postgres', password_required 'false')")
    sql = "SELECT p.id, c.id FROM d.person p JOIN d.country c ON c.id = p.country WHERE p.k = 7"
    assert step(conn, sql) and len(conn.execute(sql).fetchall()) == 6
    with db.connect("reader") as reader:
        assert step(reader, sql) and not step(reader, sql + " AND 9 / c.id > 0")
        assert reader.execute(sql).fetchall() == [(1, 8), (2, 9)]
    conn.execute("ALTER TABLE d.country DISABLE ROW LEVEL SECURITY; DROP POLICY few ON d.country")


def test_privileges(db, conn):
    sql = "SELECT p.id, c.name FROM d.person p JOIN d.country c ON c.id = p.country WHERE p.k = 7"
    conn.execute("CREATE ROLE clerk LOGIN; GRANT USAGE ON SCHEMA d TO clerk; GRANT SELECT ON d.person TO clerk")
    db.users.append("clerk")
    for number in range(4):
        conn.execute(f"CREATE USER MAPPING FOR clerk SERVER \"shard-{number}\" OPTIONS (user 'postgres', password_required 'false')")
    with db.connect("clerk") as clerk:
        with pytest.raises(errors.InsufficientPrivilege):
            clerk.execute(sql)
        conn.execute("GRANT SELECT (id) ON d.country TO clerk")
        with pytest.raises(errors.InsufficientPrivilege):
            clerk.execute(sql)
        conn.execute("GRANT SELECT ON d.country TO clerk")
        assert len(clerk.execute(sql).fetchall()) == 6
        with pytest.raises(errors.InsufficientPrivilege):
            clerk.execute("UPDATE d.country SET name = 'x'")
        # By a view of another's: the shard is asked as that other.
        conn.execute("REVOKE SELECT ON d.country FROM clerk; GRANT SELECT ON d.named TO clerk")
        assert len(clerk.execute("SELECT * FROM d.named WHERE k = 7").fetchall()) == 6


def test_a_keyspace_of_one_shard(db, conn):
    """There, statements go whole whatever their keys."""
    server = db.cluster.shard_server(0)
    server.psql("CREATE DATABASE lonely")
    try:
        conn.execute("SELECT shardmap.create_keyspace('one')")
        conn.execute("SELECT shardmap.add_shard('lonely', '127.0.0.1', %s, 'lonely', keyspace => 'one')", (server.port,))
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="already"):
            conn.execute("SELECT shardmap.distribute_reference('d.country')")
        conn.execute("SELECT shardmap.distribute_reference('d.country', 'one')")
        conn.execute("SELECT shardmap.distribute_table('d.lonely', 'k', 'one')")
        sql = "SELECT l.k, c.name FROM d.lonely l JOIN d.country c ON c.id = l.country"
        assert step(conn, sql) and len(conn.execute(sql).fetchall()) == 5
        assert not step(conn, "SELECT l.k, t.name FROM d.lonely l JOIN d.tag t ON true")
        conn.execute("UPDATE d.country SET name = 'both' WHERE id = 1")
        assert conn.execute("SELECT c.name FROM d.lonely l JOIN d.country c ON c.id = l.country WHERE k = 1").fetchone() == ("both",)
        assert [row[:2] for row in conn.execute("SELECT * FROM shardmap.verify_reference('d.country')")] == [
            (name, True) for name in ("lonely", "shard-0", "shard-1", "shard-2", "shard-3")]
        conn.execute("UPDATE d.country SET name = 'country 1' WHERE id = 1")
        conn.execute("SELECT shardmap.undistribute_reference('d.country', 'one')")
        assert step(conn, "SELECT p.id FROM d.person p JOIN d.country c ON c.id = p.country WHERE p.k = 7")
        assert not step(conn, sql)
        conn.execute("SELECT shardmap.undistribute_table('d.lonely'); SELECT shardmap.drop_shard('lonely')")
    finally:
        server.psql("DROP DATABASE IF EXISTS lonely WITH (FORCE)")


def test_merge(db, conn):
    sql = """MERGE INTO person USING country c ON person.k = 7 AND person.id = c.id
        WHEN MATCHED AND c.vat < 1 THEN DELETE WHEN MATCHED THEN UPDATE SET tag = c.name
        WHEN NOT MATCHED AND c.id < 9 THEN INSERT VALUES (7, c.id, c.id, 'merged')"""
    found = []
    for schema in ("p", "d"):
        with conn.transaction(force_rollback=True):
            conn.execute(f"SET LOCAL search_path = {schema}")
            conn.execute(sql)
            found.append(rows(conn.execute("SELECT * FROM person WHERE k = 7")))
    assert found[0] == found[1] and len(found[0]) == 5
    conn.execute("SET search_path = d")
    assert step(conn, sql)
