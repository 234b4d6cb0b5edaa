"""Writes to a reference table broken off at every step: afterwards the table and all copies have them, or none has."""

import random
import threading
import time

import psycopg
import pytest
from ledger import SHARDS
from patience import PATIENCE, wait_until
from test_two_phase_failures import DECIDED, UNDECIDED

ROWS = 40


@pytest.fixture
def rates(ledger):
    """A reference table of its own for each test; that its copies are equal is looked at last."""
    ledger.cluster.psql(f"""CREATE TABLE rate (id int PRIMARY KEY, v text);
        INSERT INTO rate SELECT i, 'old' FROM generate_series(1, {ROWS}) i; SELECT shardmap.distribute_reference('rate')""")
    yield
    ledger.settle()
    try:
        found = [ledger.on_shard(n, "SELECT id, v FROM rate ORDER BY id") for n in range(SHARDS)]
        with ledger.connect() as conn:
            here = conn.execute("SELECT id, v FROM rate ORDER BY id").fetchall()
            verified = conn.execute("SELECT shard FROM shardmap.verify_reference('rate') WHERE NOT equal").fetchall()
        assert [sorted(set(each) ^ set(here)) for each in found] == [[]] * SHARDS and not verified
    finally:
        ledger.cluster.psql("DROP TABLE rate")


def value(ledger, number):
    return ledger.cluster.psql(f"SELECT v FROM rate WHERE id = {number}")


def write(conn, point, number):
    """The change that is broken off; the error, if there is one."""
    try:
        conn.execute("SELECT set_config('shardmap.crash_point', %s, false)", (point,))
        conn.execute("UPDATE rate SET v = 'new' WHERE id = %s", (number,))
    except psycopg.Error as error:
        return error
    return None


def test_killed_at_every_step(ledger, rates):
    for number, point in enumerate(UNDECIDED + DECIDED, start=1):
        with ledger.crashing(), ledger.connect() as conn:
            assert write(conn, point, number) is not None, point
    ledger.settle()
    committed = [point for number, point in enumerate(UNDECIDED + DECIDED, start=1) if value(ledger, number) == "new"]
    assert committed == DECIDED


@pytest.mark.parametrize("point", ["after_prepare:2", "after_decide", "after_local_commit", "after_commit:1"])
def test_a_shard_dies_meanwhile(ledger, rates, point):
    """The session is killed at the step, and then a shard too."""
    shard = ledger.cluster.shard_servers[1]
    with ledger.crashing(), ledger.connect() as conn:
        write(conn, point, 1)
    shard.kill()
    shard.start()
    ledger.settle()
    assert value(ledger, 1) == ("old" if point in UNDECIDED else "new")


@pytest.mark.parametrize("sql", ["DELETE FROM rate WHERE id = 1000", "UPDATE rate SET id = 1001 WHERE id = 1000",
                                 "UPDATE rate SET v = 'changed' WHERE id = 1000"])
def test_a_row_that_is_still_prepared_on_a_shard(ledger, rates, sql):
    """Here it is committed and seen; on the shards it cannot be seen yet, and must be waited for all the same."""
    failures = []

    def change():
        try:
            with ledger.connect() as conn:
                conn.execute(sql)
        except psycopg.Error as error:
            failures.append(error)

    # As a transaction leaves it between its local commit and the shards'.
    ledger.cluster.psql("""ALTER EVENT TRIGGER shardmap_guard_references DISABLE; ALTER TABLE rate DISABLE TRIGGER USER;
        INSERT INTO rate VALUES (1000, 'prepared'); ALTER TABLE rate ENABLE ALWAYS TRIGGER shardmap_reference_row,
        ENABLE ALWAYS TRIGGER shardmap_reference_statement; ALTER EVENT TRIGGER shardmap_guard_references ENABLE""")
    for n in range(SHARDS):
        ledger.cluster.shard_psql(n, "BEGIN; INSERT INTO rate VALUES (1000, 'prepared'); PREPARE TRANSACTION 'x'")
    thread = threading.Thread(target=change)
    thread.start()
    wait_until(lambda: ledger.on_shard(0, "SELECT count(*) FROM pg_locks WHERE NOT granted")[0][0] > 0 or not thread.is_alive(),
               lambda: "nobody waits")
    for n in range(SHARDS):
        ledger.cluster.shard_psql(n, "COMMIT PREPARED 'x'")
    thread.join(PATIENCE)
    assert not failures
    assert ledger.cluster.psql("SELECT string_agg(id || v, ',') FROM rate WHERE id >= 1000") == {
        "D": "", "U": "1001prepared" if "1001" in sql else "1000changed"}[sql[0]]


def test_policies(ledger, rates):
    with ledger.connect(shardmap__multi_shard_commit="refuse") as conn:
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            conn.execute("UPDATE rate SET v = 'refused'")
        assert conn.execute("SELECT DISTINCT v FROM rate").fetchall() == [("old",)]
        conn.execute("SET shardmap.multi_shard_commit = one_phase")
        conn.execute("UPDATE rate SET v = 'one phase'")


def test_writers_under_kills(ledger, rates):
    """Sessions and shards die under writers of the same few rows."""
    stop, done, unexpected = threading.Event(), [], []

    def work(seed):
        chance = random.Random(seed)
        while not stop.is_set():
            try:
                with ledger.connect() as conn:
                    conn.execute("SET statement_timeout = '15s'")
                    while not stop.is_set():
                        number = chance.randint(1, 2 * ROWS)
                        conn.execute(chance.choice((
                            "INSERT INTO rate VALUES ({0}, 'in') ON CONFLICT (id) DO UPDATE SET v = rate.v || '+'",
                            "DELETE FROM rate WHERE id = {0}", "UPDATE rate SET v = 'up' WHERE id BETWEEN {0} AND {0} + 3",
                            "UPDATE rate SET id = id + 100000 * {0} WHERE id = {0}")).format(number))
                        done.append(number)
            except (psycopg.OperationalError, psycopg.errors.InFailedSqlTransaction, psycopg.errors.ConnectionFailure,
                    psycopg.errors.SqlclientUnableToEstablishSqlconnection, psycopg.errors.UniqueViolation):
                time.sleep(0.05)
            except Exception as error:  # a thread's error would go unseen
                unexpected.append(repr(error))
                return

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    chance = random.Random(7)
    for _ in range(4):
        time.sleep(1)
        shard = chance.choice(ledger.cluster.shard_servers)
        shard.kill()
        shard.start()
    ledger.coordinator.kill()
    ledger.coordinator.start()
    ledger.wait_for_coordinator()
    wait_until(lambda n=len(done): len(done) > max(n + 20, 50) or unexpected, lambda: f"{len(done)} writes")
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not unexpected
