"""A cluster with streaming replicas, sampled often."""

import psycopg
import pytest
from cluster import Cluster


@pytest.fixture(scope="module")
def cluster():
    settings = {"shardmap.lag_sample_interval": "200ms"}
    # A replica can be copied only if its primary writes full pages. What counts is what the tests write.
    shard_settings = {"full_page_writes": "on", "autovacuum": "off"}
    with Cluster(shards=2, replicas=2, layout="servers", coordinator_settings=settings, shard_settings=shard_settings) as cluster:
        cluster.psql("CREATE ROLE ann LOGIN; CREATE ROLE adm LOGIN IN ROLE shardmap_admin")
        for shard in range(2):
            cluster.shard_psql(shard, "CREATE TABLE written (at timestamptz)")
        yield cluster


@pytest.fixture
def conn(cluster):
    with psycopg.connect(cluster.dsn(), autocommit=True, row_factory=psycopg.rows.dict_row) as conn:
        yield conn
