"""A replica's server that was replaced by one restored from an old backup, or by one that is something else altogether."""

import contextlib
import shutil

import pytest
from places import server_of, wait_until
from test_lost_servers import hosts, refused
from test_reads import raise_value, value

REPLICA = "shard-0-replica-0"


def lag(conn):
    return conn.execute("SELECT state, reason, lag, lag_bytes FROM shardmap.replica_lag WHERE replica = %s", [REPLICA]).fetchone()


@contextlib.contextmanager
def instead(place, data, **settings):
    """The replica's server runs on this data folder meanwhile, with the settings."""
    server = place.replica(0, 0)
    server.stop()
    kept = server.home / "kept"
    server.data.rename(kept)
    shutil.move(str(data), str(server.data))
    server.configure(**settings)
    server.start()
    try:
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(server.data)
        kept.rename(server.data)
        server.configure(**dict.fromkeys(settings))
        server.start()


@pytest.fixture
def backup(place):
    """A base backup of the primary."""
    server = place.cluster._server("backup", {}, place.cluster.shard_server(0))
    server.create()
    yield server.data
    shutil.rmtree(server.home, ignore_errors=True)


def test_a_replica_of_an_old_backup_is_behind_and_answers_no_token(place, conn, backup):
    key = place.keys[0][0]
    old = value(conn, key)
    # Long after the backup.
    new = [raise_value(conn, key) for _ in range(3)][-1]
    token = conn.execute("SELECT shardmap.write_token()").fetchone()[0]
    place.cluster.wait_for_replicas()
    conn.execute("SELECT shardmap.drain_replica('shard-0-replica-1')")
    with instead(place, backup, recovery_min_apply_delay="1h"), place.connect(catchup_timeout=50) as reader:
        wait_until(lambda: lag(conn)[0] == "replica" and lag(conn)[2].total_seconds() > 1 and lag(conn)[3] > 0)
        with place.connect(consistency="eventual") as other:
            assert (value(other, key), server_of(other, f"SELECT v FROM kv WHERE k = {key}")[0]) == (old, REPLICA)
            other.execute("SET shardmap.max_lag = '1s'")
            assert (value(other, key), server_of(other, f"SELECT v FROM kv WHERE k = {key}")[0]) == (new, "shard-0")
        reader.execute(f"SET shardmap.read_token = '{token}'")
        assert (value(reader, key), server_of(reader, f"SELECT v FROM kv WHERE k = {key}")[0]) == (new, "shard-0")
        # Who had read the new value from that address before does not see the old one now.
        assert value(conn, key) == new
    conn.execute("SELECT shardmap.drain_replica('shard-0-replica-1', false)")
    place.settle()


def test_a_server_of_another_cluster_is_invalid_and_answers_nothing(place, conn):
    stranger = place.cluster._server("stranger", {})
    stranger.create(fresh=True)
    stranger.start()
    stranger.psql("CREATE DATABASE shard_0")
    stranger.psql("CREATE TABLE kv (k int, v int)", "shard_0")
    copy = place.cluster._server("stranger-copy", {}, stranger)
    try:
        for server, reason in [(stranger, "not a replica: it is not in recovery"),
                               (copy.create() or copy.start(), "copy of another server: other system identifier")]:
            conn.execute(f"ALTER SERVER \"{REPLICA}\" OPTIONS (SET port '{server.port}')")
            wait_until(lambda: lag(conn) == ("invalid", reason, None, None))
            with place.connect(consistency="eventual", sticky_reads="off") as reader:
                key = place.keys[0][0]
                assert {server_of(reader, f"SELECT v FROM kv WHERE k = {key}")[0] for _ in range(20)} == {"shard-0-replica-1"}
        # In the primary's place it has nothing of a token.
        token = conn.execute("SELECT shardmap.current_token()").fetchone()[0]
        hosts(place.cluster, 0, [stranger])
        with place.connect(consistency="token", max_lag="0") as reader:
            reader.execute(f"SET shardmap.read_token = '{token}'")
            wait_until(lambda: refused(reader, key, 'shard "shard-0" does not have what the read must not miss'))
    finally:
        hosts(place.cluster, 0, [place.cluster.shard_server(0)])
        conn.execute(f"ALTER SERVER \"{REPLICA}\" OPTIONS (SET port '{place.replica(0, 0).port}')")
        copy.remove()
        stranger.remove()
    place.settle()
