"""Living with Postgres: databases without the extension, standbys, parallel workers, DROP EXTENSION, no preload.

Pitfalls 28 to 32 are in test_pitfalls_postgres.py, the statistics' files in test_stats.py.
"""

import contextlib
import json

import psycopg
import pytest
from patience import wait_until
from psycopg import errors
from server import Server, free_port

SETUP = """
CREATE TABLE t (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE local (k int PRIMARY KEY, c text);
INSERT INTO t SELECT k, id, 'c' || k FROM generate_series(1, 20) k, generate_series(1, 2) id;
INSERT INTO local SELECT k, 'l' || k FROM generate_series(1, 20000) k;
ANALYZE local;
SELECT shardmap.distribute_table('t', 'k');
"""


@contextlib.contextmanager
def database(cluster, name):
    cluster.coordinator.psql(f"CREATE DATABASE {name}")
    try:
        with psycopg.connect(cluster.dsn(name), autocommit=True) as conn:
            yield conn
    finally:
        cluster.coordinator.psql(f"DROP DATABASE {name} WITH (FORCE)")


def test_database_without_the_extension(shared_cluster):
    """The library is loaded there too, and must not be noticed."""
    with database(shared_cluster, "bare") as conn:
        conn.execute("""CREATE TABLE p (k int, c text) PARTITION BY HASH (k);
                        CREATE TABLE p0 PARTITION OF p FOR VALUES WITH (MODULUS 2, REMAINDER 0);
                        CREATE TABLE p1 PARTITION OF p FOR VALUES WITH (MODULUS 2, REMAINDER 1);
                        INSERT INTO p SELECT k, 'c' || k FROM generate_series(1, 100) k""")
        assert conn.execute("SELECT count(*) FROM p WHERE k = 7").fetchone() == (1,)
        assert conn.execute("UPDATE p SET k = k + 1 RETURNING k").rowcount == 100
        assert conn.execute("SELECT count(*), max(k) FROM p").fetchone() == (100, 101)
        plan = conn.execute("EXPLAIN (FORMAT json) SELECT * FROM p WHERE k = 7").fetchone()[0]
        assert "Routing" not in json.dumps(plan)
        # A schema of that name that is not ours.
        conn.execute("CREATE SCHEMA shardmap; CREATE TABLE shardmap.logical_table (relation regclass)")
        assert conn.execute("SELECT count(*) FROM p WHERE k = 7").fetchone() == (1,)
        conn.execute("DROP SCHEMA shardmap CASCADE; CREATE EXTENSION pg_shardmap CASCADE")
        assert conn.execute("SELECT count(*) FROM p WHERE k = 7").fetchone() == (1,)
        assert conn.execute("SELECT shard_for(NULL::text)").fetchone() == (None,)
        with pytest.raises(psycopg.Error) as caught:
            conn.execute("SELECT shard_for('x')")
        assert caught.value.sqlstate == "55000" and caught.value.diag.message_hint


def test_other_partitioned_tables_are_left_alone(db, conn):
    conn.execute("""CREATE TABLE p (k int, c text) PARTITION BY HASH (k);
                    CREATE TABLE p0 PARTITION OF p FOR VALUES WITH (MODULUS 1, REMAINDER 0)""")
    conn.execute("INSERT INTO p SELECT k, c FROM t")
    assert conn.execute("SELECT count(*) FROM p JOIN t USING (k) WHERE k = 7").fetchone() == (4,)
    assert conn.execute("UPDATE p SET k = 8 WHERE k = 7").rowcount == 2
    assert conn.execute("INSERT INTO p VALUES (1, 'x') ON CONFLICT DO NOTHING").rowcount == 1
    conn.execute("DROP TABLE p")


def test_errors_of_utility_statements_keep_all_that_they_say(db, conn):
    """Such as where they are in the statement, and which constraint they are about."""
    conn.execute("CREATE TABLE one_only (i int CONSTRAINT one_only_i UNIQUE); INSERT INTO one_only VALUES (1)")
    with pytest.raises(errors.UniqueViolation) as caught, conn.cursor().copy("COPY one_only FROM STDIN") as copy:
        copy.write("1\n")
    assert (caught.value.diag.constraint_name, caught.value.diag.table_name) == ("one_only_i", "one_only")
    with pytest.raises(errors.UniqueViolation) as caught:
        conn.execute("DO $$ BEGIN INSERT INTO one_only VALUES (1); END $$")
    assert (caught.value.diag.constraint_name, caught.value.diag.table_name) == ("one_only_i", "one_only")
    with pytest.raises(errors.UndefinedColumn) as caught:
        conn.execute("CREATE VIEW no_view AS SELECT j FROM one_only")
    assert caught.value.diag.statement_position == "31"
    conn.execute("DROP TABLE one_only")


def test_parallel_workers(db, conn):
    conn.execute("""SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0;
                    SET max_parallel_workers_per_gather = 2""")
    for sql, want in (("SELECT count(*), sum(k) FROM local", (20000, 200010000)),
                      ("SELECT count(DISTINCT shard_for(k)) FROM local WHERE shard_for(k) IS NOT NULL", (4,)),
                      ("SELECT count(*) FROM local WHERE token_for(c) >= 0", (20000,)),
                      ("SELECT count(*) FROM local WHERE shard_for(c) = shard_for(c, 'main')", (20000,))):
        plan = "\n".join(line for (line,) in conn.execute(f"EXPLAIN {sql}"))
        assert "Parallel" in plan, plan
        assert conn.execute(sql).fetchone() == want
    assert conn.execute("SELECT count(*) FROM local JOIN t USING (k)").fetchone() == (40,)
    assert conn.execute("SELECT count(*) FROM local JOIN t USING (k) WHERE k = 7").fetchone() == (2,)


def test_every_statement_in_a_worker(db, conn):
    name = "debug_parallel_query" if conn.info.server_version >= 160000 else "force_parallel_mode"
    conn.execute(f"SET {name} = regress")
    assert conn.execute("SELECT count(*) FROM t").fetchone() == (40,)
    assert conn.execute("SELECT c FROM t WHERE k = 7 AND id = 1").fetchone() == ("c7",)
    assert conn.execute("SELECT shard_for(7) = 'shard-' || %s", (db.owner(7, "int4"),)).fetchone() == (True,)
    assert conn.execute("SELECT count(*) FROM local l WHERE EXISTS (SELECT FROM t WHERE t.k = l.k)").fetchone() == (20,)
    assert conn.execute("SELECT count(*) FROM pg_class c, pg_am a WHERE a.oid = c.relam AND relname = 'local'"
                        ).fetchone() == (1,)


@pytest.fixture(scope="module")
def standby(shared_cluster, db):
    """A hot standby of the coordinator, with the library preloaded."""
    cluster = shared_cluster
    server = Server("standby", cluster.directory / "standby", cluster.pg, free_port(), cluster.sockets,
                    {"shared_preload_libraries": "pg_shardmap", "cluster_name": "standby"}, cluster.coordinator)
    server.create()
    server.start()
    yield server
    server.remove()


def test_hot_standby_reads(db, standby):
    """Local and logical tables are read, nothing is written, and the map follows the primary."""
    dsn = standby.dsn(db.name)
    with psycopg.connect(dsn, autocommit=True) as conn:
        assert conn.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
        assert conn.execute("SELECT count(*) FROM local").fetchone() == (20000,)
        assert conn.execute("SELECT shard_for('7') IS NOT NULL").fetchone() == (True,)
        notices = []
        conn.add_notice_handler(lambda diag: notices.append(diag.message_primary))
        for _ in range(7):
            cursor, found = db.asked(lambda: conn.execute("SELECT c FROM t WHERE k = %s AND id = 1", (7,),
                                                          prepare=True))
            assert (cursor.fetchall(), set(found)) == ([("c7",)], {db.owner(7, "int4")})
        assert notices == []
        assert conn.execute("SELECT count(*) FROM t").fetchone() == (40,)
        assert notices == ["query on public.t asks all 4 shards"]
        assert conn.execute("SELECT count(*) > 0 FROM shardmap.fanout_queries").fetchone() == (True,)
        for sql in ("INSERT INTO t VALUES (7, 99)", "UPDATE t SET c = 'x' WHERE k = 7", "DELETE FROM t WHERE k = 7",
                    "DELETE FROM t", "INSERT INTO t SELECT k, 99 FROM local WHERE k < 5", "SELECT * FROM t FOR UPDATE",
                    "SELECT shardmap.create_keyspace('x')", "SELECT shardmap.pin_key('x'::text, 'shard-0')"):
            with pytest.raises(errors.ReadOnlySqlTransaction):
                conn.execute(sql)
        assert conn.execute("SELECT count(*) FROM t").fetchone() == (40,)
        # A pin made on the primary is seen in this session as soon as it is replayed.
        owner = db.owner("a key to pin")
        other = f"shard-{(owner + 1) % 4}"
        assert conn.execute("SELECT shard_for('a key to pin')").fetchone() == (f"shard-{owner}",)
        db.psql(f"SELECT shardmap.create_keyspace('empty'); SELECT shardmap.pin_key('a key to pin'::text, '{other}')")
        try:
            wait_until(lambda: conn.execute("SELECT shard_for('a key to pin')").fetchone() == (other,),
                       lambda: "the standby's session keeps the old map")
        finally:
            db.psql("SELECT shardmap.unpin_key('a key to pin'::text); SELECT shardmap.drop_keyspace('empty')")


def test_drop_extension(shared_cluster):
    name = "dropping"
    shared_cluster.new_database(name)
    try:
        with (psycopg.connect(shared_cluster.dsn(name), autocommit=True) as conn,
              psycopg.connect(shared_cluster.dsn(name), autocommit=True) as other):
            conn.execute("CREATE TABLE t (k int, c text); SELECT shardmap.distribute_table('t', 'k')")
            conn.execute("INSERT INTO t VALUES (1)")
            conn.execute("CREATE TABLE kept (k int); INSERT INTO kept VALUES (1)")
            other.execute("PREPARE q AS SELECT count(*) FROM t WHERE k = 1; PREPARE r AS SELECT count(*) FROM kept")
            assert other.execute("EXECUTE q").fetchone() == (1,)
            with pytest.raises(errors.DependentObjectsStillExist):
                conn.execute("DROP EXTENSION pg_shardmap")
            assert conn.execute("SELECT count(*) FROM t WHERE k = 1").fetchone() == (1,)
            conn.execute("BEGIN; DROP EXTENSION pg_shardmap CASCADE; ROLLBACK")
            for session in (conn, other):
                assert session.execute("SELECT count(*) FROM t WHERE k = 1").fetchone() == (1,)
            conn.execute("DROP EXTENSION pg_shardmap CASCADE")
            for session in (conn, other):
                assert session.execute("SELECT count(*) FROM kept").fetchone() == (1,)
                with pytest.raises(psycopg.Error):
                    session.execute("SELECT shard_for('x')")
            assert other.execute("EXECUTE r").fetchone() == (1,)
            with pytest.raises(psycopg.Error):
                other.execute("EXECUTE q")
            conn.execute("CREATE EXTENSION pg_shardmap CASCADE")
            assert other.execute("SELECT count(*) FROM kept").fetchone() == (1,)
            assert other.execute("SELECT count(*) FROM shardmap.tables").fetchone() == (0,)
    finally:
        shared_cluster.drop_database(name)


@pytest.mark.parametrize("kind", ["text", "json", "xml", "yaml"])
def test_explain_says_which_step(db, conn, kind):
    def explain(sql):
        rows = conn.execute(f"EXPLAIN (VERBOSE, FORMAT {kind}) {sql}").fetchall()
        return "\n".join(json.dumps(line) if kind == "json" else line for (line,) in rows)
    keyed = explain("SELECT * FROM t WHERE k = 7")
    assert "whole on one shard" in keyed and f"shard-{db.owner(7, 'int4')}" in keyed
    assert "Not" not in keyed and "Remote" in keyed
    conn.execute("SET shardmap.enable_router = off")
    substituted = explain("SELECT * FROM t WHERE k = 7")
    assert "one shard, in place of the logical table" in substituted and f"shard-{db.owner(7, 'int4')}" in substituted
    assert "Routing is turned off." in substituted and "One" not in substituted and "Narrowed" not in substituted
    everywhere = explain("SELECT count(*) FROM t")
    assert "all shards" in everywhere and "No condition on the key" in everywhere
    assert all(f"shard-{number}" in everywhere for number in range(4))


def test_maintenance_of_a_logical_table(db, conn):
    conn.execute("ANALYZE t")
    conn.execute("VACUUM ANALYZE t")
    assert conn.execute("SELECT reltuples FROM pg_class WHERE relname = 't'").fetchone() == (40,)
    conn.execute("CREATE TEMP TABLE mine AS SELECT * FROM t")
    conn.execute("CREATE MATERIALIZED VIEW counted AS SELECT count(*) FROM t")
    conn.execute("REFRESH MATERIALIZED VIEW counted")
    assert conn.execute("SELECT (TABLE counted), count(*) FROM mine").fetchone() == (40, 40)
    conn.execute("DROP MATERIALIZED VIEW counted")


# The rest of the module runs without preload.

@pytest.fixture(scope="module")
def not_preloaded(shared_cluster, db, standby):
    """Makes sessions on a coordinator that does not preload the library."""
    shared_cluster.coordinator.configure(shared_preload_libraries=None)
    shared_cluster.coordinator.restart()
    yield lambda: psycopg.connect(shared_cluster.dsn(db.name), autocommit=True)
    shared_cluster.coordinator.configure(shared_preload_libraries="pg_shardmap")
    shared_cluster.coordinator.restart()


def test_library_is_loaded_when_a_session_needs_it(db, not_preloaded):
    """A first statement that was planned without it is refused, whatever it does; after that all is as ever."""
    wrong = (db.owner(7, "int4") + 1) % 4
    for sql in ("SELECT count(*) FROM t WHERE k = 7", "SELECT count(*) FROM t", "UPDATE t SET k = 8 WHERE k = 7",
                "DELETE FROM t", "INSERT INTO t SELECT k, 99 FROM t", f"INSERT INTO t_{wrong} VALUES (7, 99)",
                "MERGE INTO t USING local l ON t.k = l.k WHEN MATCHED THEN DELETE"):
        with not_preloaded() as conn:
            conn.execute("SET shardmap.fanout_policy = error")
            with pytest.raises((errors.ObjectNotInPrerequisiteState, errors.CheckViolation)) as caught:
                conn.execute(sql)
            assert caught.value.diag.message_hint
            for _ in range(7):
                assert conn.execute("SELECT count(*) FROM t WHERE k = %s", (7,), prepare=True).fetchone() == (2,)
            with pytest.raises(errors.FeatureNotSupported):
                conn.execute("SELECT count(*) FROM t")
            with pytest.raises(errors.FeatureNotSupported):
                conn.execute("UPDATE t SET k = 8 WHERE k = 7")


def test_first_insert_needs_no_planning(db, not_preloaded):
    with not_preloaded() as conn:
        # Two phases are for servers that preload the library.
        conn.execute("SET shardmap.multi_shard_commit = one_phase")
        conn.execute("INSERT INTO t VALUES (7, 99), (8, 99)")
        for shard, rows in db.shard_rows("SELECT k FROM t WHERE id = 99").items():
            assert {db.owner(k, "int4") for (k,) in rows} <= {shard}
        assert conn.execute("DELETE FROM t WHERE k IN (7, 8) AND id = 99").rowcount == 2


@pytest.mark.parametrize("how", ["LOAD 'pg_shardmap'", "SELECT shard_for('x')", "SELECT token_for('x')",
                                 "SELECT * FROM shardmap.fanout_queries"])
def test_ways_of_loading_it(db, not_preloaded, how):
    with not_preloaded() as conn:
        conn.execute(how)
        assert conn.execute("SHOW shardmap.enable_routing").fetchone() == ("on",)
        assert conn.execute("SELECT count(*) FROM t WHERE k = 7").fetchone() == (2,)
    with not_preloaded() as conn:
        conn.execute("SET shardmap.fanout_policy = 'nonsense'")
        conn.execute(how)
        assert conn.execute("SHOW shardmap.fanout_policy").fetchone() == ("notice",)


def test_session_preload(db, not_preloaded):
    db.psql(f"ALTER DATABASE {db.name} SET session_preload_libraries = 'pg_shardmap'")
    try:
        with not_preloaded() as conn:
            assert conn.execute("SELECT count(*) FROM t").fetchone() == (40,)
    finally:
        db.psql(f"ALTER DATABASE {db.name} RESET session_preload_libraries")
