"""Conditions: on keys above all, in every shape that a planner could misread.

What always holds: a condition can be evaluated on any row without an error (no overflow, no failing cast), since one
server and many may evaluate different rows.
"""

from .tree import Part, joined
from .values import FAMILY, array, literal, null, quoted, random_text, spelled, typed


class Conditions:
    """Part of the generator. `rels` are relations in scope, `outer` those of the queries around."""

    def where(self, rels, outer=(), required=()):
        """' WHERE ..' or nothing; `required` conditions are part of it."""
        pins = self.pin_conditions(rels)
        conditions = [*pins, *required]
        for _ in range(self.rng.choice([0, 0, 0, 1] if pins else [0, 0, 1, 1, 1, 1, 2, 3])):
            conditions.append(self.condition(rels, outer))
        if not conditions:
            return ""
        choices = [[" WHERE ", joined(" AND ", conditions)]]
        for left_out in range(len(conditions) if len(conditions) > 1 else 0):
            choices.append([" WHERE ", joined(" AND ", conditions[:left_out] + conditions[left_out + 1:])])
        return Part(*choices, "")

    def condition(self, rels, outer=(), depth=2):
        roll = self.rng.random()
        if depth and roll < 0.3:
            arms = [self.condition(rels, outer, depth - 1) for _ in range(self.rng.choice([2, 2, 3]))]
            return Part(["(", joined(self.rng.choice([" AND ", " OR ", " OR "]), arms), ")"], *arms)
        if depth and roll < 0.37:
            inner = self.condition(rels, outer, depth - 1)
            return Part([self.rng.choice(["NOT (", "(NOT "]), inner, ")"], inner)
        return Part(self._atom(rels, outer), "true")

    def _atom(self, rels, outer):
        kinds = [(30, self._equal), (12, self._in_list), (8, self._any_array), (6, self._between), (8, self._column_pair),
                 (8, self._stable), (5, self._null_test), (5, self._cast), (4, self._row), (14, self._other_column),
                 (4, self._computed), (2, self._constant), (2, self._truth),
                 (2, self._whole_row), (2, self._function)]
        if self.budget > 0:
            kinds += [(6, self._exists), (8, self._in_subquery), (4, self._scalar_subquery), (2, self._quantified)]
        kind = self.rng.choices([k for _, k in kinds], [w for w, _ in kinds])[0]
        return kind(rels, outer)

    def key(self, rels, outer=()):
        """A column that is a key, or of a key's type."""
        pool = [c for r in rels for c in r.columns if c.role == "k"] * 4
        pool += [c for r in rels for c in r.columns if c.role == "r"]
        pool += [c for r in outer for c in r.columns if c.role == "k"]
        return self.rng.choice(pool) if pool else self.any_column(rels)

    def any_column(self, rels):
        pool = [c for r in rels for c in r.columns]
        return self.rng.choice(pool)

    def constant(self, column, text=None):
        return spelled(self.rng, column.type, text) if text is not None or self.rng.random() > 0.03 else null(column.type)

    def _equal(self, rels, outer):
        key = self.key(rels)
        value = self.constant(key)
        return self.rng.choice([[key.sql, " = ", value]] * 4 + [
            [value, " = ", key.sql], ["((", key.sql, " = ", value, "))"], [key.sql, " IS NOT DISTINCT FROM ", value],
            [key.sql, " <> ", value], ["NOT (", key.sql, " <> ", value, ")"], ["(", key.sql, " = ", value, ") IS TRUE"],
            ["(", key.sql, " = ", value, ") IS NOT FALSE"], [key.sql, f"::{key.type} = ", value],
            [key.sql, " >= ", value]])

    def _in_list(self, rels, outer):
        key = self.key(rels)
        values = [self.constant(key) for _ in range(self.rng.choice([1, 2, 2, 2, 3, 3, 5, 40]))]
        if self.rng.random() < 0.15:
            values.insert(self.rng.randrange(len(values) + 1), "NULL")
        return [key.sql, self.rng.choice([" IN (", " IN (", " IN (", " NOT IN ("]), joined(", ", values), ")"]

    def _any_array(self, rels, outer):
        key = self.key(rels)
        if self.rng.random() < 0.15:
            values = [typed(self.rng, key.type) for _ in range(self.rng.choice([1, 2, 3]))]
            rows = joined(", ", [["(", value, ")"] for value in values])
            listed = array(self.rng, key.type, [random_text(self.rng, key.type) for _ in range(2)])
            return self.rng.choice([[key.sql, " IN (VALUES ", rows, ")"], [key.sql, " IN (SELECT unnest(", listed, "))"],
                                    [key.sql, " = ANY (ARRAY(SELECT q.x FROM (VALUES ", rows, ") q(x)))"],
                                    [key.sql, " = (", listed, ")[1]"]])
        texts = [random_text(self.rng, key.type) for _ in range(self.rng.choice([0, 1, 2, 3]))]
        if self.rng.random() < 0.2:
            texts.append(None)
        operator = self.rng.choice([" = ANY (", " = ANY (", " = ANY (", " = SOME (", " <> ALL (", " = ALL ("])
        return [key.sql, operator, array(self.rng, key.type, texts), ")"]

    def _between(self, rels, outer):
        key = self.key(rels)
        text = random_text(self.rng, key.type)
        low = typed(self.rng, key.type, text)
        high = typed(self.rng, key.type, text if self.rng.random() < 0.6 else None)
        return self.rng.choice([
            [key.sql, " BETWEEN ", low, " AND ", high], ["(", key.sql, " >= ", low, " AND ", key.sql, " <= ", high, ")"],
            [key.sql, " BETWEEN SYMMETRIC ", low, " AND ", high], ["(", low, " <= ", key.sql, " AND ", high, " >= ", key.sql, ")"],
            [key.sql, " NOT BETWEEN ", low, " AND ", high]])

    def comparable(self, left, rels, roles="krx"):
        """A column that compares with `left`, or None."""
        pool = [c for r in rels for c in r.columns
                if c.sql != left.sql and FAMILY.get(c.type) == FAMILY.get(left.type) and c.role in roles]
        return self.rng.choice(pool) if pool else None

    def _column_pair(self, rels, outer):
        left = self.key(rels)
        right = self.comparable(left, [*rels, *outer])
        if right is None:
            return self._equal(rels, outer)
        return [left.sql, self.rng.choice([" = ", " = ", " = ", " IS NOT DISTINCT FROM ", " < ", " <> "]), right.sql]

    def _stable(self, rels, outer):
        """Values known when the statement starts: a setting (runner.py sets them), a scalar subquery, a function."""
        key = self.key(rels)
        setting = f"current_setting('app.{FAMILY[key.type]}')"
        base = {"int": "int8", "time": "date"}.get(FAMILY[key.type], key.type)
        other, more = typed(self.rng, key.type), quoted("," + random_text(self.rng, key.type))
        listed = f"string_to_array({setting} || {{}}, ',')::{base}[]"
        return self.rng.choice([
            ["(", key.sql, f" = {setting}::{base} OR ", key.sql, " = ", other, ")"],
            ["(", key.sql, f" = {setting}::{base} AND random() < 2 OR ", key.sql, " IN (", other, f", {setting}::{base}))"],
            ["(", key.sql, f" = {setting}::{base} OR ", self._other_column(rels, outer), ")"],
            [key.sql, f" = ANY ({listed.format(more)})"], [key.sql, f" = ANY ({listed.format(quoted(',NULL'))})"]
            if base in ("text", "varchar(20)", "char(8)") else [key.sql, f" IN ({setting}::{base}, NULL)"],
            [key.sql, f" = ANY (string_to_array(current_setting('app.unset', true), ',')::{base}[])"],
            [key.sql, f" = {setting}::{base}"], [f"{setting}::{base} = ", key.sql],
            [key.sql, f" = (SELECT {setting}::{base})"], [key.sql, " = (SELECT ", typed(self.rng, key.type), ")"],
            [key.sql, f" IN ({setting}::{base}, ", typed(self.rng, key.type), ")"],
            [key.sql, f" = ANY (ARRAY[{setting}::{base}])"],
            [key.sql, f" = coalesce(current_setting('app.unset', true)::{base}, ", typed(self.rng, key.type), ")"]])

    def _null_test(self, rels, outer):
        column = self.any_column(rels)
        return self.rng.choice([[column.sql, " IS NULL"], [column.sql, " IS NOT NULL"], [column.sql, " = NULL"],
                                [column.sql, f" = {literal(column.type, None)}"],
                                ["(", column.sql, " IS NULL OR ", self._equal(rels, outer), ")"]])

    def _cast(self, rels, outer):
        """Casts on the column's side: some keep keys apart, others make them equal."""
        key = self.key(rels)
        text = random_text(self.rng, key.type)
        casts = {"int": [] if key.type == "numeric" else ["numeric", "int8", "text"],
                 "text": ["text", "varchar(20)", "char(8)", "varchar(1)"], "uuid": ["text"],
                 "time": ["date", "timestamp", "timestamptz"]}
        cast = self.rng.choice(casts.get(FAMILY[key.type]) or [key.type])
        if FAMILY[key.type] == "int" and cast == "text":
            return [f"{key.sql}::text = ", quoted(text)]
        value = typed(self.rng, cast, text) if cast in ("text", "char(8)", "varchar(20)", "numeric", "int8", "date",
                                                        "timestamp", "timestamptz") else quoted(text)
        return [f"{key.sql}::{cast} = ", value]

    def _row(self, rels, outer):
        key, other = self.key(rels), self.rng.choice(["1", "2", "5"])
        ids = [c for r in rels for c in r.columns if c.role == "id"]
        if not ids:
            return self._equal(rels, outer)
        id = self.rng.choice(ids)
        first, second = typed(self.rng, key.type), typed(self.rng, key.type)
        return self.rng.choice([
            [f"({key.sql}, {id.sql}) = (", first, f", {other})"],
            [f"({key.sql}, {id.sql}) IN ((", first, f", {other}), (", second, ", 3))"],
            [f"({key.sql}, {id.sql}) >= (", first, f", {other})"]])

    def _other_column(self, rels, outer):
        pool = [c for r in rels for c in r.columns if c.role not in "kr"]
        if not pool:
            return self._equal(rels, outer)
        column = self.rng.choice(pool)
        operator = self.rng.choice([" = ", " <> ", " < ", " >= "])
        if column.type in ("int4", "int8", "numeric"):
            return self.rng.choice([[column.sql, operator, typed(self.rng, "int4", str(self.rng.randrange(12)))],
                                    [f"{column.sql} % 3 = 1"], [f"coalesce({column.sql}, 0) < 4"]])
        if column.type == "date":
            return [column.sql, operator, typed(self.rng, "date", "2024-02-29")]
        if column.type == "bool":
            return [column.sql]
        if FAMILY[column.type] == "text":
            return self.rng.choice([[f"{column.sql} LIKE '%a%'"], [column.sql, operator, typed(self.rng, "text", "y")],
                                    [f"coalesce({column.sql}, '') = ''"], [f"{column.sql} IN ('x', 'z', '')"]])
        return [column.sql, operator, typed(self.rng, column.type)]

    def _computed(self, rels, outer):
        key = self.key(rels)
        value, other = typed(self.rng, key.type), typed(self.rng, key.type)
        return self.rng.choice([
            [f"coalesce({key.sql}, ", other, ") = ", value], [f"nullif({key.sql}, ", other, ") = ", value],
            [f"CASE WHEN {key.sql} = ", value, " THEN true ELSE false END"],
            [f"CASE {key.sql} WHEN ", value, " THEN 1 WHEN ", other, " THEN 2 END = 1"],
            [f"greatest({key.sql}, ", other, ") = ", value], [key.sql, " = greatest(", value, ", ", other, ")"],
            [key.sql, " = CASE WHEN ", typed(self.rng, "bool"), " THEN ", value, " ELSE ", other, " END"]])

    def _constant(self, rels, outer):
        return self.rng.choice(["true", "false", "NULL::bool", "1 = 0", ["(", typed(self.rng, "bool"), ")"]])

    def _truth(self, rels, outer):
        return ["(", self._equal(rels, outer), self.rng.choice([") IS NOT TRUE", ") IS FALSE", ") IS UNKNOWN"])]

    def _whole_row(self, rels, outer):
        named = [r.alias for r in rels if r.alias]
        if not named:
            return self._equal(rels, outer)
        alias = self.rng.choice(named)
        return self.rng.choice([f"({alias}.*) IS NOT NULL", f"{alias} IS NULL", f"({alias})::text <> ''",
                                f"{alias} = {alias}", f"NOT ({alias} IS NULL)"])

    def _function(self, rels, outer):
        """Calls of functions that read tables themselves."""
        key = self.key(rels)
        if FAMILY[key.type] == "int" and key.type != "numeric":
            return self.rng.choice([[f"{key.sql} IN (SELECT every_key())"], [f"EXISTS (SELECT FROM inlined({key.sql}) f WHERE f.c2 > 1)"],
                                    [f"{key.sql} = (SELECT min(f.c1) FROM inlined(", typed(self.rng, "int8"), ") f)"]])
        if FAMILY[key.type] == "text":
            return [f"counted({key.sql}) > ", self.rng.choice("013")]
        return self._equal(rels, outer)

    def _exists(self, rels, outer):
        inner, _ = self.subselect(rels, outer, [])
        return [self.rng.choice(["EXISTS (", "EXISTS (", "NOT EXISTS ("]), inner, ")"]

    def _in_subquery(self, rels, outer):
        key = self.key(rels)
        inner, _ = self.subselect(rels, outer, [key.type])
        return [key.sql, self.rng.choice([" IN (", " IN (", " = ANY (", " NOT IN ("]), inner, ")"]

    def _scalar_subquery(self, rels, outer):
        key = self.key(rels)
        if key.type in ("uuid", "bytea"):
            return self._in_subquery(rels, outer)
        inner, _ = self.subselect(rels, outer, [key.type], aggregate=self.rng.choice(["min", "max"]))
        return [key.sql, self.rng.choice([" = ", " = ", " >= "]), "(", inner, ")"]

    def _quantified(self, rels, outer):
        key = self.key(rels)
        inner, _ = self.subselect(rels, outer, [key.type])
        return [key.sql, self.rng.choice([" <> ALL (", " >= ALL (", " < ANY ("]), inner, ")"]
