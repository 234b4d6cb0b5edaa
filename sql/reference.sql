-- Reference tables: how every shard gets a copy of a table, and loses it again.
--
-- Decides the order of the steps. A reference table stays the ordinary table that it was; triggers write to the copies
-- what is written to it, in the same transaction (src/pg/reference). What always holds: all or nothing, here and on
-- every shard; writers wait while copies are made, so that none misses a row; copies are counted. Read
-- reference_copies.sql next.

CREATE FUNCTION shardmap._replicate_reference() RETURNS trigger
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'replicate_reference_wrapper';
COMMENT ON FUNCTION shardmap._replicate_reference() IS 'trigger: writes to the copies of a reference table what was written to it';
REVOKE ALL ON FUNCTION shardmap._replicate_reference() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._replicate_reference() TO shardmap_admin;

CREATE FUNCTION shardmap._check_no_reference(relation regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM shardmap.reference_table t WHERE t.relation = $1) THEN
        RAISE EXCEPTION 'table % is a reference table', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Use shardmap.undistribute_reference() first.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_no_reference(regclass) IS 'raises an error if the table is a reference table';
REVOKE ALL ON FUNCTION shardmap._check_no_reference(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_no_reference(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._check_reference_key(relation regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    is_deferrable boolean := (SELECT c.condeferrable FROM pg_constraint c WHERE c.conrelid = relation AND c.contype = 'p');
BEGIN
    IF is_deferrable IS NULL THEN
        RAISE EXCEPTION 'table % has no primary key', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = 'Rows of its copies would not be found again.',
                HINT = 'Give it one: ALTER TABLE ... ADD PRIMARY KEY.';
    ELSIF is_deferrable THEN
        RAISE EXCEPTION 'the primary key of table % is deferrable', relation
            USING ERRCODE = 'feature_not_supported', DETAIL = 'Rows could have the same key until the transaction ends.',
                HINT = 'Make it NOT DEFERRABLE.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_reference_key(regclass) IS 'raises an error unless the table has a primary key that holds at every moment';
REVOKE ALL ON FUNCTION shardmap._check_reference_key(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_reference_key(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._reference_columns(relation regclass) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
     WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
$$;
COMMENT ON FUNCTION shardmap._reference_columns(regclass) IS 'columns of a table that are not computed from others';
REVOKE ALL ON FUNCTION shardmap._reference_columns(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._reference_columns(regclass) TO shardmap_admin;

-- What the copies share with the table; all else can be altered here alone. As JSON, for every version of Postgres quotes
-- names in its own way.
CREATE FUNCTION shardmap._reference_layout(relation regclass) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT array_agg(l.line::text ORDER BY l.position) FROM (
        SELECT 0 AS position, jsonb_build_object('schema', n.nspname, 'table', c.relname) AS line
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation
        UNION ALL
        SELECT a.attnum, jsonb_strip_nulls(jsonb_build_object('column', a.attname, 'type', t.typname, 'schema', n.nspname,
            'modifier', nullif(a.atttypmod, -1), 'generated', nullif(a.attgenerated::text, ''),
            'collation', (SELECT concat(m.nspname, '.', c.collname) FROM pg_collation c JOIN pg_namespace m ON m.oid = c.collnamespace
                WHERE c.oid = a.attcollation AND a.attcollation <> t.typcollation)))
          FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid JOIN pg_namespace n ON n.oid = t.typnamespace
         WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT 10000, jsonb_strip_nulls(jsonb_build_object('deferrable', nullif(c.condeferrable, false),
            'key', (SELECT jsonb_agg(a.attname ORDER BY k.position) FROM unnest(c.conkey) WITH ORDINALITY k (number, position)
                JOIN pg_attribute a ON a.attrelid = relation AND a.attnum = k.number)))
          FROM pg_constraint c WHERE c.conrelid = relation AND c.contype = 'p') l
$$;
COMMENT ON FUNCTION shardmap._reference_layout(regclass) IS 'name, columns and primary key of a table, one line each';

CREATE FUNCTION shardmap._lock_reference(relation regclass) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE',
        (SELECT shardmap._shard_table(t.relation) FROM shardmap.reference_table t WHERE t.relation = $1 LIMIT 1));
END
$$;
COMMENT ON FUNCTION shardmap._lock_reference(regclass) IS 'holds off writers of a reference table until the transaction ends';
REVOKE ALL ON FUNCTION shardmap._lock_reference(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._lock_reference(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._register_reference(relation regclass, keyspace text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap._check_owner(relation);
    INSERT INTO shardmap.reference_table (relation, keyspace, layout, complete)
    VALUES ($1, $2, shardmap._reference_layout($1), false);
    PERFORM shardmap.publish_map(keyspace);
END
$$;
COMMENT ON FUNCTION shardmap._register_reference(regclass, text) IS 'enters a reference table in the catalog and publishes the map';
REVOKE ALL ON FUNCTION shardmap._register_reference(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._register_reference(regclass, text) TO shardmap_admin;

CREATE FUNCTION shardmap._forget_reference(relation regclass, keyspace text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap._check_owner(relation);
    DELETE FROM shardmap.reference_table t WHERE t.relation = $1 AND t.keyspace = $2;
    IF FOUND THEN
        PERFORM shardmap.publish_map(keyspace);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._forget_reference(regclass, text) IS 'takes a reference table out of the catalog and publishes the map';
REVOKE ALL ON FUNCTION shardmap._forget_reference(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._forget_reference(regclass, text) TO shardmap_admin;

-- With the table locked against writers.
CREATE FUNCTION shardmap._fill_reference_copies(relation regclass, target text, shards text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    schema text;
    here bigint;
    copied record;
BEGIN
    SELECT n.nspname INTO STRICT schema FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    EXECUTE format('SELECT count(*) FROM ONLY %s', shardmap._shard_table(relation)) INTO here;
    FOR copied IN
        SELECT c.shard, c.rows FROM shardmap._copy_rows_to_each(relation, schema, target, shards,
            shardmap._reference_columns(relation)) c
    LOOP
        IF copied.rows <> here THEN
            RAISE EXCEPTION 'shard "%" was sent % of % rows of table %', copied.shard, copied.rows, here, relation
                USING ERRCODE = 'data_corrupted';
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._fill_reference_copies(regclass, text, text[]) IS 'copies a reference table''s rows to an empty table of its schema on each of the shards';
REVOKE ALL ON FUNCTION shardmap._fill_reference_copies(regclass, text, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._fill_reference_copies(regclass, text, text[]) TO shardmap_admin;

CREATE FUNCTION shardmap._add_reference_copies(relation regclass, shards text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shard text;
BEGIN
    PERFORM shardmap._check_transaction('shardmap.add_shard');
    PERFORM shardmap._lock_reference(relation);
    FOREACH shard IN ARRAY shards LOOP
        PERFORM shardmap._check_shard_can_hold(relation, shard);
    END LOOP;
    FOREACH shard IN ARRAY shards LOOP
        PERFORM shardmap._create_shard_table(relation, shard, true);
        PERFORM shardmap._grant_on_shard(relation, shard);
    END LOOP;
    PERFORM shardmap._fill_reference_copies(relation,
        (SELECT c.relname::text FROM pg_class c WHERE c.oid = relation), shards);
END
$$;
COMMENT ON FUNCTION shardmap._add_reference_copies(regclass, text[]) IS 'makes copies of a reference table on shards that have none';
REVOKE ALL ON FUNCTION shardmap._add_reference_copies(regclass, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._add_reference_copies(regclass, text[]) TO shardmap_admin;

CREATE FUNCTION shardmap.distribute_reference(relation regclass, keyspace text DEFAULT 'main') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
SET datestyle = 'ISO, YMD' SET intervalstyle = 'postgres' SET extra_float_digits = 1 SET row_security = off AS $$
DECLARE
    name text := shardmap._shard_table(relation);
    shards text[];
BEGIN
    PERFORM shardmap._check_transaction('shardmap.distribute_reference');
    PERFORM shardmap._check_relation(relation);
    EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', name);
    PERFORM shardmap._check_relation(relation); -- again, for what changed while we waited
    PERFORM shardmap._check_reference_key(relation);
    PERFORM shardmap._lock_keyspace(keyspace);
    IF EXISTS (SELECT FROM shardmap.reference_table t WHERE t.relation = $1 AND t.keyspace = $2) THEN
        RAISE EXCEPTION 'table % is a reference table of keyspace "%" already', relation, keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.reference_tables.';
    END IF;
    shards := ARRAY(SELECT s.name FROM shardmap.shard s WHERE s.keyspace = $2 ORDER BY s.number);
    IF shards = '{}' THEN
        RAISE EXCEPTION 'keyspace "%" has no shards', keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Add some with shardmap.add_shard.';
    END IF;
    PERFORM shardmap._check_distinct_shards(keyspace);
    -- Always: writes under session_replication_role = replica are writes too.
    IF NOT EXISTS (SELECT FROM shardmap.reference_table t WHERE t.relation = $1) THEN
        EXECUTE format('CREATE TRIGGER shardmap_reference_row AFTER INSERT OR UPDATE OR DELETE ON %s '
            'FOR EACH ROW EXECUTE FUNCTION shardmap._replicate_reference()', name);
        EXECUTE format('CREATE TRIGGER shardmap_reference_statement AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s '
            'FOR EACH STATEMENT EXECUTE FUNCTION shardmap._replicate_reference()', name);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER shardmap_reference_row, '
            'ENABLE ALWAYS TRIGGER shardmap_reference_statement', name);
        EXECUTE format('COMMENT ON TRIGGER shardmap_reference_row ON %s IS %L', name, 'keeps the copies on the shards equal');
        EXECUTE format('COMMENT ON TRIGGER shardmap_reference_statement ON %s IS %L', name, 'keeps the copies on the shards equal');
    END IF;
    PERFORM shardmap._register_reference(relation, keyspace);
    PERFORM shardmap._add_reference_copies(relation, shards);
END
$$;
COMMENT ON FUNCTION shardmap.distribute_reference(regclass, text) IS 'makes a table a reference table: every shard of the keyspace gets a copy, which follows what is written here';
REVOKE ALL ON FUNCTION shardmap.distribute_reference(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.distribute_reference(regclass, text) TO shardmap_admin;

CREATE FUNCTION shardmap.undistribute_reference(relation regclass, keyspace text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := shardmap._shard_table(relation);
    space text;
    shard text;
BEGIN
    IF NOT pg_has_role((SELECT c.relowner FROM pg_class c WHERE c.oid = relation), 'USAGE') THEN
        RAISE EXCEPTION 'must be owner of table %', relation USING ERRCODE = 'insufficient_privilege';
    ELSIF NOT EXISTS (SELECT FROM shardmap.reference_table t WHERE t.relation = $1 AND t.keyspace = coalesce($2, t.keyspace)) THEN
        RAISE EXCEPTION 'table % is not a reference table%', relation, coalesce(' of keyspace "' || keyspace || '"', '')
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.reference_tables.';
    END IF;
    PERFORM shardmap._check_unused(relation, relation::text);
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', name);
    FOR space IN SELECT t.keyspace FROM shardmap.reference_table t
                  WHERE t.relation = $1 AND t.keyspace = coalesce($2, t.keyspace) ORDER BY 1 LOOP
        PERFORM shardmap._lock_keyspace(space);
        FOR shard IN SELECT s.name FROM shardmap.shard s WHERE s.keyspace = space ORDER BY s.number LOOP
            PERFORM shardmap._remote_ddl(shard, format('DROP TABLE IF EXISTS %s', name));
        END LOOP;
        PERFORM shardmap._forget_reference(relation, space);
    END LOOP;
    IF NOT EXISTS (SELECT FROM shardmap.reference_table t WHERE t.relation = $1) THEN
        EXECUTE format('DROP TRIGGER IF EXISTS shardmap_reference_row ON %s', name);
        EXECUTE format('DROP TRIGGER IF EXISTS shardmap_reference_statement ON %s', name);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.undistribute_reference(regclass, text) IS 'drops the copies of a reference table on the shards of a keyspace, or of all; the table here stays';
REVOKE ALL ON FUNCTION shardmap.undistribute_reference(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.undistribute_reference(regclass, text) TO shardmap_admin;
