"""What a savepoint did counts no more once it is rolled back, and counts still once it is released."""

import psycopg
import pytest

SETUP = """
CREATE TABLE t (k int PRIMARY KEY, v int);
SELECT shardmap.distribute_table('t', 'k');
INSERT INTO t SELECT i, i FROM generate_series(1, 40) i;
"""
TWO_USERS = "in a transaction that wrote there as"
OLD_CURSOR = "older than a write"


@pytest.fixture
def conn(db):
    with db.connect() as conn, conn.transaction(force_rollback=True):
        yield conn


@pytest.fixture(scope="module")
def writer(db):
    db.add_user("second_writer")
    db.psql("GRANT ALL ON t TO second_writer")


def write_as_another(conn):
    conn.execute("SET LOCAL ROLE second_writer; UPDATE t SET v = -1 WHERE k = 3; RESET ROLE")


def total(conn):
    return conn.execute("SELECT sum(v) FROM t WHERE k = 3").fetchone()[0]


def test_a_writer_who_is_undone_is_forgotten(conn, writer):
    conn.execute("SAVEPOINT s")
    write_as_another(conn)
    conn.execute("ROLLBACK TO s")
    assert total(conn) == 3
    conn.execute("UPDATE t SET v = 30 WHERE k = 3")
    assert total(conn) == 30


def test_a_writer_who_is_undone_further_out_is_forgotten(conn, writer):
    conn.execute("SAVEPOINT outside; SAVEPOINT inside")
    write_as_another(conn)
    conn.execute("RELEASE inside")
    conn.execute("ROLLBACK TO outside")
    assert total(conn) == 3


def test_a_writer_in_an_exception_block_is_forgotten(conn, writer):
    conn.execute("""DO $$ BEGIN
        SET LOCAL ROLE second_writer; UPDATE t SET v = -1 WHERE k = 3; RAISE division_by_zero;
        EXCEPTION WHEN division_by_zero THEN NULL; END $$""")
    assert total(conn) == 3


def test_a_released_writer_counts_after_another_rollback(conn, writer):
    conn.execute("SAVEPOINT s")
    write_as_another(conn)
    conn.execute("RELEASE s; SAVEPOINT s; ROLLBACK TO s")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match=TWO_USERS):
        total(conn)


def test_an_earlier_writer_counts_after_a_rollback(conn, writer):
    write_as_another(conn)
    conn.execute("SAVEPOINT s; SET LOCAL ROLE second_writer; UPDATE t SET v = -2 WHERE k = 3; ROLLBACK TO s")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match=TWO_USERS):
        total(conn)


def test_a_cursor_older_than_an_undone_write(conn):
    conn.execute("DECLARE c CURSOR FOR SELECT sum(v) FROM t; SAVEPOINT s; UPDATE t SET v = 0; ROLLBACK TO s")
    assert conn.execute("FETCH 1 FROM c").fetchone()[0] == 820


def test_a_cursor_older_than_a_released_write(conn):
    conn.execute("DECLARE c CURSOR FOR SELECT sum(v) FROM t; SAVEPOINT s; UPDATE t SET v = 0; RELEASE s")
    conn.execute("SAVEPOINT s; ROLLBACK TO s; SAVEPOINT s")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match=OLD_CURSOR):
        conn.execute("FETCH 1 FROM c")


def test_a_cursor_between_a_write_and_an_undone_write(conn):
    conn.execute("UPDATE t SET v = 1; DECLARE c CURSOR FOR SELECT sum(v) FROM t")
    conn.execute("SAVEPOINT s; UPDATE t SET v = 2; ROLLBACK TO s")
    assert conn.execute("FETCH 1 FROM c").fetchone()[0] == 40


def test_a_cursor_older_than_both_a_write_and_an_undone_write(conn):
    conn.execute("DECLARE c CURSOR FOR SELECT sum(v) FROM t; UPDATE t SET v = 1")
    conn.execute("SAVEPOINT s; UPDATE t SET v = 2; ROLLBACK TO s; SAVEPOINT s")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match=OLD_CURSOR):
        conn.execute("FETCH 1 FROM c")


def test_a_fanout_of_a_released_savepoint_is_counted(conn):
    def calls():
        found = conn.execute("SELECT sum(calls) FROM shardmap.fanout_queries WHERE query LIKE '%avg(v)%'").fetchone()
        return found[0] or 0
    before = calls()
    conn.execute("SAVEPOINT s; DECLARE c CURSOR FOR SELECT avg(v) FROM t; RELEASE s")
    conn.execute("SAVEPOINT s; ROLLBACK TO s; CLOSE c")
    assert calls() == before + 1


def test_a_modification_that_waits_when_it_is_undone(conn):
    """An UPDATE that has not begun on its shards fails within, and another of the same depth works."""
    conn.execute("""DO $$ BEGIN
        FOR i IN 1 .. 3 LOOP
            BEGIN
                UPDATE t SET v = v + 1 FROM generate_series(1, 1) g WHERE t.v / (g - 1) = 1 AND t.k = random() * 0 + 3;
            EXCEPTION WHEN division_by_zero THEN NULL; END;
            UPDATE t SET v = v + g FROM generate_series(1, 1) g WHERE t.v > random() - 1 AND t.k = 3;
        END LOOP; END $$""")
    assert total(conn) == 6
