"""What the first keyed statement of a new session costs: the coordinator has no connection to the shard yet, and no plan.

    first_statement_over_direct, first_statement_postgres_fdw_over_direct    ratios within interleaved rounds
    first_statement_ms                                                       routed, milliseconds

The session itself is open before; the client is psycopg, whose own time (a tenth of a millisecond) is in both.
"""

import statistics
import time

from harness.figures import figure, ratio, wanted
from harness.loading import connect, load_postgres_fdw, load_shards, unload_shards
from harness.statements import KEYED, parts

ROUNDS = 60
FIGURES = ("first_statement_over_direct", "first_statement_postgres_fdw_over_direct", "first_statement_ms")


def first_statement(way, key):
    """Seconds of the first statement of a new session."""
    sql, = parts(way.text(KEYED[0]))
    with connect(way.dsn) as conn:
        begin = time.perf_counter()
        rows = conn.execute(sql, {"k": key}).fetchall()
        elapsed = time.perf_counter() - begin
    assert len(rows) == KEYED[0].rows
    return elapsed


def main():
    try:
        ways = [*load_shards(), load_postgres_fdw()]
        times = {way.name: [] for way in ways}
        for number in range(ROUNDS):
            for way in ways:
                times[way.name].append(first_statement(way, way.keys[number % len(way.keys)]))
        figure(FIGURES[0], ratio(times["routed"], times["direct"]))
        figure(FIGURES[1], ratio(times["postgres_fdw"], times["direct"]))
        figure(FIGURES[2], statistics.median(times["routed"]) * 1e3)
    finally:
        unload_shards()


if wanted(*FIGURES):
    main()
