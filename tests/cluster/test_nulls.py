"""Every function of the public API says clearly what it wants if it is called with NULLs: nothing of its insides comes out."""

import psycopg
import pytest

# Called with their defaults left out, or filled, they would change the cluster: they have nothing that can be NULL.
FUNCTIONS = r"""
SELECT p.oid::regprocedure::text, p.pronargs - p.pronargdefaults, p.pronargs, p.proretset,
       ARRAY(SELECT CASE t.oid WHEN 'anyelement'::regtype THEN 'int' ELSE format_type(t.oid, NULL) END
               FROM unnest(p.proargtypes) WITH ORDINALITY a (type, at) JOIN pg_type t ON t.oid = a.type ORDER BY a.at)
  FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
  JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
  JOIN pg_extension e ON e.oid = d.refobjid AND d.refclassid = 'pg_extension'::regclass AND e.extname = 'pg_shardmap'
 WHERE p.proname !~ '^_' AND p.pronargs > 0 AND p.prorettype <> 'fdw_handler'::regtype ORDER BY 1
"""
INSIDES = {
    "XX000": "an internal error", "P0002": "a query without rows", "P0003": "a query with too many rows", "P0004": "an assertion",
}


def outcome(conn, sql):
    """None, or what is wrong with the error."""
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(sql)
    except psycopg.Error as error:
        diag = error.diag
        plain = diag.message_primary or ""
        told = INSIDES.get(diag.sqlstate) or ("a text made of NULL" if "EXECUTE" in plain else None)
        if diag.sqlstate == "42601" or not plain or '""' in plain:
            told = "a message that names nothing"
        return told and f"{told}: {diag.sqlstate} {plain}"
    return None


def test_nulls(conn):
    conn.execute("CREATE TABLE t (k int PRIMARY KEY); CREATE TABLE plain (k int PRIMARY KEY)")
    wrong = {}
    functions = conn.execute(FUNCTIONS).fetchall()
    assert len(functions) > 50
    for signature, needed, _, _, types in functions:
        name = signature[:signature.index("(")]
        for count in {needed, len(types)}:
            call = f"SELECT * FROM {name}({', '.join(f'NULL::{kind}' for kind in types[:count])})"
            if count and (told := outcome(conn, call)):
                wrong[call] = told
    for table in ("t", "plain"):
        for call in ("distribute_table('{}', NULL)", "distribute_table('{}', 'k', NULL)", "distribute_reference('{}', NULL)",
                     "undistribute_reference('{}')", "undistribute_table('{}')", "set_fanout_policy('{}', NULL)", "verify('{}', NULL)"):
            call = "SELECT shardmap." + call.format(table)
            if told := outcome(conn, call):
                wrong[call] = told
    assert not wrong, "\n".join(f"{call}\n    {told}" for call, told in wrong.items())
