"""What breaks while the session that runs a move stands still at a point; `mend` repairs it when that run has ended.

What always holds: nothing that was committed is lost by a trouble itself, and what it breaks is whole again after `mend`.
"""

import os
import signal

from server import children

from .drive import state


class Trouble:
    name = "nothing"

    def strike(self, arena, move):
        raise NotImplementedError

    def mend(self, arena, move):
        """What was broken is whole again."""

    def __str__(self):
        return self.name


class KillSession(Trouble):
    """kill -9 of the session that runs the move; Postgres then restarts all others of the coordinator."""

    name = "session killed"

    def strike(self, arena, move):
        for pid in children(arena.cluster.coordinator.pid()):
            if state(pid) == "T":
                os.kill(pid, signal.SIGKILL)


class KillCoordinator(Trouble):
    name = "coordinator killed"

    def strike(self, arena, move):
        arena.cluster.coordinator.kill()

    def mend(self, arena, move):
        arena.cluster.coordinator.start()


class KillShard(Trouble):
    """`side`: source or target. `back`: whether it is up again when the run goes on."""

    def __init__(self, side, back=False):
        self.side, self.back = side, back
        self.name = f"{side} killed" + (" and restarted" if back else "")

    def strike(self, arena, move):
        arena.server(move[self.side]).kill()
        if self.back:
            self.mend(arena, move)

    def mend(self, arena, move):
        arena.server(move[self.side]).start()


class Cut(Trouble):
    """All connections to a shard are reset. The arena must be one with proxies."""

    def __init__(self, side):
        self.side, self.name = side, f"{side} cut off"

    def strike(self, arena, move):
        arena.proxy(move[self.side]).end(reset=True)


SERVERS = [KillCoordinator(), KillShard("source"), KillShard("target"), KillShard("source", back=True), KillShard("target", back=True)]
