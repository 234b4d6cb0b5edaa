"""Generated statements on four shards and on plain tables must give the same answers, row counts, errors and states.

`make test` runs the same ROUNDS of one SEED every time, so that it fails for a change and not by chance; `make
differential` looks for what is new. DIFFERENTIAL_MINUTES: for how long, with a seed of its own each time.
DIFFERENTIAL_SEED: `seed` or `seed/round`, as a failure prints it.
"""

import os

import pytest
from cluster import Cluster
from differential import schema
from differential.runner import Runner, what_to_run

MINUTES = float(os.environ.get("DIFFERENTIAL_MINUTES") or 0)
SEED, ROUNDS = "2028", 16


@pytest.fixture(scope="module")
def cluster():
    with Cluster(shards=4) as cluster:
        schema.create(cluster)
        yield cluster


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 + 600)
def test_differential(cluster):
    seed, rounds = what_to_run(MINUTES, SEED, ROUNDS)
    print(f"\ndifferential: DIFFERENTIAL_SEED={seed}{f'/{rounds[0]}' if rounds and len(rounds) == 1 else ''}, {MINUTES:g} minutes", flush=True)
    runner = Runner(cluster.dsn(), seed, log=lambda text: print(text, flush=True))
    failures = runner.run(MINUTES or (2 if not rounds else 0), rounds)
    print(f"differential: seed {seed}: {runner.summary()}", flush=True)
    assert int(runner.steps()["routed"]) > 10 * runner.counts["rounds"]
    assert not failures, f"seed {seed}: " + "; ".join(f"{each.why} at {each.where}" for each in failures)
