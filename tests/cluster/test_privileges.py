"""Who may see and write what: privileges, row security and views of logical tables are those of ordinary tables.

Ordinary users come with a user mapping of their own and rights on the logical tables only, never on the partitions.
Each test runs with routing and without.
"""

import psycopg
import pytest
from psycopg import errors

SETUP = """
CREATE TABLE t (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE u (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE tenant (k text, id int, secret text, PRIMARY KEY (k, id));
CREATE TABLE local (k int PRIMARY KEY, c text);
INSERT INTO t SELECT k, id, 'c' || id FROM generate_series(1, 20) k, generate_series(1, 2) id;
INSERT INTO u TABLE t;
INSERT INTO tenant SELECT n, id, n || ' secret ' || id
  FROM unnest('{cleo,dan,eve}'::text[]) n, generate_series(1, 3) id;
INSERT INTO local SELECT k, 'l' || k FROM generate_series(1, 20) k;
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{t,u,tenant}'::regclass[]) x;
-- Says what it sees, and is cheap: a planner that may will run it first.
CREATE FUNCTION peep(x text) RETURNS bool LANGUAGE plpgsql COST 0.0001 AS
    $$ BEGIN RAISE NOTICE 'seen: %', x; RETURN true; END $$;
"""

READS = ["SELECT id FROM t WHERE k = 7", "SELECT count(*) FROM t", "SELECT * FROM t ORDER BY k, id LIMIT 3",
         "SELECT count(*) FROM t WHERE k IN (1, 2, 3)", "SELECT t.id FROM t JOIN local USING (k) WHERE k = 7",
         "SELECT (SELECT max(id) FROM t WHERE t.k = l.k) FROM local l",
         "SELECT 1 WHERE EXISTS (SELECT FROM t WHERE k = 7)",
         "WITH w AS MATERIALIZED (SELECT * FROM t WHERE k = 7) SELECT count(*) FROM w"]
WRITES = ["INSERT INTO t VALUES (7, 90)", "INSERT INTO t SELECT k, 91, c FROM local WHERE k < 9",
          "UPDATE t SET c = 'x' WHERE k = 7", "UPDATE t SET c = 'x'", "DELETE FROM t WHERE k = 7", "DELETE FROM t"]


@pytest.fixture(scope="module")
def users(db):
    for name in ("cleo", "dan"):
        db.add_user(name)
    db.psql("GRANT SELECT ON local TO cleo, dan")


@pytest.fixture(params=["on", "off"])
def cleo(db, users, request):
    """A session of an ordinary user, in a transaction of which nothing stays; the superuser's rights are `db.psql`."""
    with db.connect("cleo", shardmap__enable_routing=request.param) as conn:
        yield conn
    db.psql("REVOKE ALL ON t, u, tenant FROM cleo, PUBLIC; REVOKE ALL (k, id, c) ON t FROM cleo")


def attempt(conn, sql):
    """Whether the statement is allowed; what it does is undone."""
    conn.execute("BEGIN")
    try:
        conn.execute(sql)
        return True
    except errors.InsufficientPrivilege:
        return False
    finally:
        conn.execute("ROLLBACK")


def test_rights_on_the_logical_table_suffice_and_are_needed(db, cleo):
    for sql in READS + WRITES:
        assert not attempt(cleo, sql), sql
    db.psql("GRANT SELECT ON t TO cleo")
    for sql in READS:
        assert attempt(cleo, sql), sql
    for sql in WRITES:
        assert not attempt(cleo, sql), sql
    db.psql("GRANT INSERT, UPDATE, DELETE ON t TO cleo")
    for sql in READS + WRITES:
        assert attempt(cleo, sql), sql
    db.psql("REVOKE SELECT ON t FROM cleo")
    for sql in READS + ["UPDATE t SET c = 'x' WHERE k = 7", "DELETE FROM t WHERE k = 7", "SELECT * FROM t FOR UPDATE",
                        "INSERT INTO t VALUES (7, 90) RETURNING id", "INSERT INTO u SELECT * FROM t WHERE k = 7"]:
        assert not attempt(cleo, sql), sql
    assert attempt(cleo, "INSERT INTO t VALUES (7, 90)")


def test_partitions_are_closed(db, cleo):
    db.psql("GRANT ALL ON t TO cleo")
    for number in range(4):
        for sql in (f"SELECT * FROM t_{number}", f"DELETE FROM t_{number}", f"UPDATE t_{number} SET c = 'x'"):
            assert not attempt(cleo, sql), sql


@pytest.mark.parametrize("grant, allowed, denied", [
    ("SELECT (k, id)", ["SELECT k, id FROM t WHERE k = 7", "SELECT count(*) FROM t",
                        "SELECT id FROM t WHERE k IN (1, 2)", "SELECT id FROM t JOIN local USING (k)",
                        "SELECT max(id) FROM t GROUP BY k"],
     ["SELECT c FROM t WHERE k = 7", "SELECT * FROM t WHERE k = 7", "SELECT id FROM t WHERE c = 'c1'",
      "SELECT t FROM t WHERE k = 7", "SELECT id FROM t WHERE k = 7 ORDER BY c", "SELECT count(c) FROM t",
      "SELECT id FROM t WHERE k = 7 FOR UPDATE", "SELECT (SELECT max(c) FROM t WHERE t.k = l.k) FROM local l"]),
    ("SELECT (id)", ["SELECT id FROM t", "SELECT count(*) FROM t"],
     ["SELECT id FROM t WHERE k = 7", "SELECT id FROM t JOIN local USING (k)", "SELECT k FROM t"]),
    ("SELECT (k, id), UPDATE (c)", ["UPDATE t SET c = 'x' WHERE k = 7", "UPDATE t SET c = 'x'",
                                    "UPDATE t SET c = 'x' WHERE k = 7 RETURNING id"],
     ["UPDATE t SET id = 9 WHERE k = 7", "UPDATE t SET c = c || 'x' WHERE k = 7", "DELETE FROM t WHERE k = 7",
      "UPDATE t SET c = 'x' WHERE k = 7 RETURNING c", "UPDATE t SET c = 'x' WHERE k = 7 AND c = 'c1'"]),
    ("INSERT (k, id)", ["INSERT INTO t (k, id) VALUES (7, 90)", "INSERT INTO t (k, id) VALUES (7, 90), (8, 90)",
                        "INSERT INTO t (k, id) SELECT k, 90 FROM local"],
     ["INSERT INTO t VALUES (7, 90, 'x')", "INSERT INTO t (k, id) VALUES (7, 90) RETURNING id"]),
])
def test_column_privileges(db, cleo, grant, allowed, denied):
    db.psql(f"GRANT {grant} ON t TO cleo")
    for sql in allowed:
        assert attempt(cleo, sql), sql
    for sql in denied:
        assert not attempt(cleo, sql), sql


def test_revoked_rights_stop_cached_plans(db, cleo):
    db.psql("GRANT SELECT ON t TO cleo")
    cleo.execute("SET plan_cache_mode = force_generic_plan; PREPARE q (int) AS SELECT count(*) FROM t WHERE k = $1")
    assert cleo.execute("EXECUTE q (7)").fetchone() == (2,)
    db.psql("REVOKE SELECT ON t FROM cleo")
    with pytest.raises(errors.InsufficientPrivilege):
        cleo.execute("EXECUTE q (7)")


def test_user_without_a_mapping_is_told(db, shared_cluster):
    db.psql("CREATE ROLE fay LOGIN; GRANT SELECT ON t TO fay")
    try:
        with db.connect("fay") as conn:
            for sql in ("SELECT * FROM t WHERE k = 7", "SELECT * FROM t"):
                with pytest.raises(psycopg.Error, match='user "fay" has no user mapping for shard'):
                    conn.execute(sql)
            assert conn.execute("SELECT shard_for(7) IS NOT NULL").fetchone() == (True,)
    finally:
        db.psql("REVOKE ALL ON t FROM fay; DROP ROLE fay")


def test_administration_is_closed(cleo):
    for call in ("distribute_table('local', 'k')", "run_on_shards('SELECT 1')", "remote_execute('shard-0', 'SELECT 1')",
                 "add_shard('x', host => 'h')", "publish_map('main')", "pin_key('x'::text, 'shard-0')",
                 "undistribute_table('t')", "drop_shard('shard-0')", "create_keyspace('x')"):
        assert not attempt(cleo, f"SELECT shardmap.{call}"), call
    for table in ("keyspace", "shard", "pin", "key_range", "logical_table"):
        assert not attempt(cleo, f"DELETE FROM shardmap.{table}"), table


@pytest.fixture(params=["k = current_user", "k = current_setting('app.tenant')", "secret LIKE current_user || '%'"])
def policy(db, users, request):
    db.psql(f"""ALTER TABLE tenant ENABLE ROW LEVEL SECURITY; GRANT ALL ON tenant TO cleo, dan;
                CREATE POLICY own ON tenant USING ({request.param})""")
    yield request.param
    db.psql("DROP POLICY own ON tenant; ALTER TABLE tenant DISABLE ROW LEVEL SECURITY; REVOKE ALL ON tenant FROM dan")


def test_row_security(db, cleo, policy):
    cleo.execute("SET app.tenant = cleo")
    for sql, want in (("SELECT count(*) FROM tenant", 3), ("SELECT count(*) FROM tenant WHERE k = 'cleo'", 3),
                      ("SELECT count(*) FROM tenant WHERE k = 'dan'", 0),
                      ("SELECT count(*) FROM tenant WHERE id = 1", 1),
                      ("SELECT count(*) FROM tenant a JOIN tenant b USING (k)", 9),
                      ("SELECT count(*) FROM tenant WHERE k IN ('cleo', 'dan') AND id = 2", 1)):
        assert cleo.execute(sql).fetchone() == (want,), sql
        cleo.execute(f"SET plan_cache_mode = force_generic_plan; PREPARE q AS {sql}")
        assert cleo.execute("EXECUTE q").fetchone() == (want,), sql
        cleo.execute("RESET plan_cache_mode; DEALLOCATE q")
    cleo.execute("BEGIN")
    for sql, want in (("UPDATE tenant SET id = id + 10", 3), ("UPDATE tenant SET id = 9 WHERE k = 'dan'", 0),
                      ("DELETE FROM tenant WHERE k = 'dan'", 0), ("DELETE FROM tenant WHERE id = 11", 1),
                      ("INSERT INTO tenant VALUES ('cleo', 5, 'cleo')", 1)):
        assert cleo.execute(sql).rowcount == want, sql
    cleo.execute("ROLLBACK")
    for sql in ("INSERT INTO tenant VALUES ('dan', 5, 'dan')",
                "INSERT INTO tenant VALUES ('cleo', 5, 'cleo'), ('dan', 5, 'd')",
                "INSERT INTO tenant SELECT 'eve', id + 5, 'eve' FROM tenant"):
        assert not attempt(cleo, sql), sql


def test_row_security_one_plan_for_two_users(db, users, policy):
    """A plan made for one role is not used for another."""
    with db.connect() as conn:
        conn.execute("PREPARE q AS SELECT DISTINCT k FROM tenant; SET plan_cache_mode = force_generic_plan")
        for role, want in (("cleo", ["cleo"]), ("dan", ["dan"]), ("cleo", ["cleo"]),
                           ("postgres", ["cleo", "dan", "eve"])):
            conn.execute(f"SET app.tenant = {role}; SET ROLE {role}")
            assert sorted(k for (k,) in conn.execute("EXECUTE q")) == want
            conn.execute("RESET ROLE")


def copied(conn, sql):
    with conn.cursor().copy(sql) as copy:
        return sorted(bytes(row).decode() for row in copy)


def test_copy_to_is_refused_under_row_security_as_without(db, cleo, policy, tmp_path):
    """Postgres copies the rows of ONLY the table, of which there are none."""
    cleo.execute("SET app.tenant = cleo")
    db.psql("GRANT pg_write_server_files, pg_execute_server_program TO cleo")
    try:
        for user in (cleo, db.connect()):
            for sql in ("COPY tenant TO STDOUT", "COPY public.tenant (id, k) TO STDOUT (FORMAT csv, HEADER)",
                        "SELECT 1 FROM ONLY tenant; /* out */ copy/**/tenant to stdout; SELECT 2",
                        f"COPY tenant TO '{tmp_path}/x'", "COPY tenant TO PROGRAM 'cat'",
                        "DO $$ BEGIN EXECUTE 'COPY tenant TO ''/dev/null'' CSV'; END $$"):
                with pytest.raises(errors.WrongObjectType, match="cannot copy from partitioned table") as caught:
                    user.execute(sql)
                assert caught.value.diag.message_hint == "Try the COPY (SELECT ...) TO variant."
        # A partition has no policies: who may read it sees Postgres' own error.
        with pytest.raises(errors.InsufficientPrivilege):
            cleo.execute("COPY tenant_0 TO STDOUT")
        with pytest.raises(errors.WrongObjectType, match="cannot copy from foreign table"):
            user.execute("COPY tenant_0 TO STDOUT")
        user.close()
    finally:
        db.psql("REVOKE pg_write_server_files, pg_execute_server_program FROM cleo")
    assert len(copied(cleo, "COPY (SELECT * FROM tenant) TO STDOUT")) == 3
    assert len(copied(cleo, "COPY (SELECT * FROM ONLY tenant) TO STDOUT")) == 3
    assert len(cleo.execute("SELECT * FROM ONLY tenant -- COPY tenant TO").fetchall()) == 3
    cleo.execute("SET row_security = off")
    with pytest.raises(errors.InsufficientPrivilege, match="row-level security"):
        cleo.execute("COPY tenant TO STDOUT")


def test_copy_under_row_security_of_others(db, cleo, policy):
    """Who may not read the table learns nothing more; ordinary and partitioned tables are Postgres' own affair."""
    db.psql("""REVOKE ALL ON tenant FROM cleo; CREATE TABLE own (k text); INSERT INTO own VALUES ('cleo'), ('dan');
               CREATE POLICY own ON own USING (k = current_user); ALTER TABLE own ENABLE ROW LEVEL SECURITY;
               CREATE TABLE parted (k text) PARTITION BY LIST (k); ALTER TABLE parted ENABLE ROW LEVEL SECURITY;
               GRANT SELECT ON own, parted TO cleo""")
    try:
        with pytest.raises(errors.InsufficientPrivilege):
            cleo.execute("COPY tenant TO STDOUT")
        with pytest.raises(errors.UndefinedTable):
            cleo.execute("COPY nothing TO STDOUT")
        assert copied(cleo, "COPY own TO STDOUT") == ["cleo\n"]
        assert copied(cleo, "COPY parted TO STDOUT") == []
        db.psql("GRANT SELECT (id) ON tenant TO cleo")
        with pytest.raises(errors.WrongObjectType):
            cleo.execute("COPY tenant (id) TO STDOUT")
    finally:
        db.psql("DROP TABLE own, parted; REVOKE ALL (id) ON tenant FROM cleo")


def seen(conn, sql):
    """What the function peep was shown while the statement ran."""
    found = []

    def handler(diag):
        if diag.message_primary.startswith("seen: "):
            found.append(diag.message_primary[6:])
    conn.add_notice_handler(handler)
    rows = conn.execute(sql).fetchall()
    conn.remove_notice_handler(handler)
    return rows, set(found)


def test_row_security_hides_rows_from_leaky_functions(cleo, policy):
    cleo.execute("SET app.tenant = cleo")
    for sql in ("SELECT k FROM tenant WHERE peep(secret)", "SELECT k FROM tenant WHERE peep(secret) AND k = 'dan'",
                "SELECT k FROM tenant WHERE k IN ('cleo', 'dan') AND peep(secret)"):
        rows, shown = seen(cleo, sql)
        assert {k for (k,) in rows} <= {"cleo"} and all(text.startswith("cleo") for text in shown), (sql, shown)


@pytest.mark.parametrize("barrier", ["", "WITH (security_barrier)"])
def test_views_of_another_owner(db, cleo, barrier):
    db.psql(f"CREATE VIEW shown {barrier} AS SELECT k, id, secret FROM tenant WHERE k <> 'dan' AND id < 3;"
            "CREATE VIEW asked WITH (security_invoker) AS TABLE t; GRANT SELECT, UPDATE ON shown, asked TO cleo")
    try:
        assert not attempt(cleo, "SELECT * FROM tenant WHERE k = 'cleo'")
        for sql, want in (("SELECT count(*) FROM shown", 4), ("SELECT count(*) FROM shown WHERE k = 'cleo'", 2),
                          ("SELECT count(*) FROM shown WHERE k = 'dan'", 0),
                          ("SELECT count(*) FROM shown s JOIN shown z USING (k) WHERE k = 'eve'", 4)):
            assert cleo.execute(sql).fetchone() == (want,), sql
        for sql in ("SELECT k FROM shown WHERE peep(secret)", "SELECT k FROM shown WHERE k = 'dan' AND peep(secret)"):
            shown = seen(cleo, sql)[1]
            assert not barrier or not any(text.startswith("dan") for text in shown), (sql, shown)
        cleo.execute("BEGIN")
        assert cleo.execute("UPDATE shown SET secret = 'x' WHERE k = 'cleo'").rowcount == 2
        assert cleo.execute("UPDATE shown SET secret = 'x' WHERE k = 'dan'").rowcount == 0
        cleo.execute("ROLLBACK")
        assert not attempt(cleo, "SELECT * FROM asked WHERE k = 7") and not attempt(cleo, "SELECT * FROM asked")
        db.psql("GRANT SELECT ON t TO cleo")
        assert cleo.execute("SELECT count(*) FROM asked WHERE k = 7").fetchone() == (2,)
    finally:
        db.psql("DROP VIEW shown, asked")


def test_security_definer_functions(db, cleo):
    db.psql("""CREATE FUNCTION lent(key int) RETURNS bigint SECURITY DEFINER LANGUAGE plpgsql AS
                   $$ BEGIN RETURN (SELECT count(*) FROM t WHERE k = key); END $$;
               CREATE FUNCTION own(key int) RETURNS bigint LANGUAGE plpgsql AS
                   $$ BEGIN RETURN (SELECT count(*) FROM t WHERE k = key); END $$""")
    try:
        for _ in range(7):
            assert cleo.execute("SELECT lent(7)").fetchone() == (2,)
            assert not attempt(cleo, "SELECT own(7)")
    finally:
        db.psql("DROP FUNCTION lent; DROP FUNCTION own")


EVIL = "CREATE FUNCTION who(i int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RAISE NOTICE 'as %', current_user; RETURN i; END $$"


@pytest.mark.parametrize("column", ["GENERATED ALWAYS AS (who(1)) STORED", "CHECK (g > who(0))", "DEFAULT who(1)"])
def test_distributing_runs_no_function_of_the_tables_as_somebody_else(db, users, column):
    """What a table's owner puts into its definition runs with his rights, not with those of the extension's owner."""
    seen = []
    db.psql("GRANT shardmap_admin TO dan; GRANT CREATE ON SCHEMA public TO dan")
    try:
        with db.connect("dan") as conn:
            conn.add_notice_handler(lambda notice: seen.append(notice.message_primary))
            conn.execute(EVIL)
            conn.execute("SELECT shardmap.run_on_shards('CREATE FUNCTION who(i int) RETURNS int IMMUTABLE RETURN i')")
            conn.execute(f"CREATE TABLE mine (k int PRIMARY KEY, g int {column})")
            conn.execute("INSERT INTO mine (k) VALUES (1)")
            conn.execute("SELECT shardmap.distribute_table('mine', 'k')")
            conn.execute("SELECT shardmap.undistribute_table('mine')")
            conn.execute("DROP TABLE mine; DROP FUNCTION who")
            conn.execute("SELECT shardmap.run_on_shards('DROP FUNCTION who')")
    finally:
        db.psql("REVOKE shardmap_admin FROM dan; REVOKE CREATE ON SCHEMA public FROM dan")
    assert seen and not [message for message in seen if message.startswith("as ") and message != "as dan"]


def test_plans_are_not_made_by_asking_shards(conn):
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="use_remote_estimate") as told:
        conn.execute("ALTER SERVER \"shard-2\" OPTIONS (use_remote_estimate 'true')")
    assert "ANALYZE" in told.value.diag.message_hint
    conn.execute("ROLLBACK")
    conn.execute("ALTER SERVER \"shard-2\" OPTIONS (use_remote_estimate 'false')")
    conn.execute("ALTER SERVER \"shard-2\" OPTIONS (DROP use_remote_estimate)")
    with pytest.raises(psycopg.Error, match="invalid option \"nonsense\""):
        conn.execute("ALTER SERVER \"shard-2\" OPTIONS (nonsense '1')")


def test_a_cached_plan_does_not_outlive_a_change_of_role(db, users):
    """A superuser's plan, to which row security does not apply, is not another user's, at whatever level the table stands."""
    db.psql("GRANT SELECT ON tenant TO cleo; ALTER TABLE tenant ENABLE ROW LEVEL SECURITY;"
            "CREATE POLICY own ON tenant USING (k = current_user)")
    try:
        with db.connect() as conn:
            for number, sql in enumerate(("SELECT count(*) FROM tenant WHERE k = $1",
                                          "WITH x AS (SELECT * FROM tenant WHERE k = $1) SELECT count(*) FROM x",
                                          "SELECT (SELECT count(*) FROM tenant WHERE k = $1)")):
                conn.execute(f"PREPARE p{number} (text) AS {sql}")
                for _ in range(8):
                    assert conn.execute(f"EXECUTE p{number} ('dan')").fetchone() == (3,), sql
                conn.execute("SET ROLE cleo")
                assert conn.execute(f"EXECUTE p{number} ('dan')").fetchone() == (0,), sql
                assert conn.execute(f"EXECUTE p{number} ('cleo')").fetchone() == (3,), sql
                conn.execute("RESET ROLE")
                assert conn.execute(f"EXECUTE p{number} ('dan')").fetchone() == (3,), sql
    finally:
        db.psql("DROP POLICY own ON tenant; ALTER TABLE tenant DISABLE ROW LEVEL SECURITY; REVOKE ALL ON tenant FROM cleo")


LEAKS = ["k = 'dan' AND 1 / (CASE WHEN secret LIKE 'dan%' THEN 0 ELSE 1 END) = 1",
         "k IN ('cleo', 'dan') AND 1 / (CASE WHEN secret LIKE 'dan%' THEN 0 ELSE 1 END) = 1",
         "1 / (CASE WHEN secret LIKE 'dan%' THEN 0 ELSE 1 END) = 1"]


@pytest.mark.parametrize("condition", LEAKS)
@pytest.mark.parametrize("setting", (None, "enable_router", "enable_routing"))
def test_conditions_do_not_see_rows_before_row_security_does(db, users, condition, setting):
    """An error in a user's condition must not tell of a row that he may not see."""
    db.psql("GRANT SELECT, UPDATE, DELETE ON tenant, t TO cleo; ALTER TABLE tenant ENABLE ROW LEVEL SECURITY;"
            "CREATE POLICY own ON tenant USING (k = current_user)")
    try:
        with db.connect("cleo") as conn:
            if setting:
                conn.execute(f"SET shardmap.{setting} = off")
            rows = 0 if condition.startswith("k = 'dan'") else 3
            assert conn.execute(f"SELECT count(*) FROM tenant WHERE {condition}").fetchone() == (rows,)
            joined = f"SELECT count(*) FROM tenant a JOIN tenant b USING (k) WHERE {condition.replace('secret', 'b.secret')}"
            assert conn.execute(joined).fetchone() == (rows * 3,)
            conn.execute("BEGIN")
            assert conn.execute(f"UPDATE tenant SET secret = 'cleo' WHERE {condition}").rowcount == rows
            assert conn.execute(f"DELETE FROM tenant WHERE {condition}").rowcount == rows
            conn.execute("ROLLBACK")
    finally:
        db.psql("DROP POLICY own ON tenant; ALTER TABLE tenant DISABLE ROW LEVEL SECURITY; REVOKE ALL ON tenant, t FROM cleo")
