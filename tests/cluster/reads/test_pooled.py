"""Tokens through a real PgBouncer: in transaction mode a request may find any session, which knows nothing of the one before; in
session mode the next client gets the session of another, and must inherit nothing."""

import contextlib

import pgbouncer
import psycopg
import pytest
from places import role_of, wait_until
from psycopg import errors

SETTINGS = ("SET LOCAL shardmap.read_preference = prefer_replica; SET LOCAL shardmap.consistency = token;"
            " SET LOCAL shardmap.catchup_timeout = 50")


@contextlib.contextmanager
def pooled(place, size, **settings):
    if not pgbouncer.fetch():
        pytest.skip("there is no PgBouncer here")
    databases = [f"app = host=127.0.0.1 port={place.cluster.coordinator.port} dbname=app user=postgres pool_size={size}"]
    with pgbouncer.pgbouncer(place.cluster.directory / "pgbouncer", databases, "app", **settings) as port:
        yield f"host=127.0.0.1 port={port} dbname=app user=postgres"


@pytest.fixture
def pooler(place):
    with pooled(place, 2, pool_mode="transaction", server_reset_query_always=0) as dsn:
        yield dsn


@pytest.fixture
def one_session(place):
    """DISCARD ALL between clients is what PgBouncer does by itself."""
    with pooled(place, 1, pool_mode="session") as dsn:
        yield dsn


@contextlib.contextmanager
def client(pooler):
    with psycopg.connect(pooler, autocommit=True, prepare_threshold=None) as conn:
        yield conn


def request(conn, sql, token=None):
    """A transaction of a web request."""
    conn.execute("BEGIN")
    conn.execute(SETTINGS + (f"; SET LOCAL shardmap.read_token = '{token}'" if token else ""))
    row = conn.execute(sql).fetchone()
    conn.execute("COMMIT")
    return row


def test_a_token_is_for_its_request_alone(place, pooler):
    key = place.keys[0][5]
    read = f"SELECT v, pg_backend_pid() FROM kv WHERE k = {key}"
    with client(pooler) as writer, client(pooler) as reader, place.paused(0, 0, 1):
        old = request(reader, read)[0]
        writer.execute("BEGIN")
        new = writer.execute(f"UPDATE kv SET v = v + 1 WHERE k = {key} RETURNING v").fetchone()[0]
        writer.execute("COMMIT AND CHAIN")
        token = writer.execute("SELECT shardmap.write_token()").fetchone()[0]
        writer.execute("COMMIT")
        # The same sessions, by turns: with the token the write is there, without it nothing of it is left behind.
        seen = [(request(reader, read, token)[0], request(reader, read)[0]) for _ in range(6)]
        assert set(seen) == {(new, old)}
        # Both sessions of the pool.
        other = client(pooler)
        with other as conn:
            conn.execute("BEGIN")
            busy = conn.execute("SELECT pg_backend_pid()").fetchone()[0]
            pid = lambda: request(reader, "SELECT pg_backend_pid()")[0]
            wait_until(lambda: pid() != busy)
            assert (request(reader, read, token)[0], request(reader, read)[0]) == (new, old)
            conn.execute("COMMIT")
    place.settle()
    with client(pooler) as reader:
        assert request(reader, read, token)[0] == new
        assert reader.execute("SHOW shardmap.read_token").fetchone()[0] == "", "SET LOCAL ends with its transaction"


def prefer_replicas(conn):
    conn.execute("SET shardmap.read_preference = prefer_replica; SET shardmap.catchup_timeout = 50")
    return conn.execute("SELECT pg_backend_pid()").fetchone()[0]


TOKENS = "SELECT shardmap.write_token(), shardmap.session_token(), current_setting('shardmap.read_token')"


def test_the_next_client_of_a_session_inherits_nothing(place, one_session):
    key = place.keys[0][5]
    read = f"SELECT v FROM kv WHERE k = {key}"
    with place.paused(0, 0, 1):
        with client(one_session) as first:
            pid = prefer_replicas(first)
            old = first.execute(read).fetchone()[0]
            assert role_of(first, read) == "replica"
            new = first.execute(f"UPDATE kv SET v = v + 1 WHERE k = {key} RETURNING v").fetchone()[0]
            token = first.execute("SELECT shardmap.write_token()").fetchone()[0]
            first.execute(f"SET shardmap.read_token = '{token}'; SELECT shardmap.observe('{token}')")
            assert (first.execute(read).fetchone()[0], role_of(first, read)) == (new, "primary")
            run = "SELECT shardmap.remote_execute(%s, %s, %s)"
            first.execute(run, ["shard-0", "CREATE TEMP TABLE mine (a int)", False])
            first.execute(run, ["shard-1", "SET application_name = 'mine'", True])
        with client(one_session) as second:
            assert prefer_replicas(second) == pid, "the test needs the same session"
            assert second.execute(TOKENS).fetchone() == (None, None, "")
            assert (second.execute(read).fetchone()[0], role_of(second, read)) == (old, "replica")
            rows = "SELECT r FROM shardmap.remote_rows(%s, %s, %s) r"
            assert second.execute(rows, ["shard-0", "SELECT to_regclass('pg_temp.mine')", False]).fetchone() == ([None],)
            assert second.execute(rows, ["shard-1", "SHOW application_name", True]).fetchone()[0] != ["mine"]
            # What it carries itself counts.
            second.execute(f"SET shardmap.read_token = '{token}'")
            assert (second.execute(read).fetchone()[0], role_of(second, read)) == (new, "primary")


def test_what_else_is_discarded_forgets_nothing(place, conn):
    key = place.keys[0][6]
    conn.execute("SET shardmap.catchup_timeout = 50")
    with place.paused(0, 0, 1):
        new = conn.execute(f"UPDATE kv SET v = v + 1 WHERE k = {key} RETURNING v").fetchone()[0]
        for what in ("PLANS", "TEMP", "SEQUENCES"):
            conn.execute(f"DISCARD {what}")
        with pytest.raises(errors.ActiveSqlTransaction), conn.transaction():
            conn.execute("DISCARD ALL")
        assert conn.execute(f"SELECT v FROM kv WHERE k = {key}").fetchone()[0] == new
        assert conn.execute("SELECT shardmap.write_token()").fetchone()[0] is not None
