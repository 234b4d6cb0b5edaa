"""One pgbench run: a script for a statement and some keys, and what the run tells.

For one client the figure is its transactions' typical time: the mean of the middle half, which neither a new session's
first statements nor another process' bursts move. For several it is what they got done per second.
"""

import pathlib
import re
import statistics
import subprocess
import tempfile


def choose(keys, low=0):
    """A pgbench expression for the key number :n, as a balanced tree, since its evaluation counts as the statement's."""
    if len(keys) == 1:
        return str(keys[0])
    half = len(keys) // 2
    return f"CASE WHEN :n < {low + half} THEN {choose(keys[:half], low)} ELSE {choose(keys[half:], low + half)} END"


def script(statement, keys, clients):
    """The statement's text may use :k, a key; :id, the number of one of its rows; :new, a number that is in no row.

    Each client has keys of its own: a router that asks the shard at REPEATABLE READ would fail on two writers of a row.
    """
    return (f"\\set n random(0, {len(keys) // clients - 1}) * {clients} + :client_id\n\\set k {choose(keys)}\n"
            "\\set id random(1, 10)\n\\set new random(1000, 4000000000000000000)\n" + statement + "\n")


def run(text, dsn, mode, clients, seconds):
    """Microseconds of a transaction for one client, transactions per second for more."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "script.sql"
        file.write_text(text)
        command = ["pgbench", "-n", "-M", mode, "-c", str(clients), "-T", str(seconds), "-f", str(file)]
        if clients == 1:
            command += ["-l", "--log-prefix", f"{folder}/times"]
        done = subprocess.run([*command, dsn], capture_output=True, text=True, check=False)
        if done.returncode or "number of failed transactions: 0" not in done.stdout:
            raise RuntimeError(f"pgbench failed on {dsn}:\n{done.stderr}{done.stdout}\n{text}")
        if clients > 1:
            return float(re.search(r"tps = ([0-9.]+)", done.stdout).group(1))
        times = sorted(int(line.split()[2]) for log in pathlib.Path(folder).glob("times.*") for line in log.open())
    quarter = len(times) // 4
    return statistics.fmean(times[quarter:len(times) - quarter])
