"""What clients did, and what of it breaks the guarantees.

Each key's value is a number that every write raises by one, so the larger of two values is the later one. A client does
one thing at a time. What always holds: only what is known to have happened counts: a write whose outcome is unknown, or
a read that failed, promises nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """A client has written or read `value`."""

    client: str
    kind: str  # "write" or "read"
    key: int
    value: int
    at: float  # seconds since the beginning
    how: str = ""


@dataclass(frozen=True)
class Violation:
    guarantee: str
    earlier: Event
    later: Event

    def __str__(self):
        return (f"{self.guarantee}: {self.later.client} read {self.later.value} of key {self.later.key} at "
                f"{self.later.at:.3f} s{self.later.how}, after a {self.earlier.kind} of {self.earlier.value} at "
                f"{self.earlier.at:.3f} s")


def violations(history):
    """`history`: the events of each client in their order."""
    found, highest = [], {}
    for event in history:
        for kind, guarantee in (("write", "read your writes"), ("read", "monotonic reads")):
            earlier = highest.get((event.client, event.key, kind))
            if event.kind == "read" and earlier is not None and event.value < earlier.value:
                found.append(Violation(guarantee, earlier, event))
        mark = (event.client, event.key, event.kind)
        if mark not in highest or highest[mark].value < event.value:
            highest[mark] = event
    return found
