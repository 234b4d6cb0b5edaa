"""Moves of which a small part goes first: `CALL shardmap.canary` instead of run_moves.

What always holds: it is called until no move is left; one that fails because it was taken back, or because the target does harm,
is as good an end as any other, and is tried again.
"""

import psycopg

from .drive import Drive
from .troubles import KillSession

POINTS = ("canary_measuring", "canary_moving", "move_fenced", "canary_baking", "canary_baking:2", "canary_spreading", "canary_spreading:3")
# Errors are as many as troubles make them, and time is the machine's.
LIMITS = "bake => '1 s', baseline => '0.3 s', max_error_rate => 1, max_slowdown => 1000000"
HARM = """
CREATE FUNCTION harm() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not here' USING ERRCODE = 'lock_not_available'; END $$;
CREATE TRIGGER harm BEFORE UPDATE ON counter FOR EACH ROW EXECUTE FUNCTION harm();
"""


class CanaryDrive(Drive):
    limits = LIMITS
    failed = 0

    def call(self):
        return f"CALL shardmap.canary('{self.arena.keyspace}', {self.limits})"

    def _judge_end(self, run, may_fail):
        if isinstance(run.error, psycopg.errors.ObjectNotInPrerequisiteState) and "has failed" in str(run.error):
            self.failed += 1
            run.error = None
        super()._judge_end(run, may_fail)


def canary_taken_back(drive, _):
    """Killed while it bakes, rolled back with all that was written since, and killed on its way; then once more, to its end."""
    drive.troubles([("canary_baking", KillSession())])
    drive.arena.psql("SELECT shardmap.rollback_move(move) FROM shardmap.canaries WHERE finished_at IS NULL")
    drive.troubles([("move_reversed", KillSession()), ("canary_taking_back:2", KillSession())])
    drive.finish()
    assert drive.failed == 1, f"canaries that failed: {drive.failed}"


def harmful_target(drive, _):
    """The target refuses updates of one table: the canary fails, nothing else has moved; without that, all is moved."""
    arena = drive.arena
    drive.ensure_planned()
    shard = arena.number(drive.under_way()["target"])
    arena.on_shard(shard, HARM)
    drive.limits = "bake => '1 h', baseline => '0', share => 1, max_error_rate => 0.001, max_slowdown => 1000000, min_statements => 20"
    run = drive.run_once()
    error = str(run.error)
    assert "has failed" in error and f'target "shard-{shard}": errors in' in error, error
    states = {move["state"] for move in drive.arena.moves()}
    assert states == {"planned", "rolled_back"}, states
    arena.on_shard(shard, "DROP FUNCTION harm() CASCADE")
    drive.limits = LIMITS
    drive.finish()
