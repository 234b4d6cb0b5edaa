-- The foreign data wrapper, and the functions that say who owns a key.

CREATE FUNCTION shardmap.fdw_handler() RETURNS pg_catalog.fdw_handler
    LANGUAGE c STRICT AS 'MODULE_PATHNAME', 'shardmap_fdw_handler';
COMMENT ON FUNCTION shardmap.fdw_handler() IS
    'handler of shardmap_fdw: the planning of postgres_fdw, with writes to a wrong shard refused and statements counted';
REVOKE ALL ON FUNCTION shardmap.fdw_handler() FROM PUBLIC;

CREATE FUNCTION shardmap.fdw_validator(options text[], catalog oid) RETURNS void
    LANGUAGE c STRICT AS 'MODULE_PATHNAME', 'shardmap_fdw_validator';
COMMENT ON FUNCTION shardmap.fdw_validator(text[], oid) IS
    'validator of shardmap_fdw: the options of postgres_fdw, but for use_remote_estimate';
REVOKE ALL ON FUNCTION shardmap.fdw_validator(text[], oid) FROM PUBLIC;

CREATE FOREIGN DATA WRAPPER shardmap_fdw HANDLER shardmap.fdw_handler VALIDATOR shardmap.fdw_validator;
COMMENT ON FOREIGN DATA WRAPPER shardmap_fdw IS 'shards of pg_shardmap: one foreign server each, under the shard''s name';

CREATE FUNCTION shardmap.keep_here(condition boolean) RETURNS boolean
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'shardmap_keep_here';
COMMENT ON FUNCTION shardmap.keep_here(boolean) IS
    'the condition itself; stands in plans around conditions that must not be evaluated on a shard before row security is';

CREATE AGGREGATE shardmap.numeric_sum(numeric) (
    SFUNC = pg_catalog.numeric_add, STYPE = numeric, COMBINEFUNC = pg_catalog.numeric_add, PARALLEL = SAFE);
COMMENT ON AGGREGATE shardmap.numeric_sum(numeric) IS
    'sum() with the sum itself as its state; stands in plans of fan-outs, where each shard computes its part of it';

CREATE FUNCTION @extschema@.shard_for(key text, keyspace text DEFAULT 'main') RETURNS text
    LANGUAGE c STABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'shardmap_shard_for_text';
COMMENT ON FUNCTION @extschema@.shard_for(text, text) IS
    'name of the shard that owns the key; NULL for a NULL key';

CREATE FUNCTION @extschema@.shard_for(key anyelement, keyspace text DEFAULT 'main') RETURNS text
    LANGUAGE c STABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'shardmap_shard_for_any';
COMMENT ON FUNCTION @extschema@.shard_for(anyelement, text) IS
    'name of the shard that owns the key, read by the key''s own type: 7, 7::bigint and 7.0 have one owner';

CREATE FUNCTION @extschema@.token_for(key text) RETURNS bigint
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'shardmap_token_for_text';
COMMENT ON FUNCTION @extschema@.token_for(text) IS
    'position of the key on the ring, 0 to 2^32 - 1: the low 32 bits of the MD5 of its canonical text';

CREATE FUNCTION @extschema@.token_for(key anyelement) RETURNS bigint
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'shardmap_token_for_any';
COMMENT ON FUNCTION @extschema@.token_for(anyelement) IS
    'position of the key on the ring, 0 to 2^32 - 1, read by the key''s own type';

CREATE FUNCTION shardmap.owner_of(key anyelement, keyspace text) RETURNS text
    LANGUAGE c STABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'shardmap_shard_for_any';
COMMENT ON FUNCTION shardmap.owner_of(anyelement, text) IS
    'shard_for() under a name that does not depend on the schema the extension was created in';

CREATE FUNCTION shardmap.canonical_key(key anyelement) RETURNS text
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'shardmap_canonical_key';
COMMENT ON FUNCTION shardmap.canonical_key(anyelement) IS
    'the text of a key that is hashed: the same for all keys that the type calls equal';

CREATE FUNCTION shardmap.key_sql(key_type oid, column_sql text) RETURNS text
    LANGUAGE c STABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'key_sql_wrapper';
COMMENT ON FUNCTION shardmap.key_sql(oid, text) IS
    'SQL of built-in functions only that computes a key''s canonical text on a shard';

CREATE FUNCTION shardmap.check_key_column(relation oid, column_name text) RETURNS void
    LANGUAGE c STABLE STRICT AS 'MODULE_PATHNAME', 'check_key_column_wrapper';
COMMENT ON FUNCTION shardmap.check_key_column(oid, text) IS
    'raises an error if the column''s type or collation cannot be a shard key';

CREATE FUNCTION shardmap.invalidate_caches() RETURNS void
    LANGUAGE c AS 'MODULE_PATHNAME', 'invalidate_caches_wrapper';
COMMENT ON FUNCTION shardmap.invalidate_caches() IS
    'makes every session load the shard map anew when this transaction commits';

REVOKE ALL ON FUNCTION shardmap.invalidate_caches() FROM PUBLIC;

CREATE FUNCTION shardmap.publish_map(keyspace text) RETURNS bigint
    LANGUAGE c STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS 'MODULE_PATHNAME', 'publish_map_wrapper';
COMMENT ON FUNCTION shardmap.publish_map(text) IS
    'validates the keyspace as a whole, raises its version and publishes it to every session at commit';
REVOKE ALL ON FUNCTION shardmap.publish_map(text) FROM PUBLIC;
