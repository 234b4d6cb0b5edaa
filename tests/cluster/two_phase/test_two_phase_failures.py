"""Commits broken off at every step: afterwards all shards have the transaction or none, and nothing keeps a lock."""

import itertools
import threading
import time

import psycopg
import pytest
from ledger import transfer
from patience import PATIENCE, Running, is_quick, wait_until
from proxy import TO_CLIENT, TO_SERVER, Proxy

JOURNAL = "INSERT INTO journal (note) VALUES (%s)"
UNDECIDED = ["before_prepare", "prepare_sent", "after_prepare:1", "after_prepare:2", "after_prepare:3", "before_decide",
             "after_decide"]
DECIDED = ["after_local_commit", "commit_sent", "after_commit:1", "after_commit:2", "after_commit:3"]
LOST = (psycopg.OperationalError, psycopg.errors.TransactionResolutionUnknown)


def notes(ledger, note):
    return int(ledger.cluster.psql(f"SELECT count(*) FROM journal WHERE note = '{note}'"))


def outcome(ledger, ids, before, note):
    """Whether the transfer has taken effect, which all places must agree on."""
    moved = [before[0] - 20, before[1] + 10, before[2] + 10]
    now = ledger.balances(*ids)
    assert (now, notes(ledger, note)) in ((before, 0), (moved, 1)), f"{before} became {now}"
    return now == moved


def attempt(conn, ids, note):
    """The transfer and a local row; the error, if there is one."""
    try:
        with conn.transaction():
            conn.execute(JOURNAL, (note,))
            transfer(conn, *ids)
    except psycopg.Error as error:
        return error
    return None


# The session is killed

ROLLING_BACK = [f"after_decide=error,{point}" for point in ("before_rollback", "after_rollback")]


def test_killed_at_every_step(ledger):
    before, ids = {}, {}
    for number, point in enumerate(UNDECIDED + ROLLING_BACK + DECIDED):
        ids[point] = [ledger.keys(shard)[50 + number] for shard in range(3)]
        before[point] = ledger.balances(*ids[point])
        with ledger.crashing(), ledger.connect() as conn:
            conn.execute("SELECT set_config('shardmap.crash_point', %s, false)", (point,))
            # An error reaches the client before what it causes is rolled back.
            assert attempt(conn, ids[point], point) is not None, point
    ledger.settle()
    committed = [point for point in before if outcome(ledger, ids[point], before[point], point)]
    assert committed == DECIDED


# The coordinator, or a shard, is killed

@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5])
def test_coordinator_killed_under_load(ledger, seconds):
    stop, threads = threading.Event(), []

    def work(number):
        while not stop.is_set():
            try:
                with ledger.connect() as conn:
                    while not stop.is_set():
                        with conn.transaction():
                            transfer(conn, *(ledger.keys(shard)[number] for shard in range(3)))
            except psycopg.Error:
                time.sleep(0.05)

    for number in range(4):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
    time.sleep(0.5 + seconds)
    ledger.coordinator.kill()
    stop.set()
    for thread in threads:
        thread.join()
    ledger.coordinator.start()
    ledger.settle()


@pytest.mark.parametrize("kill_after", ["prepare", "commit"])
def test_shard_killed(ledger, ids, kill_after):
    """A shard dies with the transaction prepared: it is there still when the shard comes back."""
    before = ledger.balances(*ids)
    shard = ledger.cluster.shard_server(1)
    verb = {"prepare": b"PREPARE TRANSACTION", "commit": b"COMMIT PREPARED"}[kill_after]
    with before_shard(ledger, 1) as proxy, ledger.connect() as conn:
        stalled = proxy.on("stall", TO_CLIENT if kill_after == "prepare" else TO_SERVER, text=verb)
        thread, errors = start(lambda: attempt(conn, ids, kill_after))
        stalled.wait()
        shard.kill()
        proxy.end()
        proxy.resume()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    shard.start()
    ledger.settle()
    assert outcome(ledger, ids, before, kill_after) == (kill_after == "commit")
    assert (errors[0] is None) == (kill_after == "commit")


# Connections are lost

def start(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


class before_shard:
    """Sessions reach the shard through a proxy meanwhile; the resolver does too."""

    def __init__(self, ledger, number):
        self.ledger, self.name, self.port = ledger, f"shard-{number}", ledger.cluster.shard_server(number).port
        self.proxy = Proxy(port=self.port)

    def __enter__(self):
        self.proxy.__enter__()
        self.ledger.cluster.psql(f"ALTER SERVER \"{self.name}\" OPTIONS (SET port '{self.proxy.port}')")
        return self.proxy

    def __exit__(self, *error):
        self.ledger.cluster.psql(f"ALTER SERVER \"{self.name}\" OPTIONS (SET port '{self.port}')")
        self.proxy.__exit__(*error)


@pytest.mark.parametrize("action", ["cut", "reset"])
@pytest.mark.parametrize("direction, verb, is_committed", [
    (TO_SERVER, b"PREPARE TRANSACTION", False), (TO_CLIENT, b"PREPARE TRANSACTION", False),
    (TO_SERVER, b"COMMIT PREPARED", True), (TO_CLIENT, b"COMMIT PREPARED", True)],
    ids=["prepare", "its answer", "commit", "its answer "])
def test_connection_lost(ledger, ids, action, direction, verb, is_committed):
    before = ledger.balances(*ids)
    note = f"{action} {direction} {verb.decode()}"
    with before_shard(ledger, 1) as proxy, ledger.connect() as conn:
        warnings = []
        conn.add_notice_handler(lambda notice: warnings.append(notice.message_primary))
        fault = proxy.on(action, direction, text=verb)
        error = attempt(conn, ids, note)
        fault.wait()
        # The session goes on.
        assert conn.execute("SELECT 1").fetchone() == (1,)
        ledger.settle()
        assert outcome(ledger, ids, before, note) == is_committed
        assert (error is None) == is_committed, error
        if is_committed:
            assert warnings == ['transaction is committed, but not yet seen to be on shard "shard-1"']


def test_no_token_misses_a_commit_that_is_in_doubt(ledger, ids):
    with before_shard(ledger, 1) as proxy, ledger.connect() as conn:
        # Nor does the resolver get through.
        proxy.on("cut", TO_SERVER, text=b"COMMIT PREPARED", times=10_000)
        assert attempt(conn, ids, "doubt") is None
        for function in ("write_token", "session_token"):
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as raised:
                conn.execute(f"SELECT shardmap.{function}()")
            assert raised.value.diag.message_primary == 'a transaction of this session is not yet committed on shard "shard-1"'
            assert "shardmap.in_doubt" in raised.value.diag.message_hint
        proxy.clear()
        ledger.settle()
        assert conn.execute("SELECT shardmap.write_token()").fetchone()[0] is not None


@pytest.mark.parametrize("verb, is_committed", [(b"PREPARE TRANSACTION", False), (b"COMMIT PREPARED", True)])
def test_cancel_of_a_stalled_commit(ledger, ids, verb, is_committed):
    def cancelled(conn, proxy, note):
        before = ledger.balances(*ids)
        stalled = proxy.on("stall", TO_SERVER, text=verb)
        transaction = Running(lambda: attempt(conn, ids, note))
        stalled.wait()
        begin = time.monotonic()
        conn.cancel_safe()
        assert (transaction.end() is None) == is_committed
        took = time.monotonic() - begin
        proxy.clear()
        ledger.settle()
        assert outcome(ledger, ids, before, note) == is_committed
        return took
    notes = (f"stall {verb.decode()} {number}" for number in itertools.count())
    with before_shard(ledger, 1) as proxy, ledger.connect() as conn:
        is_quick(lambda: cancelled(conn, proxy, next(notes)), 5)


def test_stalled_shard_does_not_hold_up_a_commit_for_ever(ledger, ids):
    before = ledger.balances(*ids)
    with before_shard(ledger, 1) as proxy, ledger.connect() as conn:
        proxy.on("stall", TO_SERVER, text=b"COMMIT PREPARED")
        begin = time.monotonic()
        assert attempt(conn, ids, "stalled") is None
        assert time.monotonic() - begin > 9
        proxy.clear()
        ledger.settle()
    assert outcome(ledger, ids, before, "stalled")


def test_session_terminated_while_it_prepares(ledger, ids):
    before = ledger.balances(*ids)
    with before_shard(ledger, 2) as proxy, ledger.connect() as conn, ledger.connect() as other:
        stalled = proxy.on("stall", TO_CLIENT, text=b"PREPARE TRANSACTION")
        thread, errors = start(lambda: attempt(conn, ids, "terminated"))
        stalled.wait()
        other.execute("SELECT pg_terminate_backend(%s)", (conn.info.backend_pid,))
        thread.join(PATIENCE)
        assert not thread.is_alive() and isinstance(errors[0], psycopg.OperationalError)
        proxy.clear()
        ledger.settle()
    assert not outcome(ledger, ids, before, "terminated")


@pytest.mark.parametrize("command, local", [(b"COMMIT", False), (b"COMMIT PREPARED", True)])
def test_locks_of_readers_are_kept_until_writers_have_committed(ledger, ids, command, local):
    lock = f"SELECT balance FROM account WHERE id = {ids[0]} FOR UPDATE"
    with before_shard(ledger, 1) as proxy, ledger.connect() as conn, ledger.connect() as other:
        conn.execute("BEGIN")
        conn.execute(lock)
        conn.execute("UPDATE account SET balance = balance WHERE id = %s", (ids[1],))
        if local:
            conn.execute(JOURNAL, ("locks",))
        fault = proxy.on("hold", TO_SERVER, text=command)
        commit = Running(lambda: conn.execute("COMMIT"))
        fault.wait()
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute(lock + " NOWAIT")
        proxy.release(fault)
        commit.end()
        other.execute(lock)


def test_locks_that_went_with_their_connection(ledger, ids):
    """What a transaction has done rests on the rows that it had locked."""
    with ledger.connect() as conn:
        before = ledger.balances(ids[0], ids[1])
        conn.execute("BEGIN")
        conn.execute("SELECT balance FROM account WHERE id = %s FOR UPDATE", (ids[0],))
        ended = ledger.on_shard(0, "SELECT pg_terminate_backend(pid, 60000) FROM pg_locks WHERE relation = 'account'::regclass"
                                   " AND mode = 'RowShareLock'")
        assert ended == [(True,)]
        ledger.on_shard(0, "UPDATE account SET balance = balance WHERE id = %s RETURNING 1", ids[0])
        conn.execute("UPDATE account SET balance = balance + 1 WHERE id = %s", (ids[1],))
        with pytest.raises(psycopg.errors.InFailedSqlTransaction, match="lost its connection to shard \"shard-0\""):
            conn.execute("COMMIT")
        assert ledger.balances(ids[0], ids[1]) == before
        assert conn.execute("SELECT balance FROM account WHERE id = %s", (ids[0],)).fetchone() == (before[0],)


# The resolver

def leave_prepared(ledger, ids, note, point="after_local_commit"):
    """Kills a session in its commit, with the resolver off."""
    with ledger.crashing(), ledger.connect() as conn:
        conn.execute(f"SET shardmap.crash_point = '{point}'")
        assert attempt(conn, ids, note) is not None


def test_by_hand(ledger, ids):
    before = ledger.balances(*ids)
    with ledger.configured(shardmap__resolve_interval=0):
        leave_prepared(ledger, ids, "by hand")
        time.sleep(2)
        assert len(ledger.prepared()) == 3
        rows = ledger.cluster.psql("SELECT shard, decision, error IS NULL, prepared_at > now() - interval '10 minutes',"
                                   " prepared_id LIKE '%_' || transaction || '_%' FROM shardmap.in_doubt ORDER BY shard")
        assert rows.splitlines() == [f"shard-{n}|commit|t|t|t" for n in range(3)]
        rows = ledger.cluster.psql("SELECT shard, decision, done FROM shardmap.resolve_transactions() ORDER BY shard")
        assert rows.splitlines() == [f"shard-{n}|commit|t" for n in range(3)]
        assert ledger.prepared() == [] and ledger.records() == 0
    assert outcome(ledger, ids, before, "by hand")


def test_by_hand_of_an_old_snapshot(ledger, ids):
    """REPEATABLE READ does not hide a record, which would be taken for an abort."""
    before = ledger.balances(*ids)
    with ledger.configured(shardmap__resolve_interval=0), ledger.connect() as conn:
        with before_shard(ledger, 1) as proxy, ledger.connect() as writer, conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM journal")
            fault = proxy.on("cut", TO_SERVER, text=b"COMMIT PREPARED")
            assert attempt(writer, ids, "snapshot") is None
            fault.wait()
            found = conn.execute("SELECT shard, decision, done FROM shardmap.resolve_transactions()").fetchall()
            assert found == [("shard-1", "commit", True)]
    assert outcome(ledger, ids, before, "snapshot")


def test_running_transactions_are_left_alone(ledger, ids):
    before = ledger.balances(*ids)
    with before_shard(ledger, 2) as proxy, ledger.connect() as conn:
        # The last shard is late: the others have prepared meanwhile, and the resolver looks at them.
        fault = proxy.on("hold", TO_SERVER, text=b"PREPARE TRANSACTION")
        transaction = Running(lambda: attempt(conn, ids, "running"))
        fault.wait()
        wait_until(lambda: len(ledger.prepared()) == 2)
        doubt = ledger.cluster.psql("SELECT shard, decision FROM shardmap.in_doubt ORDER BY shard")
        assert doubt.splitlines() == ["shard-0|running", "shard-1|running"]
        time.sleep(4)
        proxy.release(fault)
        assert transaction.end() is None
    assert outcome(ledger, ids, before, "running")


def test_others_are_left_alone(ledger):
    """Prepared transactions of people, and of other coordinators."""
    other = "shardmap_1234_5_678_000000000000abcd_9_1"
    shard = ledger.cluster.shard_server(0)
    try:
        ledger.cluster.shard_psql(0, "BEGIN; SELECT txid_current(); PREPARE TRANSACTION 'shardmap_mine';")
        ledger.cluster.shard_psql(0, f"BEGIN; SELECT txid_current(); PREPARE TRANSACTION '{other}';")
        assert ledger.cluster.psql("SELECT * FROM shardmap.resolve_transactions()") == ""
        time.sleep(2.5)
        assert sorted(ledger.prepared()) == sorted(["shardmap_mine", other])
    finally:
        for gid in ("shardmap_mine", other):
            shard.psql(f"ROLLBACK PREPARED '{gid}'", ledger.cluster.shard_database(0))


def test_unclear_ones_are_left_alone_and_shown(ledger, ids):
    """The record of a committed transaction was taken away; another number has not been given out."""
    with ledger.configured(shardmap__resolve_interval=0), ledger.connect() as conn:
        assert attempt(conn, ids, "unclear") is None
        whole = ledger.cluster.psql("DELETE FROM shardmap.transactions RETURNING id").splitlines()[-1]
    name, system, database, number, server_start = whole.split("_")
    unclear = [f"{whole}_9_1", "_".join((name, system, database, str(int(number) + 10**6), server_start, "9", "1"))]
    try:
        for gid in unclear:
            ledger.cluster.shard_psql(0, f"BEGIN; SELECT txid_current(); PREPARE TRANSACTION '{gid}';")
        time.sleep(2.5)
        shown = ledger.cluster.psql("SELECT prepared_id, decision FROM shardmap.in_doubt ORDER BY transaction::text::numeric")
        assert shown.splitlines() == [f"{gid}|unclear" for gid in unclear]
        assert sorted(ledger.prepared()) == sorted(unclear)
    finally:
        for gid in unclear:
            ledger.cluster.shard_psql(0, f"ROLLBACK PREPARED '{gid}'")


def test_a_record_stays_while_a_shard_cannot_be_asked(ledger, ids):
    before = ledger.balances(*ids)
    with before_shard(ledger, 2) as proxy, ledger.connect() as conn:
        proxy.on("cut", TO_SERVER, text=b"COMMIT PREPARED")
        proxy.refuse()
        with ledger.connect() as cold:  # has no connection to the shard
            assert "could not connect" in str(attempt(cold, ids, "refused"))
        proxy.accept()
        conn.execute("SELECT sum(balance) FROM account")
        proxy.refuse()
        assert attempt(conn, ids, "cannot be asked") is None
        time.sleep(3)
        assert ledger.records() >= 1
        doubt = ledger.cluster.psql("SELECT shard, error LIKE 'could not connect%' FROM shardmap.in_doubt")
        assert doubt == "shard-2|t"
        proxy.accept()
        ledger.settle()
    assert outcome(ledger, ids, before, "cannot be asked")


def test_workers_stop_at_once_and_leave_databases_alone(ledger, ids):
    workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_shardmap%'"
    wait_until(lambda: int(ledger.cluster.psql(workers)) >= 1)
    with ledger.connect() as conn:
        assert attempt(conn, ids, "workers") is None
    with ledger.configured(shardmap__connect_timeout="1h"), before_shard(ledger, 0) as proxy:
        proxy.stall()  # the resolver hangs on this shard
        wait_until(lambda: len(proxy.links) > 0 and int(ledger.cluster.psql(workers)) == 2)
        ledger.coordinator.stop("fast")
        ledger.coordinator.start()
        proxy.resume()
    ledger.cluster.coordinator.psql("CREATE DATABASE spare")
    ledger.cluster.coordinator.psql("CREATE DATABASE copy TEMPLATE spare")
    ledger.cluster.coordinator.psql("DROP DATABASE copy")
    ledger.cluster.coordinator.psql("DROP DATABASE spare")
