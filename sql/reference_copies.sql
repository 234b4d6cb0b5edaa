-- Reference tables: their copies compared, made anew, and altered.
--
-- Decides whether a copy is equal: as many rows, and the same sum of their checksums, whatever their order. What always
-- holds: nothing is written while copies are compared, and what is prepared on a shard is waited for. Read
-- reference_guard.sql next.

-- Query for the rows of a table and the sum of their checksums, under a search_path of pg_catalog.
-- No casts: they may be functions of the table's owner, and this runs as an administrator.
CREATE FUNCTION shardmap._reference_checksum_sql(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('SELECT count(*)::text, coalesce(sum((''x'' || substr(md5(ROW(%s)::text), 1, 15))::bit(60)::bigint), 0)::text FROM ONLY %s',
        string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum), shardmap._shard_table(relation))
      FROM pg_attribute a WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
$$;
COMMENT ON FUNCTION shardmap._reference_checksum_sql(regclass) IS 'query for the number of rows of a reference table and the sum of their checksums, here and on shards';
REVOKE ALL ON FUNCTION shardmap._reference_checksum_sql(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._reference_checksum_sql(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap.verify_reference(relation regclass)
RETURNS TABLE (shard text, equal boolean, rows bigint, rows_here bigint, checksum numeric, checksum_here numeric)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off SET timezone = 'UTC'
SET datestyle = 'ISO, YMD' SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
DECLARE
    query text := shardmap._reference_checksum_sql(relation);
BEGIN
    IF NOT EXISTS (SELECT FROM shardmap.reference_table t WHERE t.relation = $1) THEN
        RAISE EXCEPTION 'table % is not a reference table', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.reference_tables.';
    END IF;
    PERFORM shardmap._lock_reference(relation);
    EXECUTE query INTO rows_here, checksum_here;
    FOR shard IN
        SELECT s.name FROM shardmap.reference_table t JOIN shardmap.shard s ON s.keyspace = t.keyspace
         WHERE t.relation = $1 ORDER BY s.name
    LOOP
        -- For what is prepared there, and will be committed.
        PERFORM shardmap._remote_ddl(shard, format('LOCK TABLE ONLY %s IN SHARE MODE', shardmap._shard_table(relation)));
        SELECT r[1], r[2] INTO rows, checksum FROM shardmap.remote_rows(shard, query) r;
        equal := rows = rows_here AND checksum = checksum_here;
        RETURN NEXT;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap.verify_reference(regclass) IS 'compares the copies of a reference table with the table here: rows, and the sum of the rows'' checksums; writers wait meanwhile';
REVOKE ALL ON FUNCTION shardmap.verify_reference(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.verify_reference(regclass) TO shardmap_admin;

-- Row by row: other tables of the shard may refer to the copy.
CREATE FUNCTION shardmap._refresh_reference_copy(relation regclass, shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := shardmap._shard_table(relation);
    side text := '_shardmap_refresh_' || relation::oid;
    source text := (SELECT format('%I.%I', n.nspname, side) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = relation);
    key text[] := ARRAY(SELECT a.attname::text FROM pg_constraint c, unnest(c.conkey) k JOIN pg_attribute a
        ON a.attrelid = relation AND a.attnum = k WHERE c.conrelid = relation AND c.contype = 'p');
    columns text[] := shardmap._reference_columns(relation);
    names text := (SELECT string_agg(quote_ident(c), ', ') FROM unnest(columns) c);
BEGIN
    PERFORM shardmap._remote_ddl(shard, format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE; CREATE TABLE %s (LIKE %1$s)',
        name, source));
    PERFORM shardmap._fill_reference_copies(relation, side, ARRAY[shard]);
    PERFORM shardmap.remote_execute(shard, format('DELETE FROM ONLY %s t WHERE NOT EXISTS (SELECT FROM %s s WHERE %s)', name, source,
        (SELECT string_agg(format('s.%1$I::text = t.%1$I::text', k), ' AND ') FROM unnest(key) k)));
    PERFORM shardmap.remote_execute(shard, format('INSERT INTO %s (%s) OVERRIDING SYSTEM VALUE SELECT %2$s FROM %3$s '
        'ON CONFLICT (%4$s) DO %5$s', name, names, source, (SELECT string_agg(quote_ident(k), ', ') FROM unnest(key) k),
        coalesce('UPDATE SET ' || (SELECT string_agg(format('%1$I = EXCLUDED.%1$I', c), ', ') FROM unnest(columns) c
            WHERE c <> ALL (key)), 'NOTHING')));
    PERFORM shardmap.remote_execute(shard, format('DROP TABLE %s', source));
END
$$;
COMMENT ON FUNCTION shardmap._refresh_reference_copy(regclass, text) IS 'gives a copy of a reference table the rows of the table here';
REVOKE ALL ON FUNCTION shardmap._refresh_reference_copy(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._refresh_reference_copy(regclass, text) TO shardmap_admin;

CREATE FUNCTION shardmap.refresh_reference(relation regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
SET datestyle = 'ISO, YMD' SET intervalstyle = 'postgres' SET extra_float_digits = 1 SET row_security = off AS $$
DECLARE
    differing record;
BEGIN
    PERFORM shardmap._check_transaction('shardmap.refresh_reference');
    IF NOT EXISTS (SELECT FROM shardmap.reference_table t WHERE t.relation = $1) THEN
        RAISE EXCEPTION 'table % is not a reference table', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.reference_tables.';
    END IF;
    PERFORM shardmap._lock_reference(relation);
    FOR differing IN
        SELECT s.name AS shard, EXISTS (SELECT FROM shardmap.remote_rows(s.name, format('SELECT 1::text AS one WHERE '
                'pg_catalog.to_regclass(%L) IS NOT NULL', shardmap._shard_table($1)))) AS is_there
          FROM shardmap.reference_table t JOIN shardmap.shard s ON s.keyspace = t.keyspace
         WHERE t.relation = $1 ORDER BY s.name
    LOOP
        IF differing.is_there THEN
            PERFORM shardmap._refresh_reference_copy(relation, differing.shard);
        ELSE
            PERFORM shardmap._add_reference_copies(relation, ARRAY[differing.shard]);
        END IF;
    END LOOP;
    FOR differing IN SELECT v.shard FROM shardmap.verify_reference(relation) v WHERE NOT v.equal LOOP
        RAISE EXCEPTION 'the copy of % on shard "%" still differs', relation, differing.shard USING ERRCODE = 'data_corrupted',
            HINT = 'Look for triggers on the shard''s table. shardmap.verify_reference() shows the copies.';
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap.refresh_reference(regclass) IS 'gives all copies of a reference table the rows of the table here, and makes those that are missing';
REVOKE ALL ON FUNCTION shardmap.refresh_reference(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.refresh_reference(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._note_reference_layout(relation regclass) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap._check_owner(relation);
    UPDATE shardmap.reference_table t SET layout = shardmap._reference_layout($1) WHERE t.relation = $1;
    PERFORM shardmap.publish_map(t.keyspace) FROM shardmap.reference_table t WHERE t.relation = $1;
END
$$;
COMMENT ON FUNCTION shardmap._note_reference_layout(regclass) IS 'enters in the catalog how a reference table and its copies were altered';
REVOKE ALL ON FUNCTION shardmap._note_reference_layout(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._note_reference_layout(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._is_alter_table(sql text, schema_name text, table_name text) RETURNS boolean
    LANGUAGE c STABLE STRICT AS 'MODULE_PATHNAME', 'is_alter_table_wrapper';
COMMENT ON FUNCTION shardmap._is_alter_table(text, text, text) IS 'whether a text is one statement that alters the table; nothing is looked up or run';
REVOKE ALL ON FUNCTION shardmap._is_alter_table(text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._is_alter_table(text, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_change(relation regclass, change text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
DECLARE
    reason text := 'It would be another statement than ALTER TABLE, or more than one.';
    example constant text := 'Give what follows the name in one ALTER TABLE, as in: ADD COLUMN note text.';
BEGIN
    IF change IS NULL THEN
        RAISE EXCEPTION 'change must not be NULL' USING ERRCODE = 'null_value_not_allowed', HINT = example;
    END IF;
    BEGIN
        IF (SELECT shardmap._is_alter_table(format('ALTER TABLE %s %s', shardmap._shard_table(c.oid), change), n.nspname, c.relname)
              FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation)
        THEN
            RETURN;
        END IF;
    EXCEPTION
        WHEN syntax_error THEN reason := SQLERRM;
    END;
    RAISE EXCEPTION 'cannot alter reference table % in this way', relation
        USING ERRCODE = 'syntax_error', DETAIL = reason, HINT = example;
END
$$;
COMMENT ON FUNCTION shardmap._check_change(regclass, text) IS 'raises an error unless change is what may follow the table''s name in one ALTER TABLE';
REVOKE ALL ON FUNCTION shardmap._check_change(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_change(regclass, text) TO shardmap_admin;

-- Strings as the shards read them.
CREATE FUNCTION shardmap.alter_reference(relation regclass, change text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
DECLARE
    name text := shardmap._shard_table(relation);
    broken text;
    differing record;
BEGIN
    PERFORM shardmap._check_transaction('shardmap.alter_reference');
    IF NOT EXISTS (SELECT FROM shardmap.reference_table t WHERE t.relation = $1) THEN
        RAISE EXCEPTION 'table % is not a reference table', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.reference_tables.';
    END IF;
    PERFORM shardmap._check_change(relation, change);
    PERFORM shardmap._lock_keyspace(t.keyspace) FROM shardmap.reference_table t WHERE t.relation = $1 ORDER BY t.keyspace;
    EXECUTE format('ALTER TABLE %s %s', name, change);
    FOR differing IN
        SELECT s.name AS shard FROM shardmap.reference_table t JOIN shardmap.shard s ON s.keyspace = t.keyspace
         WHERE t.relation = $1 ORDER BY s.name
    LOOP
        PERFORM shardmap._remote_ddl(differing.shard, format('ALTER TABLE %s %s', name, change));
    END LOOP;
    IF name <> shardmap._shard_table(relation) THEN
        RAISE EXCEPTION 'cannot rename or move a reference table' USING ERRCODE = 'feature_not_supported',
            HINT = 'Use shardmap.undistribute_reference(), rename it, and shardmap.distribute_reference().';
    END IF;
    PERFORM shardmap._check_reference_key(relation);
    PERFORM shardmap._note_reference_layout(relation);
    SELECT shardmap._broken_reference($1, t.layout) INTO broken
      FROM shardmap.reference_table t WHERE t.relation = $1 LIMIT 1;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'ALTER TABLE would break reference table %', relation
            USING ERRCODE = 'feature_not_supported', DETAIL = broken;
    END IF;
    FOR differing IN SELECT v.shard FROM shardmap.verify_reference(relation) v WHERE NOT v.equal LOOP
        RAISE EXCEPTION 'the copy of % on shard "%" would differ', relation, differing.shard
            USING ERRCODE = 'feature_not_supported', DETAIL = 'The change gives rows other values there than here.',
                HINT = 'Add a column without such a default, and fill it with UPDATE.';
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap.alter_reference(regclass, text) IS 'alters a reference table and its copies: change is what follows the name in ALTER TABLE, with names qualified';
REVOKE ALL ON FUNCTION shardmap.alter_reference(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.alter_reference(regclass, text) TO shardmap_admin;
