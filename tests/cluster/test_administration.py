"""Administration across a dump, and with databases that are no shards: nothing is lost, doubled, or left behind."""

import subprocess

import psycopg
import pytest
from cluster import Cluster

SETUP = """
    CREATE TABLE plain (k int PRIMARY KEY);
"""


def test_a_dump_restores_the_same_map(db, conn, tmp_path):
    """PITFALLS 30: more than ten shards, in the order of their numbers; pins, ranges, classes and tables too."""
    for number in range(12):
        db.cluster.shard_server(0).psql(f'CREATE DATABASE "dump_{number}"')
    conn.execute("SELECT shardmap.create_keyspace('many'), shardmap.create_keyspace('even', allocation => 'balanced')")
    port = db.cluster.shard_server(0).port
    for number in range(12):
        conn.execute("SELECT shardmap.add_shard(%s, '127.0.0.1', %s, %s, keyspace => 'many')",
                     (f"s{number}", port, f"dump_{number}"))
    for number in (2, 5):
        conn.execute("SELECT shardmap.drop_shard(%s)", (f"s{number}",))
    conn.execute("SELECT shardmap.pin_key(42, 's3', 'many')")
    conn.execute("""CREATE TABLE kept (k timestamptz PRIMARY KEY, v text, n int GENERATED ALWAYS AS IDENTITY);
        INSERT INTO kept (k, v) SELECT '2024-01-01'::timestamptz + i * interval '1 hour', i FROM generate_series(1, 100) i;
        CREATE VIEW kept_view AS SELECT v FROM kept;
        ALTER TABLE kept ENABLE ROW LEVEL SECURITY;
        CREATE POLICY kept_policy ON kept USING (v <> '');
        SELECT shardmap.distribute_table('kept', 'k', 'many');
        SELECT shardmap.set_fanout_policy('kept', 'warning')""")
    server, before = db.cluster.coordinator, "SELECT shardmap.export_map()"
    for form in ("plain", "custom"):
        dump, other = tmp_path / form, f"{db.name}_{form}"
        tool = [str(server.bin / "pg_dump"), "-d", server.dsn(db.name), "-F", form, "-f", str(dump)]
        subprocess.run(tool, check=True)
        server.psql(f'CREATE DATABASE "{other}"')
        if form == "plain":
            restore = [str(server.bin / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(dump), "-d", server.dsn(other)]
        else:
            restore = [str(server.bin / "pg_restore"), "--exit-on-error", "-d", server.dsn(other), str(dump)]
        subprocess.run(restore, check=True, stdout=subprocess.DEVNULL)
        with db.connect(dbname=other) as restored:
            assert restored.execute(before).fetchone() == conn.execute(before).fetchone()
            numbers = restored.execute("SELECT name, number FROM shardmap.shards WHERE keyspace = 'many'").fetchall()
            assert numbers == [(f"s{number}", number) for number in range(12) if number not in (2, 5)]
            classes = "SELECT keyspace, key_type::text, hash_function::text, family FROM shardmap.key_class ORDER BY 1, 2"
            assert restored.execute(classes).fetchall() == conn.execute(classes).fetchall()
            tables = "SELECT table_name::text, key_column, keyspace, fanout_policy, partitions FROM shardmap.tables"
            assert restored.execute(tables).fetchall() == conn.execute(tables).fetchall()
            # It reads and writes the same shards.
            assert restored.execute("SELECT count(*), count(DISTINCT tableoid) FROM kept").fetchone()[0] == 100
            assert restored.execute("SELECT v FROM kept WHERE k = '2024-01-01 07:00'").fetchone() == \
                conn.execute("SELECT v FROM kept WHERE k = '2024-01-01 07:00'").fetchone()
        server.psql(f'DROP DATABASE "{other}" WITH (FORCE)')
    conn.execute("DROP TABLE kept CASCADE")
    conn.execute("SELECT shardmap.drop_shard(name) FROM shardmap.shard WHERE keyspace = 'many' AND name <> 's3'")
    for number in range(12):
        db.cluster.shard_server(0).psql(f'DROP DATABASE "dump_{number}" WITH (FORCE)')


def test_databases_that_could_answer_differently_are_no_shards(db, conn):
    server = db.cluster.shard_server(0)
    add = "SELECT shardmap.add_shard('odd', '127.0.0.1', %s, 'odd', keyspace => 'odd')"
    conn.execute("SELECT shardmap.create_keyspace('odd')")
    server.psql("CREATE DATABASE odd TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
    with pytest.raises(psycopg.Error, match="encoding"):
        conn.execute(add, (server.port,))
    server.psql("DROP DATABASE odd WITH (FORCE)")
    server.psql("CREATE DATABASE odd TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'")
    conn.execute(add, (server.port,))
    # It sorts by bytes, this database may not: then its columns name the collation.
    conn.execute("CREATE TABLE words (w text PRIMARY KEY); INSERT INTO words VALUES ('a'), ('B'), ('é')")
    ordered = conn.execute("SELECT w FROM words ORDER BY w").fetchall()
    conn.execute("SELECT shardmap.distribute_table('words', 'w', 'odd')")
    assert conn.execute("SELECT w FROM words ORDER BY w").fetchall() == ordered
    here = conn.execute("SELECT datcollate FROM pg_database WHERE datname = current_database()").fetchone()[0]
    there = conn.execute("SELECT r[1] FROM shardmap.remote_rows('odd', $$SELECT c.collname FROM pg_attribute a"
                         " JOIN pg_collation c ON c.oid = a.attcollation WHERE a.attrelid = 'public.words'::regclass$$) r")
    assert (there.fetchone()[0] == "default") == (here in ("C", "POSIX"))
    conn.execute("DROP TABLE words")
    conn.execute("SELECT shardmap.drop_shard('odd')")
    server.psql("DROP DATABASE odd WITH (FORCE)")


def test_a_standby_is_no_shard():
    with Cluster(shards=1, replicas=1) as cluster:
        standby = cluster.replica_server(0)
        with pytest.raises(Exception, match="is a standby"):
            cluster.psql("SELECT shardmap.create_keyspace('k'); SELECT shardmap.add_shard('standby', '127.0.0.1', "
                         f"{standby.port}, '{cluster.shard_database(0)}', keyspace => 'k')")
        assert cluster.psql("SELECT count(*) FROM pg_foreign_server WHERE srvname = 'standby'") == "0"
