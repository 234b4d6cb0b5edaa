-- Exported maps: exact there and back, and refused where they do not fit.
\set SHOW_CONTEXT never
SELECT shardmap.create_keyspace('even', allocation => 'balanced', vnodes => 4);
SELECT shardmap.create_keyspace('r', 'range', range_order => 'text');
SELECT shardmap.add_shard('e' || number, host, port::integer, dbname, 'user=postgres', weight => 1 / 3.0, keyspace => 'even')
  FROM shardmap.shards WHERE keyspace = 'main' AND number < 3;
SELECT shardmap.add_shard('r0', host, port::integer, dbname, keyspace => 'r') FROM shardmap.shards WHERE name = 'shard-0';
SELECT shardmap.set_range('r', NULL, E'm''\\"', 'r0') > 0 AS set;
SELECT shardmap.pin_key(E'it''s \\ "', 'e2', 'even');
SELECT jsonb_pretty(k #- '{shards,0,options}') FROM jsonb_array_elements(shardmap.export_map() -> 'keyspaces') k WHERE k ->> 'name' = 'r';
SELECT jsonb_object_keys(shardmap.export_map());
SELECT position('postgres' IN shardmap.export_map()::text) AS user_names;
SELECT shardmap.export_map() AS map \gset

-- What is here already is left alone.
SELECT shardmap.import_map(:'map');
SELECT shardmap.export_map() = :'map'::jsonb AS same;

-- Taken over where it is unknown, servers too; then it is the same, to the version.
SELECT shardmap.unpin_key(E'it''s \\ "', 'even');
SELECT shardmap.drop_shard(name) FROM shardmap.shard WHERE keyspace = 'even' ORDER BY number DESC;
SELECT shardmap.drop_keyspace('even');
SELECT shardmap.import_map(:'map');
SELECT shardmap.export_map() = :'map'::jsonb AS same;
SELECT srvname, srvowner::regrole, count(*) FROM pg_foreign_server JOIN pg_foreign_data_wrapper w ON w.oid = srvfdw
 WHERE srvname LIKE 'e_' GROUP BY 1, 2 ORDER BY 1;
SELECT count(*) FROM pg_user_mappings WHERE srvname LIKE 'e_';
SELECT shard_for(E'it''s \\ "', 'even');

-- Refused.
SELECT shardmap.import_map('{}');
SELECT shardmap.import_map('{"layout": 2, "keyspaces": []}');
SELECT shardmap.import_map('{"layout": 1, "keyspaces": [], "more": 1}');
SELECT shardmap.import_map('{"layout": 1}');
SELECT shardmap.import_map(jsonb_set(:'map', '{keyspaces,0,shards,1,number}', '0'));
SELECT shardmap.set_shard_weight('e0', 2);
SELECT shardmap.import_map(:'map');
SELECT shardmap.import_map(jsonb_set(:'map', '{keyspaces,0,version}', '100'));
SELECT weight, (SELECT version FROM shardmap.keyspace WHERE name = 'even') FROM shardmap.shard WHERE name = 'e0';
CREATE TABLE t (k integer);
SELECT shardmap.distribute_table('t', 'k');
SELECT shardmap.import_map(jsonb_build_object('layout', 1, 'keyspaces', jsonb_build_array(k || '{"version": 100}')))
  FROM jsonb_array_elements(shardmap.export_map() -> 'keyspaces') k WHERE k ->> 'name' = 'main';
