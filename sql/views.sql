-- Views on the catalog, for all.
--
-- Decides nothing. What always holds: they read local catalogs only, so that they answer while shards are down, and show
-- no secret: user mappings are left out.

CREATE VIEW shardmap.shards AS
    SELECT s.keyspace, s.name, s.number, s.state, s.weight, pg_catalog.cardinality(s.tokens) AS vnodes,
        b.share, b.wanted_share,
        (SELECT pg_catalog.max(o.option_value) FROM pg_catalog.pg_options_to_table(f.srvoptions) o WHERE o.option_name = 'host') AS host,
        (SELECT pg_catalog.max(o.option_value) FROM pg_catalog.pg_options_to_table(f.srvoptions) o WHERE o.option_name = 'port') AS port,
        (SELECT pg_catalog.max(o.option_value) FROM pg_catalog.pg_options_to_table(f.srvoptions) o WHERE o.option_name = 'dbname') AS dbname,
        f.srvoptions AS options
      FROM shardmap.shard s
      LEFT JOIN pg_catalog.pg_foreign_server f ON f.srvname = s.name
      LEFT JOIN (SELECT j.name AS keyspace, m.shard, m.share, w.share AS wanted_share FROM shardmap.keyspace j,
            LATERAL (SELECT shardmap._map_json(pg_catalog.jsonb_build_array(shardmap._keyspace_json(j.name))) AS map) i,
            LATERAL shardmap._map_balance(i.map) m, LATERAL shardmap._map_balance(shardmap._wanted_map(i.map)) w
            WHERE j.strategy <> 'range' AND w.shard OPERATOR(pg_catalog.=) m.shard) b ON b.keyspace = s.keyspace AND b.shard = s.name
     ORDER BY s.keyspace, s.number;
COMMENT ON VIEW shardmap.shards IS 'shards with their state, their share of the keys, and where they are';
COMMENT ON COLUMN shardmap.shards.keyspace IS 'keyspace that the shard belongs to';
COMMENT ON COLUMN shardmap.shards.name IS 'name of the shard and of its foreign server';
COMMENT ON COLUMN shardmap.shards.number IS 'number of the shard in its keyspace';
COMMENT ON COLUMN shardmap.shards.state IS 'active; joining: registered, owns nothing yet; draining: to be emptied';
COMMENT ON COLUMN shardmap.shards.weight IS 'share of load, in relation to the other shards'' weights';
COMMENT ON COLUMN shardmap.shards.vnodes IS 'ring positions that the shard holds';
COMMENT ON COLUMN shardmap.shards.share IS 'part of all keys that the shard owns, 0 to 1, without pins; NULL under strategy range';
COMMENT ON COLUMN shardmap.shards.wanted_share IS 'part that it should own by the states and weights of all shards: shardmap.rebalance moves the difference';
COMMENT ON COLUMN shardmap.shards.host IS 'host of the shard''s server';
COMMENT ON COLUMN shardmap.shards.port IS 'port of the shard''s server';
COMMENT ON COLUMN shardmap.shards.dbname IS 'database on that server';
COMMENT ON COLUMN shardmap.shards.options IS 'all options of the foreign server';

CREATE VIEW shardmap.tables AS
    SELECT t.relation AS table_name, t.keyspace, t.key_column, t.key_type, t.fanout_policy, p.partitions, p.rows
      FROM shardmap.logical_table t,
        LATERAL (SELECT pg_catalog.count(*) AS partitions,
            pg_catalog.sum(c.reltuples) FILTER (WHERE c.reltuples >= 0)::bigint AS rows
          FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = t.relation) p
     ORDER BY t.relation::text;
COMMENT ON VIEW shardmap.tables IS 'logical tables';
COMMENT ON COLUMN shardmap.tables.table_name IS 'the table';
COMMENT ON COLUMN shardmap.tables.keyspace IS 'keyspace whose shards hold its rows';
COMMENT ON COLUMN shardmap.tables.key_column IS 'its distribution column';
COMMENT ON COLUMN shardmap.tables.key_type IS 'type of the distribution column';
COMMENT ON COLUMN shardmap.tables.fanout_policy IS 'least strict policy for un-keyed statements on it; NULL: that of the session';
COMMENT ON COLUMN shardmap.tables.partitions IS 'number of shards that it is spread over';
COMMENT ON COLUMN shardmap.tables.rows IS 'estimated number of rows, by the last ANALYZE of the partitions; NULL before the first';

CREATE VIEW shardmap.reference_tables AS
    SELECT t.relation AS table_name, t.keyspace, s.copies, t.complete AS routed
      FROM shardmap.reference_table t,
        LATERAL (SELECT pg_catalog.count(*) AS copies FROM shardmap.shard s WHERE s.keyspace = t.keyspace) s
     ORDER BY t.relation::text, t.keyspace;
COMMENT ON VIEW shardmap.reference_tables IS 'reference tables';
COMMENT ON COLUMN shardmap.reference_tables.table_name IS 'the table';
COMMENT ON COLUMN shardmap.reference_tables.keyspace IS 'keyspace whose shards have copies';
COMMENT ON COLUMN shardmap.reference_tables.copies IS 'number of shards with a copy';
COMMENT ON COLUMN shardmap.reference_tables.routed IS 'whether statements about one shard read its copy; not while the table lacks its key or triggers, as in a restore';

CREATE VIEW shardmap.tokens AS
    SELECT p.keyspace, p.token, p.shard,
        CASE WHEN p.number = 1 AND p.token = p.last THEN 4294967296
            ELSE p.token - coalesce(p.before, p.last - 4294967296) END AS positions
      FROM (SELECT s.keyspace, t.token, s.name AS shard,
                pg_catalog.row_number() OVER ring AS number,
                pg_catalog.lag(t.token) OVER ring AS before,
                pg_catalog.max(t.token) OVER (PARTITION BY s.keyspace) AS last
              FROM shardmap.shard s, pg_catalog.unnest(s.tokens) AS t (token)
            WINDOW ring AS (PARTITION BY s.keyspace ORDER BY t.token, s.name)) p
     ORDER BY p.keyspace, p.token, p.shard;
COMMENT ON VIEW shardmap.tokens IS 'the rings: each token with its shard';
COMMENT ON COLUMN shardmap.tokens.keyspace IS 'keyspace of the ring';
COMMENT ON COLUMN shardmap.tokens.token IS 'position on the ring, 0 to 4294967295; the arc that ends here belongs to the shard';
COMMENT ON COLUMN shardmap.tokens.shard IS 'shard that holds the token';
COMMENT ON COLUMN shardmap.tokens.positions IS 'length of the arc; 0 where a shard of a lower name holds the same token';

CREATE VIEW shardmap.settings AS
    SELECT s.name, s.setting, s.unit, s.short_desc AS description, s.context, s.source, s.boot_val AS default_setting,
        s.min_val, s.max_val, s.enumvals
      FROM pg_catalog.pg_settings s WHERE s.name LIKE 'shardmap.%' ORDER BY s.name;
COMMENT ON VIEW shardmap.settings IS 'the settings of pg_shardmap in this session';
COMMENT ON COLUMN shardmap.settings.name IS 'name of the setting';
COMMENT ON COLUMN shardmap.settings.setting IS 'its value';
COMMENT ON COLUMN shardmap.settings.unit IS 'unit of the value';
COMMENT ON COLUMN shardmap.settings.description IS 'what it decides';
COMMENT ON COLUMN shardmap.settings.context IS 'who can set it, and when';
COMMENT ON COLUMN shardmap.settings.source IS 'where the value comes from';
COMMENT ON COLUMN shardmap.settings.default_setting IS 'value before any configuration';
COMMENT ON COLUMN shardmap.settings.min_val IS 'least value';
COMMENT ON COLUMN shardmap.settings.max_val IS 'greatest value';
COMMENT ON COLUMN shardmap.settings.enumvals IS 'values that it can take, if these are words';

GRANT SELECT ON shardmap.shards, shardmap.tables, shardmap.reference_tables, shardmap.tokens, shardmap.settings TO PUBLIC;
