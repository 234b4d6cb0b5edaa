"""Tenants on three shards, each a server of its own, and one tenant that moves."""

import psycopg
from cluster import Cluster

SHARDS = 3
SETUP = """
CREATE TABLE account (tenant int, id int, balance bigint NOT NULL, note text, twice bigint GENERATED ALWAYS AS (balance * 2) STORED,
    PRIMARY KEY (tenant, id));
CREATE TABLE entry (id bigint, tenant int NOT NULL, account int, at timestamptz NOT NULL DEFAULT '2024-05-06 07:08:09+02', PRIMARY KEY (id, tenant));
INSERT INTO account SELECT t, i, 0, repeat(E'\\t\\\\N\\n', i % 3) FROM generate_series(1, 600) t, generate_series(1, 40) i;
INSERT INTO entry SELECT t * 1000 + i, t, i FROM generate_series(1, 600) t, generate_series(1, 40) i;
SELECT shardmap.distribute_table('account', 'tenant');
SELECT shardmap.distribute_table('entry', 'tenant');
"""
SETTINGS = {"shardmap.fanout_policy": "allow", "shardmap.cleanup_delay": "0", "shardmap.move_batch_rows": "7",
            "shardmap.resolve_interval": "1"}


class Tenants:
    """The cluster, and what tests ask of it."""

    def __init__(self, cluster):
        self.cluster = cluster
        cluster.psql(SETUP)
        owners = [line.split("|") for line in cluster.psql(
            "SELECT t, right(shard_for(t), 1) FROM generate_series(1, 600) t").splitlines()]
        self._fresh = {n: iter([int(t) for t, owner in owners if int(owner) == n]) for n in range(SHARDS)}

    def fresh(self, shard=0):
        """A tenant that no test has moved."""
        tenant = next(self._fresh[shard], None)
        assert tenant, "all tenants were moved by tests: make more of them"
        return tenant

    def connect(self, **settings):
        options = " ".join(f"-c {name.replace('__', '.')}={value}" for name, value in settings.items())
        return psycopg.connect(self.cluster.dsn(), autocommit=True, options=options)

    def on_shard(self, number, sql, *params):
        with psycopg.connect(self.cluster.shard_dsn(number), autocommit=True) as conn:
            return conn.execute(sql, params or None).fetchall()

    def stored(self, tenant):
        """The tenant's rows on each shard that has any, by table."""
        found = {}
        for shard in range(SHARDS):
            counts = tuple(self.on_shard(shard, f"SELECT count(*) FROM {table} WHERE tenant = %s", tenant)[0][0]
                           for table in ("account", "entry"))
            if any(counts):
                found[shard] = counts
        return found

    def left_behind(self):
        """What moves made on the shards."""
        return [row for shard in range(SHARDS) for row in self.on_shard(
            shard, "SELECT nspname FROM pg_namespace WHERE nspname ~ '^shardmap_move'"
                   " UNION ALL SELECT tgname FROM pg_trigger WHERE tgname ~ '^shardmap_move'")]

    def move(self, conn, number):
        return dict(zip(("state", "rows_copied", "rows_recopied", "rows_deleted", "changes", "pause", "last_error"), conn.execute(
            "SELECT state, rows_copied, rows_recopied, rows_deleted, changes, pause, last_error FROM shardmap.moves WHERE id = %s",
            (number,)).fetchone()))


def plan(conn, tenant, target):
    """The number of a new move."""
    return conn.execute("SELECT DISTINCT move FROM shardmap.move_key(%s, %s)", (tenant, f"shard-{target}")).fetchone()[0]


def run(conn, number):
    conn.execute(f"CALL shardmap.run_move({number})")


def open_tenants():
    return Cluster(shards=SHARDS, layout="servers", coordinator_settings=SETTINGS,
                   shard_settings={"max_prepared_transactions": "20"})
