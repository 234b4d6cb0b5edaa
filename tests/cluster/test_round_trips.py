"""How many round trips to its shard each kind of statement costs, once its session has run it some times.

The numbers are exact, so that neither a loss nor a gain goes unseen: lower them when they fall. bench/round_trips.py
prints them for all statements of the benchmark, with what was sent.
"""

import itertools

import psycopg
import pytest
from proxy import before_shard

SETUP = """
CREATE TABLE item (k bigint PRIMARY KEY, v int);
CREATE TABLE note (k bigint, id bigint, PRIMARY KEY (k, id));
INSERT INTO item SELECT i, i FROM generate_series(1, 200) i;
INSERT INTO note SELECT i, 1 FROM generate_series(1, 200) i;
SELECT shardmap.distribute_table('item', 'k'), shardmap.distribute_table('note', 'k');
"""

SELECT = "SELECT v FROM item WHERE k = %(k)s"
UPDATE = "UPDATE item SET v = v + 1 WHERE k = %(k)s"
MANY = ["INSERT INTO note SELECT %(k)s::bigint, 1000 * %(id)s::bigint + i FROM generate_series({}, {}) i".format(low, low + 99)
        for low in (1, 101, 201)]
KINDS = {
    "select": ([SELECT], 1),
    "join": (["SELECT v, id FROM item JOIN note USING (k) WHERE k = %(k)s"], 1),
    "update": ([UPDATE], 1),
    "returning": ([f"{UPDATE} RETURNING v"], 2),
    "upsert": (["INSERT INTO item VALUES (%(k)s, 1) ON CONFLICT (k) DO UPDATE SET v = excluded.v"], 1),
    "delete": (["DELETE FROM item WHERE k = %(k)s"], 1),
    "insert": (["INSERT INTO note VALUES (%(k)s, %(id)s)"], 1),
    "transaction": (["BEGIN", SELECT, UPDATE, "COMMIT"], 3),
}


@pytest.fixture(scope="module")
def proxy(db):
    with before_shard(db, 0) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def keys(db):
    """A key of shard 0 and a new number for each statement."""
    with db.connect() as conn:
        keys = conn.execute("SELECT k FROM generate_series(1, 200) k WHERE shard_for(k) = 'shard-0'").fetchall()
    return ({"k": key, "id": number} for (key,), number in zip(itertools.cycle(keys), itertools.count(2)))


@pytest.mark.parametrize("prepared", (True, False), ids=("prepared", "simple"))
@pytest.mark.parametrize("kind", KINDS)
def test_round_trips(proxy, keys, conn, kind, prepared):
    statements, expected = KINDS[kind]

    def execute():
        key = next(keys)
        for sql in statements:
            if prepared:
                conn.execute(sql, key if "%" in sql else None, prepare=True)
            else:
                psycopg.ClientCursor(conn).execute(sql, key)
    for _ in range(8):
        execute()
    with proxy.counting(conn) as count:
        execute()
    assert count.round_trips == expected, count.trace


def test_a_table_is_asked_about_once_a_transaction(proxy, keys, conn):
    """What COPY takes is described before the first one. (Round trips of a COPY cannot be counted: it sends on meanwhile.)"""
    conn.execute("SET shardmap.enable_router = off")  # else they run whole on the shard
    for statements in (MANY[:1], ["BEGIN", *MANY, "COMMIT"]):
        key = next(keys)
        with proxy.counting(conn) as count:
            for sql in statements:
                conn.execute(sql, key if "%" in sql else None)
        described = sum(kinds.count("D") for direction, kinds in count.trace if direction == ">")
        assert described == 1, count.trace
