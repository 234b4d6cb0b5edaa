"""Audits that the background worker makes by itself: as whom, what it writes down, and who is told."""

import functools
import json

import patience
import psycopg
import pytest
from cluster import Cluster

SETUP = """
CREATE TABLE t (k int, id int, v text, PRIMARY KEY (k, id));
INSERT INTO t SELECT i / 4, i, 'row ' || i FROM generate_series(1, 2000) i;
SELECT shardmap.distribute_table('t', 'k');
CREATE ROLE auditor LOGIN IN ROLE shardmap_admin;
"""
eventually = functools.partial(patience.eventually, patience=120)
ALERTS = "SELECT shard, replica, severity, message FROM shardmap.alerts"


@pytest.fixture(scope="module")
def cluster():
    with Cluster(shards=2, layout="servers") as cluster:
        cluster.psql(SETUP)
        yield cluster


@pytest.fixture
def conn(cluster):
    with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
        yield conn
        for name in ("audit_interval", "audit_full_interval", "audit_role"):
            conn.execute(f"ALTER SYSTEM RESET shardmap.{name}")
        conn.execute("SELECT pg_reload_conf()")
        # What is under way comes to its end.
        eventually(lambda: conn.execute("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_shardmap auditor'").fetchone(),
                   lambda row: row == (0,))
        conn.execute("DELETE FROM shardmap.audit_run")
        conn.execute("UPDATE shardmap.audit_findings SET state = 'closed'")


def configure(conn, **settings):
    for name, value in settings.items():
        conn.execute(f"ALTER SYSTEM SET shardmap.{name} = '{value}'")
    conn.execute("SELECT pg_reload_conf()")


def runs(conn):
    return conn.execute("SELECT id, mode, findings, error FROM shardmap.audit_run ORDER BY id").fetchall()


def test_none_unless_they_are_asked_for(conn):
    assert conn.execute("SELECT current_setting('shardmap.audit_interval'), current_setting('shardmap.audit_full_interval')").fetchone() == ("0", "0")
    assert conn.execute("SELECT * FROM shardmap._due_audits()").fetchall() == []


def test_samples_and_now_and_then_all_rows(cluster, conn):
    configure(conn, audit_interval="1s", audit_full_interval="3s")
    found = eventually(lambda: runs(conn), lambda found: {"full", "sample"} <= {run[1] for run in found} and len(found) >= 4)
    assert found[0][1] == "full" and {run[2:] for run in found} == {(0, None)}


def test_a_misplaced_row_becomes_an_alert_and_ceases_to_be_one(cluster, conn):
    key = conn.execute("SELECT k FROM generate_series(1, 400) k WHERE shard_for(k) = 'shard-0' LIMIT 1").fetchone()[0]
    with psycopg.connect(cluster.dsn(), autocommit=True) as listener:
        listener.execute("LISTEN shardmap_alerts")
        cluster.shard_psql(1, f"INSERT INTO t VALUES ({key}, -1, 'secret')")
        # Most audits are samples, which do not read all rows, and so do not come between those that do.
        configure(conn, audit_interval="1s", audit_full_interval="2s")
        alert, = eventually(lambda: conn.execute(ALERTS).fetchall(), bool)
        assert alert[:3] == ("shard-1", None, "page")
        assert alert[3] == 'audit of keyspace "main" has found "misplaced" in table public.t, owned by shard "shard-0"'
        cluster.shard_psql(1, f"DELETE FROM t WHERE id = -1")
        eventually(lambda: conn.execute(ALERTS).fetchall(), lambda found: not found)
        news = [json.loads(note.payload) for note in listener.notifies(timeout=60, stop_after=2)]
    assert [(each["was"]["alert"], each["alert"], each["kind"], each["shard"]) for each in news] == [
        ("ok", "page", "misplaced", "shard-1"), ("page", "ok", "misplaced", "shard-1")]
    state, seen = conn.execute("SELECT state, seen FROM shardmap.audit_findings WHERE kind = 'misplaced'").fetchone()
    assert state == "closed" and seen >= 2


def test_what_cannot_be_read_is_an_alert_at_once(cluster, conn):
    cluster.shard_server(1).stop("immediate")
    try:
        configure(conn, audit_interval="10s")
        found = eventually(lambda: conn.execute(ALERTS).fetchall(), bool)
        assert {row[:3] for row in found} == {("shard-1", None, "warn")}
        assert conn.execute("SELECT DISTINCT state FROM shardmap.audit_findings WHERE kind = 'unknown'").fetchall() == [("suspected",)]
    finally:
        cluster.shard_server(1).start()


def test_as_the_role_that_is_set(cluster, conn):
    """It has no user mapping at first, and nobody else's serves it."""
    configure(conn, audit_interval="1s", audit_role="auditor")
    eventually(lambda: runs(conn), lambda found: any(run[2] for run in found))
    detail = conn.execute("SELECT DISTINCT detail FROM shardmap.audit_findings WHERE kind = 'unknown' AND state <> 'closed'").fetchall()
    assert len(detail) == 2 and all('user "auditor" has no user mapping' in row[0] for row in detail)
    for shard in ("shard-0", "shard-1"):
        conn.execute(f"CREATE USER MAPPING FOR auditor SERVER \"{shard}\" OPTIONS (user 'postgres', password_required 'false')")
    eventually(lambda: runs(conn), lambda found: found[-1][2] == 0)


def test_a_failed_audit_is_written_down_and_tried_again(cluster, conn):
    conn.execute("CREATE ROLE nobody_much")
    for role, words in (("no_such_role", 'role "no_such_role" does not exist'), ("nobody_much", "permission denied for function audit")):
        configure(conn, audit_interval="1s", audit_role=role)
        last = eventually(lambda: runs(conn), lambda found: found and found[-1][3] == words)[-1]
        assert last[1:3] == ("sample", None)
        assert conn.execute(ALERTS).fetchall() == [
            (None, None, "warn", 'audits of keyspace "main" fail, see shardmap.audit_run')]
        eventually(lambda: runs(conn), lambda found: len([run for run in found if run[3] == words]) >= 2)
    configure(conn, audit_role="")
    eventually(lambda: runs(conn), lambda found: found[-1][3] is None)
    assert conn.execute(ALERTS).fetchall() == []
    conn.execute("DROP ROLE nobody_much")


def test_a_keyspace_whose_audit_fails_does_not_stop_the_others(cluster, conn):
    conn.execute("SELECT shardmap.create_keyspace('other', 'range', range_order => 'integer')")
    try:
        conn.execute("CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;"
                     "CREATE TRIGGER fail BEFORE INSERT ON shardmap.audit_run FOR EACH ROW"
                     " WHEN (NEW.keyspace = 'main' AND NEW.error IS NULL) EXECUTE FUNCTION public.fail()")
        conn.execute("SELECT shardmap.add_shard('other-0', '127.0.0.1', %s, 'postgres', keyspace => 'other')",
                     (cluster.shard_server(0).port,))
        configure(conn, audit_interval="1s")
        eventually(lambda: conn.execute("SELECT DISTINCT keyspace, error FROM shardmap.audit_run").fetchall(),
                   lambda found: set(found) == {("main", "not this one"), ("other", None)})
    finally:
        conn.execute("DROP FUNCTION public.fail() CASCADE")
        conn.execute("ALTER SYSTEM RESET shardmap.audit_interval")
        conn.execute("SELECT pg_reload_conf()")
        conn.execute("SELECT shardmap.drop_shard('other-0')")


def test_old_audits_are_forgotten(conn):
    conn.execute("INSERT INTO shardmap.audit_run (keyspace, mode, map_version, map_digest, started_at, finished_at, findings)"
                 " SELECT 'main', 'sample', 1, '', now(), now(), 0 FROM generate_series(1, 1100)")
    last = runs(conn)[-1][0]
    conn.execute("SELECT shardmap._forget_old_audits('main')")
    kept = runs(conn)
    assert len(kept) == 1000 and kept[-1][0] == last


def test_every_database_gets_its_turn(cluster, conn):
    """More databases than there is room for workers; the one with audits to make comes last."""
    for number in range(12):
        conn.execute(f"CREATE DATABASE other_{number}")
    late = cluster.new_database("late")
    configure(conn, audit_interval="1s")
    with psycopg.connect(late, autocommit=True) as there:
        found = eventually(lambda: runs(there), lambda found: len(found) >= 2)
    assert {run[1:] for run in found} == {("sample", 0, None)}
