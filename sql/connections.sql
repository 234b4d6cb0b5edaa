-- Connections to shards, of all sessions of this server together.
--
-- Decides what users see of them. What always holds: the view is about the current database, and readable by all.
-- Read src/pg/remote/slots.rs next.

CREATE FUNCTION shardmap._connections(OUT server oid, OUT connections integer, OUT waiting integer)
RETURNS SETOF record
LANGUAGE c VOLATILE STRICT PARALLEL SAFE ROWS 20
AS 'MODULE_PATHNAME', 'connections_wrapper';
COMMENT ON FUNCTION shardmap._connections() IS 'counters of view shardmap.stat_connections, by foreign server';

CREATE VIEW shardmap.stat_connections AS
SELECT s.keyspace, s.name AS shard, coalesce(c.connections, 0) AS connections, coalesce(c.waiting, 0) AS waiting
  FROM shardmap.shard s
  LEFT JOIN pg_catalog.pg_foreign_server f ON f.srvname OPERATOR(pg_catalog.=) s.name
  LEFT JOIN shardmap._connections() c ON c.server OPERATOR(pg_catalog.=) f.oid;
COMMENT ON VIEW shardmap.stat_connections IS 'connections to the shards that the sessions of this database have now';
COMMENT ON COLUMN shardmap.stat_connections.keyspace IS 'keyspace of the shard';
COMMENT ON COLUMN shardmap.stat_connections.shard IS 'name of the shard';
COMMENT ON COLUMN shardmap.stat_connections.connections IS 'connections held by all sessions, idle ones too; at most shardmap.max_connections_per_shard';
COMMENT ON COLUMN shardmap.stat_connections.waiting IS 'sessions that wait for a connection';

GRANT SELECT ON shardmap.stat_connections TO PUBLIC;
