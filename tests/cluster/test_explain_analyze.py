"""EXPLAIN ANALYZE of what shards do: what it cost on the way, the shard's own plan, and every write once."""

import json
import re
import xml.etree.ElementTree

import psycopg
import pytest
from psycopg import errors

SETUP = """
CREATE TABLE t (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE many (k int, id int, c text, PRIMARY KEY (k, id));
CREATE SEQUENCE counted;
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{t,many}'::regclass[]) x;
INSERT INTO t SELECT k, id, 'c' || id FROM generate_series(1, 20) k, generate_series(1, 3) id;
INSERT INTO many SELECT 7, id, repeat('x', 100) FROM generate_series(1, 5000) id;
"""


def explained(conn, sql, options="ANALYZE", params=None):
    return [line for line, in conn.execute(f"EXPLAIN ({options}) {sql}", params)]


def values(lines, label):
    return [int(number) for line in lines for number in re.findall(rf"^ *{label}: (\d+)", line)]


def of_json(conn, sql, options):
    (plan,), = conn.execute(f"EXPLAIN ({options}, FORMAT JSON) {sql}").fetchall()
    return (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]


def test_what_it_cost(conn):
    lines = explained(conn, "SELECT * FROM t WHERE k = 7")
    assert "rows=3" in lines[0] and "ShardRoute" in lines[0]
    assert values(lines, "Round Trips") == [1]
    (sent,), (received,) = values(lines, "Sent"), values(lines, "Received")
    assert 40 < sent < 1000 and 60 < received < 1000
    assert "Shard Plan" not in "\n".join(lines)
    (more,) = values(explained(conn, "SELECT * FROM many WHERE k = 7"), "Received")
    assert 5000 * 110 < more < 5000 * 150
    # In chunks, each a round trip.
    (trips,) = values(explained(conn, "SELECT * FROM many WHERE k = 7"), "Round Trips")
    assert 3 <= trips <= 8
    for options in ("VERBOSE", "COSTS OFF"):
        assert not values(explained(conn, "SELECT * FROM t WHERE k = 7", options), "Round Trips")


def test_nothing_is_asked_for_no_key(conn):
    lines = explained(conn, "SELECT id FROM t WHERE k = NULLIF(current_setting('server_version_num')::int, 0) - %s",
                      "ANALYZE, VERBOSE", (conn.info.server_version - 7,))
    assert values(lines, "Round Trips") == [1]
    conn.execute("PREPARE q (int) AS SELECT id FROM t WHERE k = $1; SET plan_cache_mode = force_generic_plan")
    lines = explained(conn, "EXECUTE q (NULL)", "ANALYZE, VERBOSE")
    assert values(lines, "Round Trips") == [0] and "Shard Plan" not in "\n".join(lines)


@pytest.mark.parametrize("sql, written", [
    ("INSERT INTO t VALUES (7, 10, 'x'), (7, 11, 'x')", 2), ("UPDATE t SET c = c || '!' WHERE k = 7", 3),
    ("DELETE FROM t WHERE k = 7 AND id > 1", 2), ("UPDATE t SET c = c || '!' WHERE k = 7 RETURNING id", None),
    ("WITH w AS (UPDATE t SET c = c || '!' WHERE k = 7 RETURNING id) SELECT * FROM w", None),
    ("MERGE INTO t USING (SELECT 7 AS k) s ON t.k = s.k WHEN MATCHED THEN UPDATE SET c = t.c || '!'", 3),
    ("INSERT INTO t VALUES (7, 2, 'y') ON CONFLICT (k, id) DO UPDATE SET c = t.c || '!'", 1),
])
@pytest.mark.parametrize("options", ["ANALYZE", "ANALYZE, VERBOSE"])
def test_pitfall_24_writes_run_once(db, conn, sql, written, options):
    """And the shard's plan is asked for without running them, nor what is computed here for them, again."""
    conn.execute("BEGIN")
    conn.execute(sql)
    want = conn.execute("SELECT * FROM t WHERE k = 7 ORDER BY id").fetchall()
    conn.execute("ROLLBACK")
    conn.execute("BEGIN")
    lines, found = db.asked(lambda: explained(conn, sql, options))
    assert conn.execute("SELECT * FROM t WHERE k = 7 ORDER BY id").fetchall() == want
    conn.execute("ROLLBACK")
    assert values(lines, "Rows Written") == ([] if written is None else [written])
    sent = [text for text in found[db.owner(7, "int4")] if re.search(r"\b(INSERT|UPDATE|DELETE|MERGE)\b", text)]
    plain = [text for text in sent if "EXPLAIN" not in text]
    assert len(plain) == 1
    assert len(sent) == (2 if "VERBOSE" in options else 1)
    assert not any("ANALYZE" in text for text in sent)
    assert (" on public.t" in "\n".join(lines) or " on t" in "\n".join(lines)) == ("VERBOSE" in options)


def test_what_is_computed_here_is_not_computed_again(conn):
    conn.execute("SELECT setval('counted', 100)")
    explained(conn, "INSERT INTO t VALUES (7, nextval('counted'), 'x')", "ANALYZE, VERBOSE")
    assert conn.execute("SELECT nextval('counted')").fetchone() == (102,)
    assert conn.execute("DELETE FROM t WHERE k = 7 AND id > 100").rowcount == 1


@pytest.mark.parametrize("sql", ["SELECT c FROM t WHERE k = 7 AND id = 2", "EXECUTE q (7, 2)"])
def test_plan_of_the_shard(conn, sql):
    conn.execute("PREPARE q (int, int) AS SELECT c FROM t WHERE k = $1 AND id = $2")
    lines = explained(conn, sql, "ANALYZE, VERBOSE, COSTS OFF")
    at = next(number for number, line in enumerate(lines) if line.strip() == "Shard Plan:")
    assert re.match(r"     ?\w.* Scan.* on t", lines[at + 1]), lines
    assert "cost=" not in lines[at + 1]
    assert "cost=" in "\n".join(explained(conn, sql, "ANALYZE, VERBOSE")).split("Shard Plan:")[1]


@pytest.mark.parametrize("format", ["json", "yaml", "xml"])
@pytest.mark.parametrize("sql", ["SELECT c FROM t WHERE k = 7 AND c <> 'a\"<b&''\\'", "SELECT count(*) FROM t",
                                 "UPDATE t SET c = c WHERE k = 7"])
def test_other_formats_are_well_formed(conn, format, sql):
    options = f"ANALYZE, VERBOSE, BUFFERS, WAL, SETTINGS, FORMAT {format}"
    cursor = conn.execute(f"EXPLAIN ({options}) {sql}")
    (plan,), = cursor.fetchall()
    if format == "json":
        plan = plan if not isinstance(plan, str) else json.loads(plan)
    elif format == "xml":
        plan = xml.etree.ElementTree.fromstring(plan)
    else:
        assert not re.search(r"^\s*Shard Plan: [^\"]", plan, re.M)
    text = json.dumps(plan) if format == "json" else plan if format == "yaml" else xml.etree.ElementTree.tostring(plan, "unicode")
    assert "Round" in text and "Received" in text
    assert ("Shard Plan" in text or "Shard-Plan" in text) == ("k = 7" in sql)


def test_generic_plan(db, conn):
    if conn.info.server_version < 160000:
        pytest.skip("Postgres 16 and later")
    lines, found = db.asked(lambda: explained(conn, "SELECT c FROM t WHERE k = $1 AND id = $2", "GENERIC_PLAN, VERBOSE"))
    assert found == {}
    assert any("that of the key, known when the statement starts" in line for line in lines)
    assert any("(k = $1) AND (id = $2)" in line for line in lines)
    for sql in ("UPDATE t SET c = $2 WHERE k = $1", "INSERT INTO t VALUES ($1, $2, $3) ON CONFLICT (k, id) DO NOTHING",
                "MERGE INTO t USING (SELECT $1::int AS k) s ON t.k = s.k WHEN MATCHED THEN DELETE"):
        assert "ShardRoute" in explained(conn, sql, "GENERIC_PLAN")[0]


def test_fan_outs(conn):
    """Each scan tells what its shard cost."""
    lines = explained(conn, "SELECT * FROM t", "ANALYZE")
    assert values(lines, "Round Trips") == [1] * 4
    assert sum(values(lines, "Received")) > 60 * 10
    plan = of_json(conn, "SELECT a.id FROM (VALUES (1), (2), (3)) v (id) LEFT JOIN LATERAL (SELECT id FROM t WHERE id = v.id"
                   " OFFSET 0) a ON true", "ANALYZE")

    def scans(node):
        below = [scan for child in node.get("Plans", []) for scan in scans(child)]
        return below + ([node] if node["Node Type"] == "Foreign Scan" else [])
    assert [(scan["Actual Loops"], scan["Round Trips"]) for scan in scans(plan)] == [(3, 3)] * 4
    lines = explained(conn, "UPDATE t SET c = c WHERE k IN (1, 2, 3, 4, 5, 6, 7, 8)", "ANALYZE")
    assert set(values(lines, "Round Trips")) == {1}


def test_auto_explain_asks_no_shard(db):
    with db.connect() as conn:
        conn.execute("LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_analyze = on;"
                     "SET auto_explain.log_verbose = on; SET auto_explain.log_level = notice; SET client_min_messages = notice")
        said = []
        conn.add_notice_handler(lambda notice: said.append(notice.message_primary))
        conn.execute("BEGIN")
        _, found = db.asked(lambda: conn.execute("SELECT c FROM t WHERE k = 7"))
        conn.execute("COMMIT")
        assert any("Round Trips" in text for text in said) and not any("Shard Plan" in text for text in said)
        assert not any("EXPLAIN" in text for texts in found.values() for text in texts)


def test_errors_of_the_statement_are_told(conn):
    with pytest.raises(errors.DivisionByZero):
        explained(conn, "SELECT 1 / (k - 7) FROM t WHERE k = 7", "ANALYZE, VERBOSE")
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
