-- Who may do what: administrators, owners, everyone.
\set SHOW_CONTEXT never
CREATE ROLE regress_admin LOGIN IN ROLE shardmap_admin;
CREATE ROLE regress_user LOGIN;
CREATE ROLE regress_owner2;
GRANT regress_owner2 TO regress_admin;
GRANT CREATE ON SCHEMA public TO regress_admin, regress_user, regress_owner2;
DO $$
DECLARE
    shard text;
BEGIN
    FOR shard IN SELECT name FROM shardmap.shard LOOP
        EXECUTE format('CREATE USER MAPPING FOR regress_admin SERVER %I OPTIONS (user ''postgres'', password_required ''false'')', shard);
    END LOOP;
END
$$;
-- Of what all may execute, one function runs as its owner: it takes no argument.
SELECT p.oid::regprocedure FROM pg_proc p
 WHERE p.pronamespace = 'shardmap'::regnamespace AND has_function_privilege('regress_user', p.oid, 'EXECUTE') AND p.prosecdef;
-- What runs as its owner takes names and values, and is for administrators, or is an event trigger.
SELECT p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace = 'shardmap'::regnamespace AND p.prosecdef ORDER BY 1::text COLLATE "C";
SELECT c.relname, has_table_privilege('regress_user', c.oid, 'SELECT') AS reads,
    has_table_privilege('regress_admin', c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE') AS writes
  FROM pg_class c WHERE c.relnamespace = 'shardmap'::regnamespace AND c.relkind IN ('r', 'v') ORDER BY 1;

-- Everyone reads.
SET ROLE regress_user;
SELECT name, state FROM shardmap.shards;
SELECT count(*) FROM shardmap.tokens;
SELECT shard_for(7) IS NOT NULL AS answered;
SELECT count(*) FROM shardmap.ring_balance();
SELECT jsonb_object_keys(shardmap.export_map());
SELECT count(*) > 0 AS some FROM shardmap.settings;
\set VERBOSITY terse
SELECT shardmap.create_keyspace('k');
SELECT shardmap.drop_keyspace('main');
SELECT shardmap.add_shard('s');
SELECT shardmap.drop_shard('shard-0');
SELECT shardmap.set_shard_weight('shard-0', 2);
SELECT shardmap.drain_shard('shard-0');
SELECT shardmap.pin_key(1, 'shard-0');
SELECT shardmap.unpin_key(1);
SELECT shardmap.set_range('main', '1', '2', 'shard-0');
SELECT shardmap.preview_change();
SELECT shardmap.import_map('{}');
SELECT shardmap.set_fanout_policy('pg_class', 'allow');
SELECT shardmap.publish_map('main');
SELECT shardmap._lock_keyspace('main');
SELECT shardmap._ensure_key_class('main', 'integer');
SELECT shardmap.remote_rows('shard-0', 'SELECT 1');
SELECT shardmap.remote_execute('shard-0', 'SELECT 1');
SELECT shardmap.run_on_shards('SELECT 1');
CREATE TABLE mine (k integer);
SELECT shardmap.distribute_table('mine', 'k');
UPDATE shardmap.keyspace SET vnodes = 1;
CREATE SERVER s FOREIGN DATA WRAPPER shardmap_fdw;
ALTER SERVER "shard-0" OPTIONS (SET host 'elsewhere');
CREATE TABLE shardmap.t (k integer);
RESET ROLE;

-- An administrator who is no superuser.
SET ROLE regress_admin;
SET shardmap.fanout_policy = 'allow';
UPDATE shardmap.keyspace SET vnodes = 1;
SELECT shardmap.publish_map('main');
SELECT shardmap._create_key_class('main', 'bool', 'x', 'y');
SELECT shardmap.distribute_table('mine', 'k');
CREATE TABLE t (k integer PRIMARY KEY, v text);
INSERT INTO t SELECT i, i FROM generate_series(1, 50) i;
CREATE TABLE u (k integer PRIMARY KEY);
ALTER TABLE u OWNER TO regress_owner2;
SELECT shardmap.distribute_table('t', 'k'), shardmap.distribute_table('u', 'k');
SELECT count(*), count(DISTINCT tableoid) FROM t;
SELECT relname, relowner::regrole FROM pg_class WHERE relname ~ '^[tu](_\d)?$' ORDER BY 1;
SELECT shardmap.set_fanout_policy('t', 'notice');
SELECT shardmap.create_keyspace('k', 'modulo'), shardmap.drop_keyspace('k');
SELECT shardmap.pin_key(1000, 'shard-1'), shardmap.unpin_key(1000);
SELECT count(*) FROM shardmap.preview_change(add => '{shard-9}');
SELECT shardmap.drain_shard('shard-0'), shardmap.drain_shard('shard-0', false);
-- Without a password a superuser must say that none is needed.
SELECT shardmap.add_shard('shard-9', host, port::integer, 'postgres') FROM shardmap.shards WHERE name = 'shard-0';
GRANT SELECT ON t TO regress_user;
-- No row of a table with forced row security is left behind unseen.
CREATE TABLE forced (k integer PRIMARY KEY);
INSERT INTO forced VALUES (1), (2);
ALTER TABLE forced ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
SELECT shardmap.distribute_table('forced', 'k');
RESET ROLE;

-- No function of a table's owner runs with more rights than his, not even a constant call in a constraint.
SET ROLE regress_admin;
CREATE FUNCTION whoami(integer) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
    IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN RAISE WARNING 'running as a superuser'; END IF; RETURN true; END $$;
SELECT shard, success FROM shardmap.run_on_shards('CREATE FUNCTION public.whoami(integer) RETURNS boolean IMMUTABLE LANGUAGE sql AS ''SELECT true''');
CREATE TABLE trap (k integer PRIMARY KEY CHECK (whoami(1)), g boolean GENERATED ALWAYS AS (whoami(k)) STORED, d boolean DEFAULT whoami(2));
INSERT INTO trap VALUES (1);
SELECT shardmap.distribute_table('trap', 'k');
SELECT shardmap.undistribute_table('trap');
DROP TABLE trap;
RESET ROLE;

-- Everyone queries through a user mapping of his own.
SET ROLE regress_user;
\set VERBOSITY sqlstate
SELECT * FROM t WHERE k = 7;
\set VERBOSITY terse
RESET ROLE;
SELECT count(*) FROM (SELECT shardmap.remote_execute(name, 'CREATE ROLE regress_remote', false) FROM shardmap.shard WHERE number = 0) x;
DO $$
DECLARE
    shard text;
BEGIN
    FOR shard IN SELECT name FROM shardmap.shard LOOP
        EXECUTE format('CREATE USER MAPPING FOR regress_user SERVER %I OPTIONS (user ''regress_remote'', password_required ''false'')', shard);
    END LOOP;
END
$$;
SELECT shardmap.remote_execute('shard-0', 'ALTER ROLE regress_remote LOGIN');
SET ROLE regress_user;
SELECT * FROM t WHERE k = 7;
RESET ROLE;
SELECT shardmap.grant_on_shards('t');
SET ROLE regress_user;
SELECT * FROM t WHERE k = 7;
SELECT count(*) FROM t;
INSERT INTO t VALUES (51, 'x');
SELECT * FROM u;
RESET ROLE;
-- Tables distributed later give the rights at once; column rights too.
CREATE TABLE later (k integer PRIMARY KEY, v integer, w integer);
INSERT INTO later VALUES (1, 2, 3);
GRANT SELECT, INSERT, DELETE ON later TO regress_user;
GRANT UPDATE (v) ON later TO regress_user;
SELECT shardmap.distribute_table('later', 'k');
SET ROLE regress_user;
INSERT INTO later VALUES (2, 3, 4);
UPDATE later SET v = 5 WHERE k = 2 RETURNING *;
UPDATE later SET w = 5 WHERE k = 2;
DELETE FROM later WHERE k = 1;
SELECT * FROM later ORDER BY k;
RESET ROLE;
SELECT DISTINCT r FROM shardmap.shard, shardmap.remote_rows(name, $$SELECT privilege_type FROM information_schema.role_table_grants
    WHERE grantee = 'regress_remote' AND table_name = 'later'$$) r ORDER BY 1;
-- DROP TABLE by its owner who is no administrator leaves the shards' tables.
ALTER TABLE later OWNER TO regress_user;
SET ROLE regress_user;
\set VERBOSITY default
DROP TABLE later;
RESET ROLE;
SELECT table_name FROM shardmap.tables;
SELECT count(*) FROM shardmap.shard, shardmap.remote_rows(name, 'SELECT relname FROM pg_class WHERE relname = ''later''') r;
DROP TABLE t, u;
SELECT count(*) FROM shardmap.shard, shardmap.remote_rows(name, 'SELECT relname FROM pg_class WHERE relname ~ ''^[tu]$''') r;
SELECT shard, success FROM shardmap.run_on_shards('DROP TABLE public.later');
SELECT shardmap.remote_execute(name, 'DROP OWNED BY regress_remote') FROM shardmap.shard;
SELECT shardmap.remote_execute('shard-0', 'DROP ROLE regress_remote', false);
DROP OWNED BY regress_admin, regress_user, regress_owner2 CASCADE;
DROP ROLE regress_admin, regress_user, regress_owner2;
