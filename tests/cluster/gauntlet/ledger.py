"""What clients know of their writes, and what of that the shards do not bear out.

A client writes in four ways: operations, each a row of its own (table op) in one transaction with one more in the key's
counter; bare counts, which add one to a counter of the key's and leave no row; items, which belong to their writer alone
and have a value; transfers, which are operations. What always holds: a write that was confirmed must be there, one that is known
to have failed must not; one whose outcome is unknown may be there or not, but not by halves and not twice. Pure: no database.
"""

from collections import Counter
from dataclasses import dataclass, field

ABSENT = None
LOST, DOUBLED = "lost", "doubled"


@dataclass(frozen=True)
class Finding:
    kind: str
    what: str

    def __str__(self):
        return f"{self.kind}: {self.what}"


@dataclass
class Ledger:
    """One writer's. Operations are (tenant, number); items are by (tenant, id), with the values that each may have."""

    writer: int
    confirmed: set = field(default_factory=set)
    unknown: set = field(default_factory=set)
    bare: Counter = field(default_factory=Counter)
    bare_unknown: Counter = field(default_factory=Counter)
    items: dict = field(default_factory=dict)

    def wrote_item(self, key, value, sure):
        self.items[key] = {value} if sure else self.items.get(key, {ABSENT}) | {value}

    def certain(self, key):
        """Is it known what has become of the item?"""
        return len(self.items.get(key, {ABSENT})) == 1


@dataclass
class Stored:
    """What all shards hold together: each row as often as it is there."""

    ops: Counter = field(default_factory=Counter)  # of (tenant, writer, number)
    counters: dict = field(default_factory=dict)  # tenant: [(operations, bare counts), ..]
    items: dict = field(default_factory=dict)  # (tenant, writer, id): [value, ..]


def differences(ledgers, stored):
    """Findings; none if the shards hold what the clients know."""
    return [*_operations(ledgers, stored), *_counters(ledgers, stored), *_items(ledgers, stored)]


def _operations(ledgers, stored):
    confirmed = {(tenant, each.writer, number) for each in ledgers for tenant, number in each.confirmed}
    possible = confirmed | {(tenant, each.writer, number) for each in ledgers for tenant, number in each.unknown}
    for op in sorted(confirmed - set(stored.ops)):
        yield Finding(LOST, f"operation {op[2]} of writer {op[1]} on tenant {op[0]} was confirmed and is not there")
    for op, times in sorted(stored.ops.items()):
        if times > 1:
            yield Finding(DOUBLED, f"operation {op[2]} of writer {op[1]} on tenant {op[0]} is there {times} times")
        if op not in possible:
            yield Finding(DOUBLED, f"operation {op[2]} of writer {op[1]} on tenant {op[0]} had failed and is there")


def _counters(ledgers, stored):
    bare, unknown, ops = Counter(), Counter(), Counter(op[0] for op in stored.ops)
    for each in ledgers:
        bare += each.bare
        unknown += each.bare_unknown
    for tenant, rows in sorted(stored.counters.items()):
        if len(rows) > 1:
            yield Finding(DOUBLED, f"the counter of tenant {tenant} is there {len(rows)} times")
        for count, bare_count in rows:
            if count != ops[tenant]:
                yield Finding(LOST if count < ops[tenant] else DOUBLED,
                              f"the counter of tenant {tenant} is {count} after {ops[tenant]} operations")
            least, most = bare[tenant], bare[tenant] + unknown[tenant]
            if not least <= bare_count <= most:
                yield Finding(LOST if bare_count < least else DOUBLED,
                              f"the bare counter of tenant {tenant} is {bare_count}, not between {least} and {most}")
    for tenant in sorted((set(bare) | set(ops)) - set(stored.counters)):
        yield Finding(LOST, f"the counter of tenant {tenant} is not there")


def _items(ledgers, stored):
    expected = {(key[0], each.writer, key[1]): values for each in ledgers for key, values in each.items.items()}
    for item in sorted(set(expected) | set(stored.items)):
        values, found = expected.get(item, {ABSENT}), stored.items.get(item, [])
        name = f"item {item[2]} of writer {item[1]} of tenant {item[0]}"
        if len(found) > 1:
            yield Finding(DOUBLED, f"{name} is there {len(found)} times")
        elif (found[0] if found else ABSENT) not in values:
            wanted = " or ".join("absent" if value is ABSENT else str(value) for value in sorted(values, key=str))
            yield Finding(DOUBLED if values == {ABSENT} else LOST, f"{name} is {found[0] if found else 'absent'}, not {wanted}")
