"""Waiting in tests: for conditions, for sessions that wait for locks, and for what runs in a thread.

A machine may be ten times slower than another, and stand still for seconds anywhere. So no test waits for a time in which
something usually happens, none takes it for granted that two things overlap, and a limit is one that only what is broken
reaches: the time that something takes is no test of it.
"""

import contextlib
import threading
import time

from server import ServerError

PATIENCE = 60


def eventually(look, wanted, patience=PATIENCE, said=lambda seen: seen):
    """What `look()` returns once `wanted` holds of it; `said` tells, of what was seen last, why it may not."""
    deadline = time.monotonic() + patience
    while not wanted(seen := look()):
        assert time.monotonic() < deadline, said(seen)
        time.sleep(0.02)
    return seen


def wait_until(condition, said=lambda: "it did not happen in time", patience=PATIENCE):
    """Waits until `condition()` is true, and returns what it said; `said()` tells why it may not be."""
    return eventually(condition, bool, patience, lambda _: said())


def is_quick(attempt, seconds, times=5):
    """Of some attempts one takes less than so many seconds, as it says: the machine may stand still in any of them, a fault
    shows in all."""
    took = []
    while not took or took[-1] >= seconds:
        assert len(took) < times, f"{took} seconds"
        took.append(attempt())


@contextlib.contextmanager
def crashing(server):
    """A session of the server is killed in here; after it the server has noticed, and is up again. Right after the kill it
    may answer once more, and starts anew only then."""
    def starts():
        return server.log.read_text(errors="replace").count("is ready to accept connections")

    def answers():
        with contextlib.suppress(ServerError):
            return server.psql("SELECT 1") == "1"
    before = starts()
    yield
    wait_until(lambda: starts() > before and answers(), server.log_tail)


def lock_waiters(conn):
    """The pids of that database's sessions that wait for a lock. `conn` may be in a transaction, where pg_stat_activity stands
    still."""
    rows = conn.execute("SELECT DISTINCT w.pid FROM pg_locks w JOIN pg_locks h ON h.pid = w.pid WHERE NOT w.granted"
                        " AND h.database = (SELECT oid FROM pg_database WHERE datname = current_database())")
    return [pid for (pid,) in rows]


class Running:
    """A call in a thread of its own."""

    def __init__(self, call):
        self._result, self._error = None, None
        self.thread = threading.Thread(target=self._run, args=(call,))
        self.thread.start()

    def _run(self, call):
        try:
            self._result = call()
        except BaseException as error:  # it is raised where the end is awaited
            self._error = error

    def is_over(self):
        return not self.thread.is_alive()

    def end(self):
        """What it returned; raises what it raised."""
        self.thread.join(PATIENCE)
        assert self.is_over(), "it does not end"
        if self._error:
            raise self._error
        return self._result
