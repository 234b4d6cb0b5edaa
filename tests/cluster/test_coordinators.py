"""Two coordinators of the same shards, on two servers: whether they have the same map, the audit says."""

import json

import psycopg
import pytest
from cluster import Cluster
from psycopg import errors

SETUP = """
CREATE TABLE t (k int PRIMARY KEY, v text);
INSERT INTO t SELECT i, 'row ' || i FROM generate_series(1, 100) i;
SELECT shardmap.distribute_table('t', 'k');
"""


@pytest.fixture(scope="module")
def first():
    with Cluster(shards=2) as cluster:
        cluster.psql(SETUP)
        yield cluster


@pytest.fixture(scope="module")
def second(first):
    """Another coordinator, with the same map, known to the first."""
    with Cluster(shards=1) as cluster, psycopg.connect(first.dsn(), autocommit=True) as conn:
        exported(conn, cluster)
        conn.execute("SELECT shardmap.add_coordinator('second', '127.0.0.1', %s)", (cluster.coordinator.port,))
        yield cluster


@pytest.fixture
def conn(first):
    with psycopg.connect(first.dsn(), autocommit=True) as conn:
        yield conn


@pytest.fixture
def other(second):
    with psycopg.connect(second.dsn(), autocommit=True) as conn:
        yield conn


def exported(conn, cluster):
    with psycopg.connect(cluster.dsn(), autocommit=True) as other:
        other.execute("SELECT shardmap.import_map(%s)", (json.dumps(conn.execute("SELECT shardmap.export_map()").fetchone()[0]),))


def audit(conn, mode="sample"):
    return conn.execute("SELECT kind, state, shard FROM shardmap.audit('main', %s)", (mode,)).fetchall()


def figures(conn):
    return conn.execute("SELECT shardmap.map_version(), shardmap.map_digest()").fetchone()


def test_the_same_map_is_no_finding(conn, other):
    assert figures(conn) == figures(other) and audit(conn) == []


def test_another_map_of_the_same_version_is_found(conn, other, second):
    other.execute("SELECT shardmap.pin_key(7, 'shard-0')")
    assert audit(conn) == [("coordinator_ahead", "suspected", "second")]
    conn.execute("SELECT shardmap.pin_key(1000, 'shard-1')")
    assert figures(conn)[0] == figures(other)[0] and figures(conn)[1] != figures(other)[1]
    assert audit(conn) == [("coordinator_differs", "suspected", "second")]
    assert audit(conn) == [("coordinator_differs", "confirmed", "second")]
    detail, finding = conn.execute("SELECT detail, id FROM shardmap.audit_findings WHERE state = 'confirmed'").fetchone()
    assert figures(conn)[1] in detail and figures(other)[1] in detail
    assert conn.execute("SELECT shard, severity, finding FROM shardmap.alerts").fetchall() == [("second", "page", finding)]
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match='of kind "coordinator_differs"'):
        conn.execute("SELECT shardmap.correct(%s, 1)", (finding,))
    exported(conn, second)
    assert audit(conn) == [] and conn.execute("SELECT * FROM shardmap.alerts").fetchall() == []
    conn.execute("SELECT shardmap.unpin_key(1000)")
    assert audit(conn) == [("coordinator_behind", "suspected", "second")]
    exported(conn, second)
    assert audit(conn) == []


def test_a_keyspace_that_it_does_not_have(conn):
    conn.execute("SELECT shardmap.create_keyspace('more')")
    try:
        assert conn.execute("SELECT kind, detail FROM shardmap.audit('more')").fetchall() == [
            ("coordinator_behind", "it has no such keyspace")]
    finally:
        conn.execute("SELECT shardmap.drop_keyspace('more')")


def test_one_that_does_not_answer_is_unknown(conn, other, second):
    other.execute("SELECT shardmap.pin_key(7, 'shard-0')")
    assert audit(conn)[0][0] == "coordinator_ahead"
    second.coordinator.stop("immediate")
    assert audit(conn) == [("unknown", "suspected", "second")]
    # What was found before is not closed by not looking.
    assert conn.execute("SELECT kind FROM shardmap.audit_findings WHERE state <> 'closed' ORDER BY 1").fetchall() == [
        ("coordinator_ahead",), ("unknown",)]
    # Transactions that are prepared on shards are looked for all the same.
    assert conn.execute("SELECT DISTINCT shard FROM shardmap.in_doubt WHERE shard = 'second'").fetchall() == []
    second.coordinator.start()
    with psycopg.connect(second.dsn(), autocommit=True) as again:
        again.execute("SELECT shardmap.unpin_key(7)")
    conn.execute("SELECT shardmap.pin_key(1000, 'shard-1')")
    conn.execute("SELECT shardmap.unpin_key(1000)")
    assert audit(conn) == []  # the same map, whatever its version


def test_what_is_no_other_coordinator_is_refused(conn, first, second):
    for options, error, words in (
            ({"port": first.coordinator.port}, errors.InvalidParameterValue, "this database itself"),
            ({"port": second.coordinator.port, "dbname": "postgres"}, errors.ObjectNotInPrerequisiteState, "does not have the extension"),
            ({"port": 1}, psycopg.OperationalError, "could not connect")):
        with pytest.raises(error, match=words):
            conn.execute("SELECT shardmap.add_coordinator('third', '127.0.0.1', %s, %s)", (options["port"], options.get("dbname")))
    with pytest.raises(errors.DuplicateObject):
        conn.execute("SELECT shardmap.add_coordinator('shard-0', '127.0.0.1')")
    with pytest.raises(errors.UndefinedObject):
        conn.execute("SELECT shardmap.drop_coordinator('third')")
    with pytest.raises(psycopg.Error, match="second"):
        conn.execute("DROP SERVER second CASCADE")
    assert conn.execute("SELECT name FROM shardmap.coordinator").fetchall() == [("second",)]


def test_an_ordinary_user_there_will_do(conn, second):
    """What is asked of a coordinator, all may ask."""
    second.psql("CREATE ROLE asker LOGIN")
    conn.execute("ALTER USER MAPPING FOR CURRENT_USER SERVER second OPTIONS (SET user 'asker')")
    assert audit(conn) == []


def test_dropping_it_leaves_nothing(conn, second):
    conn.execute("SELECT shardmap.drop_coordinator('second')")
    assert conn.execute("SELECT count(*) FROM pg_foreign_server WHERE srvname = 'second'").fetchone() == (0,)
    assert audit(conn) == []
