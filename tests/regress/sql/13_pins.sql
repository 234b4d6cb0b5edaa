-- Pins: a key with a shard of its own.
\set SHOW_CONTEXT never
SET shardmap.fanout_policy = 'allow';
CREATE TABLE t (k integer PRIMARY KEY, v text);
INSERT INTO t SELECT i, i FROM generate_series(1, 100) i;
SELECT shardmap.distribute_table('t', 'k');
SELECT shard_for(1) AS home, CASE shard_for(1) WHEN 'shard-0' THEN 'shard-1' ELSE 'shard-0' END AS away \gset
-- Refused while rows of the key are elsewhere; where they are is fine.
SELECT shardmap.pin_key(1, :'away');
SELECT shardmap.pin_key(1, :'home');
SELECT shardmap.unpin_key(1);
-- The map is changed in a transaction of its own.
BEGIN;
DELETE FROM t WHERE k = 1;
SELECT shardmap.pin_key(1, :'away');
ROLLBACK;
DELETE FROM t WHERE k = 1;
SELECT shardmap.pin_key(1, :'away');
INSERT INTO t VALUES (1, 'moved');
SELECT shard_for(1) = :'away' AS away, count(*) FROM t WHERE k = 1;
SELECT shardmap.unpin_key(1);
SELECT shardmap.drop_shard(:'away');
SELECT key, shard = :'away' AS away FROM shardmap.pin;

-- A key is written as its type: text that the table's type reads as another key is refused.
SELECT shardmap.pin_key('1000', 'shard-2');
SELECT shardmap.pin_key('01001', 'shard-2');
SELECT shardmap.pin_key(1002::bigint, 'shard-2'), shardmap.pin_key(1003.00, 'shard-2');
SELECT shardmap.pin_key('not a number', 'shard-3');
SELECT shardmap.pin_key(1.5::float8, 'shard-3');
SELECT shardmap.pin_key(NULL::integer, 'shard-3');
SELECT shardmap.pin_key(7, 'nosuch');
SELECT shardmap.pin_key(7, 'shard-0', 'nosuch');
SELECT shardmap.unpin_key(7);
SELECT key, shard FROM shardmap.pin WHERE key <> '1' ORDER BY key;
SELECT shard_for(1000), shard_for('1000'), shard_for(1000.0), shard_for('not a number');
-- Pinned anew.
SELECT shardmap.pin_key(1000, 'shard-3');
SELECT shard_for(1000);

-- Keys with quotes and backslashes, and of other types.
SELECT shardmap.create_keyspace('k');
SELECT shardmap.add_shard('k' || number, host, port::integer, dbname, keyspace => 'k') FROM shardmap.shards WHERE keyspace = 'main' AND number < 2;
CREATE TABLE q (k text PRIMARY KEY, v int);
SELECT shardmap.distribute_table('q', 'k', 'k');
INSERT INTO q SELECT E'it''s \\ "' || i, i FROM generate_series(1, 8) i;
SELECT shard_for(E'it''s \\ "3', 'k') AS home, CASE shard_for(E'it''s \\ "3', 'k') WHEN 'k0' THEN 'k1' ELSE 'k0' END AS away \gset
SELECT shardmap.pin_key(E'it''s \\ "3', :'home', 'k');
SET standard_conforming_strings = off;
SELECT shardmap.pin_key(E'it''s \\ "3', :'away', 'k');
SELECT shardmap.unpin_key(E'it''s \\ "3', 'k');
RESET standard_conforming_strings;
CREATE TABLE u (k uuid PRIMARY KEY);
CREATE TABLE d (k timestamptz PRIMARY KEY);
DROP TABLE q;
SELECT shardmap.distribute_table('u', 'k', 'k');
SELECT shardmap.pin_key('A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11', 'k1', 'k');
SELECT shardmap.pin_key('A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'::uuid, 'k1', 'k');
INSERT INTO u VALUES ('{a0eebc999c0b4ef8bb6d6bb9bd380a11}');
SELECT count(*) FROM shardmap.remote_rows('k1', 'SELECT k FROM public.u');
SELECT shardmap.pin_key('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 'k0', 'k');
DROP TABLE u;
SELECT shardmap.distribute_table('d', 'k', 'k');
SET datestyle = 'German'; SET timezone = 'Asia/Kolkata';
SELECT shardmap.pin_key('2024-03-01 12:00+00'::timestamptz, 'k0', 'k');
INSERT INTO d VALUES ('2024-03-01 17:30');
SELECT shardmap.pin_key('2024-03-01 12:00+00'::timestamptz, 'k1', 'k');
SELECT key FROM shardmap.pin WHERE keyspace = 'k' AND shard = 'k0';
