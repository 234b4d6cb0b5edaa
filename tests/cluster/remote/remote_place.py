"""What the tests of the remote layer share: where the servers are, and calls of its SQL functions."""

import contextlib
import threading

import psycopg
from patience import wait_until
from psycopg import sql

# Nobody waits for its end: what it keeps waiting is ended.
SLEEP = "SELECT pg_catalog.pg_sleep(3600)"


class Place:
    """Where coordinator and shards are."""

    def __init__(self, coordinator, shards):
        self.coordinator, self.shards = coordinator, shards

    def connect(self, **options):
        return psycopg.connect(self.coordinator, **{"autocommit": True, **options})

    def shard(self, number=0):
        return psycopg.connect(self.shards[number], autocommit=True)

    def wait_for_shard(self, count, number=0, like="%pg_sleep(3600)%"):
        """Waits until so many of the coordinator's queries like that run on the shard."""
        with self.shard(number) as conn:
            def running():
                return conn.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'"
                    " AND application_name LIKE 'pg_shardmap %%' AND query LIKE %s", (like,)).fetchone()[0]
            wait_until(lambda: running() == count, lambda: f"{running()} queries run on the shard, not {count}")


def execute(conn, statement, shard="shard-0", transactional=True):
    return conn.execute("SELECT shardmap.remote_execute(%s, %s, %s)", (shard, statement, transactional)).fetchone()[0]


def rows(conn, statement, shard="shard-0", transactional=True):
    found = conn.execute("SELECT * FROM shardmap.remote_rows(%s, %s, %s)", (shard, statement, transactional))
    return [row[0] for row in found.fetchall()]


def everywhere(conn, statement):
    return conn.execute("SELECT * FROM shardmap.run_on_shards(%s)", (statement,)).fetchall()


def keys(place, number=0):
    with place.shard(number) as shard:
        return [a for (a,) in shard.execute("SELECT a FROM public.t ORDER BY a")]


@contextlib.contextmanager
def server(conn, name, **options):
    """A foreign server that is no registered shard."""
    conn.execute(sql.SQL("CREATE SERVER {} FOREIGN DATA WRAPPER shardmap_fdw OPTIONS ({})").format(
        sql.Identifier(name),
        sql.SQL(", ").join(sql.SQL("{} {}").format(sql.Identifier(k), sql.Literal(str(v))) for k, v in options.items())))
    conn.execute(sql.SQL("CREATE USER MAPPING FOR CURRENT_USER SERVER {} OPTIONS (user 'postgres')").format(
        sql.Identifier(name)))
    try:
        yield name
    finally:
        conn.execute(sql.SQL("DROP SERVER {} CASCADE").format(sql.Identifier(name)))


def address(place, number=0):
    with place.shard(number) as shard:
        return {"host": "127.0.0.1", "port": shard.info.port, "dbname": shard.info.dbname}


def run_in_thread(function):
    caught = []

    def run():
        try:
            function()
        except psycopg.Error as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, caught
