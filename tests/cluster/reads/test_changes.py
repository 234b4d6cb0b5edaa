"""What a session remembers of its reads and writes while replicas come and go, and what does not count as a read."""

import pytest
from places import role_of, server_of
from psycopg import errors
from test_reads import raise_value, value


@pytest.mark.parametrize("sticky", ["on", "off"])
def test_a_dropped_replica_is_no_matter_to_who_read_from_it(place, sticky):
    key = place.keys[0][0]
    sql = f"SELECT v FROM kv WHERE k = {key}"
    with place.connect(sticky_reads=sticky) as conn, place.connect() as admin, place.connect() as reader:
        for session in (conn, reader):
            session.execute("SET shardmap.zone = 'x'")
        admin.execute("SELECT shardmap.set_replica('shard-0-replica-1', zone => 'x')")
        assert server_of(conn, sql)[0] == "shard-0-replica-1"
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        assert server_of(reader, sql)[0] == "shard-0-replica-1"
        admin.execute("SELECT shardmap.drop_replica('shard-0-replica-1')")
        try:
            assert server_of(conn, sql)[0] == "shard-0-replica-0"
            assert conn.execute("SELECT shardmap.session_token()").fetchone()[0] is not None
            raise_value(conn, key)
            assert value(conn, key) is not None
            with pytest.raises(errors.UndefinedObject) as raised:
                value(reader, key)
            assert raised.value.diag.message_hint == "Repeat the transaction."
            reader.execute("ROLLBACK")
            assert value(reader, key) is not None
        finally:
            replica = place.replica(0, 1)
            admin.execute(f"SELECT shardmap.add_replica('shard-0', 'shard-0-replica-1', '127.0.0.1', {replica.port})")


@pytest.mark.parametrize("consistency", ["session", "token", "eventual"])
def test_the_primary_answers_for_a_while_under_any_consistency(place, conn, consistency):
    key = place.keys[0][6]
    conn.execute(f"SET shardmap.primary_after_write = '1h'; SET shardmap.consistency = {consistency}")
    assert role_of(conn, f"SELECT v FROM kv WHERE k = {key}") == "replica"
    raise_value(conn, key)
    assert server_of(conn, f"SELECT v FROM kv WHERE k = {key}") == ("shard-0", "the session has just written there")


@pytest.mark.parametrize("observed", [False, True])
def test_a_token_that_comes_after_the_snapshot_is_an_error(place, conn, observed):
    key = place.keys[0][7]
    with place.connect() as writer:
        raise_value(writer, key)
        old = writer.execute("SELECT shardmap.write_token()").fetchone()[0]
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        conn.execute(f"SET LOCAL shardmap.read_token = '{old}'")
        before = value(conn, key)
        assert value(conn, key) == before
        raise_value(writer, key)
        new = writer.execute("SELECT shardmap.write_token()").fetchone()[0]
    conn.execute(f"SELECT shardmap.observe('{new}')" if observed else f"SET LOCAL shardmap.read_token = '{new}'")
    with pytest.raises(errors.ActiveSqlTransaction) as raised:
        value(conn, key)
    assert raised.value.diag.message_primary == 'the transaction\'s snapshot of shard "shard-0" is older than what the read must not miss'
    assert "before the transaction's first read" in raised.value.diag.message_hint
    conn.execute("ROLLBACK")


def test_a_token_of_what_the_snapshot_has_may_come_late(place, conn):
    key = place.keys[0][7]
    with place.connect() as writer:
        raise_value(writer, key)
        token = writer.execute("SELECT shardmap.write_token()").fetchone()[0]
    place.settle()
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    before = value(conn, key)
    conn.execute(f"SET LOCAL shardmap.read_token = '{token}'")
    assert value(conn, key) == before
    conn.execute("COMMIT")


@pytest.mark.parametrize("call", [
    "SELECT success FROM shardmap.run_on_each(ARRAY['shard-0'], $$%s$$)",
    "SELECT bool_and(success) FROM shardmap.run_on_shards($$%s$$)",
    "SELECT shardmap.remote_execute('shard-0', $$%s$$, false) IS NOT NULL",
])
def test_what_administrators_run_on_shards_is_written_by_the_session(place, conn, call):
    key = place.keys[0][8]
    conn.execute("SET shardmap.catchup_timeout = 50")
    before = value(conn, key)
    with place.paused(0, 0, 1):
        update = f"UPDATE public.kv SET v = v + 1 WHERE k = {key}"
        assert conn.execute(call % update).fetchone() == (True,)
        assert value(conn, key) == before + 1
        assert conn.execute("SELECT shardmap.write_token()").fetchone()[0] is not None


@pytest.mark.parametrize("sql", [
    "CREATE TABLE made AS SELECT v FROM kv WHERE k = {}",
    "SELECT v INTO made FROM kv WHERE k = {}",
    "CREATE MATERIALIZED VIEW made AS SELECT v FROM kv WHERE k = {}",
])
def test_what_makes_a_table_reads_from_the_primary(place, conn, sql):
    key = place.keys[0][9]
    conn.execute("SET shardmap.consistency = eventual")
    with place.paused(0, 0, 1), place.connect() as writer:
        new = raise_value(writer, key)
        assert value(conn, key) < new, "the test needs replicas that are behind"
        conn.execute(sql.format(key))
        try:
            assert conn.execute("SELECT v FROM made").fetchone() == (new,)
        finally:
            conn.execute("DROP MATERIALIZED VIEW made" if "VIEW" in sql else "DROP TABLE made")


def test_arguments(place, conn):
    assert conn.execute("SELECT shardmap.current_token(ARRAY['shard-0', 'shard-0']) IS NOT NULL").fetchone() == (True,)
    assert conn.execute("SELECT server FROM shardmap.choose_replica(NULL)").fetchone() == (None,)
    assert conn.execute("SELECT replica_for(NULL::text)").fetchone() == (None,)
    with pytest.raises(errors.NullValueNotAllowed):
        conn.execute("SELECT shardmap.drain_replica('shard-0-replica-0', NULL)")
    with pytest.raises(errors.InvalidParameterValue, match="max_lag must not be negative"):
        conn.execute("SELECT shardmap.choose_replica('shard-0', max_lag => '-1 s')")
    with pytest.raises(errors.InvalidParameterValue) as raised:
        conn.execute("SET shardmap.read_token = 'abc'")
    assert raised.value.diag.message_hint.startswith("Pass on, unchanged, what shardmap.write_token()")
