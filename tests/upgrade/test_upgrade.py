"""A coordinator's database moves to a later major version of Postgres, by dump and restore and by pg_upgrade.

PG is the one version, each other tree in .tools that has this very build of the extension the other one. The shards stay
where they are. The column `json_array` is an ordinary name up to Postgres 15 and a key word from 16 on, `json_scalar`
from 17 on: later versions spell the constraints on them in another way.
"""

import os
import pathlib
import subprocess

import psycopg
import pytest
from cluster import Cluster
from server import TOOLS, Server, as_run_user, free_port

OWN = int(os.environ.get("PG") or 16)
SETUP = """
    SELECT shardmap.create_keyspace('areas', 'range', range_order => 'text');
    SELECT shardmap.add_shard('area-' || n, '127.0.0.1', {port}, 'area_' || n, keyspace => 'areas') FROM generate_series(0, 1) n;
    SELECT shardmap.set_range('areas', NULL, 'm', 'area-0');
    SELECT shardmap.set_range('areas', 'm', NULL, 'area-1');
    SELECT shardmap.pin_key(4711, 'shard-1');
    CREATE ROLE reader LOGIN;
    CREATE TABLE orders (k bigint, json_array int NOT NULL CHECK (json_array > 0), json_scalar int CHECK (json_scalar <> 13),
        total numeric DEFAULT 7, note text CHECK (note <> ''), at timestamp CHECK (timezone('UTC', at) > '2000-01-01'),
        PRIMARY KEY (k, json_array), UNIQUE (k, note));
    INSERT INTO orders SELECT i, 1, i, i, 'note ' || i, '2024-01-01' FROM generate_series(100, 199) i;
    ALTER TABLE orders ENABLE ROW LEVEL SECURITY;
    CREATE POLICY positive ON orders FOR SELECT TO reader USING (total > 150);
    CREATE VIEW dear AS SELECT k, total FROM orders WHERE total > 190;
    CREATE TABLE places (name text PRIMARY KEY, size int);
    INSERT INTO places VALUES ('aachen', 1), ('zwolle', 2);
    SELECT shardmap.distribute_table('orders', 'k'), shardmap.distribute_table('places', 'name', 'areas');
    SELECT shardmap.set_fanout_policy('places', 'notice');
    CREATE TABLE kinds (json_scalar int PRIMARY KEY, name varchar(20));
    INSERT INTO kinds VALUES (1, 'one'), (2, 'two');
    SELECT shardmap.distribute_reference('kinds');
    GRANT SELECT ON orders, dear TO reader;
    CREATE USER MAPPING FOR reader SERVER "shard-0" OPTIONS (user 'postgres', password_required 'false');
    CREATE USER MAPPING FOR reader SERVER "shard-1" OPTIONS (user 'postgres', password_required 'false');
"""
# What must be the same before and after.
SAME = ["SELECT shardmap.export_map()", "SELECT k, shard_for(k) FROM generate_series(4700, 4720) k",
        "SELECT * FROM orders ORDER BY k", "SELECT * FROM dear ORDER BY k", "SELECT * FROM places ORDER BY name",
        "SELECT table_name::text, key_column, keyspace, fanout_policy, partitions FROM shardmap.tables ORDER BY 1",
        "SELECT table_name::text, keyspace, copies, routed FROM shardmap.reference_tables",
        "SELECT * FROM shardmap.verify_reference('kinds')",
        "SELECT keyspace, key_type::text, hash_function, family FROM shardmap.key_class ORDER BY 1, 2"]


def build(version):
    """The extension's SQL as it is installed in that version's tree, or None."""
    found = list((TOOLS / f"pg{version}").glob("**/extension/pg_shardmap--0.1.0.sql"))
    return found[0].read_bytes() if found else None


def others():
    """Versions at hand. One with another build of the extension would test that, and not this one."""
    return [version for version in (15, 16, 17, 18) if version != OWN and build(version) == build(OWN)]


def pair(version):
    return pytest.param(min(OWN, version), max(OWN, version), id=f"{min(OWN, version)}-{max(OWN, version)}")


PAIRS = pytest.mark.parametrize(("old", "new"), [pair(version) for version in others()])


@pytest.fixture
def cluster(old):
    with Cluster(pg=old, shards=2) as cluster:
        cluster.shard_server(0).psql("CREATE DATABASE area_0; CREATE DATABASE area_1")
        cluster.psql(SETUP.format(port=cluster.shard_server(0).port))
        yield cluster


@pytest.fixture
def later(cluster, new):
    """A server of the later version, not made yet."""
    server = Server("later", cluster.directory / "later", new, free_port(), cluster.sockets,
                    {"shared_preload_libraries": "pg_shardmap"})
    yield server
    server.remove()


def connect(dsn):
    return psycopg.connect(dsn, autocommit=True, options="-c shardmap.fanout_policy=allow")


def answers(dsn):
    with connect(dsn) as conn:
        return [conn.execute(sql).fetchall() for sql in SAME]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    logs = pathlib.Path(options.get("cwd", os.devnull)).glob("data/pg_upgrade_output.d/*/log/*dump*.log")
    assert done.returncode == 0, "".join([done.stdout, done.stderr, *(log.read_text()[-2000:] for log in logs)])
    assert "error" not in done.stderr.lower(), done.stderr


def forget_column_versions(server):
    """Some builds of Postgres 15 note a version of every column among its options, as no other server understands."""
    for dbname in ("app", "postgres", "template1"):
        server.psql("""UPDATE pg_attribute SET attoptions = NULLIF(ARRAY(
            SELECT o FROM unnest(attoptions) o WHERE o NOT LIKE 'pg_attver=%'), '{}') WHERE attoptions IS NOT NULL""", dbname)


def check(dsn, reader):
    """Reads, writes, refuses, alters and takes back: all as ever."""
    with connect(dsn) as conn:
        plan = conn.execute("EXPLAIN (FORMAT JSON) SELECT * FROM orders WHERE k = 123").fetchone()[0]
        assert plan[0]["Plan"].get("Shard") == conn.execute("SELECT shard_for(123)").fetchone()[0]
        row = conn.execute("INSERT INTO orders (k, json_array) VALUES (4711, 1) RETURNING total, tableoid::regclass::text").fetchone()
        assert row == (7, "orders_1")
        for sql, error in (("INSERT INTO orders VALUES (123, 1)", psycopg.errors.UniqueViolation),
                           ("INSERT INTO orders VALUES (1, 1, 1, 1, '')", psycopg.errors.CheckViolation),
                           ("INSERT INTO orders VALUES (1, 0)", psycopg.errors.CheckViolation)):
            with pytest.raises(error):
                conn.execute(sql)
        conn.execute("INSERT INTO places VALUES ('delft', 3)")
        # Each alteration looks at all constraints of the table.
        conn.execute("ALTER TABLE orders ADD COLUMN extra int")
        conn.execute("SELECT shardmap.run_on_shards('ALTER TABLE orders ADD COLUMN extra int')")
        conn.execute("UPDATE orders SET extra = 5 WHERE k = 123")
        assert conn.execute("SELECT extra FROM orders WHERE k = 123").fetchone() == (5,)
        conn.execute("ALTER TABLE orders ALTER total SET DEFAULT 8")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="would not be enforced"):
            conn.execute("ALTER TABLE orders ADD CHECK (extra > 0)")
        conn.execute("UPDATE kinds SET name = 'three', json_scalar = 3 WHERE json_scalar = 2")
        assert [row[1] for row in conn.execute("SELECT * FROM shardmap.verify_reference('kinds')")] == [True, True]
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="would break reference table"):
            conn.execute("ALTER TABLE kinds ADD COLUMN extra int")
        plan = conn.execute("EXPLAIN SELECT name FROM orders, kinds WHERE k = 123 AND kinds.json_scalar = orders.json_array").fetchone()[0]
        assert plan.startswith("Custom Scan (ShardRoute)")
        with connect(reader) as restricted:
            assert restricted.execute("SELECT count(*) FROM orders").fetchone() == (49,)
        conn.execute("SELECT shardmap.pin_key(4712, 'shard-0')")
        conn.execute("SELECT shardmap.undistribute_table('orders')")
        assert conn.execute("SELECT count(*), sum(extra) FROM orders").fetchone() == (101, 5)
        conn.execute("SELECT shardmap.distribute_table('orders', 'k')")


@PAIRS
def test_dump_and_restore(cluster, later, tmp_path):
    before = answers(cluster.dsn())
    forget_column_versions(cluster.coordinator)
    dump = tmp_path / "dump"
    # The later version's pg_dump, as Postgres' manual says.
    run(later.bin / "pg_dump", "-Fc", "-f", dump, "-d", cluster.dsn())
    later.create()
    later.start()
    later.psql("CREATE DATABASE app; CREATE ROLE reader LOGIN")
    run(later.bin / "pg_restore", "--exit-on-error", "-d", later.dsn("app"), dump)
    assert answers(later.dsn("app")) == before
    check(later.dsn("app"), later.dsn("app", "reader"))


@PAIRS
def test_pg_upgrade(cluster, later):
    before = answers(cluster.dsn())
    forget_column_versions(cluster.coordinator)
    former = cluster.coordinator
    former.stop()
    later.home.mkdir()
    later.home.chmod(0o777)
    checksums = ["--no-data-checksums"] if later.pg >= 18 else []
    run(later.bin / "initdb", "-D", later.data, "--username", "postgres", "--auth", "trust", "--encoding", "UTF8",
        "--locale", "C.UTF-8", "--no-sync", *checksums, **as_run_user())
    later.configure()
    run(later.bin / "pg_upgrade", "-b", former.bin, "-B", later.bin, "-d", former.data, "-D", later.data, "-U", "postgres",
        "-s", cluster.sockets, "-p", former.port, "-P", later.port, cwd=later.home, **as_run_user())
    later.start()
    assert answers(later.dsn("app")) == before
    check(later.dsn("app"), later.dsn("app", "reader"))
