"""Queries: plain, aggregated, distinct, windowed, combined, with CTEs.

What always holds: the result is defined. LIMIT stands only after ORDER BY of all output columns (or WITH TIES), ordered
aggregates order by what they show, window functions do not depend on the order of peers, sums are of exact numbers.
"""

from .relations import Column, Query, Relation
from .tree import Part, joined, optional
from .values import FAMILY, typed

NO_MIN = ("uuid", "bytea")


class Queries:
    """Part of the generator."""

    def query(self, depth, limited=False, types=None, outer=()):
        """A query that can stand anywhere; `types`: the output types that it must have."""
        kinds = [(45, self.plain), (20, self.grouped), (10, self.distinct), (10, self.windowed), (4, self.windowed_groups),
                 (4, self.json_query)]
        if depth and self.budget > 1:
            kinds.append((14, self.combined))
        if types:
            kinds = [(60, self.plain), (15, self.distinct)]
        query = self.rng.choices([k for _, k in kinds], [w for w, _ in kinds])[0](depth, types, outer)
        if limited:
            query = self.limit(query)
        return query

    def limit(self, query):
        """Sorts by all outputs and takes some rows."""
        width = len(query.columns)
        keys = [f"{i + 1}{self.rng.choice(['', '', ' DESC', ' NULLS FIRST', ' DESC NULLS LAST'])}" for i in range(width)]
        self.rng.shuffle(keys)
        count, skip = self.rng.choice([0, 1, 2, 5, 10]), self.rng.choice([0, 1, 3])
        clause = self.rng.choice([
            [f" LIMIT {count}"], [f" LIMIT {count} OFFSET {skip}"], [" LIMIT ", typed(self.rng, "int8", str(count))],
            [" OFFSET ", typed(self.rng, "int8", str(skip))], [f" FETCH FIRST {count} ROWS WITH TIES"]])
        order = tuple(int(key.split()[0]) - 1 for key in keys)
        if self.rng.random() < 0.2 and "WITH TIES" in clause[0]:
            keys, order = keys[:1], order[:1]
        return Query([query.tree, " ORDER BY ", ", ".join(keys), optional(*clause)], query.columns, order)

    def order(self, query):
        """Sorts by some outputs."""
        chosen = self.rng.sample(range(len(query.columns)), self.rng.randrange(1, len(query.columns) + 1))
        keys = [f"{i + 1}{self.rng.choice(['', ' DESC', ' ASC NULLS FIRST'])}" for i in chosen]
        return Query([query.tree, optional(" ORDER BY ", ", ".join(keys))], query.columns, tuple(chosen))

    def source(self, depth, outer=()):
        """FROM and WHERE: their tree and the relations."""
        count = self.rng.choices([1, 2, 3, 4], [40, 40, 15, 5])[0]
        count = max(1, min(count, self.budget))
        tree, rels, conditions = self.from_clause(count, depth, outer)
        return [" FROM ", tree, self.where(rels, outer, conditions)], rels

    def plain(self, depth, types, outer):
        source, rels = self.source(depth, outer)
        wanted = types or [None] * self.rng.choice([1, 2, 3, 4])
        outputs = [self.scalar(rels, outer, type) for type in wanted]
        return Query(["SELECT ", self._listed(outputs), source], [(t, r) for _, t, r in outputs])

    @staticmethod
    def _listed(outputs):
        return joined(", ", [[tree, f" AS c{i + 1}"] for i, (tree, *_) in enumerate(outputs)])

    def scalar(self, rels, outer, type=None):
        """An output: tree, type, role."""
        if type is not None:
            pool = [c for r in rels for c in r.columns if c.type == type]
            if pool and self.rng.random() < 0.9:
                column = self.rng.choice(pool)
                return column.sql, type, column.role
            return typed(self.rng, type), type, "x"
        roll = self.rng.random()
        column = self.key(rels) if roll < 0.35 else self.any_column(rels)
        if roll < 0.75:
            return column.sql, column.type, column.role
        if roll < 0.80 and self.budget > 0:
            return self._scalar_subquery_output(rels, outer)
        if roll < 0.83:
            return self._whole_row_output(rels)
        return self._expression(column, rels)

    def _whole_row_output(self, rels):
        named = [r.alias for r in rels if r.alias and r.table]
        if not named:
            return "1", "int4", "x"
        alias = self.rng.choice(named)
        return self.rng.choice([(f"{alias}::text", "text", "x"), (f"({alias} IS NOT NULL)", "bool", "x"), (f"({alias}).id", "int4", "x"),
                                (f"row_to_json({alias})::text", "text", "x")])

    def _scalar_subquery_output(self, rels, outer):
        if self.rng.random() < 0.25:
            inner, _ = self.subselect(rels, outer, ["int4"], correlated=True)
            return self.rng.choice([(["EXISTS (", inner, ")"], "bool", "x"),
                                    (["array_length(ARRAY(", inner, "), 1)"], "int4", "x")])
        aggregate = self.rng.choice(["count", "count", "max", "sum"])
        inner, _ = self.subselect(rels, outer, ["int4"], aggregate=aggregate, correlated=True)
        return ["(", inner, ")"], "int4" if aggregate == "max" else "int8", "x"

    def _expression(self, column, rels):
        sql, family = column.sql, FAMILY[column.type]
        if self.rng.random() < 0.2:
            return [f"CASE WHEN ", self.condition(rels, depth=0), f" THEN {sql} END"], column.type, "x"
        if self.rng.random() < 0.15:
            return typed(self.rng, column.type), column.type, "x"
        if family == "int" and column.type != "numeric":
            return self.rng.choice([(f"{sql} % 7", column.type, "x"), (f"{sql}::numeric + 1", "numeric", "x"),
                                    (f"coalesce({sql}, -1)", "int4" if column.type == "int2" else column.type, "x"),
                                    (f"{sql}::int8", "int8", column.role), (f"{sql}::text", "text", "x")])
        if family == "text":
            return self.rng.choice([(f"upper({sql})", "text", "x"), (f"{sql} || '!'", "text", "x"), (f"length({sql})", "int4", "x"),
                                    (f"{sql}::text", "text", "r"), (f"left({sql}, 1)", "text", "x")])
        if family == "time":
            return self.rng.choice([(f"{sql}::date", "date", "x"), (f"({sql} IS NULL)", "bool", "x"), (f"{sql}::timestamp", "timestamp", "x")])
        if family == "bytea":
            return self.rng.choice([(f"encode({sql}, 'hex')", "text", "x"), (f"length({sql})", "int4", "x")])
        return self.rng.choice([(f"({sql} IS NOT NULL)", "bool", "x"), (sql, column.type, column.role)])

    def aggregate(self, rels):
        """An aggregate: tree and type."""
        column = self.key(rels) if self.rng.random() < 0.4 else self.any_column(rels)
        if self.rng.random() < 0.25:
            sql, type = self.rare_aggregate(column)
            return [sql], type
        sql, choices = column.sql, [(["count(*)"], "int8"), ([f"count({column.sql})"], "int8"),
                                    ([f"count(DISTINCT {column.sql})"], "int8"),
                                    ([f"bool_or({column.sql} IS NULL)"], "bool")]
        if column.type not in NO_MIN and column.type != "bool":
            choices += [([f"{self.rng.choice(['min', 'max'])}({sql})"], column.type)] * 2
        if FAMILY[column.type] == "int":
            total = {"int8": "numeric", "numeric": "numeric"}.get(column.type, "int8")
            choices += [([f"sum({sql})"], total), ([f"avg({sql})"], "numeric"), ([f"sum(DISTINCT {sql})"], total)]
            choices += [([f"(sum({sql}) - sum({sql} % 3))"], total), ([f"coalesce(sum({sql}), 0)"], total)]
        if FAMILY[column.type] == "text" and column.type != "char(8)":
            choices.append(([f"string_agg({sql}, ',' ORDER BY {sql})"], "text"))
        tree, type = self.rng.choice(choices)
        if self.rng.random() < 0.15 and not tree[0].startswith(("(", "coalesce")):
            tree = [*tree, Part([" FILTER (WHERE ", self.condition(rels, depth=1), ")"], "")]
        return tree, type

    def grouped(self, depth, types, outer):
        source, rels = self.source(depth, outer)
        groups = []
        for _ in range(self.rng.choice([0, 0, 1, 1, 1, 2])):
            column = self.key(rels) if self.rng.random() < 0.6 else self.any_column(rels)
            if column.sql not in [g.sql for g in groups]:
                groups.append(column)
        outputs = [(g.sql, g.type, g.role) for g in groups]
        aggregates = [self.aggregate(rels) for _ in range(self.rng.choice([1, 1, 2, 3]))]
        outputs += [(tree, type, "x") for tree, type in aggregates]
        names = [g.sql for g in groups]
        clause = ""
        if groups:
            clause = " GROUP BY " + self.rng.choice([", ".join(names), ", ".join(str(i + 1) for i in range(len(names)))])
            roll = self.rng.random()
            if roll < 0.3:
                clause, grouping = self.grouping(names)
                outputs.append((grouping, "int4", "x"))
        having = ""
        if self.rng.random() < 0.35:
            tests = [["count(*) > ", self.rng.choice("0123")]]
            if groups:
                group = Relation("", groups)
                tests += [self.condition([group], depth=1)] * 2
            having = optional(" HAVING ", self.rng.choice(tests))
        return Query(["SELECT ", self._listed(outputs), source, clause, having], [(t, r) for _, t, r in outputs])

    def distinct(self, depth, types, outer):
        query = self.plain(depth, types, outer)
        tree = query.tree
        if self.rng.random() < 0.3 and len(query.columns) > 1:
            order = ", ".join(str(i + 1) for i in range(len(query.columns)))
            distinct = ["(SELECT DISTINCT ON (", "q.c1", ") q.* FROM (", tree, f") q ORDER BY {order})"]
            if self.rng.random() < 0.5:
                on = self.rng.choice(["1", "2", "2, 1"])
                distinct = [f"(SELECT DISTINCT ON ({on}) ", *tree[1:], f" ORDER BY {on}, {order})"]
            return Query(["SELECT * FROM ", distinct, f" {self.alias('q')}"], query.columns)
        return Query([Part("SELECT DISTINCT ", "SELECT "), *tree[1:]], query.columns)

    def windowed(self, depth, types, outer):
        table, alias = self.choose_table(), self.alias()
        self.budget -= 1
        relation = self.relation_of(table, alias)
        rels, tree = [relation], f"{table.name} {alias}"
        unique = table.kind == "table"
        if self.budget > 0 and self.rng.random() < 0.3:
            joining, other = self.item(0)
            tree, rels, unique = [tree, " JOIN ", joining, " ON ", self.join_condition(rels, [other])], [relation, other], False
        by = self.rng.choice(["", f"PARTITION BY {alias}.k ", f"PARTITION BY {alias}.a "])
        functions = [(f"count(*) OVER ({by})", "int8"), (f"sum({alias}.a) OVER ({by})", "int8"),
                     (f"rank() OVER ({by}ORDER BY {alias}.k, {alias}.id DESC)", "int8"),
                     (f"dense_rank() OVER ({by}ORDER BY {alias}.b)", "int8"),
                     (f"sum({alias}.n) OVER ({by}ORDER BY {alias}.k)", "numeric"),
                     (f"max({alias}.d) OVER ({by}ORDER BY {alias}.id)", "date")]
        if unique:
            functions += [(f"row_number() OVER ({by}ORDER BY {alias}.k, {alias}.id)", "int8"),
                          (f"lag({alias}.a) OVER ({by}ORDER BY {alias}.id, {alias}.k)", "int4"),
                          (f"first_value({alias}.id) OVER ({by}ORDER BY {alias}.k DESC, {alias}.id)", "int4")]
        functions += self.window_functions(alias, by, unique)
        outputs = [(f"{alias}.k", table.type, "k"), (f"{alias}.id", "int4", "id")]
        outputs += [(sql, type, "x") for sql, type in self.rng.sample(functions, self.rng.choice([1, 2]))]
        named = f" WINDOW w AS ({by})" if any("OVER w" in sql or "OVER (w" in sql for sql, *_ in outputs) else ""
        return Query(["SELECT ", self._listed(outputs), " FROM ", tree, self.where(rels, outer), named],
                     [(t, r) for _, t, r in outputs])

    def combined(self, depth, types, outer):
        first = self.plain(depth - 1, types, outer)
        tree = first.tree
        for _ in range(self.rng.choice([1, 1, 2])):
            second = self.query(0, types=[t for t, _ in first.columns], outer=outer)
            operator = self.rng.choice(["UNION", "UNION ALL", "UNION ALL", "INTERSECT", "INTERSECT ALL", "EXCEPT", "EXCEPT ALL"])
            tree = Part(["(", tree, f") {operator} (", second.tree, ")"], tree, second.tree)
        return Query([tree], [(t, "k" if r == "k" else "x") for t, r in first.columns])

    def subselect(self, rels, outer, types, aggregate=None, order=False, correlated=False):
        """A subquery in an expression, or a LATERAL one: its tree and columns. None in `types`: any type."""
        before, self.family = self.family, FAMILY[self.key(rels).type] if rels else self.family
        self.budget -= 1
        table, alias = self.choose_table(), self.alias("s")
        relation = self.relation_of(table, alias)
        inner, tree = [relation], f"{table.name} {alias}"
        if self.budget > 0 and self.rng.random() < 0.2:
            joining, other = self.item(0)
            tree, inner = [tree, " JOIN ", joining, " ON ", self.join_condition([relation], [other])], [relation, other]
        required = []
        if rels and (correlated or self.rng.random() < 0.6):
            key = self.rng.choice([c for c in relation.columns if c.role in "kr"])
            partner = self.comparable(key, [*rels, *outer], "k") or self.comparable(key, [*rels, *outer])
            if partner:
                required.append([key.sql, " = ", partner.sql])
        where = self.where(inner, [*rels, *outer], required)
        self.family = before
        outputs = [self.scalar_column(inner, type) for type in types]
        if aggregate == "count":
            return [f"SELECT count(*) FROM ", tree, where], [("int8", "x")]
        if aggregate:
            return [f"SELECT {aggregate}(", outputs[0][0], ") FROM ", tree, where], [(types[0], "x")]
        listed = self._listed(outputs) if outputs else self.rng.choice(["1", "*", ""])
        tail = ""
        if order:
            tail = Part(f" ORDER BY {', '.join(str(i + 1) for i in range(len(types)))} LIMIT {self.rng.choice([1, 2, 4])}", "")
        elif outputs and self.rng.random() < 0.1:
            tail = Part(" ORDER BY 1 LIMIT 3", "")
        return ["SELECT ", listed, " FROM ", tree, where, tail], [(t, r) for _, t, r in outputs]

    def scalar_column(self, rels, type):
        if type is None:
            column = self.key(rels) if self.rng.random() < 0.6 else self.any_column(rels)
            return column.sql, column.type, column.role
        pool = [c for r in rels for c in r.columns if c.type == type] or \
            [c for r in rels for c in r.columns if FAMILY[c.type] == FAMILY[type]]
        pool = [c for c in pool if c.role == "k"] * 3 + pool
        if not pool:
            return typed(self.rng, type), type, "x"
        column = self.rng.choice(pool)
        return column.sql, column.type, column.role

    def with_ctes(self, depth):
        """WITH .. and a query that reads it, some CTEs more than once."""
        listed, before = [], self.ctes
        self.ctes = list(before)
        for _ in range(self.rng.choice([1, 1, 2])):
            query = self.query(depth - 1, limited=self.rng.random() < 0.15)
            name = self.alias("w")
            hint = self.rng.choice(["", "", "MATERIALIZED ", "NOT MATERIALIZED "])
            listed.append([f"{name} ({', '.join(f'c{i + 1}' for i in range(len(query.columns)))}) AS ",
                           Part(hint, "") if hint else "", "(", query.tree, ")"])
            self.ctes.append((name, query))
        recursive = ""
        if self.rng.random() < 0.1:
            recursive = "RECURSIVE "
            table, name = self.choose_table(), self.alias("w")
            start = self.condition([self.relation_of(table, "t")], depth=1)
            listed.append([f"{name} (c1, c2) AS (SELECT t.k, 0 FROM {table.name} t WHERE ", start,
                           f" UNION SELECT t.k, {name}.c2 + 1 FROM {table.name} t JOIN {name} ON t.r = {name}.c1 "
                           f"WHERE {name}.c2 < 2)"])
            self.ctes.append((name, Query("", [(table.type, "k"), ("int4", "x")])))
        self.budget = max(self.budget, 2)
        query = self.query(depth)
        self.ctes = before
        return Query(["WITH ", recursive, joined(", ", listed), " ", query.tree], query.columns)
