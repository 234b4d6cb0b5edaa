"""How fast COPY puts ROWS rows (a million) into a distributed table, and into native partitions over postgres_fdw.

    copy_over_direct, copy_postgres_fdw_over_direct    speed relative to COPY straight into one shard: more is better
    copy_rows_per_second                               routed

All rows go to one shard with the direct client, to all eight else. Up to three interleaved rounds, as many as begin
within a minute. The rows' text is made before, and counted in the tables afterwards.
"""

import os
import statistics
import time

import psycopg

from harness.figures import figure, ratio, say, wanted
from harness.loading import connect, native_partitions, settle, shard_dsns

ROWS = int(os.environ.get("ROWS", "1000000"))
ROUNDS, ENOUGH = 3, 60
FIGURES = ("copy_over_direct", "copy_postgres_fdw_over_direct", "copy_rows_per_second")
TABLE = "CREATE TABLE copied (k bigint, id int, size bigint, name text, PRIMARY KEY (k, id));"
BLOCK = 1000  # rows that the client sends at once


def blocks():
    """COPY's text, ten rows a key, the keys in no order."""
    rows = [f"{number // 10 * 7919 % ROWS}\t{number}\t{number * 31}\tobject number {number}\n" for number in range(ROWS)]
    return ["".join(rows[begin:begin + BLOCK]).encode() for begin in range(0, ROWS, BLOCK)]


def copy(dsn, data):
    """Seconds of one COPY into the emptied table."""
    with connect(dsn) as conn:
        conn.execute("TRUNCATE copied")
        begin = time.perf_counter()
        with conn.cursor().copy("COPY copied FROM STDIN") as copy:
            for block in data:
                copy.write(block)
        elapsed = time.perf_counter() - begin
        assert conn.execute("SELECT count(*) FROM copied").fetchone() == (ROWS,)
    return elapsed


def prepare():
    """The ways' connection strings; the direct client's table is in a database of its own, on the shards' server."""
    shard = shard_dsns()[0]
    with connect(shard) as conn:
        conn.execute("DROP DATABASE IF EXISTS copied WITH (FORCE)")
        conn.execute("CREATE DATABASE copied")
    direct = psycopg.conninfo.make_conninfo(shard, dbname="copied")
    with connect(direct) as conn:
        conn.execute(TABLE)
    with connect() as conn:
        conn.execute(TABLE)
        conn.execute("SELECT shardmap.distribute_table('copied', 'k')")
    dsns = {"direct": direct, "routed": "options='-c shardmap.fanout_policy=allow'"}
    if wanted(FIGURES[1]):
        native_partitions(TABLE)
        dsns["postgres_fdw"] = "dbname=native"
    settle([direct])
    return dsns


def main():
    try:
        dsns, data = prepare(), blocks()
        times = {name: [] for name in dsns}
        begin = time.monotonic()
        while len(times["direct"]) < ROUNDS and time.monotonic() < begin + ENOUGH:
            for name, dsn in dsns.items():
                times[name].append(copy(dsn, data))
        say(f"COPY of {ROWS} rows, seconds: " + ", ".join(
            f"{name} {statistics.median(values):.2f}" for name, values in times.items()))
        figure(FIGURES[0], ratio(times["direct"], times["routed"]))
        if "postgres_fdw" in times:
            figure(FIGURES[1], ratio(times["direct"], times["postgres_fdw"]))
        figure(FIGURES[2], ROWS / statistics.median(times["routed"]), 0)
    finally:
        with connect() as conn:
            conn.execute("DROP TABLE IF EXISTS copied CASCADE")


if wanted(*FIGURES):
    main()
