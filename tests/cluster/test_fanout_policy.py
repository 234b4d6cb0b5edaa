"""Statements that ask every shard: what the client is told, who decides, and what is counted.

Statistics that survive restarts, crashes and full tables are in test_stats.py.
"""

import psycopg
import pytest
from psycopg import errors

SETUP = """
CREATE TABLE t (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE u (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE local (k int PRIMARY KEY, c text);
INSERT INTO t SELECT k, id, 'c' || k FROM generate_series(1, 20) k, generate_series(1, 2) id;
INSERT INTO u TABLE t;
INSERT INTO local SELECT k, 'c' || k FROM generate_series(1, 20) k;
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{t,u}'::regclass[]) x;
CREATE FUNCTION count_all() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RETURN (SELECT count(*) FROM t); END $$;
CREATE FUNCTION try_all() RETURNS text LANGUAGE plpgsql AS
    $$ BEGIN RETURN (SELECT count(*) FROM t); EXCEPTION WHEN feature_not_supported THEN RETURN 'refused'; END $$;
"""

COUNT = "SELECT count(*) FROM t"
MESSAGE = "query on public.t asks all 4 shards"
DETAIL = 'No condition on the key "k" of public.t.'
# The low 64 bits of md5(COUNT), signed.
FINGERPRINT = -3473758831354050271
HINT = ('Add an equality on "k", or allow this statement with the comment /* shardmap: allow fan-out */ or its'
        f" fingerprint, {FINGERPRINT}, in shardmap.allowed_fanouts, or all of them with"
        " SET shardmap.fanout_policy = 'allow'.")


@pytest.fixture(autouse=True)
def no_policies(db):
    yield
    db.psql(f"""SELECT shardmap.set_fanout_policy(x, NULL) FROM unnest('{{t,u}}'::regclass[]) x;
                ALTER DATABASE {db.name} RESET shardmap.fanout_policy""")


@pytest.fixture(scope="module")
def bea(db):
    db.add_user("bea")
    db.psql("GRANT SELECT, UPDATE ON t, u, local TO bea")
    return "bea"


def flags(conn, *statements):
    """(severity, message, detail) of the messages about fan-outs while the statements run."""
    found = []

    def handler(diag):
        found.append((diag.severity, diag.message_primary, diag.message_detail))
    conn.add_notice_handler(handler)
    for sql in statements:
        conn.execute(sql)
    conn.remove_notice_handler(handler)
    return [flag for flag in found if "shards" in flag[1]]


def severities(conn, *statements):
    return [severity for severity, _, _ in flags(conn, *statements)]


@pytest.mark.parametrize("routing", ["on", "off"])
def test_message_of_each_policy(db, routing):
    for policy, severity, code in (("notice", "NOTICE", "00000"), ("warning", "WARNING", "01000")):
        with db.connect(shardmap__fanout_policy=policy, shardmap__enable_routing=routing) as conn:
            found = []
            conn.add_notice_handler(lambda d: found.append(
                (d.severity, d.sqlstate, d.message_primary, d.message_detail, d.message_hint)))
            assert conn.execute(COUNT).fetchone() == (40,)
            assert found == [(severity, code, MESSAGE, DETAIL, HINT)]
    with db.connect(shardmap__fanout_policy="allow", shardmap__enable_routing=routing) as conn:
        assert flags(conn, COUNT) == []
    with db.connect(shardmap__fanout_policy="error", shardmap__enable_routing=routing) as conn:
        with pytest.raises(errors.FeatureNotSupported, match=MESSAGE) as caught:
            conn.execute(COUNT)
        diag = caught.value.diag
        assert (diag.message_detail, diag.message_hint) == (DETAIL, HINT)


def test_notice_is_the_default(db):
    with psycopg.connect(db.cluster.dsn(db.name), autocommit=True) as conn:
        assert severities(conn, COUNT) == ["NOTICE"]


REFUSED = ["SELECT count(*) FROM t", "SELECT * FROM t ORDER BY id LIMIT 1", "SELECT * FROM t WHERE c = 'c1'",
           "UPDATE t SET c = 'x'", "DELETE FROM t WHERE c = 'c1'", "SELECT * FROM t JOIN u USING (k)",
           "SELECT * FROM t WHERE k = 7 UNION ALL SELECT * FROM t", "SELECT (SELECT max(c) FROM t)",
           "WITH w AS (UPDATE t SET c = 'x' RETURNING *) SELECT count(*) FROM w",
           "SELECT l.k FROM local l WHERE EXISTS (SELECT FROM t WHERE t.c = l.c)", "SELECT * FROM t FOR UPDATE",
           "INSERT INTO local SELECT 100 + k, c FROM t", "CREATE TABLE made AS SELECT * FROM t",
           "EXPLAIN ANALYZE SELECT * FROM t", "COPY (SELECT * FROM t) TO STDOUT",
           "DECLARE x CURSOR WITH HOLD FOR SELECT * FROM t"]


@pytest.mark.parametrize("sql", REFUSED)
def test_error_asks_no_shard(db, sql):
    for settings in ({}, {"shardmap__enable_routing": "off"}, {"plan_cache_mode": "force_generic_plan"}):
        with db.connect(shardmap__fanout_policy="error", **settings) as conn:
            def call():
                with pytest.raises(errors.FeatureNotSupported, match="asks all 4 shards"):
                    conn.execute(sql)
            assert db.asked(call)[1] == {}


@pytest.mark.parametrize("sql", ["EXPLAIN SELECT * FROM t", "SELECT * FROM t WHERE k = 7",
                                 "SELECT * FROM t WHERE k IN (1, 7)", "SELECT * FROM t JOIN u USING (k) WHERE k = 7",
                                 "SELECT * FROM local", "SELECT 1", "UPDATE t SET c = c WHERE k = 7",
                                 "SELECT * FROM t WHERE k = ANY (ARRAY[1, 7])", "SELECT relname FROM pg_class",
                                 "SELECT * FROM t WHERE false", "INSERT INTO t SELECT k, 50, c FROM local",
                                 "DELETE FROM t WHERE k = 1 AND id = 50",
                                 "SELECT count(*) FROM t WHERE k = current_setting('server_version_num')::int",
                                 "TABLE shardmap.tables", "TABLE shardmap.fanout_queries"])
def test_others_are_not_flagged(db, sql):
    with db.connect(shardmap__fanout_policy="error") as conn:
        conn.execute("BEGIN")
        assert flags(conn, sql) == []
        conn.execute("ROLLBACK")


@pytest.mark.parametrize("condition, reason", [
    ("t", DETAIL),
    ("t WHERE k > 7", "is not compared for equality with a value known when the statement starts."),
    ("t WHERE k = (random() * 10)::int", "is not compared for equality with a value known when the statement starts."),
    ("t WHERE k = id", "is not compared for equality with a value known when the statement starts."),
    ("t WHERE k = 7 OR c = 'c1'", "is named in one arm of an OR, not in all."),
    ("t LEFT JOIN local l ON l.k = t.k AND t.k = 7", "is named only in the condition of an outer join"),
    ("t, u WHERE t.id = u.id", f'{DETAIL} No condition on the key "k" of public.u.'),
])
def test_reason(db, conn, condition, reason):
    conn.execute("SET shardmap.fanout_policy = notice")
    (found,) = flags(conn, f"SELECT count(*) FROM {condition}")
    assert reason in found[2]


@pytest.mark.parametrize("sql", [
    "SELECT * FROM t a JOIN t b ON a.id = b.id", "SELECT * FROM t UNION SELECT * FROM t UNION SELECT * FROM u",
    "SELECT (SELECT count(*) FROM u WHERE u.id = t.id) FROM t", "SELECT * FROM local l WHERE l.k IN (SELECT id FROM t)",
    "UPDATE t SET c = u.c FROM u WHERE u.k = t.k AND u.id = t.id",
    "WITH w AS MATERIALIZED (TABLE t) SELECT * FROM w, w x",
    "SELECT l.k, (SELECT count(*) FROM t WHERE t.c = l.c) FROM local l"])
def test_one_message_a_statement(db, conn, sql):
    conn.execute("SET shardmap.fanout_policy = warning")
    assert severities(conn, sql) == ["WARNING"]
    conn.execute(f"PREPARE q AS {sql}")
    assert severities(conn, *["EXECUTE q"] * 7) == ["WARNING"] * 7
    conn.execute("DEALLOCATE q")


def test_by_role_and_by_database(db, bea):
    try:
        db.psql("ALTER ROLE bea SET shardmap.fanout_policy = error")
        with psycopg.connect(db.cluster.dsn(db.name, bea), autocommit=True) as conn:
            with pytest.raises(errors.FeatureNotSupported):
                conn.execute(COUNT)
            assert conn.execute("SELECT count(*) FROM t WHERE k = 7").fetchone() == (2,)
    finally:
        db.psql("ALTER ROLE bea RESET shardmap.fanout_policy")
    db.psql(f"ALTER DATABASE {db.name} SET shardmap.fanout_policy = warning")
    with psycopg.connect(db.cluster.dsn(db.name, bea), autocommit=True) as conn:
        assert severities(conn, COUNT) == ["WARNING"]


def test_by_table_the_stricter_wins(db, bea):
    for table, session, want in (("error", "allow", None), ("allow", "notice", ["NOTICE"]),
                                 ("warning", "notice", ["WARNING"]), ("notice", "allow", ["NOTICE"]),
                                 ("notice", "error", None)):
        db.psql(f"SELECT shardmap.set_fanout_policy('t', '{table}')")
        with db.connect(bea, shardmap__fanout_policy=session) as conn:
            if want is None:
                with pytest.raises(errors.FeatureNotSupported):
                    conn.execute(COUNT)
            else:
                assert severities(conn, COUNT) == want
            # u has no policy of its own; a join with t has the stricter one.
            if session == "allow":
                assert flags(conn, "SELECT count(*) FROM u") == []
            if want == ["WARNING"]:
                assert severities(conn, "SELECT count(*) FROM u JOIN t USING (id)") == want
            with pytest.raises(errors.InsufficientPrivilege):
                conn.execute("SELECT shardmap.set_fanout_policy('t', 'allow')")
    with pytest.raises(Exception, match="unrecognized policy"):
        db.psql("SELECT shardmap.set_fanout_policy('t', 'never')")


def test_comment_allows_its_own_statement_only(db):
    allowed = "SELECT /* shardmap: allow fan-out */ count(*) FROM t"
    with db.connect(shardmap__fanout_policy="error") as conn:
        assert conn.execute(allowed).fetchone() == (40,)
        assert conn.execute(f"{COUNT} /* shardmap: allow fan-out */").fetchone() == (40,)
        assert conn.execute(f"/* shardmap: allow fan-out */ {COUNT}").fetchone() == (40,)
        for _ in range(7):
            assert conn.execute(f"{allowed} WHERE id < %s", (9,), prepare=True).fetchone() == (40,)
        for sql in (f"{allowed}; {COUNT}", f"{COUNT}; {allowed}", "SELECT 1 /* shardmap: allow */; " + COUNT,
                    f"{COUNT} -- allow fan-out"):
            with pytest.raises(errors.FeatureNotSupported):
                conn.execute(sql)
        # In a function it is that of the statement in the function, not of the call.
        with pytest.raises(errors.FeatureNotSupported):
            conn.execute("SELECT /* shardmap: allow fan-out */ count_all()")
        conn.execute(f"""CREATE OR REPLACE FUNCTION count_allowed() RETURNS bigint LANGUAGE plpgsql AS
                         $$ BEGIN RETURN ({allowed}); END $$""")
        assert conn.execute("SELECT count_allowed()").fetchone() == (40,)
        conn.execute("CREATE OR REPLACE FUNCTION refused() RETURNS bigint LANGUAGE sql AS $$ SELECT count(*) FROM t $$")
        with pytest.raises(errors.FeatureNotSupported):
            conn.execute("SELECT refused()")


def test_fingerprint_allows_its_own_statement_only(db):
    db.psql("SELECT shardmap.set_fanout_policy('t', 'error')")
    with db.connect(shardmap__fanout_policy="error") as conn:
        for value in (str(FINGERPRINT), f"7, {FINGERPRINT}, -7", f"'{FINGERPRINT}'", f"'7,{FINGERPRINT}'"):
            conn.execute(f"SET shardmap.allowed_fanouts = {value}")
            assert conn.execute(COUNT).fetchone() == (40,)
            assert flags(conn, f"SELECT 1; {COUNT} /* again */; SELECT 2", COUNT) == []
            for sql in (f"{COUNT} WHERE id = 1", f"{COUNT} x", "SELECT * FROM u"):
                with pytest.raises(errors.FeatureNotSupported):
                    conn.execute(sql)
        # The number comes from the message, and is the one that the view shows.
        with pytest.raises(errors.FeatureNotSupported) as caught:
            conn.execute("SELECT count(*) FROM t WHERE id = 1")
        number = caught.value.diag.message_hint.split("its fingerprint, ")[1].split(",")[0]
        conn.execute(f"SET shardmap.allowed_fanouts = '{number}'")
        for value in (1, 2):
            assert conn.execute("SELECT count(*) FROM t WHERE id = %s", (value,), prepare=True).fetchone() == (20,)
            assert conn.execute(f"SELECT count(*) FROM t WHERE id = {value}").fetchone() == (20,)
        shown = conn.execute("SELECT fingerprint FROM shardmap.fanout_queries WHERE query LIKE '%WHERE id = $1'")
        assert int(number) in {row[0] for row in shown}
        # In a function it is that of the statement in the function.
        conn.execute(f"SET shardmap.allowed_fanouts = {FINGERPRINT}")
        with pytest.raises(errors.FeatureNotSupported) as caught:
            conn.execute("SELECT count_all()")
        number = caught.value.diag.message_hint.split("its fingerprint, ")[1].split(",")[0]
        conn.execute(f"SET shardmap.allowed_fanouts = '{number}'")
        assert conn.execute("SELECT count_all()").fetchone() == (40,)
        conn.execute("RESET shardmap.allowed_fanouts")
        with pytest.raises(errors.FeatureNotSupported):
            conn.execute(COUNT)


def test_allowed_fanouts_by_role_and_what_it_takes(db, bea):
    try:
        db.psql(f"ALTER ROLE bea SET shardmap.fanout_policy = error; ALTER ROLE bea SET shardmap.allowed_fanouts = 7, {FINGERPRINT}")
        with psycopg.connect(db.cluster.dsn(db.name, bea), autocommit=True) as conn:
            assert flags(conn, COUNT) == []
            with pytest.raises(errors.FeatureNotSupported):
                conn.execute("SELECT * FROM t")
    finally:
        db.psql("ALTER ROLE bea RESET ALL")
    with db.connect() as conn:
        for wrong in ("'seven'", "7.5", "'7,'", "'7 8'", "9223372036854775808"):
            with pytest.raises(errors.InvalidParameterValue, match="shardmap.allowed_fanouts") as caught:
                conn.execute(f"SET shardmap.allowed_fanouts = {wrong}")
            assert "list of fingerprints" in caught.value.diag.message_detail
        conn.execute("SET shardmap.allowed_fanouts = ''")


def test_literal_is_no_comment(db):
    with db.connect(shardmap__fanout_policy="error") as conn:
        for literal in ("'/* shardmap: allow fan-out */'", "$$/* shardmap: allow fan-out */$$"):
            with pytest.raises(errors.FeatureNotSupported):
                conn.execute(f"SELECT count(*) FROM t WHERE c <> {literal}")


def test_cached_plans_obey_the_setting_of_the_moment(db, conn):
    conn.execute("SET plan_cache_mode = force_generic_plan; PREPARE q AS SELECT count(*) FROM t")
    for name in ("EXECUTE q", "SELECT count_all()"):
        for policy, want in (("allow", []), ("notice", ["NOTICE"]), ("error", None), ("warning", ["WARNING"]),
                             ("allow", [])):
            conn.execute(f"SET shardmap.fanout_policy = {policy}")
            if want is None:
                with pytest.raises(errors.FeatureNotSupported):
                    conn.execute(name)
            else:
                assert severities(conn, name) == want
    # A table's policy that another session sets.
    db.psql("SELECT shardmap.set_fanout_policy('t', 'error')")
    for name in ("EXECUTE q", "SELECT count_all()"):
        with pytest.raises(errors.FeatureNotSupported):
            conn.execute(name)
    db.psql("SELECT shardmap.set_fanout_policy('t', NULL)")
    assert flags(conn, "EXECUTE q", "SELECT count_all()") == []


def test_refusal_caught_in_a_function(db):
    with db.connect(shardmap__fanout_policy="error") as conn:
        assert conn.execute("SELECT try_all(), try_all()").fetchone() == ("refused", "refused")
        conn.execute("SET shardmap.fanout_policy = warning")
        assert conn.execute("SELECT try_all()").fetchone() == ("40",)
        assert severities(conn, "SELECT try_all() FROM local WHERE k < 4") == ["WARNING"] * 3


def counted(conn):
    steps = {step: count for step, count in conn.execute("TABLE shardmap.stat_routing") if count}
    shards = {shard: count for _, shard, count, *_ in conn.execute("TABLE shardmap.stat_shards") if count}
    queries = conn.execute("SELECT query, calls, rows, shards, tables FROM shardmap.fanout_queries ORDER BY query")
    return steps, shards, queries.fetchall()


@pytest.mark.parametrize("router, step", [("on", "routed"), ("off", "substituted")])
def test_statements_are_counted_by_step_and_shard(db, conn, router, step):
    conn.execute(f"SET shardmap.enable_router = {router}")
    conn.execute("SELECT shardmap.reset_fanout_queries(), shardmap.reset_stat_routing()")
    a, b = (int(key) for key in db.apart(key_type="int4"))
    first, second = (f"shard-{db.owner(key, 'int4')}" for key in (a, b))
    conn.execute(f"SELECT * FROM t WHERE k = {a}")
    conn.execute("UPDATE t SET c = c WHERE k = %s", (b,), prepare=True)
    assert counted(conn) == ({step: 2}, {first: 1, second: 1}, [])
    conn.execute(f"SELECT * FROM t WHERE k IN ({a}, {b})")
    assert counted(conn) == ({step: 2, "narrowed": 1}, {first: 2, second: 2}, [])
    conn.execute("SELECT count_all() FROM local WHERE k < 4")
    steps, shards, queries = counted(conn)
    assert steps == {step: 2, "narrowed": 1, "fan_out": 3}
    assert shards == {f"shard-{n}": 3 + 2 * (f"shard-{n}" in (first, second)) for n in range(4)}
    ((query, *figures),) = queries
    assert "SELECT count(*) FROM t" in query and figures == [3, 3, 4, "public.t"]
    conn.execute("EXPLAIN SELECT * FROM t")
    assert counted(conn) == (steps, shards, queries)


def test_refused_statements_are_counted_apart(conn):
    conn.execute("SELECT shardmap.reset_fanout_queries(), shardmap.reset_stat_routing()")
    conn.execute("SET shardmap.fanout_policy = error")
    assert conn.execute("SELECT try_all()").fetchone() == ("refused",)
    assert counted(conn) == ({"refused": 1}, {}, [])


@pytest.mark.parametrize("sql", [
    "UPDATE t SET k = 8 WHERE k = 7 AND id = 1", "UPDATE t SET k = k + 1",
    "INSERT INTO t SELECT k, id FROM u ON CONFLICT (k, id) DO UPDATE SET c = 'x'",
    "INSERT INTO t VALUES (7, 1), (8, 1) ON CONFLICT (k, id) DO NOTHING",
    "MERGE INTO t USING u ON t.k = u.k AND t.id = u.id WHEN MATCHED THEN DELETE",
    "WITH w AS (DELETE FROM t WHERE k = 7 RETURNING k) SELECT count(*) FROM w JOIN t USING (k)",
    "UPDATE t SET c = c RETURNING (SELECT count(*) FROM t x WHERE x.k = 7)"])
def test_statements_refused_while_planned_are_counted(db, conn, sql):
    for settings in ("RESET shardmap.enable_routing", "SET shardmap.enable_routing = off"):
        conn.execute(settings)
        conn.execute("SELECT shardmap.reset_fanout_queries(), shardmap.reset_stat_routing()")
        with pytest.raises(errors.FeatureNotSupported):
            conn.execute(sql)
        assert counted(conn) == ({"refused": 1}, {}, [])


@pytest.mark.parametrize("sql", [
    "INSERT INTO t VALUES (7, 1) ON CONFLICT (k, id) DO UPDATE SET c = 'c7'",
    "WITH w AS (DELETE FROM t WHERE k = 7 AND id = 9 RETURNING k) SELECT count(*) FROM w JOIN t USING (k) WHERE k = 7",
    "UPDATE t SET c = c WHERE k = 7 RETURNING (SELECT count(*) FROM t x WHERE x.k = 7)"])
def test_statements_that_only_a_whole_shard_can_do_are_counted(db, conn, sql):
    for setting, step in (("enable_router = on", "routed"), ("enable_router = off", "refused"),
                          ("enable_routing = off", "refused")):
        conn.execute(f"SET shardmap.{setting}")
        conn.execute("SELECT shardmap.reset_fanout_queries(), shardmap.reset_stat_routing()")
        if step == "refused":
            with pytest.raises(errors.FeatureNotSupported):
                conn.execute(sql)
            assert counted(conn) == ({step: 1}, {}, [])
        else:
            conn.execute(sql)
            assert counted(conn) == ({step: 1}, {f"shard-{db.owner(7, 'int4')}": 1}, [])
        conn.execute(f"RESET shardmap.{setting.split()[0]}")
