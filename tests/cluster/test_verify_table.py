"""A table verified over all shards, and the map in SQL on which that rests, for each strategy.

Rows get to the wrong shard as they would by a failed hand: written on the shard itself.
"""

import pytest
from psycopg import errors

SETUP = """
CREATE TABLE t (k int, id int, v text, PRIMARY KEY (k, id));
INSERT INTO t SELECT i / 4, i, 'row ' || i FROM generate_series(1, 20000) i;
CREATE TABLE bare (k text NOT NULL, v int);
INSERT INTO bare SELECT 'key ' || i % 100, i FROM generate_series(1, 1000) i;
SELECT shardmap.distribute_table('t', 'k'), shardmap.distribute_table('bare', 'k');
"""


def verify(conn, table="t", max_rows=100):
    rows = conn.execute("SELECT shard, finding, rows, misplaced, key, row_id, owner, detail, checksum"
                        " FROM shardmap.verify(%s, %s)", (table, max_rows)).fetchall()
    return [row[:4] for row in rows if row[5] is None], [row[:2] + row[4:8] for row in rows if row[5] is not None], rows


@pytest.fixture
def keys(db):
    """A key of shard 0 and one of shard 1."""
    return [next(k for k in range(10, 1000) if db.owner(k, "int4") == number) for number in (0, 1)]


def test_a_table_whose_rows_are_at_home_is_clean(db, conn):
    for table, total in (("t", 20000), ("bare", 1000)):
        shards, rows, found = verify(conn, table)
        assert [shard[0] for shard in shards] == [f"shard-{n}" for n in range(4)] and rows == []
        assert {(finding, misplaced) for _, finding, _, misplaced in shards} == {("clean", 0)}
        assert [row[2] for row in shards] == [r[0][0] for r in db.shard_rows(f"SELECT count(*) FROM {table}").values()]
        assert sum(row[2] for row in shards) == total and all(row[8] > 0 for row in found)
        assert found == verify(conn, table)[2]


def test_rows_on_a_shard_that_does_not_own_them_are_named(db, conn, keys):
    key, other = keys
    with db.shard(0) as here, db.shard(1) as there:
        here.execute(f"INSERT INTO t VALUES ({other}, -1, 'lost'), ({other}, {4 * other + 2}, 'other'),"
                     f" ({other}, {4 * other + 1}, 'row {4 * other + 1}')")
        try:
            shards, rows, _ = verify(conn)
            assert [shard[1] for shard in shards] == ["misplaced", "clean", "clean", "clean"] and shards[0][3] == 3
            owned = ("shard-0", str(other), "shard-1")
            assert [(row[0], row[2], row[4]) for row in rows] == [owned] * 3
            assert {(row[1], row[3]) for row in rows} == {("misplaced", f"({other},-1)"), ("doubled", f"({other},{4 * other + 2})"),
                                                          ("orphan", f"({other},{4 * other + 1})")}
            assert len(verify(conn, max_rows=1)[1]) == 1
            # Without its owner nobody can tell whether a row is there too.
            there.execute("ALTER TABLE t RENAME TO hidden")
            shards, rows, found = verify(conn)
            assert [shard[1] for shard in shards] == ["misplaced", "unknown", "clean", "clean"] and shards[1][2:] == (None, None)
            assert {row[1] for row in rows} == {"misplaced"} and all("not known" in row[5] for row in rows)
        finally:
            here.execute(f"DELETE FROM t WHERE k = {other}")
            there.execute("ALTER TABLE IF EXISTS hidden RENAME TO t")
    assert verify(conn)[1] == []


def test_a_table_without_primary_key(db, conn):
    key = next(f"key {n}" for n in range(100) if db.owner(f"key {n}") == 2)
    with db.shard(3) as shard:
        shard.execute("INSERT INTO bare VALUES (%s, %s), (%s, -7)", (key, int(key[4:]), key))
        try:
            assert sorted(row[1] for row in verify(conn, "bare")[1]) == ["misplaced", "orphan"]
        finally:
            shard.execute("DELETE FROM bare WHERE k = %s", (key,))


def test_all_shards_away_is_all_unknown(db):
    with db.connect() as conn, conn.transaction(force_rollback=True):
        conn.execute("DO $$ BEGIN FOR n IN 0..3 LOOP EXECUTE format('ALTER SERVER %I OPTIONS (SET port %L)', 'shard-' || n, 1); END LOOP; END $$")
        shards, rows, found = verify(conn)
        assert [shard[1:] for shard in shards] == [("unknown", None, None)] * 4 and rows == []
        assert all("could not connect" in row[7] for row in found)


def test_only_logical_tables(conn):
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="is not distributed"):
        verify(conn, "pg_class")


MAPS = {
    "ring": [],
    "ring, pins": ["SELECT shardmap.pin_key(n::text, 'x2', 'other') FROM generate_series(1, 12) n"],
    "modulo": ["SELECT shardmap.pin_key('7'::text, 'x2', 'other')"],
    "range, integer": ["SELECT shardmap.set_range('other', l, u, s) FROM (VALUES (NULL, '-5', 'x0'), ('-5', '100', 'x1'), ('300', '400', 'x2'),"
                       " ('400', NULL, 'x0')) r (l, u, s)"],
    "range, text": ["SELECT shardmap.set_range('other', l, u, s) FROM (VALUES ('1', '2', 'x0'), ('2', '3é', 'x1'), ('5', NULL, 'x2')) r (l, u, s)",
                    "SELECT shardmap.pin_key('41'::text, 'x1', 'other')"],
}


@pytest.mark.parametrize("name", MAPS)
def test_the_map_in_sql_is_the_map(db, name):
    """For thousands of keys the entry that a shard would compute has the owner that shard_for() finds, or neither has one."""
    strategy, _, order = name.partition(", ")
    with db.connect() as conn, conn.transaction(force_rollback=True):
        conn.execute("SELECT shardmap.create_keyspace('other', %s, range_order => %s)",
                     (strategy, order if strategy == "range" else None))
        for number in range(3):
            conn.execute("INSERT INTO shardmap.shard (name, keyspace, number, state, tokens) SELECT %s, 'other', %s, 'active',"
                         " CASE WHEN %s = 'ring' THEN shardmap.random_tokens(%s, 10) ELSE '{}' END",
                         (f"x{number}", (number * 5) % 7, strategy, f"x{number}"))
        conn.execute("SELECT shardmap.publish_map('other')")
        for sql in MAPS[name]:
            conn.execute(sql)
        entry = conn.execute("SELECT shardmap._entry_sql('other')").fetchone()[0]
        keys = "SELECT i::text AS k FROM generate_series(-300, 3000) i" + ("" if order == "integer" else " UNION ALL SELECT 'é' || i FROM generate_series(1, 300) i")
        conn.execute("CREATE FUNCTION pg_temp.owner(key text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RETURN shard_for(key, 'other');"
                     " EXCEPTION WHEN OTHERS THEN RETURN NULL; END $$")
        rows = conn.execute(f"""
            SELECT s.k, e.owner, pg_temp.owner(s.k), e.kind
              FROM (SELECT s.*, {entry} AS entry FROM (SELECT k, md5(k) AS h, token_for(k) AS token FROM ({keys}) k) s) s
              LEFT JOIN shardmap._map_entries('other') e ON e.entry = s.entry""").fetchall()
        assert len(rows) >= 3301
        assert [row for row in rows if row[1] != row[2]] == []
        assert {row[1] for row in rows} == {"x0", "x1", "x2"} | ({None} if strategy == "range" else set())
        kinds = {"ring": {"arc"}, "modulo": {"remainder"}, "range": {"range"}}[strategy]
        assert {row[3] for row in rows} == kinds | ({"pin"} if any("pin_key" in sql for sql in MAPS[name]) else set())
