-- Shards: how one is added.
--
-- Decides where a shard is (a foreign server of its name and a user mapping), its number, its state and its tokens. What
-- always holds: nothing is left behind of a shard that could not be added; no row changes its owner, for a shard that
-- joins a keyspace with rows owns nothing until they are moved; every logical table of the keyspace gets its table and
-- its partition there. Refuses databases that could answer differently, see shards_check.sql. Read shards_change.sql
-- next.

GRANT USAGE ON FOREIGN DATA WRAPPER shardmap_fdw TO shardmap_admin;

-- Statements on a logical table have connections of their own to the shards. What they did in this transaction would be
-- unseen here, and what they locked there would be waited for in vain.
CREATE FUNCTION shardmap._check_unused(relation oid, name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_locks l
                WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND l.relation = $1
                  AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                  AND l.mode IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')) THEN
        RAISE EXCEPTION 'table % has been used in this transaction', name
            USING ERRCODE = 'object_in_use', HINT = 'Commit first, and change the map in a transaction of its own.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_unused(oid, text) IS 'raises an error if this transaction has read or written a logical table';
GRANT EXECUTE ON FUNCTION shardmap._check_unused(oid, text) TO PUBLIC; -- DROP TABLE is for all

CREATE FUNCTION shardmap._lock_tables(keyspace text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    logical record;
BEGIN
    FOR logical IN
        SELECT t.relation, t.relation::text AS name FROM shardmap.logical_table t WHERE t.keyspace = $1 ORDER BY t.relation::oid
    LOOP
        PERFORM shardmap._check_unused(logical.relation, logical.name);
        -- With its partitions: they can be written directly.
        EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', logical.name);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._lock_tables(text) IS 'holds off writers of all logical tables of a keyspace until the transaction ends, so that no row lands by the old map';
REVOKE ALL ON FUNCTION shardmap._lock_tables(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._lock_tables(text) TO shardmap_admin;

-- A shard's locks are no part of this server's deadlock check, so that waiting for one has an end.
CREATE FUNCTION shardmap._remote_ddl(shard text, sql text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap.remote_execute(shard, format('SET LOCAL lock_timeout = %L; %s',
        CASE current_setting('lock_timeout') WHEN '0' THEN '60s' ELSE current_setting('lock_timeout') END, sql));
END
$$;
COMMENT ON FUNCTION shardmap._remote_ddl(text, text) IS 'runs statements on a shard that lock tables there, with this session''s lock_timeout, or a minute';
REVOKE ALL ON FUNCTION shardmap._remote_ddl(text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._remote_ddl(text, text) TO shardmap_admin;

CREATE FUNCTION shardmap._tables_with_rows(shard text) RETURNS TABLE (relation regclass)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    query text;
BEGIN
    SELECT string_agg(format('SELECT %s WHERE EXISTS (SELECT FROM ONLY %s)', t.relation::oid,
            shardmap._shard_table(t.relation)), ' UNION ALL ') INTO query
      FROM shardmap.logical_table t JOIN shardmap.shard s ON s.keyspace = t.keyspace WHERE s.name = shard;
    IF query IS NOT NULL THEN
        RETURN QUERY SELECT r[1]::oid::regclass FROM shardmap.remote_rows(shard, query) r;
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._tables_with_rows(text) IS 'logical tables that have rows on a shard, asked of the shard';
REVOKE ALL ON FUNCTION shardmap._tables_with_rows(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._tables_with_rows(text) TO shardmap_admin;

CREATE FUNCTION shardmap._keyspace_has_rows(keyspace text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shard text;
BEGIN
    FOR shard IN SELECT s.name FROM shardmap.shard s WHERE s.keyspace = $1 ORDER BY s.number LOOP
        IF EXISTS (SELECT FROM shardmap._tables_with_rows(shard)) THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END
$$;
COMMENT ON FUNCTION shardmap._keyspace_has_rows(text) IS 'whether any logical table of a keyspace has a row, asked of its shards';
REVOKE ALL ON FUNCTION shardmap._keyspace_has_rows(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._keyspace_has_rows(text) TO shardmap_admin;

CREATE FUNCTION shardmap._register_shard(name text, keyspace text, weight double precision, state text, wanted_tokens bigint[], at_once boolean)
RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    number integer;
BEGIN
    -- A number stays with its shard; those of dropped shards come back into use only when all others are taken.
    SELECT CASE WHEN max(s.number) < 1023 THEN max(s.number) + 1 WHEN max(s.number) IS NULL THEN 0 END INTO number
      FROM shardmap.shard s WHERE s.keyspace = $2;
    IF number IS NULL THEN
        SELECT min(n) INTO number FROM generate_series(0, 1023) n
         WHERE NOT EXISTS (SELECT FROM shardmap.shard s WHERE s.keyspace = $2 AND s.number = n);
    END IF;
    IF number IS NULL THEN
        RAISE EXCEPTION 'keyspace "%" is full', keyspace
            USING ERRCODE = 'program_limit_exceeded', DETAIL = 'A keyspace has at most 1024 shards.';
    END IF;
    PERFORM shardmap._note_tokens(keyspace);
    INSERT INTO shardmap.shard (name, keyspace, number, weight, state, wanted_tokens) VALUES ($1, $2, number, $3, $4, $5);
    UPDATE shardmap.keyspace k SET wanted_slots = NULL WHERE k.name = $2 AND k.wanted_slots IS NOT NULL;
    IF at_once THEN
        PERFORM shardmap._settle(keyspace);
    END IF;
    PERFORM shardmap.publish_map(keyspace);
    RETURN number;
END
$$;
COMMENT ON FUNCTION shardmap._register_shard(text, text, double precision, text, bigint[], boolean) IS 'enters a shard in the catalog and publishes the map; returns its number; at_once: the keyspace becomes what it should be';
REVOKE ALL ON FUNCTION shardmap._register_shard(text, text, double precision, text, bigint[], boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._register_shard(text, text, double precision, text, bigint[], boolean) TO shardmap_admin;

-- Runs as the caller, so that the user mapping is the caller's and no one reads with another's password.
-- `defaults`: the options that it has unless they are given.
CREATE FUNCTION shardmap._create_server(name text, host text, port integer, dbname text, options text, defaults jsonb, remark text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    server_options text;
    mapping_options text;
    secret constant text[] := ARRAY['user', 'password', 'sslpassword', 'oauth_client_secret', 'password_required'];
BEGIN
    WITH given (name, value) AS (
        SELECT o.name, o.value FROM shardmap._parse_options(coalesce(options, '')) o
        UNION ALL SELECT 'host', _create_server.host WHERE _create_server.host IS NOT NULL
        UNION ALL SELECT 'port', _create_server.port::text WHERE _create_server.port IS NOT NULL
        UNION ALL SELECT 'dbname', _create_server.dbname WHERE _create_server.dbname IS NOT NULL
    ), completed AS (
        SELECT g.name, g.value FROM given g
        UNION ALL
        SELECT d.key, d.value FROM jsonb_each_text(defaults) d WHERE NOT EXISTS (SELECT FROM given g WHERE g.name = d.key)
    )
    SELECT string_agg(format('%I %L', c.name, c.value), ', ' ORDER BY c.name) FILTER (WHERE c.name <> ALL (secret)),
           string_agg(format('%I %L', c.name, c.value), ', ' ORDER BY c.name) FILTER (WHERE c.name = ANY (secret))
      INTO server_options, mapping_options FROM completed c;
    EXECUTE format('CREATE SERVER %I FOREIGN DATA WRAPPER shardmap_fdw%s', name, ' OPTIONS (' || server_options || ')');
    EXECUTE format('COMMENT ON SERVER %I IS %L', name, remark);
    IF mapping_options IS NOT NULL THEN
        EXECUTE format('CREATE USER MAPPING FOR CURRENT_USER SERVER %I OPTIONS (%s)', name, mapping_options);
    END IF;
    EXECUTE format('ALTER SERVER %I OWNER TO shardmap_admin', name);
END
$$;
COMMENT ON FUNCTION shardmap._create_server(text, text, integer, text, text, jsonb, text) IS 'makes a foreign server, owned by shardmap_admin, and the caller''s user mapping if the options name a user';
REVOKE ALL ON FUNCTION shardmap._create_server(text, text, integer, text, text, jsonb, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._create_server(text, text, integer, text, text, jsonb, text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_new_shard(name text, weight double precision) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 63 THEN
        RAISE EXCEPTION 'invalid name "%" for a shard', name
            USING ERRCODE = 'invalid_name', HINT = 'Use a name of 1 to 63 bytes.';
    ELSIF EXISTS (SELECT FROM shardmap.shard s WHERE s.name = $1) THEN
        RAISE EXCEPTION 'shard "%" already exists', name USING ERRCODE = 'duplicate_object';
    ELSIF EXISTS (SELECT FROM pg_foreign_server f WHERE f.srvname = name) THEN
        RAISE EXCEPTION 'foreign server "%" already exists', name
            USING ERRCODE = 'duplicate_object', HINT = 'Choose another name for the shard, or drop the server.';
    END IF;
    PERFORM shardmap._check_letters(name);
    PERFORM shardmap._check_weight(name, weight);
END
$$;
COMMENT ON FUNCTION shardmap._check_new_shard(text, double precision) IS 'raises an error unless a shard of that name and weight can be made';
REVOKE ALL ON FUNCTION shardmap._check_new_shard(text, double precision) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_new_shard(text, double precision) TO shardmap_admin;

-- By the options as they are written; distribute_table looks at what is behind them.
CREATE FUNCTION shardmap._check_address(name text, keyspace text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    twin text;
BEGIN
    WITH address (name, parts) AS (
        SELECT f.srvname::text, ARRAY(SELECT o.option_name || '=' || o.option_value FROM pg_options_to_table(f.srvoptions) o
            WHERE o.option_name IN ('host', 'hostaddr', 'port', 'dbname', 'service') ORDER BY 1)
          FROM pg_foreign_server f
    )
    SELECT s.name INTO twin FROM shardmap.shard s JOIN address a ON a.name = s.name
     WHERE s.keyspace = $2 AND s.name <> $1 AND a.parts = (SELECT b.parts FROM address b WHERE b.name = $1)
     ORDER BY s.number LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'shard "%" would be the same database as shard "%"', name, twin
            USING ERRCODE = 'duplicate_object', HINT = 'Give every shard of a keyspace a database of its own.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_address(text, text) IS 'raises an error if another shard of the keyspace has the same address';
REVOKE ALL ON FUNCTION shardmap._check_address(text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_address(text, text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_weight(shard text, weight double precision) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF weight IS NULL OR NOT (weight > 0 AND weight <= 1000) THEN
        RAISE EXCEPTION 'invalid weight % for shard "%"', weight, shard
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'A weight is greater than 0 and at most 1000; 1 is the ordinary one.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_weight(text, double precision) IS 'raises an error unless the weight is one';
REVOKE ALL ON FUNCTION shardmap._check_weight(text, double precision) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_weight(text, double precision) TO shardmap_admin;

CREATE FUNCTION shardmap.add_shard(
    name text,
    host text DEFAULT NULL,
    port integer DEFAULT NULL,
    dbname text DEFAULT NULL,
    options text DEFAULT '',
    weight double precision DEFAULT 1,
    keyspace text DEFAULT 'main'
) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
DECLARE
    space shardmap.keyspace;
    source text;
    at_once boolean := false;
    relation regclass;
BEGIN
    space := shardmap._lock_keyspace(keyspace);
    PERFORM shardmap._check_new_shard(name, weight);
    PERFORM shardmap._create_server(name, host, port, dbname, options,
        jsonb_build_object('fetch_size', '1000', 'batch_size', '1000', 'async_capable', 'true', 'user', CURRENT_USER), 'shard of pg_shardmap');
    PERFORM shardmap._check_address(name, keyspace);
    PERFORM shardmap._check_shard(name);
    SELECT s.name INTO source FROM shardmap.shard s WHERE s.keyspace = add_shard.keyspace ORDER BY s.number LIMIT 1;
    -- Under strategy range a shard owns what set_range gives it: being there changes nothing.
    IF space.strategy = 'range' THEN
        PERFORM shardmap._register_shard(name, keyspace, weight, 'active', NULL, false);
    ELSE
        PERFORM shardmap._lock_tables(keyspace);
        at_once := shardmap._is_empty(keyspace);
        PERFORM shardmap._register_shard(name, keyspace, weight, 'joining', shardmap._choose_tokens(shardmap._wish(keyspace), name, weight), at_once);
    END IF;
    -- First: the others' foreign keys may refer to them.
    FOR relation IN
        SELECT t.relation FROM shardmap.reference_table t WHERE t.keyspace = add_shard.keyspace ORDER BY t.relation::oid
    LOOP
        PERFORM shardmap._add_reference_copies(relation, ARRAY[name]);
    END LOOP;
    FOR relation IN
        SELECT t.relation FROM shardmap.logical_table t WHERE t.keyspace = add_shard.keyspace ORDER BY t.relation::oid
    LOOP
        PERFORM shardmap._clone_shard_table(relation, source, name);
        PERFORM shardmap._grant_on_shard(relation, name);
        PERFORM shardmap._create_partition(relation, name);
    END LOOP;
    IF NOT at_once AND space.strategy <> 'range' THEN
        PERFORM shardmap._tell_wish(keyspace, format('shard "%s" owns nothing yet', name));
    END IF;
    RETURN (SELECT s.state FROM shardmap.shard s WHERE s.name = $1);
END
$$;
COMMENT ON FUNCTION shardmap.add_shard(text, text, integer, text, text, double precision, text) IS 'adds a database as a shard: foreign server, user mapping, checks, tables; returns its state, active or joining';
REVOKE ALL ON FUNCTION shardmap.add_shard(text, text, integer, text, text, double precision, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.add_shard(text, text, integer, text, text, double precision, text) TO shardmap_admin;
