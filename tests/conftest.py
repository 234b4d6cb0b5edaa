"""One cluster of four shards for all tests that do not start their own, and an empty database for each module."""

import pathlib

import pytest
from asking import Database
from cluster import Cluster


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: long, and about the same whatever the version of Postgres; SOAK=no leaves it out")


@pytest.fixture(scope="session")
def shared_cluster():
    """Coordinator and shards, whose shards log every statement."""
    with Cluster(shards=4, shard_settings={"log_statement": "all"}) as cluster:
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
