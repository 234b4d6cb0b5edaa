"""The tests' proxy: what it counts, and that its faults happen at the very message that was named."""

import threading
import time

import psycopg
import pytest
from patience import PATIENCE, Running, wait_until
from proxy import TO_CLIENT, TO_SERVER, Proxy, before_shard


@pytest.fixture
def proxy(db):
    with Proxy(port=db.cluster.shard_server(0).port) as proxy:
        yield proxy


@pytest.fixture
def session(db, proxy):
    """A session on a shard, through the proxy."""
    with connect(db, proxy) as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS t (a int PRIMARY KEY)")
        conn.execute("TRUNCATE t")
        yield conn


def connect(db, proxy):
    database = db.cluster.shard_database(0, db.name)
    return psycopg.connect(f"host=127.0.0.1 port={proxy.port} dbname={database} user=postgres", autocommit=True)


def rows(db):
    """The rows of t, as the shard has them."""
    with db.shard(0) as shard:
        return [row[0] for row in shard.execute("SELECT a FROM t ORDER BY a")]


def test_counts_round_trips_after_the_login(db, proxy):
    with proxy.counting() as count, connect(db, proxy) as conn:
        assert count.round_trips == 0 and count.trace == []
        psycopg.ClientCursor(conn).execute("SELECT 1")
        conn.execute("SELECT %s", (1,), prepare=False)
    assert (count.connections, count.round_trips) == (1, 2)
    assert count.trace == [(">", "Q"), ("<", "TDCZ"), (">", "PBDES"), ("<", "12TDCZ")]


def test_counts_one_session_of_several(db, conn):
    with before_shard(db, 0) as proxy, db.connect() as other:
        for session in (conn, other):
            session.execute("SELECT 1 FROM shardmap.run_on_shards('SELECT 1')")
        with proxy.counting(conn) as count, proxy.counting() as both:
            for session in (conn, other):
                session.execute("SELECT 1 FROM shardmap.run_on_shards('SELECT 1')")
    assert (count.round_trips, both.round_trips) == (1, 2)


def test_counts_what_is_sent_at_once_as_one(proxy, session):
    with proxy.counting() as count, session.pipeline():
        for number in range(3):
            session.execute("INSERT INTO t VALUES (%s)", (number,))
    assert count.round_trips == 1
    with proxy.counting() as count, session.transaction():
        session.execute("SELECT FROM t")
    assert count.round_trips == 3
    with proxy.counting() as count, session.cursor().copy("COPY t FROM STDIN") as copy:
        copy.write("8\n9\n")
    assert count.round_trips == 2


def test_counts_are_separate(db, proxy, session):
    with proxy.counting() as outer:
        session.execute("SELECT 1")
        with proxy.counting() as inner, connect(db, proxy) as other:
            other.execute("SELECT 1")
    assert (outer.round_trips, inner.round_trips, outer.connections) == (2, 1, 1)


def test_forwards_large_messages_and_many(session):
    assert session.execute("SELECT repeat('x', 3000000)").fetchone()[0] == "x" * 3000000
    assert len(session.execute("SELECT %s::text FROM generate_series(1, 100000)", ("y" * 20,)).fetchall()) == 100000


def test_cancel_requests_pass(db, proxy, session):
    sleeps = "SELECT FROM pg_stat_activity WHERE pid = %s AND query LIKE 'SELECT pg_sleep%%' AND state = 'active'"
    with proxy.counting() as count, db.shard(0) as shard:
        sleep = Running(lambda: session.execute("SELECT pg_sleep(3600)"))
        wait_until(lambda: shard.execute(sleeps, (session.info.backend_pid,)).fetchall())
        session.cancel_safe()
        with pytest.raises(psycopg.errors.QueryCanceled):
            sleep.end()
    assert count.cancels == 1


@pytest.mark.parametrize("action", ("cut", "reset"))
@pytest.mark.parametrize("skip", (0, 2))
def test_ends_before_the_message_that_was_named(db, proxy, session, action, skip):
    fault = proxy.on(action, TO_SERVER, types="Q", skip=skip)
    done = []
    with pytest.raises(psycopg.OperationalError):
        for number in range(5):
            psycopg.ClientCursor(session).execute(f"INSERT INTO t VALUES ({number})")
            done.append(number)
    fault.wait()
    assert done == rows(db) == list(range(skip))
    with connect(db, proxy) as other:  # once is once
        assert len(other.execute("SELECT FROM t").fetchall()) == skip


@pytest.mark.parametrize("action", ("cut", "reset"))
def test_loses_an_answer(db, proxy, session, action):
    proxy.on(action, TO_CLIENT, types="C", text=b"INSERT")
    session.execute("SELECT FROM t")
    with pytest.raises(psycopg.OperationalError):
        session.execute("INSERT INTO t VALUES (1)")
    assert rows(db) == [1]


def test_ends_after_a_message(db, proxy, session):
    """The message gets there, nothing of its answer comes back."""
    proxy.on("cut", TO_SERVER, types="Q", text=b"INSERT", after=True)
    with proxy.counting() as count, pytest.raises(psycopg.OperationalError):
        psycopg.ClientCursor(session).execute("INSERT INTO t VALUES (1)")
    assert count.trace == [(">", "Q")]
    wait_until(lambda: rows(db) == [1])


def test_stands_between_two_messages_of_one_packet(db, proxy, session):
    """Bind and Execute come in one packet with Parse; they do not get to the server."""
    proxy.on("cut", TO_SERVER, types="B")
    with proxy.counting() as count, pytest.raises(psycopg.OperationalError):
        session.execute("INSERT INTO t VALUES (%s)", (1,), prepare=False)
    assert count.trace == [(">", "P")]
    assert rows(db) == []


def test_one_side_stays_open(db, proxy, session):
    """The client sees its connection end, the server's session stays in its transaction."""
    session.execute("BEGIN; LOCK t")
    pid = session.info.backend_pid
    proxy.on("reset", TO_SERVER, types="Q", sides="client")
    with pytest.raises(psycopg.OperationalError):
        psycopg.ClientCursor(session).execute("COMMIT")
    time.sleep(0.2)
    with db.shard(0) as shard:
        state = "SELECT state FROM pg_stat_activity WHERE pid = %s"
        assert shard.execute(state, (pid,)).fetchall() == [("idle in transaction",)]
        proxy.end("server")
        wait_until(lambda: shard.execute(state, (pid,)).fetchall() == [])


def test_the_client_stays_waiting(proxy, session):
    """The server's side ends, the client's does not: its statement has no end until it gives up."""
    proxy.on("cut", TO_SERVER, types="Q", sides="server")
    failed = []

    def wait_in_vain():
        try:
            psycopg.ClientCursor(session).execute("SELECT 1")
        except psycopg.OperationalError as error:
            failed.append(error)
    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and not failed
    proxy.end("client")
    thread.join(PATIENCE)
    assert failed


def test_stalls_and_goes_on(db, proxy, session):
    fault = proxy.on("stall", TO_CLIENT, types="C", text=b"INSERT")
    thread = threading.Thread(target=session.execute, args=("INSERT INTO t VALUES (1)",))
    thread.start()
    fault.wait()
    thread.join(0.3)
    assert thread.is_alive() and rows(db) == [1]
    proxy.resume()
    thread.join(PATIENCE)
    assert not thread.is_alive() and len(session.execute("SELECT FROM t").fetchall()) == 1


def test_stalls_logins_too(db, proxy):
    proxy.stall()
    database = db.cluster.shard_database(0, db.name)
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        psycopg.connect(f"host=127.0.0.1 port={proxy.port} dbname={database} user=postgres connect_timeout=2")
    proxy.clear()
    with connect(db, proxy) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_delays_each(proxy, session):
    proxy.on("delay", TO_CLIENT, types="Z", times=None, seconds=0.1)
    begin = time.monotonic()
    for _ in range(3):
        session.execute("SELECT 1")
    assert time.monotonic() - begin >= 0.3
    proxy.clear()


def test_holds_one_message_until_it_is_released(db, proxy, session):
    """Other connections go on meanwhile."""
    fault = proxy.on("hold", TO_SERVER, types="Q", text=b"INSERT")
    insert = Running(lambda: psycopg.ClientCursor(session).execute("INSERT INTO t VALUES (1)"))
    fault.wait()
    with connect(db, proxy) as other:
        psycopg.ClientCursor(other).execute("INSERT INTO t VALUES (2)")
    assert not insert.is_over() and rows(db) == [2]
    proxy.release(fault)
    insert.end()
    assert rows(db) == [1, 2]


def test_refuses_and_accepts(db, proxy, session):
    proxy.refuse()
    with pytest.raises(psycopg.OperationalError, match="refused"):
        connect(db, proxy)
    assert session.execute("SELECT 1").fetchone() == (1,)
    proxy.accept()
    with connect(db, proxy) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_ends_all_now(db, proxy, session):
    with connect(db, proxy) as other:
        proxy.end(reset=True)
        for conn in (session, other):
            with pytest.raises(psycopg.OperationalError):
                conn.execute("SELECT 1")


def test_stands_before_a_shard(db):
    """The coordinator's sessions go through it while it stands there, those to other shards do not."""
    db.psql("CREATE TABLE item (k bigint PRIMARY KEY); INSERT INTO item SELECT generate_series(1, 20);"
            "SELECT shardmap.distribute_table('item', 'k')")
    numbers = {key: db.owner(str(key), "bigint") for key in range(1, 21)}
    ours = next(key for key, number in numbers.items() if number == 1)
    other = next(key for key, number in numbers.items() if number != 1)
    with db.connect() as conn:
        with before_shard(db, 1) as proxy:
            for key, asked in ((ours, True), (other, False)):
                with proxy.counting() as count:
                    assert conn.execute("SELECT k FROM item WHERE k = %s", (key,)).fetchall() == [(key,)]
                assert (count.round_trips > 0) == asked
        assert conn.execute("SELECT k FROM item WHERE k = %s", (ours,)).fetchall() == [(ours,)]


def test_ends_in_silence(db, caplog):
    with Proxy(port=db.cluster.shard_server(0).port) as proxy:
        connect(db, proxy).execute("SELECT 1")  # and stays open
    assert not caplog.records
