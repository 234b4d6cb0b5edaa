"""The same rows behind every way to them, and the keys that each way is asked for.

2,000 keys with 10 objects and 10 notes each, and an empty table of events. A way's keys all lie on one shard (one
partition), so that every way works on one session of one shard, as the direct client does: whatever else a way could
do for keys that alternate is not measured.
"""

import os
from dataclasses import dataclass, field

import psycopg

KEYS, ASKED = 2000, 32

TABLES = """
CREATE TABLE objects (k bigint, id int, size bigint, name text, PRIMARY KEY (k, id));
CREATE TABLE notes (k bigint, id int, object int, body text, PRIMARY KEY (k, id));
CREATE TABLE events (k bigint, id bigint, body text, PRIMARY KEY (k, id));
"""
ROWS = f"""
INSERT INTO objects SELECT k, id, k * id, 'object ' || k * 10 + id
  FROM generate_series(1, {KEYS}) k, generate_series(1, 10) id;
INSERT INTO notes SELECT k, id, id, 'a note on object ' || k * 10 + id
  FROM generate_series(1, {KEYS}) k, generate_series(1, 10) id;
"""
NAMES = ("objects", "notes", "events")


@dataclass
class Way:
    """A way to the rows: `own` are texts of its own for some statements (None: it cannot do that), `dsns` other places for
    some of pgbench's modes."""

    name: str
    dsn: str
    keys: list
    own: dict = field(default_factory=dict)
    dsns: dict = field(default_factory=dict)

    def text(self, statement):
        return self.own.get(statement.name, statement.sql)

    def place(self, mode):
        return self.dsns.get(mode, self.dsn)


def connect(dsn=""):
    return psycopg.connect(dsn, autocommit=True)


def shard_dsns():
    return [os.environ[f"SHARD_{number}_DSN"] for number in range(int(os.environ["SHARDS"]))]


def settle(dsns):
    """Vacuums, and leaves it at that: autovacuum would start in the middle of some run."""
    for dsn in dsns:
        with connect(dsn) as conn:
            conn.execute("ALTER SYSTEM SET autovacuum = off")
            conn.execute("SELECT pg_reload_conf()")
            conn.execute("VACUUM (ANALYZE)")
            conn.execute("CHECKPOINT")


def load_shards():
    """Distributed tables on the cluster: the ways `direct` and `routed`."""
    with connect() as conn:
        conn.execute(TABLES + ROWS)
        for table in NAMES:
            conn.execute("SELECT shardmap.distribute_table(%s, 'k')", (table,))
        keys = column(conn, f"SELECT k FROM generate_series(1, {KEYS}) k WHERE shard_for(k) = 'shard-0' LIMIT {ASKED}")
        conn.execute("ANALYZE")
    settle(shard_dsns())
    return [Way("direct", os.environ["SHARD_0_DSN"], keys),
            Way("routed", "options='-c shardmap.fanout_policy=allow'", keys)]


def unload_shards():
    with connect() as conn:
        for table in NAMES:
            conn.execute(f"DROP TABLE IF EXISTS {table} CASCADE")


def native_partitions(tables):
    """The database `native` of the coordinator: tables that are hash partitions over postgres_fdw, in other databases of the
    shards' server, whose connection strings are returned. Each table is a line of the text."""
    dsns = []
    for number, dsn in enumerate(shard_dsns()):
        with connect(dsn) as conn:
            conn.execute(f"DROP DATABASE IF EXISTS native_{number} WITH (FORCE)")
            conn.execute(f"CREATE DATABASE native_{number}")
        dsns.append(psycopg.conninfo.make_conninfo(dsn, dbname=f"native_{number}"))
        with connect(dsns[-1]) as conn:
            conn.execute(tables)
    with connect() as conn:
        conn.execute("DROP DATABASE IF EXISTS native WITH (FORCE)")
        conn.execute("CREATE DATABASE native")
    with connect("dbname=native") as conn:
        conn.execute("CREATE EXTENSION postgres_fdw")
        for number, dsn in enumerate(dsns):
            part = psycopg.conninfo.conninfo_to_dict(dsn)
            conn.execute(f"CREATE SERVER s{number} FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '{part['host']}',"
                         f" port '{part['port']}', dbname '{part['dbname']}', batch_size '1000')")
            conn.execute(f"CREATE USER MAPPING FOR CURRENT_USER SERVER s{number} OPTIONS (user '{part['user']}')")
        for table in tables.strip().splitlines():
            name = table.split()[2]
            conn.execute(f"{table.split(', PRIMARY')[0]}) PARTITION BY HASH (k)")
            for number in range(len(dsns)):
                conn.execute(f"CREATE FOREIGN TABLE {name}_{number} PARTITION OF {name} FOR VALUES"
                             f" WITH (MODULUS {len(dsns)}, REMAINDER {number}) SERVER s{number}"
                             f" OPTIONS (table_name '{name}')")
    return dsns


def load_postgres_fdw():
    """Hash partitions over postgres_fdw with the same rows: the way `postgres_fdw`."""
    dsns = native_partitions(TABLES)
    with connect("dbname=native") as conn:
        conn.execute(ROWS)
        keys = column(conn, f"SELECT k FROM generate_series(1, {KEYS}) k WHERE satisfies_hash_partition("
                            f"'objects'::regclass, {len(dsns)}, 0, k::bigint) LIMIT {ASKED}")
        conn.execute("ANALYZE")
    settle(dsns)
    return Way("postgres_fdw", "dbname=native", keys)


def column(conn, sql):
    return [row[0] for row in conn.execute(sql)]
