-- The map as it should be, and how it gets there part by part, on a ring and under modulo. Rows are not moved here.
\set SHOW_CONTEXT never
SET shardmap.fanout_policy = 'allow';
SELECT host, port FROM shardmap.shards WHERE name = 'shard-0' \gset
SELECT count(shardmap.remote_execute('shard-0', format('CREATE DATABASE %I', 'parts_' || n), false)) FROM generate_series(0, 4) n;
CREATE TEMPORARY TABLE keys AS SELECT k, 'shard-0' AS owner FROM generate_series(1, 800) k;
-- By the definitions alone: the token, and MD5 as a number of 128 bits.
CREATE FUNCTION pg_temp.md5_mod(k integer, modulus integer) RETURNS integer LANGUAGE sql AS $$
    SELECT mod(sum(('x' || substr(md5(k::text), 1 + 8 * n, 8))::bit(32)::bigint * 4294967296::numeric ^ (3 - n)), modulus)::integer FROM generate_series(0, 3) n $$;
-- Applies what is wanted part by part in the order of `direction`; says after each whether exactly its keys changed hands.
CREATE FUNCTION pg_temp.follow(space text, direction integer) RETURNS TABLE (giver text, gainer text, keys bigint, wrong bigint, others bigint) LANGUAGE plpgsql AS $$
DECLARE
    part record;
BEGIN
    FOR part IN SELECT p.* FROM shardmap._map_parts(shardmap._map_json(jsonb_build_array(shardmap._keyspace_json(space))),
            shardmap._map_json(jsonb_build_array(shardmap._wanted_keyspace(space)))) WITH ORDINALITY p ORDER BY p.ordinality * direction LOOP
        UPDATE keys SET owner = shard_for(k, space);
        PERFORM shardmap._reassign(space, part.gainer, part.arcs, part.modulus, part.remainders);
        PERFORM shardmap.publish_map(space);
        giver := part.giver;
        gainer := part.gainer;
        SELECT count(*) FILTER (WHERE i.inside), count(*) FILTER (WHERE i.inside AND (owner, shard_for(k, space)) <> (part.giver, part.gainer)),
            count(*) FILTER (WHERE NOT i.inside AND owner <> shard_for(k, space)) INTO keys, wrong, others
          FROM keys, LATERAL (SELECT CASE WHEN part.arcs IS NULL THEN pg_temp.md5_mod(k, part.modulus) = ANY (part.remainders)
            ELSE token_for(k) <@ part.arcs END AS inside) i;
        RETURN NEXT;
    END LOOP;
END
$$;

-- A ring with rows: a shard joins, another is to be emptied, a third gets twice the weight. Nothing changes hands yet.
CREATE TABLE t (k integer PRIMARY KEY);
SELECT shardmap.distribute_table('t', 'k');
INSERT INTO t SELECT generate_series(1, 1000);
SELECT r[1] AS rows FROM shardmap.shard, shardmap.remote_rows(name, 'ANALYZE public.t; SELECT count(*)::text FROM public.t') r ORDER BY number;
SELECT shardmap._wanted_keyspace('main');
SELECT shardmap.add_shard('joined', :'host', :port, 'parts_0');
SELECT shardmap.drain_shard('shard-1');
SELECT shardmap.set_shard_weight('shard-2', 2);
SELECT name, state, weight, vnodes, round(share::numeric, 3) AS share, round(wanted_share::numeric, 3) AS wanted FROM shardmap.shards;
SELECT count(*) FROM t WHERE shard_for(k) IN ('joined');
-- One after the other, from either end: the same map, to the token.
BEGIN;
SELECT * FROM pg_temp.follow('main', 1);
SELECT shardmap._wanted_keyspace('main');
SELECT name, state, vnodes, share = wanted_share AS so FROM shardmap.shards;
SELECT shardmap.map_digest('main') AS digest \gset
ROLLBACK;
BEGIN;
SELECT count(*) AS parts, sum(wrong) AS wrong, sum(others) AS others FROM pg_temp.follow('main', -1);
SELECT shardmap.map_digest('main') = :'digest' AS same;
-- Back again: what is wanted is not forgotten.
SELECT shardmap._reassign('main', 'shard-0', '{[0,4294967296)}', NULL, NULL);
SELECT shardmap.publish_map('main') > 0 AS published;
SELECT name, state, round(share::numeric, 3) AS share, round(wanted_share::numeric, 3) AS wanted FROM shardmap.shards;
ROLLBACK;
-- Given up half way, the map is whole, and exported with what is wanted.
BEGIN;
SELECT shardmap._reassign('main', 'joined', '{[10,20),[4000000000,4294967296)}', NULL, NULL);
SELECT shardmap.publish_map('main') > 0 AS published;
SELECT shard, token FROM shardmap.tokens WHERE shard = 'joined' ORDER BY token;
SELECT (k -> 'shards' -> 4) - 'options' - 'wanted_tokens' AS shard, jsonb_array_length(k -> 'shards' -> 4 -> 'wanted_tokens') AS wanted
  FROM jsonb_array_elements(shardmap.export_map() -> 'keyspaces') k WHERE k ->> 'name' = 'main';
SELECT sum(keys) AS keys, sum(wrong) AS wrong, sum(others) AS others FROM pg_temp.follow('main', 1);
SELECT shardmap.map_digest('main') = :'digest' AS same;
ROLLBACK;
-- Taken back, nothing is left to do.
SELECT shardmap.drain_shard('shard-1', false);
SELECT shardmap.set_shard_weight('shard-2', 1);
SELECT shardmap.drop_shard('joined');
SELECT shardmap._wanted_keyspace('main');
-- Refused.
SELECT shardmap._reassign('main', 'nosuch', '{[0,1)}', NULL, NULL);
SELECT shardmap._reassign('main', 'shard-0', '{[0,4294967297)}', NULL, NULL);
SELECT shardmap._reassign('main', 'shard-0', '{[-1,1)}', NULL, NULL);
SELECT shardmap._reassign('main', 'shard-0', NULL, 2, '{1}');
SELECT shardmap._reassign('main', 'shard-0', NULL, NULL, NULL);
DELETE FROM t;
SELECT shardmap.undistribute_table('t');
DROP TABLE t;

-- Modulo: four shards become five, then three.
SELECT shardmap.create_keyspace('m', 'modulo');
SELECT shardmap.add_shard('m' || n, :'host', :port, 'parts_' || n, keyspace => 'm') FROM generate_series(0, 3) n;
CREATE TABLE t (k integer PRIMARY KEY);
SELECT shardmap.distribute_table('t', 'k', 'm');
INSERT INTO t SELECT generate_series(1, 1000);
\set VERBOSITY terse
SELECT shardmap.add_shard('m4', :'host', :port, 'parts_4', keyspace => 'm');
\set VERBOSITY default
SELECT name, state, share, wanted_share FROM shardmap.shards WHERE keyspace = 'm';
BEGIN;
SELECT * FROM pg_temp.follow('m', -1) LIMIT 5;
SELECT slots FROM shardmap.keyspace WHERE name = 'm';
SELECT shardmap._wanted_keyspace('m');
SELECT shardmap.map_digest('m') AS digest \gset
ROLLBACK;
BEGIN;
SELECT shardmap._reassign('m', 'm4', NULL, 20, '{0,4,19}');
SELECT shardmap.publish_map('m') > 0 AS published;
SELECT slots FROM shardmap.keyspace WHERE name = 'm';
SELECT name, state, share, wanted_share FROM shardmap.shards WHERE keyspace = 'm';
-- Entries of the map: one a slot, and each key's is that of its owner.
SELECT entry, owner FROM shardmap._map_entries('m') WHERE owner = 'm4' ORDER BY entry;
SELECT format('SELECT count(*) AS keys, count(*) FILTER (WHERE e.owner <> shard_for(s.i, ''m'')) AS wrong FROM (SELECT k AS i, k::text AS k, md5(k::text) AS h FROM keys) s
    JOIN shardmap._map_entries(''m'') e ON e.entry = %s', shardmap._entry_sql('m')) \gexec
-- Exported.
SELECT k -> 'slots' AS slots FROM jsonb_array_elements(shardmap.export_map() -> 'keyspaces') k WHERE k ->> 'name' = 'm';
SELECT count(*), sum(wrong) AS wrong, sum(others) AS others FROM pg_temp.follow('m', 1);
SELECT shardmap.map_digest('m') = :'digest' AS same;
ROLLBACK;
\set VERBOSITY terse
SELECT shardmap.drain_shard('m1');
SELECT shardmap.drain_shard('m2');
\set VERBOSITY default
BEGIN;
SELECT count(*), sum(wrong) AS wrong, sum(others) AS others FROM pg_temp.follow('m', 1);
SELECT slots FROM shardmap.keyspace WHERE name = 'm';
SELECT name, state, round(share::numeric, 3) AS share, round(wanted_share::numeric, 3) AS wanted FROM shardmap.shards WHERE keyspace = 'm';
ROLLBACK;
-- Without rows all of it is done at once; a shard without a slot can go, and the plain rule is back when both are gone.
DELETE FROM t;
SELECT shardmap.drain_shard('m2', false);
SELECT slots FROM shardmap.keyspace WHERE name = 'm';
SELECT shardmap.drain_shard('m2');
INSERT INTO t SELECT generate_series(1, 1000);
SELECT slots FROM shardmap.keyspace WHERE name = 'm';
SELECT giver, gainer, round(fraction::numeric, 3) AS fraction FROM shardmap.preview_change('m', remove => '{m4}');
SELECT shardmap.drop_shard('m1');
SELECT shardmap.drop_shard('m4');
SELECT slots FROM shardmap.keyspace WHERE name = 'm';
SELECT shardmap.drop_shard('m2');
SELECT slots FROM shardmap.keyspace WHERE name = 'm';
SELECT count(*), count(*) FILTER (WHERE shard_for(k, 'm') <> (ARRAY['m0', 'm3', 'm4'])[1 + pg_temp.md5_mod(k, 3)]) AS wrong FROM t;
-- What the catalog refuses.
\set VERBOSITY terse
UPDATE shardmap.keyspace SET slots = '{0}' WHERE name = 'main';
UPDATE shardmap.keyspace SET slots = '{}' WHERE name = 'm';
UPDATE shardmap.keyspace SET slots = '{0,NULL}' WHERE name = 'm';
UPDATE shardmap.keyspace SET slots = '{0,1024}' WHERE name = 'm';
UPDATE shardmap.keyspace SET slots = '{0,1}' WHERE name = 'm';
UPDATE shardmap.keyspace SET slots = array_fill(0, ARRAY[65537]) WHERE name = 'm';
UPDATE shardmap.shard SET wanted_tokens = '{4294967296}' WHERE name = 'm0';
DELETE FROM t;
SELECT shardmap.undistribute_table('t');
DROP TABLE t;
-- Imported with slots and wanted slots, and again without.
SELECT jsonb_build_object('layout', 1, 'keyspaces', jsonb_build_array(k || '{"version": 1000}')) AS map
  FROM jsonb_array_elements(shardmap.export_map() -> 'keyspaces') k WHERE k ->> 'name' = 'm' \gset
SELECT shardmap.import_map(jsonb_set(:'map', '{keyspaces,0}', :'map'::jsonb -> 'keyspaces' -> 0 || '{"slots": [3, 0, 3], "wanted_slots": [0, 3]}'));
SELECT slots, wanted_slots, version FROM shardmap.keyspace WHERE name = 'm';
SELECT k -> 'slots' AS slots, k -> 'wanted_slots' AS wanted FROM jsonb_array_elements(shardmap.export_map() -> 'keyspaces') k WHERE k ->> 'name' = 'm';
SELECT name, share, wanted_share FROM shardmap.shards WHERE keyspace = 'm';
SELECT shardmap.import_map(:'map');
SELECT slots, wanted_slots, version FROM shardmap.keyspace WHERE name = 'm';
SELECT shardmap.drop_shard(name) FROM shardmap.shard WHERE keyspace = 'm';
SELECT shardmap.drop_keyspace('m');

\set VERBOSITY default
-- Ranges of a shard that is to be emptied go to their neighbours' owners.
SELECT shardmap.create_keyspace('r', 'range', range_order => 'integer');
SELECT shardmap.add_shard('r' || n, :'host', :port, 'parts_' || n, keyspace => 'r') FROM generate_series(0, 2) n;
SELECT shardmap.set_range('r', NULL, '100', 'r0') > 0 AND shardmap.set_range('r', '100', '200', 'r1') > 0
    AND shardmap.set_range('r', '200', '300', 'r2') > 0 AND shardmap.set_range('r', '400', NULL, 'r1') > 0 AS set;
CREATE TABLE t (k integer PRIMARY KEY);
SELECT shardmap.distribute_table('t', 'k', 'r');
INSERT INTO t SELECT generate_series(1, 299);
SELECT shardmap.drain_shard('r1');
SELECT p.giver, p.gainer, p.lower, p.upper FROM shardmap._map_parts(shardmap._map_json(jsonb_build_array(shardmap._keyspace_json('r'))),
    shardmap._map_json(jsonb_build_array(shardmap._wanted_keyspace('r')))) p;
SELECT lower, upper, shard FROM shardmap.key_range ORDER BY lower::integer NULLS FIRST;
SELECT shardmap.drain_shard('r1', false);
SELECT shardmap._wanted_keyspace('r');
DELETE FROM t;
SELECT shardmap.drain_shard('r1');
SELECT lower, upper, shard FROM shardmap.key_range ORDER BY lower::integer NULLS FIRST;
SELECT shardmap.undistribute_table('t');
DROP TABLE t;
SELECT count(shardmap.remote_execute('shard-0', format('DROP DATABASE %I WITH (FORCE)', 'parts_' || n), false)) FROM generate_series(0, 4) n;
