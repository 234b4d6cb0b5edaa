"""How the audit asks: all shards at once, over one connection to each."""

import re
import threading

import pytest
from patience import Running, wait_until
from psycopg import errors

SETUP = """
CREATE TABLE t (k int PRIMARY KEY, v text);
CREATE TABLE u (k int PRIMARY KEY, v text);
INSERT INTO t SELECT i, 'row ' || i FROM generate_series(1, 400) i;
CREATE TABLE country (id int PRIMARY KEY, name text);
INSERT INTO country SELECT i, 'c' || i FROM generate_series(1, 20) i;
CREATE TABLE city (id int PRIMARY KEY, name text);
SELECT shardmap.distribute_reference('country'), shardmap.distribute_reference('city');
SELECT shardmap.distribute_table('t', 'k'), shardmap.distribute_table('u', 'k');
"""
AUDIT = "SELECT kind, table_name, shard FROM shardmap.audit('main', 'full')"


def sessions(db, conn):
    """Processes that have run a statement of that session on each shard of the database, by the shards' log."""
    log = db.cluster.shard_server(0).log.read_text(errors="replace")
    found = {}
    for pid, database in re.findall(rf"\[(\d+)\] \S.*\.{conn.info.backend_pid} ({db.name}_shard_\d) LOG:  statement", log):
        found.setdefault(database, set()).add(pid)
    return found


def test_one_connection_to_each_shard_for_all_questions(db, conn):
    assert conn.execute(AUDIT).fetchall() == []
    found = {database: len(pids) for database, pids in sessions(db, conn).items()}
    assert found == {f"{db.name}_shard_{number}": 1 for number in range(4)}


def test_none_is_left_when_the_transaction_ends(db, conn):
    def open_sessions():
        return conn.execute("SELECT sum(connections) FROM shardmap.stat_connections").fetchone()[0]

    with db.connect() as other:
        wait_until(lambda: not open_sessions())  # of tests before
        with other.transaction(force_rollback=True):
            other.execute(AUDIT)
            assert open_sessions() == 4
        assert not open_sessions()


def test_a_place_is_given_back_to_whoever_needs_it(db, conn):
    """Even this session itself: of one connection that may be made to each shard, it needs two in a transaction."""
    coordinator = db.cluster.coordinator
    coordinator.reload(**{"shardmap.max_connections_per_shard": 1})
    try:
        with db.connect() as fresh, fresh.transaction():
            assert fresh.execute(AUDIT).fetchall() == []
            assert fresh.execute("SELECT count(*) FROM t").fetchone() == (400,)
    finally:
        coordinator.reload(**{"shardmap.max_connections_per_shard": None})


@pytest.mark.parametrize("table", ["t", "country"])
def test_all_shards_are_asked_at_once(db, conn, table):
    """Those that are held up do not hold up the questions to the others."""
    waiting = ("SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
               f" WHERE c.relname = '{table}' AND NOT l.granted")
    with db.shard(0) as first, db.shard(2) as third:
        for shard in (first, third):
            shard.autocommit = False
            shard.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        audit = Running(lambda: conn.execute(AUDIT).fetchall())
        try:
            wait_until(lambda: audit.is_over() or all(shard.execute(waiting).fetchone()[0] > 0 for shard in (first, third)))
            assert not audit.is_over()
        finally:
            first.rollback()
            third.rollback()
        assert audit.end() == []


def test_reference_copies_are_looked_at_again_before_they_differ(db, conn):
    """A writer of a reference table is not held off, and makes no finding."""
    stop, written = threading.Event(), []

    def write():
        with db.connect() as writer:
            while not stop.wait(0.002):
                number = 1001 + len(written)
                writer.execute("INSERT INTO city VALUES (%s, 'x')", (number,))
                written.append(number)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until(lambda: written)
        for _ in range(3):
            assert {row[0] for row in conn.execute(AUDIT).fetchall()} <= {"unknown"}
    finally:
        stop.set()
        writer.join()
    assert conn.execute(AUDIT).fetchall() == []
    with db.shard(1) as shard:
        shard.execute("DELETE FROM city WHERE id = 1001")
    assert conn.execute(AUDIT).fetchall() == [("differing_copy", "public.city", "shard-1")]
    conn.execute("SELECT shardmap.refresh_reference('city')")
    assert conn.execute(AUDIT).fetchall() == []


def test_questions_are_for_administrators(db):
    db.add_user("asker")
    with db.connect("asker") as conn, pytest.raises(errors.InsufficientPrivilege):
        conn.execute("SELECT * FROM shardmap._ask_each('{shard-0}', 'SELECT 1')")
