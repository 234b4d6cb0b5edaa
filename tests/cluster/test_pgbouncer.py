"""Shards behind PgBouncer in transaction mode: a session there is nobody's own from one transaction to the next.

Four shards of a database are registered by the pooler's address. It has two connections to each, so that sessions of the
coordinator get each other's all the time. Where PgBouncer cannot be had these tests are left out.
"""

import contextlib
import threading

import pgbouncer
import psycopg
import pytest
from asking import Database
from patience import lock_waiters, wait_until
from proxy import Proxy
from psycopg import errors

OURS = ("TimeZone", "DateStyle", "IntervalStyle", "extra_float_digits", "bytea_output", "lock_timeout", "array_nulls",
        "quote_all_identifiers", "search_path", "standard_conforming_strings")
SETUP = """
CREATE TABLE t (k int PRIMARY KEY, v int, at timestamptz, d date DEFAULT '2024-02-01', b bytea DEFAULT '\\x01ff', n numeric);
INSERT INTO t SELECT i, i, '2024-02-01 12:00+00' FROM generate_series(1, 200) i;
SELECT shardmap.distribute_table('t', 'k');
"""


@contextlib.contextmanager
def pooled(target, folder, size=2):
    """A PgBouncer before the server at port `target`; its port."""
    if not pgbouncer.fetch():
        pytest.skip("there is no PgBouncer here")
    databases = [f"* = host=127.0.0.1 port={target} user=postgres"]
    settings = {"pool_mode": "transaction", "default_pool_size": size, "max_client_conn": 500}
    with pgbouncer.pgbouncer(folder, databases, "postgres", **settings) as port:
        yield port


@pytest.fixture(scope="module")
def folder(shared_cluster):
    folder = shared_cluster.directory / "pgbouncer"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def db(shared_cluster, folder):
    """A database whose shards are behind a pooler, whose port it has."""
    name = "pgbouncer"
    with pooled(shared_cluster.shard_server(0).port, folder) as port:
        shared_cluster.new_database(name, shards=0)
        for shard in range(4):
            shared_cluster.shard_server(shard).psql(f'CREATE DATABASE "{shared_cluster.shard_database(shard, name)}"')
            shared_cluster.psql(
                f"SELECT shardmap.add_shard('shard-{shard}', host => '127.0.0.1', port => {port}, "
                f"dbname => '{shared_cluster.shard_database(shard, name)}', options => 'pooler=transaction')", name)
        database = Database(shared_cluster, name)
        database.pooler = port
        database.psql(SETUP)
        yield database
        database.close()
        shared_cluster.coordinator.psql(f'DROP DATABASE "{name}" WITH (FORCE)')
    shared_cluster.drop_database(name)


def through(db, shard=0):
    """Another client of the pool."""
    return psycopg.connect(f"host=127.0.0.1 port={db.pooler} dbname={db.cluster.shard_database(shard, db.name)} user=postgres",
                           autocommit=True, prepare_threshold=None)


def one(conn, sql, params=None):
    return conn.execute(sql, params).fetchone()[0]


def defaults(conn):
    return {name: one(conn, f"SHOW {name}") for name in OURS}


def test_statements(conn, db):
    for _ in range(5):
        for k in range(1, 21):
            assert one(conn, "SELECT v FROM t WHERE k = %s", (k,)) == k
    assert one(conn, "SELECT sum(v) FROM t") == 20100
    assert len(conn.execute("TABLE t").fetchall()) == 200
    assert conn.execute("UPDATE t SET v = v + 1 WHERE k = 7").rowcount == 1
    assert conn.execute("UPDATE t SET v = v - 1 WHERE k = 7").rowcount == 1
    assert conn.execute("INSERT INTO t (k, v) SELECT i, 0 FROM generate_series(1001, 1400) i").rowcount == 400
    with conn.cursor().copy("COPY t (k, v) FROM STDIN") as copy:
        for k in range(2001, 2401):
            copy.write_row((k, 0))
    assert conn.execute("DELETE FROM t WHERE k > 1000").rowcount == 800
    with conn.transaction(), conn.cursor("c") as cursor:
        cursor.itersize = 10
        cursor.execute("SELECT v FROM t ORDER BY v")
        assert [v for v, in cursor] == list(range(1, 201))


def test_nothing_is_prepared_under_a_name(db):
    with db.connect() as conn:
        for _ in range(6):
            one(conn, "SELECT v FROM t WHERE k = %s AND v > 0", (1,))
        for shard in range(4):
            for number in range(2):
                with through(db, shard) as other:
                    assert one(other, "SELECT count(*) FROM pg_prepared_statements") == 0


@pytest.mark.parametrize("work", ["read", "write", "read in a transaction", "two reads"])
def test_round_trips(db, work):
    """As many as without a pooler: settings travel with the statement."""
    expected = {"read": 1, "write": 1, "read in a transaction": 1, "two reads": 2}
    port = db.pooler
    key = db.apart(1, "int")[0]
    shard = db.owner(key, "int")
    read, write = f"SELECT at::text FROM t WHERE k = {key}", f"UPDATE t SET v = v WHERE k = {key}"
    with Proxy(port=port) as proxy:
        db.psql(f"ALTER SERVER \"shard-{shard}\" OPTIONS (SET port '{proxy.port}')")
        try:
            with db.connect() as conn:
                conn.execute(read)
                conn.execute("BEGIN")
                conn.execute("SET LOCAL TimeZone = 'Asia/Tokyo'")
                if work != "read in a transaction":
                    conn.execute("COMMIT")
                with proxy.counting() as count:
                    for _ in range(2 if work == "two reads" else 1):
                        conn.execute(write if work == "write" else read)
                assert count.round_trips == expected[work]
                conn.execute("ROLLBACK")
        finally:
            db.psql(f"ALTER SERVER \"shard-{shard}\" OPTIONS (SET port '{port}')")


def test_settings_are_each_sessions_own(db):
    """Two sessions with other settings, and a stranger, take turns on the same connections."""
    text = "SELECT concat_ws('|', at, d, b, make_interval(days => 1, hours => 2)) FROM t WHERE k = %s"
    ours = {"TimeZone": "Asia/Tokyo", "DateStyle": "German, DMY", "bytea_output": "escape", "IntervalStyle": "iso_8601"}
    with db.connect() as plain, db.connect() as other, through(db) as stranger, through(db) as before:
        base = defaults(before)
        plain.execute("SET TimeZone = 'UTC'")
        for name, value in ours.items():
            other.execute(f"SET {name} = '{value}'")
        for key in range(1, 13):
            for conn in (plain, other):
                with conn.transaction():
                    conn.execute("UPDATE t SET v = v WHERE k = %s", (key,))
                    within = one(conn, text, (key,))
                assert within == one(conn, text, (key,)) == (
                    "2024-02-01 12:00:00+00|2024-02-01|\\x01ff|1 day 02:00:00" if conn is plain else
                    "01.02.2024 21:00:00 JST|01.02.2024|\\001\\377|P1DT2H")
                assert defaults(stranger) == base


def test_settings_changed_within_a_transaction(db):
    zone = "SELECT at::text FROM t WHERE k = 3"
    with db.connect(timezone="UTC") as conn, through(db, db.owner(3, "int")) as stranger:
        base = defaults(stranger)
        conn.execute("SET TimeZone = 'UTC'")
        conn.execute("BEGIN")
        assert one(conn, zone) == "2024-02-01 12:00:00+00"
        conn.execute("SAVEPOINT a")
        conn.execute("SET LOCAL TimeZone = 'Asia/Tokyo'")
        assert one(conn, zone) == "2024-02-01 21:00:00+09"
        conn.execute("ROLLBACK TO a")
        assert one(conn, zone) == "2024-02-01 12:00:00+00"
        conn.execute("SET TimeZone = 'Asia/Tokyo'")
        assert one(conn, zone) == "2024-02-01 21:00:00+09"
        conn.execute("COMMIT")
        assert one(conn, zone) == "2024-02-01 21:00:00+09"
        conn.execute("SET lock_timeout = '4321ms'")
        for _ in range(2):
            assert one(conn, zone) == "2024-02-01 21:00:00+09"
            assert defaults(stranger) == base


def test_a_strangers_settings_do_not_count(db):
    """Somebody who sets what he should not leaves it in the pool's sessions."""
    key = 5
    with through(db, db.owner(key, "int")) as stranger, through(db, db.owner(key, "int")) as second:
        with stranger.transaction(), second.transaction():  # both of the pool's sessions
            for each in (stranger, second):
                each.execute("CREATE SCHEMA IF NOT EXISTS evil" if each is stranger else "SELECT 1")
                each.execute("SET search_path = evil, pg_catalog; SET IntervalStyle = 'sql_standard'; SET bytea_output = escape")
        try:
            stranger.execute("CREATE FUNCTION evil.abs(int) RETURNS int LANGUAGE sql AS 'SELECT -1'")
            with db.connect() as conn:
                for _ in range(3):
                    found = conn.execute("SELECT abs(v), b::text, make_interval(days => 1, hours => 2)::text FROM t WHERE k = %s",
                                         (key,)).fetchone()
                    assert found == (key, "\\x01ff", "1 day 02:00:00")
        finally:
            stranger.execute("DROP SCHEMA evil CASCADE")
            with stranger.transaction(), second.transaction():
                for each in (stranger, second):
                    each.execute("RESET ALL")


def test_savepoints(conn, db):
    a, b = (int(key) for key in db.apart(2, "int"))
    conn.execute("BEGIN")
    conn.execute("UPDATE t SET v = 1000 WHERE k = %s", (a,))
    conn.execute("SAVEPOINT s")
    for key in (a, b):
        conn.execute("UPDATE t SET v = 2000 WHERE k = %s", (key,))
    with pytest.raises(errors.UniqueViolation):
        conn.execute("INSERT INTO t (k) VALUES (%s)", (b,))
    conn.execute("ROLLBACK TO s")
    assert [one(conn, "SELECT v FROM t WHERE k = %s", (key,)) for key in (a, b)] == [1000, b]
    conn.execute("ROLLBACK")
    assert [one(conn, "SELECT v FROM t WHERE k = %s", (key,)) for key in (a, b)] == [a, b]


def test_commits_on_several_shards(conn, db):
    keys = [int(key) for key in db.apart(4, "int")]
    for end, added in (("COMMIT", 1), ("ROLLBACK", 0)):
        before = one(conn, "SELECT sum(v) FROM t")
        conn.execute("BEGIN")
        for key in keys:
            conn.execute("UPDATE t SET v = v + 1 WHERE k = %s", (key,))
        conn.execute(end)
        assert one(conn, "SELECT sum(v) FROM t") - before == 4 * added
    conn.execute("UPDATE t SET v = k")
    assert conn.execute("SELECT * FROM shardmap.in_doubt").fetchall() == []
    assert one(conn, "SELECT count(*) FROM shardmap.resolve_transactions()") == 0
    for shard in range(4):
        with db.shard(shard) as direct:
            assert one(direct, "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == 0


def test_many_sessions(db):
    """Thirty sessions over two connections a shard: each sees its own settings and rows."""
    wrong = []

    def session(number):
        hours = number % 12 + 1
        with db.connect() as conn:
            conn.execute(f"SET TimeZone = '-{hours:02}:00'")
            for key in range(1, 41):
                if one(conn, "SELECT at::text FROM t WHERE k = %s", (key,)) != f"2024-02-0{1 if hours < 12 else 2} {(12 + hours) % 24:02}:00:00+{hours:02}":
                    wrong.append((number, key))
                with conn.transaction():
                    conn.execute("UPDATE t SET v = v + 1 WHERE k = %s", (100 + key,))
    threads = [threading.Thread(target=session, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with db.connect() as conn:
        assert wrong == [] and one(conn, "SELECT sum(v - k) FROM t") == 30 * 40
        conn.execute("UPDATE t SET v = k")


def test_cancel(db):
    key = int(db.apart(1, "int")[0])
    with db.connect() as conn, db.shard(db.owner(key, "int")) as direct:
        direct.execute("BEGIN")
        direct.execute("LOCK public.t")
        conn.execute("SET statement_timeout = '300ms'")
        with pytest.raises(errors.QueryCanceled):
            conn.execute("SELECT v FROM t WHERE k = %s", (key,))
        wait_until(lambda: not lock_waiters(direct))
        direct.execute("COMMIT")
        conn.execute("RESET statement_timeout")
        assert one(conn, "SELECT v FROM t WHERE k = %s", (key,)) == key


def test_administration(conn):
    assert one(conn, "SELECT count(*) FROM shardmap.run_on_shards('ANALYZE public.t') WHERE success") == 4
    assert one(conn, "SELECT shardmap.remote_execute('shard-0', 'VACUUM public.t', false)") == "VACUUM"
    assert one(conn, "SELECT row FROM shardmap.remote_rows('shard-0', 'SHOW search_path') AS row") == ["pg_catalog"]


@pytest.mark.parametrize("pooler, prepared", [("transaction", 0), ("transaction_prepared", 1)])
def test_a_pooler_that_keeps_statements(db, pooler, prepared):
    """Straight to the shard, as what a newer PgBouncer keeps cannot be told from a session of one's own."""
    key = int(db.apart(1, "int")[0])
    shard = db.owner(key, "int")
    direct = db.cluster.shard_server(shard).port
    db.psql(f"ALTER SERVER \"shard-{shard}\" OPTIONS (SET port '{direct}', SET pooler '{pooler}')")
    try:
        with db.connect(timezone="Asia/Tokyo") as conn, conn.transaction():
            for _ in range(3):
                assert one(conn, "SELECT at::text FROM t WHERE k = %s", (key,)) == "2024-02-01 21:00:00+09"
            count = "SELECT row FROM shardmap.remote_rows(%s, 'SELECT count(*) FROM pg_prepared_statements') AS row"
            assert one(conn, count, (f"shard-{shard}",)) == [str(prepared)]
    finally:
        db.psql(f"ALTER SERVER \"shard-{shard}\" OPTIONS (SET port '{db.pooler}', SET pooler 'transaction')")


@pytest.mark.parametrize("setting", ["enable_router", "enable_routing"])
def test_foreign_scans(db, setting):
    with db.connect(**{f"shardmap__{setting}": "off"}) as conn:
        conn.execute("SET TimeZone = 'Asia/Tokyo'")
        conn.execute("SET DateStyle = 'German'")
        for key in range(1, 9):
            found = conn.execute("SELECT at::text, d::text FROM t WHERE k = %s", (key,)).fetchone()
            assert found == ("01.02.2024 21:00:00 JST", "01.02.2024")
            assert conn.execute("UPDATE t SET d = d + 1, v = v + random()::int * 0 WHERE k = %s", (key,)).rowcount == 1
            assert conn.execute("UPDATE t SET d = '01.02.2024' WHERE k = %s AND d = '02.02.2024'", (key,)).rowcount == 1


def test_a_pooler_that_nobody_mentioned(conn, db):
    conn.execute(f"CREATE SERVER plain FOREIGN DATA WRAPPER shardmap_fdw OPTIONS (host '127.0.0.1', port '{db.pooler}',"
                 f" dbname '{db.cluster.shard_database(0, db.name)}')")
    conn.execute("CREATE USER MAPPING FOR CURRENT_USER SERVER plain OPTIONS (user 'postgres')")
    with pytest.raises(errors.SqlclientUnableToEstablishSqlconnection) as caught:
        conn.execute("SELECT * FROM shardmap.remote_rows('plain', 'SELECT 1')")
    assert "pooler 'transaction'" in caught.value.diag.message_hint
    conn.execute("ALTER SERVER plain OPTIONS (ADD pooler 'transaction')")
    assert one(conn, "SELECT row FROM shardmap.remote_rows('plain', 'SELECT 1') AS row") == ["1"]
    conn.execute("DROP SERVER plain CASCADE")


@pytest.mark.parametrize("sql, error", [
    ("CREATE SERVER s FOREIGN DATA WRAPPER shardmap_fdw OPTIONS (pooler 'session')", errors.InvalidParameterValue),
    ("ALTER SERVER \"shard-0\" OPTIONS (SET pooler '')", errors.InvalidParameterValue),
    ("ALTER USER MAPPING FOR CURRENT_USER SERVER \"shard-0\" OPTIONS (ADD pooler 'none')", errors.FdwInvalidOptionName),
    ("ALTER FOREIGN DATA WRAPPER shardmap_fdw OPTIONS (ADD pooler 'none')", errors.FdwInvalidOptionName),
    ("ALTER SERVER \"shard-0\" OPTIONS (ADD poller 'none')", errors.FdwInvalidOptionName),
])
def test_wrong_options(conn, sql, error):
    with pytest.raises(error):
        conn.execute(sql)
