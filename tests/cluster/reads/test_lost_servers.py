"""Replicas and primaries that die, come back, or come back as something else."""

import re

import psycopg
import pytest
from places import Place, make_cluster, role_of, server_of, wait_until
from psycopg import errors
from test_reads import raise_value, value


def only_replica(place, conn, shard, number):
    """Drains the other replica, so that this one answers."""
    conn.execute(f"SELECT shardmap.drain_replica('shard-{shard}-replica-{1 - number}')")
    sql = f"SELECT v FROM kv WHERE k = {place.keys[shard][0]}"
    wait_until(lambda: server_of(conn, sql)[0] == f"shard-{shard}-replica-{number}")


@pytest.fixture
def back(place, conn):
    """Brings all replicas back into rotation."""
    yield
    for shard in (0, 1):
        for number in (0, 1):
            conn.execute(f"SELECT shardmap.drain_replica('shard-{shard}-replica-{number}', false)")


def test_a_lost_replica_is_replaced_unseen(place, conn):
    key = place.keys[0][0]
    sql = f"SELECT v FROM kv WHERE k = {key}"
    server = server_of(conn, sql)[0]
    place.replica(0, int(server[-1])).kill()
    assert value(conn, key) is not None
    assert server_of(conn, sql)[0] == f"shard-0-replica-{1 - int(server[-1])}"
    place.replica(0, 1 - int(server[-1])).kill()
    assert (value(conn, key) is not None, role_of(conn, sql)) == (True, "primary")
    assert conn.execute("SELECT count(*) FROM kv").fetchone() == (40,)


def test_a_replica_lost_in_a_transaction(place, conn):
    key = place.keys[0][0]
    sql = f"SELECT v FROM kv WHERE k = {key}"
    with conn.transaction():
        server = server_of(conn, sql)[0]
        place.replica(0, int(server[-1])).kill()
        assert server_of(conn, sql)[0] != server, "READ COMMITTED takes a new snapshot anyway"
    place.settle()
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    server = server_of(conn, sql)[0]
    assert "replica" in server
    place.replica(0, int(server[-1])).kill()
    with pytest.raises(psycopg.Error) as raised:
        value(conn, key)
    assert raised.value.diag.message_primary == f'connection to replica "{server}" of shard "shard-0" was lost'
    conn.execute("ROLLBACK")
    assert value(conn, key) is not None


def test_rows_that_have_come_are_not_read_twice(place, conn):
    with conn.transaction():
        conn.execute("DECLARE c CURSOR FOR SELECT k, pad.n FROM kv, generate_series(1, 5000) pad(n)")
        first = conn.execute("FETCH 3 FROM c").fetchall()
        for shard in (0, 1):
            for number in (0, 1):
                place.replica(shard, number).kill()
        with pytest.raises(psycopg.Error), conn.transaction():
            rows = conn.execute("FETCH ALL FROM c").fetchall()
            assert len(set(first + rows)) == len(first + rows) == 200_000
            raise psycopg.Error("all rows had come before")


@pytest.mark.usefixtures("back")
def test_what_a_replica_does_not_have_yet_the_primary_has(place, conn):
    only_replica(place, conn, 0, 0)
    with place.paused(0, 0):
        for shard in (0, 1):
            with psycopg.connect(place.cluster.shard_dsn(shard), autocommit=True) as direct:
                direct.execute("ALTER TABLE kv ADD COLUMN extra int DEFAULT 7")
        conn.execute("ALTER TABLE kv ADD COLUMN extra int")
        conn.execute("SET shardmap.consistency = eventual")
        assert conn.execute("SELECT extra FROM kv WHERE k = %s", [place.keys[0][0]]).fetchone() == (7,)


@pytest.mark.usefixtures("back")
def test_a_replica_that_came_back_behind_is_not_trusted(place, conn):
    """After a crash it replays from its last restart point, and shows less than it did."""
    only_replica(place, conn, 1, 0)
    key, replica = place.keys[1][1], place.replica(1, 0)
    place.cluster.shard_server(1).psql("CHECKPOINT")
    place.cluster.wait_for_replicas()
    replica.psql("CHECKPOINT")
    for _ in range(3):
        new = raise_value(conn, key)
    place.cluster.wait_for_replicas()
    wait_until(lambda: server_of(conn, f"SELECT v FROM kv WHERE k = {key}")[0] == "shard-1-replica-0")
    assert value(conn, key) == new
    replica.kill()
    replica.configure(recovery_min_apply_delay="1h")
    replica.start()
    try:
        with psycopg.connect(place.cluster.replica_dsn(1, 0), autocommit=True) as direct:
            assert value(direct, key) < new, "the test needs a replica that has gone back"
        for _ in range(20):
            assert value(conn, key) == new
    finally:
        replica.configure(recovery_min_apply_delay=None)
        replica.psql("SELECT pg_reload_conf()")


def test_the_primary_is_down(place, conn):
    """Replicas go on answering who has nothing new to miss; who has gets an error, not an old answer."""
    key = place.keys[1][2]
    primary = place.cluster.shard_server(1)
    value(conn, key)
    with place.connect() as writer:
        raise_value(writer, key)
        place.settle()
        primary.kill()
        try:
            assert role_of(conn, f"SELECT v FROM kv WHERE k = {key}") == "replica"
            with pytest.raises(errors.OperationalError) as raised:
                value(writer, key)
            assert "shard \"shard-1\"" in raised.value.diag.message_primary
            for way_out in ("The session has used this shard's primary", "promote a replica", "shardmap.consistency = 'eventual'", "'token'"):
                assert way_out in raised.value.diag.message_hint
            # EXPLAIN, which asks nobody, says as much once the sampler knows.
            explain = f"EXPLAIN SELECT v FROM kv WHERE k = {key}"
            said = lambda: [line.strip() for line, in writer.execute(explain) if "Read From" in line]
            wait_until(lambda: said() == ["Read From: shard-1", "Read From Because: the session has used it, and while it does not "
                                          "answer replicas may show less (shardmap.consistency)"])
            for consistency in ("eventual", "token"):
                writer.execute(f"SET shardmap.consistency = {consistency}")
                assert value(writer, key) is not None
                assert "Read From: shard-1-replica" in said()[0]
            writer.execute("RESET shardmap.consistency")
        finally:
            primary.start()
        wait_until(lambda: succeeds(lambda: value(writer, key)))


def succeeds(body):
    try:
        body()
        return True
    except psycopg.Error:
        return False


def test_no_replica_may_answer(place):
    for number in (0, 1):
        place.replica(0, number).kill()
    with place.connect(read_preference="replica") as conn:
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match='no replica of shard "shard-0" can answer this read'):
            value(conn, place.keys[0][0])
        assert value(conn, place.keys[1][0]) is not None


def test_a_replica_in_the_primarys_place_is_no_primary(place):
    """As when a list of hosts does not ask for the one that takes writes, or an address leads to the wrong server."""
    key, replica, primary = place.keys[0][3], place.replica(0, 0), place.cluster.shard_server(0)
    hosts(place.cluster, 0, [replica], ", ADD target_session_attrs 'any'")
    try:
        with place.connect(read_preference="primary") as conn:
            for sql in ("SELECT v FROM kv WHERE k = %s", "UPDATE kv SET v = v + 1 WHERE k = %s", "SELECT count(v) FROM kv WHERE k <> %s"):
                with pytest.raises(errors.ObjectNotInPrerequisiteState) as raised:
                    conn.execute(sql, [key])
                assert raised.value.diag.message_primary == 'server of shard "shard-0" is not a primary'
                assert "target_session_attrs" in raised.value.diag.message_hint
            conn.execute("SET shardmap.consistency = eventual")
            assert value(conn, key) is not None
        hosts(place.cluster, 0, [replica, primary], ", SET target_session_attrs 'read-write'")
        with place.connect(read_preference="primary") as conn:
            raise_value(conn, key)
    finally:
        hosts(place.cluster, 0, [primary], ", DROP target_session_attrs")


@pytest.fixture(scope="module")
def other():
    """A cluster whose first shard may be failed over."""
    with make_cluster() as cluster:
        yield Place(cluster)


def hosts(cluster, shard, servers, more=""):
    cluster.psql(f"ALTER SERVER \"shard-{shard}\" OPTIONS (SET host '{','.join(['127.0.0.1'] * len(servers))}', "
                 f"SET port '{','.join(str(server.port) for server in servers)}'{more})")


def test_writes_find_the_primary_and_no_former_one(other):
    """A replica is promoted, and the old primary comes back as if nothing had happened."""
    other.settle()
    cluster, key = other.cluster, other.keys[0][0]
    old, chosen, left = cluster.shard_server(0), other.replica(0, 0), other.replica(0, 1)
    hosts(cluster, 0, [chosen, left, old], ", ADD target_session_attrs 'read-write'")
    with other.connect() as conn:
        before = raise_value(conn, key)
        old_token = conn.execute("SELECT shardmap.write_token()").fetchone()[0]
        cluster.wait_for_replicas()
        # A cascading replica goes with the one that feeds it.
        left.psql(f"ALTER SYSTEM SET primary_conninfo = 'host=127.0.0.1 port={chosen.port} user=postgres'")
        left.psql("SELECT pg_reload_conf()")
        wait_until(lambda: chosen.psql("SELECT count(*) FROM pg_stat_replication") == "1")
        chosen.psql("SELECT pg_promote()")
        old.restart()  # whoever is connected has to look for the primary again
    with other.connect() as conn:
        new = raise_value(conn, key)
        assert new == before + 1
        token = conn.execute("SELECT shardmap.write_token()").fetchone()[0]
        assert "not a replica" in verdict(conn, "shard-0-replica-0") or "not heard" in verdict(conn, "shard-0-replica-0")
    # A token of the old timeline, from before the logs parted.
    with other.connect(consistency="token") as conn:
        conn.execute(f"SET shardmap.read_token = '{old_token}'")
        assert value(conn, key) >= before
        wait_until(lambda: role_of(conn, f"SELECT v FROM kv WHERE k = {key}") == "replica")
        assert value(conn, key) >= before
        conn.execute("SELECT set_config('shardmap.read_token', shardmap.merge_tokens(%s, %s), false)", [old_token, token])
        wait_until(lambda: role_of(conn, f"SELECT v FROM kv WHERE k = {key}") == "replica")
        assert value(conn, key) == new
    # Somebody points the shard at the former primary.
    hosts(cluster, 0, [old])
    with other.connect(consistency="token", max_lag="0") as conn:
        conn.execute(f"SET shardmap.read_token = '{token}'")
        wait_until(lambda: refused(conn, key, 'cannot use shard "shard-0": its server is a former primary'))
    with other.connect() as conn:
        wait_until(lambda: is_fenced(conn, "UPDATE kv SET v = v + 1 WHERE k = %s", key))
        assert is_fenced(conn, "UPDATE kv SET v = v + 1 WHERE k = %s AND random() >= 0", key)
        assert is_fenced(conn, "INSERT INTO kv SELECT k, 0 FROM generate_series(2000, 2100) k")
        raise_value(conn, other.keys[1][0])
    hosts(cluster, 0, [chosen])
    with other.connect() as conn:
        assert raise_value(conn, key) == new + 1


def is_fenced(conn, sql, *params):
    try:
        conn.execute(sql, params)
        return False
    except errors.ObjectNotInPrerequisiteState as error:
        assert error.diag.message_primary == 'cannot use shard "shard-0": its server is a former primary'
        assert re.search(r'on timeline 1, "shard-0(-replica-\d)?" on timeline 2', error.diag.message_detail)
        return True


def refused(conn, key, message):
    try:
        conn.execute("SELECT v FROM kv WHERE k = %s", [key])
        return False
    except errors.ObjectNotInPrerequisiteState as error:
        assert error.diag.message_primary == message
        return True


def verdict(conn, name):
    found = conn.execute("SELECT considered FROM shardmap.choose_replica('shard-0')").fetchone()[0]
    return next(line for line in found if line.startswith(name))
