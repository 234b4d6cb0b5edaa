"""What a routed statement costs against the same statement sent straight to its shard, and through the partitions alone.

Medians of interleaved pgbench runs with one client on one cluster, as ratios: "direct" has keys of one shard and is
connected to it; "native" is the coordinator with shardmap.enable_routing off.
"""

import os
import pathlib
import re
import statistics
import subprocess
import tempfile

import psycopg

ROUNDS, SECONDS, ROWS = 5, 2, 20_000

STATEMENTS = {
    "point_select": "SELECT v FROM item WHERE k = :k",
    "keyed_join": "SELECT i.v, n.v FROM item i JOIN note n USING (k) WHERE k = :k",
    "keyed_update": "UPDATE item SET v = v + 1 WHERE k = :k",
}


def latency(script, mode, dsn, options):
    """pgbench's mean latency in microseconds over one run."""
    environment = {**os.environ, "PGOPTIONS": options}
    command = ["pgbench", "-n", "-M", mode, "-T", str(SECONDS), "-f", script, dsn]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return float(re.search(r"latency average = ([0-9.]+) ms", output).group(1)) * 1000


def main():
    with psycopg.connect("", autocommit=True) as connection:
        for table in ("item", "note"):
            connection.execute(f"CREATE TABLE {table} (k bigint PRIMARY KEY, v int)")
            connection.execute(f"INSERT INTO {table} SELECT i, i FROM generate_series(1, {ROWS}) i")
            connection.execute(f"SELECT shardmap.distribute_table('{table}', 'k')")
        connection.execute("ANALYZE item, note")
        query = f"SELECT k FROM generate_series(1, {ROWS}) k WHERE shard_for(k) = 'shard-0' LIMIT 1000"
        keys = [row[0] for row in connection.execute(query)]
    with tempfile.TemporaryDirectory() as folder:
        for name, statement in STATEMENTS.items():
            script = pathlib.Path(folder) / f"{name}.sql"
            choose = "CASE " + " ".join(f"WHEN :n = {i} THEN {key}" for i, key in enumerate(keys[:50])) + " ELSE 1 END"
            script.write_text(f"\\set n random(0, 49)\n\\set k {choose}\n{statement};\n")
            for mode in ("prepared", "simple"):
                targets = {
                    "direct": (os.environ["SHARD_0_DSN"], ""),
                    "routed": ("", "-c shardmap.enable_routing=on"),
                    "native": ("", "-c shardmap.enable_routing=off"),
                }
                runs = {target: [] for target in targets}
                for _ in range(ROUNDS):
                    for target, (dsn, options) in targets.items():
                        runs[target].append(latency(str(script), mode, dsn, options))
                median = {target: statistics.median(values) for target, values in runs.items()}
                suffix = "" if mode == "prepared" else "_simple"
                print(f"{name}{suffix}_over_direct {median['routed'] / median['direct']:.2f}")
                print(f"{name}{suffix}_over_native {median['routed'] / median['native']:.2f}")
    with psycopg.connect("", autocommit=True) as connection:
        for table in ("item", "note"):
            connection.execute(f"SELECT shardmap.undistribute_table('{table}')")
            connection.execute(f"DROP TABLE {table}")


main()
