"""Writes that look before they write: INSERT .. ON CONFLICT, MERGE, and several writes in one statement.

What always holds: the outcome is defined. A row is proposed once, a row of MERGE's target matches one source row, and of
several writes in one statement none meets a row of another (their ids are far apart).
"""

from .schema import TABLES, random_row, stored_columns
from .steps import Step
from .tree import Part, joined, optional
from .values import typed

APART = 40000  # between ids of a statement's writes


class Upserts:
    """Part of the generator."""

    def near_tables(self):
        """Tables of the statement's keyspace and family, that are written without a view."""
        return [t for t in TABLES if t.family == self.family and t.keyspace == self.keyspace and t.name != "gen"]

    def chosen_key(self, table):
        return self.pin if self.pin is not None and self.rng.random() < 0.95 else typed(self.rng, table.type)

    def upsert(self):
        """INSERT of rows with ids of their own, some of which are there already."""
        table = self.rng.choice(self.near_tables())
        names = ["k", "id", "a", "b", *self.rng.sample(["n", "d", "r"], self.rng.choice([0, 1]))]
        ids = self.rng.sample(range(1, 60), self.rng.choice([1, 1, 2, 5]))
        rows = []
        for id in ids:
            row = dict(zip(stored_columns(table), random_row(self.rng, table, str(id))))
            values = {c: typed(self.rng, {"id": "int4", "a": "int4", "b": "text", "n": "numeric", "d": "date"}.get(c, table.type), row[c])
                      if row[c] is not None else "NULL" for c in names}
            values["k"] = self.chosen_key(table)
            rows.append(["(", joined(", ", [values[c] for c in names]), ")"])
        source = ["VALUES ", joined(", ", rows)]
        if self.rng.random() < 0.3:
            other = self.rng.choice([t for t in self.near_tables() if t.type == table.type])
            named = {"k": "s.k", "id": "s.id % 50 + 1", "a": "s.a", "b": "s.b", "n": "s.n", "d": "s.d", "r": "s.r"}
            source = [f"SELECT DISTINCT ON ({named['k']}, {named['id']}) {', '.join(named[c] for c in names)} FROM {other.name} s",
                      self.where([self.relation_of(other, "s")]), f" ORDER BY s.k, {named['id']}, s.id"]
        tree = [f"INSERT INTO {table.name} AS t ({', '.join(names)}) ", source, self.conflict_action(table), self.shown("t", table)]
        return Step(tree, "write", (), (table.stored,), has_rows=tree[-1] != "")

    def conflict_action(self, table):
        target = self.rng.choice([" (k, id)", " (id, k)", " (k, id)", ""])
        if not target or self.rng.random() < 0.2:
            return f" ON CONFLICT{target} DO NOTHING"
        sets = self.rng.choice(["a = excluded.a", "a = coalesce(t.a, 0) + 1, b = excluded.b", "b = t.b || excluded.b", "(a, b) = (excluded.a, t.b)",
                                "a = (SELECT max(x.a) FROM (VALUES (t.a), (excluded.a)) x(a))", "a = DEFAULT", "k = excluded.k, b = 'same'"])
        condition = self.rng.choice(["", "", " WHERE t.a IS DISTINCT FROM excluded.a", " WHERE t.id % 2 = 0 AND excluded.b <> t.b"])
        return [f" ON CONFLICT{target} DO UPDATE SET {sets}", optional(condition) if condition else ""]

    def shown(self, alias, table):
        """' RETURNING ..' with expressions, or nothing."""
        if self.rng.random() < 0.4:
            return ""
        items = [f"{alias}.k", f"{alias}.id", f"{alias}.id * 2 + coalesce({alias}.a, 0)", f"coalesce({alias}.b, 'none') || '.'", f"{alias}.a IS NULL",
                 f"CASE WHEN {alias}.id % 2 = 0 THEN {alias}.b END", f"jsonb_build_array({alias}.id, {alias}.b)::text",
                 f"(SELECT count(*) FROM generate_series(1, {alias}.id % 5))", f"upper({alias}.b)", f"{alias}.d + 1", "1", "current_setting('app.text')"]
        return " RETURNING " + ", ".join(f"{item} AS r{i}" for i, item in enumerate(self.rng.sample(items, self.rng.choice([1, 2, 3, 5]))))

    def merge(self):
        table, alias = self.rng.choice(self.near_tables()), "t"
        other = self.rng.choice([t for t in self.near_tables() if t.type == table.type])
        relation, source = self.relation_of(table, alias), self.relation_of(other, "s")
        source.pinned = True
        item = other.name
        if self.pin is not None or self.rng.random() < 0.5:
            key = self.chosen_key(other)
            some = self.rng.choice(["", "", " AND id < 25", " AND a IS NOT NULL"])
            item = [self.rng.choice([f"(SELECT * FROM {other.name} WHERE k = ", f"(SELECT k, id + 20 AS id, a, b, n, d, r FROM {other.name} WHERE k = "]),
                    key, some, ")"]
            if self.rng.random() < 0.15:
                item = ["(SELECT ", key, " AS k, q.id, q.id % 4 AS a, 'made'::text AS b FROM (VALUES (1), (2), (77)) q(id))"]
        condition = ["t.k = s.k AND t.id = s.id"]
        if self.pinnable(relation) and self.rng.random() < 0.5:
            condition += [" AND ", self.pin_condition(relation)]
        elif self.rng.random() < 0.2:
            condition += [" AND ", self.condition([self.relation_of(table, "t")], depth=0)]
        clauses = self._merge_clauses()
        returning = ""
        if self.version >= 170000:
            if self.pin is not None and self.rng.random() < 0.3:
                clauses.append([" WHEN NOT MATCHED BY SOURCE AND t.k = ", self.pin, self.rng.choice(
                    [" AND t.id < 5 THEN DELETE", " THEN UPDATE SET b = 'alone'", " AND t.a > 3 THEN UPDATE SET a = t.a + 1, b = NULL"])])
            returning = self.shown("t", table)
            if returning and self.rng.random() < 0.5:
                returning += ", merge_action(), s.id"
        tree = [f"MERGE INTO {table.name} t USING ", item, " s ON ", condition, clauses, returning]
        return Step(tree, "write", (), (table.stored,), has_rows=returning != "")

    def _merge_clauses(self):
        """WHEN clauses; what stands after one without a condition would not be reached."""
        clauses, closed = [], set()
        for _ in range(self.rng.choice([1, 2, 2, 3])):
            clause = self._merge_clause()
            head = clause.split(" THEN ")[0]
            kind = "NOT MATCHED" if " NOT " in head else "MATCHED"
            if kind not in closed:
                clauses.append(clause)
            if " AND " not in head:
                closed.add(kind)
        return clauses

    def _merge_clause(self):
        matched = self.rng.choice([" AND s.id % 2 = 0", " AND t.a IS NULL", ""])
        if self.rng.random() < 0.4:
            guard = self.rng.choice(["", " AND s.id % 3 <> 0", " AND s.a > 2"])
            inserted = self.rng.choice(["INSERT (k, id, a) VALUES (s.k, s.id + 7000, s.a)", "INSERT (a, id, k) VALUES (DEFAULT, s.id + 7000, s.k)",
                                        "INSERT (k, id, b) VALUES (s.k, s.id + 7000, upper(s.b))", "DO NOTHING"])
            return f" WHEN NOT MATCHED{guard} THEN {inserted}"
        return f" WHEN MATCHED{matched} THEN " + self.rng.choice(
            ["UPDATE SET b = s.b", "UPDATE SET a = coalesce(t.a, 0) + coalesce(s.a, 1) % 50, b = t.b || s.id", "DELETE", "DO NOTHING",
             "UPDATE SET k = s.k, id = s.id, b = 'whole'", "UPDATE SET (a, b) = (s.a, lower(s.b))"])

    def writing_ctes(self):
        """Several writes in one statement, each to a table of its own, and a query that reads what they returned."""
        count = min(self.rng.choice([1, 2, 2, 3]), len(self.near_tables()))
        tables, parts, names = self.rng.sample(self.near_tables(), count), [], []
        for index, table in enumerate(tables):
            name, alias = f"m{index + 1}", "t"
            where = self.where([self.relation_of(table, alias)])
            write = self.rng.choice(["update", "delete", "insert", "select"])
            if write == "update":
                tree = [f"UPDATE {table.name} t SET b = coalesce(t.b, '') || '{index}'", where]
            elif write == "delete":
                tree = [f"DELETE FROM {table.name} t", where]
            elif write == "insert":
                tree = [f"INSERT INTO {table.name} AS t (k, id, a) VALUES (", self.chosen_key(table), f", {APART + index + self.rng.randrange(1000)}, {index})"]
            else:
                tree = None
            if tree is None:
                parts.append([f"{name} (c1, c2, c3) AS (SELECT t.k, t.id, t.a FROM {table.name} t", where, ")"])
            else:
                parts.append([f"{name} (c1, c2, c3) AS (", tree, " RETURNING t.k, t.id, t.a)"])
            names.append(name)
        joins = " ".join(f"LEFT JOIN {name} ON {names[0]}.c1 = {name}.c1" for name in names[1:])
        tail = self.rng.choice([f"SELECT count(*), sum({names[-1]}.c2), min({names[0]}.c2) FROM {names[0]} {joins}",
                                " UNION ALL ".join(f"SELECT '{name}', count(*), sum(c3) FROM {name}" for name in names)])
        return Step(["WITH ", joined(", ", parts), " ", tail], "write", (), tuple(t.stored for t in tables))

    def failing(self):
        """A statement that fails on rows or constraints, in one way only."""
        table = self.rng.choice([t for t in self.near_tables() if t.kind == "table"])
        key, name = self.chosen_key(table), table.name
        where = Part([" WHERE t.k = ", key], "")
        reads = [[f"SELECT t.k, 1 / (t.id - t.id) FROM {name} t", where], [f"SELECT ('x' || t.id)::int4 FROM {name} t", where],
                 [f"SELECT (SELECT x.id FROM {name} x WHERE x.k = t.k) FROM {name} t", where], [f"SELECT t.nothing FROM {name} t", where],
                 [f"SELECT jsonb_path_query(to_jsonb(t.id), 'strict $.x') FROM {name} t", where]]
        writes = [[f"INSERT INTO {name} AS t (k, id, a) VALUES (", key, ", 900, 5000)"], [f"INSERT INTO {name} AS t (k, id) VALUES (", key, ", NULL)"],
                  [f"INSERT INTO {name} AS t (k, id) SELECT x.k, x.id FROM {name} x WHERE x.k = ", key], [f"UPDATE {name} t SET a = 5000", where],
                  [f"UPDATE {name} t SET id = 1 WHERE t.k = ", key], [f"DELETE FROM {name} t", where, " RETURNING 1 / (t.id - t.id)"],
                  [f"UPDATE {name} t SET a = 1 / (t.id - t.id)", where]]
        if self.rng.random() < 0.5:
            return Step(self.rng.choice(reads), "query")
        tree = self.rng.choice(writes)
        return Step(tree, "write", (), (table.stored,), has_rows="RETURNING" in str(tree[-1]))
