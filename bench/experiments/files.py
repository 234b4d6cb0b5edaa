"""The files of a run, in its results folder. Next: charts.py, which draws what it reads in them."""

import csv
import hashlib
import pathlib
import subprocess

from .machine import processor, processors
from .measure import summarize
from .routers import ROUTERS

ROUTER_NAMES = [router.name for router in ROUTERS]
A_COLUMNS = ["router", "query", "iteration", "latency_ms", "shards_touched", "shard_queries", "shard_statements", "rows"]
B_COLUMNS = ["router", "n_shards", "single_p99_ms", "scatter_p99_ms", "single_mean_ms", "scatter_mean_ms",
             "single_p50_ms", "scatter_p50_ms", "single_shards_touched", "scatter_shards_touched",
             "single_shard_queries", "scatter_shard_queries"]
C_COLUMNS = ["router", "join", "p50_ms", "p99_ms", "mean_ms", "shards_touched", "shard_queries", "shard_statements", "rows"]


class Console:
    """Prints lines, and keeps them in console.log."""

    def __init__(self, path):
        self.file = open(path, "w")

    def __call__(self, line=""):
        print(line, flush=True)
        print(line, file=self.file, flush=True)


def write(path, columns, rows):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def read(path):
    """The rows as dictionaries of text."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def ms(value):
    return f"{value:.4f}"


def span(pair):
    """A count that was always the same, or the lowest and highest."""
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}-{pair[1]}"


def write_a(folder, samples):
    write(folder / "exp_a_routing.csv", A_COLUMNS,
          [[s.router, s.query, s.iteration, ms(s.latency_ms), s.shards_touched, s.shard_queries, s.shard_statements, s.rows]
           for s in samples])


def write_b(folder, by_shards):
    rows = []
    for router in ROUTER_NAMES:
        for shards, samples in by_shards.items():
            single, scatter = (summarize(samples, router, query) for query in ("single", "scatter"))
            rows.append([router, shards, *map(ms, (single.p99, scatter.p99, single.mean, scatter.mean, single.p50,
                                                   scatter.p50)),
                         *map(span, (single.shards, scatter.shards, single.queries, scatter.queries))])
    write(folder / "exp_b_scaling.csv", B_COLUMNS, rows)


def write_c(folder, samples):
    rows = []
    for router in ROUTER_NAMES:
        for join in ("colocated", "cross_shard"):
            s = summarize(samples, router, join)
            rows.append([router, join, ms(s.p50), ms(s.p99), ms(s.mean), span(s.shards), span(s.queries),
                         span(s.statements), f"{s.rows:.2f}"])
    write(folder / "exp_c_colocation.csv", C_COLUMNS, rows)


def write_metadata(folder, settings, cluster, busy, headlines):
    """`image_digest` pins what ran: there is no image here, so it is that of the server's program."""
    binary = cluster.coordinator.bin / "postgres"
    facts = {
        "postgres_version": cluster.psql("SHOW server_version"),
        "image_digest": "sha256:" + hashlib.sha256(binary.read_bytes()).hexdigest(),
        "pg_shardmap_version": cluster.psql(
            "SELECT default_version FROM pg_available_extensions WHERE name = 'pg_shardmap'"),
        "pg_shardmap_commit": commit(),
        "processor": processor(), "processors": processors(), "busy_before_percent": f"{busy:.0f}",
        "total_rows": settings.total_rows, "iterations": settings.iterations, "warmup": settings.warmup,
        "seed": settings.seed, "n_shards": settings.shards, "scaling_n_shards": " ".join(map(str, settings.scaling)),
    }
    write(folder / "run_metadata.csv", ["name", "value"], [*facts.items(), *headlines.items()])


def commit():
    """The commit of the sources, with a + if they differ from it; "unknown" outside a clone."""
    here = pathlib.Path(__file__).resolve().parent
    done = subprocess.run(["git", "-C", here, "describe", "--always", "--exclude", "*", "--dirty=+"], capture_output=True,
                          text=True, check=False)
    return done.stdout.strip() or "unknown"


