"""Fan-outs: all shards are asked before the first is waited for, and each computes its part of an aggregate.

Shards are made to wait by locks on their tables, and by listeners that accept a connection and say nothing, so that nothing
depends on how long anything takes.
"""

import contextlib
import selectors
import socket

import pytest
from patience import Running, wait_until
from psycopg import errors

SHARDS = 4
TABLES = """
CREATE TABLE {0}.t (k int, id int, s smallint, b bigint, n numeric(10, 3), f float8, c text, d date, w interval, x bool, a int[],
                    PRIMARY KEY (k, id));
INSERT INTO {0}.t SELECT k, id, nullif(id % 7, 3), k * 10000000000 + id, id / 8.0, k / 4.0, 'c' || id % 4, date '2024-01-01' + k,
  make_interval(days => id), nullif(id % 3, 2) = 1, ARRAY[k, id] FROM generate_series(1, 40) k, generate_series(1, 6) id;
CREATE TABLE {0}.empty (k int PRIMARY KEY, s smallint, i int, b bigint);
"""
SETUP = f"""
CREATE SCHEMA plain;
{TABLES.format("plain")}
{TABLES.format("public")}
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{{t,empty}}'::regclass[]) x;
"""

# (statement, what each shard is asked to compute; None: it sends rows)
AGGREGATES = [
    ("SELECT count(*) FROM t", "count(*)"),
    ("SELECT count(*), sum(id), min(c), max(d) FROM t", "count(*), sum(id), min(c), max(d)"),
    ("SELECT count(*), count(s), sum(s), avg(s), avg(id), avg(id) + count(*) FROM t", "count(s), sum(s)"),
    ("SELECT count(*) FILTER (WHERE id > 3), sum(id) FILTER (WHERE k < 0), avg(id) FILTER (WHERE id = 2) FROM t", "FILTER (WHERE"),
    ("SELECT sum(f), max(w), bool_and(x), bool_or(x), every(x), bit_and(id), bit_or(b), bit_xor(s) FROM t", "bit_xor(s)"),
    ("SELECT min(b), max(n), min(f), max(a) FROM t", "max(a)"),
    ("SELECT c, count(*), avg(id) FROM t GROUP BY c", "GROUP BY"),
    ("SELECT c, count(*) FROM t GROUP BY c HAVING count(*) > 45 AND min(k) = 1", "min(k)"),
    ("SELECT c || 'x', sum(id + 1) FROM t GROUP BY c || 'x' ORDER BY 2", "sum((id + 1))"),
    ("SELECT id % 2, c, count(*) FROM t WHERE id < 5 GROUP BY 1, 2 ORDER BY 1, 2", "GROUP BY"),
    ("SELECT c FROM t GROUP BY c", "GROUP BY"),
    ("SELECT count(*) FROM t WHERE c = 'c1'", "count(*)"),
    ("SELECT 1 FROM t HAVING count(*) > 5", "count(*)"),
    ("SELECT (SELECT count(*) FROM t) + (SELECT max(id) FROM t WHERE b > 0)", "count(*)"),
    ("SELECT count(*), sum(s), sum(i), avg(s), avg(i), min(b) FROM empty", "sum(i)"),
    ("SELECT count(*) FROM t x JOIN t y USING (k, id) WHERE y.id < 4", "count(*)"),
    ("SELECT c, count(*) FROM t WHERE k < 30 GROUP BY c, id ORDER BY c", "GROUP BY"),
    ("SELECT sum(b), avg(b), sum(n), avg(n), avg(f), avg(f::real), avg(s) FROM t", "sum(b), count(b), sum(n), count(n)"),
    ("SELECT c, sum(b) / count(*), avg(n) FILTER (WHERE id > 2) FROM t GROUP BY c HAVING sum(n) > 10 ORDER BY avg(b)", "sum(n)"),
    ("SELECT c, sum(sum(b)) OVER (ORDER BY c), avg(avg(n)) OVER (ORDER BY c) FROM t GROUP BY c", "sum(b)"),
    ("SELECT avg(n / 3)::text, sum(n / 3)::text, sum(n * n)::text, avg(b * 1000000)::text, avg(b::numeric)::text FROM t", "sum((n / "),
    ("SELECT sum(CASE id WHEN 1 THEN 'NaN' ELSE n END)::text, avg(CASE id WHEN 2 THEN 'Infinity' ELSE n END) FROM t", "sum((CASE"),
    ("SELECT avg(CASE id WHEN 2 THEN '-Infinity' ELSE f END), avg(CASE id WHEN 2 THEN 'NaN' ELSE f END)::text FROM t", "sum((CASE"),
    ("SELECT sum(b), avg(b), avg(i), avg(s), sum(b::numeric), avg(b::float8) FROM empty", "sum(b), count(b)"),
    ("SELECT a FROM (SELECT c, avg(b) AS a FROM t GROUP BY c) x WHERE a > 0 ORDER BY a LIMIT 2", "sum(b)"),
    # Their states are not any aggregate's value.
    ("SELECT sum(b), avg(n), stddev(id), count(*) FROM t", None),
    ("SELECT count(DISTINCT id) FROM t", None),
    ("SELECT string_agg(c, ',' ORDER BY k, id) FROM t", None),
    ("SELECT c, GROUPING(c), count(*) FROM t GROUP BY ROLLUP (c)", None),
    ("SELECT max(c || pg_backend_pid()) IS NULL FROM t", None),
]


@pytest.mark.parametrize("sql, sent", AGGREGATES)
def test_each_shard_computes_its_part(db, sql, sent):
    with db.connect() as conn, db.connect(search_path="plain") as local:
        expected = local.execute(sql).fetchall()
        cursor, found = db.asked(lambda: conn.execute(sql))
        assert sorted(cursor.fetchall(), key=repr) == sorted(expected, key=repr)
        assert len(found) == SHARDS
        conn.execute("SET plan_cache_mode = force_generic_plan")
        assert sorted(conn.execute(sql, prepare=True).fetchall(), key=repr) == sorted(expected, key=repr)
        if sent:
            assert all(sent in " ".join(statements) for statements in found.values()), found
        else:
            plan = "\n".join(row[0] for row in conn.execute(f"EXPLAIN (VERBOSE, COSTS OFF) {sql}"))
            assert "Relations: Aggregate" not in plan


def test_parameters_and_own_writes(db, conn):
    conn.execute("BEGIN")
    conn.execute("DELETE FROM t WHERE id = 6")
    for least in (1, 3, 7):
        rows = conn.execute("SELECT count(*), avg(id) FROM t WHERE id >= %s", (least,), prepare=True).fetchall()
        expected = [id for id in range(least, 6)]
        assert rows == [(40 * len(expected), sum(expected) / len(expected) if expected else None)]
    conn.execute("ROLLBACK")


def test_the_plan_is_side_by_side(conn):
    plan = "\n".join(row[0] for row in conn.execute("EXPLAIN (VERBOSE, COSTS OFF) SELECT count(*), avg(id) FROM t"))
    assert plan.count("Async Foreign Scan") == SHARDS
    assert plan.count("Output: (PARTIAL count(*)), (PARTIAL sum(t") == SHARDS
    assert plan.startswith("Finalize Aggregate")


@contextlib.contextmanager
def held_up(db, table="t"):
    """All shards' tables are locked; yields a function that ends the locks."""
    shards = [db.shard(number) for number in range(SHARDS)]
    try:
        for shard in shards:
            shard.execute("BEGIN")
            shard.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield lambda: [shard.execute("ROLLBACK") for shard in shards]
    finally:
        for shard in shards:
            shard.close()


def waiting(db, table="t"):
    """How many shards have a statement that waits for the table."""
    found = db.shard_rows(f"SELECT count(*) FROM pg_locks WHERE relation = '{table}'::regclass AND NOT granted")
    return sum(rows[0][0] for rows in found.values())


FANOUTS = [
    "SELECT count(*) FROM t",
    "SELECT sum(b), stddev(id) FROM t",
    "SELECT c, sum(n) FROM t GROUP BY c",
    "SELECT k, id FROM t ORDER BY c, k, id LIMIT 3",
    "SELECT k, c || random() IS NULL FROM t ORDER BY c, k LIMIT 3",
    "SELECT DISTINCT c FROM t ORDER BY c",
    "SELECT id FROM t WHERE id > 5",
    "SELECT (SELECT sum(b) FROM t), 1",
    "WITH x AS MATERIALIZED (SELECT k FROM t ORDER BY c, k) SELECT count(*) FROM x",
    "SELECT k FROM t WHERE id = ANY (SELECT max(id) FROM t) ORDER BY k",
]


@pytest.mark.parametrize("sql", FANOUTS)
def test_all_are_asked_before_the_first_is_waited_for(db, conn, sql):
    with db.connect(search_path="plain") as local, held_up(db) as let_go:
        call = Running(lambda: conn.execute(sql).fetchall())
        try:
            wait_until(lambda: waiting(db) == SHARDS)
        finally:
            let_go()
        assert sorted(call.end()) == sorted(local.execute(sql).fetchall())


@pytest.mark.parametrize("sql", ["SELECT stddev(b) FROM t", "SELECT count(*) FROM t"])
def test_no_more_than_the_width(db, sql):
    """When the first ends, the next is asked."""
    with db.connect(shardmap__max_fanout_width=2) as conn, held_up(db) as let_go:
        call = Running(lambda: conn.execute(sql).fetchall())
        try:
            wait_until(lambda: waiting(db) == 2)
            # Not what was read before, and whose COMMIT is on its way.
            statements = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%FROM public.t%' AND state = 'active'" \
                         " AND datname = current_database() AND pid <> pg_backend_pid()"
            assert sum(rows[0][0] for rows in db.shard_rows(statements).values()) == 2
        finally:
            let_go()
        assert len(call.end()) == 1


def test_rows_that_are_locked_are_asked_for_in_order(db, conn):
    """Else two statements could wait for each other."""
    with held_up(db) as let_go:
        call = Running(lambda: conn.execute("SELECT id FROM t ORDER BY c, id FOR UPDATE").fetchall())
        try:
            wait_until(lambda: waiting(db) > 0)
            assert waiting(db) == 1
        finally:
            let_go()
        assert len(call.end()) == 240


class Silent:
    """Listens where a shard could be, and says nothing to those who come."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.guests = []

    def came(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            if selector.select(0):
                self.guests.append(self.listener.accept()[0])
        return len(self.guests)

    def close(self):
        for each in [self.listener, *self.guests]:
            each.close()


@pytest.mark.parametrize("sql", ["SELECT count(*) FROM t", "SELECT stddev(b) FROM t", "SELECT k FROM t ORDER BY c"])
def test_all_are_connected_to_at_once(db, sql):
    ports = {number: db.cluster.shard_server(number).port for number in range(SHARDS)}
    silent = {number: Silent() for number in range(SHARDS)}

    def move(to):
        db.psql("".join(f"ALTER SERVER \"shard-{number}\" OPTIONS (SET port '{port}');" for number, port in to.items()))
    move({number: each.port for number, each in silent.items()})
    try:
        with db.connect() as conn:
            def run():
                with pytest.raises(errors.SqlclientUnableToEstablishSqlconnection):
                    conn.execute(sql)
                return True
            call = Running(run)
            try:
                wait_until(lambda: all(each.came() for each in silent.values()))
            finally:
                for each in silent.values():
                    each.close()
            assert call.end()
            move(ports)
            assert len(conn.execute("SELECT count(*) FROM t").fetchall()) == 1
    finally:
        move(ports)


def test_one_that_cannot_be_reached(db):
    """It fails the statement; those that were reached serve the next."""
    port = db.cluster.shard_server(2).port
    db.psql("ALTER SERVER \"shard-2\" OPTIONS (SET port '1')")
    try:
        with db.connect() as conn:
            with pytest.raises(errors.SqlclientUnableToEstablishSqlconnection, match="shard-2"):
                conn.execute("SELECT count(*) FROM t")
            db.psql(f"ALTER SERVER \"shard-2\" OPTIONS (SET port '{port}')")
            assert conn.execute("SELECT count(*) FROM t").fetchone() == (240,)
    finally:
        db.psql(f"ALTER SERVER \"shard-2\" OPTIONS (SET port '{port}')")
