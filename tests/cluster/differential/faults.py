"""The loop of runner.py while connections to shards are cut and statements are cancelled.

A statement on the distributed side either gives the right answer, or one of the errors in FAULTS. After such an error the
unit is over, and the tables must be as if the statement, or its transaction, had never been; where the error says that the
outcome is unknown (08007), as if it had not, or as if it had. At the end of a round nothing is prepared on shards, and no
connection is at work there. What follows a fault is as right as ever.
"""

import random
import threading
import time

import psycopg
from patience import wait_until

from .runner import Runner

UNKNOWN = "08007"
FAULTS = {"57014", "08006", UNKNOWN, "25P02"}
PREPARED = "SELECT count(*) FROM pg_prepared_xacts"
WORKING = "SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, 'pg_shardmap') AND state <> 'idle'"


class Faulted(Exception):
    """A statement ended by a fault."""


class FaultyRunner(Runner):
    """A Runner whose statements on the distributed side meet faults, chosen by the round's seed."""

    def __init__(self, dsn, seed, proxy, shards, log=print):
        super().__init__(dsn, seed, log)
        self.proxy, self.canceller = proxy, psycopg.connect(dsn, autocommit=True)
        self.shards = [psycopg.connect(shard, autocommit=True) for shard in shards]
        self.counts.update({"faults met": 0, "effects of unknown outcomes": 0})
        self.met = {}  # SQLSTATE -> how often
        self.looking_back = False

    def close(self):
        for conn in (self.canceller, *self.shards):
            conn.close()

    def round(self, number):
        self.chance = random.Random(f"faults {self.seed}/{number}")
        super().round(number)
        self.settled("at the end of the round")

    def settled(self, when):
        """Waits until shards have nothing prepared and nothing at work."""
        asked = [PREPARED, WORKING] if self.dist.idle else [PREPARED]
        wait_until(lambda: not any(shard.execute(sql).fetchone()[0] for shard in self.shards for sql in asked),
                   lambda: f"transactions are left on shards {when}, {self.name}")

    def state(self, tables, answers, expected):
        self.settled("after a statement")
        return super().state(tables, answers, expected)

    def rows_now(self, sql):
        """A connection that was ended after a statement's answer shows at the next one."""
        answer = super().rows_now(sql)
        if answer.error in FAULTS and not self.looking_back:
            raise Faulted([answer], {answer.error})
        return answer

    def send(self, side, step):
        if side is not self.dist or step.kind == "batch":
            return super().send(side, step)
        if step.kind == "write":
            step.form = "simple"  # one transaction, whose effect is all or nothing
        cancel = self.arm()
        try:
            answers = super().send(side, step)
        finally:
            if cancel:
                cancel.join()
            self.proxy.clear()
        if codes := FAULTS & {answer.error for answer in answers}:
            raise Faulted(answers, codes)
        return answers

    def arm(self):
        """Chooses what the next statement meets: nothing, an end of a connection at some message, or a cancel."""
        roll = self.chance.random()
        if roll < 0.35:
            self.proxy.on(self.chance.choice(["cut", "reset"]), self.chance.choice("<>"), skip=self.chance.randrange(14),
                          after=self.chance.random() < 0.3)
        elif roll < 0.5:
            pid, delay = self.dist.pg.backend_pid, self.chance.random() * 0.01
            thread = threading.Thread(target=self.cancel, args=(pid, delay))
            thread.start()
            return thread
        return None

    def cancel(self, pid, delay):
        time.sleep(delay)
        self.canceller.execute("SELECT pg_cancel_backend(%s)", (pid,))

    def step(self, step, unit, changed):
        try:
            return super().step(step, unit, changed)
        except Faulted as fault:
            answers, codes = fault.args
        self.counts["faults met"] += 1
        for code in codes:
            self.met[code] = self.met.get(code, 0) + 1
        expected = []
        if UNKNOWN in codes:  # did it take effect? Both are looked at before the plain side's transaction is decided.
            if self.plain.idle:
                self.plain.simple("BEGIN")
                expected = self.send(self.plain, step)
            if self.compared(unit, changed, answers, expected) is None:
                self.counts["effects of unknown outcomes"] += 1
                return False
        self.plain.simple("ROLLBACK")
        if why := self.compared(unit, changed, answers, expected):
            return self.failed(step, unit, f"after {', '.join(codes)}: {why}", answers, answers)
        return False

    def compared(self, unit, changed, answers, expected):
        """How the tables differ, as the plain side's transaction sees them."""
        if not self.dist.idle:
            self.dist.simple("ROLLBACK")
        if unit.as_user:
            self.both("RESET ROLE")
        self.looking_back = True
        try:
            return self.state(changed - {"made"}, answers, expected)[0]
        finally:
            self.looking_back = False

    def again(self, step, unit):
        """What depends on chance does not come again."""
        return False


