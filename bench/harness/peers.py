"""Other ways to the same rows, where scripts/peers.sh could get them: a PgBouncer hop, and PL/Proxy.

PgBouncer stands before the shard, so it has one hop as we have but knows no keys: the least that a router in a process
of its own could cost. It pools transactions, but sessions for prepared statements, which older versions lose otherwise.

PL/Proxy runs on a Postgres 15 with shards of its own, and has a direct client of its own to be compared with. It can do
no transactions over statements. Writes are functions on its shards, as it wants them.
"""

import contextlib
import os
import pathlib
import subprocess
import time

import psycopg
from cluster import Cluster
from server import TOOLS, as_run_user, free_port, give_to_run_user

from harness.loading import ASKED, KEYS, ROWS, TABLES, Way, column, connect, settle
from harness.statements import FANOUT

PEERS = TOOLS / "peers" / "bin"
SHARDS = 8
NOT_OF_ONE_SHARD = {statement.name: None for statement in FANOUT}

PGBOUNCER = """
[databases]
transaction = {target} pool_mode=transaction
session = {target} pool_mode=session
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
default_pool_size = 20
logfile = {folder}/log
"""

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
def pgbouncer(direct):
    """The way `direct` through PgBouncer, which runs meanwhile; no way if it is not to be had."""
    if not (PEERS / "pgbouncer").exists():
        yield []
        return
    port, folder = free_port(), pathlib.Path(os.environ["CLUSTER_DIR"]) / "pgbouncer"
    folder.mkdir(exist_ok=True)
    give_to_run_user(folder)
    parts = psycopg.conninfo.conninfo_to_dict(direct.dsn)
    target = " ".join(f"{name}={parts[name]}" for name in ("host", "port", "dbname", "user"))
    (folder / "ini").write_text(PGBOUNCER.format(target=target, port=port, folder=folder))
    process = subprocess.Popen([str(PEERS / "pgbouncer"), "--quiet", str(folder / "ini")], stderr=subprocess.DEVNULL,
                               **as_run_user())
    try:
        dsns = {mode: f"host=127.0.0.1 port={port} dbname={pool} user={parts['user']}"
                for mode, pool in (("prepared", "session"), ("extended", "transaction"), ("simple", "transaction"))}
        wait_for(dsns["simple"], process)
        yield [Way("pgbouncer", dsns["simple"], direct.keys, own=NOT_OF_ONE_SHARD, dsns=dsns)]
    finally:
        process.terminate()
        process.wait()


def wait_for(dsn, process):
    deadline = time.monotonic() + 10
    while True:
        try:
            connect(dsn).close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


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
