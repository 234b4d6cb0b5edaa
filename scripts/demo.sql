-- What `make demo` shows, on a cluster of eight shards. Each statement is printed before it runs.
\set ECHO queries
\pset footer off
\pset null '-'

\echo
\echo '== An ordinary schema, with rows: files'' objects and the comments on them.'
\echo
CREATE TABLE objects (
    file_key text NOT NULL, id bigint NOT NULL, name text NOT NULL, created_by int NOT NULL,
    PRIMARY KEY (file_key, id));
CREATE INDEX ON objects (file_key, created_by);
CREATE TABLE comments (
    file_key text NOT NULL, id bigint NOT NULL, object_id bigint NOT NULL, body text NOT NULL,
    PRIMARY KEY (file_key, id));
INSERT INTO objects SELECT 'file-' || i % 5000, i, 'object ' || i, i % 997 FROM generate_series(1, 50000) i;
INSERT INTO comments SELECT 'file-' || i % 5000, i, i, 'comment ' || i FROM generate_series(1, 50000) i;

\echo
\echo '== Distributed by file_key: the shard tables are made, the rows move, the counts are checked.'
\echo
SELECT shardmap.distribute_table('objects', 'file_key');
SELECT shardmap.distribute_table('comments', 'file_key');
SELECT * FROM shardmap.run_on_shards('SELECT count(*) AS objects FROM public.objects');
ANALYZE objects, comments;
SELECT shard, success FROM shardmap.run_on_shards('ANALYZE public.objects, public.comments') WHERE NOT success;

\echo
\echo '== A query that names its key runs on the one shard that owns it ...'
\echo
SELECT shard_for('file-42');
SELECT shardmap.reset_stat_routing();
SELECT count(*) FROM objects WHERE file_key = 'file-42';
EXPLAIN (VERBOSE, COSTS OFF) SELECT * FROM objects WHERE file_key = 'file-42' AND id = 42;
SELECT * FROM shardmap.stat_shards;

\echo
\echo '== ... a query that does not is still right, asks all eight, and is flagged with the reason.'
\echo
SELECT count(*) FROM objects WHERE created_by = 7;
SELECT * FROM shardmap.stat_shards;
SELECT query, reason, shards, calls FROM shardmap.fanout_queries;

\echo
\echo '== It can be refused, before any shard is asked.'
\echo
SET shardmap.fanout_policy = 'error';
\set ON_ERROR_STOP off
SELECT count(*) FROM objects WHERE created_by = 7;
\set ON_ERROR_STOP on
RESET shardmap.fanout_policy;

\echo
\echo '== Tables distributed by the same key are colocated: their join runs on the shard.'
\echo
EXPLAIN (VERBOSE, COSTS OFF)
SELECT o.name, c.body FROM objects o JOIN comments c USING (file_key) WHERE c.object_id = o.id AND file_key = 'file-42';

\echo
\echo '== Writes go to their shard; a row cannot land on another one.'
\echo
INSERT INTO objects VALUES ('file-42', 1000000, 'new', 1) RETURNING *;
UPDATE objects SET name = 'renamed' WHERE file_key = 'file-42' AND id = 1000000;
DELETE FROM objects WHERE file_key = 'file-42' AND id = 1000000;

\echo
\echo '== What a ninth shard would take over, and from whom.'
\echo
SELECT giver, gainer, round(100 * fraction::numeric, 2) AS percent_of_keys, rows, pg_size_pretty(bytes) AS size
  FROM shardmap.preview_change(add => '{shard-8}');
SELECT round(100 * sum(fraction)::numeric, 2) AS percent_of_keys, sum(rows) AS rows
  FROM shardmap.preview_change(add => '{shard-8}');
