"""Queries with JSON: values built from rows, taken apart again, searched by paths, joined laterally.

What always holds: nothing shows a numeric's zeros or the order of a table's rows; aggregates order what they collect.
JSON_TABLE needs Postgres 17, JSON constructors and IS JSON 16.
"""

from .relations import Column, Query, Relation
from .values import typed


class Json:
    """Part of the generator. `version`: of the server, 160000 say."""

    def json_query(self, depth, types, outer):
        table, alias = self.choose_table(), self.alias()
        self.budget -= 1
        relation = self.relation_of(table, alias)
        kind = self.rng.choice([self._built, self._collected, self._apart, self._by_path, *([self._tables] if self.version >= 170000 else [])])
        tree, columns = kind(table, alias, relation, outer)
        return Query(tree, columns)

    def _object(self, alias):
        """An expression that makes a JSON object of some columns, with members id, a, b."""
        choices = [f"jsonb_build_object('id', {alias}.id, 'a', {alias}.a, 'b', {alias}.b)",
                   f"to_jsonb((SELECT x FROM (SELECT {alias}.id, {alias}.a, {alias}.b) x))",
                   f"(json_build_object('id', {alias}.id, 'b', {alias}.b)::jsonb || jsonb_build_object('a', {alias}.a))",
                   f"jsonb_set(jsonb_build_object('id', {alias}.id, 'b', {alias}.b), '{{a}}', coalesce(to_jsonb({alias}.a), 'null'))"]
        if self.version >= 160000:
            choices.append(f"JSON_OBJECT('id': {alias}.id, 'a': {alias}.a, 'b': {alias}.b RETURNING jsonb)")
        return self.rng.choice(choices)

    def _built(self, table, alias, relation, outer):
        made = self._object(alias)
        outputs = [(f"{alias}.k", table.type, "k"), (f"({made} ->> 'b')", "text", "x"), (f"({made} -> 'a')::text", "text", "x"),
                   (f"({made} #>> ARRAY['id'])::int4", "int4", "id"), (f"({made} ? 'b')", "bool", "x"), (f"({made} @> '{{\"a\": 2}}')", "bool", "x")]
        if self.version >= 160000:
            outputs.append((f"({alias}.b IS JSON)", "bool", "x"))
        chosen = [outputs[0], *self.rng.sample(outputs[1:], 2)]
        return ["SELECT ", self._listed(chosen), f" FROM {table.name} {alias}", self.where([relation], outer)], [(t, r) for _, t, r in chosen]

    def _collected(self, table, alias, relation, outer):
        made = self._object(alias)
        collected = [f"jsonb_agg({made} ORDER BY {alias}.k, {alias}.id)::text", f"json_agg({made} ORDER BY {made})::text",
                     f"jsonb_object_agg({alias}.id, {alias}.b ORDER BY {alias}.id, {alias}.b)::text",
                     f"jsonb_array_length(coalesce(jsonb_agg({alias}.a), '[]'))::text"]
        if self.version >= 160000:
            collected.append(f"JSON_ARRAYAGG({alias}.b ORDER BY {alias}.b NULL ON NULL)::text")
        return ["SELECT ", f"{alias}.k AS c1, {self.rng.choice(collected)} AS c2", f" FROM {table.name} {alias}", self.where([relation], outer),
                f" GROUP BY {alias}.k"], [(table.type, "k"), ("text", "x")]

    def _apart(self, table, alias, relation, outer):
        """Rows of an array or object of the same row, or of all rows of a key."""
        part, made = self.alias("j"), self._object(alias)
        source, columns = self.rng.choice([
            (f"LATERAL jsonb_array_elements_text(jsonb_build_array({alias}.a, {alias}.b)) WITH ORDINALITY {part}(c1, c2)", f"{part}.c1"),
            (f"LATERAL jsonb_each_text({made}) {part}", f"{part}.key || coalesce({part}.value, '-')"),
            (f"jsonb_to_record({made}) {part}(id int, b text, more int)", f"coalesce({part}.b, {part}.id::text, {part}.more::text)"),
            (f"jsonb_to_recordset(jsonb_build_array({made}, {made})) {part}(id int, a int)", f"({part}.id + {part}.a)::text"),
            (f"LATERAL (SELECT jsonb_object_keys({made}) AS key) {part}", f"{part}.key")])
        join = self.rng.choice([" CROSS JOIN ", ", "])
        return ["SELECT ", f"{alias}.k AS c1, {columns} AS c2", f" FROM {table.name} {alias}{join}{source}", self.where([relation], outer)], \
            [(table.type, "k"), ("text", "x")]

    def _by_path(self, table, alias, relation, outer):
        made = self._object(alias)
        value = typed(self.rng, "int4", str(self.rng.randrange(8)))
        shown, type = self.rng.choice([(f"jsonb_path_exists({made}, '$.a ? (@ > 2)')", "bool"), (f"({made} @@ '$.id < 20')", "bool"),
                                       (f"jsonb_path_query_array({made}, '$.*')::text", "text"), (f"jsonb_path_query_first({made}, '$.b')::text", "text")])
        required = [f"jsonb_path_match({made}, '$.a == $x', jsonb_build_object('x', ", value, "), true)"] if self.rng.random() < 0.5 else \
            [f"{made} @? '$.a'"]
        return ["SELECT ", f"{alias}.k AS c1, {shown} AS c2", f" FROM {table.name} {alias}", self.where([relation], outer, [required])], \
            [(table.type, "k"), (type, "x")]

    def _tables(self, table, alias, relation, outer):
        part, made = self.alias("j"), self._object(alias)
        source = f"JSON_TABLE({made}, '$' COLUMNS (c1 int PATH '$.a', c2 text PATH '$.b' DEFAULT 'none' ON EMPTY, NESTED PATH '$.id' COLUMNS (c3 int PATH '$')))"
        relation_of_part = Relation(part, [Column(f"{part}.c1", "int4", "x")])
        condition = self.condition([relation_of_part], depth=0) if self.rng.random() < 0.3 else "true"
        return ["SELECT ", f"{alias}.k AS c1, {part}.c1 AS c2, {part}.c3 AS c3", f" FROM {table.name} {alias} LEFT JOIN LATERAL {source} {part} ON ",
                condition, self.where([relation], outer)], [(table.type, "k"), ("int4", "x"), ("int4", "x")]
