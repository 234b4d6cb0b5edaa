"""What a first user stumbled over: each statement gives what it gives on an ordinary table of the same rows."""

import threading
import time

import pytest
from patience import Running, lock_waiters, wait_until
from psycopg import errors

SETUP = """
CREATE SCHEMA d; CREATE SCHEMA p;
CREATE TABLE d.y (k text, id int, xid int, w text, PRIMARY KEY (k, id));
CREATE TABLE d.f (k text, id bigint, body text DEFAULT 'dflt', n int DEFAULT 7, PRIMARY KEY (k, id));
CREATE TABLE d.ctr (k int PRIMARY KEY, v int);
INSERT INTO d.y SELECT 'k' || i % 9, i, i - 9, 'w' || i % 4 FROM generate_series(1, 200) i;
INSERT INTO d.f SELECT 'z1', g FROM generate_series(1, 5) g;
INSERT INTO d.ctr SELECT g, 0 FROM generate_series(1, 10) g;
CREATE TABLE p.y (LIKE d.y INCLUDING ALL); INSERT INTO p.y TABLE d.y;
CREATE TABLE p.f (LIKE d.f INCLUDING ALL); INSERT INTO p.f TABLE d.f;
CREATE TABLE p.ctr (LIKE d.ctr INCLUDING ALL); INSERT INTO p.ctr TABLE d.ctr;
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{d.y,d.f,d.ctr}'::regclass[]) x;
CREATE FUNCTION d.sw(text) RETURNS TABLE (id int, xid int) LANGUAGE sql STABLE AS 'SELECT xid, id FROM d.y WHERE k = $1';
CREATE FUNCTION p.sw(text) RETURNS TABLE (id int, xid int) LANGUAGE sql STABLE AS 'SELECT xid, id FROM p.y WHERE k = $1';
CREATE FUNCTION d.one(text) RETURNS SETOF text LANGUAGE sql STABLE AS 'SELECT w FROM d.y WHERE k = $1 ORDER BY id';
CREATE FUNCTION p.one(text) RETURNS SETOF text LANGUAGE sql STABLE AS 'SELECT w FROM p.y WHERE k = $1 ORDER BY id';
CREATE FUNCTION plus1(x int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN x + 1; END';
"""

STATEMENTS = [
    # The names of a function's columns are not those of its body.
    "SELECT min(id), max(id), min(xid), max(xid) FROM sw('k1')",
    "SELECT * FROM one('k1') LIMIT 2",
    "SELECT count(*) FROM one('k1') WHERE one LIKE 'w1%'",
    "UPDATE y SET w = s.id FROM sw('k1') s WHERE y.k = 'k1' AND y.id = 1 AND s.xid = 10 RETURNING y.w",
    "SELECT count(*) FROM y, sw('k1') z WHERE y.k = 'k1' AND y.id = z.xid",
    # ONLY is what an ordinary table has anyway.
    "SELECT count(*) FROM ONLY y WHERE k = 'k1'",
    "SELECT count(*) FROM ONLY y",
    "UPDATE ONLY y SET w = 'only' WHERE k = 'k1' RETURNING id",
    "DELETE FROM ONLY y WHERE k = 'k1' RETURNING id",
    # The targets of an INSERT in another order than the table's, and defaults beside a SELECT.
    "INSERT INTO f (k, id) SELECT 'z1', g + 100 FROM generate_series(1, 2) g RETURNING *",
    "INSERT INTO f (k, id, body) SELECT 'z3', 3, 'x' RETURNING *",
    "INSERT INTO f (body, id, k) SELECT 'x', 3, 'z3' RETURNING *",
    "INSERT INTO f (n, id, k) VALUES (1, 3, 'z3'), (2, 4, 'z3') RETURNING *",
    "INSERT INTO f (k, id) SELECT 'z1', id + 1000 FROM f WHERE k = 'z1' RETURNING *",
    "INSERT INTO f (k, id) SELECT 'z1', max(id) + 1 FROM f WHERE k = 'z1' RETURNING *",
    # Columns that SEARCH and CYCLE add.
    "WITH RECURSIVE r (id, lvl) AS (SELECT id, 1 FROM y WHERE k = 'k1' AND id = 1 UNION ALL SELECT y.id, lvl + 1 FROM y, r"
    " WHERE y.k = 'k1' AND y.xid = r.id AND lvl < 4) SEARCH DEPTH FIRST BY id SET o SELECT id, lvl FROM r ORDER BY o",
    "WITH RECURSIVE r (id, lvl) AS (SELECT id, 1 FROM y WHERE k = 'k1' AND id = 1 UNION ALL SELECT y.id, lvl + 1 FROM y, r"
    " WHERE y.k = 'k1' AND y.xid = r.id AND lvl < 4) CYCLE id SET c USING path SELECT id, lvl, c FROM r",
    # Settings that results depend on.
    "SELECT (('{' || w || ',NULL}')::text[])[2] FROM y WHERE k = 'k1' AND id = 1",
    "SELECT format('%I', w) FROM y WHERE k = 'k1' AND id = 1",
]


@pytest.mark.parametrize("sql", STATEMENTS)
@pytest.mark.parametrize("setting", (None, "array_nulls = off", "quote_all_identifiers = on"))
def test_as_on_an_ordinary_table(conn, sql, setting):
    found = {}
    for schema in ("d", "p"):
        conn.execute("BEGIN")
        conn.execute(f"SET LOCAL search_path = {schema}, public")
        if setting:
            conn.execute(f"SET LOCAL {setting}")
        found[schema] = sorted(map(str, conn.execute(sql).fetchall()))
        conn.execute("ROLLBACK")
    assert found["d"] == found["p"]


@pytest.mark.parametrize("sql", ("UPDATE d.ctr SET v = v WHERE k = 3", "SELECT * FROM d.ctr WHERE k = 3 FOR UPDATE",
                                 "UPDATE d.ctr SET v = plus1(v) WHERE k = 3", "UPDATE d.ctr SET v = v"))
def test_lock_timeout_holds_on_shards(db, conn, sql):
    with db.connect() as other:
        other.execute("BEGIN")
        other.execute("UPDATE d.ctr SET v = v WHERE k = 3")
        conn.execute("SET lock_timeout = '300ms'")
        with pytest.raises(errors.LockNotAvailable):
            conn.execute(sql)
        conn.execute("SET lock_timeout = 0")
        with db.shard(db.owner(3, "int4")) as shard:
            patient = Running(lambda: conn.execute(sql))
            wait_until(lambda: lock_waiters(shard) or patient.is_over())
            time.sleep(0.6)
            other.execute("ROLLBACK")
        patient.end()


@pytest.mark.parametrize("sql", ("UPDATE d.ctr SET v = plus1(v)", "SELECT count(*) FROM (SELECT * FROM d.ctr FOR UPDATE) q"))
def test_single_statements_do_not_wait_for_each_other_for_ever(db, sql):
    """They lock the rows of the shards in the same order."""
    failures = []

    def work():
        with db.connect() as session:
            session.execute("SET shardmap.fanout_policy = allow; SET statement_timeout = '60s'")
            try:
                for _ in range(25):
                    session.execute(sql)
            except Exception as failure:
                failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
