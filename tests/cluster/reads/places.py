"""A cluster whose shards have two replicas each, and what its tests ask: who answered, and who is behind."""

import contextlib
import time

import psycopg
from cluster import Cluster
from patience import PATIENCE

SETUP = """
    CREATE TABLE kv (k int PRIMARY KEY, v int);
    SELECT shardmap.distribute_table('kv', 'k');
    INSERT INTO kv SELECT g, 0 FROM generate_series(1, 40) g;
    CREATE SEQUENCE here;
    CREATE FUNCTION writes(key int) RETURNS int LANGUAGE sql AS 'UPDATE kv SET v = v + 1 WHERE k = key RETURNING v';
"""


class Place:
    """`keys[shard]`: keys of a shard."""

    def __init__(self, cluster):
        self.cluster = cluster
        cluster.psql(SETUP)
        cluster.wait_for_replicas()
        with self.connect() as conn:
            owners = conn.execute("SELECT k, shard_for(k) FROM generate_series(1, 40) k").fetchall()
        self.keys = [[key for key, owner in owners if owner == f"shard-{shard}"] for shard in range(cluster.shards)]

    def connect(self, **settings):
        # Replicas that follow at all catch up in that time, on a busy machine too.
        settings = {"read_preference": "prefer_replica", "fanout_policy": "allow", "catchup_timeout": 10_000, **settings}
        options = " ".join(f"-c shardmap.{name}={value}" for name, value in settings.items())
        conn = psycopg.connect(self.cluster.dsn(), autocommit=True, options=options)
        conn.prepare_threshold = None
        return conn

    def replica(self, shard, number):
        return self.cluster.replica_server(shard, number)

    def questions(self, shard):
        """How often sessions have asked the shard's replicas where they are, as who waits for them does again and again."""
        return sum(replica.log.read_text(errors="replace").count("SELECT r.r, CASE") for replica in self.cluster.replica_servers[shard])

    def settle(self):
        """Waits until every replica has all, and the coordinator knows."""
        for group in self.cluster.replica_servers:
            for replica in group:
                replica.start()
                replica.psql("SELECT pg_wal_replay_resume()")
        self.cluster.wait_for_replicas()
        with self.connect(consistency="token", catchup_timeout=0) as conn:
            token = conn.execute("SELECT shardmap.current_token()").fetchone()[0]
            for shard in range(self.cluster.shards):
                wait_until(lambda: self.verdicts(conn, shard, token) == {"would do"})

    def verdicts(self, conn, shard, token=None):
        found = conn.execute("SELECT considered FROM shardmap.choose_replica(%s, token => %s)", [f"shard-{shard}", token])
        return {line.split(": ")[1] for line in found.fetchone()[0] if "replica" in line.split(": ")[0]}

    @contextlib.contextmanager
    def paused(self, shard, *numbers):
        """Replicas that stand still meanwhile."""
        replicas = [self.replica(shard, number) for number in numbers]
        for replica in replicas:
            replica.psql("SELECT pg_wal_replay_pause()")
            wait_until(lambda: replica.psql("SELECT pg_get_wal_replay_pause_state()") == "paused")
        try:
            yield
        finally:
            for replica in replicas:
                replica.start()
                replica.psql("SELECT pg_wal_replay_resume()")


def server_of(conn, sql):
    """Who has answered the statement, which is run, as EXPLAIN names it; and why."""
    lines = [line.strip() for line, in conn.execute(f"EXPLAIN (ANALYZE, COSTS off, TIMING off, SUMMARY off) {sql}")]
    said = dict(line.split(": ", 1) for line in lines if line.startswith("Read From"))
    return said["Read From"], said["Read From Because"]


def role_of(conn, sql):
    return "replica" if "replica" in server_of(conn, sql)[0] else "primary"


def wait_until(condition, timeout=PATIENCE):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def make_cluster():
    # What replicas lack is what the tests write.
    return Cluster(shards=2, replicas=2, layout="servers", shard_settings={"log_statement": "all", "autovacuum": "off"},
                   coordinator_settings={"shardmap.lag_sample_interval": "100ms"})
