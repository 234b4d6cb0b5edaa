"""Tokens through a real PgBouncer in transaction mode: a request may find any session, which knows nothing of the one before."""

import contextlib

import pgbouncer
import psycopg
import pytest
from places import wait_until

SETTINGS = ("SET LOCAL shardmap.read_preference = prefer_replica; SET LOCAL shardmap.consistency = token;"
            " SET LOCAL shardmap.catchup_timeout = 50")


@pytest.fixture
def pooler(place):
    if not pgbouncer.fetch():
        pytest.skip("there is no PgBouncer here")
    databases = [f"app = host=127.0.0.1 port={place.cluster.coordinator.port} dbname=app user=postgres pool_size=2"]
    with pgbouncer.pgbouncer(place.cluster.directory / "pgbouncer", databases, "app", pool_mode="transaction",
                             server_reset_query_always=0) as port:
        yield f"host=127.0.0.1 port={port} dbname=app user=postgres"


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
