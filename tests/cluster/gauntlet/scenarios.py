"""What is played: which rows move, and what goes wrong meanwhile. Each is a name and a function that drives an arena.

`make gauntlet SCENARIOS=regexp` chooses by name. A scenario marked `short` is played within `make test` too. Points are those
of src/pg/moves and src/pg/remote/crash.rs; that none is missing here is asked of the database.
"""

import contextlib
import random
from dataclasses import dataclass, field

import psycopg

from .canary import POINTS as CANARY_POINTS
from .canary import CanaryDrive, canary_taken_back, harmful_target
from .cuts import cut_inside
from .disk import has_small_disks, small_disk
from .drive import Drive, WorkerDrive
from .lag import lagging_replica
from .plans import (hot_key, hot_key_logical, one_less_one_more, one_more_one_less, one_more_one_less_logical, range_there_and_back,
                    split_and_merge)
from .troubles import SERVERS, Cut, KillSession

COMMIT = ("before_prepare", "prepare_sent", "after_prepare:1", "before_decide", "after_decide", "after_local_commit", "commit_sent",
          "after_commit:1")
POINTS = ("move_hidden", "move_logging", "move_batch:2", *COMMIT, "move_batch:3", "move_copied", "move_caught_up", "move_verified",
          "move_fenced", "move_flip", "move_flipped", "move_cleaning:1", "move_cleaning:2", "move_done")
TAKEN_BACK = ("move_logging_back", "move_flipped")
UNDONE = ("move_rollback:1", "move_rollback:2", "move_done")
WAY_BACK = ("move_reversed", "move_caught_up", "move_verified", "move_fenced", "move_flip", *UNDONE)
UNSUBSCRIBED = ("move_unsubscribe", "move_unsubscribing", "move_unsubscribed")
ALONE = ("move_logging", "move_batch:2", "shard_committed:1", "shard_committed:2", "shard_committed:2", "move_batch:3", "move_fenced",
         "move_cleaning:1")
FEW = ("move_batch:2", "move_verified", "move_fenced", "move_flip", "move_cleaning:1")
REPLICATED = ("move_hidden", "move_subscribing", "move_logging", "move_copied", "move_caught_up", "move_verified", "move_fenced", "move_flip",
              "move_unsubscribe", "move_unsubscribing", "move_unsubscribed", "move_flipped", "move_cleaning:1", "move_done")
FEW_REPLICATED = ("move_copied", "move_verified", "move_fenced", "move_flip", "move_unsubscribing")
NAMED = r"""
SELECT DISTINCT point[1] FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace AND n.nspname = 'shardmap',
    regexp_matches(p.prosrc, '_crash_here\(([^;]*)\);', 'g') call, regexp_matches(call[1], '''(move_[a-z_]+)''', 'g') point
"""


@dataclass(frozen=True)
class Scenario:
    """`act` drives; `plan` is called when moves are wanted. `calm`: nothing goes wrong, so no client may fail."""

    name: str
    plan: callable
    act: callable
    strategy: str = "ring"
    short: bool = False
    calm: bool = False
    settings: dict = field(default_factory=dict)  # of the session that runs the moves
    arena: dict = field(default_factory=dict)
    around: callable = contextlib.nullcontext  # what there is besides, made before the arena's database and gone after it
    drive: type = Drive
    can_play: callable = lambda: None  # why it cannot be played here, if so


def missing_points(arena):
    """Points of the product that no scenario names."""
    known = {point.split(":")[0] for point in (*POINTS, *TAKEN_BACK, *WAY_BACK, *REPLICATED)}
    return sorted(set(arena.psql(NAMED).split()) - known)


# Ways to drive.


def times(count):
    """So many plans, one after the other, and nothing goes wrong."""
    def act(drive, _):
        for _ in range(count):
            drive.ensure_planned()
            drive.finish()
    return act


def through(points, *troubles):
    """A trouble at each of the points, by turns."""
    def act(drive, chance):
        start = chance.randrange(len(troubles))
        drive.troubles([(point, troubles[(start + number) % len(troubles)]) for number, point in enumerate(points)])
        drive.finish()
    return act


def all_through(points, *troubles):
    """Each trouble at each of the points."""
    def act(drive, _):
        for trouble in troubles:
            drive.troubles([(point, trouble) for point in points])
            drive.finish()
    return act


def give_up(drive, _):
    """Canceled when it is verified, and killed while it takes back what it has done."""
    drive.turn([("move_fenced", KillSession())], "cancel_move", [("move_rollback", KillSession())])
    drive.finish()


def take_back(drive, _):
    """Killed when the target owns the rows, then taken back with all that was written since, and killed on the way."""
    drive.turn([("move_logging_back", KillSession()), ("move_flipped", KillSession())], "rollback_move",
               [("move_reversed", KillSession()), ("move_rollback", KillSession())])
    drive.finish()


def turned(before, wish, after):
    """One move, killed at points before and after it is asked to turn; it must have met them all, and not have gone on."""
    def act(drive, _):
        drive.turn([(point, KillSession()) for point in before], wish, [(point, KillSession()) for point in after])
        drive.finish()
        ends = [move["state"] for move in drive.arena.moves()]
        assert ends == ["rolled_back"], f"the move did not turn: {ends}"
    return act


def disk_full(drive, _):
    """The target has no room for the rows, until there is."""
    drive.ensure_planned()
    disk = drive.arena.around
    drive.arena.on_shard(drive.arena.number(drive.under_way()["target"]), disk.move_in("item"))
    disk.fill()
    for _ in range(2):
        error = drive.run_once().error
        assert isinstance(error, psycopg.errors.DiskFull), f"the disk is full, but: {error!r}"
        drive.kills += 1
    disk.make_room()
    drive.finish()


ONE_PHASE = {"shardmap__multi_shard_commit": "one_phase"}
CUTS = (Cut("source"), Cut("target"))
PATIENT = {"shardmap__fence_timeout": "10s"}  # however slow the machine: what is copied is to be verified and flipped some time

SCENARIOS = (
    Scenario("hot key", hot_key, times(5), short=True, calm=True),
    Scenario("hot key, modulo", hot_key, times(3), strategy="modulo", calm=True),
    Scenario("hot key, range", hot_key, times(3), strategy="range", calm=True),
    Scenario("hot key, session killed", hot_key, through(POINTS, KillSession()), short=True),
    Scenario("hot key, session killed, one phase", hot_key, through(ALONE, KillSession()), settings=ONE_PHASE, short=True),
    Scenario("hot key, servers killed at some points", hot_key, through(FEW, *SERVERS), short=True),
    Scenario("hot key, servers killed", hot_key, all_through(POINTS, *SERVERS)),
    Scenario("hot key, cut off at some points", hot_key, through(FEW, *CUTS), arena={"proxied": True}, short=True),
    Scenario("hot key, cut off", hot_key, all_through(POINTS, *CUTS), arena={"proxied": True}),
    Scenario("hot key, cut off inside a step", hot_key, cut_inside, arena={"proxied": True}),
    Scenario("hot key, worker killed", hot_key, through(POINTS, KillSession()), drive=WorkerDrive),
    Scenario("hot key by a worker, servers killed at some points", hot_key, through(FEW, *SERVERS), drive=WorkerDrive, short=True),
    Scenario("hot key by a worker, servers killed", hot_key, all_through(POINTS, *SERVERS), drive=WorkerDrive),
    Scenario("hot key by a worker, given up while copying", hot_key, turned(["move_batch:2"], "cancel_move", UNDONE), drive=WorkerDrive),
    Scenario("hot key by a worker, given up at the fence", hot_key, turned(["move_fenced"], "cancel_move", UNDONE), drive=WorkerDrive),
    Scenario("hot key by a worker, taken back", hot_key, turned(TAKEN_BACK, "rollback_move", WAY_BACK), drive=WorkerDrive),
    Scenario("hot key, given up", hot_key, give_up, short=True),
    Scenario("hot key, taken back", hot_key, take_back, short=True),
    Scenario("add and drain shard, taken back", one_more_one_less, take_back),
    Scenario("modulo N to M, taken back", one_more_one_less, take_back, strategy="modulo"),
    Scenario("range split, taken back", range_there_and_back, take_back, strategy="range"),
    Scenario("hot key, disk of the target full", hot_key, disk_full, arena={"hot_items": 20_000}, settings={"shardmap__move_batch_rows": "2000"},
             around=small_disk, can_play=has_small_disks, short=True),
    Scenario("hot key, replica of the target lags", hot_key, lagging_replica, short=True),
    Scenario("add and drain shard", one_more_one_less, times(3), calm=True, short=True),
    Scenario("modulo N to M", one_more_one_less, times(3), strategy="modulo", calm=True),
    Scenario("canary", one_more_one_less, times(2), drive=CanaryDrive, calm=True),
    Scenario("canary, session killed", one_more_one_less, through(CANARY_POINTS, KillSession()), drive=CanaryDrive),
    Scenario("canary, servers killed", one_more_one_less, all_through(CANARY_POINTS, *SERVERS), drive=CanaryDrive),
    Scenario("canary, taken back", one_more_one_less, canary_taken_back, drive=CanaryDrive, short=True),
    Scenario("canary, harm by the target", one_more_one_less, harmful_target, drive=CanaryDrive, short=True),
    Scenario("canary, modulo", one_more_one_less, times(2), strategy="modulo", drive=CanaryDrive, calm=True),
    Scenario("canary, modulo, taken back", one_more_one_less, canary_taken_back, strategy="modulo", drive=CanaryDrive),
    Scenario("canary, range, taken back", range_there_and_back, canary_taken_back, strategy="range", drive=CanaryDrive),
    Scenario("drain and keep shard", one_less_one_more, times(2), calm=True),
    Scenario("range split", range_there_and_back, times(3), strategy="range", calm=True, short=True),
    Scenario("split hot, merge cold", split_and_merge, times(3), calm=True, short=True),
    Scenario("split hot, merge cold, modulo", split_and_merge, times(3), strategy="modulo", calm=True),
    Scenario("split hot, merge cold, range", split_and_merge, times(3), strategy="range", calm=True),
    Scenario("hot key, logical", hot_key_logical, times(3), settings=PATIENT, calm=True, short=True),
    Scenario("hot key, logical, session killed", hot_key_logical, through(REPLICATED, KillSession()), settings=PATIENT),
    Scenario("hot key, logical, servers killed at some points", hot_key_logical, through(FEW_REPLICATED, *SERVERS), settings=PATIENT, short=True),
    Scenario("hot key, logical, servers killed", hot_key_logical, all_through(REPLICATED, *SERVERS), settings=PATIENT),
    Scenario("hot key, logical, cut off", hot_key_logical, through(REPLICATED, *CUTS), settings=PATIENT, arena={"proxied": True}),
    Scenario("hot key, logical, given up", hot_key_logical, give_up, settings=PATIENT),
    Scenario("hot key, logical, taken back", hot_key_logical, take_back, settings=PATIENT),
    Scenario("hot key, logical, by a worker, given up while it subscribes", hot_key_logical,
             turned(["move_logging"], "cancel_move", (*UNSUBSCRIBED, *UNDONE)), settings=PATIENT, drive=WorkerDrive),
    Scenario("hot key, logical, by a worker, given up at the fence", hot_key_logical,
             turned(["move_fenced"], "cancel_move", (*UNSUBSCRIBED, *UNDONE)), settings=PATIENT, drive=WorkerDrive),
    Scenario("hot key, logical, by a worker, taken back", hot_key_logical,
             turned(["move_logging_back", "move_unsubscribed"], "rollback_move", WAY_BACK), settings=PATIENT, drive=WorkerDrive),
    Scenario("add and drain shard, logical", one_more_one_less_logical, times(2), settings=PATIENT, calm=True),
    Scenario("add and drain shard, logical, session killed", one_more_one_less_logical, through(REPLICATED, KillSession()), settings=PATIENT),
    Scenario("add and drain shard, session killed", one_more_one_less, through(POINTS, KillSession())),
    Scenario("add and drain shard, servers killed at some points", one_more_one_less, through(FEW, *SERVERS), short=True),
    Scenario("add and drain shard, servers killed", one_more_one_less, all_through(POINTS, *SERVERS)),
    Scenario("add and drain shard by workers, servers killed at some points", one_more_one_less, through(FEW, *SERVERS), drive=WorkerDrive),
    Scenario("add and drain shard, cut off", one_more_one_less, through(POINTS, *CUTS), arena={"proxied": True}),
    Scenario("modulo N to M, session killed", one_more_one_less, through(POINTS, KillSession()), strategy="modulo"),
    Scenario("modulo N to M, servers killed at some points", one_more_one_less, through(FEW, *SERVERS), strategy="modulo"),
    Scenario("range split, session killed", range_there_and_back, through(POINTS, KillSession()), strategy="range"),
    Scenario("range split, servers killed at some points", range_there_and_back, through(FEW, *SERVERS), strategy="range"),
)


def chance_of(seed, scenario):
    return random.Random(f"{seed}/{scenario.name}")
