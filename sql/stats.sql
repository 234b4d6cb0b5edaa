-- Statistics of routing: views over the counters in shared memory, and their reset.
--
-- Decides what users see of them. What always holds: every view is about the current database, readable by all; the
-- text of another user's statements only by members of pg_read_all_stats; resets are for administrators. The counters
-- are those of this server: a standby or another coordinator has its own. Read src/pg/stats/mod.rs next.

CREATE FUNCTION shardmap._fanout_queries(
    OUT user_id oid, OUT fingerprint bigint, OUT query text, OUT tables text, OUT reason text, OUT shards integer,
    OUT calls bigint, OUT rows bigint, OUT total_ms double precision, OUT min_ms double precision,
    OUT max_ms double precision, OUT first_seen timestamp with time zone, OUT last_seen timestamp with time zone)
RETURNS SETOF record
LANGUAGE c VOLATILE STRICT PARALLEL SAFE ROWS 100
AS 'MODULE_PATHNAME', 'stats_fanout_queries_wrapper';
COMMENT ON FUNCTION shardmap._fanout_queries() IS 'rows of view shardmap.fanout_queries';

CREATE FUNCTION shardmap._stat_routing(OUT step text, OUT statements bigint) RETURNS SETOF record
LANGUAGE c VOLATILE STRICT PARALLEL SAFE ROWS 6
AS 'MODULE_PATHNAME', 'stats_steps_wrapper';
COMMENT ON FUNCTION shardmap._stat_routing() IS 'rows of view shardmap.stat_routing';

CREATE FUNCTION shardmap._stat_shards(OUT keyspace text, OUT number integer, OUT statements bigint, OUT errors bigint, OUT wait_ms double precision)
RETURNS SETOF record
LANGUAGE c VOLATILE STRICT PARALLEL SAFE ROWS 100
AS 'MODULE_PATHNAME', 'stats_shards_wrapper';
COMMENT ON FUNCTION shardmap._stat_shards() IS 'counters of view shardmap.stat_shards, by number of the shard';

CREATE FUNCTION shardmap._stat_info(
    OUT fanout_queries integer, OUT fanout_queries_max integer, OUT fanout_queries_evicted bigint,
    OUT statements_uncounted bigint, OUT fanout_queries_since timestamp with time zone,
    OUT routing_since timestamp with time zone)
RETURNS SETOF record
LANGUAGE c VOLATILE STRICT PARALLEL SAFE ROWS 1
AS 'MODULE_PATHNAME', 'stats_info_wrapper';
COMMENT ON FUNCTION shardmap._stat_info() IS 'the row of view shardmap.stat_info';

CREATE VIEW shardmap.fanout_queries AS
SELECT pg_catalog.pg_get_userbyid(f.user_id) AS user_name, f.fingerprint, f.query, f.tables, f.reason, f.shards, f.calls,
       f.rows, f.total_ms, f.total_ms OPERATOR(pg_catalog./) f.calls::pg_catalog.float8 AS mean_ms, f.min_ms, f.max_ms,
       f.first_seen, f.last_seen
  FROM shardmap._fanout_queries() f;
COMMENT ON VIEW shardmap.fanout_queries IS 'statements of this database that asked every shard, one row a user and shape of statement; kept over restarts';
COMMENT ON COLUMN shardmap.fanout_queries.user_name IS 'user who ran the statement';
COMMENT ON COLUMN shardmap.fanout_queries.fingerprint IS 'number of the statement''s shape: the low 64 bits of MD5 of its whole normalised text; NULL: not yours to see';
COMMENT ON COLUMN shardmap.fanout_queries.query IS 'normalised text: values replaced by placeholders, comments dropped, lists folded; at most 1024 bytes';
COMMENT ON COLUMN shardmap.fanout_queries.tables IS 'logical tables of the statement, as of its last call';
COMMENT ON COLUMN shardmap.fanout_queries.reason IS 'why it asked every shard, as of its last call';
COMMENT ON COLUMN shardmap.fanout_queries.shards IS 'most shards that one call asked';
COMMENT ON COLUMN shardmap.fanout_queries.calls IS 'number of calls';
COMMENT ON COLUMN shardmap.fanout_queries.rows IS 'rows returned or changed, all calls together';
COMMENT ON COLUMN shardmap.fanout_queries.total_ms IS 'milliseconds of all calls together';
COMMENT ON COLUMN shardmap.fanout_queries.mean_ms IS 'milliseconds of a call on average';
COMMENT ON COLUMN shardmap.fanout_queries.min_ms IS 'milliseconds of the shortest call';
COMMENT ON COLUMN shardmap.fanout_queries.max_ms IS 'milliseconds of the longest call';
COMMENT ON COLUMN shardmap.fanout_queries.first_seen IS 'end of the first call since the last reset';
COMMENT ON COLUMN shardmap.fanout_queries.last_seen IS 'end of the last call';

CREATE VIEW shardmap.stat_routing AS
SELECT s.step, s.statements FROM shardmap._stat_routing() s;
COMMENT ON VIEW shardmap.stat_routing IS 'statements of this database on logical tables, by what became of them; kept over restarts';
COMMENT ON COLUMN shardmap.stat_routing.step IS 'routed: whole to one shard; substituted: here, on one shard''s tables; narrowed: some shards; fan_out: all; refused; insert: each row on its shard';
COMMENT ON COLUMN shardmap.stat_routing.statements IS 'number of statements since the last reset';

CREATE VIEW shardmap.stat_shards AS
SELECT s.keyspace, s.name AS shard, coalesce(c.statements, 0) AS statements, coalesce(c.errors, 0) AS errors,
       coalesce(c.wait_ms, 0) AS wait_ms
  FROM shardmap.shard s
  LEFT JOIN shardmap._stat_shards() c
    ON c.keyspace OPERATOR(pg_catalog.=) s.keyspace AND c.number OPERATOR(pg_catalog.=) s.number;
COMMENT ON VIEW shardmap.stat_shards IS 'statements of this database that asked a shard, and what became of them, by shard; kept over restarts';
COMMENT ON COLUMN shardmap.stat_shards.keyspace IS 'keyspace of the shard';
COMMENT ON COLUMN shardmap.stat_shards.shard IS 'name of the shard';
COMMENT ON COLUMN shardmap.stat_shards.statements IS 'number of statements that asked it since the last reset; one that asks several counts for each';
COMMENT ON COLUMN shardmap.stat_shards.errors IS 'errors of the shard, and connections to it that were lost, also those that a session has caught';
COMMENT ON COLUMN shardmap.stat_shards.wait_ms IS 'milliseconds that sessions have waited for its answers, each for this shard alone';

CREATE VIEW shardmap.stat_info AS
SELECT i.fanout_queries, i.fanout_queries_max, i.fanout_queries_evicted, i.statements_uncounted, i.fanout_queries_since,
       i.routing_since
  FROM shardmap._stat_info() i;
COMMENT ON VIEW shardmap.stat_info IS 'the state of the statistics themselves, of all databases together';
COMMENT ON COLUMN shardmap.stat_info.fanout_queries IS 'statements in the table behind shardmap.fanout_queries';
COMMENT ON COLUMN shardmap.stat_info.fanout_queries_max IS 'how many it holds (setting shardmap.fanout_queries_max)';
COMMENT ON COLUMN shardmap.stat_info.fanout_queries_evicted IS 'statements that made room for others; if this grows fast, the table is too small';
COMMENT ON COLUMN shardmap.stat_info.statements_uncounted IS 'statements not counted since the start, because there were more than 256 databases, or 64 keyspaces in all of them';
COMMENT ON COLUMN shardmap.stat_info.fanout_queries_since IS 'when statements were first kept, or fanout_queries last reset in any database';
COMMENT ON COLUMN shardmap.stat_info.routing_since IS 'when statements were first counted, or the counters last reset in any database';

CREATE FUNCTION shardmap.reset_fanout_queries() RETURNS void
LANGUAGE c VOLATILE STRICT PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'stats_reset_fanout_queries_wrapper';
COMMENT ON FUNCTION shardmap.reset_fanout_queries() IS 'empties shardmap.fanout_queries for this database';

CREATE FUNCTION shardmap.reset_stat_routing() RETURNS void
LANGUAGE c VOLATILE STRICT PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'stats_reset_routing_wrapper';
COMMENT ON FUNCTION shardmap.reset_stat_routing() IS 'sets the counters of shardmap.stat_routing and shardmap.stat_shards to 0 for this database';

REVOKE ALL ON FUNCTION shardmap.reset_fanout_queries(), shardmap.reset_stat_routing() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.reset_fanout_queries(), shardmap.reset_stat_routing() TO shardmap_admin;
GRANT SELECT ON shardmap.fanout_queries, shardmap.stat_routing, shardmap.stat_shards, shardmap.stat_info TO PUBLIC;
