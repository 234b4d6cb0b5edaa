"""What goes wrong with the shards' servers while clients work: replicas lag, lose their stream, die; primaries die, or a
replica takes a primary's place.

What always holds: nothing that was committed is lost, or else no client could be promised anything: a primary dies and
comes back, or is stopped in good order before a replica that has all of its log is promoted.
"""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time

from server import ServerError, as_run_user


class Chaos(threading.Thread):
    """Breaks something every now and then, and repairs it. `log` gets a line of each. `failovers`: promotions too."""

    def __init__(self, cluster, seed, stop, failovers, log):
        super().__init__(name="chaos", daemon=True)
        self.cluster, self.random, self.stop, self.log = cluster, random.Random(f"{seed}/chaos"), stop, log
        self.primaries = list(cluster.shard_servers)
        self.replicas = [list(group) for group in cluster.replica_servers]
        self.to_fail_over = list(range(len(self.primaries))) if failovers else []
        self.counts, self.broken = {}, None

    def run(self):
        try:
            while not self.stop.wait(self.random.uniform(0.2, 1.2)):
                self.act()
            for group in self.replicas:
                for replica in group:
                    self.calm(replica)
        except Exception as error:  # pylint: disable=broad-exception-caught  # shown by the runner
            self.broken = error

    def act(self):
        shard = self.random.randrange(len(self.primaries))
        replica = self.random.choice(self.replicas[shard])
        actions = [("pause", 6), ("delay", 4), ("cut the stream", 3), ("kill the replica", 2), ("kill the primary", 1)]
        if shard in self.to_fail_over:
            actions.append(("fail over", 1))
        name = self.random.choices([name for name, _ in actions], [weight for _, weight in actions])[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        self.log(f"{name}: {replica.name if 'primary' not in name else self.primaries[shard].name}")
        {"pause": self.pause, "delay": self.delay, "cut the stream": self.cut, "kill the replica": self.kill,
         "kill the primary": lambda _: self.kill(self.primaries[shard]),
         "fail over": lambda _: self.fail_over(shard)}[name](replica)

    def pause(self, replica):
        """Replay stands still for up to two seconds."""
        replica.psql("SELECT pg_wal_replay_pause()")
        self.stop.wait(self.random.uniform(0.1, 2))
        replica.psql("SELECT pg_wal_replay_resume()")

    def delay(self, replica):
        """Replay follows commits at a distance from now on, or no longer."""
        delay = self.random.choice(["0", "0", "100ms", "500ms", "2s"])
        replica.configure(recovery_min_apply_delay=delay)
        replica.psql("SELECT pg_reload_conf()")

    def cut(self, replica):
        """The stream breaks off, and is taken up again by the server itself."""
        pid = replica.psql("SELECT pid FROM pg_stat_wal_receiver")
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGTERM)

    def kill(self, server):
        server.kill()
        self.stop.wait(self.random.uniform(0, 1))
        server.start()

    def calm(self, replica):
        replica.configure(recovery_min_apply_delay=None)
        replica.psql("SELECT pg_reload_conf()")

    def fail_over(self, shard):
        """A replica takes the primary's place; the other one follows it."""
        self.to_fail_over.remove(shard)
        group, primary = self.replicas[shard], self.primaries[shard]
        for replica in group:
            self.calm(replica)
        primary.stop("fast")
        chosen = max(group, key=lambda replica: int(replica.psql("SELECT pg_last_wal_receive_lsn() - '0/0'::pg_lsn")))
        if not has_all(chosen, primary):
            primary.start()
            self.log(f"{chosen.name} lacks some of the log; not promoted")
            return
        chosen.psql("SELECT pg_promote()")
        group.remove(chosen)
        self.primaries[shard] = chosen
        for replica in group:
            replica.psql(f"ALTER SYSTEM SET primary_conninfo = 'host=127.0.0.1 port={chosen.port} user=postgres'")
            replica.psql("SELECT pg_reload_conf()")


def last_checkpoint(server):
    """Where a stopped server's log ends, but for that record."""
    done = subprocess.run([str(server.bin / "pg_controldata"), str(server.data)], capture_output=True, text=True, check=True,
                          env={"LC_ALL": "C"}, **as_run_user())
    return next(line.split(":")[1].strip() for line in done.stdout.splitlines()
                if line.startswith("Latest checkpoint location"))


def has_all(replica, primary):
    """Whether the replica has received what the stopped primary had written last."""
    wanted = last_checkpoint(primary)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if replica.psql(f"SELECT pg_last_wal_replay_lsn() > '{wanted}'") == "t":
                return True
        except ServerError:
            return False
        time.sleep(0.05)
    return False
