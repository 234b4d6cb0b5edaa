"""Plays scenarios on a cluster, and says what came of them.

What always holds: writers and readers work from before the first step of a move until after the last; the verdict is
made when they have ended. Read scenarios.py, judge.py.
"""

import itertools
import threading
import time

from cluster import Cluster

from .arena import Arena
from .clients import QUESTIONS, Reader, Uniform, Writer, Zipf
from .drive import PATIENCE
from .judge import judge
from .ledger import Finding
from .scenarios import chance_of
from .table import Row

SETTINGS = {"shardmap.cleanup_delay": "0", "shardmap.move_batch_rows": "50", "shardmap.resolve_interval": "1",
            "shardmap.lag_sample_interval": "200ms"}
NUMBERS = itertools.count(1)
ENOUGH = 5  # steps of each client before the first move


def open_cluster(shards=3, spare=1):
    """`spare` servers are there for shards to come."""
    return Cluster(shards=shards + spare, layout="servers", coordinator_settings=SETTINGS,
                   shard_settings={"wal_level": "logical"})


class Crew:
    """The clients of an arena."""

    def __init__(self, arena, seed):
        self.arena, self.stop = arena, threading.Event()
        uniform, zipf = Uniform(arena.ranked), Zipf(arena.ranked)
        self.writers = [Writer(number, way, arena.dsn, seed, self.stop) for number, way in enumerate((uniform, uniform, zipf, zipf), 1)]
        questions = [type(each)(each.sql.format(tenant=arena.hot[0]), each.grows) for each in QUESTIONS]
        self.readers = [Reader(number, questions, arena.dsn, seed, self.stop) for number in (1, 2)]
        self.clients = [*self.writers, *self.readers]

    def __enter__(self):
        for client in self.clients:
            client.start()
        self.work_on(ENOUGH)
        return self

    def __exit__(self, *_):
        self.stop.set()
        for client in self.clients:
            client.join(PATIENCE)

    def work_on(self, steps=3):
        """Waits until each client has come so much further."""
        wanted, deadline = {client: client.steps + steps for client in self.clients}, time.monotonic() + PATIENCE
        while any(client.steps < wanted[client] and client.is_alive() for client in self.clients):
            assert time.monotonic() < deadline, f"clients do not go on: {[(each.name, each.failures) for each in self.clients]}"
            time.sleep(0.02)


def play(cluster, scenario, seed, log=lambda text: None):
    """Returns the scenario's row of the table."""
    began = time.monotonic()
    arena = Arena(cluster, f"arena_{next(NUMBERS)}", scenario.strategy, seed=seed, **scenario.arena)
    drive = scenario.drive(arena, scenario.plan, log, scenario.settings)
    row = Row(scenario.name)
    with scenario.around(arena) as arena.around:
        try:
            arena.create()
            with Crew(arena, seed) as crew:
                arena.crew = crew
                try:
                    scenario.act(drive, chance_of(seed, scenario))
                    crew.work_on()
                except Exception as error:  # pylint: disable=broad-exception-caught  # a scenario that fails is a row, too
                    row.findings.append(Finding("failed", f"{type(error).__name__}: {error}"))
                    drive.release()
            arena.wait()
            row.findings += judge(arena, [writer.ledger for writer in crew.writers])
            count(row, arena, drive, crew, scenario)
        finally:
            row.seconds = time.monotonic() - began
            drive.release()
            arena.destroy()
    return row


def count(row, arena, drive, crew, scenario):
    for client in crew.clients:
        row.findings += client.findings
        if client.broken:
            row.findings.append(Finding("broken", f"{client.name}: {type(client.broken).__name__}: {client.broken}"))
        for sqlstate, times in client.failures.items():
            row.failures[sqlstate] = row.failures.get(sqlstate, 0) + times
    if scenario.calm and row.failures:
        row.findings.append(Finding("broken", f"clients failed without any trouble: {row.failures}"))
    row.findings += [Finding("unmet", f"no move came to {point}") for point in drive.unmet]
    row.kills, row.writes, row.reads = drive.kills, sum(each.steps for each in crew.writers), sum(each.steps for each in crew.readers)
    row.longest = max(writer.longest for writer in crew.writers)
    batch = int(scenario.settings.get("shardmap__move_batch_rows", SETTINGS["shardmap.move_batch_rows"]))
    for move in arena.moves():
        row.add_move(move)
    if row.recopied > batch * max(row.kills, 1):
        row.findings.append(Finding("copied again", f"{row.recopied} rows were copied again after {row.kills} kills"))
