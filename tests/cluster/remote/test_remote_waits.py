"""Waiting for a shard: cancel, timeout, termination, and shards that are lost or cannot be reached."""

import contextlib
import os
import signal
import socket
import time

import psycopg
import pytest
from patience import PATIENCE, wait_until
from psycopg import errors
from remote_place import SLEEP, address, everywhere, execute, keys, rows, run_in_thread, server

# In /proc/net/tcp: a state, and timers.
ESTABLISHED, RETRANSMISSION, KEEPALIVE = "01", "01", "02"


@contextlib.contextmanager
def silent_port():
    """A port that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_connect_timeout(conn):
    """The server's goes before the session's."""
    with silent_port() as port, server(conn, "silent", host="127.0.0.1", port=port, connect_timeout=2):
        conn.execute("SET shardmap.connect_timeout = '1h'")
        begin = time.monotonic()
        with pytest.raises(errors.SqlclientUnableToEstablishSqlconnection, match="connect_timeout"):
            rows(conn, "SELECT 1", "silent")
        assert time.monotonic() - begin > 1.5
        conn.execute("RESET shardmap.connect_timeout")


def test_connect_timeout_of_the_session(place, conn):
    with silent_port() as port, server(conn, "silent", host="127.0.0.1", port=port), \
            place.connect(options="-c shardmap.connect_timeout=1h") as session:
        session.execute("SET shardmap.connect_timeout = 2")
        begin = time.monotonic()
        with pytest.raises(errors.SqlclientUnableToEstablishSqlconnection, match="connect_timeout"):
            rows(session, "SELECT 1", "silent")
        assert time.monotonic() - begin > 1.5


@pytest.mark.parametrize("options, within", [({}, range(1, 61)), ({"keepalives_idle": 900}, range(61, 901)),
                                             ({"keepalives": 0}, None)])
def test_keepalives(place, conn, options, within):
    """The kernel's timer of the coordinator's socket: source, Documentation/networking/proc_net_tcp: 2 is keepalive."""
    with server(conn, "alive", **address(place), **options):
        [ports] = rows(conn, "SELECT inet_client_port(), inet_server_port()", "alive")

        def timer():
            with open("/proc/net/tcp") as table:
                sockets = [line.split() for line in table]
            # A port may still be kept for a connection that has ended, or serve one to another place.
            ends = [f":{int(port):04X}" for port in ports]
            [found] = [each[5] for each in sockets if [each[1][-5:], each[2][-5:]] == ends and each[3] == ESTABLISHED]
            kind, hundredths = found.split(":")
            return None if kind == RETRANSMISSION else (kind, int(hundredths, 16))
        # What was sent last may not have been acknowledged yet.
        kind, hundredths = wait_until(timer)
        if within is None:
            assert kind != KEEPALIVE
        else:
            assert kind == KEEPALIVE and hundredths // 100 + 1 in within


def test_cancel_while_connecting(conn):
    with silent_port() as port, server(conn, "silent", host="127.0.0.1", port=port):
        conn.execute("SET shardmap.connect_timeout = '1h'; SET statement_timeout = '300ms'")
        with pytest.raises(errors.QueryCanceled):
            rows(conn, "SELECT 1", "silent")
        conn.execute("RESET statement_timeout; RESET shardmap.connect_timeout")


@pytest.mark.parametrize("transactional", [True, False])
def test_cancel(place, conn, transactional):
    thread, caught = run_in_thread(lambda: rows(conn, SLEEP, transactional=transactional))
    place.wait_for_shard(1)
    conn.cancel_safe()
    thread.join(PATIENCE)
    assert isinstance(caught[0], errors.QueryCanceled)
    place.wait_for_shard(0)
    assert rows(conn, "SELECT 1", transactional=transactional) == [["1"]]


def test_statement_timeout(place, conn):
    conn.execute("SET statement_timeout = '300ms'")
    with pytest.raises(errors.QueryCanceled, match="statement timeout"):
        rows(conn, SLEEP)
    conn.execute("RESET statement_timeout")
    place.wait_for_shard(0)
    assert rows(conn, "SELECT 1") == [["1"]]


def test_cancelled_transaction_frees_its_locks(place, conn):
    with place.shard() as other:
        other.execute("INSERT INTO public.t VALUES (1), (2)")
        other.execute("BEGIN; UPDATE public.t SET b = 'x' WHERE a = 2")
        conn.execute("BEGIN")
        execute(conn, "UPDATE public.t SET b = 'y' WHERE a = 1")
        conn.execute("SET LOCAL statement_timeout = '300ms'")
        with pytest.raises(errors.QueryCanceled):
            execute(conn, "UPDATE public.t SET b = 'y' WHERE a = 2")
        conn.execute("ROLLBACK")
        other.execute("SET lock_timeout = '60s'; UPDATE public.t SET b = 'z' WHERE a = 1; COMMIT")


def test_terminated_backend_ends_the_shards_query(place, conn):
    victim = place.connect()
    thread, _ = run_in_thread(lambda: rows(victim, SLEEP))
    place.wait_for_shard(1)
    conn.execute("SELECT pg_terminate_backend(%s)", (victim.info.backend_pid,))
    thread.join(PATIENCE)
    place.wait_for_shard(0)


def test_terminated_backend_ends_all_shards_queries(place, conn):
    victim = place.connect()
    thread, _ = run_in_thread(lambda: everywhere(victim, SLEEP))
    for number in range(3):
        place.wait_for_shard(1, number)
    conn.execute("SELECT pg_terminate_backend(%s)", (victim.info.backend_pid,))
    thread.join(PATIENCE)
    for number in range(3):
        place.wait_for_shard(0, number)


def shard_pid(conn, transactional=True):
    return int(rows(conn, "SELECT pg_backend_pid()", transactional=transactional)[0][0])


def terminate(place, pid):
    with place.shard() as shard:
        shard.execute("SELECT pg_terminate_backend(%s, 60000)", (pid,))


def test_idle_connection_that_died_is_replaced(place, conn):
    for transactional in (True, False):
        pid = shard_pid(conn, transactional)
        assert shard_pid(conn, transactional) == pid
        terminate(place, pid)
        assert shard_pid(conn, transactional) != pid


def test_connection_lost_in_a_transaction(place, conn):
    with pytest.raises(errors.ConnectionFailure, match='connection to shard "shard-0" was lost'), conn.transaction():
        execute(conn, "INSERT INTO public.t VALUES (1)")
        terminate(place, shard_pid(conn))
        execute(conn, "INSERT INTO public.t VALUES (2)")
    assert keys(place) == []
    assert rows(conn, "SELECT 1") == [["1"]]


def test_connection_lost_at_commit(place, conn):
    conn.execute("BEGIN")
    execute(conn, "INSERT INTO public.t VALUES (1)")
    terminate(place, shard_pid(conn))
    with pytest.raises(errors.TransactionResolutionUnknown, match="during COMMIT"):
        conn.execute("COMMIT")
    assert keys(place) == []
    assert rows(conn, "SELECT 1") == [["1"]]


def test_lost_transaction_does_not_go_on(place, conn):
    """The loss is caught in a savepoint: the work before it is gone, so that the transaction must not commit."""
    with pytest.raises(errors.InFailedSqlTransaction, match="has lost its connection"), conn.transaction():
        execute(conn, "INSERT INTO public.t VALUES (1)")
        with pytest.raises(errors.ConnectionFailure), conn.transaction():
            terminate(place, shard_pid(conn))
            execute(conn, "INSERT INTO public.t VALUES (2)")
        with pytest.raises(errors.InFailedSqlTransaction), conn.transaction():
            execute(conn, "INSERT INTO public.t VALUES (3)")
    assert keys(place) == []


def test_loss_within_a_savepoint_only_is_harmless(place, conn):
    with conn.transaction():
        execute(conn, "INSERT INTO public.t VALUES (1)", "shard-1")
        with pytest.raises(errors.ConnectionFailure), conn.transaction():
            execute(conn, "INSERT INTO public.t VALUES (2)")
            terminate(place, shard_pid(conn))
            execute(conn, "INSERT INTO public.t VALUES (3)")
        execute(conn, "INSERT INTO public.t VALUES (4)")
    assert (keys(place, 0), keys(place, 1)) == ([4], [1])


def checkpointer(place):
    """Its process on the shard, another one after each crash; None: the shard does not answer."""
    with contextlib.suppress(psycopg.OperationalError), place.shard() as shard:
        return shard.execute("SELECT max(pid) FROM pg_stat_activity WHERE backend_type = 'checkpointer'").fetchone()[0]


def test_killed_shard_backend(place, conn):
    """SIGKILL makes the whole shard server restart; the error is clear and the layer recovers by itself."""
    conn.execute("BEGIN")
    pid = shard_pid(conn)
    thread, caught = run_in_thread(lambda: rows(conn, SLEEP))
    place.wait_for_shard(1)
    before = checkpointer(place)
    os.kill(pid, signal.SIGKILL)
    thread.join(PATIENCE)
    assert isinstance(caught[0], errors.ConnectionFailure)
    conn.execute("ROLLBACK")
    wait_until(lambda: checkpointer(place) not in (None, before))

    def recovers():
        # The first may still reach the server that is about to notice, and be ended with it.
        with contextlib.suppress(errors.SqlclientUnableToEstablishSqlconnection, errors.ConnectionFailure):
            return rows(conn, "SELECT 1") == [["1"]]
    wait_until(recovers)


def test_changed_server_is_noticed(place, conn):
    with server(conn, "wandering", **address(place, 0)):
        where = "SELECT current_database()"
        old, new = address(place, 0)["dbname"], address(place, 1)["dbname"]
        assert rows(conn, where, "wandering") == [[old]]
        with conn.transaction():
            assert rows(conn, where, "wandering") == [[old]]
            with place.connect() as other:
                other.execute(f"ALTER SERVER wandering OPTIONS (SET dbname '{new}')")
            assert rows(conn, where, "wandering") == [[old]]
        assert rows(conn, where, "wandering") == [[new]]
        conn.execute("ALTER USER MAPPING FOR CURRENT_USER SERVER wandering OPTIONS (SET user 'nobody_there')")
        with pytest.raises(errors.SqlclientUnableToEstablishSqlconnection):
            rows(conn, where, "wandering")
