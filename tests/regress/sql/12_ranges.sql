-- The directory: ranges are given, split and merged by compare-and-swap.
\set SHOW_CONTEXT never
SET shardmap.fanout_policy = 'allow';
SELECT shardmap.create_keyspace('r', 'range', range_order => 'integer');
SELECT shardmap.add_shard('r' || number, host, port::integer, dbname, keyspace => 'r') FROM shardmap.shards WHERE keyspace = 'main' AND number < 2;
SELECT shardmap.set_range('main', '1', '2', 'shard-0');
SELECT shardmap.set_range('r', NULL, '100', 'r0');
SELECT shardmap.set_range('r', '0100', NULL, 'r1');
SELECT lower, upper, shard FROM shardmap.key_range ORDER BY lower NULLS FIRST;

-- Refused.
SELECT shardmap.set_range('r', '50', '150', 'r1');
SELECT shardmap.set_range('r', '5', '5', 'r1');
SELECT shardmap.set_range('r', '5', 'x', 'r1');
SELECT shardmap.set_range('r', NULL, '100', 'shard-0');
SELECT shardmap.set_range('r', NULL, '100', 'r1');
SELECT shardmap.set_range('r', '100', NULL, 'r0', 1);
SELECT shardmap.drop_shard('r0');
SELECT shardmap.preview_change('r', add => '{r2}');
SELECT shardmap.ring_balance('r');

-- A stale version changes nothing.
SELECT version AS seen FROM shardmap.key_range WHERE shard = 'r1' \gset
SELECT shardmap.split_range('r', '200', :seen) > :seen AS split;
SELECT shardmap.split_range('r', '300', :seen);
SELECT shardmap.merge_ranges('r', '200', :seen);
\set VERBOSITY sqlstate
SELECT shardmap.set_range('r', '200', NULL, 'r0', :seen);
\set VERBOSITY default
SELECT lower, upper, shard FROM shardmap.key_range ORDER BY lower NULLS FIRST;
SELECT shardmap.split_range('r', '100', :seen);
SELECT shardmap.merge_ranges('r', '150', :seen);
SELECT max(version) AS seen FROM shardmap.key_range \gset
SELECT shardmap.merge_ranges('r', '200', :seen) > :seen AS merged;
SELECT lower, upper, shard FROM shardmap.key_range ORDER BY lower NULLS FIRST;

-- Rows stay with their owner.
CREATE TABLE tenant (id bigint PRIMARY KEY, name text);
CREATE TABLE wrong (id text PRIMARY KEY);
SELECT shardmap.distribute_table('wrong', 'id', 'r');
SELECT shardmap.distribute_table('tenant', 'id', 'r');
INSERT INTO tenant SELECT i * 10, i FROM generate_series(1, 20) i;
SELECT tableoid::regclass, count(*), min(id), max(id) FROM tenant GROUP BY 1 ORDER BY 1;
SELECT shard_for(99, 'r'), shard_for(100, 'r'), shard_for(101::numeric, 'r');
SELECT version AS seen FROM shardmap.key_range WHERE shard = 'r1' \gset
SELECT shardmap.set_range('r', '100', NULL, 'r0', :seen);
SELECT shardmap.split_range('r', '1000', :seen) AS seen \gset
SELECT shardmap.set_range('r', '1000', NULL, 'r0', :seen) AS seen \gset
SELECT shard_for(999, 'r'), shard_for(1000, 'r');
-- The same owner again is no change.
SELECT shardmap.set_range('r', '1000', NULL, 'r0', :seen) = :seen AS unchanged;
-- To none: the keys have no owner then, and are refused.
SELECT shardmap.set_range('r', '1000', NULL, NULL, :seen) > :seen AS done;
INSERT INTO tenant VALUES (2000, 'nobody''s');
SELECT * FROM tenant WHERE id = 2000;
SELECT version AS seen FROM shardmap.key_range WHERE shard = 'r1' \gset
SELECT shardmap.set_range('r', '100', '1000', NULL, :seen);
-- A pinned key does not follow the range that it is in.
SELECT shardmap.pin_key(500, 'r0', 'r');
INSERT INTO tenant VALUES (500, 'pinned');
SELECT tableoid::regclass, * FROM tenant WHERE id = 500;
DELETE FROM tenant WHERE id BETWEEN 100 AND 499;
SELECT shardmap.set_range('r', '100', '1000', NULL, :seen) > :seen AS done;
SELECT shardmap.unpin_key(500, 'r');

-- By bytes of the canonical text.
SELECT shardmap.create_keyspace('t', 'range', range_order => 'text');
SELECT shardmap.add_shard('t' || number, host, port::integer, dbname, keyspace => 't') FROM shardmap.shards WHERE keyspace = 'main' AND number < 2;
SELECT shardmap.set_range('t', NULL, 'm', 't0') > 0 AS low, shardmap.set_range('t', 'm', NULL, 't1') > 0 AS high;
CREATE TABLE word (w text PRIMARY KEY);
INSERT INTO word VALUES (''), ('A'), ('Z'), ('a'), ('l'), ('m'), ('z'), ('é');
SELECT shardmap.distribute_table('word', 'w', 't');
SELECT tableoid::regclass, array_agg(w ORDER BY w COLLATE "C") FROM word GROUP BY 1 ORDER BY 1;
SELECT version AS seen FROM shardmap.key_range WHERE shard = 't1' \gset
SELECT shardmap.split_range('t', 'zz', :seen) AS seen \gset
SELECT shardmap.set_range('t', 'm', 'zz', 't0', :seen);
SELECT shardmap.set_range('t', 'zz', NULL, 't0', :seen);
SELECT tableoid::regclass, w, shard_for(w, 't') FROM word WHERE w = 'é';
