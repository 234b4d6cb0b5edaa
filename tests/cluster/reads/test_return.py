"""A former primary that comes back, first in the list of hosts, while the sampler stays with the new one."""

import pytest
from places import Place, make_cluster, wait_until
from psycopg import errors
from test_lost_servers import hosts
from test_reads import raise_value, value


def timelines(conn):
    return dict(conn.execute("SELECT replica, timeline FROM shardmap.replica_lag").fetchall())


@pytest.fixture(scope="module")
def returned():
    """The place, a token of the new timeline, and the value that it stands for; shard 0's former primary is up again."""
    with make_cluster() as cluster:
        place = Place(cluster)
        place.settle()
        key, old, new = place.keys[0][0], cluster.shard_server(0), place.replica(0, 0)
        hosts(cluster, 0, [old, new], ", ADD target_session_attrs 'read-write'")
        with place.connect() as conn:
            raise_value(conn, key)
        cluster.wait_for_replicas()
        old.kill()
        new.psql("SELECT pg_promote()")
        with place.connect() as conn:
            wait_until(lambda: timelines(conn)["shard-0-replica-0"] == 2)
            written = raise_value(conn, key)
            token = conn.execute("SELECT shardmap.write_token()").fetchone()[0]
        old.start()
        assert int(old.psql(f"SELECT v FROM kv WHERE k = {key}", "shard_0")) < written
        yield place, key, written, token


def test_it_answers_no_read_with_a_newer_token(returned):
    place, key, written, token = returned
    with place.connect() as conn:
        conn.execute(f"SET shardmap.read_token = '{token}'")
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="does not have what the read must not miss"):
            value(conn, key)


def test_it_takes_no_writes(returned):
    place, key, written, token = returned
    with place.connect(read_preference="primary") as conn:
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="its server is a former primary"):
            raise_value(conn, key)
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="its server is a former primary"):
            conn.execute("UPDATE kv SET v = v + 1 WHERE k = %s AND random() >= 0", [key])
    assert int(place.cluster.shard_server(0).psql(f"SELECT v FROM kv WHERE k = {key}", "shard_0")) < written
