"""Clients, each a thread that writes and reads by itself and keeps its token as a user's browser would.

What always holds: a client's next request may use any connection, unless its way is "session"; a failure of a server is
an ordinary event, after which the client goes on.
"""

import random
import threading
import time

import psycopg

from .history import Event

WRITE = "UPDATE kv SET v = v + 1 WHERE k = %s RETURNING v"
READ = "SELECT v FROM kv WHERE k = %s"
FANOUT = "SELECT k, v FROM kv WHERE k = ANY (%s) ORDER BY k"


class Client(threading.Thread):
    """`dsns`: where to connect to, for one request each. `pause`: seconds between two requests at most."""

    consistency = None

    def __init__(self, name, dsn, keys, seed, began, stop, pause=0.02):
        super().__init__(name=name, daemon=True)
        self.dsn, self.keys, self.random, self.began, self.stop = dsn, keys, random.Random(f"{seed}/{name}"), began, stop
        self.pause, self.events, self.failures, self.broken = pause, [], {}, None
        self.token = ""

    def run(self):
        try:
            while not self.stop.is_set():
                try:
                    self.request()
                except psycopg.Error as error:
                    self.failures[error.sqlstate] = self.failures.get(error.sqlstate, 0) + 1
                    self.recover()
                time.sleep(self.random.random() * self.pause)
        except Exception as error:  # pylint: disable=broad-exception-caught  # shown by the runner
            self.broken = error

    def recover(self):
        """After a failure."""

    def request(self):
        key = self.random.choice(self.keys)
        if self.random.random() < 0.25:
            self.write(key)
        elif self.random.random() < 0.2:
            self.read_some(self.random.sample(self.keys, 4))
        else:
            self.read(key)

    def note(self, kind, key, value, how=""):
        self.events.append(Event(self.name, kind, key, value, time.monotonic() - self.began, how))


class SessionClient(Client):
    """One session of its own, which remembers by itself."""

    consistency = "session"

    def __init__(self, *args):
        super().__init__(*args)
        self.conn = None

    def session(self):
        if self.conn is None or self.conn.closed:
            # What the lost session knew goes on in the next one.
            self.conn = connect(self.dsn, self.consistency)
            if self.token:
                self.conn.execute("SELECT shardmap.observe(%s)", [self.token])
        return self.conn

    def request(self):
        self.session()
        super().request()
        if self.random.random() < 0.02:
            self.token = self.conn.execute("SELECT shardmap.session_token()").fetchone()[0] or ""

    def write(self, key):
        self.note("write", key, self.conn.execute(WRITE, [key]).fetchone()[0])

    def read(self, key):
        self.note("read", key, self.conn.execute(READ, [key]).fetchone()[0])

    def read_some(self, keys):
        for key, value in self.conn.execute(FANOUT, [keys]):
            self.note("read", key, value, " among others")


class TokenClient(Client):
    """A request on whichever connection is free; what must not be missed travels with it as a token."""

    consistency = "token"

    def __init__(self, name, pool, *args):
        super().__init__(name, pool, *args)
        self.pool = pool

    def begin(self, conn):
        conn.execute("BEGIN")
        conn.execute(f"SET LOCAL shardmap.read_token = '{self.token}'; SET LOCAL shardmap.consistency = {self.consistency};"
                     " SET LOCAL shardmap.read_preference = prefer_replica; SET LOCAL shardmap.fanout_policy = allow")

    def merge(self, conn, token):
        tokens = [each for each in (self.token, token) if each]
        if tokens:
            self.token = conn.execute("SELECT shardmap.merge_tokens(VARIADIC %s)", [tokens]).fetchone()[0]

    def write(self, key):
        with self.pool.connection(self.random) as conn:
            conn.execute("BEGIN")
            value = conn.execute(WRITE, [key]).fetchone()[0]
            conn.execute("COMMIT AND CHAIN")
            self.merge(conn, conn.execute("SELECT shardmap.write_token()").fetchone()[0])
            conn.execute("COMMIT")
        self.note("write", key, value)

    def read(self, key):
        with self.pool.connection(self.random) as conn:
            self.begin(conn)
            value = conn.execute(READ, [key]).fetchone()[0]
            self.merge(conn, conn.execute("SELECT shardmap.session_token()").fetchone()[0])
            conn.execute("COMMIT")
        self.note("read", key, value)

    def read_some(self, keys):
        with self.pool.connection(self.random) as conn:
            self.begin(conn)
            rows = conn.execute(FANOUT, [keys]).fetchall()
            self.merge(conn, conn.execute("SELECT shardmap.session_token()").fetchone()[0])
            conn.execute("COMMIT")
        for key, value in rows:
            self.note("read", key, value, " among others")


class EventualClient(TokenClient):
    """The same, but its tokens are not looked at: the checker must notice."""

    consistency = "eventual"


def connect(dsn, consistency="session"):
    # pylint: disable=no-member
    options = ("-c shardmap.read_preference=prefer_replica -c shardmap.fanout_policy=allow -c statement_timeout=20s "
               f"-c shardmap.consistency={consistency}")
    conn = psycopg.connect(dsn, autocommit=True, options=options)
    conn.prepare_threshold = None
    return conn


class Pool:
    """Connections that requests share, one at a time: a pooler in transaction mode, without its process."""

    def __init__(self, dsn, size):
        self.dsn, self.free = dsn, [None] * size
        self.changed = threading.Condition()

    def connection(self, chance):
        return Borrowed(self, chance)


class Borrowed:
    """A connection, given back at the end of a request; one that is left in a transaction is closed instead."""

    def __init__(self, pool, chance):
        self.pool, self.chance, self.conn = pool, chance, None

    def __enter__(self):
        with self.pool.changed:
            self.pool.changed.wait_for(lambda: self.pool.free)
            self.conn = self.pool.free.pop(self.chance.randrange(len(self.pool.free)))
        try:
            if self.conn is None or self.conn.closed:
                self.conn = connect(self.pool.dsn)
            return self.conn
        except BaseException:
            self._give_back(None)
            raise

    def __exit__(self, *_):
        idle = not self.conn.closed and self.conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        if not idle:
            self.conn.close()
        self._give_back(self.conn if idle else None)

    def _give_back(self, conn):
        with self.pool.changed:
            self.pool.free.append(conn)
            self.pool.changed.notify()
