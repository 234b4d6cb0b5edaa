"""What it costs to let replicas answer: reads with a token against plain routed reads, and how many replicas get to answer.

    token_read_over_routed        a read with a token that a replica is known to hold, against one of the primary: time
    session_read_over_routed      the same in a session that remembers by itself
    eventual_read_over_routed     the same without consistency
    replica_share_after_writes    of reads right after a write of the same user, the part that replicas answer
    token_p50_over_routed         such a read, by its token, against one of the primary, at the median
    token_p99_over_routed         ... and at the 99th percentile

One cluster of its own, a shard with two replicas; everything on the same cores, so that a replica's answer takes as long as
a primary's. Each figure of time is the median over rounds of the ratio within a round. READS sets the reads of a round.
"""

import os
import statistics
import time

import psycopg
from cluster import Cluster

from harness import pgbench
from harness.figures import figure, ratio, say, wanted

ROUNDS, READS = 5, int(os.environ.get("READS", "400"))
SECONDS = int(os.environ.get("RUN_SECONDS", "1"))
SETUP = """
    CREATE TABLE kv (k bigint PRIMARY KEY, v bigint NOT NULL, body text);
    SELECT shardmap.distribute_table('kv', 'k');
    INSERT INTO kv SELECT k, 0, repeat('x', 100) FROM generate_series(1, 10000) k;
"""
READ = "SELECT v, body FROM kv WHERE k = "
FIGURES = {"token": "token_read_over_routed", "session": "session_read_over_routed", "eventual": "eventual_read_over_routed"}
AFTER = ("replica_share_after_writes", "token_p50_over_routed", "token_p99_over_routed")


def dsn(cluster, **settings):
    """The coordinator, with these settings of ours."""
    options = " ".join(f"-c shardmap.{name}={value}" for name, value in settings.items())
    return f"{cluster.dsn()} options='{options}'"


def current_token(cluster):
    """What has been written, once the replicas have it and the coordinator knows."""
    cluster.wait_for_replicas()
    with psycopg.connect(dsn(cluster, catchup_timeout=0), autocommit=True) as conn:
        token = conn.execute("SELECT shardmap.current_token()").fetchone()[0]
        deadline = time.monotonic() + 30
        while conn.execute("SELECT role FROM shardmap.choose_replica('shard-0', token => %s)", [token]).fetchone() != ("replica",):
            if time.monotonic() > deadline:
                raise RuntimeError("no replica is known to have caught up")
            time.sleep(0.1)
    return token


def alone(cluster):
    """One client that does nothing but read."""
    token = current_token(cluster)
    ways = {"routed": dsn(cluster), **{way: dsn(cluster, read_preference="prefer_replica", consistency=way,
                                               **({"read_token": token} if way == "token" else {})) for way in FIGURES}}
    results = {way: [] for way in ways}
    text = pgbench.script(READ + ":k;", list(range(1, 101)), 1)
    for number in range(ROUNDS):
        for way in list(ways) if number % 2 == 0 else reversed(ways):
            results[way].append(pgbench.run(text, ways[way], "prepared", 1, SECONDS))
    for way, name in FIGURES.items():
        figure(name, ratio(results[way], results["routed"]))
    say("reads, us: " + ", ".join(f"{way} {statistics.median(values):.0f}" for way, values in results.items()))


def scans(server):
    """Reads of the table that the server has done, once its sessions have told."""
    time.sleep(1.2)
    return int(server.psql("SELECT coalesce(sum(idx_scan), 0) FROM pg_stat_user_tables WHERE relname = 'kv'", "shard_0"))


def after_writes(cluster):
    """Users who write, take their token, and read by it from another session."""
    p50, p99 = [], []
    primary, replicas = cluster.shard_server(0), cluster.replica_servers[0]
    before = [scans(server) for server in (primary, *replicas)]
    for _ in range(ROUNDS):
        with psycopg.connect(dsn(cluster), autocommit=True) as writer, \
             psycopg.connect(dsn(cluster), autocommit=True) as plain, \
             psycopg.connect(dsn(cluster, read_preference="prefer_replica", consistency="token"), autocommit=True) as reader:
            times = {plain: [], reader: []}
            for number in range(READS):
                key = number % 1000 + 1
                writer.execute("UPDATE kv SET v = v + 1 WHERE k = %s", [key])
                token = writer.execute("SELECT shardmap.write_token()").fetchone()[0]
                reader.execute(f"SET shardmap.read_token = '{token}'")
                for conn in (plain, reader):
                    since = time.perf_counter()
                    conn.execute(READ + "%s", [key]).fetchone()
                    times[conn].append(time.perf_counter() - since)
        for found, part in ((p50, 50), (p99, 99)):
            of = {conn: statistics.quantiles(each, n=100)[part - 1] for conn, each in times.items()}
            found.append(of[reader] / of[plain])
    on_primary, *on_replicas = (scans(server) - old for server, old in zip((primary, *replicas), before))
    by_token = READS * ROUNDS
    # The primary also has the writes and the plain reads.
    say(f"after writes: {by_token} reads by token; {on_primary} scans of the primary, {on_replicas} of the replicas")
    for name, value in zip(AFTER, (sum(on_replicas) / by_token, statistics.median(p50), statistics.median(p99))):
        figure(name, value)


def main():
    if not wanted(*FIGURES.values(), *AFTER):
        return
    with Cluster(shards=1, replicas=2, layout="servers") as cluster:
        cluster.psql(SETUP)
        if wanted(*FIGURES.values()):
            alone(cluster)
        if wanted(*AFTER):
            after_writes(cluster)


main()
