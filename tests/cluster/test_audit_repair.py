"""Pins that drifted, rows repaired by the thousand, and what cannot be corrected but repaired."""

import threading

import psycopg
import pytest
from psycopg import errors

SETUP = """
CREATE TABLE t (k int, id int, v text, PRIMARY KEY (k, id));
INSERT INTO t SELECT i / 4, i, 'row ' || i FROM generate_series(1, 4000) i;
CREATE TABLE u (k int PRIMARY KEY, v text);
INSERT INTO u SELECT i, 'row ' || i FROM generate_series(1, 1000) i;
SELECT shardmap.distribute_table('t', 'k'), shardmap.distribute_table('u', 'k');
"""


def audit(conn, mode="full"):
    return conn.execute("SELECT kind, state, table_name, shard, owner, key, rows FROM shardmap.audit('main', %s) ORDER BY 1, 3",
                        (mode,)).fetchall()


def finding(conn, kind):
    return conn.execute("SELECT id, entry_version FROM shardmap.audit_findings WHERE kind = %s AND state = 'confirmed'", (kind,)).fetchone()


def confirmed(conn, kind):
    audit(conn)
    audit(conn)
    return finding(conn, kind)


@pytest.fixture(autouse=True)
def nothing_left(conn):
    yield
    assert audit(conn) == []
    assert conn.execute("SELECT count(*) FROM t").fetchone()[0] % 4000 == 0


def move_by_hand(db, key, source, target):
    for table in ("t", "u"):
        with db.shard(source) as here, db.shard(target) as there:
            for row in here.execute(f"DELETE FROM {table} WHERE k = %s RETURNING *", (key,)).fetchall():
                there.execute(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", row)


@pytest.fixture
def pinned(db, conn):
    """A key that is pinned to its own shard, and whose rows are on another."""
    key = next(k for k in range(2, 900) if db.owner(k, "int4") == 0)
    conn.execute("SELECT shardmap.pin_key(%s, 'shard-0')", (key,))
    move_by_hand(db, key, 0, 2)
    yield key
    owner = conn.execute("SELECT shard FROM shardmap.pin WHERE key = %s", (str(key),)).fetchone()[0]
    move_by_hand(db, key, 2, 0)
    if owner != "shard-0":
        conn.execute(f"UPDATE shardmap.pin SET shard = 'shard-0' WHERE key = '{key}'; SELECT shardmap.publish_map('main')")
    conn.execute("SELECT shardmap.unpin_key(%s)", (key,))


@pytest.mark.parametrize("mode", ["sample", "full"])
def test_a_pin_follows_its_rows(conn, pinned, mode):
    want = ("drifted", "suspected", None, "shard-2", "shard-0", str(pinned), 5)
    assert audit(conn, mode) == [want]
    assert [row[1] for row in audit(conn, mode)] == ["confirmed"]
    number, seen = finding(conn, "drifted")
    assert conn.execute("SELECT count(*) FROM t WHERE k = %s", (pinned,)).fetchone() == (0,)
    with pytest.raises(errors.SerializationFailure, match=f"is at version {seen}, version {seen - 1} was expected"):
        conn.execute("SELECT shardmap.correct(%s, %s)", (number, seen - 1))
    assert conn.execute("SELECT shardmap.correct(%s, %s)", (number, seen)).fetchone()[0] > seen
    assert conn.execute("SELECT shard FROM shardmap.pin WHERE key = %s", (str(pinned),)).fetchone() == ("shard-2",)
    assert conn.execute("SELECT count(*) FROM t WHERE k = %s", (pinned,)).fetchone() == (4,)
    assert audit(conn) == [] and finding(conn, "drifted") is None


def test_a_pin_that_was_changed_meanwhile_is_left_alone(db, conn, pinned):
    number, seen = confirmed(conn, "drifted")
    other = next(k for k in range(pinned + 1, 950) if db.owner(k, "int4") == 1)
    conn.execute("SELECT shardmap.pin_key(%s, 'shard-1')", (other,))
    with pytest.raises(errors.SerializationFailure, match="was expected"):
        conn.execute("SELECT shardmap.correct(%s, %s)", (number, seen))
    conn.execute("SELECT shardmap.unpin_key(%s)", (other,))
    # Rows that were written by the map meanwhile: it is no shard's alone.
    number, seen = confirmed(conn, "drifted")
    conn.execute("INSERT INTO t VALUES (%s, -1, 'new')", (pinned,))
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="has rows on shard"):
        conn.execute("SELECT shardmap.correct(%s, %s)", (number, seen))
    conn.execute("DELETE FROM t WHERE k = %s AND id = -1", (pinned,))


@pytest.fixture
def strayed(db, conn):
    """2,500 rows of shard 1 on shard 3, and before them 30 of which shard 1 has others."""
    key = next(k for k in range(2, 900) if db.owner(k, "int4") == 1)
    with db.shard(1) as there, db.shard(3) as here:
        there.execute("INSERT INTO t SELECT %s, -i, 'right' FROM generate_series(1, 30) i", (key,))
        here.execute("INSERT INTO t SELECT %s, -i, 'wrong' FROM generate_series(1, 30) i", (key,))
        here.execute("INSERT INTO t SELECT %s, i, 'lost' FROM generate_series(100001, 102500) i", (key,))
    yield key
    for number in (1, 3):
        with db.shard(number) as shard:
            shard.execute("DELETE FROM t WHERE id < 0 OR id > 100000")


def count(db, number):
    with db.shard(number) as shard:
        return shard.execute("SELECT count(*) FROM t WHERE id > 100000").fetchone()[0]


def test_many_rows_are_repaired_batch_by_batch(db, conn, strayed):
    number, _ = confirmed(conn, "misplaced")
    notices = []
    conn.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    conn.execute(f"CALL shardmap.run_repair({number})")
    assert notices == [f'finding {number}: shard "shard-3" has 2530 rows of table public.t that belong to shard "shard-1"']
    assert (count(db, 3), count(db, 1)) == (2500, 0)
    # A batch smaller than what stands before the rows that are to be repaired.
    assert len(conn.execute("SELECT * FROM shardmap.repair(%s, max_rows => 10)", (number,)).fetchall()) == 10
    del notices[:]
    conn.execute(f"CALL shardmap.run_repair({number}, dry_run => false, batch_rows => 1200)")
    assert notices[-1] == f"finding {number}: 2500 rows repaired" and 3 <= len(notices) <= 6
    assert (count(db, 3), count(db, 1)) == (0, 2500)
    with db.shard(3) as shard:
        assert shard.execute("SELECT count(*) FROM t WHERE v = 'wrong'").fetchone() == (30,)
    assert [row[0] for row in audit(conn)] == ["doubled"]


def test_a_batch_that_fails_leaves_those_before_it(db, conn, strayed):
    number, _ = confirmed(conn, "misplaced")
    with db.shard(1) as there:
        there.execute("CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF (SELECT count(*) FROM public.t WHERE id > 100000) > 1500"
                      " THEN RAISE 'full'; END IF; RETURN NULL; END $$;"
                      "CREATE TRIGGER stop AFTER INSERT ON t FOR EACH STATEMENT EXECUTE FUNCTION stop()")
        try:
            with pytest.raises(psycopg.Error, match="full"):
                conn.execute(f"CALL shardmap.run_repair({number}, false, 1000)")
            done = count(db, 1)
            assert 0 < done <= 1500 and count(db, 3) == 2500 - done
        finally:
            there.execute("DROP FUNCTION stop() CASCADE")
    conn.execute(f"CALL shardmap.run_repair({number}, false, 1000)")
    assert (count(db, 3), count(db, 1)) == (0, 2500)


def test_the_rule_of_a_ring_is_not_corrected(db, conn, strayed):
    number, version = confirmed(conn, "misplaced")
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="follows from a rule") as caught:
        conn.execute("SELECT shardmap.correct(%s, %s)", (number, version))
    assert "run_repair" in caught.value.diag.message_hint and "pin_key" in caught.value.diag.message_hint


def test_a_move_that_is_planned_during_an_audit_makes_no_finding(db, conn):
    """It brings no new version of the map, but other entries of it."""
    key = next(k for k in range(2, 900) if db.owner(k, "int4") == 1)
    moved = next(k for k in range(2, 900) if db.owner(k, "int4") == 0)
    conn.execute("SELECT shardmap.pin_key(%s, 'shard-1')", (key,))
    conn.execute("SET statement_timeout = '60s'")
    outcome = []

    def look():
        with db.connect() as other:
            try:
                outcome.append(audit(other))
            except errors.SerializationFailure as error:
                outcome.append(error)

    with db.shard(2) as shard:
        shard.autocommit = False
        shard.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        thread = threading.Thread(target=look)
        thread.start()
        while not shard.execute("SELECT FROM pg_locks l JOIN pg_class c ON c.oid = l.relation WHERE c.relname = 't' AND NOT l.granted").fetchall():
            assert thread.is_alive()
        move = conn.execute("SELECT DISTINCT move FROM shardmap.move_key(%s, 'shard-3')", (moved,)).fetchone()[0]
        shard.rollback()
        thread.join()
    assert len(outcome) == 1 and isinstance(outcome[0], errors.SerializationFailure)
    assert audit(conn) == []
    conn.execute(f"SELECT shardmap.cancel_move({move})")
    conn.execute(f"CALL shardmap.run_move({move})")
    conn.execute("SELECT shardmap.unpin_key(%s)", (key,))


def test_bad_arguments(conn):
    for sql, error in (("SELECT shardmap.repair(-1, max_rows => 0)", errors.UndefinedObject),
                       ("CALL shardmap.run_repair(-1)", errors.UndefinedObject),
                       ("CALL shardmap.run_repair(-1, false)", errors.UndefinedObject)):
        with pytest.raises(error):
            conn.execute(sql)
