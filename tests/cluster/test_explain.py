"""What EXPLAIN (VERBOSE) says of a statement's step, and of why it did not take a higher one."""

import pytest

SETUP = """
CREATE TABLE t (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE u (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE far (k bigint, id int, PRIMARY KEY (k, id));
CREATE TABLE fired (k int, id int);
CREATE TABLE single (k int, id int);
INSERT INTO t SELECT k, id, 'c' || k FROM generate_series(1, 20) k, generate_series(1, 2) id;
INSERT INTO u TABLE t;
INSERT INTO far SELECT k, id FROM t;
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{t,u,fired}'::regclass[]) x;
CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER f AFTER DELETE ON fired FOR EACH STATEMENT EXECUTE FUNCTION f();
SELECT shardmap.create_keyspace('other');
SELECT shardmap.create_keyspace('lone');
"""

WHOLE, ONE = "whole on one shard", "one shard, in place of the logical table"
SOME, ALL = "only the shards of the keys named", "all shards"
KNOWN_LATE = 'The key "k" of public.t is known only when the statement starts.'


@pytest.fixture(scope="module", autouse=True)
def keyspaces(db):
    """Keyspace other has two shards, lone has one: databases of main's shards, under other names."""
    with db.connect() as conn:
        for keyspace, number in (("other", 0), ("other", 1), ("lone", 2)):
            conn.execute("SELECT shardmap.add_shard(%s, host => '127.0.0.1', port => %s, dbname => %s, keyspace => %s)",
                         (f"{keyspace}-{number}", db.cluster.shard_server(number).port,
                          db.cluster.shard_database(number, db.name), keyspace))
        conn.execute("SELECT shardmap.distribute_table('far', 'k', 'other')")
        conn.execute("SELECT shardmap.distribute_table('single', 'k', 'lone')")


def explained(conn, sql, options="VERBOSE, COSTS OFF"):
    """{label: text} of what is ours in the plan."""
    lines = [line.strip() for (line,) in conn.execute(f"EXPLAIN ({options}) {sql}")]
    labels = ("Routing", "Not Routed Because", "Not One Shard Because", "Not Narrowed Because")
    return {label: line.removeprefix(f"{label}: ") for line in lines for label in labels if line.startswith(label)}


@pytest.mark.parametrize("sql, why", [
    ("SELECT * FROM t WHERE k IN ({a}, {b})", "The keys named of public.t are on several shards."),
    ("SELECT * FROM t WHERE k = {a} OR k = {b}", "The keys named of public.t are on several shards."),
    ("UPDATE t SET c = c WHERE k IN ({a}, {b})", "The keys named of public.t are on several shards."),
    ("SELECT * FROM t WHERE k = (SELECT {a})", KNOWN_LATE),
    ("SELECT * FROM t WHERE k IN ({a}, current_setting('app.k')::int)", KNOWN_LATE),
    ("SELECT * FROM t WHERE k = {a} UNION ALL SELECT * FROM u WHERE k = {b}",
     "The tables' keys are on different shards."),
    ("SELECT * FROM t, u WHERE t.k = {a} AND u.k IN ({a}, {b})", "The keys named of public.u are on several shards."),
    ("SELECT * FROM t, u WHERE t.k IN ({a}, {b}) AND u.k = current_setting('app.k')::int",
     'The keys named of public.t are on several shards. The key "k" of public.u is known only when the statement starts.'),
    ("SELECT * FROM t a, t b WHERE a.k IN ({a}, {b}) AND b.k IN ({a}, {b})",
     "The keys named of public.t are on several shards."),
    ("SELECT t FROM t WHERE k = {a}", "Rows of public.t are used as values."),
    ("DELETE FROM fired WHERE k = {a}", "Table public.fired has triggers."),
    ("SELECT * FROM t JOIN far USING (k) WHERE t.k = {a}", "The tables are in different keyspaces."),
    ("SELECT * FROM t LEFT JOIN u ON u.k = t.k AND false WHERE t.k IN ({a}, {b})",
     "The keys named of public.t are on several shards. No row of public.u can match."),
])
def test_narrowed_says_why_not_one_shard(db, conn, sql, why):
    a, b = db.apart(key_type="int4")
    conn.execute("SET app.k = 1")
    sql = sql.format(a=a, b=b)
    assert explained(conn, sql) == {"Routing": SOME, "Not One Shard Because": why}
    assert explained(conn, sql, "COSTS OFF") == {"Routing": SOME}
    conn.execute("SET shardmap.enable_routing = off")
    assert "Not One Shard Because" in explained(conn, sql)


def test_one_key_known_late(conn):
    """Goes whole to its shard; without the router it is narrowed when it starts."""
    conn.execute("SET app.k = 1")
    sql = "SELECT * FROM t WHERE k = current_setting('app.k')::int"
    assert explained(conn, sql) == {"Routing": WHOLE}
    conn.execute("SET shardmap.enable_router = off")
    assert explained(conn, sql) == {"Routing": SOME, "Not One Shard Because": KNOWN_LATE}


@pytest.mark.parametrize("router", ["on", "off"])
def test_parameter_of_a_generic_plan(conn, router):
    conn.execute(f"SET shardmap.enable_router = {router}")
    generic, custom = {"Routing": WHOLE}, {"Routing": WHOLE}
    if router == "off":
        generic = {"Routing": SOME, "Not One Shard Because": KNOWN_LATE}
        custom = {"Routing": ONE, "Not Routed Because": "Routing is turned off."}
    conn.execute("SET plan_cache_mode = force_generic_plan; PREPARE q (int) AS SELECT * FROM t WHERE k = $1")
    assert explained(conn, "EXECUTE q (7)") == generic
    conn.execute("SET plan_cache_mode = force_custom_plan")
    assert explained(conn, "EXECUTE q (7)") == custom


def test_one_shard_and_all_shards_say_no_more(conn):
    one = "SELECT * FROM t JOIN u USING (k) WHERE k = 7"
    assert explained(conn, one) == {"Routing": WHOLE}
    conn.execute("SET shardmap.enable_router = off")
    assert explained(conn, one) == {"Routing": ONE, "Not Routed Because": "Routing is turned off."}
    assert explained(conn, one, "COSTS OFF") == {"Routing": ONE}
    conn.execute("SET shardmap.enable_router = on")
    why = 'No condition on the key "k" of public.t.'
    for options in ("VERBOSE", "COSTS OFF"):
        assert explained(conn, "SELECT * FROM t", options) == {"Routing": ALL, "Not Narrowed Because": why}
    # What is narrowed beside it does not matter.
    assert explained(conn, "SELECT * FROM t, u WHERE u.k IN (1, 2, 3)")["Not Narrowed Because"] == why


def test_routing_off(conn):
    conn.execute("SET shardmap.enable_routing = off")
    assert explained(conn, "SELECT * FROM t WHERE k = 7") == {
        "Routing": SOME, "Not One Shard Because": "shardmap.enable_routing is off."}


def test_keyspace_of_one_shard(db, conn):
    """All its rows are on one shard, whatever the statement says."""
    conn.execute("SET shardmap.fanout_policy = error")
    conn.execute("INSERT INTO single SELECT i, i FROM generate_series(1, 5) i")
    assert explained(conn, "SELECT * FROM single WHERE k = 3") == {"Routing": WHOLE}
    assert explained(conn, "SELECT * FROM single", "COSTS OFF") == {"Routing": WHOLE}
    assert conn.execute("SELECT count(*), sum(id) FROM single WHERE id > 1").fetchone() == (4, 14)
    assert conn.execute("SELECT id, count(*) FROM single GROUP BY id HAVING id > 4").fetchall() == [(5, 1)]
    assert conn.execute("UPDATE single SET id = id + 1 WHERE id > 1").rowcount == 4
    assert conn.execute("UPDATE single SET id = id + 1 WHERE id > 4 RETURNING id").fetchall() == [(6,), (7,)]
    assert conn.execute("DELETE FROM single").rowcount == 5


def test_keys_pass_between_keyspaces_by_value(db, conn):
    """So "different keyspaces" is no reason for a fan-out: each table is asked on the shard of its own keyspace."""
    conn.execute("SET shardmap.fanout_policy = error")
    for key in range(1, 9):
        for sql, rows in ((f"SELECT t.id, far.id FROM t JOIN far USING (k) WHERE t.k = {key}", 4),
                          (f"SELECT t.id, far.id FROM t JOIN far USING (k) WHERE far.k = {key}", 4),
                          (f"SELECT id FROM t WHERE k = {key} AND EXISTS (SELECT FROM far WHERE far.k = t.k)", 2)):
            conn.execute("SELECT shardmap.reset_stat_routing()")
            assert len(conn.execute(sql).fetchall()) == rows
            names = conn.execute("SELECT keyspace, shard FROM shardmap.stat_shards WHERE statements > 0 ORDER BY 1")
            want = conn.execute("SELECT 'main', shard_for(%s::int) UNION ALL SELECT 'other', shard_for(%s::int, 'other')",
                                (key, key))
            assert names.fetchall() == want.fetchall()
