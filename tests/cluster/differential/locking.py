"""Queries that lock rows: of one table or of several, in the outer query, a subquery or a CTE, with an order or without.

What always holds: nobody else holds a lock, so that NOWAIT and SKIP LOCKED change nothing; the rows of a LIMIT are
defined.
"""

from .schema import TABLES, types_of
from .steps import Step
from .tree import optional

STRENGTHS = ["FOR UPDATE", "FOR NO KEY UPDATE", "FOR SHARE", "FOR KEY SHARE"]


class Locking:
    """Part of the generator."""

    def locking(self):
        table = self.choose_table(TABLES)
        relation = self.relation_of(table, "t")
        names = ", ".join("t." + name for name in self.rng.sample(list(types_of(table)), 3))
        strength, patience = self.rng.choice(STRENGTHS), self.rng.choice(["", "", " NOWAIT", " SKIP LOCKED"])
        kind = self.rng.choice([self._of_one, self._of_one, self._of_a_join, self._inside])
        return Step(kind(table, relation, names, strength, patience), "query")

    def _of_one(self, table, relation, names, strength, patience):
        order = self.rng.choice(["", "", " ORDER BY t.k, t.id LIMIT 3", " ORDER BY t.k, t.id OFFSET 1"])
        of = self.rng.choice(["", " OF t"])
        return [f"SELECT {names} FROM {table.name} t", self.where([relation]), order, optional(f" {strength}{of}{patience}")]

    def _of_a_join(self, table, relation, names, strength, patience):
        other = self.choose_table(TABLES)
        right = self.relation_of(other, "u")
        condition = self.join_condition([relation], [right])
        kind = self.rng.choice(["JOIN", "JOIN", "LEFT JOIN"])
        of = " OF t" if kind == "LEFT JOIN" else self.rng.choice([" OF t", " OF u", " OF t, u", "", f" OF t {self.rng.choice(STRENGTHS)} OF u"])
        if kind == "LEFT JOIN":
            self.pin_side([right])
        return [f"SELECT {names}, u.id, u.b FROM {table.name} t {kind} {other.name} u ON ", condition, self.where([relation, right]),
                optional(f" {strength}{of}{patience}")]

    def _inside(self, table, relation, names, strength, patience):
        inner = [f"SELECT {names}, t.k AS key FROM {table.name} t", self.where([relation]), f" {strength}{patience}"]
        return self.rng.choice([["WITH w AS (", inner, ") SELECT count(*), min(key::text) FROM w"], ["SELECT count(q.key) FROM (", inner, ") q"],
                                ["SELECT count(*) FROM (", inner, f") q JOIN {self.choose_table(TABLES).name} x ON x.k = q.key"]])
