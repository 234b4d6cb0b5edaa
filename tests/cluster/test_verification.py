"""A verification that is broken off goes on where it was, and reads nothing twice."""

import re

import psycopg
import pytest
from cluster import Cluster
from patience import crashing
from psycopg import errors

ROWS = 40_000
SETUP = f"""
CREATE TABLE t (k int, id int, v text, PRIMARY KEY (k, id));
INSERT INTO t SELECT i / 4, i, 'row ' || i FROM generate_series(1, {ROWS}) i;
SELECT shardmap.distribute_table('t', 'k');
"""
SLICE = re.compile(r"LOG:  statement: SET LOCAL.*count\(\*\) AS rows.*t\.ctid >= '\((\d+),0\)'::tid AND t\.ctid < '\((\d+),0\)'::tid")


@pytest.fixture(scope="module")
def cluster():
    with Cluster(shards=2, layout="servers", shard_settings={"log_statement": "all"}) as cluster:
        cluster.psql(SETUP)
        yield cluster


@pytest.fixture
def conn(cluster):
    with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
        yield conn


def start(conn, pages=10, rows=100):
    return conn.execute("SELECT shardmap.start_verification('t', %s, %s)", (pages, rows)).fetchone()[0]


def run(conn, number):
    conn.execute(f"CALL shardmap.run_verification({number})")


def state(conn, number):
    return conn.execute("SELECT state, progress, rows, misplaced FROM shardmap.verifications WHERE id = %s", (number,)).fetchone()


def pages(conn, number):
    return dict(conn.execute("SELECT shard, next_page FROM shardmap.verification_shard WHERE verification = %s", (number,)).fetchall())


def slices_read(cluster, shard):
    """First pages of the slices that the shard was asked for, in all its life."""
    return [int(first) for first, _ in SLICE.findall(cluster.shard_server(shard).log.read_text(errors="replace"))]


def key_of(conn, shard):
    return conn.execute("SELECT k FROM generate_series(1, 1000) k WHERE shard_for(k) = %s LIMIT 1", (f"shard-{shard}",)).fetchone()[0]


def test_all_rows_are_read_once(cluster, conn):
    before = [len(slices_read(cluster, shard)) for shard in range(2)]
    number = start(conn)
    assert state(conn, number)[0] == "under way"
    run(conn, number)
    assert state(conn, number) == ("clean", 1.0, ROWS, 0)
    for shard in range(2):
        read = slices_read(cluster, shard)[before[shard]:]
        assert read == list(range(0, 10 * len(read), 10)) and len(read) > 5
    want = conn.execute("SELECT sum(checksum) FROM shardmap.verify('t')").fetchone()
    assert conn.execute("SELECT sum(checksum) FROM shardmap.verification_shard WHERE verification = %s", (number,)).fetchone() == want
    after = [len(slices_read(cluster, shard)) for shard in range(2)]
    run(conn, number)  # for nothing
    assert [len(slices_read(cluster, shard)) for shard in range(2)] == after


def test_killed_in_the_middle_it_goes_on(cluster, conn):
    """The session dies as by kill -9, and the server with it."""
    number = start(conn)
    with crashing(cluster.coordinator), psycopg.connect(cluster.dsn(), autocommit=True) as victim:
        victim.execute("SET shardmap.crash_point = 'verification_slice:4'")
        with pytest.raises(psycopg.OperationalError):
            run(victim, number)
    with psycopg.connect(cluster.dsn(), autocommit=True) as again:
        assert state(again, number)[0] == "under way" and set(pages(again, number).values()) == {30}
        before = [len(slices_read(cluster, shard)) for shard in range(2)]
        run(again, number)
        assert state(again, number) == ("clean", 1.0, ROWS, 0)
    for shard in range(2):
        read = slices_read(cluster, shard)[before[shard]:]
        # The slice that was under way is the only one that is read again.
        assert read == list(range(30, 30 + 10 * len(read), 10)) and read


def test_misplaced_rows_are_named(cluster, conn):
    key = key_of(conn, 0)
    cluster.shard_psql(1, f"INSERT INTO t SELECT {key}, -i, 'lost' FROM generate_series(1, 5) i")
    try:
        number = start(conn, rows=3)
        run(conn, number)
        assert state(conn, number) == ("misplaced", 1.0, ROWS + 5, 5)
        found = conn.execute("SELECT shard, finding, key, owner FROM shardmap.verification_row WHERE verification = %s", (number,)).fetchall()
        assert found == [("shard-1", "misplaced", str(key), "shard-0")] * 3
    finally:
        cluster.shard_psql(1, "DELETE FROM t WHERE id < 0")


def test_a_shard_that_is_away_is_read_later(cluster, conn):
    number = start(conn)
    cluster.shard_server(1).stop("immediate")
    run(conn, number)
    assert state(conn, number)[0] == "unknown" and pages(conn, number)["shard-1"] == 0
    assert "shard-1: could not connect" in conn.execute("SELECT error FROM shardmap.verifications WHERE id = %s", (number,)).fetchone()[0]
    before = len(slices_read(cluster, 0))
    cluster.shard_server(1).start()
    run(conn, number)
    assert state(conn, number) == ("clean", 1.0, ROWS, 0) and len(slices_read(cluster, 0)) == before


def test_a_table_that_was_rewritten_begins_anew(cluster, conn):
    number = start(conn)
    with psycopg.connect(cluster.dsn(), autocommit=True) as other:
        other.execute("SET shardmap.crash_point = 'verification_slice:3=error'")
        with pytest.raises(psycopg.Error, match="crash point"):
            run(other, number)
    assert set(pages(conn, number).values()) == {20}
    cluster.shard_psql(1, "VACUUM FULL t")
    run(conn, number)
    assert state(conn, number) == ("clean", 1.0, ROWS, 0)
    assert conn.execute("SELECT shard, restarts FROM shardmap.verification_shard WHERE verification = %s ORDER BY 1", (number,)).fetchall() == [
        ("shard-0", 0), ("shard-1", 1)]


def test_the_map_changes_meanwhile(cluster, conn):
    """Each slice is compared with the map as it is then."""
    number = start(conn)
    with psycopg.connect(cluster.dsn(), autocommit=True) as other:
        other.execute("SET shardmap.crash_point = 'verification_slice:3=error'")
        with pytest.raises(psycopg.Error, match="crash point"):
            run(other, number)
    key = key_of(conn, 0)
    conn.execute("SELECT shardmap.pin_key(%s, 'shard-0')", (key,))
    run(conn, number)
    assert state(conn, number) == ("clean", 1.0, ROWS, 0)
    conn.execute("SELECT shardmap.unpin_key(%s)", (key,))


def test_refusals(cluster, conn):
    number = start(conn)
    conn.execute("SELECT shardmap.drop_verification(%s)", (number,))
    assert state(conn, number) is None
    for sql, error in ((f"CALL shardmap.run_verification({number})", errors.UndefinedObject),
                       (f"SELECT shardmap.drop_verification({number})", errors.UndefinedObject),
                       ("SELECT shardmap.start_verification('pg_class')", errors.ObjectNotInPrerequisiteState),
                       ("SELECT shardmap.start_verification('t', 0)", errors.InvalidParameterValue)):
        with pytest.raises(error):
            conn.execute(sql)
