"""Tokens: what they stand for, who may use them, and what is said of texts that are none."""

import psycopg
import pytest
from asking import Database
from cluster import Cluster
from psycopg import errors

SETUP = """
    CREATE TABLE kv (k int PRIMARY KEY, v int);
    SELECT shardmap.distribute_table('kv', 'k');
    INSERT INTO kv SELECT g, 0 FROM generate_series(1, 20) g;
"""


@pytest.fixture(scope="module")
def place():
    with Cluster(shards=2, layout="servers", shard_settings={"log_statement": "all"}) as cluster:
        cluster.psql(SETUP)
        database = Database(cluster, "app")
        yield database
        database.close()


@pytest.fixture
def conn(place):
    with place.connect() as conn:
        yield conn


def token(conn, function="write_token()"):
    return conn.execute(f"SELECT shardmap.{function}").fetchone()[0]


def key_of(place, conn, shard):
    return next(key for key in range(1, 21) if conn.execute("SELECT shard_for(%s)", [key]).fetchone()[0] == f"shard-{shard}")


def size(text):
    """How many shards a token names: its layout is 15 bytes, and 20 for each."""
    return (len(text) * 3 // 4 - 15) // 20


def test_a_session_that_has_done_nothing_has_none(conn):
    assert token(conn) is None
    assert token(conn, "session_token()") is None


def test_a_write_token_names_the_shards_written(place, conn):
    conn.execute("UPDATE kv SET v = v + 1 WHERE k = %s", [key_of(place, conn, 0)])
    first = token(conn)
    assert size(first) == 1
    assert token(conn) == first, "nothing was written since"
    with conn.transaction():
        for shard in (0, 1):
            conn.execute("UPDATE kv SET v = v + 1 WHERE k = %s", [key_of(place, conn, shard)])
    assert size(token(conn)) == 2


def test_reads_and_rolled_back_writes_give_no_write_token(place, conn):
    conn.execute("SELECT * FROM kv WHERE k = %s", [key_of(place, conn, 0)])
    with conn.transaction(force_rollback=True):
        conn.execute("UPDATE kv SET v = v + 1 WHERE k = %s", [key_of(place, conn, 1)])
    assert token(conn) is None
    assert size(token(conn, "session_token()")) == 2, "also what was undone has seen its shard"


def test_a_token_comes_in_the_transaction_that_is_chained(place, conn):
    """As it must behind a transaction pooler, where the next statement may find another session."""
    conn.execute("BEGIN")
    conn.execute("UPDATE kv SET v = v + 1 WHERE k = %s", [key_of(place, conn, 1)])
    conn.execute("COMMIT AND CHAIN")
    assert size(token(conn)) == 1
    conn.execute("COMMIT")


def test_whoever_asks_for_no_token_pays_nothing(place, conn):
    before = positions_asked(place)
    conn.execute("UPDATE kv SET v = v + 1 WHERE k = %s", [key_of(place, conn, 0)])
    conn.execute("SELECT * FROM kv WHERE k = %s", [key_of(place, conn, 0)])
    assert positions_asked(place) == before
    token(conn)
    assert positions_asked(place) == before + 1


def positions_asked(place):
    return sum(server.log.read_text(errors="replace").count("pg_control_system") for server in place.cluster.shard_servers)


def test_the_current_token_stands_for_everybodys_writes(place, conn):
    every = token(conn, "current_token()")
    assert size(every) == 2
    one = token(conn, "current_token(ARRAY['shard-1'])")
    assert size(one) == 1
    assert size(token(conn, f"merge_tokens('{every}', NULL, '', '{one}')")) == 2
    with pytest.raises(errors.UndefinedObject, match='shard "nowhere" does not exist'):
        token(conn, "current_token(ARRAY['nowhere'])")


def test_merging_is_idempotent_and_grows(conn):
    old = token(conn, "current_token()")
    conn.execute("UPDATE kv SET v = v + 1 WHERE k = 1")
    new = token(conn, "current_token()")
    assert old != new
    assert token(conn, f"merge_tokens('{old}', '{new}', '{old}')") == new
    assert token(conn, "merge_tokens(VARIADIC ARRAY[]::text[])") is None


def test_an_observed_token_is_in_the_sessions(place, conn):
    with place.connect() as other:
        other.execute("UPDATE kv SET v = v + 1 WHERE k = 2")
        given = token(other)
    conn.execute("SELECT shardmap.observe(%s)", [given])
    assert token(conn, "session_token()") == given
    assert token(conn) is None, "it was not written here"


@pytest.mark.parametrize("text", ["abc", "0/16B3748", "AQEj", "ä", " "])
def test_what_is_no_token_is_refused(conn, text):
    with pytest.raises(errors.InvalidParameterValue) as raised:
        conn.execute("SELECT set_config('shardmap.read_token', %s, false)", [text])
    assert "token" in raised.value.diag.message_detail
    for function in ("observe(%s)", "merge_tokens(%s)", "choose_replica('shard-0', token => %s)"):
        with pytest.raises(errors.InvalidParameterValue, match="invalid read token"):
            conn.execute(f"SELECT * FROM shardmap.{function}", [text])


def test_a_token_of_another_database_is_refused(place, conn):
    own = token(conn, "current_token()")
    place.cluster.new_database("elsewhere")
    try:
        with psycopg.connect(place.cluster.dsn("elsewhere"), autocommit=True) as other:
            foreign = token(other, "current_token()")
            assert foreign != own
            with pytest.raises(errors.InvalidParameterValue) as raised:
                other.execute(f"SET shardmap.read_token = '{own}'")
            assert raised.value.diag.message_detail == "The token is of another cluster or database."
    finally:
        place.cluster.drop_database("elsewhere")


def test_a_token_set_for_a_role_is_looked_at_when_it_is_used(place, conn):
    """At login the database is not known when the setting is read, and a foreign token must not keep anybody out."""
    own = token(conn, "current_token()")
    place.cluster.psql(f"CREATE ROLE holder LOGIN; ALTER ROLE holder SET shardmap.read_token = '{own}'")
    with place.connect("holder") as holder:
        assert holder.execute("SHOW shardmap.read_token").fetchone()[0] == own


def test_a_token_survives_the_coordinators_restart(place):
    with place.connect() as conn:
        own = token(conn, "current_token()")
    place.cluster.coordinator.restart()
    with place.connect() as conn:
        conn.execute(f"SET shardmap.read_token = '{own}'")


def test_without_replicas_the_primary_answers_or_nobody(place, conn):
    key = key_of(place, conn, 0)
    found = conn.execute("SELECT server, role, reason FROM shardmap.choose_replica('shard-0')").fetchone()
    assert found == ("shard-0", "primary", "no replica will do")
    assert conn.execute("SELECT replica_for(%s), replica_for(%s::text)", [key, key]).fetchone() == ("shard-0", "shard-0")
    conn.execute("SET shardmap.read_preference = prefer_replica")
    plan = [line for line, in conn.execute(f"EXPLAIN SELECT * FROM kv WHERE k = {key}")]
    assert "  Read From: shard-0" in plan and "  Read From Because: no replica will do" in plan
    conn.execute("SET shardmap.read_preference = replica")
    with pytest.raises(errors.ObjectNotInPrerequisiteState) as raised:
        conn.execute("SELECT * FROM kv WHERE k = %s", [key])
    assert raised.value.diag.message_primary == 'no replica of shard "shard-0" can answer this read'
    assert raised.value.diag.message_detail == "It has no replicas."
    conn.execute("SELECT * FROM kv WHERE k = %s FOR UPDATE", [key])
