-- Statements for shards. Everything here is for administrators: the functions run any text that the caller gives, as the
-- caller, through the caller's own user mapping.

CREATE FUNCTION shardmap.remote_execute(shard text, sql text, transactional boolean DEFAULT true) RETURNS text
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'remote_execute_wrapper';
COMMENT ON FUNCTION shardmap.remote_execute(text, text, boolean) IS
    'runs statements on one shard and returns the last one''s command tag; transactional: they are committed or rolled back with the local transaction, else each text commits by itself at once';
REVOKE ALL ON FUNCTION shardmap.remote_execute(text, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.remote_execute(text, text, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap.remote_rows(shard text, sql text, transactional boolean DEFAULT true) RETURNS SETOF text[]
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'remote_rows_wrapper';
COMMENT ON FUNCTION shardmap.remote_rows(text, text, boolean) IS
    'runs statements on one shard and returns the last one''s rows, each as an array of its values'' texts; transactional as in remote_execute()';
REVOKE ALL ON FUNCTION shardmap.remote_rows(text, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.remote_rows(text, text, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap.copy_rows_to_shards(
        source regclass, target_schema text, target_table text, key_column text, keyspace text, columns text[])
    RETURNS TABLE (shard text, rows bigint)
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'copy_rows_to_shards_wrapper';
COMMENT ON FUNCTION shardmap.copy_rows_to_shards(regclass, text, text, text, text, text[]) IS
    'copies each row of a local table to the table of that name on the shard that owns its key, in the local transaction; returns the rows sent to each shard that got any';
REVOKE ALL ON FUNCTION shardmap.copy_rows_to_shards(regclass, text, text, text, text, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.copy_rows_to_shards(regclass, text, text, text, text, text[]) TO shardmap_admin;

CREATE FUNCTION shardmap._copy_rows_to_each(
        source regclass, target_schema text, target_table text, shards text[], columns text[])
    RETURNS TABLE (shard text, rows bigint)
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'copy_rows_to_each_wrapper';
COMMENT ON FUNCTION shardmap._copy_rows_to_each(regclass, text, text, text[], text[]) IS
    'copies all rows of a local table to the table of that name on each of the shards, in the local transaction; returns the rows sent to each';
REVOKE ALL ON FUNCTION shardmap._copy_rows_to_each(regclass, text, text, text[], text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._copy_rows_to_each(regclass, text, text, text[], text[]) TO shardmap_admin;

CREATE FUNCTION shardmap.run_on_each(shards text[], sql text)
    RETURNS TABLE (shard text, success boolean, command text, result jsonb, error text)
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'run_on_each_wrapper';
COMMENT ON FUNCTION shardmap.run_on_each(text[], text) IS
    'run_on_shards() for the shards that are named';
REVOKE ALL ON FUNCTION shardmap.run_on_each(text[], text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.run_on_each(text[], text) TO shardmap_admin;

-- No SET search_path: the caller's goes to the shards. Every name is qualified instead.
CREATE FUNCTION shardmap.run_on_shards(sql text, keyspace text DEFAULT 'main')
    RETURNS TABLE (shard text, success boolean, command text, result jsonb, error text)
    LANGUAGE plpgsql VOLATILE STRICT PARALLEL UNSAFE AS $$
#variable_conflict use_column
DECLARE
    shards text[] := (SELECT pg_catalog.array_agg(s.name ORDER BY s.number) FROM shardmap.shard AS s
                      WHERE s.keyspace OPERATOR(pg_catalog.=) $2);
BEGIN
    IF shards IS NULL AND NOT EXISTS (SELECT FROM shardmap.keyspace AS k WHERE k.name OPERATOR(pg_catalog.=) $2) THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = pg_catalog.format('keyspace "%s" does not exist', $2),
            HINT = 'The view shardmap.shards lists shards and keyspaces.';
    END IF;
    RETURN QUERY SELECT r.shard, r.success, r.command, r.result, r.error
        FROM shardmap.run_on_each(shards, $1) AS r;
END
$$;
COMMENT ON FUNCTION shardmap.run_on_shards(text, text) IS
    'runs a statement on every shard of the keyspace, many at a time, in sessions of their own that commit by themselves; a row for each shard: its command tag and its rows (at most 1000, a JSON array of objects), or its error';
REVOKE ALL ON FUNCTION shardmap.run_on_shards(text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.run_on_shards(text, text) TO shardmap_admin;
