"""Sessions whose statements wait for each other, step by step.

A test opens `Sessions` on a database, and names its steps: `run` is a statement that comes to its end; `start` one that
is expected to wait for another session, which is made sure of; `end` awaits it. Next: conftest.py.
"""

import threading

import psycopg
from patience import PATIENCE, wait_until


class Session:
    """One session, and its statement that waits."""

    def __init__(self, conn, watcher):
        self.conn, self.watcher = conn, watcher
        self.thread, self.rows, self.error = None, None, None

    def run(self, sql, params=None, prepare=False):
        """Rows of a statement that waits for nobody; None if it has none."""
        cursor = self.conn.execute(sql, params, prepare=prepare)
        return cursor.fetchall() if cursor.description else None

    def start(self, sql, params=None):
        """Starts a statement that has to wait for a lock of another session, and returns once it waits."""
        def work():
            try:
                self.rows = self.run(sql, params)
            except psycopg.Error as error:
                self.error = error
        self.rows = self.error = None
        self.thread = threading.Thread(target=work)
        self.thread.start()
        wait_until(lambda: self.waits() or not self.thread.is_alive(), lambda: f"waits for no lock, and goes on: {sql}")
        assert self.thread.is_alive(), f"did not wait: {sql}: {self.error or self.rows}"

    def waits(self):
        """Whether it waits for another session of this server."""
        pid = self.conn.info.backend_pid
        return self.watcher.execute("SELECT pg_blocking_pids(%s) <> '{}'", (pid,)).fetchone()[0]

    def end(self):
        """Rows of the statement that waited; raises its error."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "it still waits"
        if self.error:
            raise self.error
        return self.rows


class Sessions:
    """Makes sessions on `db`, and closes them."""

    def __init__(self, db):
        self.db, self.watcher, self.all = db, db.connect(), []

    def __call__(self, **settings):
        self.all.append(Session(self.db.connect(**settings), self.watcher))
        return self.all[-1]

    def close(self):
        for session in self.all:
            session.conn.cancel()
            if session.thread:
                session.thread.join(PATIENCE)
            session.conn.close()
        self.watcher.close()
