"""What a logical table refuses on purpose, and defects that are known and open.

A statement that may be refused runs on the distributed side first; if it is refused with its code, the plain side does
not run it. Everything else must fail on both sides with the same SQLSTATE.
"""

import re

NOT_SUPPORTED = "0A000"
REFUSALS = {
    "key change": {NOT_SUPPORTED},  # UPDATE of the key column
    "conflict target": {NOT_SUPPORTED},  # ON CONFLICT (..) and ON CONFLICT .. DO UPDATE
    "merge": {NOT_SUPPORTED},  # MERGE into a logical table
    "copy table out": {"42809"},  # COPY table TO: Postgres refuses it for a partitioned table; COPY (SELECT ..) works
}

# (what, regular expression on the SQL and the answer of the distributed side). Empty when nothing is open.
OPEN = []


def open_defect(sql, answer):
    """The name of the open defect that a failure belongs to, or None."""
    text = f"{sql}\n{answer}"
    return next((name for name, pattern in OPEN if re.search(pattern, text, re.S)), None)
