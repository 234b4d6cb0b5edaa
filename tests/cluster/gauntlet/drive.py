"""Runs planned moves to their end, through troubles at named points.

The session that runs them stops there by itself (shardmap.crash_point NAME=stop), as if time stood still for it; then the trouble
happens; then it goes on and meets it. What always holds: a trouble that was to happen has happened at its point, or is
counted as unmet.
"""

import os
import pathlib
import signal
import threading
import time

import psycopg
from server import children

from .arena import retried

PATIENCE = 120  # seconds for whatever must happen some time


class Run(threading.Thread):
    """One session that runs moves; `error` says why it ended, if not at their end."""

    def __init__(self, arena, call, **settings):
        super().__init__(name="run", daemon=True)
        self.arena, self.call, self.settings, self.error, self.broken = arena, call, settings, None, None

    def run(self):
        try:
            with self.arena.connect(**self.settings) as conn:
                conn.execute(self.call)
        except psycopg.Error as error:
            self.error = error
        except Exception as error:  # pylint: disable=broad-exception-caught
            self.broken = error


class Drive:
    """Of one arena, by sessions that CALL. `plan` plans moves and returns whether it has."""

    def __init__(self, arena, plan, log, settings=None):
        self.arena, self.plan, self.log, self.settings = arena, plan, log, dict(settings or {})
        self.kills, self.unmet = 0, []

    def under_way(self):
        """The move that a run would take up, None if all are over."""
        return min(self.unfinished(), key=lambda move: (move["started_at"] is None, move["id"]), default=None)

    def unfinished(self):
        return [move for move in retried(self.arena.moves) if move["state"] not in ("done", "rolled_back")]

    def ensure_planned(self):
        return self.under_way() is not None or bool(retried(lambda: self.plan(self.arena)))

    def call(self):
        moves = self.unfinished()
        return f"CALL shardmap.run_move({moves[0]['id']})" if len(moves) == 1 else f"CALL shardmap.run_moves('{self.arena.keyspace}')"

    def troubles(self, pairs):
        """Lets each trouble happen at its point, one after the other: in the move that is under way, or else in a new one."""
        for point, trouble in pairs:
            if self.attempt(point, trouble):
                continue
            self.finish()
            if not self.attempt(point, trouble):
                self.unmet.append(point)

    def turn(self, before, wish, after):
        """Through troubles, the last at a point that the move does not get past; there it is asked to turn, and meets others."""
        self.troubles(before)
        self._ask(wish)
        self.troubles(after)

    def _ask(self, wish):
        retried(lambda: self.arena.psql(f"SELECT shardmap.{wish}({self.under_way()['id']})"))

    def attempt(self, point, action):
        """Whether the point was met."""
        if not self.ensure_planned():
            return False
        run = Run(self.arena, self.call(), **self.settings, shardmap__crash_point=f"{point}=stop")
        run.start()
        met = self._wait_for_stop(run)
        if met:
            self.log(f"{action.name} at {point}")
            self.kills += 1
            move = self.under_way()
            action.strike(self.arena, move)
            self._let_go_on(run)
            action.mend(self.arena, move)
        self.arena.wait()
        assert not run.is_alive(), "the run does not end"
        self._judge_end(run, met)
        return met

    def finish(self):
        """Runs what is under way to its end, however often it takes."""
        deadline = time.monotonic() + PATIENCE
        while self.under_way() is not None:
            run = self.run_once()
            if self.under_way() is not None:
                self._judge_end(run, True)
                assert time.monotonic() < deadline, f"the move does not come to its end: {run.error}"
                time.sleep(0.1)

    def run_once(self):
        """Runs what is under way as far as it comes."""
        run = Run(self.arena, self.call(), **self.settings)
        run.start()
        run.join(PATIENCE)
        assert not run.is_alive(), "the run does not end"
        return run

    def meet_fault(self, name, side, *fault, **kind):
        """Whether a run has met that fault of the proxy before the source or the target."""
        if not self.ensure_planned():
            return False
        proxy = self.arena.proxy(self.under_way()[side])
        armed = proxy.on(*fault, **kind)
        run = self.run_once()
        met = armed.hit.is_set()
        proxy.clear()
        if met:
            self.log(name)
            self.kills += 1
        self._judge_end(run, met)
        return met

    def _judge_end(self, run, may_fail):
        """A run may end early for want of a server; any other reason is the move's own."""
        if run.broken:
            raise run.broken
        if run.error is not None and not (may_fail and isinstance(run.error, psycopg.OperationalError)):
            raise run.error

    def _wait_for_stop(self, run):
        deadline = time.monotonic() + PATIENCE
        while run.is_alive():
            if self.stopped():
                return True
            assert time.monotonic() < deadline, "the run neither stops nor ends"
            time.sleep(0.005)
        return False

    def stopped(self):
        """The coordinator's processes that stand still."""
        return [pid for pid in children(self.arena.cluster.coordinator.pid() or 0) if state(pid) == "T"]

    def _let_go_on(self, run):
        """Until the run ends. It may come to the point again: those of a commit are met in each."""
        deadline = time.monotonic() + PATIENCE
        while run.is_alive():
            self.release()
            run.join(0.02)
            assert time.monotonic() < deadline, "the run does not end"

    def release(self):
        for pid in self.stopped():
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass


class WorkerDrive(Drive):
    """By background workers. Each move is started once; after a trouble nobody but the extension itself lets it go on.

    A worker's crash point is the database's setting, which those that take its place have, too: so the next point is set while a
    worker stands still at the one before.
    """

    def troubles(self, pairs, last=None):
        """`last`: what the crash point is after the last of them."""
        for at, (point, trouble) in enumerate(pairs):
            if not at:
                self._set(f"{point}=stop")
            following = f"{pairs[at + 1][0]}=stop" if at + 1 < len(pairs) else last
            if not self._meet(trouble, following):
                # The worker of the trouble before has lived through it, and had no other point to stop at.
                self._set(f"{point}=stop")
                if not self._meet(trouble, following):
                    self.unmet.append(point)
                    self._set(following)

    def turn(self, before, wish, after):
        """Workers fail at the point that the move is not to get past, until one of them finds that it is to turn; that one stops
        at the first point behind."""
        barrier = before[-1][0].split(":")[0]
        self.troubles(before, f"{barrier}=error,{after[0][0]}=stop")
        self._ask(wish)
        self.troubles(after)

    def _set(self, point):
        change = f"SET shardmap.crash_point = '{point}'" if point else "RESET shardmap.crash_point"
        retried(lambda: self.arena.psql(f"ALTER DATABASE {self.arena.name} {change}"))

    def _meet(self, trouble, following):
        """Whether a worker has stopped before all was over."""
        if self.under_way() is None:
            if not self.ensure_planned():
                return False
            self.start()
        known = self._wait_until(self.stopped)
        if not known:
            return False
        move = self.under_way()
        assert move is not None, "a worker stands still, and there is nothing to do"
        self._set(following)
        self.log(f"{trouble.name} at {move['state']}")
        self.kills += 1
        trouble.strike(self.arena, move)
        self._let_pass(known)
        trouble.mend(self.arena, move)
        self.arena.wait()
        return True

    def start(self):
        for name, value in self.settings.items():
            retried(lambda: self.arena.psql(f"ALTER DATABASE {self.arena.name} SET {name.replace('__', '.')} = '{value}'"))
        retried(lambda: self.arena.psql(f"SELECT count(*) FROM shardmap.start_moves('{self.arena.keyspace}')"))

    def _let_pass(self, known):
        """Lets a worker go on that stood still, and stop no more, until it has ended, another stops, or all is over."""
        deadline = time.monotonic() + PATIENCE
        while any(state(pid) for pid in known):
            stopped = self.stopped()
            if set(stopped) - set(known):
                return
            self.release()
            if self._is_over():
                return
            assert time.monotonic() < deadline, "the worker does not end"
            time.sleep(0.02)

    def _is_over(self):
        try:
            return not [move for move in self.arena.moves() if move["state"] not in ("done", "rolled_back")]
        except psycopg.OperationalError:
            return False

    def _wait_until(self, condition):
        """The condition's value, or None if all moves are over."""
        deadline = time.monotonic() + PATIENCE
        while not (value := condition()):
            if self._is_over():
                return None
            assert time.monotonic() < deadline, f"workers do not go on: {self.under_way()}"
            time.sleep(0.01)
        return value

    def finish(self):
        self._set(None)
        if any(move["started_at"] is None for move in self.unfinished()):
            self.start()
        self._wait_until(self.release)


def state(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return None
