"""What reached the shards: statements in the logs of their servers, which must have log_statement = all.

A server logs a statement when it begins, so that all of a call's statements are in the log when the call has its answer.
But for COMMIT of a transaction that only read, and RELEASE SAVEPOINT: nobody waits for them, so none is counted, nor what
else belongs to commits: PREPARE TRANSACTION, COMMIT PREPARED, and the looks of the resolver, which come when they like.
Next: cluster.py.
"""

import contextlib
import re

OF_COMMITS = re.compile(r"(COMMIT|RELEASE SAVEPOINT|PREPARE TRANSACTION|ROLLBACK PREPARED)\b|.*\bpg_(prepared_xacts|current_xact_id_if_assigned)\b", re.S)
LOGGED = re.compile(r"^\S+ \S+ \S+ \[\d+\] .*? (?P<database>\S+) LOG:  (?:statement|execute [^:]*): (?P<sql>.*)$")


class ShardLog:
    """The logs of the shards of one coordinator database."""

    def __init__(self, cluster, database, shards=None):
        numbers = range(cluster.shards if shards is None else shards)
        self.servers = {cluster.shard_server(number) for number in numbers}
        self.numbers = {cluster.shard_database(number, database): number for number in numbers}

    def asked(self, call):
        """The result of `call()`, and the statements that each shard got meanwhile: {number: [sql]}."""
        before = {server: server.log.stat().st_size for server in self.servers}
        result = call()
        found = {}
        for server in self.servers:
            with open(server.log, errors="replace") as log:
                log.seek(before[server])
                # A statement of several lines goes on after a tab.
                for line in log.read().replace("\n\t", " ").splitlines():
                    match = LOGGED.match(line)
                    if match and match["database"] in self.numbers and not OF_COMMITS.match(match["sql"]):
                        found.setdefault(self.numbers[match["database"]], []).append(match["sql"])
        return result, found

    @contextlib.contextmanager
    def switched_on(self):
        """The servers log statements of new sessions while this holds, in older ones only after a moment."""
        for server in self.servers:
            server.reload(log_statement="all")
        try:
            yield self
        finally:
            for server in self.servers:
                server.reload(log_statement=None)
