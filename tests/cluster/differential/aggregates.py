"""Aggregates and window functions beyond the common ones: ordered-set and hypothetical ones, JSON and array aggregates,
statistics, frames, named windows, windows over groups, and all shapes of grouping sets.

What always holds: a result does not depend on the order in which rows come. Aggregates whose result shows rows order
them by what they show, and show no numerics (equal ones may differ in their zeros); frames that count rows are over a
unique order; sums of floats are not generated.
"""

from .relations import Query, Relation
from .tree import optional
from .values import FAMILY

FRAMES = ["ROWS BETWEEN 1 PRECEDING AND CURRENT ROW", "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 FOLLOWING",
          "ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING EXCLUDE CURRENT ROW", "ROWS 2 PRECEDING EXCLUDE TIES"]
PEER_FRAMES = ["GROUPS BETWEEN 1 PRECEDING AND 1 FOLLOWING", "RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW",
               "GROUPS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING EXCLUDE GROUP", "RANGE BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING"]


class Aggregates:
    """Part of the generator."""

    def rare_aggregate(self, column):
        """An aggregate that is seldom used: its tree and type."""
        sql, family, rng = column.sql, FAMILY[column.type], self.rng
        direction = rng.choice(["", " DESC", " NULLS FIRST"])
        choices = [(f"count({sql}) * 2 + count(*)", "int8"), (f"every({sql} IS NOT NULL)", "bool"),
                   (f"bool_and({sql} IS NOT NULL) AND count(*) > 1", "bool")]
        if family == "int":
            choices += [(f"stddev_samp({sql}::int4::numeric)" if column.type == "int2" else f"var_pop({sql} % 100)", "numeric"),
                        (f"sum({sql}) FILTER (WHERE {sql} > 0)", {"int8": "numeric", "numeric": "numeric"}.get(column.type, "int8"))]
        if family == "int" and column.type != "numeric":
            choices += [(f"percentile_disc(0.5) WITHIN GROUP (ORDER BY {sql}{direction})", column.type),
                        (f"percentile_cont(0.25) WITHIN GROUP (ORDER BY {sql})::text", "text"),
                        (f"percentile_disc(ARRAY[0.1, 0.9]) WITHIN GROUP (ORDER BY {sql})::text", "text"),
                        (f"rank(3) WITHIN GROUP (ORDER BY {sql}{direction})", "int8"), (f"cume_dist(2) WITHIN GROUP (ORDER BY {sql})::text", "text"),
                        (f"bit_or({sql})", column.type), (f"bit_and({sql})", column.type), (f"bit_xor({sql})", column.type),
                        (f"array_agg({sql} ORDER BY {sql}{direction})::text", "text"), (f"jsonb_agg({sql} ORDER BY {sql})::text", "text")]
        if family == "text":
            choices += [(f"json_agg({sql} ORDER BY {sql}{direction})::text", "text"),
                        (f"string_agg(DISTINCT {sql}, '|' ORDER BY {sql})" if column.type == "text" else f"count({sql})",
                         "text" if column.type == "text" else "int8"),
                        (f"array_agg(DISTINCT {sql})::text", "text")]
        if family != "bytea" and column.type not in ("numeric", "bool"):
            choices.append((f"mode() WITHIN GROUP (ORDER BY {sql})", column.type))
            choices.append((f"jsonb_object_agg(coalesce({sql}::text, ''), 1)::text" if family != "time" else f"count({sql})",
                            "text" if family != "time" else "int8"))
        sql, type = rng.choice(choices)
        return sql, type

    def grouping(self, names):
        """A GROUP BY clause of all kinds of grouping sets over these columns, and GROUPING of them."""
        first, rest = names[0], names[1:]
        every = ", ".join(names)
        shapes = [f"ROLLUP ({every})", f"CUBE ({every})", f"GROUPING SETS (({every}), ())", f"GROUPING SETS ({', '.join(f'({n})' for n in names)})",
                  f"GROUPING SETS (ROLLUP ({every}), ({first}))", f"GROUPING SETS ((), (), ({every}))"]
        if rest:
            shapes += [f"{first}, ROLLUP ({', '.join(rest)})", f"{first}, GROUPING SETS (({rest[0]}), ())",
                       f"DISTINCT ROLLUP ({every}), ROLLUP ({first})", f"CUBE (({every}), {first})"]
        shown = self.rng.choice([first, every])
        return " GROUP BY " + self.rng.choice(shapes), f"GROUPING({shown})"

    def window_functions(self, alias, by, unique):
        """Window functions over a table's columns: (SQL, type)."""
        found = [(f"count(*) FILTER (WHERE {alias}.a > 2) OVER ({by}ORDER BY {alias}.b {self.rng.choice(PEER_FRAMES)})", "int8"),
                 (f"sum({alias}.n) OVER ({by}ORDER BY {alias}.k {self.rng.choice(PEER_FRAMES)})", "numeric"),
                 (f"percent_rank() OVER ({by}ORDER BY {alias}.a)::text", "text"), (f"cume_dist() OVER ({by}ORDER BY {alias}.d DESC)::text", "text"),
                 (f"count({alias}.a) OVER ({by}ORDER BY {alias}.a RANGE BETWEEN 2 PRECEDING AND 1 FOLLOWING)", "int8"),
                 (f"min({alias}.a) OVER ({by}ORDER BY {alias}.d RANGE BETWEEN '1 month' PRECEDING AND CURRENT ROW)", "int4"),
                 (f"max({alias}.b) OVER w", "text"), (f"sum({alias}.a) OVER (w ORDER BY {alias}.k)", "int8")]
        if unique:
            total = f"ORDER BY {alias}.k, {alias}.id"
            found += [(f"ntile(3) OVER ({by}{total})", "int4"), (f"lead({alias}.b, 2, 'none') OVER ({by}{total} DESC)", "text"),
                      (f"nth_value({alias}.id, 2) OVER ({by}{total} {self.rng.choice(FRAMES)})", "int4"),
                      (f"last_value({alias}.a) OVER ({by}{total} {self.rng.choice(FRAMES)})", "int4"),
                      (f"string_agg({alias}.b, ',') OVER ({by}{total} {self.rng.choice(FRAMES)})", "text"),
                      (f"array_agg({alias}.id) OVER ({by}{total} {self.rng.choice(FRAMES)})::text", "text")]
        return found

    def windowed_groups(self, depth, types, outer):
        """Window functions over the groups of a query."""
        source, rels = self.source(depth, outer)
        column = self.key(rels) if self.rng.random() < 0.6 else self.any_column(rels)
        tree, type = self.aggregate(rels)
        window = self.rng.choice([("sum(count(*)) OVER ()", "numeric"), ("rank() OVER (ORDER BY count(*) DESC)", "int8"),
                                  ("count(*) OVER (PARTITION BY count(*) % 2)", "int8"),
                                  ("max(count(*)) OVER (ORDER BY count(*) GROUPS 1 PRECEDING)", "int8")])
        outputs = [(column.sql, column.type, column.role), (tree, type, "x"), (window[0], window[1], "x")]
        having = ""
        if self.rng.random() < 0.3:
            having = optional(" HAVING ", self.condition([Relation("", [column])], depth=0))
        return Query(["SELECT ", self._listed(outputs), source, f" GROUP BY {column.sql}", having], [(t, r) for _, t, r in outputs])
