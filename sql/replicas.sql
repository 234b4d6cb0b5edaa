-- Replicas of shards: which there are, and how one is added, changed and dropped.
--
-- Decides where a replica is (a foreign server of its name) and which reads it should get. What always holds: nothing is
-- left behind of a replica that could not be added; users need no mappings of their own for it, their mappings for the
-- shard serve. Refuses servers that are not in recovery, and those that do not show what is written to the shard. Read src/pg/replicas/mod.rs next.

CREATE TABLE shardmap.replica (
    name text COLLATE pg_catalog."C" PRIMARY KEY
        CONSTRAINT replica_name_length CHECK (pg_catalog.octet_length(name) BETWEEN 1 AND 63),
    shard text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.shard,
    weight double precision NOT NULL DEFAULT 1
        CONSTRAINT replica_weight_range CHECK (weight >= 0 AND weight <= 1000),
    zone text COLLATE pg_catalog."C" NOT NULL DEFAULT '',
    drained boolean NOT NULL DEFAULT false
);
CREATE INDEX replica_shard ON shardmap.replica (shard);
COMMENT ON TABLE shardmap.replica IS 'replicas of shards; each has a foreign server of its name, which says where it is';
COMMENT ON COLUMN shardmap.replica.name IS 'name of the replica and of its foreign server';
COMMENT ON COLUMN shardmap.replica.shard IS 'shard whose primary it follows';
COMMENT ON COLUMN shardmap.replica.weight IS 'share of the shard''s reads, in relation to the other replicas'' weights; 0: none';
COMMENT ON COLUMN shardmap.replica.zone IS 'where it stands, as the administrators call it; empty: nowhere in particular';
COMMENT ON COLUMN shardmap.replica.drained IS 'taken out by an administrator: it gets no reads';
GRANT SELECT ON shardmap.replica TO PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('shardmap.replica', '');

CREATE FUNCTION shardmap._check_replica_weight(replica text, weight double precision) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF weight IS NULL OR NOT (weight >= 0 AND weight <= 1000) THEN
        RAISE EXCEPTION 'invalid weight % for replica "%"', weight, replica
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'A weight is at least 0 and at most 1000; 1 is the ordinary one, 0 gives it no reads.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_replica_weight(text, double precision) IS 'raises an error unless the weight is one';

CREATE FUNCTION shardmap._check_new_replica(shard text, name text, weight double precision) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 63 THEN
        RAISE EXCEPTION 'invalid name "%" for a replica', name
            USING ERRCODE = 'invalid_name', HINT = 'Use a name of 1 to 63 bytes.';
    ELSIF EXISTS (SELECT FROM shardmap.replica r WHERE r.name = $2) THEN
        RAISE EXCEPTION 'replica "%" already exists', name USING ERRCODE = 'duplicate_object';
    ELSIF EXISTS (SELECT FROM pg_foreign_server f WHERE f.srvname = $2) THEN
        RAISE EXCEPTION 'foreign server "%" already exists', name
            USING ERRCODE = 'duplicate_object', HINT = 'Choose another name for the replica, or drop the server.';
    END IF;
    PERFORM shardmap._check_letters(name);
    PERFORM shardmap._check_replica_weight(name, weight);
END
$$;
COMMENT ON FUNCTION shardmap._check_new_replica(text, text, double precision) IS 'raises an error unless a replica of that name and weight can be made';

CREATE FUNCTION shardmap._replica_options(shard text) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(jsonb_object_agg(o.option_name, o.option_value), '{}')
      FROM pg_foreign_server f, pg_options_to_table(f.srvoptions) o
     WHERE f.srvname = $1
       AND o.option_name NOT IN ('host', 'hostaddr', 'port', 'service', 'target_session_attrs', 'load_balance_hosts')
$$;
COMMENT ON FUNCTION shardmap._replica_options(text) IS 'options of a shard''s foreign server that its replicas'' have too: all but where it is';

-- The system identifier of a server, NULL where the user may not see it.
CREATE FUNCTION shardmap._system_identifier(server text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT r[1] FROM shardmap.remote_rows(server, 'SELECT system_identifier FROM pg_catalog.pg_control_system()', false) r);
EXCEPTION
    WHEN insufficient_privilege THEN RETURN NULL;
END
$$;
COMMENT ON FUNCTION shardmap._system_identifier(text) IS 'system identifier of a shard''s or replica''s server; NULL: not to be seen';

-- A copy's database has the number that the original has; every start of a server is a moment of its own.
CREATE FUNCTION shardmap._replica_place(server text) RETURNS text[]
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT r FROM shardmap.remote_rows(server,
        'SELECT d.oid, d.datname, pg_catalog.extract(''epoch'', pg_catalog.pg_postmaster_start_time()),
            CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
                ELSE pg_catalog.pg_current_wal_insert_lsn() END
           FROM pg_catalog.pg_database d WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()', false) r
$$;
COMMENT ON FUNCTION shardmap._replica_place(text) IS
    'where a server''s foreign server leads: number and name of the database, when the server was started, and its place in the log';

CREATE FUNCTION shardmap._server_start(server text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (shardmap._replica_place(server))[3];
EXCEPTION
    WHEN OTHERS THEN RETURN NULL;
END
$$;
COMMENT ON FUNCTION shardmap._server_start(text) IS 'when a server was started; NULL: it does not say';

CREATE FUNCTION shardmap._check_replica(shard text, name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    own text[];
    of_primary text[];
    twin text;
BEGIN
    IF (SELECT r[1] FROM shardmap.remote_rows(name, 'SELECT pg_catalog.pg_is_in_recovery()', false) r) <> 't' THEN
        RAISE EXCEPTION 'server of replica "%" is not a replica', name
            USING ERRCODE = 'wrong_object_type', DETAIL = 'It is not in recovery.',
                HINT = 'Name a streaming replica of the shard''s server.';
    ELSIF shardmap._system_identifier(name) <> shardmap._system_identifier(shard) THEN
        RAISE EXCEPTION 'server of replica "%" is not a copy of shard "%"', name, shard
            USING ERRCODE = 'invalid_parameter_value', DETAIL = 'Its system identifier is another one.',
                HINT = 'Name a streaming replica of the shard''s server.';
    END IF;
    -- The primary last: it is at least as far as its replica was.
    own := shardmap._replica_place(name);
    of_primary := shardmap._replica_place(shard);
    IF (own[1], own[2]) IS DISTINCT FROM (of_primary[1], of_primary[2]) THEN
        RAISE EXCEPTION 'replica "%" does not show the database of shard "%"', name, shard
            USING ERRCODE = 'invalid_parameter_value',
                DETAIL = format('It is database "%s" (OID %s), the shard''s "%s" (OID %s).', own[2], own[1], of_primary[2], of_primary[1]),
                HINT = 'Leave dbname out: it is the shard''s then.';
    ELSIF own[4]::pg_lsn > of_primary[4]::pg_lsn THEN
        RAISE EXCEPTION 'server of replica "%" is not a copy of shard "%"', name, shard
            USING ERRCODE = 'invalid_parameter_value',
                DETAIL = format('It has replayed up to %s, the shard has written up to %s only.', own[4], of_primary[4]),
                HINT = 'Name a streaming replica of the shard''s server.';
    END IF;
    FOR twin IN SELECT r.name FROM shardmap.replica r WHERE r.shard = $1 AND r.name <> $2 ORDER BY r.name LOOP
        IF shardmap._server_start(twin) = own[3] THEN
            RAISE EXCEPTION 'server of replica "%" is already replica "%"', name, twin
                USING ERRCODE = 'duplicate_object', HINT = 'shardmap.set_replica() changes a replica''s weight and zone.';
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._check_replica(text, text) IS 'raises an error unless the server behind a foreign server is a replica of the shard''s';

-- A mark is written to the shard that nobody can have who does not replay the shard's own log: a large object of random content,
-- removed again in any case. That system identifier and timeline are the shard's says nothing of servers cloned from one image.
CREATE FUNCTION shardmap._shows_mark(replica text, mark oid, content text) RETURNS text[]
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT r FROM shardmap.remote_rows(replica, format(
        'SELECT pg_catalog.pg_last_wal_replay_lsn(), CASE WHEN EXISTS (
                SELECT FROM pg_catalog.pg_largeobject_metadata m
                 WHERE m.oid OPERATOR(pg_catalog.=) %1$s AND pg_catalog.pg_has_role(m.lomowner, ''USAGE''))
            THEN pg_catalog.lo_get(%1$s) OPERATOR(pg_catalog.=) pg_catalog.decode(%2$L, ''hex'') ELSE false END', mark, content), false) r
$$;
COMMENT ON FUNCTION shardmap._shows_mark(text, oid, text) IS 'up to where a replica has replayed, and whether it has what was written to its shard as a mark';

CREATE FUNCTION shardmap._check_follows(shard text, name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    patience constant interval := '10 s';
    content constant text := replace(gen_random_uuid()::text, '-', '');
    began constant timestamptz := clock_timestamp();
    mark oid;
    written pg_lsn;
    seen text[];
    is_past boolean := false;
BEGIN
    mark := (SELECT r[1] FROM shardmap.remote_rows(shard,
        format('SELECT pg_catalog.lo_from_bytea(0, pg_catalog.decode(%L, ''hex''))', content), false) r);
    BEGIN
        written := (shardmap._replica_place(shard))[4];
        LOOP
            seen := shardmap._shows_mark(name, mark, content);
            EXIT WHEN seen[2] = 't';
            -- What it had replayed before the look, the look must show.
            IF is_past THEN
                RAISE EXCEPTION 'server of replica "%" is not a copy of shard "%"', name, shard
                    USING ERRCODE = 'invalid_parameter_value',
                        DETAIL = format('It has replayed up to %s, and does not have what was written to the shard before %s.', seen[1], written),
                        HINT = 'Name a streaming replica of the shard''s server. The two may be clones of one image: pg_stat_wal_receiver there says whom it follows.';
            ELSIF clock_timestamp() > began + patience THEN
                RAISE EXCEPTION 'server of replica "%" does not follow shard "%"', name, shard
                    USING ERRCODE = 'object_not_in_prerequisite_state',
                        DETAIL = format('It has replayed up to %s, and not yet up to %s, to where the shard was %s ago.', seen[1], written, patience),
                        HINT = 'See pg_stat_wal_receiver there. If it follows the shard and is behind, wait until it has caught up, or add it with trust => true.';
            END IF;
            is_past := seen[1]::pg_lsn >= written;
            PERFORM pg_sleep(0.02);
        END LOOP;
    EXCEPTION
        WHEN OTHERS OR query_canceled THEN
            PERFORM shardmap.remote_rows(shard, format('SELECT pg_catalog.lo_unlink(%s)', mark), false);
            RAISE;
    END;
    PERFORM shardmap.remote_rows(shard, format('SELECT pg_catalog.lo_unlink(%s)', mark), false);
END
$$;
COMMENT ON FUNCTION shardmap._check_follows(text, text) IS 'raises an error unless a replica soon shows what is written to its shard now';

CREATE FUNCTION shardmap._register_replica(shard text, name text, weight double precision, zone text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO shardmap.replica (name, shard, weight, zone) VALUES ($2, $1, $3, $4)
$$;
COMMENT ON FUNCTION shardmap._register_replica(text, text, double precision, text) IS 'enters a replica in the catalog';

CREATE FUNCTION shardmap._update_replica(name text, weight double precision, zone text, drained boolean) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE shardmap.replica r
       SET weight = coalesce($2, r.weight), zone = coalesce($3, r.zone), drained = coalesce($4, r.drained) WHERE r.name = $1;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION shardmap._update_replica(text, double precision, text, boolean) IS 'changes a replica in the catalog, what is not NULL; false: there is none of that name';

CREATE FUNCTION shardmap._delete_replica(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM shardmap.replica r WHERE r.name = $1;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION shardmap._delete_replica(text) IS 'takes a replica out of the catalog; false: there is none of that name';

CREATE FUNCTION shardmap._no_replica(name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'replica "%" does not exist', name
        USING ERRCODE = 'undefined_object', HINT = 'See shardmap.replica.';
END
$$;
COMMENT ON FUNCTION shardmap._no_replica(text) IS 'raises the error that there is no such replica';

CREATE FUNCTION shardmap.add_replica(
    shard text,
    name text,
    host text DEFAULT NULL,
    port integer DEFAULT NULL,
    dbname text DEFAULT NULL,
    options text DEFAULT '',
    weight double precision DEFAULT 1,
    zone text DEFAULT '',
    trust boolean DEFAULT false
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
BEGIN
    PERFORM shardmap._find_shard(shard);
    PERFORM shardmap._check_new_replica(shard, name, weight);
    PERFORM shardmap._create_server(name, host, port, dbname, options, shardmap._replica_options(shard), 'replica of a shard of pg_shardmap');
    PERFORM shardmap._register_replica(shard, name, weight, coalesce(zone, ''));
    PERFORM shardmap._check_replica(shard, name);
    IF trust IS NOT TRUE THEN
        PERFORM shardmap._check_follows(shard, name);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.add_replica(text, text, text, integer, text, text, double precision, text, boolean) IS
    'registers a streaming replica of a shard''s server; what is not given is as it is for the shard: database, options, user mappings. trust: takes it though it may be far behind, or follow something else';

CREATE FUNCTION shardmap.set_replica(name text, weight double precision DEFAULT NULL, zone text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF weight IS NOT NULL THEN
        PERFORM shardmap._check_replica_weight(name, weight);
    END IF;
    IF shardmap._update_replica(name, weight, zone, NULL) IS NOT TRUE THEN
        PERFORM shardmap._no_replica(name);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.set_replica(text, double precision, text) IS 'changes a replica''s weight or zone; NULL leaves it as it is';

CREATE FUNCTION shardmap.drain_replica(name text, drain boolean DEFAULT true) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF drain IS NULL THEN
        RAISE EXCEPTION 'whether to drain replica "%" must not be NULL', name
            USING ERRCODE = 'null_value_not_allowed', HINT = 'true takes it out of rotation, false brings it back.';
    END IF;
    IF shardmap._update_replica(name, NULL, NULL, drain) IS NOT TRUE THEN
        PERFORM shardmap._no_replica(name);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.drain_replica(text, boolean) IS 'takes a replica out of rotation, so that it gets no reads, or brings it back';

CREATE FUNCTION shardmap.drop_replica(name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning AS $$
BEGIN
    IF shardmap._delete_replica(name) IS NOT TRUE THEN
        PERFORM shardmap._no_replica(name);
    END IF;
    EXECUTE format('DROP SERVER IF EXISTS %I CASCADE', name);
END
$$;
COMMENT ON FUNCTION shardmap.drop_replica(text) IS 'forgets a replica: its foreign server, and user mappings for it; the replica itself is left alone';

DO $$
DECLARE
    function text;
BEGIN
    FOREACH function IN ARRAY ARRAY['_check_replica_weight(text, double precision)', '_check_new_replica(text, text, double precision)',
        '_replica_options(text)', '_system_identifier(text)', '_check_replica(text, text)', '_replica_place(text)', '_server_start(text)',
        '_shows_mark(text, oid, text)', '_check_follows(text, text)',
        '_register_replica(text, text, double precision, text)', '_update_replica(text, double precision, text, boolean)',
        '_delete_replica(text)', '_no_replica(text)',
        'add_replica(text, text, text, integer, text, text, double precision, text, boolean)', 'set_replica(text, double precision, text)',
        'drain_replica(text, boolean)', 'drop_replica(text)'] LOOP
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION shardmap.%s FROM PUBLIC', function);
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION shardmap.%s TO shardmap_admin', function);
    END LOOP;
END
$$;
