"""The experiments, one after the other, on one cluster.

Always true: a site's databases are gone before the next is made, so that the server holds one set of rows at a time. Next:
site.py and measure.py; what is written, files.py and report.py.
"""

import time

from . import files, report
from .data import Data
from .machine import busy_percent
from .measure import measure
from .questions import COLOCATED, CROSS, SCATTER, SINGLE
from .site import Site

# Statements' times are what is measured, and nothing is written meanwhile.
SERVER_SETTINGS = {"autovacuum": "off", "shared_buffers": "128MB"}


def run(settings, cluster, say, name="exp"):
    """Runs A, B and C on databases called `name`_N of the cluster, and writes their files to `settings.results`."""
    begin = time.monotonic()
    folder = settings.results
    folder.mkdir(parents=True, exist_ok=True)
    data, n = Data(settings.total_rows, settings.seed), settings.shards
    busy = busy_percent()
    say(f"before the run others kept the machine {busy:.0f} % busy; with more than a little, latencies mean nothing")
    say(f"{len(data.objects)} objects, {len(data.comments)} comments; {settings.iterations} iterations after "
        f"{settings.warmup} to warm up, seed {settings.seed}")

    say(f"loading {n} shards for A and C ...")
    with Site(cluster, f"{name}_{n}", n, data) as site:
        a = measure(site, [SINGLE, SCATTER], settings)
        table_a = report.pair_table(f"Experiment A. Routing, N = {n}", a, "single", "scatter")
        show(say, table_a)
        c = measure(site, [COLOCATED, CROSS], settings)
    table_c = report.pair_table(f"Experiment C. Colocation, N = {n}", c, "colocated", "cross_shard")
    b = {}
    for shards in settings.scaling:
        say(f"loading {shards} shards for B ...")
        with Site(cluster, f"{name}_{shards}", shards, data, ("objects",)) as site:
            b[shards] = measure(site, [SINGLE, SCATTER], settings)
    table_b = report.scaling_table("Experiment B. Scaling, the same rows on N shards", b)
    say()
    show(say, table_b)
    show(say, table_c)

    files.write_a(folder, a)
    files.write_b(folder, b)
    files.write_c(folder, c)
    files.write_metadata(folder, settings, cluster, busy, report.headlines(a, b, c))
    (folder / "summary.txt").write_text("\n".join([*table_a, *table_b, *table_c]))
    say(f"all routers gave equal rows, {time.monotonic() - begin:.0f} s; written to {folder}")


def show(say, lines):
    for line in lines:
        say(line)
