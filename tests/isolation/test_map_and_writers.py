"""The map changes while others write: a row is never stored where its key's owner was, and not found afterwards."""

import psycopg
import pytest

SETUP = """
    CREATE TABLE t (k int, id int, PRIMARY KEY (k, id));
    SELECT shardmap.distribute_table('t', 'k');
    SELECT shardmap.create_keyspace('empty');
    SELECT shardmap.add_shard('empty-' || n, host, port::int, dbname, keyspace => 'empty')
      FROM generate_series(0, 1) n, LATERAL (SELECT * FROM shardmap.shards WHERE name = 'shard-' || n) s;
    CREATE TABLE bare (k int PRIMARY KEY);
    SELECT shardmap.distribute_table('bare', 'k', 'empty');
"""
INSERTS = {"into the table": "INSERT INTO t VALUES (7, 1)", "into its partition": "INSERT INTO t_{owner} VALUES (7, 1)",
           "of a query": "INSERT INTO t SELECT 7, g FROM generate_series(1, 1) g"}


@pytest.fixture(autouse=True)
def unpinned(conn):
    yield
    conn.execute("DELETE FROM t; DELETE FROM bare")
    conn.execute("SELECT shardmap.unpin_key(7) WHERE EXISTS (SELECT FROM shardmap.pin)")


def other(db, key=7):
    """A shard that does not own the key."""
    return f"shard-{(db.owner(key, 'int4') + 1) % db.cluster.shards}"


def stored(db):
    """Numbers of the shards that have rows of key 7."""
    return {shard for shard, rows in db.shard_rows("SELECT FROM t WHERE k = 7").items() if rows}


@pytest.mark.parametrize("insert", INSERTS.values(), ids=INSERTS.keys())
def test_a_pin_waits_for_a_writer_and_is_refused(db, sessions, insert):
    writer, changer = sessions(), sessions()
    writer.run("BEGIN")
    writer.run(insert.format(owner=db.owner(7, "int4")))
    changer.start("SELECT shardmap.pin_key(7, %s)", (other(db),))
    writer.run("COMMIT")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        changer.end()
    assert writer.run("SELECT count(*) FROM t WHERE k = 7") == [(1,)]
    assert stored(db) == {db.owner(7, "int4")}


def test_a_pin_waits_for_a_writer_who_gives_up(db, sessions):
    writer, changer = sessions(), sessions()
    writer.run("BEGIN")
    writer.run("INSERT INTO t VALUES (7, 1)")
    changer.start("SELECT shardmap.pin_key(7, %s)", (other(db),))
    writer.run("ROLLBACK")
    changer.end()
    writer.run("INSERT INTO t VALUES (7, 2)")
    assert {f"shard-{n}" for n in stored(db)} == {other(db)}


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("prepared", [False, True], ids=["planned", "prepared"])
def test_a_writer_waits_for_a_pin_and_obeys_it(db, sessions, level, prepared):
    """Also one whose snapshot is older than the change, and whose plan was made before."""
    writer, changer = sessions(plan_cache_mode="force_generic_plan"), sessions()
    writer.run("PREPARE put(int, int) AS INSERT INTO t VALUES ($1, $2)")
    writer.run("EXECUTE put(7, 0); DELETE FROM t")
    writer.run(f"BEGIN ISOLATION LEVEL {level}")
    writer.run("SELECT 1")
    changer.run("BEGIN")
    changer.run("SELECT shardmap.pin_key(7, %s)", (other(db),))
    writer.start("EXECUTE put(7, 1)" if prepared else "INSERT INTO t VALUES (7, 1)")
    changer.run("COMMIT")
    writer.end()
    writer.run("COMMIT")
    assert {f"shard-{n}" for n in stored(db)} == {other(db)}
    assert changer.run("SELECT count(*) FROM t WHERE k = 7") == [(1,)]


def test_a_writer_waits_for_a_pin_that_is_undone(db, sessions):
    writer, changer = sessions(), sessions()
    changer.run("BEGIN")
    changer.run("SELECT shardmap.pin_key(7, %s)", (other(db),))
    writer.start("INSERT INTO t VALUES (7, 1)")
    changer.run("ROLLBACK")
    writer.end()
    assert stored(db) == {db.owner(7, "int4")}


@pytest.mark.parametrize("insert", ["INSERT INTO bare VALUES (1)", "INSERT INTO bare_0 VALUES ({own})"])
def test_a_weight_waits_for_a_writer(sessions, insert):
    """Rows on their way into a table, or a partition, must not land by the old map."""
    writer, changer = sessions(), sessions()
    own = writer.run("SELECT min(k) FROM generate_series(1, 99) k WHERE shard_for(k, 'empty') = 'empty-0'")[0][0]
    writer.run("BEGIN")
    writer.run(insert.format(own=own))
    changer.start("SELECT shardmap.set_shard_weight('empty-0', 2)")
    writer.run("ROLLBACK")
    changer.end()
    changer.run("SELECT shardmap.set_shard_weight('empty-0', 1)")


def test_a_reader_waits_for_nobody(db, sessions):
    reader, changer = sessions(), sessions()
    changer.run("INSERT INTO t VALUES (8, 1)")
    changer.run("BEGIN")
    changer.run("SELECT shardmap.pin_key(7, %s)", (other(db),))
    assert reader.run("SELECT id FROM t WHERE k = 8") == [(1,)]
    assert reader.run("SELECT shard_for(7)") == [(f"shard-{db.owner(7, 'int4')}",)]
    changer.run("COMMIT")
    assert reader.run("SELECT shard_for(7)") == [(other(db),)]
