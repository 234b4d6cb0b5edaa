"""What stands in FROM: tables, views, derived tables, CTEs, VALUES, functions, and their joins.

What always holds: every relation has at least one column of a key's type; a join has an equality, so that results stay
small.
"""

import dataclasses

from .schema import COLUMNS, READ_VIEWS, TABLES, VIEWS, types_of
from .tree import Part, joined
from .values import FAMILY, typed

ALL = [*TABLES, *VIEWS, *READ_VIEWS]


@dataclasses.dataclass(frozen=True)
class Column:
    sql: str
    type: str
    role: str = "x"  # k: a key; r: of a key's type; id; x: other


@dataclasses.dataclass
class Relation:
    alias: str
    columns: list
    table: object = None
    pinned: bool = False  # whether its key is said somewhere


@dataclasses.dataclass
class Query:
    tree: object
    columns: list  # (type, role) of each output
    order: tuple = ()  # output columns that the rows are sorted by


class Relations:
    """Part of the generator. `budget` counts the tables that the statement may still read."""

    def alias(self, prefix="t"):
        self.aliases += 1
        return f"{prefix}{self.aliases}"

    def choose_table(self, pool=ALL):
        """A table, mostly of the statement's family, often of its keyspace."""
        family, keyspace = self.family, self.keyspace
        if self.pin is not None and self.rng.random() < 0.97:
            near = [t for t in pool if t.family == FAMILY[self.pin.type] and t.keyspace == keyspace]
            return self.rng.choice(near or pool)
        near = [t for t in pool if t.family == family]
        if self.rng.random() < 0.6:
            near = [t for t in near if t.keyspace == keyspace] or near
        return self.rng.choice(near if near and self.rng.random() < 0.9 else pool)

    def relation_of(self, table, alias):
        types = types_of(table)
        roles = {"k": "k", "r": "r", "id": "id"}
        return Relation(alias, [Column(f"{alias}.{c}", types[c], roles.get(c, "x")) for c in COLUMNS], table)

    def item(self, depth, outer=(), lateral=False):
        """One entry of FROM: its tree and its relation."""
        self.budget -= 1
        roll = self.rng.random()
        if lateral and depth and roll < 0.25:
            return self._lateral(depth, outer)
        if depth and roll < 0.15:
            query = self.query(depth - 1, limited=self.rng.random() < 0.3)
            return self._derived(["(", query.tree, ")"], query)
        if roll < 0.24 and self.ctes:
            name, query = self.rng.choice(self.ctes)
            return self._derived(name, query)
        if roll < 0.29:
            return self._values()
        table = self.choose_table()
        alias = self.alias()
        relation = self.relation_of(table, alias)
        if self.pinnable(relation) and self.rng.random() < 0.2:
            relation.pinned = True
            return self.pinned_item(table, alias), relation
        return f"{table.name} {self.rng.choice(['', 'AS '])}{alias}", relation

    def _derived(self, source, query):
        alias = self.alias("q")
        columns = [Column(f"{alias}.c{i + 1}", type, role) for i, (type, role) in enumerate(query.columns)]
        return [source, f" {alias}"], Relation(alias, columns)

    def _lateral(self, depth, outer):
        key = self.key(outer)
        if self.rng.random() < 0.2:
            alias = self.alias("l")
            if key.type in ("int2", "int4", "int8") and self.rng.random() < 0.5:
                return f"LATERAL inlined({key.sql}) {alias}", Relation(alias, [Column(f"{alias}.c1", "int4", "r")])
            return [f"LATERAL (VALUES ({key.sql}), (", typed(self.rng, key.type), f")) {alias}(c1)"], \
                Relation(alias, [Column(f"{alias}.c1", key.type, "r")])
        inner, columns = self.subselect(outer, (), [None, None], order=True, correlated=True)
        alias = self.alias("l")
        listed = [Column(f"{alias}.c{i + 1}", type, role) for i, (type, role) in enumerate(columns)]
        return ["LATERAL (", inner, f") {alias}"], Relation(alias, listed)

    def _values(self):
        table, alias = self.choose_table(), self.alias("v")
        if FAMILY[table.type] == "int" and self.rng.random() < 0.3:
            return f"generate_series(1, 4) {alias}(c1)", Relation(alias, [Column(f"{alias}.c1", "int4", "r")])
        rows = [["(", typed(self.rng, table.type), f", {i})"] for i in range(self.rng.choice([1, 2, 3]))]
        columns = [Column(f"{alias}.c1", table.type, "r"), Column(f"{alias}.c2", "int4", "id")]
        return ["(VALUES ", joined(", ", rows), f") {alias}(c1, c2)"], Relation(alias, columns)

    def join_condition(self, left, right, only_equal=False):
        """An equality between columns of both sides, mostly of keys, and perhaps more."""
        keys = [c for r in right for c in r.columns if c.role == "k"]
        first = self.rng.choice(keys) if self.pin is not None and keys and self.rng.random() < 0.9 else self.key(right)
        second = self.comparable(first, left, "k" if self.rng.random() < 0.8 else "kr") or self.comparable(first, left)
        if second is None:
            first = self.rng.choice([c for r in right for c in r.columns])
            second = self.comparable(first, left, "krx" if first.role != "id" else "idx")
        if second is None:
            return "true" if not only_equal else "false"
        sides = [first.sql, " = ", second.sql] if self.rng.random() < 0.5 else [second.sql, " = ", first.sql]
        ids = [next((c for r in side for c in r.columns if c.role == "id"), None) for side in (left, right)]
        if all(ids) and self.rng.random() < 0.3:
            return Part([sides, f" AND {ids[0].sql} = {ids[1].sql}"], sides)
        if not only_equal and self.rng.random() < 0.35:
            return Part([sides, " AND ", self.condition([*left, *right], depth=1)], sides)
        if not only_equal and self.rng.random() < 0.06:
            return self.condition([*left, *right])
        return sides

    def from_clause(self, count, depth, outer=()):
        """`count` items joined: the tree, its relations, and conditions that belong into WHERE."""
        if count > 1 and self.rng.random() < 0.3:
            trees, rels, conditions = [], [], []
            for _ in range(count):
                tree, relation = self.item(depth, rels, lateral=bool(rels))
                if rels:
                    conditions.append(self.join_condition(rels, [relation]))
                trees.append(tree)
                rels.append(relation)
            return joined(", ", trees), rels, conditions
        tree, rels = self._join(count, depth, True)
        return tree, rels, []

    def _join(self, count, depth, top=False):
        if count == 1:
            tree, relation = self.item(depth)
            return tree, [relation]
        on_right = 1 if self.rng.random() < 0.75 else self.rng.randrange(1, count)
        left_tree, left = self._join(count - on_right, depth)
        kind = self.rng.choice(["JOIN", "INNER JOIN", "JOIN", "LEFT JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN"])
        if on_right == 1:
            tree, relation = self.item(depth, left, lateral=kind in ("JOIN", "LEFT JOIN"))
            right_tree, right = tree, [relation]
        else:
            tree, right = self._join(on_right, depth)
            right_tree = ["(", tree, ")"]
        both = [*left, *right]
        if top and len(both) == 2 and all(r.table for r in both) and both[0].table.family == both[1].table.family \
                and self.rng.random() < 0.35:
            merged = Relation("", [Column("k", both[0].table.type if kind != "RIGHT JOIN" else both[1].table.type, "k")])
            return [left_tree, f" {kind} ", right_tree, " USING (k)"], [*both, merged]
        condition = self.join_condition(left, right, kind == "FULL JOIN")
        nullable = {"LEFT JOIN": right, "RIGHT JOIN": left}.get(kind, ())
        condition = joined(" AND ", [condition, *self.pin_side(nullable)])
        whole = [left_tree, f" {kind} ", right_tree, " ON ", condition]
        return Part(whole, left_tree, right_tree), both
