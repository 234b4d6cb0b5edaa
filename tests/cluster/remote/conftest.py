"""One cluster of three shards for the tests of the remote layer.

REMOTE_COORDINATOR_DSN and REMOTE_SHARD_DSNS (separated by ;) name one that runs already, with shard-0 to shard-2.
"""

import os

import pytest
from remote_place import Place


@pytest.fixture(scope="session")
def place():
    if "REMOTE_COORDINATOR_DSN" in os.environ:
        yield Place(os.environ["REMOTE_COORDINATOR_DSN"], os.environ["REMOTE_SHARD_DSNS"].split(";"))
        return
    from cluster import Cluster
    with Cluster(shards=3) as cluster:
        yield Place(cluster.dsn(), [cluster.shard_dsn(number) for number in range(3)])


@pytest.fixture
def conn(place):
    """A session on the coordinator; the shards have an empty table public.t (a int primary key, b text)."""
    for number in range(3):
        with place.shard(number) as shard:
            shard.execute("DROP TABLE IF EXISTS public.t, public.copied CASCADE;"
                          " CREATE TABLE public.t (a int PRIMARY KEY, b text)")
    with place.connect() as conn:
        yield conn
