"""SQL regression: runs tests/regress/sql/NAME.sql with psql and compares what it prints with expected/NAME.out.

Each file has a coordinator database and four empty shard databases of its own, with shard-0 .. shard-3 registered, so
that files depend on nothing but themselves. Where versions of Postgres differ, expected/NAME_1.out and so on are right
too. Ports and the databases' names are replaced before comparing. A difference is printed and kept in
tests/regress/results. Next: cluster.py.
"""

import concurrent.futures
import difflib
import os
import pathlib
import re
import subprocess
import sys
import time

from cluster import Cluster
from server import ROOT, ServerError

FOLDER = ROOT / "tests" / "regress"
SHARDS = 4


def normalise(text, database):
    text = re.sub(r"\bport( ?=? ?'?)\d{5}\b", r"port\1PORT", text)
    text = re.sub(r'(port "?)\d{5}\b', r"\1PORT", text)
    return text.replace(f"{database}_shard_", "shard_").replace(database, "regress")


def run(cluster, name):
    """Returns the difference, "" if there is none, and the seconds it took."""
    begin, database = time.monotonic(), f"regress_{name}"
    cluster.new_database(database)
    env = {**os.environ, "PGTZ": "UTC", "PGDATESTYLE": "ISO, MDY", "PGOPTIONS": "-c intervalstyle=postgres",
           "PGHOST": "127.0.0.1", "PGPORT": str(cluster.coordinator.port), "PGUSER": "postgres", "PGDATABASE": database}
    done = subprocess.run([str(cluster.coordinator.bin / "psql"), "-X", "-a", "-q", "-v", "HIDE_TABLEAM=on",
                           "-f", f"{name}.sql"],
                          cwd=FOLDER / "sql", env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=600, check=False)
    got = normalise(done.stdout, database)
    (FOLDER / "results" / f"{name}.out").write_text(got)
    cluster.drop_database(database)
    return compare(name, got), time.monotonic() - begin


def compare(name, got):
    """The shortest difference from any of the expected outputs."""
    expected = [path for path in (FOLDER / "expected").glob(f"{name}*.out")
                if re.fullmatch(rf"{re.escape(name)}(_\d)?", path.stem)]
    if not expected:
        return f"expected/{name}.out does not exist; results/{name}.out has what was printed\n"
    differences = ["".join(difflib.unified_diff(path.read_text().splitlines(True), got.splitlines(True),
                                                f"expected/{path.name}", f"results/{name}.out"))
                   for path in sorted(expected)]
    return min(differences, key=len)


def main(names):
    (FOLDER / "results").mkdir(exist_ok=True)
    names = names or sorted(path.stem for path in (FOLDER / "sql").glob("*.sql"))
    failed = []
    try:
        with Cluster(shards=SHARDS) as cluster, concurrent.futures.ThreadPoolExecutor(2) as pool:
            for name, (difference, seconds) in zip(names, pool.map(lambda name: run(cluster, name), names)):
                print(f"    {name:<30} {'FAILED' if difference else 'ok':<6} {seconds:5.1f} s", flush=True)
                if difference:
                    failed.append(name)
                    print(difference, flush=True)
            if failed:
                print(cluster.coordinator.log_tail(30))
    except ServerError as error:
        sys.exit(f"error: {error}")
    if failed:
        sys.exit(f"error: {len(failed)} of {len(names)} SQL tests failed: {' '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
