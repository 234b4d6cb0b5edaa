"""Generated statements while connections to shards are cut and statements are cancelled, see differential/faults.py.

As test_differential.py: the same rounds in `make test`, DIFFERENTIAL_MINUTES with a seed of its own in `make
differential`; DIFFERENTIAL_SEED as a failure prints it. When a fault strikes depends on the machine too.
"""

import os

import pytest
from cluster import Cluster
from differential import schema
from differential.faults import FaultyRunner
from differential.runner import what_to_run
from proxy import Proxy

MINUTES = float(os.environ.get("DIFFERENTIAL_MINUTES") or 0)
SEED, ROUNDS = "7", 2


@pytest.fixture(scope="module")
def cluster():
    with Cluster(shards=4, coordinator_settings={"shardmap.resolve_interval": "1"}) as cluster:
        schema.create(cluster)
        yield cluster


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 + 600)
def test_differential_with_faults(cluster):
    seed, rounds = what_to_run(MINUTES, SEED, ROUNDS)
    server = cluster.shard_server(0)  # of all shards
    with Proxy(port=server.port) as proxy:
        for name in cluster.psql("SELECT srvname FROM pg_foreign_server").split():
            cluster.psql(f"ALTER SERVER \"{name}\" OPTIONS (SET port '{proxy.port}')")
        runner = FaultyRunner(cluster.dsn(), seed, proxy, [server.dsn()], log=lambda text: print(text, flush=True))
        failures = runner.run(MINUTES or (2 if not rounds else 0), rounds)
        print(f"\ndifferential with faults: seed {seed}: met {runner.met}; {runner.summary()}", flush=True)
        runner.close()
    assert not failures, f"seed {seed}: " + "; ".join(f"{each.why} at {each.where}" for each in failures)
    assert runner.counts["faults met"] > 5 * runner.counts["rounds"], runner.counts
