"""Statements that write: INSERT, UPDATE, DELETE, COPY, TRUNCATE, and CTEs that write; upserts.py has more.

What always holds: the outcome is defined. A row that is updated from a join matches one row there; rows that may
collide come in a defined order or are the same; a statement can fail in one way only.
"""

from .relations import Column, Query, Relation
from .schema import TABLES, VIEWS, random_row, stored_columns, types_of
from .steps import Step
from .tree import Part, joined
from .values import null, quoted, typed

WRITABLE = [*TABLES, *VIEWS]


class Writes:
    """Part of the generator."""

    def target(self):
        pool = [t for t in WRITABLE if t.family == self.family] if self.rng.random() < 0.9 else WRITABLE
        if self.pin:
            pool = [t for t in WRITABLE if t.family == self.family and t.keyspace == self.keyspace]
        return self.rng.choice([t for t in pool if not t.reference or self.rng.random() < 0.5] or pool)

    def write(self):
        kind = self.rng.choices(
            [self.insert, self.insert_select, self.update, self.delete, self.copy_in, self.truncate, self.modifying_cte,
             self.create_as, self.insert_query, self.with_cte, self.upsert, self.merge, self.writing_ctes],
            [30, 12, 28, 16, 6, 1, 8, 3, 6, 6, *([14, 14, 10] if self.pin else [3, 4, 5])])[0]
        return kind()

    def returning(self, alias, table, more=()):
        """' RETURNING ..' or nothing."""
        if self.rng.random() < 0.5:
            return ""
        if alias and not more and self.rng.random() < 0.3:
            return Part(self.shown(alias.rstrip("."), table) or " RETURNING 1", "")
        columns = [f"{alias}{c}" for c in types_of(table)]
        some = self.rng.sample(columns, self.rng.choice([1, 2, 4]))
        return Part(" RETURNING " + self.rng.choice([", ".join(some), f"{some[0]}, {alias}id + 1", f"{alias}*" if alias else "*",
                                                     ", ".join([*some, *more])]), "")

    @staticmethod
    def _has_rows(returning):
        return isinstance(returning, Part)

    def _id(self):
        return str(self.rng.randrange(1, 30) if self.rng.random() < 0.3 else self.rng.randrange(100, 100000))

    def insert(self):
        table = self.target()
        columns = stored_columns(table)
        if self.rng.random() < 0.4:
            columns = ["k", "id", *self.rng.sample([c for c in columns if c not in ("k", "id")], 2)]
        if table.name == "gen" and self.rng.random() < 0.5:
            columns = [c for c in columns if c != "id"]
        self.rng.shuffle(columns)
        types, rows = types_of(table), []
        for _ in range(self.rng.choice([1, 1, 1, 2, 3, 8])):
            row = dict(zip(stored_columns(table), random_row(self.rng, table, self._id())))
            values = [self.chosen_key(table) if c == "k" and self.pin else self._inserted(table, c, types[c], row[c]) for c in columns]
            rows.append(["(", joined(", ", values), ")"])
        conflict = self._conflict()
        returning = self.returning("", table)
        rows = Part(rows, *rows) if len(rows) > 1 else rows
        rows = Part(joined(", ", rows.choices[0]), *rows.choices[1:]) if isinstance(rows, Part) else rows
        tree = [f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ", rows, conflict, returning]
        return Step(tree, "write", (), (table.stored,), has_rows=self._has_rows(returning))

    def _inserted(self, table, column, type, text):
        if text is None or (column == "k" and self.rng.random() < 0.01):
            return null(type)
        if table.name == "gen" and column in ("a", "b", "d") and self.rng.random() < 0.2:
            return "DEFAULT"
        value = typed(self.rng, type, text)
        if self.rng.random() < 0.5:
            value.literal, value.parameter = quoted(text), "{}"
        if column == "k" and self.rng.random() < 0.08:
            return ["coalesce(", null(type), ", ", typed(self.rng, type, text), ")"]
        return value

    def _conflict(self):
        roll = self.rng.random()
        if roll < 0.2:
            return " ON CONFLICT DO NOTHING"
        if roll < 0.24:
            return self.rng.choice([" ON CONFLICT (k, id) DO NOTHING",
                                    " ON CONFLICT (k, id) DO UPDATE SET a = excluded.a, b = 'up'"])
        return ""

    def insert_select(self):
        table = self.target()
        sources = [t for t in WRITABLE if t.type == table.type]
        source = self.rng.choice(sources)
        relation = self.relation_of(source, "s")
        columns = stored_columns(table)
        add = self.rng.choice([0, 100, 1000, 5000])
        values = [f"s.id + {add}" if c == "id" else f"s.{c}" for c in columns]
        conflict = self._conflict()
        if "DO UPDATE" in conflict:
            conflict = " ON CONFLICT DO NOTHING"
        if self.rng.random() < 0.3:
            values[columns.index("k")] = typed(self.rng, table.type)
            values[columns.index("id")] = f"(SELECT count(*)::int + {add} FROM {source.name} x WHERE (x.k, x.id) < (s.k, s.id))"
        returning = self.returning("", table)
        limit = Part(self.rng.choice(["", "", f" ORDER BY s.k, s.id LIMIT {self.rng.choice([1, 5])}"]), "")
        tree = [f"INSERT INTO {table.name} ({', '.join(columns)}) SELECT ", joined(", ", values),
                f" FROM {source.name} s", self.where([relation]), limit, conflict, returning]
        return Step(tree, "write", (), (table.stored,), has_rows=self._has_rows(returning))

    def _assignments(self, table, alias, source=None):
        """SET list."""
        choices = {
            "a": [typed(self.rng, "int4", str(self.rng.randrange(20))), f"{alias}.a + 1", f"coalesce({alias}.a, 0) + 1", "NULL",
                  f"CASE WHEN {alias}.id % 2 = 0 THEN 7 ELSE {alias}.a END", "5000"],
            "b": [typed(self.rng, "text", "new"), f"{alias}.b || '+'", "DEFAULT", "'lit'", "current_setting('app.text')"],
            "n": [f"{alias}.n + 1.25", typed(self.rng, "numeric", "3.50"), f"{alias}.a * 0.5"],
            "d": [typed(self.rng, "date", "2023-07-07"), f"{alias}.d + 1"],
            "r": [typed(self.rng, table.type), f"{alias}.k", "NULL"],
        }
        weights = {"5000": 0.1}
        if source is not None:
            choices["a"].append(f"{source}.a")
            choices["b"].append(f"coalesce({source}.b, {alias}.b)")
        if self.budget > 0:
            inner, _ = self.subselect([self.relation_of(table, alias)], (), ["int4"], aggregate="max", correlated=True)
            choices["a"].append(["(", inner, ")"])
        names = [c for c in choices if c in stored_columns(table)]
        pieces = []
        for name in self.rng.sample(names, self.rng.choice([1, 1, 2, 3])):
            pool = choices[name]
            value = self.rng.choices(pool, [weights.get(p, 1) if isinstance(p, str) else 1 for p in pool])[0]
            pieces.append([f"{name} = ", value])
        if self.budget > 0 and self.rng.random() < 0.1 and table.stored != "gen":
            inner = f"SELECT max(x.a), min(x.b) FROM {self.choose_table().name} x WHERE x.id = {alias}.id"
            return f"(a, b) = ({inner})"
        if self.rng.random() < 0.03:
            pieces.append(["k = ", typed(self.rng, table.type)])
        return Part(joined(", ", pieces), *pieces) if len(pieces) > 1 else joined(", ", pieces)

    def _joined_source(self, alias):
        """Another table to read in UPDATE .. FROM or DELETE .. USING: tree, relations, conditions, whether unique."""
        if self.budget < 1 or self.rng.random() < 0.6:
            return "", [], [], None
        item, other = self.item(1)
        unique = other.table is not None and other.table.kind == "table"
        return item, [other], [], other.alias if unique else None

    def update(self):
        table, alias = self.target(), self.rng.choice(["", "u"])
        name = alias or table.name
        relation = self.relation_of(table, name)
        item, others, conditions, unique = self._joined_source(name)
        if others:
            conditions.append(self.join_condition([relation], others, only_equal=True))
            unique = unique if unique and others[0].table.family == table.family else None
            if unique:
                conditions.append(f"{name}.id = {unique}.id AND {name}.k = {unique}.k")
        sets = self._assignments(table, name, unique)
        returning = self.returning(f"{name}.", table, [f"{unique}.a"] if unique else ())
        tree = [f"UPDATE {table.name} {alias} SET ", sets, [" FROM ", item] if others else "",
                self.where([relation, *others], (), conditions), returning]
        return Step(tree, "write", (), (table.stored,), has_rows=self._has_rows(returning))

    def delete(self):
        table, alias = self.target(), self.rng.choice(["", "u"])
        name = alias or table.name
        relation = self.relation_of(table, name)
        item, others, conditions, _ = self._joined_source(name)
        if others:
            conditions.append(self.join_condition([relation], others))
        returning = self.returning(f"{name}.", table)
        if not others:
            conditions.append(self.condition([relation]))
        tree = [f"DELETE FROM {table.name} {alias}", [" USING ", item] if others else "",
                self.where([relation, *others], (), conditions), returning]
        return Step(tree, "write", (), (table.stored,), has_rows=self._has_rows(returning))

    def copy_in(self):
        table = self.rng.choice([t for t in TABLES if t.family == self.family])
        lines = []
        for _ in range(self.rng.choice([1, 3, 20])):
            row = random_row(self.rng, table, self._id())
            escaped = ["\\N" if v is None else v.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n") for v in row]
            lines.append("\t".join(escaped) + "\n")
        where = self.rng.choice(["", "", f" WHERE id % 2 = 0", " WHERE k IS NOT DISTINCT FROM r"])
        sql = f"COPY {table.name} ({', '.join(stored_columns(table))}) FROM STDIN{where}"
        return Step(sql, "copy in", (), (table.stored,), data="".join(lines))

    def truncate(self):
        table = self.rng.choice(TABLES)
        return Step(f"TRUNCATE {table.name}", "control", (), (table.stored,), has_rows=False)

    def insert_query(self):
        """Rows of any query; their ids count them in a defined order."""
        table = self.target()
        query = self.query(1, types=[table.type, self.rng.choice([table.type, "int4"])])
        tree = [f"INSERT INTO {table.name} (k, id) SELECT q.c1, row_number() OVER (ORDER BY q.c1, q.c2) + 300000 FROM (",
                query.tree, ") q WHERE q.c1 IS NOT NULL"]
        return Step(tree, "write", (), (table.stored,), has_rows=False)

    def with_cte(self):
        """UPDATE or DELETE that may read a CTE."""
        name, query = self.alias("w"), self.query(1)
        before, self.ctes = self.ctes, [(name, query)] * 3
        step = self.rng.choice([self.update, self.delete])()
        self.ctes = before
        columns = ", ".join(f"c{i + 1}" for i in range(len(query.columns)))
        step.tree = [f"WITH {name} ({columns}) AS (", query.tree, ") ", *step.tree]
        return step

    def create_as(self):
        """A temporary table filled by a query; the state comparison reads it."""
        return Step(["CREATE TEMP TABLE made AS ", self.query(1).tree], "create", (), ("made",), has_rows=False)

    def modifying_cte(self):
        step = self.rng.choice([self.insert, self.update, self.delete])()
        table = next(t for t in WRITABLE if t.stored == step.tables[0])
        tree = step.tree[:-1]
        columns = [("k", table.type, "k"), ("id", "int4", "id"), ("a", "int4", "x")]
        name = self.alias("m")
        prefix = self._prefix(tree)
        cte = [f"WITH {name} (c1, c2, c3) AS (", tree, " RETURNING " + ", ".join(prefix + c for c, _, _ in columns), ") "]
        if self.rng.random() < 0.3:
            other = self.rng.choice([t for t in TABLES if t.type == table.type])
            tail = f"INSERT INTO {other.name} (k, id, a) SELECT c1, c2 + 20000, c3 FROM {name}"
            return Step([*cte, tail], "write", (), (table.stored, other.stored), has_rows=False)
        before, self.ctes = self.ctes, [(name, Query("", [(t, r) for _, t, r in columns]))]
        relation = Relation(name, [Column(f"{name}.c{i + 1}", t, r) for i, (_, t, r) in enumerate(columns)])
        tail = f"SELECT count(*), min(c2), sum(c3) FROM {name}"
        if self.rng.random() < 0.6:
            item, other = self.item(0)
            tail = [f"SELECT count(*), sum({name}.c3) FROM {name} LEFT JOIN ", item, " ON ",
                    self.join_condition([relation], [other])]
        self.ctes = before
        return Step([*cte, tail], "write", (), (table.stored,))

    @staticmethod
    def _prefix(tree):
        """How RETURNING must name the columns of the statement's target."""
        words = tree[0].split()
        if words[0] == "INSERT":
            return ""
        name = words[1] if words[0] == "UPDATE" else words[2]
        alias = words[2:3] if words[0] == "UPDATE" else words[3:4]
        return (alias[0] if alias and alias[0] == "u" else name) + "."
