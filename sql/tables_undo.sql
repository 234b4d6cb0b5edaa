-- Logical tables: how a table is brought back, and what is set for one.
--
-- Decides the order of the steps, the mirror of tables.sql. What always holds: all or nothing, here and on every shard;
-- the shards' tables are locked before they are read, and dropped only after as many rows have arrived as they held.
-- Constraints, indexes and storage settings are read from a shard, for the logical table has none. Read tables_grants.sql
-- next.

CREATE FUNCTION shardmap._forget_table(relation regclass) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space text;
BEGIN
    PERFORM shardmap._check_owner(relation);
    DELETE FROM shardmap.logical_table t WHERE t.relation = $1 RETURNING t.keyspace INTO space;
    IF FOUND THEN
        PERFORM shardmap.publish_map(space);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._forget_table(regclass) IS 'takes a logical table out of the catalog and publishes the map';
REVOKE ALL ON FUNCTION shardmap._forget_table(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._forget_table(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._find_table(relation regclass) RETURNS shardmap.logical_table
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_one shardmap.logical_table;
BEGIN
    PERFORM shardmap._lock_keyspace(t.keyspace) FROM shardmap.logical_table t WHERE t.relation = $1;
    SELECT t.* INTO found_one FROM shardmap.logical_table t WHERE t.relation = $1;
    IF NOT FOUND THEN
        PERFORM shardmap._check_no_reference(relation);
        RAISE EXCEPTION 'table % is not distributed', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.tables.';
    END IF;
    RETURN found_one;
END
$$;
COMMENT ON FUNCTION shardmap._find_table(regclass) IS 'a logical table''s row, with its keyspace locked against changes';
REVOKE ALL ON FUNCTION shardmap._find_table(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._find_table(regclass) TO shardmap_admin;

-- Through the layer that holds the shard's lock, in batches, as text.
CREATE FUNCTION shardmap._fetch_rows(source regclass, target text, shard text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    names text;
    texts text;
    "values" text;
    there bigint;
    batch bigint;
    fetched bigint := 0;
    told timestamptz := clock_timestamp();
BEGIN
    SELECT string_agg(format('%I', a.attname), ', ' ORDER BY a.attnum),
           string_agg(format('%I::pg_catalog.text', a.attname), ', ' ORDER BY a.attnum),
           string_agg(format('r[%s]::%s', n, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY a.attnum)
      INTO names, texts, "values"
      FROM (SELECT b.*, row_number() OVER (ORDER BY b.attnum) AS n FROM pg_attribute b
             WHERE b.attrelid = source AND b.attnum > 0 AND NOT b.attisdropped AND b.attgenerated = '') a;
    there := shardmap._shard_count(source, shard);
    PERFORM shardmap.remote_execute(shard, format('DECLARE _shardmap_fetch NO SCROLL CURSOR FOR SELECT %s FROM ONLY %s',
        texts, shardmap._shard_table(source)));
    LOOP
        EXECUTE format('INSERT INTO %s (%s) OVERRIDING SYSTEM VALUE SELECT %s FROM shardmap.remote_rows(%L, %L) r',
            target, names, "values", shard, 'FETCH FORWARD 10000 FROM _shardmap_fetch');
        GET DIAGNOSTICS batch = ROW_COUNT;
        EXIT WHEN batch = 0;
        fetched := fetched + batch;
        IF clock_timestamp() > told + interval '10 seconds' THEN
            RAISE NOTICE 'fetched % of % rows from shard "%"', fetched, there, shard;
            told := clock_timestamp();
        END IF;
    END LOOP;
    PERFORM shardmap.remote_execute(shard, 'CLOSE _shardmap_fetch');
    IF fetched <> there THEN
        RAISE EXCEPTION '% of % rows of table % arrived from shard "%"', fetched, there, source, shard USING ERRCODE = 'data_corrupted';
    END IF;
    RETURN fetched;
END
$$;
COMMENT ON FUNCTION shardmap._fetch_rows(regclass, text, text) IS 'copies the rows of a logical table from one shard into a table here and counts them';
REVOKE ALL ON FUNCTION shardmap._fetch_rows(regclass, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._fetch_rows(regclass, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap.undistribute_table(relation regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
SET datestyle = 'ISO, YMD' SET intervalstyle = 'postgres' SET extra_float_digits = 1 SET row_security = off AS $$
DECLARE
    logical shardmap.logical_table;
    schema text;
    name text;
    shards text[];
    shard text;
    statements text[];
    statement text;
    plain regclass;
BEGIN
    PERFORM shardmap._check_transaction('shardmap.undistribute_table');
    logical := shardmap._find_table(relation);
    SELECT n.nspname, c.relname INTO STRICT schema, name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.oid = relation;
    IF NOT pg_has_role((SELECT c.relowner FROM pg_class c WHERE c.oid = relation), 'USAGE') THEN
        RAISE EXCEPTION 'must be owner of table %', relation USING ERRCODE = 'insufficient_privilege';
    END IF;
    PERFORM shardmap._check_no_move(logical.keyspace);
    PERFORM shardmap._check_unused(relation, relation::text);
    EXECUTE format('LOCK TABLE %I.%I IN ACCESS EXCLUSIVE MODE', schema, name);
    PERFORM shardmap._check_dependents(relation);
    shards := ARRAY(SELECT s.name FROM shardmap.shard s WHERE s.keyspace = logical.keyspace ORDER BY s.number);
    FOREACH shard IN ARRAY shards LOOP
        PERFORM shardmap._remote_ddl(shard, format('LOCK TABLE ONLY %I.%I IN ACCESS EXCLUSIVE MODE', schema, name));
    END LOOP;
    -- What was added on the shards alone comes back too.
    SELECT array_agg(x.statement) INTO statements FROM (
        SELECT d.row[2] FROM shardmap.remote_rows(shards[1], shardmap._table_ddl_sql(schema, name, '')) WITH ORDINALITY d (row, position)
         WHERE d.row[1] IN ('detail', 'constraint', 'deferrable', 'check', 'foreign key', 'index')
        UNION ALL
        SELECT format('ALTER TABLE %I.%I ALTER COLUMN %I SET NOT NULL', schema, name, c.row[1])
          FROM shardmap.remote_rows(shards[1], format('SELECT attname::pg_catalog.text FROM pg_catalog.pg_attribute WHERE '
            'attrelid = pg_catalog.to_regclass(%L) AND attnotnull AND attnum > 0 AND NOT attisdropped',
            format('%I.%I', schema, name))) c (row)) x (statement);
    plain := shardmap._replace_table(relation, shardmap._local_table_ddl(relation, logical.key_column, ''));
    -- The old table has another name by now: its shards' tables have not.
    FOREACH shard IN ARRAY shards LOOP
        PERFORM shardmap._fetch_rows(plain, format('%I.%I', schema, name), shard);
    END LOOP;
    FOREACH statement IN ARRAY coalesce(statements, '{}') LOOP
        BEGIN
            EXECUTE statement;
        EXCEPTION WHEN duplicate_object THEN NULL; -- a CHECK that the table has here too
        END;
    END LOOP;
    PERFORM shardmap._forget_table(relation);
    EXECUTE format('DROP TABLE %s', shardmap._shard_table(relation));
    FOREACH shard IN ARRAY shards LOOP
        PERFORM shardmap._remote_ddl(shard, format('DROP TABLE %I.%I', schema, name));
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap.undistribute_table(regclass) IS 'makes a logical table an ordinary one again, with all its rows';
REVOKE ALL ON FUNCTION shardmap.undistribute_table(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.undistribute_table(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap.set_fanout_policy(relation regclass, policy text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap._find_table(relation);
    IF policy NOT IN ('allow', 'notice', 'warning', 'error') THEN
        RAISE EXCEPTION 'unrecognized policy "%"', policy
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use ''allow'', ''notice'', ''warning'' or ''error'', or NULL for that of the session.';
    END IF;
    UPDATE shardmap.logical_table t SET fanout_policy = policy WHERE t.relation = $1;
    PERFORM shardmap.publish_map(t.keyspace) FROM shardmap.logical_table t WHERE t.relation = $1;
END
$$;
COMMENT ON FUNCTION shardmap.set_fanout_policy(regclass, text) IS 'sets what un-keyed statements on a table meet with at least: allow, notice, warning or error; NULL: only what the session says';
REVOKE ALL ON FUNCTION shardmap.set_fanout_policy(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.set_fanout_policy(regclass, text) TO shardmap_admin;
