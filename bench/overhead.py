"""What the library costs by itself: shard_for against md5, and the hooks on statements that do not use it.

Both are compared within one run, interleaved, by medians. For the hooks, one loop of planned-and-executed statements
runs on the coordinator (library preloaded) and on a plain server of the same build; the difference is the cost.
"""

import os
import pathlib
import statistics
import tempfile
import time

import psycopg

from harness.figures import figure, wanted
from server import Server, free_port, give_to_run_user

ROUNDS = 7
ROWS = 1_000_000
LOOPS = 100_000

SHARD_FOR = f"SELECT count(shard_for(i::text)) FROM generate_series(1, {ROWS}) i"
MD5 = f"SELECT count(md5(i::text)) FROM generate_series(1, {ROWS}) i"
# EXECUTE plans the statement anew each time, as a client's simple query does.
IDLE = f"""DO $$ DECLARE v int; BEGIN
FOR i IN 1..{LOOPS} LOOP EXECUTE 'SELECT v FROM idle WHERE id = 7' INTO v; END LOOP; END $$"""


def seconds(connection, sql):
    start = time.perf_counter()
    connection.execute(sql)
    return time.perf_counter() - start


def prepare(connection):
    connection.autocommit = True
    connection.execute("CREATE TABLE idle (id int PRIMARY KEY, v int)")
    connection.execute("INSERT INTO idle SELECT i, i FROM generate_series(1, 100) i")
    connection.execute("ANALYZE idle")
    connection.execute("SET max_parallel_workers_per_gather = 0")


def main():
    home = pathlib.Path(tempfile.mkdtemp(prefix="shardmap-", dir="/tmp"))
    home.chmod(0o755)
    give_to_run_user(home)
    plain = Server("plain", home / "plain", os.environ["PG"], free_port(), home)
    plain.create()
    plain.start()
    try:
        with psycopg.connect("") as ours, psycopg.connect(plain.dsn()) as theirs:
            prepare(ours)
            prepare(theirs)
            owner, digest, with_hooks, without = [], [], [], []
            for _ in range(ROUNDS):
                owner.append(seconds(ours, SHARD_FOR))
                digest.append(seconds(ours, MD5))
                with_hooks.append(seconds(ours, IDLE))
                without.append(seconds(theirs, IDLE))
            ours.execute("DROP TABLE idle")
        median = statistics.median
        figure("shard_for_over_md5", median(owner) / median(digest))
        figure("hook_idle_us", (median(with_hooks) - median(without)) / LOOPS * 1e6)
        figure("idle_statement_us", median(without) / LOOPS * 1e6)
    finally:
        plain.stop()


if wanted("shard_for_over_md5", "hook_idle_us", "idle_statement_us"):
    main()
