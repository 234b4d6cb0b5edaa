"""Registering replicas: what is checked, what is left behind, who may, and what a dump keeps."""

import contextlib

import psycopg
import pytest
from cluster import Cluster
from psycopg import errors
from replicas_place import eventually


@pytest.fixture(scope="module")
def cluster():
    with Cluster(shards=2, replicas=1, layout="servers") as cluster:
        cluster.psql("CREATE ROLE ann LOGIN; CREATE ROLE adm LOGIN IN ROLE shardmap_admin")
        yield cluster


@pytest.fixture
def conn(cluster):
    with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
        yield conn


def stranger(cluster):
    """A replica of a server that has nothing to do with the cluster."""
    primary = cluster._server("stranger", {})
    primary.create(fresh=True)
    replica = cluster._server("stranger-replica", {}, primary.start())
    replica.create()
    return replica.start()


def registered(conn):
    return conn.execute("SELECT shard, name, weight, zone, drained FROM shardmap.replica ORDER BY name").fetchall()


def test_a_cluster_registers_its_replicas(conn):
    assert registered(conn) == [("shard-0", "shard-0-replica-0", 1, "", False), ("shard-1", "shard-1-replica-0", 1, "", False)]
    # Its database is the shard's, and the shard's user mapping serves.
    rows = conn.execute("SELECT r FROM shardmap.remote_rows('shard-1-replica-0', 'SELECT current_database(), pg_is_in_recovery()', false) r")
    assert rows.fetchone()[0] == ["shard_1", "t"]


def refused(conn, sql, error):
    before = conn.execute("SELECT count(*) FROM pg_foreign_server").fetchone()
    with pytest.raises(error) as raised:
        conn.execute(sql)
    assert conn.execute("SELECT count(*) FROM pg_foreign_server").fetchone() == before
    return raised.value.diag


@pytest.mark.parametrize("name, kind", [("shard-0-replica-0", "replica"), ("shard-0", "shard")])
@pytest.mark.parametrize("command", ['DROP SERVER "{}" CASCADE', 'ALTER SERVER "{}" RENAME TO other'])
def test_their_servers_cannot_be_lost(conn, command, name, kind):
    """Nor those of shards, though there are no tables."""
    before = registered(conn)
    diag = refused(conn, command.format(name), errors.DependentObjectsStillExist)
    assert f'would lose {kind} "{name}"' in diag.message_primary and f"shardmap.drop_{kind}()" in diag.message_hint
    assert registered(conn) == before
    conn.execute("CREATE SERVER beside FOREIGN DATA WRAPPER shardmap_fdw")
    conn.execute("ALTER SERVER beside RENAME TO elsewhere; DROP SERVER elsewhere")
    conn.execute("ALTER SERVER \"shard-0\" OPTIONS (ADD application_name 'x'); ALTER SERVER \"shard-0\" OPTIONS (DROP application_name)")


def test_only_replicas_of_the_shard_are_taken(cluster, conn):
    add = f"SELECT shardmap.add_replica('shard-0', '%s', port => %d, host => '127.0.0.1')"
    diag = refused(conn, add % ("new", cluster.shard_server(0).port), errors.WrongObjectType)
    assert diag.message_primary == 'server of replica "new" is not a replica'
    other = stranger(cluster)
    try:
        diag = refused(conn, add % ("new', dbname => 'postgres", other.port), errors.InvalidParameterValue)
    finally:
        other.primary.remove()
        other.remove()
    assert diag.message_primary == 'server of replica "new" is not a copy of shard "shard-0"'
    diag = refused(conn, add % ("new', dbname => 'postgres", cluster.replica_server(0).port), errors.InvalidParameterValue)
    assert diag.message_primary == 'replica "new" does not show the database of shard "shard-0"'
    assert diag.message_detail.startswith('It is database "postgres" (OID ')
    diag = refused(conn, add % ("new", 1), errors.SqlclientUnableToEstablishSqlconnection)
    assert diag.message_primary == 'could not connect to replica "new" of shard "shard-0"'
    refused(conn, add % ("shard-0-replica-0", 1), errors.DuplicateObject)
    refused(conn, add % ("shard-1", 1), errors.DuplicateObject)
    refused(conn, "SELECT shardmap.add_replica('shard-7', 'new')", errors.UndefinedObject)
    refused(conn, "SELECT shardmap.add_replica('shard-0', 'new', weight => -1)", errors.InvalidParameterValue)


@contextlib.contextmanager
def clone(cluster):
    """A server of the same image as shard-0's, which shares its system identifier, and a replica of that."""
    primary = cluster._server("clone", {})
    primary.create()
    replica = cluster._server("clone-replica", {}, primary.start())
    try:
        oid = cluster.shard_server(0).psql("SELECT oid FROM pg_database WHERE datname = 'shard_0'")
        primary.psql(f"CREATE DATABASE shard_0 OID {oid}")
        replica.create()
        yield primary, replica.start()
    finally:
        replica.remove()
        primary.remove()


def write(server, size):
    server.psql(f"CREATE TABLE IF NOT EXISTS much AS SELECT 1 AS a; INSERT INTO much SELECT g FROM generate_series(1, {size}) g")


def marks(cluster):
    return cluster.shard_psql(0, "SELECT count(*) FROM pg_largeobject_metadata")


def test_a_clone_of_the_same_image_is_no_replica(cluster, conn):
    shard = cluster.shard_server(0)
    add = "SELECT shardmap.add_replica('shard-0', 'clone', '127.0.0.1', {})"
    with clone(cluster) as (primary, replica):
        write(shard, 100_000)  # the shard is further than the clone
        diag = refused(conn, add.format(replica.port), errors.ObjectNotInPrerequisiteState)
        assert diag.message_primary == 'server of replica "clone" does not follow shard "shard-0"'
        assert "trust => true" in diag.message_hint
        conn.execute(add.format(f"{replica.port}, trust => true"))
        try:
            # Once it is further than the shard everybody sees it: who asks, and the sampler.
            write(primary, 400_000)
            with pytest.raises(errors.InvalidParameterValue) as raised:
                conn.execute("SELECT shardmap._check_follows('shard-0', 'clone')")
            assert raised.value.diag.message_primary == 'server of replica "clone" is not a copy of shard "shard-0"'
            assert "does not have what was written to the shard" in raised.value.diag.message_detail
            state = "SELECT state, reason, lag FROM shardmap.replica_lag WHERE replica = 'clone'"
            invalid = ("invalid", "follows another server: it has replayed what the primary has not written", None)
            eventually(lambda: conn.execute(state).fetchone(), lambda row: row == invalid)
            considered = conn.execute("SELECT considered FROM shardmap.choose_replica('shard-0')").fetchone()[0]
            assert "clone: is not a replica of this primary" in considered
            # Also when the shard has gone past it.
            write(shard, 800_000)
            sampled = lambda: conn.execute("SELECT sampled_at FROM shardmap.replica_lag WHERE replica = 'clone'").fetchone()
            before = sampled()
            eventually(sampled, lambda now: now > before)
            assert conn.execute(state).fetchone() == invalid
        finally:
            conn.execute("SELECT shardmap.drop_replica('clone')")
            shard.psql("DROP TABLE much")
    assert marks(cluster) == "0"


def test_one_that_is_far_behind_is_taken_on_trust_only(cluster, conn):
    replica = cluster.replica_server(0)
    add = f"SELECT shardmap.add_replica('shard-0', 'shard-0-replica-0', '127.0.0.1', {replica.port}"
    conn.execute("SELECT shardmap.drop_replica('shard-0-replica-0')")
    replica.psql("SELECT pg_wal_replay_pause()")
    try:
        conn.execute("SET statement_timeout = '1s'")
        refused(conn, add + ")", errors.QueryCanceled)
        assert marks(cluster) == "0"
        conn.execute("RESET statement_timeout")
        conn.execute(add + ", trust => true)")
        conn.execute("SELECT shardmap.drop_replica('shard-0-replica-0')")
    finally:
        replica.psql("SELECT pg_wal_replay_resume()")
        conn.execute(add + ")")
    assert marks(cluster) == "0"


def test_change_and_drop(cluster, conn):
    port = cluster.replica_server(0).port
    diag = refused(conn, f"SELECT shardmap.add_replica('shard-0', 'second', '127.0.0.1', {port})", errors.DuplicateObject)
    assert diag.message_primary == 'server of replica "second" is already replica "shard-0-replica-0"'
    conn.execute("SELECT shardmap.drop_replica('shard-0-replica-0')")
    conn.execute(f"SELECT shardmap.add_replica('shard-0', 'second', '127.0.0.1', {port}, weight => 0.5, zone => 'a')")
    conn.execute("SELECT shardmap.set_replica('second', weight => 2)")
    conn.execute("SELECT shardmap.drain_replica('second')")
    assert ("shard-0", "second", 2, "a", True) in registered(conn)
    conn.execute("SELECT shardmap.set_replica('second', zone => 'b'), shardmap.drain_replica('second', false)")
    assert ("shard-0", "second", 2, "b", False) in registered(conn)
    diag = refused(conn, "SELECT shardmap.drop_shard('shard-0', abandon => true)", errors.DependentObjectsStillExist)
    assert diag.message_detail == "Replicas: second."
    conn.execute("SELECT shardmap.drop_replica('second')")
    conn.execute(f"SELECT shardmap.add_replica('shard-0', 'shard-0-replica-0', '127.0.0.1', {port})")
    assert len(registered(conn)) == 2
    assert conn.execute("SELECT FROM pg_foreign_server WHERE srvname = 'second'").fetchone() is None
    for call in ("drop_replica('second')", "set_replica('second', 1)", "drain_replica('second')"):
        refused(conn, f"SELECT shardmap.{call}", errors.UndefinedObject)


def test_administrators_only(cluster):
    with psycopg.connect(cluster.dsn(user="ann"), autocommit=True) as ann:
        assert len(registered(ann)) == 2
        for call in ("add_replica('shard-0', 'x')", "drop_replica('shard-0-replica-0')", "set_replica('shard-0-replica-0', 2)",
                     "drain_replica('shard-0-replica-0')"):
            refused(ann, f"SELECT shardmap.{call}", errors.InsufficientPrivilege)
    with psycopg.connect(cluster.dsn(user="adm"), autocommit=True) as adm:
        adm.execute("SELECT shardmap.set_replica('shard-0-replica-0', 3)")
        adm.execute("SELECT shardmap.set_replica('shard-0-replica-0', 1)")


def test_mappings_of_the_shard_serve_its_replicas(cluster, conn):
    conn.execute("CREATE USER MAPPING FOR ann SERVER \"shard-0\" OPTIONS (user 'postgres', password_required 'false')")
    conn.execute("GRANT EXECUTE ON FUNCTION shardmap.remote_rows TO ann")
    with psycopg.connect(cluster.dsn(user="ann"), autocommit=True) as ann:
        ask = "SELECT r FROM shardmap.remote_rows(%s, 'SELECT 1', false) r"
        assert ann.execute(ask, ["shard-0-replica-0"]).fetchone()[0] == ["1"]
        with pytest.raises(errors.UndefinedObject, match='has no user mapping for replica "shard-1-replica-0" of shard "shard-1"'):
            ann.execute(ask, ["shard-1-replica-0"])
    # Another owner might be somebody else.
    conn.execute('ALTER SERVER "shard-0-replica-0" OWNER TO postgres')
    with psycopg.connect(cluster.dsn(user="ann"), autocommit=True) as ann, pytest.raises(errors.UndefinedObject):
        ann.execute(ask, ["shard-0-replica-0"])
    conn.execute('ALTER SERVER "shard-0-replica-0" OWNER TO shardmap_admin')


def test_nothing_is_resolved_on_a_replica(conn):
    assert conn.execute("SELECT shard FROM shardmap.resolve_transactions() WHERE error IS NOT NULL").fetchall() == []


def test_another_shards_database_on_the_same_server_is_refused():
    with Cluster(shards=2, replicas=1, layout="databases") as cluster, psycopg.connect(cluster.dsn(), autocommit=True) as conn:
        name, port = conn.execute("SELECT r.name, o.option_value FROM shardmap.replica r JOIN pg_foreign_server f ON f.srvname = r.name, "
                                  "pg_options_to_table(f.srvoptions) o WHERE r.shard = 'shard-1' AND o.option_name = 'port'").fetchone()
        add = f"SELECT shardmap.add_replica('shard-1', 'wrong', '127.0.0.1', {port}, dbname => 'shard_0')"
        diag = refused(conn, add, errors.InvalidParameterValue)
        assert diag.message_primary == 'replica "wrong" does not show the database of shard "shard-1"'
        # Whoever leads a registered one there is told by the sampler.
        conn.execute(f"ALTER SERVER \"{name}\" OPTIONS (SET dbname 'shard_0')" if has_dbname(conn, name) else
                     f"ALTER SERVER \"{name}\" OPTIONS (ADD dbname 'shard_0')")
        state = lambda: conn.execute("SELECT state, reason FROM shardmap.replica_lag WHERE replica = %s", [name]).fetchone()
        eventually(state, lambda row: row == ("invalid", "another database than the shard's"))


def has_dbname(conn, server):
    return conn.execute("SELECT FROM pg_foreign_server f, pg_options_to_table(f.srvoptions) o "
                        "WHERE f.srvname = %s AND o.option_name = 'dbname'", [server]).fetchone() is not None
