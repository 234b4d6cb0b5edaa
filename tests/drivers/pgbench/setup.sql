-- A logical table for the scripts beside this one. They must be keyed: anything else is an error.
CREATE TABLE bench (k bigint, id bigint, n int DEFAULT 0, v text, PRIMARY KEY (k, id));
INSERT INTO bench SELECT k, id, 0, 'v' FROM generate_series(1, 200) k, generate_series(1, 3) id;
SELECT shardmap.distribute_table('bench', 'k');
SELECT shardmap.set_fanout_policy('bench', 'error');
