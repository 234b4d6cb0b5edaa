"""How many round trips to the shard each kind of statement costs, counted by the tests' proxy before shard-0.

    round_trips_STATEMENT, ..._simple    of a session that has run the statement often before; the second as simple query
    round_trips_first_statement          of a new session's first keyed SELECT, after the login to the shard

A time depends on the machine, these do not. What was sent is on standard error, by the protocol's letters.
"""

import os
import re

import psycopg
from proxy import Proxy

from harness.figures import figure, say, wanted
from harness.loading import connect, load_shards, unload_shards
from harness.statements import FANOUT, KEYED, parts

BEFORE, COUNTED = 8, 4  # past the runs for which Postgres makes plans for each value


def execute(conn, statement, key, number, prepare):
    values = {"k": key, "id": 7, "new": number}
    for sql in parts(statement.sql):
        if prepare:
            conn.execute(sql, values if "%" in sql else None, prepare=True)
        else:
            psycopg.ClientCursor(conn).execute(sql, values)


def count(proxy, way, statement, prepare, offset):
    """Round trips of one execution, and the trace of the last."""
    with connect(way.dsn) as conn:
        for number in range(BEFORE):
            execute(conn, statement, way.keys[number], offset + number, prepare)
        found = []
        for number in range(BEFORE, BEFORE + COUNTED):
            with proxy.counting() as counted:
                execute(conn, statement, way.keys[number], offset + number, prepare)
            found.append(counted.round_trips)
    trace = " ".join(direction + kinds for direction, kinds in counted.trace)
    return sum(found) / len(found), re.sub("DD+", "D..D", trace)


def measure(proxy, way):
    if wanted("round_trips_first_statement"):
        with connect(way.dsn) as conn, proxy.counting() as counted:
            execute(conn, KEYED[0], way.keys[0], 0, True)
        figure("round_trips_first_statement", counted.round_trips)
    for offset, statement in enumerate(KEYED + FANOUT):
        for suffix, prepare in (("", True), ("_simple", False)):
            name = f"round_trips_{statement.name}{suffix}"
            if wanted(name):
                trips, trace = count(proxy, way, statement, prepare, 1000 * (2 * offset + prepare))
                figure(name, trips)
                say(f"{name}: {trace}")


def main():
    port = psycopg.conninfo.conninfo_to_dict(os.environ["SHARD_0_DSN"])["port"]
    try:
        _, routed = load_shards()
        with Proxy(port=int(port)) as proxy, connect() as conn:
            conn.execute(f"ALTER SERVER \"shard-0\" OPTIONS (SET port '{proxy.port}')")
            try:
                measure(proxy, routed)
            finally:
                conn.execute(f"ALTER SERVER \"shard-0\" OPTIONS (SET port '{port}')")
    finally:
        unload_shards()


names = [f"round_trips_{statement.name}{suffix}" for statement in KEYED + FANOUT for suffix in ("", "_simple")]
if wanted("round_trips_first_statement", *names):
    main()
