"""Plans that a session keeps follow a map that another session changes, from its next statement on."""

import pytest

SETUP = """
    CREATE TABLE t (k int PRIMARY KEY, v int);
    SELECT shardmap.distribute_table('t', 'k');
    INSERT INTO t SELECT k, k FROM generate_series(1, 20) k;
    CREATE TABLE late (k int PRIMARY KEY, v int);
    INSERT INTO late SELECT k, k FROM generate_series(1, 20) k;
    CREATE FUNCTION in_plpgsql(key int) RETURNS bigint LANGUAGE plpgsql AS
        $$ BEGIN RETURN (SELECT count(*) FROM t WHERE k = key); END $$;
    CREATE FUNCTION in_sql(key int) RETURNS bigint LANGUAGE sql STABLE AS
        $$ SELECT count(*) FROM t WHERE k = key OR k = random() * 0 + key $$;
"""
READS = {"prepared": "EXECUTE kept(77)", "in PL/pgSQL": "SELECT in_plpgsql(77)", "in SQL": "SELECT in_sql(77)"}


def elsewhere(conn):
    """A shard that does not own key 77."""
    return conn.execute("SELECT min(name) FROM shardmap.shards WHERE name <> shard_for(77)").fetchone()[0]


@pytest.fixture
def moved(conn):
    """Shard of key 77 before and after the test's change, which is undone."""
    owner = conn.execute("SELECT shard_for(77)").fetchone()[0]
    yield owner, elsewhere(conn)
    conn.execute("DELETE FROM t WHERE k = 77")
    conn.execute("SELECT shardmap.unpin_key(77) WHERE EXISTS (SELECT FROM shardmap.pin)")


@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.parametrize("level", [None, "READ COMMITTED", "REPEATABLE READ"])
def test_a_kept_plan_finds_a_pinned_key(sessions, moved, mode, read, level):
    reader, changer = sessions(plan_cache_mode=mode), sessions()
    reader.run("PREPARE kept(int) AS SELECT count(*) FROM t WHERE k = $1")
    for _ in range(3):
        assert reader.run(read) == [(0,)]
    if level:
        reader.run(f"BEGIN ISOLATION LEVEL {level}; SELECT 1")
    changer.run("SELECT shardmap.pin_key(77, %s)", (moved[1],))
    changer.run("INSERT INTO t VALUES (77, 1)")
    # postgres_fdw's sessions on the shards begin with the first statement there, so that even an old snapshot sees it.
    assert reader.run(read) == [(1,)]


def test_a_kept_plan_of_a_table_that_is_distributed_meanwhile(sessions):
    reader, changer = sessions(plan_cache_mode="force_generic_plan"), sessions()
    reader.run("PREPARE one(int) AS SELECT v FROM late WHERE k = $1")
    reader.run("PREPARE change(int) AS UPDATE late SET v = v + 1 WHERE k = $1 RETURNING v")
    for step in ("distribute_table('late', 'k')", "undistribute_table('late')"):
        before = reader.run("EXECUTE one(5)")[0][0]
        assert reader.run("EXECUTE change(5)") == [(before + 1,)]
        changer.run(f"SELECT shardmap.{step}")
        assert reader.run("EXECUTE one(5)") == [(before + 1,)]
        assert reader.run("EXECUTE change(5)") == [(before + 2,)]


def test_an_open_cursor_reads_on(sessions, moved):
    """It was opened by the old map, by which its rows were found."""
    reader, changer = sessions(), sessions()
    reader.run("BEGIN; DECLARE c CURSOR FOR SELECT k FROM t ORDER BY k; FETCH 5 FROM c")
    changer.run("SET lock_timeout = '60s'")
    changer.run("SELECT shardmap.pin_key(77, %s)", (moved[1],))
    assert [k for (k,) in reader.run("FETCH ALL FROM c")] == list(range(6, 21))
    reader.run("COMMIT")
