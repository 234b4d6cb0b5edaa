"""What the sampler says while the network between the servers is cut or slow: from a primary to its replica, and from the
coordinator to a replica."""

import contextlib
import os
import signal
from datetime import timedelta

import pytest
from proxy import TO_CLIENT, Proxy
from replicas_place import caught_up, eventually, lag, standing

REPLICA = "shard-0-replica-0"
ZERO = timedelta(0)


def write(cluster):
    cluster.shard_psql(0, "INSERT INTO written VALUES (now())")


@pytest.fixture
def stream(cluster, conn):
    """The replica's stream goes through a proxy."""
    server = cluster.replica_server(0, 0)
    caught_up(conn, REPLICA)
    good = server.psql("SHOW primary_conninfo")
    with Proxy(port=cluster.shard_server(0).port) as proxy:
        follow(server, f"host=127.0.0.1 port={proxy.port} user=postgres sslmode=disable")
        receiver = "SELECT status, sender_port FROM pg_stat_wal_receiver"
        eventually(lambda: server.psql(receiver), lambda row: row == f"streaming|{proxy.port}")
        caught_up(conn, REPLICA)
        try:
            yield proxy
        finally:
            proxy.clear()
            follow(server, good)
    caught_up(conn, REPLICA)


def follow(server, conninfo):
    server.psql(f"ALTER SYSTEM SET primary_conninfo = '{conninfo.replace(chr(39), chr(39) * 2)}'")
    server.psql("SELECT pg_reload_conf()")


def test_a_stream_that_is_held_up_is_lag(cluster, conn, stream):
    """The receiver runs and hears nothing: the replica does not know that it misses anything, we do."""
    stream.stall(TO_CLIENT)
    write(cluster)
    row = eventually(lambda: lag(conn, REPLICA), lambda row: row["lag"] and row["lag"] > timedelta(seconds=1))
    assert row["state"] == "replica" and row["receiver"] == "running"
    assert row["lag_bytes"] > 0 and row["receive_lsn"] == row["replay_lsn"]
    stream.resume()
    caught_up(conn, REPLICA)


def test_a_stream_that_is_cut_is_unknown(cluster, conn, stream):
    stream.refuse()
    stream.end(reset=True)
    write(cluster)
    row = standing(conn, REPLICA, "unknown", "WAL receiver is not running")
    assert row["lag"] is None and row["lag_bytes"] >= 0
    stream.accept()
    caught_up(conn, REPLICA)


def test_a_receiver_that_is_killed_comes_back(cluster, conn):
    server = cluster.replica_server(0, 0)
    caught_up(conn, REPLICA)
    pid = eventually(lambda: server.psql("SELECT pid FROM pg_stat_wal_receiver"), bool)
    os.kill(int(pid), signal.SIGTERM)
    standing(conn, REPLICA, "unknown", "WAL receiver is not running")
    eventually(lambda: server.psql("SELECT pid FROM pg_stat_wal_receiver"), lambda now: now not in ("", pid))
    write(cluster)
    caught_up(conn, REPLICA)


@contextlib.contextmanager
def before_replica(cluster, conn):
    """The coordinator reaches the replica through a proxy."""
    port = cluster.replica_server(0, 0).port
    with Proxy(port=port) as proxy:
        conn.execute(f"ALTER SERVER \"{REPLICA}\" OPTIONS (SET port '{proxy.port}')")
        try:
            eventually(lambda: len(proxy.links), bool)
            caught_up(conn, REPLICA)
            yield proxy
        finally:
            conn.execute(f"ALTER SERVER \"{REPLICA}\" OPTIONS (SET port '{port}')")
    caught_up(conn, REPLICA)


def test_a_replica_that_cannot_be_reached_is_unknown(cluster, conn):
    with before_replica(cluster, conn) as proxy:
        proxy.refuse()
        proxy.end(reset=True)
        row = standing(conn, REPLICA, "unknown", "not reachable")
        assert (row["lag"], row["lag_bytes"], row["round_trip_ms"]) == (None, None, None)
        proxy.accept()
        caught_up(conn, REPLICA)
        proxy.stall()
        row = standing(conn, REPLICA, "unknown", "no answer in time")
        assert row["lag"] is None
        other = lag(conn, "shard-0-replica-1")["sampled_at"]
        eventually(lambda: lag(conn, "shard-0-replica-1"), lambda row: row["sampled_at"] > other)
        proxy.resume()
        caught_up(conn, REPLICA)


def test_a_slow_way_is_a_long_round_trip_and_no_lag(cluster, conn):
    with before_replica(cluster, conn) as proxy:
        proxy.on("delay", TO_CLIENT, types="T", times=None, seconds=0.3)
        # What a primary writes by itself while the answer is on its way is lag.
        eventually(lambda: lag(conn, REPLICA), lambda row: row["round_trip_ms"] and row["round_trip_ms"] >= 300
                   and (row["state"], row["lag"]) == ("replica", ZERO))
        proxy.clear()
        eventually(lambda: lag(conn, REPLICA), lambda row: row["round_trip_ms"] and row["round_trip_ms"] < 300)
