"""What the extension gives to others: the public SQL API against api.txt, and rules that every object of it keeps.

Public is what stands in schema shardmap under a name without a leading underscore, the functions in the schema that
CREATE EXTENSION names, and the settings. Nothing of it appears, vanishes or changes unless api.txt does in the same
commit: UPDATE_API=1 scripts/test-cluster.sh -k test_public_api writes it anew.
"""

import difflib
import os
import pathlib

MANIFEST = pathlib.Path(__file__).with_name("api.txt")

# So that the classes and functions made at run time are there too.
SETUP = "CREATE TABLE t (k int PRIMARY KEY); SELECT shardmap.distribute_table('t', 'k')"

# SECURITY DEFINER functions that everybody may run, and why that gives nobody more than he has.
OPEN_DEFINERS = {
    "shardmap._forget_dropped_tables()": "runs in the event trigger of whoever drops a table; forgets only tables that are gone",
}
# Functions in SQL or PL/pgSQL without a search_path of their own, and why that is safe.
OPEN_PATHS = {
    "shardmap.canary(text,interval,interval,double precision,double precision,double precision,bigint)": "as run_move",
    "shardmap.run_move(bigint)": "with a search_path of its own it could not commit; qualifies every name and uses no operator",
    "shardmap.run_moves(text)": "as run_move",
    "shardmap.run_repair(bigint,boolean,integer)": "as run_move",
    "shardmap.run_verification(bigint)": "as run_move",
    "shardmap.run_on_shards(text,text)": "hands the caller's search_path to the shards; qualifies every name, runs as the caller",
}

FUNCTIONS = r"""
SELECT format('function %I.%I(%s) returns %s: %s, parallel %s%s%s; %s', n.nspname, p.proname,
        pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
        CASE p.provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable' ELSE 'volatile' END,
        CASE p.proparallel WHEN 's' THEN 'safe' WHEN 'r' THEN 'restricted' ELSE 'unsafe' END,
        CASE WHEN p.proisstrict THEN ', strict' END, CASE WHEN p.prosecdef THEN ', security definer' END,
        (SELECT 'execute: ' || coalesce(string_agg(CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END, ', '
                ORDER BY a.grantee), 'owner only')
           FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a WHERE a.grantee <> p.proowner))
  FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
  JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
  JOIN pg_extension e ON e.oid = d.refobjid AND d.refclassid = 'pg_extension'::regclass AND e.extname = 'pg_shardmap'
 WHERE p.proname !~ '^_'
"""
RELATIONS = r"""
SELECT format('%s %s (%s)%s', CASE c.relkind WHEN 'v' THEN 'view' ELSE 'table' END, c.oid::regclass,
        (SELECT string_agg(format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY a.attnum)
           FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
        (SELECT '; ' || string_agg(CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END || ' ' || a.privilege_type,
                ', ' ORDER BY a.grantee, a.privilege_type)
           FROM aclexplode(c.relacl) a WHERE a.grantee <> c.relowner))
  FROM pg_class c WHERE c.relnamespace = 'shardmap'::regnamespace AND c.relkind IN ('r', 'v') AND c.relname !~ '^_'
"""
SETTINGS = r"""
SELECT format('setting %s %s%s: %s', name, vartype,
        coalesce(' ' || nullif(concat(array_to_string(enumvals, '|'), concat_ws('..', min_val, max_val)), ''), ''),
        concat_ws(', ', 'default ' || boot_val, context))
  FROM pg_settings WHERE name LIKE 'shardmap.%'
"""
OTHERS = r"""
SELECT format('foreign data wrapper %s', fdwname) FROM pg_foreign_data_wrapper WHERE fdwname ~ 'shardmap'
UNION ALL SELECT format('role %s%s', rolname, CASE WHEN rolcanlogin THEN '' ELSE ' nologin' END) FROM pg_roles WHERE rolname ~ 'shardmap_'
UNION ALL SELECT format('event trigger %s on %s', evtname, evtevent) FROM pg_event_trigger WHERE evtname ~ 'shardmap'
"""


def lines(conn, sql):
    return sorted(row[0] for row in conn.execute(sql).fetchall())


def manifest(conn):
    parts = (lines(conn, sql) for sql in (FUNCTIONS, RELATIONS, SETTINGS, OTHERS))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def test_public_api(conn):
    found = manifest(conn)
    if os.environ.get("UPDATE_API"):
        MANIFEST.write_text(found)
    known = MANIFEST.read_text()
    difference = "\n".join(difflib.unified_diff(known.splitlines(), found.splitlines(), "api.txt", "the extension", "", "", 0, ""))
    assert found == known, f"if this is meant: UPDATE_API=1 scripts/test-cluster.sh -k test_public_api\n{difference}"


def test_everything_has_a_comment(conn):
    """Members of the extension, what it makes at run time in its schema, and the columns and triggers of its relations."""
    missing = lines(conn, r"""
        WITH objects (classid, objid, objsubid) AS (
            SELECT d.classid, d.objid, 0 FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
             WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'pg_shardmap'
               AND d.classid <> 'pg_type'::regclass -- rows of its relations, members since 17
            UNION SELECT 'pg_proc'::regclass, p.oid, 0 FROM pg_proc p WHERE p.pronamespace = 'shardmap'::regnamespace
            UNION SELECT 'pg_opclass'::regclass, o.oid, 0 FROM pg_opclass o WHERE o.opcnamespace = 'shardmap'::regnamespace
            UNION SELECT 'pg_opfamily'::regclass, o.oid, 0 FROM pg_opfamily o WHERE o.opfnamespace = 'shardmap'::regnamespace
            UNION SELECT 'pg_class'::regclass, a.attrelid, a.attnum FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
                   WHERE c.relnamespace = 'shardmap'::regnamespace AND c.relkind IN ('r', 'v') AND a.attnum > 0
            UNION SELECT 'pg_trigger'::regclass, t.oid, 0 FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
                   WHERE c.relnamespace = 'shardmap'::regnamespace AND NOT t.tgisinternal
            UNION SELECT 'pg_extension'::regclass, e.oid, 0 FROM pg_extension e WHERE e.extname = 'pg_shardmap'
        )
        SELECT pg_describe_object(o.classid, o.objid, o.objsubid) FROM objects o
          LEFT JOIN pg_description d ON d.classoid = o.classid AND d.objoid = o.objid AND d.objsubid = o.objsubid
         WHERE coalesce(d.description, '') = ''
        UNION ALL SELECT 'role ' || r.rolname FROM pg_roles r
         WHERE r.rolname = 'shardmap_admin' AND coalesce(shobj_description(r.oid, 'pg_authid'), '') = ''
        """)
    assert missing == []


def test_search_path_is_fixed(conn):
    open_paths = lines(conn, r"""
        SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
         WHERE p.pronamespace = 'shardmap'::regnamespace AND (l.lanname IN ('sql', 'plpgsql') OR p.prosecdef)
           AND NOT coalesce(p.proconfig, '{}') @> '{"search_path=pg_catalog, pg_temp"}'
        """)
    assert open_paths == sorted(OPEN_PATHS)


def test_nobody_runs_as_the_owner(conn):
    """Administrators may run functions with the owner's rights; everybody may run only those that are listed."""
    assert lines(conn, r"""
        SELECT p.oid::regprocedure::text FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
         WHERE p.pronamespace = 'shardmap'::regnamespace AND p.prosecdef AND a.grantee = 0
        """) == sorted(OPEN_DEFINERS)


def test_nothing_is_granted_by_name(conn):
    """Privileges go to everybody or to the administrators' role, never to a user."""
    assert lines(conn, r"""
        SELECT DISTINCT a.grantee::regrole::text FROM (
            SELECT p.proacl, p.proowner FROM pg_proc p WHERE p.pronamespace = 'shardmap'::regnamespace
            UNION ALL SELECT c.relacl, c.relowner FROM pg_class c WHERE c.relnamespace = 'shardmap'::regnamespace
            UNION ALL SELECT f.fdwacl, f.fdwowner FROM pg_foreign_data_wrapper f WHERE f.fdwname = 'shardmap_fdw') o (acl, owner),
            aclexplode(o.acl) a
         WHERE a.grantee NOT IN (0, o.owner)
        """) == ["shardmap_admin"]
