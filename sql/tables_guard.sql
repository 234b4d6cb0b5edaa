-- What a logical table must not become.
--
-- Postgres lets an owner rename a key column, rename or move the table, detach a partition, or attach one of his own.
-- Each would make the table stop being what the shards hold: rows would be missing from answers in silence, or the
-- statements on it would not be ours any more. Refuses those, with a hint. Lets everything else be altered; columns and
-- indexes must then be altered on the shards too (shardmap.run_on_shards). Read planning.sql next.

CREATE FUNCTION shardmap._broken_table(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH parts AS (
        SELECT i.inhrelid, s.srvname,
            (SELECT o.option_value FROM pg_options_to_table(f.ftoptions) o WHERE o.option_name = 'schema_name') AS schema_name,
            (SELECT o.option_value FROM pg_options_to_table(f.ftoptions) o WHERE o.option_name = 'table_name') AS table_name
          FROM pg_inherits i LEFT JOIN pg_foreign_table f ON f.ftrelid = i.inhrelid
          LEFT JOIN pg_foreign_server s ON s.oid = f.ftserver
         WHERE i.inhparent = $1
    )
    SELECT CASE
        WHEN NOT EXISTS (SELECT FROM pg_attribute a
                          WHERE a.attrelid = t.relation AND a.attname = t.key_column AND NOT a.attisdropped)
            THEN 'Its key column has another name.'
        WHEN EXISTS (SELECT FROM parts p WHERE p.schema_name <> n.nspname OR p.table_name <> c.relname)
            THEN 'It has another name or schema than its tables on the shards.'
        WHEN EXISTS (SELECT FROM shardmap.shard s WHERE s.keyspace = t.keyspace
                        AND NOT EXISTS (SELECT FROM parts p WHERE p.srvname = s.name))
            THEN 'The partition of a shard is missing.'
        WHEN EXISTS (SELECT FROM parts p WHERE NOT EXISTS (
                        SELECT FROM shardmap.shard s WHERE s.keyspace = t.keyspace AND s.name = p.srvname))
            THEN 'It has a partition that is no shard''s.'
        END
      FROM shardmap.logical_table t JOIN pg_class c ON c.oid = t.relation JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE t.relation = $1
$$;
COMMENT ON FUNCTION shardmap._broken_table(regclass) IS 'why a logical table is not what the catalog says it is; NULL if it is, or if it is not a logical table';

CREATE FUNCTION shardmap._guard_tables() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    stack text;
    broken record;
BEGIN
    GET DIAGNOSTICS stack = PG_CONTEXT;
    -- Administration takes tables through such states itself, and checks them at its end.
    IF stack ~ 'function shardmap\.(?!_guard_tables)' THEN
        RETURN;
    END IF;
    FOR broken IN
        SELECT t.relation, shardmap._broken_table(t.relation) AS reason FROM shardmap.logical_table t
         WHERE EXISTS (SELECT FROM pg_class c WHERE c.oid = t.relation)
    LOOP
        IF broken.reason IS NOT NULL THEN
            RAISE EXCEPTION '% would break logical table %', TG_TAG, broken.relation
                USING ERRCODE = 'feature_not_supported', DETAIL = broken.reason,
                    HINT = 'Take the table back with shardmap.undistribute_table(), alter it, and distribute it again.';
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._guard_tables() IS 'refuses what would make a logical table differ from what the shards hold';

CREATE EVENT TRIGGER shardmap_guard_alter ON ddl_command_end
    WHEN TAG IN ('ALTER TABLE', 'CREATE TABLE', 'CREATE FOREIGN TABLE') EXECUTE FUNCTION shardmap._guard_tables();
COMMENT ON EVENT TRIGGER shardmap_guard_alter IS 'refuses what would make a logical table differ from what the shards hold';

CREATE EVENT TRIGGER shardmap_guard_drop ON sql_drop
    WHEN TAG IN ('DROP TABLE', 'DROP FOREIGN TABLE', 'ALTER TABLE') EXECUTE FUNCTION shardmap._guard_tables();
COMMENT ON EVENT TRIGGER shardmap_guard_drop IS 'refuses the drop of a shard''s partition of a logical table';
