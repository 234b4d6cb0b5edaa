"""Clients write and read through the coordinator while replicas lag, are cut off and killed, primaries die, and replicas are
promoted: nobody may miss his own write or see time run backwards. Without consistency the same check must find that they do.

`make test` runs it for some seconds with one seed; `make consistency MINUTES=10` for longer, with a seed of its own, which
CONSISTENCY_SEED repeats (as far as threads can be repeated). Read tests/cluster/consistency/runner.py next.
"""

import os
import random

import pgbouncer
import pytest
from consistency.clients import TokenClient
from consistency.history import Event, violations
from consistency.runner import GUARDED, UNGUARDED, make_cluster, run

MINUTES = float(os.environ.get("CONSISTENCY_MINUTES") or 0)
SEED = os.environ.get("CONSISTENCY_SEED") or (str(random.SystemRandom().randrange(10**6)) if MINUTES else "1")
SECONDS = 60 * MINUTES or 15


def say(text):
    if MINUTES:
        print(text, flush=True)


@pytest.fixture
def cluster():
    with make_cluster() as cluster:
        yield cluster


def worked(seconds):
    """Says of a report that its clients and replicas had something to do."""
    return lambda report: report.reads > 50 * seconds and report.share > 0.05


def verdict(name, report):
    say(f"consistency: {name}: seed {SEED}: {report}")
    assert not report.broken, [f"{thread.name}: {thread.broken!r}" for thread in report.broken]
    return report


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_nobody_misses_his_writes_or_goes_back_in_time(cluster):
    report = verdict("sessions and tokens", run(cluster, SECONDS, GUARDED, SEED, worked(SECONDS), failovers=True, log=say))
    assert report.reads > 50 * SECONDS, "clients were held up"
    assert report.share > 0.05, "replicas had nothing to do, so nothing is proved"
    assert not report.violations, "\n".join(map(str, report.violations[:10]))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_through_a_pooler_in_transaction_mode(cluster):
    if not pgbouncer.fetch():
        pytest.skip("there is no PgBouncer here")
    # Its sessions with the coordinator are three, whoever comes.
    databases = [f"app = host=127.0.0.1 port={cluster.coordinator.port} dbname=app user=postgres pool_size=3"]
    settings = {"pool_mode": "transaction", "server_reset_query_always": 0,
                "ignore_startup_parameters": "options,extra_float_digits"}
    with pgbouncer.pgbouncer(cluster.directory / "pgbouncer", databases, "app", **settings) as port:
        dsn = f"host=127.0.0.1 port={port} dbname=app user=postgres"
        report = verdict("through PgBouncer", run(cluster, SECONDS / 2, [TokenClient] * 6, SEED, worked(SECONDS / 2), log=say, pooled=dsn))
    assert worked(SECONDS / 2)(report), report
    assert not report.violations, "\n".join(map(str, report.violations[:10]))


def test_without_consistency_the_check_finds_violations(cluster):
    def found(report):
        return {each.guarantee for each in report.violations}
    both = {"read your writes", "monotonic reads"}
    assert found(verdict("eventual", run(cluster, 12, UNGUARDED, SEED, lambda report: found(report) == both))) == both


def test_the_check_itself():
    event = lambda client, kind, value, key=1: Event(client, kind, key, value, 0.0)
    good = [event("a", "write", 3), event("a", "read", 3), event("b", "read", 2), event("b", "read", 2), event("a", "read", 9)]
    assert violations(good) == []
    assert violations([event("a", "write", 3), event("a", "read", 1, key=2)]) == []
    found = violations([event("a", "write", 3), event("a", "read", 2), event("a", "read", 1)])
    assert [each.guarantee for each in found] == ["read your writes", "read your writes", "monotonic reads"]
    assert "a read 1 of key 1" in str(found[2])
