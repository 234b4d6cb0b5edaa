"""The statements that are measured, in pgbench's language, and as a client of psycopg sends them."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Statement:
    """`sql` uses the names of pgbench.script; `rows` is what it returns for every key (None: not looked at)."""

    name: str
    sql: str
    rows: int | None = None


def parts(sql):
    """Its statements in psycopg's language, with parameters k, id and new."""
    return [re.sub(r":(k|id|new)\b", r"%(\1)s", part) for part in sql.rstrip(";").split(";\n")]


KEYED = (
    Statement("keyed_select", "SELECT id, size, name FROM objects WHERE k = :k;", 10),
    Statement("point_select", "SELECT size FROM objects WHERE k = :k AND id = :id;", 1),
    Statement("keyed_join", "SELECT o.id, o.name, n.body FROM objects o JOIN notes n ON n.k = o.k AND n.object = o.id"
                            " WHERE o.k = :k;", 10),
    Statement("keyed_update", "UPDATE objects SET size = size + 1 WHERE k = :k AND id = :id;"),
    Statement("keyed_insert", "INSERT INTO events (k, id, body) VALUES (:k, :new, 'an event');"),
    Statement("transaction", "BEGIN;\nSELECT size FROM objects WHERE k = :k AND id = :id;\n"
                             "UPDATE objects SET size = size + 1 WHERE k = :k AND id = :id;\nCOMMIT;"),
)

# A direct client asks its shard alone for these, an eighth of the rows.
FANOUT = (
    Statement("fanout_count", "SELECT count(*) FROM objects;", 1),
    Statement("fanout_sum", "SELECT sum(size), max(name) FROM objects;", 1),
)
