"""The three that are compared; each answers a question with rows.

- `Sequential`: a client that knows the shards and asks them one after the other, as the original harness does.
- `AtOnce`: the same client; it sends to all shards before it waits for the first.
- `Coordinator`: one connection to ours, one statement.

All keep their connections, have every statement prepared under a name, and speak through `Connection`, so that what the
client costs is the same for all. That is libpq as psycopg.pq shows it: with threads, asyncio or psycopg's pipelines, asking
eight shards at once takes Python longer than asking them in turn, and would say nothing about asking at once.
"""

import hashlib

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer


def shard_of(key, shards):
    """Number of the shard that owns the key: md5 of its text, mod the number of shards."""
    return int(hashlib.md5(str(key).encode()).hexdigest(), 16) % shards


class Connection:
    """One session; statements are prepared when they are first sent."""

    def __init__(self, dsn, options=""):
        self.session = psycopg.connect(dsn, autocommit=True, options=options, application_name="experiments")
        self.libpq = self.session.pgconn
        self.loader = Transformer(self.session)
        self.prepared = {}

    def send(self, sql, parameters):
        """Sends a statement, and does not wait."""
        name = self.prepared.get(sql)
        if name is None:
            name = self.prepared[sql] = f"q{len(self.prepared)}".encode()
            self._checked(self.libpq.prepare(name, sql.encode()), pq.ExecStatus.COMMAND_OK)
        self.libpq.send_query_prepared(name, [str(value).encode() for value in parameters])
        self.libpq.flush()

    def receive(self):
        """Waits for the rows of the statement that was sent."""
        result = self.libpq.get_result()
        while self.libpq.get_result() is not None:
            pass
        self._checked(result, pq.ExecStatus.TUPLES_OK)
        self.loader.set_pgresult(result)
        return self.loader.load_rows(0, result.ntuples, tuple)

    @staticmethod
    def _checked(result, wanted):
        if result.status != wanted:
            raise psycopg.DatabaseError(result.error_message.decode(errors="replace"))

    def close(self):
        self.session.close()


class Coordinator:
    """The database routes; fan-outs are allowed, so that they are not reported each time."""

    name, label = "coordinator", "coordinator"

    def __init__(self, coordinator_dsn, _shard_dsns):
        self.connection = Connection(coordinator_dsn, "-c shardmap.fanout_policy=allow")

    def ask(self, question, parameters):
        self.connection.send(question.statement, parameters)
        return self.connection.receive()

    def close(self):
        self.connection.close()


class Sequential:
    """The client routes: a keyed step to one shard, another to all in turn."""

    name, label = "sequential", "client, one by one"

    def __init__(self, _coordinator_dsn, shard_dsns):
        self.connections = [Connection(dsn) for dsn in shard_dsns]

    def ask(self, question, parameters):
        rows = None
        for step in question.steps:
            owners = self.connections
            if step.key is not None:
                owners = [owners[shard_of(parameters[step.key], len(owners))]]
            found = self.ask_shards(owners, step.sql, [parameters[position] for position in step.takes])
            rows = found if rows is None else [row + more for row in rows for more in found]
        return rows

    def ask_shards(self, connections, sql, parameters):
        rows = []
        for connection in connections:
            connection.send(sql, parameters)
            rows += connection.receive()
        return rows

    def close(self):
        for connection in self.connections:
            connection.close()


class AtOnce(Sequential):
    """The same, but all shards of a step work at the same time."""

    name, label = "at_once", "client, all at once"

    def ask_shards(self, connections, sql, parameters):
        for connection in connections:
            connection.send(sql, parameters)
        rows = []
        for connection in connections:
            rows += connection.receive()
        return rows


ROUTERS = (Sequential, AtOnce, Coordinator)
LABELS = {router.name: router.label for router in ROUTERS}
