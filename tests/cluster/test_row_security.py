"""Row security in a statement about one shard: the policies go along as conditions, or they are kept here.

They go along where no expression of the statement could tell what they hide; the rows are always those of one server.
"""

import re

import pytest
from psycopg import errors
from test_router import LEAKY, ROW_SECURITY, TABLES, is_routed, plan_of

SETUP = f"""
{TABLES.format("public")}
CREATE TABLE guarded (k int, id int, owner name, PRIMARY KEY (k, id));
CREATE TABLE tenants (k int, id int, c text, PRIMARY KEY (k, id));
CREATE VIEW barrier WITH (security_barrier) AS SELECT k, id, c FROM t;
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{{t,u,guarded,tenants}}'::regclass[]) x;
INSERT INTO guarded SELECT k, id, CASE WHEN id < 3 THEN 'rosa' ELSE 'other' END FROM t;
INSERT INTO tenants SELECT k, id, 'c' || id FROM t;
CREATE POLICY own ON guarded USING (owner = current_user);
CREATE POLICY own ON tenants FOR SELECT USING (k = current_setting('app.tenant')::int);
CREATE POLICY gone ON tenants FOR DELETE USING (k = current_setting('app.tenant')::int AND id < 4);
ALTER TABLE guarded ENABLE ROW LEVEL SECURITY;
ALTER TABLE tenants ENABLE ROW LEVEL SECURITY;
"""


@pytest.fixture(scope="module", autouse=True)
def rosa(db):
    db.add_user("rosa")
    db.psql("GRANT SELECT, UPDATE, INSERT, DELETE ON guarded, tenants, t, u, barrier TO rosa")


# (statement, whether a superuser gets other rows)
ALONG = [
    ("SELECT id, owner FROM guarded WHERE k = 7", True),
    ("SELECT id FROM guarded WHERE k = 7 AND id < 4 ORDER BY 9 / id FOR SHARE", True),
    ("SELECT id, 9 / id FROM guarded WHERE k = 7 AND id < 4", True),
    ("SELECT count(*), max(9 / id) FROM guarded WHERE k = 7 GROUP BY id", True),
    ("SELECT g.id, t.c FROM guarded g JOIN t ON t.k = g.k AND t.id = g.id WHERE g.k = 7", True),
    ("SELECT t.id FROM guarded g JOIN guarded h USING (k, id) JOIN t USING (k) WHERE k = 7", True),
    ("SELECT id FROM guarded WHERE k = 7 UNION ALL SELECT id FROM t WHERE k = 7", True),
    ("SELECT g.id, u.n FROM guarded g LEFT JOIN u USING (k, id) WHERE k = 7", True),
    ("WITH x AS (SELECT id FROM guarded WHERE k = 7) SELECT t.id FROM t JOIN x USING (id) WHERE t.k = 7", True),
    ("SELECT id, c FROM barrier WHERE k = 7", False),
    ("SELECT b.id FROM barrier b LEFT JOIN barrier c USING (k, id) WHERE k = 7 AND b.id <> 2", False),
    ("DELETE FROM guarded WHERE k = 7 RETURNING id", True),
    ("DELETE FROM guarded g USING t WHERE t.k = g.k AND t.id = g.id AND g.k = 7 AND g.id <> 2 RETURNING g.id", True),
]


def rolled_back(conn, sql, user=None):
    """The answer, in no order."""
    conn.execute("BEGIN")
    try:
        if user:
            conn.execute(f"SET LOCAL ROLE {user}")
        return sorted(conn.execute(sql).fetchall(), key=repr)
    finally:
        conn.execute("ROLLBACK")


@pytest.mark.parametrize("sql, differs", ALONG)
def test_policies_go_along(db, sql, differs):
    with (db.connect("rosa", shardmap__fanout_policy="error") as conn, db.connect("rosa", shardmap__enable_routing="off") as off,
          db.connect(plan_cache_mode="force_generic_plan") as admin):
        assert is_routed(plan_of(conn, sql)), plan_of(conn, sql)
        found = rolled_back(conn, sql)
        assert found and found == rolled_back(off, sql)
        # A cached plan is made anew for another user.
        admin.execute("PREPARE p (int) AS " + re.sub(r"\b7\b", "$1", sql))
        everything = rolled_back(admin, "EXECUTE p (7)")
        assert rolled_back(admin, "EXECUTE p (7)", "rosa") == found
        assert rolled_back(admin, "EXECUTE p (7)") == everything
        assert (everything != found) == differs


@pytest.mark.parametrize("sql, why", [
    ("UPDATE guarded SET id = id WHERE k = 7 AND id = 1 RETURNING id", ROW_SECURITY),
    ("SELECT id FROM guarded WHERE k = 7 AND id = 1 AND 9 / id > 0", LEAKY),
    ("SELECT id FROM guarded WHERE k = 7 AND id = 1 GROUP BY id HAVING 9 / id > 0", LEAKY),
    ("SELECT id FROM (SELECT k, id, 9 / id AS x FROM guarded) s WHERE k = 7 AND x > 4 AND id = 1", LEAKY),
    ("SELECT g.id FROM u LEFT JOIN guarded g USING (k, id) WHERE k = 7 AND u.id = 1", ROW_SECURITY),
])
def test_policies_that_are_kept_here(db, sql, why):
    with db.connect("rosa") as conn:
        assert f"Not Routed Because: {why}" in plan_of(conn, sql), plan_of(conn, sql)
        assert conn.execute(sql).fetchall() == [(1,)]
        assert conn.execute("DELETE FROM guarded WHERE k = 7 AND id > 2").rowcount == 0
        with pytest.raises(errors.InsufficientPrivilege):
            conn.execute("INSERT INTO guarded VALUES (7, 9, 'other')")
    with db.connect() as conn:  # a superuser
        assert is_routed(plan_of(conn, "SELECT id FROM guarded WHERE k = 7"))
        assert conn.execute("SELECT count(*) FROM guarded WHERE k = 7").fetchone() == (5,)


def test_policies_that_name_the_key(db):
    """As applications for many tenants have them: the session says whose rows it sees."""
    with db.connect("rosa", shardmap__fanout_policy="error", plan_cache_mode="force_generic_plan") as conn:
        conn.execute("PREPARE p (int) AS SELECT k, id, c FROM tenants WHERE id < $1")
        for tenant in (7, 8, 12, 99):
            conn.execute("SELECT set_config('app.tenant', %s, false)", (str(tenant),))
            assert is_routed(plan_of(conn, "SELECT k, id, c FROM tenants WHERE id < 3"))
            cursor, found = db.asked(lambda: conn.execute("EXECUTE p (3)"))
            want = [(tenant, 1, "c1"), (tenant, 2, "c2")] if tenant < 99 else []
            assert sorted(cursor.fetchall()) == want and set(found) == db.owners(tenant, key_type="int4")
        conn.execute("SELECT set_config('app.tenant', '7', false)")
        assert is_routed(plan_of(conn, "DELETE FROM tenants WHERE id > 1"))
        assert conn.execute("DELETE FROM tenants WHERE id > 1").rowcount == 2
        assert conn.execute("SELECT id FROM tenants ORDER BY id").fetchall() == [(1,), (4,), (5,)]
    with db.connect() as conn:
        assert conn.execute("SELECT count(*) FROM tenants").fetchone() == (98,)
