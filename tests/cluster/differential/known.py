"""What the product refuses on purpose, and defects that are known and open.

A statement that is refused on the distributed side is not run on the plain side; its transaction ends there. Everything
else must fail on both sides with the same SQLSTATE.
"""

import re

# (what, SQLSTATE, regular expression on the message, regular expression on the SQL, only as an ordinary user)
REFUSALS = [
    ("key change", "0A000", "cannot change the shard key", r"\bSET\b.*\bk = ", False),
    ("conflict target", "0A000", "ON CONFLICT with a conflict target or DO UPDATE", r"ON CONFLICT \(", False),
    ("merge", "0A000", "MERGE into table", "MERGE INTO", False),
    # One server gives a statement one snapshot; several cannot.
    ("write and read", "0A000", "cannot write table .* and read it in another place", r"RETURNING", False),
    # A stable function sees what its statement saw at the start; a scan that begins after a write would not.
    ("older snapshot", "0A000", "cannot begin to read table .* by a cursor that is older than a write", r"counted|every_key", False),
    # A view reads and writes as its owner, on a connection of his own.
    ("two users", "0A000", "as user .* in a transaction that wrote there as", "", True),
    # Postgres refuses it for any partitioned table; COPY (SELECT ..) TO works.
    ("copy table out", "42809", "cannot copy from partitioned table", r"COPY .* TO", False),
]

# Defects that wait for their fix: (what, regular expression on the unit's SQL and both answers). Empty when none is open.
OPEN = []


def refusal(sql, answer, as_user):
    """The name of the refusal that an answer is, or None."""
    for name, state, message, shape, only_user in REFUSALS:
        if answer.error == state and re.search(message, answer.message) and re.search(shape, sql, re.S):
            if as_user or not only_user:
                return name
    return None


def open_defect(sql, answers):
    """The name of the open defect that a failure belongs to, or None."""
    text = f"{sql}\n{answers}"
    return next((name for name, pattern in OPEN if re.search(pattern, text, re.S)), None)
