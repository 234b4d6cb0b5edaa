"""What a statement costs on its way through a router, against the same statement sent straight to its shard.

Runs of pgbench, interleaved, on one cluster; each figure is the median over the rounds of the ratio within a round:

    STATEMENT_over_direct                 routed: time of one client, prepared statements
    STATEMENT_PEER_over_direct            the same for another way to the same rows: postgres_fdw, ...
    STATEMENT_over_postgres_fdw           routed against hash partitions over postgres_fdw
    STATEMENT_c4_throughput_over_direct   four clients: statements per second, so more is better here
    ..._extended, ..._simple              any of these without prepared statements, and as simple queries

"direct" is a client that is connected to the shard; all keys of a way lie on one shard (harness/loading.py says why).
BENCH_ONLY chooses by name; RUN_SECONDS is the length of one run. Times in microseconds go to standard error.
"""

import os
import re
import statistics
from dataclasses import dataclass

from harness import pgbench
from harness.figures import figure, ratio, say, wanted
from harness.loading import connect, load_postgres_fdw, load_shards, unload_shards

SECONDS = int(os.environ.get("RUN_SECONDS", "1"))


@dataclass(frozen=True)
class Statement:
    """`sql` uses the names of pgbench.script; `rows` is what it must return for every key (None: not looked at)."""

    name: str
    sql: str
    rows: int | None = None


STATEMENTS = (
    Statement("keyed_select", "SELECT id, size, name FROM objects WHERE k = :k;", 10),
    Statement("point_select", "SELECT size FROM objects WHERE k = :k AND id = :id;", 1),
    Statement("keyed_join", "SELECT o.id, o.name, n.body FROM objects o JOIN notes n ON n.k = o.k AND n.object = o.id"
                            " WHERE o.k = :k;", 10),
    Statement("keyed_update", "UPDATE objects SET size = size + 1 WHERE k = :k AND id = :id;"),
    Statement("keyed_insert", "INSERT INTO events (k, id, body) VALUES (:k, :new, 'an event');"),
    Statement("transaction", "BEGIN;\nSELECT size FROM objects WHERE k = :k AND id = :id;\n"
                             "UPDATE objects SET size = size + 1 WHERE k = :k AND id = :id;\nCOMMIT;"),
)


@dataclass(frozen=True)
class Case:
    """One statement in one mode with some clients, measured in that many rounds."""

    statement: Statement
    mode: str = "prepared"
    clients: int = 1
    rounds: int = 5

    def name(self, way, base):
        many = f"_c{self.clients}_throughput" if self.clients > 1 else ""
        peer = "" if way == "routed" else f"_{way}"
        suffix = "" if self.mode == "prepared" else f"_{self.mode}"
        return f"{self.statement.name}{many}{peer}_over_{base}{suffix}"

    def comparisons(self, ways):
        """(figure's name, way, base) of all that is to be printed; a peer's own base is called direct in the name."""
        found = [(self.name(way.name, "direct"), way.name, way.base) for way in ways if way.base != way.name]
        if any(way.name == "postgres_fdw" for way in ways):
            found.append((self.name("routed", "postgres_fdw"), "routed", "postgres_fdw"))
        return [each for each in found if wanted(each[0])]


def cases():
    for statement in STATEMENTS:
        yield Case(statement)
    for mode in ("extended", "simple"):
        for statement in STATEMENTS:
            yield Case(statement, mode, rounds=3)


def measure(case, ways):
    """Runs the ways in turn, each second round backwards, and prints the case's figures."""
    ways = [way for way in ways if way.text(case.statement)]
    comparisons = case.comparisons(ways)
    ways = [way for way in ways if any(way.name in pair for _, *pair in comparisons)]
    results = {way.name: [] for way in ways}
    for number in range(case.rounds if comparisons else 0):
        for way in ways if number % 2 == 0 else reversed(ways):
            text = pgbench.script(way.text(case.statement), way.keys)
            results[way.name].append(pgbench.run(text, way.place(case.mode), case.mode, case.clients, SECONDS))
    for name, way, base in comparisons:
        figure(name, ratio(results[way], results[base]))
    if comparisons:
        unit = "us" if case.clients == 1 else "per second"
        say(f"{case.statement.name}, {case.mode}, {case.clients} client{'s'[:case.clients - 1]}, {unit}: " + ", ".join(
            f"{name} {statistics.median(values):.0f}" for name, values in results.items()))


def check(statement, way):
    """Does the way give the rows that it should? A router that is fast because it finds nothing is not."""
    sql = re.sub(":id|:new", "7", way.text(statement) or "").replace(":k", "%(k)s")
    with connect(way.dsn) as conn:
        for key in way.keys if sql and statement.rows else ():
            found = len(conn.execute(sql, {"k": key}).fetchall())
            if found != statement.rows:
                raise RuntimeError(f"{way.name}: {found} rows, not {statement.rows}, for {key}: {sql}")


def main():
    ways = load_shards()
    try:
        ways.append(load_postgres_fdw())
        for statement in STATEMENTS:
            for way in ways:
                check(statement, way)
        for case in cases():
            measure(case, ways)
    finally:
        unload_shards()


main()
