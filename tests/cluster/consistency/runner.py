"""A run: a cluster, clients on it, trouble, and the verdict on what the clients saw."""

import threading
import time

from cluster import Cluster

from .chaos import Chaos
from .clients import EventualClient, Pool, SessionClient, TokenClient
from .history import violations

KEYS = list(range(1, 41))
PATIENCE = 180
SETUP = "CREATE TABLE kv (k int PRIMARY KEY, v bigint NOT NULL); SELECT shardmap.distribute_table('kv', 'k');"


def make_cluster(shards=2, replicas=2):
    """Shards with servers of their own, each of which may become the primary."""
    cluster = Cluster(shards=shards, replicas=replicas, layout="servers",
                      coordinator_settings={"shardmap.lag_sample_interval": "200ms"})
    try:
        cluster.start()
        cluster.psql(SETUP + f"INSERT INTO kv SELECT k, 0 FROM unnest(ARRAY{KEYS}) k;")
        for shard in range(shards):
            ports = [server.port for server in (cluster.shard_server(shard), *cluster.replica_servers[shard])]
            cluster.psql(f"ALTER SERVER \"shard-{shard}\" OPTIONS (SET host '{','.join(['127.0.0.1'] * len(ports))}', "
                         f"SET port '{','.join(map(str, ports))}', ADD target_session_attrs 'read-write')")
        cluster.wait_for_replicas()
        return cluster
    except BaseException:
        cluster.destroy()
        raise


class Reads(threading.Thread):
    """Counts reads of kv by the role of the server that did them. A server that is killed forgets some."""

    def __init__(self, cluster, stop):
        super().__init__(name="reads", daemon=True)
        self.cluster, self.stop, self.last, self.counts = cluster, stop, {}, {"primary": 0, "replica": 0}

    def run(self):
        while not self.stop.wait(0.5):
            for server in self.cluster.servers()[1:]:
                self.look(server)

    def look(self, server):
        number = server.name.split("-")[1]
        try:
            found = server.psql("SELECT pg_is_in_recovery(), coalesce(sum(idx_scan + seq_scan), 0)"
                                " FROM pg_stat_user_tables WHERE relname = 'kv'", f"shard_{number}")
        except Exception:  # pylint: disable=broad-exception-caught  # it is down, which is meant
            return
        recovery, count = found.split("|")
        more = int(count) - self.last.get(server.name, 0)
        self.last[server.name] = int(count)
        self.counts["replica" if recovery == "t" else "primary"] += max(more, 0)

    def share(self):
        return self.counts["replica"] / max(sum(self.counts.values()), 1)


class Report:
    """What a run has shown."""

    def __init__(self, clients, chaos, share):
        self.events = [event for client in clients for event in client.events]
        self.violations = violations(self.events)
        self.failures = {}
        for client in clients:
            for state, count in dict(client.failures).items():
                self.failures[state] = self.failures.get(state, 0) + count
        self.broken = [thread for thread in (*clients, chaos) if thread.broken]
        self.troubles, self.share = chaos.counts, share
        self.reads = sum(event.kind == "read" for event in self.events)

    def __str__(self):
        return (f"{self.reads} reads, {len(self.events) - self.reads} writes, {self.share:.0%} of the scans on replicas, "
                f"{len(self.violations)} violations; troubles {self.troubles}; failed requests by SQLSTATE {self.failures}")


def run(cluster, seconds, ways, seed, enough, failovers=False, log=lambda text: None, pooled=None):
    """Runs clients of these ways for a while, and on until `enough` says so of a report, on a slow machine for some minutes.

    `pooled`: where those go that share connections.
    """
    stop, began = threading.Event(), time.monotonic()
    pool = Pool(pooled or cluster.dsn(), 4)
    clients = []
    for number, way in enumerate(ways):
        place = cluster.dsn() if way is SessionClient else pool
        clients.append(way(f"{way.consistency}-{number}", place, KEYS, seed, began, stop))
    chaos = Chaos(cluster, seed, stop, failovers, lambda text: log(f"{time.monotonic() - began:7.2f} s  {text}"))
    reads = Reads(cluster, stop)
    threads = [*clients, chaos, reads]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    while not enough(Report(clients, chaos, reads.share())) and time.monotonic() < began + seconds + PATIENCE:
        time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join(60)
    return Report(clients, chaos, reads.share())


GUARDED = [SessionClient] * 4 + [TokenClient] * 4
UNGUARDED = [EventualClient] * 6
