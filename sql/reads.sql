-- Tokens of what was written and seen, and the choice of a server for a read.
--
-- Decides nothing. What always holds: every question goes to the servers as the caller, by the caller's user mapping; a
-- token that is not of this database is an error. Read docs/replicas.md for the use, src/pg/reads for the rest.

CREATE FUNCTION shardmap.write_token() RETURNS text
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'write_token_wrapper';
COMMENT ON FUNCTION shardmap.write_token() IS
    'token of what this session has committed on shards, for reads that must not miss it; NULL: nothing. Call it after the commit, in the same session';

CREATE FUNCTION shardmap.session_token() RETURNS text
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'session_token_wrapper';
COMMENT ON FUNCTION shardmap.session_token() IS
    'token of all that this session has committed, read or observed, so that reads elsewhere do not go back in time; NULL: nothing';

CREATE FUNCTION shardmap.observe(token text) RETURNS void
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'observe_wrapper';
COMMENT ON FUNCTION shardmap.observe(text) IS
    'makes all later reads of this session, under consistency = session, see what the token stands for';

CREATE FUNCTION shardmap.merge_tokens(VARIADIC tokens text[]) RETURNS text
    LANGUAGE c STABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'merge_tokens_wrapper';
COMMENT ON FUNCTION shardmap.merge_tokens(text[]) IS
    'one token that stands for all that the given ones do; NULL and empty ones stand for nothing';

CREATE FUNCTION shardmap._current_token(shards text[]) RETURNS text
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'current_token_wrapper';
COMMENT ON FUNCTION shardmap._current_token(text[]) IS 'token of where the primaries of these shards are now';

CREATE FUNCTION shardmap.current_token(shards text[] DEFAULT NULL) RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._current_token(coalesce(shards, (SELECT array_agg(s.name) FROM shardmap.shard s)))
$$;
COMMENT ON FUNCTION shardmap.current_token(text[]) IS
    'token of all that anybody has committed on these shards, or on all, up to now; asks their primaries';

CREATE FUNCTION shardmap._choose_replica(
    shard text, max_lag double precision, token text, OUT server text, OUT role text, OUT lag double precision, OUT reason text,
    OUT waited double precision, OUT considered text[])
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE ROWS 1 AS 'MODULE_PATHNAME', 'choose_replica_wrapper';
COMMENT ON FUNCTION shardmap._choose_replica(text, double precision, text) IS
    'choose_replica() with times in seconds';

CREATE FUNCTION shardmap.choose_replica(
    shard text, max_lag interval DEFAULT NULL, token text DEFAULT NULL, OUT server text, OUT role text, OUT lag interval,
    OUT reason text, OUT waited interval, OUT considered text[])
LANGUAGE sql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.server, c.role, make_interval(secs => c.lag), c.reason, make_interval(secs => c.waited), c.considered
      FROM shardmap._choose_replica(shard, extract(epoch FROM max_lag)::double precision, token) c
     WHERE shard IS NOT NULL
$$;
COMMENT ON FUNCTION shardmap.choose_replica(text, interval, text) IS
    'the server that would answer a read of the shard now, why it, and what was found about each candidate; waits for a replica as a read would';

CREATE FUNCTION @extschema@.replica_for(
    key text, max_lag interval DEFAULT NULL, token text DEFAULT NULL, keyspace text DEFAULT 'main') RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.server FROM shardmap.choose_replica(shardmap.owner_of(key, keyspace), max_lag, token) c
$$;
COMMENT ON FUNCTION @extschema@.replica_for(text, interval, text, text) IS
    'name of the server that would answer a read of the key now: a replica that is fresh enough, else the shard''s primary';

CREATE FUNCTION @extschema@.replica_for(
    key anyelement, max_lag interval DEFAULT NULL, token text DEFAULT NULL, keyspace text DEFAULT 'main') RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.server FROM shardmap.choose_replica(shardmap.owner_of(key, keyspace), max_lag, token) c
$$;
COMMENT ON FUNCTION @extschema@.replica_for(anyelement, interval, text, text) IS
    'name of the server that would answer a read of the key now, read by the key''s own type';
