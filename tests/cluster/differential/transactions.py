"""Transactions: reads and writes of one or several keys, savepoints, statements that fail, and how it all ends.

What always holds: a statement that fails leaves both sides in the same state of failure; a savepoint that is rolled back
is one that was set.
"""

from .steps import Step
from .values import random_text

BEGINS = ["BEGIN"] * 5 + ["BEGIN ISOLATION LEVEL REPEATABLE READ", "BEGIN ISOLATION LEVEL SERIALIZABLE", "BEGIN READ ONLY",
                          "START TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"]
SWITCHES = ["shardmap.enable_routing", "shardmap.enable_router"]


class Transactions:
    """Part of the generator."""

    def transaction(self):
        """BEGIN, reads and writes with savepoints, and COMMIT or ROLLBACK."""
        steps, self.open_points = [Step(self.rng.choice(BEGINS), "control")], 0
        # Some are about a few keys of one keyspace, mostly on several shards; the others about anything.
        near = self.rng.choice([t for t in self.pool() if t.distributed]) if self.rng.random() < 0.4 else None
        self.keys = (near, [random_text(self.rng, near.type) for _ in range(self.rng.choice([1, 2, 3]))]) if near else None
        for _ in range(self.rng.randrange(2, 8)):
            steps += self._part()
        if self.open_points and self.rng.random() < 0.5:
            steps.append(Step("ROLLBACK TO SAVEPOINT s1", "control"))
        self.keys = None
        steps.append(Step(self.rng.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"]), "control"))
        return steps

    def _part(self):
        roll = self.rng.random()
        if roll < 0.12:
            self.open_points += 1
            return [Step(f"SAVEPOINT s{self.open_points}", "control")]
        if roll < 0.24 and self.open_points:
            point = self.rng.randrange(1, self.open_points + 1)
            release = self.rng.random() < 0.4
            self.open_points = point - 1 if release else point
            return [Step(f"{'RELEASE' if release else 'ROLLBACK TO'} SAVEPOINT s{point}", "control")]
        if roll < 0.27:
            return [Step(f"SET {self.rng.choice(SWITCHES)} = {self.rng.choice(['on', 'off'])}", "control")]
        if roll < 0.42:
            return self._attempt()
        return [self.sent(self._write()) if roll < 0.68 else self.read()]

    def _attempt(self):
        """A savepoint around a statement that fails, perhaps after others, and back to it; or none, so that all fails."""
        self.start()
        inside = [self.sent(self._write())] if self.rng.random() < 0.4 else []
        self.start()
        failing = self.sent(self.failing())
        if self.rng.random() < 0.08:
            return [*inside, failing]
        return [Step("SAVEPOINT attempt", "control"), *inside, failing, Step("ROLLBACK TO SAVEPOINT attempt", "control"),
                *([Step("RELEASE SAVEPOINT attempt", "control")] if self.rng.random() < 0.5 else [])]
