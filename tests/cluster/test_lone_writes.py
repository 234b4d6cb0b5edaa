"""Writes that stand alone go to their shard in one round trip, outside a transaction, and commit there.

What must hold: the client is told what became of the write, whatever ends it; and nothing that could still be rolled back
here is ever sent that way. `asked` shows whether BEGIN was sent.
"""

import time

import psycopg
import pytest
from patience import Running, lock_waiters, wait_until
from psycopg import errors

SETUP = """
CREATE TABLE item (k int, id int, v text, PRIMARY KEY (k, id));
SELECT shardmap.distribute_table('item', 'k');
INSERT INTO item SELECT k, id, 'old' FROM generate_series(0, 20) k, generate_series(1, 3) id;
CREATE FUNCTION change(key int, value text) RETURNS void LANGUAGE sql AS $$ UPDATE item SET v = value WHERE k = key $$;
CREATE TABLE here (n int);
"""
UPDATE = "UPDATE item SET v = %s WHERE k = 7 AND id = 1"


@pytest.fixture
def shard(conn, shared_cluster):
    """A session on the shard of key 7, in which nothing is open at the end."""
    number = int(conn.execute("SELECT shard_for(7)").fetchone()[0].removeprefix("shard-"))
    database = shared_cluster.shard_database(number, "lone_writes")
    with psycopg.connect(shared_cluster.shard_server(number).dsn(database), autocommit=True) as session:
        session.execute("UPDATE item SET v = 'old' WHERE k = 7")
        yield session


def value(shard):
    return shard.execute("SELECT v FROM item WHERE k = 7 AND id = 1").fetchone()[0]


def began(asked):
    return any(text.startswith("START TRANSACTION") for texts in asked.values() for text in texts)


@pytest.mark.parametrize("prepare", (True, False))
def test_one_statement_and_no_transaction(db, conn, shard, prepare):
    for sql, want in ((UPDATE, 1), ("DELETE FROM item WHERE k = 7 AND id = 3 AND v <> %s", 1),
                      ("INSERT INTO item VALUES (7, 3, %s)", 1), ("UPDATE item SET v = %s WHERE k = 7 AND id > 5", 0)):
        cursor, asked = db.asked(lambda: conn.execute(sql, ("new",), prepare=prepare))
        assert cursor.rowcount == want and not began(asked), (sql, asked)
    assert value(shard) == "new"


def test_what_can_be_rolled_back_is_sent_in_a_transaction(db, conn, shard):
    def in_block():
        with conn.transaction():
            conn.execute(UPDATE, ("block",))
            raise psycopg.Rollback

    def several():
        with pytest.raises(errors.DivisionByZero):
            conn.execute("UPDATE item SET v = 'several' WHERE k = 7 AND id = 1; SELECT 1 / (SELECT count(*) - 1 FROM (SELECT) x)")

    def function():
        with pytest.raises(errors.DivisionByZero):
            conn.execute("SELECT change(7, 'function'), 1 / (count(*) - 1) FROM (SELECT) x")

    def block():
        with pytest.raises(errors.RaiseException):
            conn.execute("DO $$ BEGIN UPDATE item SET v = 'do' WHERE k = 7 AND id = 1; RAISE 'no'; END $$")

    def pipeline():
        with pytest.raises((errors.DivisionByZero, psycopg.errors.PipelineAborted)), conn.pipeline():
            conn.execute("SELECT 1")
            conn.execute(UPDATE, ("pipeline",))
            conn.execute(UPDATE, ("again",))
            conn.execute("SELECT 1 / (count(*) - 1) FROM (SELECT) x").fetchall()

    def explained():
        conn.execute("BEGIN")
        conn.execute("EXPLAIN ANALYZE UPDATE item SET v = 'explained' WHERE k = 7 AND id = 1")
        conn.execute("ROLLBACK")

    for call in (in_block, several, function, block, pipeline, explained):
        _, asked = db.asked(call)
        assert began(asked), (call.__name__, asked)
        assert value(shard) == "old", call.__name__


def test_a_pipeline_is_one_transaction(conn, shard):
    with conn.pipeline():
        conn.execute(UPDATE, ("first",))
        conn.execute("UPDATE item SET v = 'second' WHERE k = 7 AND id = 2")
    assert value(shard) == "first"


def test_repeatable_read_and_read_only(db, conn, shard):
    conn.execute("SET default_transaction_isolation = 'repeatable read'")
    _, asked = db.asked(lambda: conn.execute(UPDATE, ("new",)))
    assert began(asked) and value(shard) == "new"
    conn.execute("SET default_transaction_read_only = on")
    with pytest.raises(errors.ReadOnlySqlTransaction):
        conn.execute(UPDATE, ("no",))


def test_returning_is_sent_in_a_transaction(db, conn):
    cursor, asked = db.asked(lambda: conn.execute(UPDATE + " RETURNING v", ("new",)))
    assert cursor.fetchall() == [("new",)] and began(asked)


@pytest.mark.parametrize("how", ("timeout", "cancel"))
def test_a_write_that_waits_and_is_ended_has_not_been_done(conn, shard, how):
    shard.execute("BEGIN")
    shard.execute("UPDATE item SET v = 'locked' WHERE k = 7 AND id = 1")
    if how == "timeout":
        conn.execute("SET statement_timeout = '300ms'")
    late = Running(lambda: conn.execute(UPDATE, ("late",)))
    if how == "cancel":
        wait_until(lambda: lock_waiters(shard))
        conn.cancel_safe()
    with pytest.raises(errors.QueryCanceled, match="statement timeout" if how == "timeout" else "user request"):
        late.end()
    shard.execute("COMMIT")
    conn.execute("RESET statement_timeout")
    assert conn.execute("SELECT v FROM item WHERE k = 7 AND id = 1").fetchone() == ("locked",)
    time.sleep(0.3)
    assert value(shard) == "locked"


def test_a_lost_connection_leaves_the_outcome_unknown(conn, shard):
    shard.execute("BEGIN")
    shard.execute("UPDATE item SET v = 'locked' WHERE k = 7 AND id = 1")
    late = Running(lambda: conn.execute(UPDATE, ("late",)))
    shard.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) pid", (wait_until(lambda: lock_waiters(shard)),))
    with pytest.raises(psycopg.Error) as told:
        late.end()
    assert told.value.sqlstate == "08007" and "shard-" in told.value.diag.context and told.value.diag.message_hint
    shard.execute("COMMIT")
    assert conn.execute(UPDATE, ("next",)).rowcount == 1


def test_errors_of_the_shard_come_back_whole(conn):
    with pytest.raises(errors.UniqueViolation) as told:
        conn.execute("INSERT INTO item VALUES (7, 1, 'twice')")
    assert (told.value.diag.constraint_name, told.value.diag.table_name) == ("item_pkey", "item")
    assert "shard-" in told.value.diag.context


def test_a_terminated_session_leaves_nothing_running(db, conn, shard):
    shard.execute("BEGIN")
    shard.execute("UPDATE item SET v = 'locked' WHERE k = 7 AND id = 1")
    with db.connect() as doomed:
        late = Running(lambda: doomed.execute(UPDATE, ("late",)))
        wait_until(lambda: lock_waiters(shard))
        conn.execute("SELECT pg_terminate_backend(%s)", (doomed.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            late.end()
    # It is told before the shard is.
    wait_until(lambda: not lock_waiters(shard), lambda: "the write still waits on the shard")
    shard.execute("COMMIT")
    time.sleep(0.3)
    assert value(shard) == "locked"
