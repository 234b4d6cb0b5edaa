"""Sessions that wait for each other over several shards: one of them is told so, the others go on.

A `Party` is a session whose last statement runs in a thread. `waits()` is asked of the servers, so that each test knows
that its circle is closed before it looks at what becomes of it.
"""

import contextlib
import socket
import threading
import time

import psycopg
import pytest
from ledger import ADD
from patience import PATIENCE, is_quick, wait_until
from psycopg import errors
from server import Server, free_port

SOON = {"shardmap__deadlock_timeout": "200ms"}
NEVER = {"shardmap__deadlock_timeout": "0"}
WAITERS = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"


class Party:
    """A session in a transaction, and its statement that waits."""

    def __init__(self, ledger, settings, **options):
        self.ledger, self.conn = ledger, ledger.connect(**options, **settings)
        self.error = self.thread = None
        self.conn.execute("BEGIN")

    def run(self, sql, *params):
        self.conn.execute(sql, params or None)

    def start(self, sql, *params, at=None, run=None):
        """Starts a statement, and returns when one more waits on that shard, or here."""
        def work():
            try:
                (run or self.run)(sql, *params)
            except psycopg.Error as error:
                self.error = error
        before = self._waiting(at)
        self.thread = threading.Thread(target=work)
        self.thread.start()
        wait_until(lambda: self._waiting(at) > before or not self.thread.is_alive(), lambda: "does not wait")

    def _waiting(self, at):
        if at is None:
            return int(self.ledger.coordinator.psql(WAITERS, "app"))
        return self.ledger.on_shard(at, WAITERS)[0][0]

    def end(self):
        """Waits for the statement: its error, or None."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "it still waits"
        return self.error

    def close(self):
        with contextlib.suppress(psycopg.Error):
            self.conn.cancel_safe()
        if self.thread:
            self.thread.join(PATIENCE)
        self.conn.close()


@pytest.fixture
def parties(ledger):
    made = []

    def make(settings=SOON, **options):
        made.append(Party(ledger, settings, **options))
        return made[-1]
    yield make
    for party in made:
        party.close()


def commits(*others):
    """The survivors: as soon as one gets on it commits, which lets on the next."""
    open_ = list(others)
    while open_:
        wait_until(lambda: any(not party.thread.is_alive() for party in open_), lambda: "they all wait")
        party = next(party for party in open_ if not party.thread.is_alive())
        open_.remove(party)
        assert party.end() is None
        party.conn.execute("COMMIT")


def is_victim(party, *names):
    error = party.end()
    assert isinstance(error, errors.DeadlockDetected), error
    assert error.diag.message_primary == "deadlock detected"
    for name in names:
        assert name in error.diag.message_detail, error.diag.message_detail
    party.conn.execute("ROLLBACK")
    return error


def copy_in(conn, sql, *rows):
    with conn.cursor() as cursor, cursor.copy(sql) as copy:
        for row in rows:
            copy.write_row(row)


# How the second statement of the last session waits for row `id` of another shard: settings, SQL.
WAYS = {
    "routed": ({}, "UPDATE account SET balance = balance + 1 WHERE id = %(id)s"),
    "rewritten": ({"shardmap__enable_router": "off"}, "UPDATE account SET balance = balance + 1 WHERE id = %(id)s"),
    "pushed down": ({"shardmap__enable_router": "off", "shardmap__enable_routing": "off"},
                    "UPDATE account SET balance = balance + 1 WHERE id = %(id)s"),
    "row by row": ({}, "UPDATE account SET balance = balance + (SELECT count(*) FROM journal WHERE id < 0)"
                       " WHERE id = %(id)s"),
    "all shards": ({}, "UPDATE account SET balance = balance WHERE abs(id) = %(id)s"),
    "locked": ({}, "SELECT * FROM account WHERE id = %(id)s FOR UPDATE"),
    "locked on all shards": ({}, "SELECT * FROM account WHERE abs(id) = %(id)s FOR UPDATE"),
    "insert": ({}, "INSERT INTO account VALUES (%(new)s, 0)"),
    "several rows": ({}, "INSERT INTO account VALUES (%(new)s, 0), (%(free)s, 0)"),
    "function": ({}, "SELECT shardmap.remote_execute(shard_for(%(id)s::int), 'DELETE FROM public.account WHERE id = %(id)s')"),
    "DO": ({}, "DO $$ BEGIN PERFORM FROM account WHERE id = %(id)s FOR SHARE; END $$"),
    "cursor": ({}, "DECLARE c CURSOR FOR SELECT * FROM account WHERE id = %(id)s FOR UPDATE; FETCH ALL FROM c"),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_sessions(ledger, parties, ids, way):
    settings, sql = WAYS[way]
    first, last = parties(), parties({**SOON, **settings})
    new, free = 1_000_000, 2_000_000
    shard = int(ledger.cluster.psql(f"SELECT right(shard_for({new}), 1)"))
    held = ids[shard] if "new" in sql else ids[0]
    other = next(i for n, i in enumerate(ids) if i != held and n != shard)
    first.run("INSERT INTO account VALUES (%s, 0)", new)
    first.run(ADD, 5, held)
    last.run(ADD, 7, other)
    first.start(ADD, -5, other, at=ids.index(other))
    last.start(psycopg.sql.SQL(sql.replace("%(new)s", str(new)).replace("%(free)s", str(free))
                               .replace("%(id)s", str(held))), at=ids.index(held))
    is_victim(last, f'waits on shard "shard-{ids.index(held)}"', f'waits on shard "shard-{ids.index(other)}"',
              f"Process {last.conn.info.backend_pid} waits", f"for process {last.conn.info.backend_pid}")
    assert first.end() is None
    first.run("DELETE FROM account WHERE id = %s", new)
    first.conn.execute("COMMIT")


def test_copy(ledger, parties, ids):
    first, last = parties(), parties()
    new = 1_000_000
    shard = int(ledger.cluster.psql(f"SELECT right(shard_for({new}), 1)"))
    other = ids[(shard + 1) % 3]
    first.run("INSERT INTO account VALUES (%s, 0)", new)
    last.run(ADD, 1, other)
    first.start(ADD, 0, other, at=ids.index(other))
    last.start("COPY account FROM STDIN", at=shard, run=lambda sql: copy_in(last.conn, sql, (new, 0), (new + 1, 0)))
    is_victim(last)
    assert first.end() is None
    first.conn.execute("ROLLBACK")


def test_the_last_to_wait_gives_up(ledger, parties, ids):
    """However the times to look are chosen."""
    first, last = parties({"shardmap__deadlock_timeout": "100ms"}), parties({"shardmap__deadlock_timeout": "1500ms"})
    first.run(ADD, 5, ids[0])
    last.run(ADD, 7, ids[1])
    first.start(ADD, -5, ids[1], at=1)
    last.start(ADD, -7, ids[0], at=0)
    is_victim(last)
    commits(first)


def test_another_gives_up_if_the_last_does_not_look(ledger, parties, ids):
    first, last = parties(), parties(NEVER)
    first.run(ADD, 5, ids[0])
    last.run(ADD, -7, ids[1])
    first.start(ADD, -5, ids[1], at=1)
    last.start(ADD, 7, ids[0], at=0)
    is_victim(first)
    commits(last)


def test_three_sessions(ledger, parties, ids):
    sessions = [parties() for _ in range(3)]
    for n, session in enumerate(sessions):
        session.run(ADD, 1, ids[n])
    for n, session in enumerate(sessions):
        session.start(ADD, -1, ids[(n + 1) % 3], at=(n + 1) % 3)
    is_victim(sessions[2], *(f'"shard-{n}"' for n in range(3)), *(str(s.conn.info.backend_pid) for s in sessions))
    commits(sessions[1], sessions[0])


def test_a_queue_before_the_circle(ledger, parties, ids):
    """Those who wait for one of the circle are not in it, and get on when their turn comes."""
    first, last, others = parties(), parties(), [parties() for _ in range(3)]
    first.run(ADD, 1, ids[0])
    last.run(ADD, -1, ids[1])
    for n, other in enumerate(others):
        other.start(ADD, 0, ids[n % 2], at=n % 2)
    first.start(ADD, -1, ids[1], at=1)
    last.start(ADD, 1, ids[0], at=0)
    open_, victims = [first, last, *others], []
    while open_:
        wait_until(lambda: any(not party.thread.is_alive() for party in open_), lambda: "they all wait")
        party = next(party for party in open_ if not party.thread.is_alive())
        open_.remove(party)
        party.conn.execute("COMMIT")
        if party.end() is not None:
            victims.append(party)
    assert victims == [last] and isinstance(last.error, errors.DeadlockDetected)


LOCAL = {
    "row": "UPDATE journal SET note = note WHERE id = {id}",
    "table": "LOCK TABLE journal IN EXCLUSIVE MODE",
    "advisory": "SELECT pg_advisory_xact_lock(4711)",
}


@pytest.mark.parametrize("kind", LOCAL)
def test_through_a_lock_of_the_coordinator(ledger, parties, ids, kind):
    row = ledger.cluster.psql("INSERT INTO journal (note) VALUES ('d') RETURNING id").splitlines()[0]
    lock = LOCAL[kind].format(id=row)
    local, remote = parties(), parties()
    local.run(ADD, 1, ids[0])
    remote.run(lock)
    local.start(lock)
    remote.start(ADD, 2, ids[0], at=0)
    is_victim(remote, f"Process {local.conn.info.backend_pid} waits on the coordinator")
    assert local.end() is None
    local.conn.execute("ROLLBACK")


def test_the_one_who_waits_here_began_last(ledger, parties, ids):
    local, remote = parties(), parties()
    local.run(ADD, 1, ids[0])
    remote.run("SELECT pg_advisory_xact_lock(4711)")
    remote.start(ADD, 2, ids[0], at=0)
    local.start("SELECT pg_advisory_xact_lock(4711)")
    is_victim(remote)
    assert local.end() is None
    local.conn.execute("ROLLBACK")


def test_a_lone_statement(ledger, parties, ids):
    """It holds nothing but a lock on the logical table."""
    holder, lone = parties(), parties()
    lone.conn.execute("COMMIT")
    holder.run(ADD, 0, ids[0])
    lone.start(ADD, 2, ids[0], at=0)
    holder.start("LOCK TABLE ONLY account IN ACCESS EXCLUSIVE MODE")
    assert isinstance(lone.end(), errors.DeadlockDetected)
    commits(holder)


def test_a_session_that_waits_for_itself(ledger, parties, ids):
    party = parties()
    party.run(ADD, 1, ids[0])
    party.start(f"SELECT shardmap.remote_execute('shard-0', 'DELETE FROM public.account WHERE id = {ids[0]}', false)", at=0)
    is_victim(party, "waits on shard \"shard-0\"")
    assert ledger.balances(ids[0])[0] is not None


def test_caught_in_a_block(ledger, parties, ids):
    """The savepoint is rolled back, and the transaction goes on: the other one's lock was taken before it."""
    first, last = parties(), parties()
    first.run(ADD, 0, ids[0])
    last.run(ADD, 0, ids[2])
    last.run("SAVEPOINT s")
    first.start(ADD, 0, ids[2], at=2)
    last.start(ADD, 0, ids[0], at=0)
    error = last.end()
    assert isinstance(error, errors.DeadlockDetected)
    last.conn.execute("ROLLBACK TO s")
    last.conn.execute("COMMIT")
    commits(first)


def holds(ledger, by, ids, parties):
    """Locks the row of shard 0, and returns how to let it go."""
    if by == "session":
        holder = parties()
        holder.run(ADD, 0, ids[0])
        return lambda: holder.conn.execute("COMMIT")
    if by == "stranger":
        conn = psycopg.connect(ledger.cluster.shard_dsn(0))
        conn.execute(ADD, (0, ids[0]))
        return conn.commit
    with psycopg.connect(ledger.cluster.shard_dsn(0), autocommit=True) as conn:
        conn.execute("BEGIN")
        conn.execute(ADD, (0, ids[0]))
        conn.execute("PREPARE TRANSACTION 'by hand'")
    return lambda: ledger.cluster.shard_psql(0, "COMMIT PREPARED 'by hand'")


@pytest.mark.parametrize("by", ["session", "stranger", "prepared"])
def test_a_long_wait_is_no_deadlock(ledger, parties, ids, by):
    let_go = holds(ledger, by, ids, parties)
    waiters = [parties({"shardmap__deadlock_timeout": "20ms"}) for _ in range(2)]
    for waiter in waiters:
        waiter.run(ADD, 0, ids[1 + waiters.index(waiter)])
        waiter.start(ADD, 0, ids[0], at=0)
    time.sleep(1)  # some looks
    assert all(waiter.thread.is_alive() for waiter in waiters)
    let_go()
    commits(*waiters)


def test_a_long_statement_is_no_deadlock(ledger, parties):
    party = parties({"shardmap__deadlock_timeout": "20ms"})
    party.run("SELECT shardmap.remote_execute('shard-0', 'SELECT pg_sleep(1)')")
    party.conn.execute("COMMIT")


@contextlib.contextmanager
def moved(ledger, number, port):
    """New connections to that shard go to that port meanwhile."""
    own = ledger.cluster.shard_server(number).port
    ledger.cluster.psql(f"ALTER SERVER \"shard-{number}\" OPTIONS (SET port '{port}')")
    try:
        yield
    finally:
        ledger.cluster.psql(f"ALTER SERVER \"shard-{number}\" OPTIONS (SET port '{own}')")


def hidden_circle(ledger, parties, ids):
    """`last` closes a circle whose other part is on shard 0, to which it has no new connection; `first` does not look."""
    first, last = parties(NEVER), parties()
    last.run(ADD, 7, ids[0])
    first.run(ADD, 5, ids[1])
    first.start(ADD, -7, ids[0], at=0)
    return first, last


def test_cancel_during_a_look(ledger, parties, ids):
    def attempt():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            first, last = hidden_circle(ledger, parties, ids)
            with moved(ledger, 0, listener.getsockname()[1]):
                last.start(ADD, -5, ids[1], at=1)
                listener.settimeout(PATIENCE)
                asked, _ = listener.accept()  # the look is under way, and gets no answer
                begin = time.monotonic()
                last.conn.cancel_safe()
                assert isinstance(last.end(), errors.QueryCanceled)
                took = time.monotonic() - begin
                asked.close()
            last.conn.execute("ROLLBACK")
            commits_without(first)
        return took
    is_quick(attempt, 2)  # a look ends by itself after 5 s


def commits_without(party):
    assert party.end() is None
    party.conn.execute("ROLLBACK")


def test_an_answer_ends_a_look(ledger, parties, ids):
    def attempt():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            first, last = hidden_circle(ledger, parties, ids)
            with moved(ledger, 0, listener.getsockname()[1]):
                last.start(ADD, -5, ids[1], at=1)
                listener.settimeout(PATIENCE)
                asked, _ = listener.accept()
                begin = time.monotonic()
                first.conn.cancel_safe()
                assert isinstance(first.end(), errors.QueryCanceled)
                first.conn.execute("ROLLBACK")
                assert last.end() is None
                took = time.monotonic() - begin
                asked.close()
            last.conn.execute("ROLLBACK")
        return took
    is_quick(attempt, 3)


def test_shard_that_cannot_be_asked(ledger, parties, ids):
    """Nobody is stopped by guess; lock_timeout holds; once it can be asked, the circle is found."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    first, last = hidden_circle(ledger, parties, ids)
    with moved(ledger, 0, port):  # refuses
        last.start(ADD, -5, ids[1], at=1)
        time.sleep(1)
        assert last.thread.is_alive() and first.thread.is_alive()
    is_victim(last)
    commits_without(first)


def test_ordinary_users(ledger, parties, ids):
    """All that is asked is open to a shard's ordinary user, whoever else takes part."""
    for server in ledger.cluster.shard_servers:
        server.psql("CREATE ROLE clerk LOGIN")
    for number in range(3):
        ledger.cluster.shard_psql(number, "GRANT SELECT, UPDATE ON account TO clerk")
    ledger.cluster.psql("CREATE ROLE clerk LOGIN; GRANT SELECT, UPDATE ON account TO clerk;" + "".join(
        f"CREATE USER MAPPING FOR clerk SERVER \"shard-{n}\" OPTIONS (user 'clerk', password_required 'false');"
        for n in range(3)))
    for users in (("postgres", "clerk"), ("clerk", "postgres"), ("clerk", "clerk")):
        first, last = (Party(ledger, {}, user=user) for user in users)
        first.run(ADD, 5, ids[0])
        last.run(ADD, 7, ids[1])
        first.start(ADD, -5, ids[1], at=1)
        last.start(ADD, -7, ids[0], at=0)
        is_victim(last)
        commits(first)
        first.close()
        last.close()


@pytest.fixture(scope="module")
def other_coordinator(bank):
    """A server that has the library, not preloaded, and knows the same shards."""
    cluster = bank.cluster
    other = Server("other", cluster.directory / "other", cluster.pg, free_port(), cluster.sockets)
    other.create()
    other.start()
    try:
        other.psql("CREATE EXTENSION pg_shardmap CASCADE;" + "".join(
            f"CREATE SERVER \"shard-{n}\" FOREIGN DATA WRAPPER shardmap_fdw OPTIONS (host '127.0.0.1',"
            f" port '{cluster.shard_server(n).port}', dbname '{cluster.shard_database(n)}');"
            f"CREATE USER MAPPING FOR postgres SERVER \"shard-{n}\" OPTIONS (user 'postgres');" for n in range(3)))
        yield other
    finally:
        other.stop("immediate")


@pytest.mark.parametrize("last_is_other", [True, False])
def test_two_coordinators(ledger, parties, ids, other_coordinator, last_is_other):
    ours, theirs = parties(), parties()
    theirs.conn.close()
    theirs.conn = psycopg.connect(other_coordinator.dsn(), autocommit=True, options="-c shardmap.deadlock_timeout=200ms")
    theirs.run("BEGIN")
    remote = "SELECT shardmap.remote_execute('shard-%s', 'UPDATE public.account SET balance = balance WHERE id = %s')"
    ours.run(ADD, 0, ids[0])
    theirs.run(remote % (1, ids[1]))
    steps = [lambda: ours.start(ADD, 0, ids[1], at=1), lambda: theirs.start(remote % (0, ids[0]), at=0)]
    for step in steps if last_is_other else reversed(steps):
        step()
    victim, survivor = (theirs, ours) if last_is_other else (ours, theirs)
    is_victim(victim, "of another coordinator")
    commits_without(survivor)
