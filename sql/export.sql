-- Maps as JSON, so that further coordinators hold the same one.
--
-- Decides what an exported map holds: keyspaces with shards, tokens, pins, ranges and versions, and where the shards
-- are; no user mappings, hence no passwords. What always holds: what was exported is imported exactly, versions too; a
-- map that is not valid is not imported. Refuses to give a keyspace with tables another map than it has, and a map older
-- than the one that is here. Logical tables are not part of it. Read views.sql next.

CREATE FUNCTION shardmap._check_export(map text) RETURNS text
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'check_export_wrapper';
COMMENT ON FUNCTION shardmap._check_export(text) IS 'an exported map as the core writes it; raises an error if it is not valid';

CREATE FUNCTION shardmap.export_map() RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._check_export(shardmap._map_json(coalesce(jsonb_agg(shardmap._keyspace_json(k.name) ORDER BY k.name), '[]')))::jsonb
      FROM shardmap.keyspace k
$$;
COMMENT ON FUNCTION shardmap.export_map() IS 'all keyspaces of this database, for shardmap.import_map elsewhere';

CREATE FUNCTION shardmap._import_keyspace(space jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    keyspace text := space ->> 'name';
BEGIN
    PERFORM shardmap._check_letters(keyspace);
    -- First: they name shards.
    UPDATE shardmap.keyspace k SET slots = NULL, wanted_slots = NULL WHERE k.name = space ->> 'name' AND k.slots IS NOT NULL;
    DELETE FROM shardmap.key_range r WHERE r.keyspace = space ->> 'name';
    DELETE FROM shardmap.pin p WHERE p.keyspace = space ->> 'name';
    DELETE FROM shardmap.shard s WHERE s.keyspace = space ->> 'name';
    UPDATE shardmap.keyspace k
       SET strategy = space ->> 'strategy', vnodes = (space ->> 'vnodes')::integer, allocation = space ->> 'allocation',
           range_order = CASE space ->> 'range_order' WHEN 'bytes' THEN 'text' ELSE space ->> 'range_order' END,
           wanted_slots = NULL
     WHERE k.name = space ->> 'name';
    IF NOT FOUND THEN
        INSERT INTO shardmap.keyspace (name, strategy, vnodes, allocation, range_order)
        VALUES (keyspace, space ->> 'strategy', (space ->> 'vnodes')::integer, space ->> 'allocation',
            CASE space ->> 'range_order' WHEN 'bytes' THEN 'text' ELSE space ->> 'range_order' END);
    END IF;
    INSERT INTO shardmap.shard (name, keyspace, number, weight, state, tokens, wanted_tokens)
    SELECT s ->> 'name', space ->> 'name', (s ->> 'number')::integer, (s ->> 'weight')::double precision, s ->> 'state',
           ARRAY(SELECT t::bigint FROM jsonb_array_elements_text(s -> 'tokens') WITH ORDINALITY x (t, n) ORDER BY n),
           CASE WHEN s ? 'wanted_tokens' THEN ARRAY(
               SELECT t::bigint FROM jsonb_array_elements_text(s -> 'wanted_tokens') WITH ORDINALITY x (t, n) ORDER BY n) END
      FROM jsonb_array_elements(space -> 'shards') s;
    UPDATE shardmap.keyspace k SET slots = n.slots, wanted_slots = n.wanted
      FROM (SELECT CASE WHEN space ? 'slots' THEN ARRAY(
                    SELECT s::integer FROM jsonb_array_elements_text(space -> 'slots') WITH ORDINALITY x (s, n) ORDER BY n) END AS slots,
                CASE WHEN space ? 'wanted_slots' THEN ARRAY(
                    SELECT s::integer FROM jsonb_array_elements_text(space -> 'wanted_slots') WITH ORDINALITY x (s, n) ORDER BY n) END AS wanted) n
     WHERE k.name = space ->> 'name' AND (n.slots IS NOT NULL OR n.wanted IS NOT NULL);
    INSERT INTO shardmap.pin (keyspace, key, shard)
    SELECT space ->> 'name', p ->> 'key', p ->> 'shard' FROM jsonb_array_elements(space -> 'pins') p;
    INSERT INTO shardmap.key_range (keyspace, lower, upper, shard, version)
    SELECT space ->> 'name', r ->> 'lower', r ->> 'upper', r ->> 'shard', (r ->> 'version')::bigint
      FROM jsonb_array_elements(space -> 'ranges') r;
    PERFORM shardmap.publish_map(keyspace);
    UPDATE shardmap.keyspace k SET version = (space ->> 'version')::bigint WHERE k.name = space ->> 'name';
    PERFORM shardmap.invalidate_caches();
END
$$;
COMMENT ON FUNCTION shardmap._import_keyspace(jsonb) IS 'makes a keyspace what an exported map says and publishes it';
REVOKE ALL ON FUNCTION shardmap._import_keyspace(jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._import_keyspace(jsonb) TO shardmap_admin;

CREATE FUNCTION shardmap.import_map(map jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning AS $$
DECLARE
    space jsonb;
    here shardmap.keyspace;
    shard jsonb;
    gone text;
BEGIN
    FOR space IN SELECT k FROM jsonb_array_elements(shardmap._check_export(map::text)::jsonb -> 'keyspaces') k LOOP
        SELECT k.* INTO here FROM shardmap.keyspace k WHERE k.name = space ->> 'name';
        IF FOUND THEN
            PERFORM shardmap._lock_keyspace(space ->> 'name');
            CONTINUE WHEN shardmap._keyspace_json(here.name) = space;
            IF here.version > (space ->> 'version')::bigint THEN
                RAISE EXCEPTION 'keyspace "%" is at version %, which is later than %', here.name, here.version, space ->> 'version'
                    USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Export the map anew where it was last changed.';
            ELSIF EXISTS (SELECT FROM shardmap.logical_table t WHERE t.keyspace = here.name) THEN
                RAISE EXCEPTION 'keyspace "%" has tables and another map', here.name
                    USING ERRCODE = 'dependent_objects_still_exist',
                        HINT = 'Import it where the keyspace has no tables; the tables here would look for rows elsewhere.';
            END IF;
            FOR gone IN SELECT s.name FROM shardmap.shard s WHERE s.keyspace = here.name
                AND NOT EXISTS (SELECT FROM jsonb_array_elements(space -> 'shards') x WHERE x ->> 'name' = s.name) LOOP
                EXECUTE format('DROP SERVER IF EXISTS %I CASCADE', gone);
            END LOOP;
        END IF;
        FOR shard IN SELECT s FROM jsonb_array_elements(space -> 'shards') s LOOP
            PERFORM shardmap._import_server(shard ->> 'name', shard -> 'options');
        END LOOP;
        PERFORM shardmap._import_keyspace(space);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap.import_map(jsonb) IS 'takes over the keyspaces of an exported map, with a server for each shard; user mappings are for you to make';
REVOKE ALL ON FUNCTION shardmap.import_map(jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.import_map(jsonb) TO shardmap_admin;

CREATE FUNCTION shardmap._import_server(name text, options jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    server pg_foreign_server;
    changes text;
BEGIN
    PERFORM shardmap._check_letters(name);
    SELECT f.* INTO server FROM pg_foreign_server f WHERE f.srvname = name;
    IF NOT FOUND THEN
        EXECUTE format('CREATE SERVER %I FOREIGN DATA WRAPPER shardmap_fdw OPTIONS (%s)', name,
            (SELECT string_agg(format('%I %L', o.key, o.value), ', ') FROM jsonb_each_text(options) o));
        EXECUTE format('COMMENT ON SERVER %I IS %L', name, 'shard of pg_shardmap');
        EXECUTE format('ALTER SERVER %I OWNER TO shardmap_admin', name);
        RETURN;
    ELSIF (SELECT w.fdwname FROM pg_foreign_data_wrapper w WHERE w.oid = server.srvfdw) <> 'shardmap_fdw' THEN
        RAISE EXCEPTION 'foreign server "%" is not a shard', name
            USING ERRCODE = 'duplicate_object', HINT = 'Rename or drop it.';
    END IF;
    SELECT string_agg(CASE WHEN n.key IS NULL THEN format('DROP %I', h.option_name)
            WHEN h.option_name IS NULL THEN format('ADD %I %L', n.key, n.value)
            ELSE format('SET %I %L', n.key, n.value) END, ', ') INTO changes
      FROM pg_options_to_table(server.srvoptions) h FULL JOIN jsonb_each_text(options) n ON n.key = h.option_name
     WHERE n.value IS DISTINCT FROM h.option_value;
    IF changes IS NOT NULL THEN
        EXECUTE format('ALTER SERVER %I OPTIONS (%s)', name, changes);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._import_server(text, jsonb) IS 'makes a shard''s foreign server what an exported map says';
REVOKE ALL ON FUNCTION shardmap._import_server(text, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._import_server(text, jsonb) TO shardmap_admin;
