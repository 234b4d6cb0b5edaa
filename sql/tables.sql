-- Logical tables: how a table is distributed.
--
-- Decides the order of the steps. What always holds: all or nothing, here and on every shard; every check comes before
-- the first change; each shard's rows are counted after the copy, and the sum must be what was here. What runs on the
-- caller's table runs with the caller's rights; only entries in the catalog and the partitions are made with the
-- owner's. Read tables_undo.sql next.

CREATE FUNCTION shardmap._partition_name(relation regclass, number integer) RETURNS name
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    base text;
    schema oid;
    suffix text := '_' || number;
    name text;
BEGIN
    SELECT c.relname, c.relnamespace INTO STRICT base, schema FROM pg_class c WHERE c.oid = relation;
    FOR try IN 0..1000 LOOP
        name := base;
        WHILE octet_length(name || suffix) > 63 LOOP
            name := left(name, -1);
        END LOOP;
        name := name || suffix;
        EXIT WHEN NOT EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = schema AND c.relname = name)
            AND NOT EXISTS (SELECT FROM pg_type t WHERE t.typnamespace = schema AND t.typname = name);
        suffix := format('_%s_%s', number, try + 1);
    END LOOP;
    RETURN name;
END
$$;
COMMENT ON FUNCTION shardmap._partition_name(regclass, integer) IS 'free name for a logical table''s partition on a shard: the table''s name and the shard''s number';
REVOKE ALL ON FUNCTION shardmap._partition_name(regclass, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._partition_name(regclass, integer) TO shardmap_admin;

-- Attached where that is safe, as creating it in place locks out readers too. With CHECK constraints or generated columns
-- it is not: Postgres then evaluates calls in them that have constant arguments, and this function has its owner's rights.
CREATE FUNCTION shardmap._create_partition(relation regclass, shard text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
DECLARE
    number integer;
    schema text;
    name text;
    owner oid;
    partition text;
    bound text;
    columns text;
BEGIN
    SELECT s.number INTO number FROM shardmap.logical_table t JOIN shardmap.shard s ON s.keyspace = t.keyspace
     WHERE t.relation = $1 AND s.name = shard;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % has no shard "%"', relation, shard USING ERRCODE = 'undefined_object';
    END IF;
    SELECT n.nspname, c.relname, c.relowner INTO STRICT schema, name, owner
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    partition := format('%I.%I', schema, shardmap._partition_name(relation, number));
    bound := format('FOR VALUES WITH (MODULUS 1024, REMAINDER %s)', number);
    IF EXISTS (SELECT FROM pg_constraint o WHERE o.conrelid = relation AND o.contype = 'c')
        OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = relation AND a.attgenerated <> '')
    THEN
        EXECUTE format('CREATE FOREIGN TABLE %s PARTITION OF %I.%I %s SERVER %I OPTIONS (schema_name %L, table_name %L)',
            partition, schema, name, bound, shard, schema, name);
    ELSE
        SELECT string_agg(format('%I %s%s%s', a.attname, format_type(a.atttypid, a.atttypmod),
            (SELECT format(' COLLATE %I.%I', n.nspname, l.collname)
               FROM pg_collation l JOIN pg_namespace n ON n.oid = l.collnamespace
              WHERE l.oid = a.attcollation AND a.attcollation <> t.typcollation),
            CASE WHEN a.attnotnull THEN ' NOT NULL' END), ', ' ORDER BY a.attnum) INTO columns
          FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
         WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped;
        EXECUTE format('CREATE FOREIGN TABLE %s (%s) SERVER %I OPTIONS (schema_name %L, table_name %L)',
            partition, columns, shard, schema, name);
        EXECUTE format('ALTER TABLE %I.%I ATTACH PARTITION %s %s', schema, name, partition, bound);
    END IF;
    EXECUTE format('COMMENT ON FOREIGN TABLE %s IS %L', partition, format('rows of %s on shard %s', relation, shard));
    EXECUTE format('ALTER FOREIGN TABLE %s OWNER TO %s', partition, owner::regrole);
END
$$;
COMMENT ON FUNCTION shardmap._create_partition(regclass, text) IS 'makes a logical table''s partition for a shard: a foreign table';
REVOKE ALL ON FUNCTION shardmap._create_partition(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._create_partition(regclass, text) TO shardmap_admin;

-- For functions with their owner's rights, in which current_user is not the caller.
CREATE FUNCTION shardmap._check_owner(relation regclass) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- SET ROLE shows in the setting, not in a function with its owner's rights.
    IF NOT pg_has_role(coalesce(nullif(current_setting('role'), 'none'), session_user)::name, (SELECT c.relowner FROM pg_class c WHERE c.oid = relation), 'USAGE') THEN
        RAISE EXCEPTION 'must be owner of table %', relation USING ERRCODE = 'insufficient_privilege';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_owner(regclass) IS 'raises an error if the session''s role does not have the rights of the table''s owner';

CREATE FUNCTION shardmap._register_table(relation regclass, key_column name, keyspace text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shard text;
BEGIN
    PERFORM shardmap._check_owner(relation);
    INSERT INTO shardmap.logical_table (relation, key_column, key_type, keyspace)
    SELECT $1, $2, a.atttypid, $3 FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
     WHERE a.attrelid = $1 AND a.attname = $2 AND a.attnum > 0 AND c.relkind = 'p';
    IF NOT FOUND THEN
        RAISE EXCEPTION '% is not a partitioned table with column "%"', relation, key_column USING ERRCODE = 'wrong_object_type';
    END IF;
    FOR shard IN SELECT s.name FROM shardmap.shard s WHERE s.keyspace = $3 ORDER BY s.number LOOP
        PERFORM shardmap._create_partition(relation, shard);
    END LOOP;
    PERFORM shardmap.publish_map(keyspace);
END
$$;
COMMENT ON FUNCTION shardmap._register_table(regclass, name, text) IS 'enters a logical table in the catalog, makes its partitions, and publishes the map';
REVOKE ALL ON FUNCTION shardmap._register_table(regclass, name, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._register_table(regclass, name, text) TO shardmap_admin;

CREATE FUNCTION shardmap._shard_count(relation regclass, shard text) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT r[1]::bigint FROM shardmap.remote_rows(shard,
        format('SELECT pg_catalog.count(*)::pg_catalog.text AS rows FROM ONLY %s', shardmap._shard_table(relation))) r
$$;
COMMENT ON FUNCTION shardmap._shard_count(regclass, text) IS 'number of rows that a shard''s table has, counted there';
REVOKE ALL ON FUNCTION shardmap._shard_count(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._shard_count(regclass, text) TO shardmap_admin;

CREATE FUNCTION shardmap._move_rows_to_shards(relation regclass, key_column name, keyspace text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    columns text[];
    copied record;
    here bigint;
    there bigint := 0;
BEGIN
    -- Columns that are computed are computed again.
    SELECT array_agg(a.attname::text ORDER BY a.attnum) INTO columns FROM pg_attribute a
     WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '';
    EXECUTE format('SELECT count(*) FROM %s', shardmap._shard_table(relation)) INTO here;
    IF here = 0 THEN
        RETURN;
    END IF;
    FOR copied IN
        SELECT c.shard, c.rows FROM pg_class r JOIN pg_namespace n ON n.oid = r.relnamespace,
            shardmap.copy_rows_to_shards(relation, n.nspname::text, r.relname::text, key_column::text, keyspace, columns) c
         WHERE r.oid = relation
    LOOP
        IF copied.rows <> shardmap._shard_count(relation, copied.shard) THEN
            RAISE EXCEPTION 'shard "%" has % rows of table % after % were copied', copied.shard,
                    shardmap._shard_count(relation, copied.shard), relation, copied.rows
                USING ERRCODE = 'data_corrupted';
        END IF;
        there := there + copied.rows;
    END LOOP;
    IF here <> there THEN
        RAISE EXCEPTION '% of % rows of table % were copied', there, here, relation USING ERRCODE = 'data_corrupted';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._move_rows_to_shards(regclass, name, text) IS 'copies a table''s rows to the shards that own them and counts them there';
REVOKE ALL ON FUNCTION shardmap._move_rows_to_shards(regclass, name, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._move_rows_to_shards(regclass, name, text) TO shardmap_admin;

CREATE FUNCTION shardmap.distribute_table(relation regclass, key_column name, keyspace text DEFAULT 'main') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
SET datestyle = 'ISO, YMD' SET intervalstyle = 'postgres' SET extra_float_digits = 1 SET row_security = off AS $$
DECLARE
    space shardmap.keyspace;
    name text := shardmap._shard_table(relation);
    shard text;
    class text;
    logical regclass;
BEGIN
    PERFORM shardmap._check_transaction('shardmap.distribute_table');
    PERFORM shardmap._check_no_reference(relation);
    PERFORM shardmap._check_relation(relation);
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', name);
    PERFORM shardmap._check_relation(relation); -- again, for what changed while we waited
    space := shardmap._lock_keyspace(keyspace);
    PERFORM shardmap._check_no_move(keyspace);
    IF NOT EXISTS (SELECT FROM shardmap.shard s WHERE s.keyspace = space.name) THEN
        RAISE EXCEPTION 'keyspace "%" has no shards', keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Add some with shardmap.add_shard.';
    END IF;
    PERFORM shardmap._check_key(relation, key_column, space);
    PERFORM shardmap._check_constraints(relation, key_column, keyspace);
    PERFORM shardmap._check_dependents(relation);
    PERFORM shardmap._check_distinct_shards(keyspace);
    FOR shard IN SELECT s.name FROM shardmap.shard s WHERE s.keyspace = space.name ORDER BY s.number LOOP
        PERFORM shardmap._check_shard_can_hold(relation, shard);
    END LOOP;
    EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET NOT NULL', name, key_column);
    FOR shard IN SELECT s.name FROM shardmap.shard s WHERE s.keyspace = space.name ORDER BY s.number LOOP
        PERFORM shardmap._create_shard_table(relation, shard);
        PERFORM shardmap._grant_on_shard(relation, shard);
    END LOOP;
    PERFORM shardmap._move_rows_to_shards(relation, key_column, keyspace);
    class := shardmap._ensure_key_class(keyspace,
        (SELECT a.atttypid FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = key_column));
    logical := shardmap._replace_table(relation, shardmap._local_table_ddl(relation, key_column,
        format(' PARTITION BY HASH (%I %s)', key_column, class)));
    PERFORM shardmap._register_table(logical, key_column, keyspace);
    EXECUTE format('DROP TABLE %s', shardmap._shard_table(relation));
END
$$;
COMMENT ON FUNCTION shardmap.distribute_table(regclass, name, text) IS 'spreads a table over the shards of a keyspace by a column, with its rows';
REVOKE ALL ON FUNCTION shardmap.distribute_table(regclass, name, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.distribute_table(regclass, name, text) TO shardmap_admin;
