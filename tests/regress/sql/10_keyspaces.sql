-- Keyspaces: made, refused, dropped; what the catalog itself refuses.
\set SHOW_CONTEXT never
\set VERBOSITY default
SELECT name, strategy, vnodes, allocation, range_order FROM shardmap.keyspace;

SELECT shardmap.create_keyspace('logs', 'modulo');
SELECT shardmap.create_keyspace('even', allocation => 'balanced', vnodes => 16);
SELECT shardmap.create_keyspace('tenants', 'range', range_order => 'integer');
SELECT name, strategy, vnodes, allocation, range_order, version FROM shardmap.keyspace WHERE name <> 'main' ORDER BY name;

-- Refused, each with a reason.
SELECT shardmap.create_keyspace('logs');
SELECT shardmap.create_keyspace('');
SELECT shardmap.create_keyspace(repeat('x', 41));
SELECT shardmap.create_keyspace('k', 'hash');
SELECT shardmap.create_keyspace('k', vnodes => 0);
SELECT shardmap.create_keyspace('k', allocation => 'best');
SELECT shardmap.create_keyspace('k', 'modulo', allocation => 'balanced');
SELECT shardmap.create_keyspace('k', 'range');
SELECT shardmap.create_keyspace('k', 'ring', range_order => 'text');
SELECT shardmap.drop_keyspace('nosuch');
SELECT shardmap.drop_keyspace('main');

SELECT shardmap.drop_keyspace('logs');
SELECT shardmap.drop_keyspace('even');
SELECT count(*) FROM shardmap.keyspace;

-- A superuser who writes the catalog past the functions meets its constraints, and the map as a whole is checked.
\set VERBOSITY terse
INSERT INTO shardmap.keyspace (name, strategy, vnodes, allocation) VALUES ('k', 'range', 1, 'random');
INSERT INTO shardmap.keyspace (name, strategy, vnodes, allocation) VALUES ('k', 'spiral', 1, 'random');
UPDATE shardmap.shard SET number = 1 WHERE name = 'shard-0';
UPDATE shardmap.shard SET number = 1024 WHERE name = 'shard-0';
UPDATE shardmap.shard SET weight = 'NaN' WHERE name = 'shard-0';
UPDATE shardmap.shard SET tokens = '{1,4294967296}' WHERE name = 'shard-0';
UPDATE shardmap.shard SET tokens = '{1,NULL}' WHERE name = 'shard-0';
UPDATE shardmap.shard SET state = 'joining' WHERE name = 'shard-0';
INSERT INTO shardmap.pin VALUES ('tenants', '1', 'shard-0');
INSERT INTO shardmap.key_range VALUES ('main', '1', '2', 'shard-0', 1);
DELETE FROM shardmap.keyspace WHERE name = 'main';
SELECT shardmap.add_shard('r', host, port::integer, dbname, keyspace => 'tenants') FROM shardmap.shards WHERE name = 'shard-0';
INSERT INTO shardmap.key_range VALUES ('tenants', '10', '20', 'r', 1);
INSERT INTO shardmap.key_range VALUES ('tenants', '15', '30', 'r', 1);
INSERT INTO shardmap.key_range VALUES ('tenants', '35', '32', 'r', 1);
INSERT INTO shardmap.key_range VALUES ('tenants', '030', '40', 'r', 1);
SELECT keyspace, lower, upper, shard FROM shardmap.key_range;
-- Direct DML is published to the session at once, as to all others at commit.
SELECT shard_for(15, 'tenants');
DELETE FROM shardmap.key_range;
SELECT shard_for(15, 'tenants');

-- Every object has a comment, every function in SQL or plpgsql a fixed search_path.
SELECT pg_describe_object(d.classid, d.objid, 0) AS without_comment
  FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
 WHERE d.refclassid = 'pg_extension'::regclass AND e.extname = 'pg_shardmap' AND d.deptype = 'e'
   AND d.classid NOT IN ('pg_type'::regclass) AND obj_description(d.objid, d.classid::regclass::name) IS NULL;
SELECT a.attrelid::regclass AS relation, a.attname AS column_without_comment
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
 WHERE c.relnamespace = 'shardmap'::regnamespace AND c.relkind IN ('r', 'v') AND a.attnum > 0
   AND col_description(a.attrelid, a.attnum) IS NULL;
-- run_on_shards carries the caller's search_path to the shards, and qualifies every name instead.
SELECT p.oid::regprocedure AS without_search_path
  FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
 WHERE p.pronamespace = 'shardmap'::regnamespace AND l.lanname IN ('sql', 'plpgsql')
   AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false);
-- CREATE EXTENSION does not check the bodies of functions: here they are.
SELECT count(*) > 100 AS bodies_to_check FROM pg_proc WHERE pronamespace = 'shardmap'::regnamespace;
BEGIN;
SET LOCAL check_function_bodies = on;
DO $$
DECLARE
    definition text;
BEGIN
    FOR definition IN SELECT pg_get_functiondef(p.oid) FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
        WHERE p.pronamespace = 'shardmap'::regnamespace AND l.lanname IN ('sql', 'plpgsql') LOOP
        EXECUTE definition;
    END LOOP;
END
$$;
ROLLBACK;
