"""A former primary that comes back, first in the list of hosts, while the sampler stays with the new one."""

import pytest
from places import Place, make_cluster, wait_until
from psycopg import errors
from test_lost_servers import hosts
from test_reads import raise_value, value


FORMER = 'cannot use shard "shard-0": its server is a former primary'


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
        conn.execute("SET shardmap.max_lag = 0")
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match=FORMER):
            value(conn, key)


def test_it_takes_no_writes(returned):
    place, key, written, token = returned
    with place.connect(read_preference="primary") as conn:
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="its server is a former primary"):
            raise_value(conn, key)
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="its server is a former primary"):
            conn.execute("UPDATE kv SET v = v + 1 WHERE k = %s AND random() >= 0", [key])
    assert int(place.cluster.shard_server(0).psql(f"SELECT v FROM kv WHERE k = {key}", "shard_0")) < written


@pytest.mark.parametrize("settings", [{}, {"consistency": "eventual"}, {"read_preference": "prefer_replica", "max_lag": "0"},
                                      {"enable_router": "off"}, {"enable_routing": "off"}])
def test_it_answers_no_read_of_a_new_session(returned, settings):
    """Nothing written, nothing seen, no token."""
    place, key, written, token = returned
    for sql in ("SELECT v FROM kv WHERE k = %s", "SELECT v FROM kv WHERE k = %s FOR UPDATE", "SELECT max(v) FROM kv WHERE k <> %s"):
        with place.connect(**{"read_preference": "primary", **settings}) as conn:
            with pytest.raises(errors.ObjectNotInPrerequisiteState, match=FORMER) as raised:
                conn.execute(sql, [key])
            assert 'It is on timeline 1, "shard-0-replica-0" on timeline 2.' in raised.value.diag.message_detail
            assert "lead to the new primary" in raised.value.diag.message_hint
            # The other shard has never had a failover.
            conn.execute("SELECT v FROM kv WHERE k = %s", [place.keys[1][0]])


def test_each_connection_to_the_new_primary_is_asked_once(returned):
    """Last: the shard's server is put right. Plain reads cost no round trip more once their connection is known."""
    place, key, written, token = returned
    new = place.replica(0, 0)
    hosts(place.cluster, 0, [new])
    asked = lambda: new.log.read_text(errors="replace").count("greatest((SELECT timeline_id")
    with place.connect(read_preference="primary") as conn:
        before = asked()
        for _ in range(5):
            assert value(conn, key) == written
            conn.execute("SELECT count(*) FROM kv")
        raise_value(conn, key)
        assert asked() == before + 1


def test_a_replica_that_was_promoted_by_mistake_is_dropped(returned):
    """The other shard, whose primary is as it always was."""
    place = returned[0]
    key, name = place.keys[1][0], "shard-1-replica-0"
    with place.connect(read_preference="primary") as conn:
        before = value(conn, key)
        place.replica(1, 0).psql("SELECT pg_promote()")
        wait_until(lambda: timelines(conn)[name] == 2)
        for use in (value, raise_value):
            with pytest.raises(errors.ObjectNotInPrerequisiteState, match='cannot use shard "shard-1"') as raised:
                use(conn, key)
            assert f'If "{name}" was promoted by mistake, drop it: shardmap.drop_replica().' in raised.value.diag.message_hint
        conn.execute("SELECT shardmap.drop_replica(%s)", [name])
        assert (value(conn, key), raise_value(conn, key)) == (before, before + 1)


def test_a_standby_that_is_promoted_under_a_session_is_a_primary(returned):
    """The other shard, which loses its primary here. A session need not connect anew to believe it, and asks once."""
    place = returned[0]
    key, new = place.keys[1][0], place.replica(1, 1)
    hosts(place.cluster, 1, [new])
    asked = lambda: new.log.read_text(errors="replace").count("greatest((SELECT timeline_id")
    with place.connect(read_preference="primary", consistency="eventual") as conn:
        before = value(conn, key)
        conn.execute("RESET shardmap.consistency; SET shardmap.consistency = session")
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match='server of shard "shard-1" is not a primary'):
            value(conn, key)
        new.psql("SELECT pg_promote()")
        assert raise_value(conn, key) == before + 1
        count = asked()
        assert [value(conn, key) for _ in range(5)] == [before + 1] * 5
        assert asked() == count
