-- Keyspaces.
--
-- Decides how a keyspace is made and dropped, and how a change of the map is serialised: every change first locks its
-- keyspace's row, makes its rows, and ends in publish_map, which checks the map as a whole and tells all sessions at
-- commit. Refuses to drop a keyspace that has tables or shards. Read shards.sql next.

CREATE FUNCTION shardmap._lock_keyspace(keyspace text) RETURNS shardmap.keyspace
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_one shardmap.keyspace;
BEGIN
    SELECT k.* INTO found_one FROM shardmap.keyspace k WHERE k.name = keyspace FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'keyspace "%" does not exist', keyspace
            USING ERRCODE = 'undefined_object',
                HINT = 'See shardmap.keyspace, or make it with shardmap.create_keyspace.';
    END IF;
    RETURN found_one;
END
$$;
COMMENT ON FUNCTION shardmap._lock_keyspace(text) IS 'the keyspace''s row, locked against other changes of its map until the transaction ends';
REVOKE ALL ON FUNCTION shardmap._lock_keyspace(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._lock_keyspace(text) TO shardmap_admin;

-- Names travel as UTF-8 between the coordinator's parts; keys and everything else may have any letters.
CREATE FUNCTION shardmap._check_letters(name text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' AND name ~ '[^[:ascii:]]' THEN
        RAISE EXCEPTION 'name "%" has letters beyond ASCII', name
            USING ERRCODE = 'feature_not_supported', DETAIL = format('The encoding of this database is %s.', current_setting('server_encoding')),
                HINT = 'Only in databases of encoding UTF8 may keyspaces, shards, logical tables, their schemas and columns have such names.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_letters(text) IS 'raises an error if a name has letters beyond ASCII in a database of another encoding than UTF8';
REVOKE ALL ON FUNCTION shardmap._check_letters(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_letters(text) TO shardmap_admin;

CREATE FUNCTION shardmap.create_keyspace(
    name text,
    strategy text DEFAULT 'ring',
    vnodes integer DEFAULT 100,
    allocation text DEFAULT 'random',
    range_order text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF octet_length(name) NOT BETWEEN 1 AND 40 OR name IS NULL THEN
        RAISE EXCEPTION 'invalid name "%" for a keyspace', name
            USING ERRCODE = 'invalid_name', HINT = 'Use a name of 1 to 40 bytes.';
    ELSIF EXISTS (SELECT FROM shardmap.keyspace k WHERE k.name = $1) THEN
        RAISE EXCEPTION 'keyspace "%" already exists', name USING ERRCODE = 'duplicate_object';
    ELSIF strategy IS NULL OR strategy NOT IN ('ring', 'modulo', 'range') THEN
        RAISE EXCEPTION 'unrecognized strategy "%"', strategy
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use ''ring'', ''modulo'' or ''range''.';
    ELSIF vnodes IS NULL OR vnodes NOT BETWEEN 1 AND 4096 THEN
        RAISE EXCEPTION 'vnodes must be between 1 and 4096, not %', vnodes USING ERRCODE = 'invalid_parameter_value';
    ELSIF allocation IS NULL OR allocation NOT IN ('random', 'balanced') THEN
        RAISE EXCEPTION 'unrecognized allocation "%"', allocation
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use ''random'' or ''balanced''.';
    ELSIF allocation = 'balanced' AND strategy <> 'ring' THEN
        RAISE EXCEPTION 'allocation "balanced" requires strategy "ring"' USING ERRCODE = 'invalid_parameter_value';
    ELSIF strategy = 'range' AND (range_order IS NULL OR range_order NOT IN ('integer', 'text')) THEN
        RAISE EXCEPTION 'strategy "range" requires the order of the keys'
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Set range_order to ''integer'' (by value) or ''text'' (by bytes of the key''s canonical text).';
    ELSIF strategy <> 'range' AND range_order IS NOT NULL THEN
        RAISE EXCEPTION 'range_order requires strategy "range"' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM shardmap._check_letters(name);
    INSERT INTO shardmap.keyspace (name, strategy, vnodes, allocation, range_order) VALUES ($1, $2, $3, $4, $5);
    PERFORM shardmap.publish_map(name);
END
$$;
COMMENT ON FUNCTION shardmap.create_keyspace(text, text, integer, text, text) IS 'makes a keyspace without shards';
REVOKE ALL ON FUNCTION shardmap.create_keyspace(text, text, integer, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.create_keyspace(text, text, integer, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap.drop_keyspace(name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shards text;
    tables text;
BEGIN
    PERFORM shardmap._lock_keyspace(name);
    SELECT string_agg(format('table %s', t.relation), ', ' ORDER BY t.relation::text) INTO tables
      FROM (SELECT l.relation FROM shardmap.logical_table l WHERE l.keyspace = $1
            UNION ALL SELECT r.relation FROM shardmap.reference_table r WHERE r.keyspace = $1) t;
    SELECT string_agg(format('shard "%s"', s.name), ', ' ORDER BY s.number) INTO shards
      FROM shardmap.shard s WHERE s.keyspace = $1;
    IF tables IS NOT NULL OR shards IS NOT NULL THEN
        RAISE EXCEPTION 'keyspace "%" is in use', name
            USING ERRCODE = 'dependent_objects_still_exist',
                DETAIL = format('It has %s.', concat_ws(', ', tables, shards)),
                HINT = 'Use shardmap.undistribute_table, shardmap.undistribute_reference and shardmap.drop_shard first.';
    END IF;
    PERFORM shardmap._drop_key_classes(name);
    DELETE FROM shardmap.move_table t USING shardmap.move m WHERE m.id = t.move AND m.keyspace = $1;
    DELETE FROM shardmap.move m WHERE m.keyspace = $1;
    DELETE FROM shardmap.key_range r WHERE r.keyspace = $1;
    DELETE FROM shardmap.pin p WHERE p.keyspace = $1;
    DELETE FROM shardmap.keyspace k WHERE k.name = $1;
END
$$;
COMMENT ON FUNCTION shardmap.drop_keyspace(text) IS 'drops a keyspace that has no shards and no tables';
REVOKE ALL ON FUNCTION shardmap.drop_keyspace(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.drop_keyspace(text) TO shardmap_admin;

-- A superuser can write the catalog past the functions: the map must be a map after every statement all the same, and
-- every session must hear of it. The version stays: only the functions count changes.
CREATE FUNCTION shardmap._check_direct_change() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_ARGV[0] = 'map' THEN
        PERFORM shardmap.export_map();
    END IF;
    PERFORM shardmap.invalidate_caches();
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION shardmap._check_direct_change() IS 'trigger: refuses catalog rows that are no map, and makes all sessions load the map anew';
REVOKE ALL ON FUNCTION shardmap._check_direct_change() FROM PUBLIC;

CREATE TRIGGER check_direct_change
    AFTER INSERT OR UPDATE OF name, strategy, vnodes, allocation, range_order, slots, wanted_slots OR DELETE OR TRUNCATE ON shardmap.keyspace
    FOR EACH STATEMENT EXECUTE FUNCTION shardmap._check_direct_change('map');
CREATE TRIGGER check_version_change AFTER UPDATE OF version ON shardmap.keyspace
    FOR EACH STATEMENT EXECUTE FUNCTION shardmap._check_direct_change('version');
COMMENT ON TRIGGER check_version_change ON shardmap.keyspace IS 'keeps all sessions informed';
CREATE TRIGGER check_direct_change AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON shardmap.shard
    FOR EACH STATEMENT EXECUTE FUNCTION shardmap._check_direct_change('map');
CREATE TRIGGER check_direct_change AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON shardmap.pin
    FOR EACH STATEMENT EXECUTE FUNCTION shardmap._check_direct_change('map');
CREATE TRIGGER check_direct_change AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON shardmap.key_range
    FOR EACH STATEMENT EXECUTE FUNCTION shardmap._check_direct_change('map');
CREATE TRIGGER check_direct_change AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON shardmap.logical_table
    FOR EACH STATEMENT EXECUTE FUNCTION shardmap._check_direct_change('tables');
CREATE TRIGGER check_direct_change AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON shardmap.reference_table
    FOR EACH STATEMENT EXECUTE FUNCTION shardmap._check_direct_change('tables');
CREATE TRIGGER check_direct_change AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON shardmap.key_class
    FOR EACH STATEMENT EXECUTE FUNCTION shardmap._check_direct_change('tables');
COMMENT ON TRIGGER check_direct_change ON shardmap.keyspace IS 'keeps the map valid and all sessions informed';
COMMENT ON TRIGGER check_direct_change ON shardmap.shard IS 'keeps the map valid and all sessions informed';
COMMENT ON TRIGGER check_direct_change ON shardmap.pin IS 'keeps the map valid and all sessions informed';
COMMENT ON TRIGGER check_direct_change ON shardmap.key_range IS 'keeps the map valid and all sessions informed';
COMMENT ON TRIGGER check_direct_change ON shardmap.logical_table IS 'keeps all sessions informed';
COMMENT ON TRIGGER check_direct_change ON shardmap.reference_table IS 'keeps all sessions informed';
COMMENT ON TRIGGER check_direct_change ON shardmap.key_class IS 'keeps all sessions informed';
