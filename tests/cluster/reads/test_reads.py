"""Which statements replicas answer, and that they show nobody less than he has written or seen."""

import pytest
from patience import Running
from places import role_of, server_of, wait_until
from psycopg import errors


def value(conn, key):
    return conn.execute("SELECT v FROM kv WHERE k = %s", [key]).fetchone()[0]


def raise_value(conn, key):
    return conn.execute("UPDATE kv SET v = v + 1 WHERE k = %s RETURNING v", [key]).fetchone()[0]


def statements_seen(server):
    return server.log.read_text(errors="replace").count(" v FROM public.kv")


def test_a_replica_answers_and_the_primary_does_not(place, conn):
    key = place.keys[0][0]
    server, reason = server_of(conn, f"SELECT v FROM kv WHERE k = {key}")
    assert server.startswith("shard-0-replica-") and reason == "a replica that is fresh enough"
    servers = {"shard-0": place.cluster.shard_server(0), server: place.replica(0, int(server[-1]))}
    before = {name: statements_seen(each) for name, each in servers.items()}
    for _ in range(5):
        value(conn, key)
    after = {name: statements_seen(each) - before[name] for name, each in servers.items()}
    assert after == {"shard-0": 0, server: 5}


def test_fan_outs_use_replicas(conn):
    lines = [line for line, in conn.execute("EXPLAIN (ANALYZE, COSTS off) SELECT count(*) FROM kv")]
    servers = [line.split()[-1] for line in lines if "Read From:" in line]
    assert len(servers) == 2 and all("replica" in server for server in servers)
    assert conn.execute("SELECT count(*), count(DISTINCT k) FROM kv").fetchone() == (40, 40)


@pytest.mark.parametrize("sql", [
    "SELECT v FROM kv WHERE k = {} FOR UPDATE",
    "SELECT v FROM kv WHERE k = {} FOR SHARE",
    "SELECT * FROM (SELECT v FROM kv WHERE k = {} FOR KEY SHARE) q",
    "SELECT v, nextval('here') FROM kv WHERE k = {}",
    "SELECT v, random() FROM kv WHERE k = {}",
    "SELECT v FROM kv WHERE k = {} AND random() < 2",
    "SELECT v FROM kv WHERE k = {0} AND writes({0}) > 0",
    "WITH w AS (UPDATE kv SET v = v + 1 WHERE k = {0} RETURNING k) SELECT v FROM kv WHERE k = {0} AND EXISTS (SELECT FROM w)",
])
def test_what_is_not_only_a_read_goes_to_the_primary(place, conn, sql):
    assert role_of(conn, sql.format(place.keys[1][0])) == "primary"


def test_a_transaction_that_has_written_reads_what_it_wrote(place, conn):
    key, other = place.keys[0][1], place.keys[1][1]
    read, elsewhere = (f"SELECT v FROM kv WHERE k = {each}" for each in (key, other))
    with conn.transaction():
        assert role_of(conn, read) == "replica"
        new = raise_value(conn, key)
        assert value(conn, key) == new
        assert {role_of(conn, read), role_of(conn, elsewhere)} == {"primary"}
    conn.execute("CREATE TEMP TABLE mine (a int)")
    with conn.transaction():
        conn.execute("INSERT INTO mine VALUES (1)")
        assert server_of(conn, elsewhere) == ("shard-1", "the transaction has written")


def test_a_transaction_that_has_read_from_the_primary_stays_there(place, conn):
    key = place.keys[0][1]
    with conn.transaction():
        conn.execute(f"SELECT v FROM kv WHERE k = {key} FOR UPDATE")
        assert role_of(conn, f"SELECT v FROM kv WHERE k = {key}") == "primary"


@pytest.mark.parametrize("begin, role", [
    ("BEGIN", "replica"),
    ("BEGIN READ ONLY", "replica"),
    ("BEGIN ISOLATION LEVEL REPEATABLE READ", "primary"),
    ("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "replica"),
    ("BEGIN ISOLATION LEVEL SERIALIZABLE", "primary"),
    ("BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY", "primary"),
])
def test_isolation_levels(place, conn, begin, role):
    conn.execute(begin)
    assert role_of(conn, f"SELECT v FROM kv WHERE k = {place.keys[0][0]}") == role
    assert role_of(conn, "SELECT count(*) FROM kv") == role
    conn.execute("COMMIT")


def test_a_repeatable_read_is_one_snapshot_of_one_replica(place, conn):
    key = place.keys[0][2]
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    before, server = value(conn, key), server_of(conn, f"SELECT v FROM kv WHERE k = {key}")[0]
    with place.connect() as other:
        raise_value(other, key)
    place.cluster.wait_for_replicas()
    assert value(conn, key) == before
    assert server_of(conn, f"SELECT v FROM kv WHERE k = {key}") == (server, "the server that the transaction has read from")
    conn.execute("COMMIT")
    wait_until(lambda: value(conn, key) == before + 1)


def test_savepoints_and_cursors_on_replicas(place, conn):
    conn.execute("BEGIN")
    conn.execute("SAVEPOINT a")
    assert role_of(conn, f"SELECT v FROM kv WHERE k = {place.keys[0][0]}") == "replica"
    conn.execute("ROLLBACK TO a")
    assert role_of(conn, f"SELECT v FROM kv WHERE k = {place.keys[0][0]}") == "replica"
    conn.execute("DECLARE c CURSOR FOR SELECT k FROM kv ORDER BY k")
    assert [key for key, in conn.execute("FETCH 5 FROM c")] == [1, 2, 3, 4, 5]
    conn.execute("RELEASE a")
    assert [key for key, in conn.execute("FETCH ALL FROM c")] == list(range(6, 41))
    conn.execute("COMMIT")


def test_a_session_does_not_miss_its_own_writes(place, conn):
    key = place.keys[0][3]
    conn.execute("SET shardmap.catchup_timeout = 50")
    with place.paused(0, 0, 1):
        for _ in range(3):
            assert value(conn, key) == raise_value(conn, key) - 1
        assert server_of(conn, f"SELECT v FROM kv WHERE k = {key}")[0] == "shard-0"
        with place.connect(consistency="eventual") as other:
            assert value(other, key) < value(conn, key), "without consistency nothing is promised"


def test_a_token_carries_a_write_to_another_session(place, conn):
    key = place.keys[1][3]
    short = {"catchup_timeout": 50}
    with place.paused(1, 0, 1), place.connect(**short) as other, place.connect(consistency="token", **short) as third:
        old = value(other, key)
        new = raise_value(conn, key)
        token = conn.execute("SELECT shardmap.write_token()").fetchone()[0]
        assert value(other, key) == old == value(third, key), "nobody told them"
        for reader in (other, third):
            with reader.transaction():
                reader.execute(f"SET LOCAL shardmap.read_token = '{token}'")
                assert value(reader, key) == new
                assert conn.execute("SELECT shardmap.write_token()").fetchone()[0] is not None
        found = third.execute("SELECT server, role FROM shardmap.choose_replica('shard-1', token => %s)", [token]).fetchone()
        assert found == ("shard-1", "primary")
    place.settle()
    with place.connect(consistency="token", catchup_timeout=0) as reader:
        reader.execute(f"SET shardmap.read_token = '{token}'")
        assert role_of(reader, f"SELECT v FROM kv WHERE k = {key}") == "replica"
        assert value(reader, key) == new


def test_what_was_seen_on_one_replica_is_not_missed_on_another(place):
    key = place.keys[0][4]
    with place.connect(sticky_reads="off", catchup_timeout=0) as reader, place.connect() as writer:
        with place.paused(0, 1):
            new = raise_value(writer, key)
            wait_until(lambda: value(reader, key) == new)
            assert {value(reader, key) for _ in range(40)} == {new}
            token = reader.execute("SELECT shardmap.session_token()").fetchone()[0]
            with place.connect(consistency="token", sticky_reads="off") as other:
                other.execute(f"SET shardmap.read_token = '{token}'")
                assert {value(other, key) for _ in range(20)} == {new}


def test_a_replica_that_is_a_little_behind_is_waited_for(place, conn):
    key = place.keys[0][5]
    conn.execute("SET shardmap.catchup_timeout = '60s'")
    with place.paused(0, 0, 1):
        new, asked = raise_value(conn, key), place.questions(0)
        choice = Running(lambda: conn.execute("SELECT role, waited, reason FROM shardmap.choose_replica('shard-0')").fetchone())
        wait_until(lambda: place.questions(0) > asked + 2)
    role, waited, reason = choice.end()
    assert (role, reason) == ("replica", "a replica that has caught up") and waited.total_seconds() > 0
    assert (value(conn, key), role_of(conn, f"SELECT v FROM kv WHERE k = {key}")) == (new, "replica")


def test_a_wait_ends_with_the_statements_timeout(place, conn):
    raise_value(conn, place.keys[0][0])
    with place.paused(0, 0, 1):
        raise_value(conn, place.keys[0][0])
        conn.execute("SET shardmap.catchup_timeout = '60s'; SET statement_timeout = '300ms'")
        with pytest.raises(errors.QueryCanceled):
            value(conn, place.keys[0][0])


def test_the_primary_answers_for_a_while_after_a_write(place, conn):
    key = place.keys[0][6]
    conn.execute("SET shardmap.primary_after_write = '1h'")
    raise_value(conn, key)
    assert server_of(conn, f"SELECT v FROM kv WHERE k = {key}") == ("shard-0", "the session has just written there")
    assert role_of(conn, f"SELECT v FROM kv WHERE k = {place.keys[1][0]}") == "replica"


def test_lag_beyond_the_limit(place, conn):
    sql = f"SELECT v FROM kv WHERE k = {place.keys[0][0]}"
    conn.execute("SET shardmap.max_lag = '1h'")
    assert role_of(conn, sql) == "replica"
    conn.execute("SET shardmap.max_lag = 0")
    assert server_of(conn, sql) == ("shard-0", "no replica will do")
    conn.execute("SET shardmap.read_preference = replica")
    with pytest.raises(errors.ObjectNotInPrerequisiteState) as raised:
        conn.execute(sql)
    assert raised.value.diag.message_detail == (
        '"shard-0-replica-0": lags more than allowed; "shard-0-replica-1": lags more than allowed.')


def test_weights_zones_and_drained_replicas(place, conn):
    sql = f"SELECT v FROM kv WHERE k = {place.keys[0][0]}"
    conn.execute("SET shardmap.sticky_reads = off")
    used = lambda: {server_of(conn, sql)[0] for _ in range(60)}
    assert used() == {"shard-0-replica-0", "shard-0-replica-1"}
    try:
        conn.execute("SELECT shardmap.drain_replica('shard-0-replica-0')")
        assert used() == {"shard-0-replica-1"}
        conn.execute("SELECT shardmap.set_replica('shard-0-replica-1', weight => 0)")
        assert used() == {"shard-0"}
        conn.execute("SELECT shardmap.drain_replica('shard-0-replica-0', false),"
                     " shardmap.set_replica('shard-0-replica-1', weight => 1, zone => 'b')")
        conn.execute("SET shardmap.zone = 'b'")
        wait_until(lambda: used() == {"shard-0-replica-1"})
    finally:
        conn.execute("SELECT shardmap.drain_replica('shard-0-replica-0', false),"
                     " shardmap.set_replica('shard-0-replica-1', weight => 1, zone => '')")
    conn.execute("SET shardmap.sticky_reads = on")
    assert len(used()) == 1


def test_changes_of_replicas_hold_for_the_next_statement_of_other_sessions(place, conn):
    sql = f"SELECT v FROM kv WHERE k = {place.keys[0][0]}"
    replicas = ["shard-0-replica-0", "shard-0-replica-1"]
    with place.connect(sticky_reads="off") as admin:
        # A change and the next statement, again and again: nobody has the time to wait for anything.
        for number in range(20):
            taken, left = replicas[number % 2], replicas[1 - number % 2]
            admin.execute("SELECT shardmap.set_replica(%s, weight => 0), shardmap.set_replica(%s, weight => 1)", [taken, left])
            assert server_of(conn, sql)[0] == left
            admin.execute("BEGIN; SELECT shardmap.set_replica('shard-0-replica-0', weight => 0); ROLLBACK")
            assert server_of(conn, sql)[0] == left
        admin.execute("SELECT shardmap.set_replica(name, weight => 1) FROM shardmap.replica WHERE shard = 'shard-0'")
        for taken, left in zip(replicas, reversed(replicas)):
            admin.execute("SELECT shardmap.drain_replica(%s)", [taken])
            assert server_of(conn, sql)[0] == left
            # The sampler takes it out too, and brings it back a moment after it is told to.
            rotation = lambda: admin.execute("SELECT rotation FROM shardmap.replica_state WHERE replica = %s", [taken]).fetchone()[0]
            wait_until(lambda: rotation() == "drained")
            admin.execute("SELECT shardmap.drain_replica(%s, false)", [taken])
            wait_until(lambda: rotation() == "in")
