"""Faults of the kind that the gauntlet is there to find, provoked behind everybody's back: control runs must find them.

Each is a trouble at a point of a hot key's move, and says what kinds of findings must come of it.
"""

import time

from .arena import OLD
from .drive import PATIENCE
from .judge import LEFT, MISPLACED, REPORTED
from .ledger import DOUBLED, LOST
from .troubles import Trouble


class Fault(Trouble):
    point: str
    found: set


class LogOff(Fault):
    """The triggers no longer log what changes, after both sides were compared. (A row that has changed before would be copied as
    it is by then; so it is a table that only gets new ones.)"""

    name, point, found = "log switched off", "move_verified", {LOST}

    def strike(self, arena, move):
        shard, tenant = arena.number(move["source"]), arena.hot[0]
        count = "SELECT count(*) FROM op WHERE tenant = %s"
        arena.on_shard(shard, "ALTER TABLE op DISABLE TRIGGER ALL")
        before, deadline = arena.on_shard(shard, count, [tenant]), time.monotonic() + PATIENCE
        while arena.on_shard(shard, count, [tenant]) == before:
            assert time.monotonic() < deadline, "nobody writes to the hot tenant"
            time.sleep(0.01)


class Changed(Fault):
    """A row is changed on the target while it is hidden there: the move itself must refuse to flip. (One that nobody writes, or else
    it would be copied anew.)"""

    name, point, found = "copy changed", "move_caught_up", {"failed"}

    def strike(self, arena, move):
        arena.on_shard(arena.number(move["target"]), "UPDATE item SET value = value + 1 WHERE tenant = %s AND writer = %s AND id = 1", [arena.hot[0], OLD])


class Shown(Fault):
    """The rows on both shards are shown."""

    name, point, found = "copies shown", "move_verified", {"wavering"}

    def strike(self, arena, move):
        arena.psql(f"DELETE FROM shardmap.hidden_rows; SELECT shardmap.publish_map('{arena.keyspace}')")
        arena.crew.work_on()


class Doubled(Fault):
    """A row is on two shards, another schema is left behind."""

    name, point, found = "row doubled", "move_done", {DOUBLED, MISPLACED, REPORTED, LEFT}

    def strike(self, arena, move):
        shard = arena.number(move["source"])
        rows = arena.on_shard(arena.number(move["target"]), "SELECT tenant, writer, number FROM op WHERE tenant = %s LIMIT 1",
                              [arena.hot[0]])
        arena.on_shard(shard, "INSERT INTO op VALUES (%s, %s, %s)", rows[0])
        arena.on_shard(shard, "CREATE SCHEMA shardmap_move_99")


FAULTS = (LogOff(), Changed(), Shown(), Doubled())
