"""Other ways to the same rows, where scripts/peers.sh could get them: a PgBouncer hop, and PL/Proxy.

PgBouncer stands before the shard, so it has one hop as we have but knows no keys: the least that a router in a process
of its own could cost. It pools transactions, but sessions for prepared statements, which older versions lose otherwise.

PL/Proxy runs on a Postgres 15 with shards of its own, and has a direct client of its own to be compared with. It can do
no transactions over statements. Writes are functions on its shards, as it wants them.
"""

import contextlib
import os
import pathlib

import pgbouncer
import psycopg
from cluster import Cluster
from server import TOOLS

from harness.loading import ASKED, KEYS, ROWS, TABLES, Way, column, connect, settle
from harness.statements import FANOUT

PEERS = TOOLS / "peers" / "bin"
SHARDS = 8
NOT_OF_ONE_SHARD = {statement.name: None for statement in FANOUT}

PLPROXY_SHARD = """
CREATE FUNCTION keyed_update(key bigint, number int) RETURNS void LANGUAGE sql AS
    'UPDATE objects SET size = size + 1 WHERE k = key AND id = number';
CREATE FUNCTION keyed_insert(key bigint, number bigint) RETURNS void LANGUAGE sql AS
    'INSERT INTO events (k, id, body) VALUES (key, number, ''an event'')';
"""
PLPROXY = """
CREATE FUNCTION keyed_select(key bigint, OUT id int, OUT size bigint, OUT name text) RETURNS SETOF record LANGUAGE plproxy
    AS 'CLUSTER ''shards''; RUN ON hashint8(key); SELECT id, size, name FROM objects WHERE k = key;';
CREATE FUNCTION point_select(key bigint, number int) RETURNS SETOF bigint LANGUAGE plproxy
    AS 'CLUSTER ''shards''; RUN ON hashint8(key); SELECT size FROM objects WHERE k = key AND id = number;';
CREATE FUNCTION keyed_join(key bigint, OUT id int, OUT name text, OUT body text) RETURNS SETOF record LANGUAGE plproxy
    AS 'CLUSTER ''shards''; RUN ON hashint8(key); SELECT o.id, o.name, n.body FROM objects o
        JOIN notes n ON n.k = o.k AND n.object = o.id WHERE o.k = key;';
CREATE FUNCTION keyed_update(key bigint, number int) RETURNS void LANGUAGE plproxy
    AS 'CLUSTER ''shards''; RUN ON hashint8(key);';
CREATE FUNCTION keyed_insert(key bigint, number bigint) RETURNS void LANGUAGE plproxy
    AS 'CLUSTER ''shards''; RUN ON hashint8(key);';
"""
PLPROXY_TEXTS = {
    "keyed_select": "SELECT * FROM keyed_select(:k);",
    "point_select": "SELECT * FROM point_select(:k, :id);",
    "keyed_join": "SELECT * FROM keyed_join(:k);",
    "keyed_update": "SELECT keyed_update(:k, :id);",
    "keyed_insert": "SELECT keyed_insert(:k, :new);",
    "transaction": None,
    **NOT_OF_ONE_SHARD,
}


@contextlib.contextmanager
def through_pgbouncer(direct):
    """The way `direct` through PgBouncer, which runs meanwhile; no way if it is not to be had."""
    if not pgbouncer.is_there():
        yield []
        return
    folder, parts = pathlib.Path(os.environ["CLUSTER_DIR"]) / "pgbouncer", psycopg.conninfo.conninfo_to_dict(direct.dsn)
    target = " ".join(f"{name}={parts[name]}" for name in ("host", "port", "dbname", "user"))
    databases = [f"{pool} = {target} pool_mode={pool}" for pool in ("transaction", "session")]
    with pgbouncer.pgbouncer(folder, databases, "transaction", parts["user"], default_pool_size=20) as port:
        dsns = {mode: f"host=127.0.0.1 port={port} dbname={pool} user={parts['user']}"
                for mode, pool in (("prepared", "session"), ("extended", "transaction"), ("simple", "transaction"))}
        yield [Way("pgbouncer", dsns["simple"], direct.keys, own=NOT_OF_ONE_SHARD, dsns=dsns)]


@contextlib.contextmanager
def plproxy():
    """The ways `plproxy` and `plproxy_direct`, on a cluster of their own that runs meanwhile; no ways without it."""
    if not (PEERS / "plproxy").exists():
        yield []
        return
    with Cluster(pg=15, shards=SHARDS, extension=False) as cluster:
        dsns = [cluster.shard_dsn(number) for number in range(SHARDS)]
        for number, dsn in enumerate(dsns):
            with connect(dsn) as conn:
                conn.execute(TABLES + ROWS + PLPROXY_SHARD)
                for table in ("objects", "notes"):
                    conn.execute(f"DELETE FROM {table} WHERE hashint8(k) & {SHARDS - 1} <> {number}")
        with connect(cluster.dsn()) as conn:
            parts = ", ".join(f"p{number} '{dsn.replace(' user=postgres', '')}'" for number, dsn in enumerate(dsns))
            conn.execute("CREATE EXTENSION plproxy")
            conn.execute(f"CREATE SERVER shards FOREIGN DATA WRAPPER plproxy OPTIONS ({parts})")
            conn.execute("CREATE USER MAPPING FOR PUBLIC SERVER shards OPTIONS (user 'postgres')")
            conn.execute(PLPROXY)
            keys = column(conn, f"SELECT k FROM generate_series(1, {KEYS}) k WHERE hashint8(k) & {SHARDS - 1} = 0"
                                f" LIMIT {ASKED}")
        settle(dsns)
        yield [Way("plproxy_direct", dsns[0], keys, own=NOT_OF_ONE_SHARD),
               Way("plproxy", cluster.dsn(), keys, own=PLPROXY_TEXTS)]
