"""How fast rows change their shard, what memory that takes, and how long writers wait for it.

    move_over_copy           speed relative to COPY out of one shard | COPY into the other of the same rows: more is better
    move_to_flip_over_copy   the same until the target owns them: with the changes since, verification of all rows, and the fence
    move_rows_per_second     while copying
    move_memory_growth_mb    most private memory of the session that copies ROWS rows, less what it had with a tenth of them
    move_shards_memory_growth_mb   the same of the sessions on the shards, of the one that takes the most
    move_pause_p50_ms, move_pause_p99_ms, move_pause_max_ms      how long writers were held off, over MOVES moves of a key of
                             1,000 rows each, at WRITES keyed writes a second to all keys
    move_write_p99_ms, move_write_max_ms, still_write_p99_ms     how long the writes took from when they were due: to
                             keys that move, and to others
    quiet_write_p99_ms       the same rate of writes while nothing moves

ROWS rows (a million) of one key, four columns, COPY and move by turns, ROUNDS times (three); MOVES 40, WRITES 2000. What
memory the sessions had in the course of the largest move goes to standard error.
"""

import contextlib
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import threading
import time

from harness.figures import figure, ratio, say, wanted
from harness.loading import connect, settle, shard_dsns

ROWS, ROUNDS, MOVES, WRITES = (int(os.environ.get(name, default)) for name, default in (
    ("ROWS", 10**6), ("ROUNDS", 3), ("MOVES", 40), ("WRITES", 2000)))
KEYS = 400
SPEED = ("move_over_copy", "move_to_flip_over_copy", "move_rows_per_second", "move_memory_growth_mb", "move_shards_memory_growth_mb")
PAUSES = ("move_pause_p50_ms", "move_pause_p99_ms", "move_pause_max_ms", "move_write_p99_ms", "move_write_max_ms", "still_write_p99_ms",
          "quiet_write_p99_ms")
TABLE = "CREATE TABLE {} (k bigint, id bigint, size bigint, name text, PRIMARY KEY (k, id))"
FILL = "INSERT INTO {} SELECT {}, i, i * 31, 'object number ' || i FROM generate_series(1, {}) i"


SHARD_SESSIONS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND starts_with(application_name, 'pg_shardmap ')"


def private_memory(pid):
    """MB that a process has to itself; 0: it is gone."""
    try:
        found = re.search(r"RssAnon:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())
    except OSError:
        found = None
    return int(found.group(1)) / 1024 if found else 0.0


class Memory(threading.Thread):
    """The private memory, in MB, that a session and those it has on the shards had while this ran: `samples` of seconds, the
    session's, and the most of a session on each shard."""

    def __init__(self, pid, shards):
        super().__init__(daemon=True)
        self.pid, self.shards, self.samples, self.over = pid, shards, [], threading.Event()

    def run(self):
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            shards = [stack.enter_context(connect(dsn)) for dsn in self.shards]
            while not self.over.wait(0.05):
                there = [max((private_memory(pid) for pid, in shard.execute(SHARD_SESSIONS)), default=0.0) for shard in shards]
                self.samples.append((time.perf_counter() - began, private_memory(self.pid), *there))

    def most(self):
        """Of the session, and of one on a shard."""
        return max(sample[1] for sample in self.samples), max(max(sample[2:]) for sample in self.samples)

    def course(self, points=20):
        """Some of the samples, from the first to the last, as text."""
        chosen = [self.samples[number * (len(self.samples) - 1) // points] for number in range(points + 1)]
        return "; ".join(f"{sample[0]:.0f} s " + " ".join(f"{each:.1f}" for each in sample[1:]) for sample in chosen)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()


def pipe(source, target, table):
    """Seconds of COPY from one shard to the other, by two psql."""
    with connect(target) as conn:
        conn.execute("TRUNCATE plain")
    begin = time.perf_counter()
    with subprocess.Popen(["psql", "-Xqc", f"COPY (SELECT * FROM {table}) TO STDOUT", source], stdout=subprocess.PIPE) as out:
        subprocess.run(["psql", "-Xqc", "COPY plain FROM STDIN", target], stdin=out.stdout, check=True)
    return time.perf_counter() - begin


def move(key, target):
    """Seconds that a move of the key copied, seconds until its flip, and what memory it took."""
    times = {}

    def note(notice):
        state = re.search(r" is (copying|catching up|flipped)\b", notice.message_primary)
        if state:
            times.setdefault(state.group(1), time.perf_counter())
    with connect("options='-c shardmap.cleanup_delay=0'") as conn:
        number = conn.execute("SELECT min(move) FROM shardmap.move_key(%s::bigint, %s)", (key, target)).fetchone()[0]
        conn.add_notice_handler(note)
        began = time.perf_counter()
        with Memory(conn.info.backend_pid, shard_dsns()[:2]) as memory:
            conn.execute(f"CALL shardmap.run_move({number})")
    return times["catching up"] - times["copying"], times["flipped"] - began, memory


def speed():
    shards = shard_dsns()
    for dsn in shards[:2]:
        with connect(dsn) as conn:
            conn.execute(TABLE.format("plain"))
    with connect() as conn:
        conn.execute(TABLE.format("moving"))
        conn.execute("SELECT shardmap.distribute_table('moving', 'k')")
        key, small = (row[0] for row in conn.execute("SELECT k FROM generate_series(1, 1000) k WHERE shard_for(k) = 'shard-0' LIMIT 2"))
        say(f"{ROWS} rows of a key")
        conn.execute(FILL.format("moving", key, ROWS))
        conn.execute(FILL.format("moving", small, ROWS // 10))
    with connect(shards[0]) as conn:
        conn.execute(FILL.format("plain", key, ROWS))
        conn.execute("ALTER TABLE plain RENAME TO plain_source; CREATE TABLE plain (LIKE plain_source INCLUDING ALL)")
    settle(shards[:1])
    copies, moves, flips, most = [], [], [], (0.0, 0.0)
    base = move(small, "shard-1")[2].most()
    for number in range(ROUNDS):
        settle(shards[:2])  # or else a move would meet the dead rows of the one before, and COPY none
        copies.append(pipe(shards[0], shards[1], "plain_source"))
        copied, flipped, memory = move(key, f"shard-{1 - number % 2}")
        moves.append(copied)
        flips.append(flipped)
        most = tuple(map(max, most, memory.most()))
    say(f"seconds: COPY {statistics.median(copies):.2f}, move {statistics.median(moves):.2f}, to its flip {statistics.median(flips):.2f}; "
        f"memory: {base[0]:.1f} MB with {ROWS // 10} rows, {most[0]:.1f} MB with {ROWS}; on shards {base[1]:.1f} and {most[1]:.1f} MB")
    say(f"private MB of the session, on shard-0 and on shard-1: {memory.course()}")
    figure(SPEED[0], ratio(copies, moves))
    figure(SPEED[1], ratio(copies, flips))
    figure(SPEED[2], ROWS / statistics.median(moves), 0)
    figure(SPEED[3], most[0] - base[0], 1)
    figure(SPEED[4], most[1] - base[1], 1)


@contextlib.contextmanager
def writers(keys, rate, folder, name):
    """pgbench at that rate; its log, of microseconds, is read when it is over."""
    script = pathlib.Path(folder) / f"{name}.sql"
    low, high = min(keys), max(keys)
    script.write_text(f"\\set k random({low}, {high})\n\\set id random(1, 100)\nUPDATE written SET size = size + 1 WHERE k = :k AND id = :id;\n")
    command = ["pgbench", "-n", "-M", "prepared", "-c", "4", "-T", "3600", "-R", str(rate), "-l", "--log-prefix", f"{folder}/{name}", "-f",
               str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
            assert process.poll() is None, process.communicate()
        finally:
            process.terminate()


def latencies(folder, name):
    """Milliseconds of each write, from when it was due: one that waits for another is late, too. (A line may be cut short.)"""
    lines = [line.split() for log in pathlib.Path(folder).glob(f"{name}.*[0-9]") for line in log.read_text().splitlines()]
    return sorted(int(line[2]) / 1000 for line in lines if len(line) == 7)


def percentile(ordered, percent):
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def pauses():
    with connect() as conn:
        conn.execute(TABLE.format("written"))
        conn.execute("SELECT shardmap.distribute_table('written', 'k')")
        conn.execute(f"INSERT INTO written SELECT k, i, 0, 'object number ' || i FROM generate_series(1, {KEYS}) k, generate_series(1, 1000) i")
    settle(shard_dsns()[:1])
    moving, still = range(1, KEYS // 2 + 1), range(KEYS // 2 + 1, KEYS + 1)
    with tempfile.TemporaryDirectory() as folder:
        with writers(range(1, KEYS + 1), WRITES, folder, "quiet"):
            time.sleep(10)
        with writers(moving, WRITES // 2, folder, "moving"), writers(still, WRITES // 2, folder, "still"), \
                connect("options='-c shardmap.cleanup_delay=0 -c client_min_messages=warning'") as conn:
            time.sleep(1)
            for number in range(MOVES):
                key = moving[number % len(moving)]
                shard = conn.execute("SELECT shard_for(%s::bigint)", (key,)).fetchone()[0]
                target = f"shard-{(int(shard[6:]) + 1) % len(shard_dsns())}"
                job = conn.execute("SELECT min(move) FROM shardmap.move_key(%s::bigint, %s)", (key, target)).fetchone()[0]
                conn.execute(f"CALL shardmap.run_move({job})")
            times = sorted(1000 * row[0].total_seconds() for row in conn.execute(
                "SELECT pause FROM shardmap.moves WHERE pause IS NOT NULL ORDER BY id DESC LIMIT %s", (MOVES,)))
            fences = conn.execute("SELECT sum(fences) FROM (SELECT fences FROM shardmap.moves ORDER BY id DESC LIMIT %s) m", (MOVES,)).fetchone()[0]
        quiet, moved, stayed = (latencies(folder, name) for name in ("quiet", "moving", "still"))
    say(f"{len(times)} moves, {fences} fences, {len(moved) + len(stayed)} writes; longest write to a key that stays {stayed[-1]:.0f} ms")
    for name, value in zip(PAUSES, (percentile(times, 50), percentile(times, 99), times[-1], percentile(moved, 99), moved[-1],
                                    percentile(stayed, 99), percentile(quiet, 99)), strict=True):
        figure(name, value, 1)


def main():
    try:
        if wanted(*SPEED):
            speed()
        if wanted(*PAUSES):
            pauses()
    finally:
        with connect() as conn:
            conn.execute("DROP TABLE IF EXISTS moving, written CASCADE")


if wanted(*SPEED, *PAUSES):
    main()
