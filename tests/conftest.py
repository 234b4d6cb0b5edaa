"""One cluster of four shards for all tests that do not start their own, and an empty database for each module.

CLUSTER_UNTIL (seconds since 1970) is when no further test is begun: those left are skipped, and counted at the end. CLUSTER_FROM, a fraction
such as 1/3, is where in the order of modules to begin.
"""

import fractions
import itertools
import os
import pathlib
import time

import pytest
from asking import Database
from cluster import Cluster


LATE = "no time left for it"


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: long, and about the same whatever the version of Postgres; SOAK=no leaves it out")


def pytest_collection_modifyitems(items):
    modules = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    first = int(len(modules) * fractions.Fraction(os.environ.get("CLUSTER_FROM", "0")))
    items[:] = itertools.chain.from_iterable(modules[first:] + modules[:first])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    if time.time() > float(os.environ.get("CLUSTER_UNTIL", "inf")):
        pytest.skip(LATE)


def pytest_terminal_summary(terminalreporter):
    late = sum(LATE in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if late:
        terminalreporter.write_line(f"NOT RUN for lack of time: {late} tests")


@pytest.fixture(scope="session")
def shared_cluster():
    """Coordinator and shards, whose shards log every statement."""
    with Cluster(shards=4, shard_settings={"log_statement": "all", "wal_level": "logical"}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def db(shared_cluster, request):
    """A new coordinator database with shards of its own; the module's SETUP, if it has one, is run in it."""
    name = pathlib.Path(request.module.__file__).stem.removeprefix("test_")
    shared_cluster.new_database(name)
    database = Database(shared_cluster, name)
    try:
        if hasattr(request.module, "SETUP"):
            database.psql(request.module.SETUP)
        yield database
    finally:
        database.close()
        shared_cluster.drop_database(name)
        for user in database.users:
            shared_cluster.coordinator.psql(f"DROP ROLE {user}")


@pytest.fixture
def conn(db):
    """A superuser's session in which fan-outs are allowed."""
    with db.connect() as conn:
        yield conn
