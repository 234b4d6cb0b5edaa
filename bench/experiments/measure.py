"""Asks the routers a question in turn: once with the clock, once with the shards' logs.

Both passes ask for the same objects. In each iteration every router is asked, a different one first each time, so that what else the
machine does falls on all alike; answers are compared between the clock's readings, and unequal ones end the run. The pass
with logs counts what reached the shards; nothing is timed in it, since logging costs time.
"""

import gc
import math
import re
import statistics
import time
from dataclasses import dataclass

from .data import TABLES

NAMES_A_TABLE = re.compile(rf"\b({'|'.join(TABLES)})\b")


class Unequal(Exception):
    """Two routers gave different rows."""


@dataclass
class Sample:
    """One answer. `shard_queries` name a table; `shard_statements` are all, those that open and end a transaction too."""

    router: str
    query: str
    iteration: int
    latency_ms: float
    rows: int
    shards_touched: int = 0
    shard_queries: int = 0
    shard_statements: int = 0


def measure(site, questions, settings):
    """A sample for each question, iteration and router; one question is done with before the next begins."""
    samples = []
    for question in questions:
        for router in site.routers:
            for row in site.data.to_warm_up(settings.warmup, site.shards if question.keyed else 1):
                router.ask(question, question.parameters(row))
        objects = site.data.asked_for(settings.iterations)
        found = timed(site, question, objects)
        count_statements(site, question, objects, found)
        samples += found.values()
    return samples


def turns(routers, question, objects):
    """Every (iteration, parameters, router); the routers take turns in being first."""
    for iteration, row in enumerate(objects):
        first = iteration % len(routers)
        for router in routers[first:] + routers[:first]:
            yield iteration, question.parameters(row), router


def timed(site, question, objects):
    """{(router, iteration): Sample}, with latencies and rows."""
    samples, answers = {}, {}
    gc.collect()
    gc.disable()
    try:
        for iteration, parameters, router in turns(site.routers, question, objects):
            begin = time.perf_counter()
            rows = router.ask(question, parameters)
            latency = (time.perf_counter() - begin) * 1000
            samples[router.name, iteration] = Sample(router.name, question.name, iteration, latency, len(rows))
            rows.sort()
            if answers.setdefault(iteration, rows) != rows:
                raise Unequal(f"{router.name} answers {question.name} {parameters} with other rows than another router")
    finally:
        gc.enable()
    return samples


def count_statements(site, question, objects, samples):
    """Fills in what the shards' logs say about each sample."""
    with site.log.switched_on():
        wait_for_log(site, question, objects[0])
        for iteration, parameters, router in turns(site.routers, question, objects):
            rows, asked = site.log.asked(lambda: router.ask(question, parameters))
            sample = samples[router.name, iteration]
            if len(rows) != sample.rows:
                raise Unequal(f"{router.name} answers {question.name} {parameters} with other rows than before")
            statements = [sql for of_shard in asked.values() for sql in of_shard]
            sample.shards_touched = len(asked)
            sample.shard_statements = len(statements)
            sample.shard_queries = sum(1 for sql in statements if NAMES_A_TABLE.search(sql))


def wait_for_log(site, question, row, timeout=10):
    """Until what every router asks is logged by as many shards as a client that routes itself must ask."""
    wanted, deadline = (site.shards if question.scattered else 1), time.monotonic() + timeout
    for router in site.routers:
        while len(site.log.asked(lambda: router.ask(question, question.parameters(row)))[1]) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the shards do not log what router {router.name} asks")
            time.sleep(0.05)


@dataclass
class Summary:
    """Of one router and one question; latencies in milliseconds, counts as the lowest and highest seen."""

    p50: float
    p99: float
    mean: float
    shards: tuple
    queries: tuple
    statements: tuple
    rows: float


def percentile(values, percent):
    """The least value that at least `percent` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def summarize(samples, router, query):
    chosen = [sample for sample in samples if (sample.router, sample.query) == (router, query)]
    latencies = [sample.latency_ms for sample in chosen]

    def span(name):
        values = [getattr(sample, name) for sample in chosen]
        return min(values), max(values)
    return Summary(percentile(latencies, 50), percentile(latencies, 99), statistics.mean(latencies),
                   span("shards_touched"), span("shard_queries"), span("shard_statements"),
                   statistics.mean(sample.rows for sample in chosen))
