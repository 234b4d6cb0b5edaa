"""A bank at work while its servers are killed: no money is made or lost, nothing stays prepared, no lock stays.

Tellers move money between accounts of all shards, some of them with a row in a local table; every second or two a session, a
shard or the coordinator is killed. BANK_MINUTES says for how long, else it is 20 seconds.
"""

import contextlib
import os
import random
import signal
import threading
import time

import psycopg
import pytest
from ledger import ACCOUNTS, ADD
from server import ServerError, children

SECONDS = 60 * float(os.environ["BANK_MINUTES"]) if "BANK_MINUTES" in os.environ else 20
TELLERS = 6


class Tellers:
    """Threads that move money until they are stopped; they survive whatever happens to the servers."""

    def __init__(self, ledger, seed):
        self.ledger, self.stop = ledger, threading.Event()
        self.committed, self.failed, self.unexpected = 0, {}, []
        self.threads = [threading.Thread(target=self._work, args=(random.Random(seed + n), n)) for n in range(TELLERS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join(60)

    def _work(self, chance, number):
        while not self.stop.is_set():
            try:
                with self.ledger.connect() as conn:
                    conn.execute("SET statement_timeout = '15s'")
                    while not self.stop.is_set():
                        self._once(conn, chance, number)
            except psycopg.OperationalError as error:
                self._note(error)
                time.sleep(0.1)
            except Exception as error:  # a thread's error would go unseen
                self.unexpected.append(repr(error))
                return

    def _once(self, conn, chance, number):
        # In order, so that tellers do not wait for each other in a circle over several shards.
        ids = sorted(chance.sample(range(1, ACCOUNTS + 1), chance.choice((2, 2, 3))))
        amounts = [chance.randint(1, 50) for _ in ids[1:]]
        try:
            with conn.transaction():
                if chance.random() < 0.2:
                    conn.execute("INSERT INTO journal (note) VALUES ('bank')")
                if chance.random() < 0.2:
                    with conn.transaction(force_rollback=True):
                        conn.execute(ADD, (1, ids[0]))
                for amount, each in zip([-sum(amounts), *amounts], ids):
                    conn.execute(ADD, (amount, each))
            self.committed += 1
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            self._note(error)

    def _note(self, error):
        self.failed[type(error).__name__] = self.failed.get(type(error).__name__, 0) + 1


def kill_something(ledger, chance):
    """A session, a shard, or all of the coordinator; it is up again when this returns."""
    what = chance.choice(("session", "session", "shard", "shard", "coordinator", "at a step"))
    if what == "coordinator":
        ledger.coordinator.kill()
        ledger.coordinator.start()
    elif what == "shard":
        shard = chance.choice(ledger.cluster.shard_servers)
        shard.kill()
        time.sleep(chance.random())
        shard.start()
    elif what == "session":
        with contextlib.suppress(psycopg.Error, IndexError, ProcessLookupError), ledger.connect() as conn:
            pids = conn.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
                                " AND pid <> pg_backend_pid()").fetchall()
            pid = chance.choice(pids)[0]
            if pid in children(ledger.coordinator.pid()):
                os.kill(pid, signal.SIGKILL)
    else:
        point = chance.choice(("prepare_sent", "after_prepare:1", "after_decide", "after_local_commit", "commit_sent"))
        with contextlib.suppress(psycopg.Error), ledger.connect() as conn:
            conn.execute(f"SET shardmap.crash_point = '{point}'")
            with conn.transaction():
                conn.execute(ADD, (-1, ledger.keys(0)[0]))
                conn.execute(ADD, (1, ledger.keys(1)[0]))
    return what


@pytest.mark.soak
def test_bank(ledger):
    seed = int(os.environ.get("BANK_SEED", time.time()))
    chance, kills = random.Random(seed), []
    end = time.monotonic() + SECONDS
    with Tellers(ledger, seed) as tellers:
        def has_worked():
            return tellers.committed > SECONDS and len(kills) > SECONDS / 10
        while time.monotonic() < end or (not has_worked() and time.monotonic() < end + 180):
            time.sleep(0.5 + chance.random())
            with contextlib.suppress(ServerError):
                kills.append(kill_something(ledger, chance))
        for server in ledger.cluster.servers():
            server.start()
    said = f"seed {seed}: {tellers.committed} committed, {tellers.failed}, killed {kills}"
    print(said)
    assert not tellers.unexpected, (said, tellers.unexpected)
    ledger.wait_for_coordinator()
    ledger.settle()
    assert has_worked(), said
