-- Further coordinators, which route by a map of their own: whether it is this one.
--
-- Decides where they are (a foreign server of each one's name). What always holds: nothing is left behind of one that could
-- not be added; an audit asks all of them at once, and one that does not answer is unknown, never equal. Refuses servers
-- without the extension, and this database itself. Read audit.sql next.

CREATE TABLE shardmap.coordinator (
    name text COLLATE pg_catalog."C" PRIMARY KEY
        CONSTRAINT coordinator_name_length CHECK (pg_catalog.octet_length(name) BETWEEN 1 AND 63)
);
COMMENT ON TABLE shardmap.coordinator IS 'further coordinators of the same shards; each has a foreign server of its name, which says where it is';
COMMENT ON COLUMN shardmap.coordinator.name IS 'name of the coordinator and of its foreign server';
GRANT SELECT ON shardmap.coordinator TO PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('shardmap.coordinator', '');

CREATE FUNCTION shardmap._register_coordinator(name text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO shardmap.coordinator (name) VALUES ($1)
$$;
COMMENT ON FUNCTION shardmap._register_coordinator(text) IS 'enters a coordinator in the catalog';

CREATE FUNCTION shardmap._delete_coordinator(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM shardmap.coordinator c WHERE c.name = $1;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION shardmap._delete_coordinator(text) IS 'takes a coordinator out of the catalog; false: there is none of that name';

CREATE FUNCTION shardmap._check_coordinator(name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    there text[] := shardmap._replica_place(name);
BEGIN
    IF NOT (SELECT r[1]::boolean FROM shardmap.remote_rows(name, 'SELECT EXISTS (SELECT FROM pg_catalog.pg_extension e '
            'WHERE e.extname OPERATOR(pg_catalog.=) ''pg_shardmap'')', false) r) THEN
        RAISE EXCEPTION 'database of coordinator "%" does not have the extension pg_shardmap', name
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = format('It is database "%s".', there[2]),
                HINT = 'Name the database in which the other coordinator routes.';
    ELSIF there[1] = (SELECT d.oid::text FROM pg_database d WHERE d.datname = current_database())
        AND there[3] = extract('epoch' FROM pg_postmaster_start_time())::text
    THEN
        RAISE EXCEPTION 'coordinator "%" would be this database itself', name
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name another coordinator.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_coordinator(text) IS 'raises an error unless the database behind a foreign server is another coordinator';

CREATE FUNCTION shardmap.add_coordinator(name text, host text DEFAULT NULL, port integer DEFAULT NULL, dbname text DEFAULT NULL,
    options text DEFAULT '') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
BEGIN
    IF name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 63 THEN
        RAISE EXCEPTION 'invalid name "%" for a coordinator', name USING ERRCODE = 'invalid_name', HINT = 'Use a name of 1 to 63 bytes.';
    ELSIF EXISTS (SELECT FROM pg_foreign_server f WHERE f.srvname = $1) THEN
        RAISE EXCEPTION 'foreign server "%" already exists', name
            USING ERRCODE = 'duplicate_object', HINT = 'Choose another name for the coordinator, or drop the server.';
    END IF;
    PERFORM shardmap._check_letters(name);
    PERFORM shardmap._create_server(name, host, port, dbname, options,
        jsonb_build_object('dbname', current_database(), 'user', CURRENT_USER), 'coordinator of pg_shardmap');
    PERFORM shardmap._register_coordinator(name);
    PERFORM shardmap._check_coordinator(name);
END
$$;
COMMENT ON FUNCTION shardmap.add_coordinator(text, text, integer, text, text) IS
    'makes another coordinator of the same shards known, so that audits compare its map with this one: foreign server, user mapping';

CREATE FUNCTION shardmap.drop_coordinator(name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning AS $$
BEGIN
    IF shardmap._delete_coordinator(name) IS NOT TRUE THEN
        RAISE EXCEPTION 'coordinator "%" does not exist', name USING ERRCODE = 'undefined_object', HINT = 'See shardmap.coordinator.';
    END IF;
    EXECUTE format('DROP SERVER IF EXISTS %I CASCADE', name);
END
$$;
COMMENT ON FUNCTION shardmap.drop_coordinator(text) IS 'forgets another coordinator: its foreign server, and user mappings for it; the coordinator itself is left alone';

CREATE FUNCTION shardmap._audit_coordinators(keyspace text) RETURNS TABLE (kind text, coordinator text, detail text)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH here AS (SELECT shardmap.map_version($1) AS version, shardmap.map_digest($1) AS digest
    ), there AS (
        SELECT a.shard, a.error, (a.answer::json ->> 0)::bigint AS version, a.answer::json ->> 1 AS digest
          FROM shardmap._ask_shards(ARRAY(SELECT c.name FROM shardmap.coordinator c ORDER BY c.name), format(
            'SELECT json_build_array(shardmap.map_version(%1$L), shardmap.map_digest(%1$L))::text AS answer', $1), false) a)
    SELECT CASE WHEN t.error IS NOT NULL THEN 'unknown' WHEN t.version = h.version THEN 'coordinator_differs'
            WHEN t.version > h.version THEN 'coordinator_ahead' ELSE 'coordinator_behind' END,
        t.shard, CASE WHEN t.error IS NOT NULL THEN t.error WHEN t.version IS NULL THEN 'it has no such keyspace'
            WHEN t.version = h.version THEN format('its map of version %s has digest %s, the one here %s', t.version, t.digest, h.digest)
            ELSE format('its map is at version %s, the one here at %s', t.version, h.version) END
      FROM there t CROSS JOIN here h WHERE t.error IS NOT NULL OR t.digest IS DISTINCT FROM h.digest
$$;
COMMENT ON FUNCTION shardmap._audit_coordinators(text) IS 'coordinators whose map of a keyspace is another one, or that do not say';

DO $$
DECLARE
    function text;
BEGIN
    FOREACH function IN ARRAY ARRAY['_register_coordinator(text)', '_delete_coordinator(text)', '_check_coordinator(text)',
        'add_coordinator(text, text, integer, text, text)', 'drop_coordinator(text)', '_audit_coordinators(text)'] LOOP
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION shardmap.%s FROM PUBLIC', function);
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION shardmap.%s TO shardmap_admin', function);
    END LOOP;
END
$$;
