-- Shards: added, previewed, weighted, drained, dropped; nothing strands rows.
\set SHOW_CONTEXT never
SET shardmap.fanout_policy = 'allow';
SELECT keyspace, name, number, state, weight, vnodes, round(share::numeric, 4) AS share FROM shardmap.shards;
SELECT host, port, dbname FROM shardmap.shards WHERE name = 'shard-0' \gset
SELECT :'dbname' || '_x' AS other \gset
SELECT shardmap.remote_execute('shard-0', format('CREATE DATABASE %I', :'other'), false);

-- Refused, and nothing is left behind.
SELECT shardmap.add_shard('shard-0', :'host', :port, :'other');
SELECT shardmap.add_shard('', :'host', :port, :'other');
SELECT shardmap.add_shard(NULL, :'host', :port, :'other');
SELECT shardmap.add_shard('shard-4', :'host', :port, :'other', weight => 0);
SELECT shardmap.add_shard('shard-4', :'host', :port, :'other', weight => 'NaN');
SELECT shardmap.add_shard('shard-4', :'host', :port, :'other', weight => 1000);
SELECT shardmap.add_shard('shard-4', :'host', :port, :'other', keyspace => 'nosuch');
\set VERBOSITY terse
SELECT shardmap.add_shard('shard-4', :'host', :port, :'other', 'colour=blue');
\set VERBOSITY default
SELECT shardmap.add_shard('shard-4', :'host', :port, :'other', 'sslmode');
SELECT shardmap.add_shard('shard-4', :'host', :port, :'other', $$user='unfinished$$);
SELECT shardmap.add_shard('shard-4', :'host', :port, :'dbname');
SELECT shardmap.add_shard('shard-4', current_setting('listen_addresses'), current_setting('port')::integer, current_database());
\set VERBOSITY sqlstate
SELECT shardmap.add_shard('shard-4', '127.0.0.1', 1, 'nosuch');
SELECT shardmap.add_shard('shard-4', :'host', :port, 'no such database');
\set VERBOSITY default
SELECT srvname FROM pg_foreign_server ORDER BY srvname;
SELECT count(*) FROM pg_user_mappings;

-- An empty keyspace takes every change at once.
SELECT shardmap.add_shard('shard-4', options => format($$host=%s port=%s dbname='%s' user=postgres application_name='it\'s \\ ours'$$,
    :'host', :'port', :'other'), weight => 2);
SELECT name, number, state, weight, vnodes FROM shardmap.shards WHERE name = 'shard-4';
SELECT o.* FROM pg_foreign_server s, pg_options_to_table(s.srvoptions) o
 WHERE s.srvname = 'shard-4' AND o.option_name NOT IN ('port', 'dbname') ORDER BY 1;
SELECT m.umoptions FROM pg_user_mappings m WHERE m.srvname = 'shard-4';
SELECT shardmap.set_shard_weight('shard-4', 0.5);
SELECT name, weight, vnodes FROM shardmap.shards WHERE name = 'shard-4';
SELECT shardmap.drain_shard('shard-4');
SELECT name, state, vnodes, share FROM shardmap.shards WHERE name = 'shard-4';
SELECT shardmap.drain_shard('shard-4');
SELECT shardmap.drain_shard('shard-4', false);
SELECT name, state, vnodes FROM shardmap.shards WHERE name = 'shard-4';
SELECT shardmap.drop_shard('shard-4');
SELECT shardmap.drop_shard('shard-4');
SELECT count(*) FROM pg_foreign_server WHERE srvname = 'shard-4';

-- What adding a shard would move, and how even the ring is.
SELECT giver, gainer, round(fraction::numeric, 6) AS fraction, rows FROM shardmap.preview_change(add => '{shard-4}');
SELECT sum(positions) AS positions, count(*) AS tokens FROM shardmap.tokens;
SELECT shard, weight, vnodes, round(share::numeric, 6) AS share, round(load::numeric, 6) AS load,
    round(max_over_mean::numeric, 6) AS max_over_mean, round(stdev::numeric, 6) AS stdev FROM shardmap.ring_balance();

-- With rows, what would change an owner is refused, with what would move.
CREATE TABLE t (k integer PRIMARY KEY, v text);
SELECT shardmap.distribute_table('t', 'k');
INSERT INTO t SELECT i, i FROM generate_series(1, 400) i;
SELECT name, r[1] FROM shardmap.shard, shardmap.remote_rows(name, 'ANALYZE public.t; SELECT count(*)::text FROM public.t') r ORDER BY number;
SELECT giver, gainer, round(fraction::numeric, 4) AS fraction, rows FROM shardmap.preview_change(add => '{shard-4}', weights => '{"shard-4": 2}');
SELECT giver, gainer, round(fraction::numeric, 4) AS fraction, rows, bytes > 0 AS bytes FROM shardmap.preview_change(remove => '{shard-1}');
SELECT shardmap.set_shard_weight('shard-1', 3);
SELECT shardmap.set_shard_weight('shard-1', 1.001);
SELECT shardmap.drop_shard('shard-1');
SELECT shardmap.add_shard('shard-4', :'host', :port, :'other');
SELECT name, number, state, vnodes, share FROM shardmap.shards WHERE name = 'shard-4';
SELECT shardmap.set_shard_weight('shard-4', 2);
SELECT giver, gainer, round(fraction::numeric, 4) AS fraction FROM shardmap.preview_change(add => '{shard-4}');
-- It has the tables, as partitions here and with constraints there.
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 't'::regclass ORDER BY 1;
SELECT * FROM shardmap.remote_rows('shard-4', $$SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE conrelid = 'public.t'::regclass AND contype = 'p'$$);
SELECT count(*) FROM t WHERE shard_for(k) = 'shard-4';
SELECT shardmap.drain_shard('shard-2');
SELECT name, state, vnodes FROM shardmap.shards WHERE name = 'shard-2';
SELECT shardmap.drain_shard('shard-2', false);
SELECT shardmap.drop_shard('shard-4');

-- Rows on a shard that owns nothing keep it from being dropped.
SELECT shardmap.add_shard('shard-4', :'host', :port, :'other');
SELECT shardmap.remote_execute('shard-4', 'INSERT INTO public.t VALUES (-1)');
SELECT shardmap.drop_shard('shard-4');
SELECT shardmap.remote_execute('shard-4', 'DELETE FROM public.t');
SELECT shardmap.drop_shard('shard-4');

-- Numbers stay with their shards, and are used again only when all are taken.
DELETE FROM t;
SELECT shardmap.drop_shard('shard-1');
-- One that is gone for good is dropped unasked, if it owns nothing.
SELECT shardmap.add_shard('shard-4', :'host', :port, :'other');
SELECT shardmap.drain_shard('shard-4');
ALTER SERVER "shard-4" OPTIONS (SET port '1');
\set VERBOSITY sqlstate
SELECT shardmap.drop_shard('shard-4');
\set VERBOSITY default
SELECT shardmap.drop_shard('shard-4', abandon => true);
SELECT shardmap.drop_shard('shard-0', abandon => true);
SELECT shardmap.remote_execute('shard-0', format('DROP DATABASE %I WITH (FORCE)', :'other'), false);
SELECT shardmap.remote_execute('shard-0', format('CREATE DATABASE %I', :'other'), false);
SELECT shardmap.add_shard('shard-10', :'host', :port, :'other');
SELECT name, number FROM shardmap.shards;
-- The last shard of a keyspace with tables stays.
SELECT shardmap.drop_shard(name) FROM shardmap.shard WHERE name IN ('shard-0', 'shard-2', 'shard-3');
SELECT shardmap.drop_shard('shard-10');
SELECT shardmap.drain_shard('shard-10');
SELECT shardmap.undistribute_table('t');
SELECT shardmap.drop_shard('shard-10');
SELECT count(*) FROM shardmap.shard;
SELECT shard_for(1);
