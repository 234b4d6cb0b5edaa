"""What a statement costs on its way through a router, against the same statement sent straight to its shard.

Runs of pgbench, interleaved, on one cluster; each figure is the median over the rounds of the ratio within a round:

    STATEMENT_over_direct                 routed: time of one client, prepared statements
    STATEMENT_PEER_over_direct            the same for another way: postgres_fdw, pgbouncer, plproxy (harness/peers.py)
    STATEMENT_over_postgres_fdw           routed against hash partitions over postgres_fdw
    STATEMENT_c4_throughput_over_direct   four clients: statements per second, so more is better here
    ..._extended, ..._simple              any of these without prepared statements, and as simple queries

"direct" is a client that is connected to the shard; all keys of a way lie on one shard (harness/loading.py says why).
Fan-outs ask eight shards, on whatever cores there are, where the direct client asks one for its eighth of the rows.
BENCH_ONLY chooses by name; RUN_SECONDS is the length of one run. Times in microseconds go to standard error.
"""

import contextlib
import os
import statistics
from dataclasses import dataclass

from harness import pgbench
from harness.figures import figure, ratio, say, wanted
from harness.loading import connect, load_postgres_fdw, load_shards, unload_shards
from harness.peers import plproxy, through_pgbouncer
from harness.statements import FANOUT, KEYED, Statement, parts

PEERS = {"postgres_fdw": "direct", "pgbouncer": "direct", "plproxy": "plproxy_direct"}  # and what each is compared with
SECONDS = int(os.environ.get("RUN_SECONDS", "1"))


@dataclass(frozen=True)
class Case:
    """One statement in one mode with some clients, measured in that many rounds."""

    statement: Statement
    mode: str = "prepared"
    clients: int = 1
    rounds: int = 5
    peers: bool = True

    def name(self, way, base):
        many = f"_c{self.clients}_throughput" if self.clients > 1 else ""
        peer = "" if way == "routed" else f"_{way}"
        suffix = "" if self.mode == "prepared" else f"_{self.mode}"
        return f"{self.statement.name}{many}{peer}_over_{base}{suffix}"

    def comparisons(self):
        """(figure's name, way, base) of all that is to be printed."""
        found = [(self.name("routed", "direct"), "routed", "direct")]
        if self.peers:
            found.append((self.name("routed", "postgres_fdw"), "routed", "postgres_fdw"))
            found += [(self.name(peer, "direct"), peer, base) for peer, base in PEERS.items()]
        return [each for each in found if wanted(each[0])]


def cases():
    """In order of interest. With everything 9 minutes."""
    yield from (Case(statement) for statement in KEYED)
    yield from (Case(statement, clients=4, rounds=3, peers=statement.name == "keyed_select") for statement in KEYED)
    yield from (Case(statement, rounds=3) for statement in FANOUT)
    for mode in ("extended", "simple"):
        yield from (Case(statement, mode, rounds=3) for statement in KEYED)
        yield Case(KEYED[0], mode, clients=4, rounds=3)


def measure(case, ways):
    """Runs the ways in turn, each second round backwards, and prints the case's figures."""
    able = {way.name for way in ways if way.text(case.statement)}
    comparisons = [(name, *pair) for name, *pair in case.comparisons() if able.issuperset(pair)]
    ways = [way for way in ways if any(way.name in pair for _, *pair in comparisons)]
    results = {way.name: [] for way in ways}
    for number in range(case.rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            text = pgbench.script(way.text(case.statement), way.keys, case.clients)
            results[way.name].append(pgbench.run(text, way.place(case.mode), case.mode, case.clients, SECONDS))
    for name, way, base in comparisons:
        figure(name, ratio(results[way], results[base]))
    if comparisons:
        unit = "us" if case.clients == 1 else "per second"
        say(f"{case.statement.name}, {case.mode}, {case.clients} client{'s'[:case.clients - 1]}, {unit}: " + ", ".join(
            f"{name} {statistics.median(values):.0f}" for name, values in results.items()))


def check(statement, way):
    """Does the way give the rows that it should? A router that is fast because it finds nothing is not."""
    with connect(way.dsn) as conn:
        for key in way.keys if way.text(statement) and statement.rows else ():
            values = {"k": key, "id": 7}
            found = [len(conn.execute(part, values, prepare=False).fetchall()) for part in parts(way.text(statement))]
            if found != [statement.rows]:
                raise RuntimeError(f"{way.name}: {found} rows, not {statement.rows}, for {key}: {way.text(statement)}")


def main():
    needed = {name for case in cases() for _, *pair in case.comparisons() for name in pair}
    if not needed:
        return
    with contextlib.ExitStack() as stack:
        stack.callback(unload_shards)
        ways = load_shards()
        if "postgres_fdw" in needed:
            ways.append(load_postgres_fdw())
        if "pgbouncer" in needed:
            ways += stack.enter_context(through_pgbouncer(ways[0]))
        if "plproxy" in needed:
            ways += stack.enter_context(plproxy())
        for statement in KEYED + FANOUT:
            for way in ways:
                check(statement, way)
        for case in cases():
            measure(case, ways)


main()
