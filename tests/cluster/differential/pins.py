"""Pins: statements all of whose tables have one key, so that a shard can do them whole.

Decides which key a statement is about and where it says so: in WHERE, in the condition of an outer join, in a derived
table, or in an equality with another pinned table. What always holds: the key is one constant or one parameter,
wherever it stands; some conditions are left out by chance, so that a statement only looks like one about one shard.
"""

from .tree import Value
from .values import FAMILY, literal, random_text, spelled


class Pins:
    """Part of the generator. `pin` is the statement's key, None if it has none."""

    def choose_pin(self, text=None):
        """Pins the statement to a key of its family."""
        text = random_text(self.rng, self.near.type) if text is None else text
        shown = literal(self.near.type, text)
        if self.rng.random() < 0.3:
            shown = spelled(self.rng, self.near.type, text).literal
        around = self.rng.choice(["{}", "{}::" + self.near.type])
        self.pin = Value(self.near.type, text, shown, around, domain=self.near.type, shared=True)

    def pinnable(self, relation):
        table = relation.table
        return self.pin is not None and table is not None and table.distributed and table.family == FAMILY[self.pin.type]

    def pin_condition(self, relation):
        return [f"{relation.alias}.k = ", self.pin] if self.rng.random() < 0.8 else [self.pin, f" = {relation.alias}.k"]

    def pin_conditions(self, rels):
        """Conditions for WHERE that pin what is not pinned elsewhere."""
        found = [self.pin_condition(r) for r in rels if self.pinnable(r) and not r.pinned and self.rng.random() < 0.97]
        for relation in rels:
            relation.pinned = True
        return found

    def pin_side(self, rels):
        """Conditions for an outer join's ON: this side may be null, where WHERE would undo the join."""
        found = []
        for relation in rels:
            if self.pinnable(relation) and not relation.pinned:
                if self.rng.random() < 0.5:  # else by its equality with the other side
                    found.append(self.pin_condition(relation))
                relation.pinned = True
        return found

    def pinned_item(self, table, alias):
        """A derived table of one key."""
        return [f"(SELECT * FROM {table.name} WHERE k = ", self.pin, f") {alias}"]
