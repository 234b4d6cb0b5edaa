-- Which tables can be distributed.
--
-- Decides, before anything is done, whether a table can become a logical table: an ordinary permanent table of the
-- caller's, whose key has a canonical text, whose unique constraints include the key (a shard can only see its own
-- rows), and on which nothing depends that could not be carried over. Each refusal says what to do about it. Read
-- tables_ddl.sql next.

CREATE FUNCTION shardmap._shard_table(relation regclass) RETURNS text
LANGUAGE sql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.oid = relation
$$;
COMMENT ON FUNCTION shardmap._shard_table(regclass) IS 'qualified and quoted name of a logical table, here and on its shards';
REVOKE ALL ON FUNCTION shardmap._shard_table(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._shard_table(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._check_transaction(function text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- With an older snapshot, rows committed while we waited for the lock would be left behind.
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION '% must run at isolation level READ COMMITTED', function
            USING ERRCODE = 'active_sql_transaction',
                HINT = 'Run it in a transaction of its own, or BEGIN ISOLATION LEVEL READ COMMITTED.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_transaction(text) IS 'raises an error unless each statement of the transaction sees what is committed by then';
REVOKE ALL ON FUNCTION shardmap._check_transaction(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_transaction(text) TO shardmap_admin;

CREATE FUNCTION shardmap._is_in_block() RETURNS boolean
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'is_in_block_wrapper';
COMMENT ON FUNCTION shardmap._is_in_block() IS 'whether this transaction was begun by BEGIN';

CREATE FUNCTION shardmap._check_no_block(procedure text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF shardmap._is_in_block() THEN
        RAISE EXCEPTION '% cannot run inside a transaction block', procedure
            USING ERRCODE = 'active_sql_transaction', DETAIL = 'It commits each of its steps.', HINT = 'CALL it by itself: after COMMIT, or in autocommit mode.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_no_block(text) IS 'raises an error if this transaction was begun by BEGIN, for procedures that commit';
REVOKE ALL ON FUNCTION shardmap._is_in_block(), shardmap._check_no_block(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._is_in_block(), shardmap._check_no_block(text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_relation(relation regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    class pg_class;
    kind text;
BEGIN
    IF relation IS NULL THEN
        RAISE EXCEPTION 'relation must not be NULL' USING ERRCODE = 'null_value_not_allowed', HINT = 'Name a table.';
    END IF;
    SELECT c.* INTO class FROM pg_class c WHERE c.oid = relation;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % does not exist', relation USING ERRCODE = 'undefined_table';
    END IF;
    IF EXISTS (SELECT FROM shardmap.logical_table t WHERE t.relation = $1) THEN
        RAISE EXCEPTION 'table % is already distributed', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.tables.';
    END IF;
    kind := CASE
        WHEN class.relkind = 'p' THEN 'a partitioned table'
        WHEN class.relkind = 'f' THEN 'a foreign table'
        WHEN class.relkind IN ('v', 'm') THEN 'a view'
        WHEN class.relkind <> 'r' THEN 'not a table'
        WHEN class.relispartition THEN 'a partition'
        WHEN class.relpersistence = 't' THEN 'a temporary table'
        WHEN class.relpersistence = 'u' THEN 'an unlogged table'
        WHEN class.reloftype <> 0 THEN 'a typed table'
        WHEN class.relnamespace IN ('pg_catalog'::regnamespace, 'shardmap'::regnamespace)
            OR class.relnamespace = 'information_schema'::regnamespace THEN 'a system table'
        WHEN EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = class.oid OR i.inhparent = class.oid)
            THEN 'part of an inheritance tree'
        WHEN EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = class.oid
                        AND d.deptype = 'e') THEN 'a member of an extension'
    END;
    IF kind IS NOT NULL THEN
        RAISE EXCEPTION 'cannot distribute %: it is %', relation, kind
            USING ERRCODE = 'wrong_object_type', HINT = 'Copy its rows into an ordinary permanent table and distribute that.';
    ELSIF NOT pg_has_role(class.relowner, 'USAGE') THEN
        RAISE EXCEPTION 'must be owner of table %', relation USING ERRCODE = 'insufficient_privilege';
    END IF;
    PERFORM shardmap._check_letters(concat(class.relnamespace::regnamespace, class.relname, (SELECT string_agg(a.attname, '')
        FROM pg_attribute a WHERE a.attrelid = class.oid AND a.attnum > 0 AND NOT a.attisdropped)));
END
$$;
COMMENT ON FUNCTION shardmap._check_relation(regclass) IS 'raises an error unless the relation is an ordinary permanent table of the caller''s that is not distributed yet';
REVOKE ALL ON FUNCTION shardmap._check_relation(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_relation(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._check_key(relation regclass, key_column name, space shardmap.keyspace) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    attribute pg_attribute;
    has_null boolean;
BEGIN
    SELECT a.* INTO attribute FROM pg_attribute a
     WHERE a.attrelid = relation AND a.attname = key_column AND a.attnum > 0 AND NOT a.attisdropped;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'column "%" of table % does not exist', key_column, relation USING ERRCODE = 'undefined_column';
    ELSIF attribute.attgenerated <> '' THEN
        RAISE EXCEPTION 'generated column "%" cannot be the shard key', key_column
            USING ERRCODE = 'feature_not_supported', DETAIL = 'Its value is not known before the row is stored.',
                HINT = 'Distribute by one of the columns that it is computed from.';
    END IF;
    PERFORM shardmap.check_key_column(relation, key_column);
    IF space.range_order = 'integer'
        AND shardmap._base_type(attribute.atttypid) NOT IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype)
    THEN
        RAISE EXCEPTION 'column "%" of type % has no place in keyspace "%"', key_column,
                format_type(attribute.atttypid, attribute.atttypmod), space.name
            USING ERRCODE = 'datatype_mismatch', DETAIL = 'The keyspace''s ranges are ordered as integers.',
                HINT = 'Use an integer key, or a keyspace whose range_order is ''text''.';
    END IF;
    IF NOT attribute.attnotnull THEN
        EXECUTE format('SELECT EXISTS (SELECT FROM %s WHERE %I IS NULL)', shardmap._shard_table(relation), key_column)
            INTO has_null;
        IF has_null THEN
            RAISE EXCEPTION 'column "%" of table % contains null values', key_column, relation
                USING ERRCODE = 'not_null_violation', DETAIL = 'A row without a key belongs to no shard.',
                    HINT = 'Give these rows a key or delete them.';
        END IF;
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_key(regclass, name, shardmap.keyspace) IS 'raises an error unless the column can be the table''s shard key in the keyspace';
REVOKE ALL ON FUNCTION shardmap._check_key(regclass, name, shardmap.keyspace) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_key(regclass, name, shardmap.keyspace) TO shardmap_admin;

CREATE FUNCTION shardmap._check_constraints(relation regclass, key_column name, keyspace text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    key smallint := (SELECT a.attnum FROM pg_attribute a WHERE a.attrelid = relation AND a.attname = key_column);
    names text;
BEGIN
    SELECT string_agg(format('"%s" on table %s', c.conname, c.conrelid::regclass), ', ' ORDER BY c.conname) INTO names
      FROM pg_constraint c WHERE c.contype = 'f' AND relation IN (c.conrelid, c.confrelid)
       AND NOT (c.conrelid = $1 AND EXISTS (
            SELECT FROM shardmap.reference_table r WHERE r.relation = c.confrelid AND r.keyspace = $3));
    IF names IS NOT NULL THEN
        RAISE EXCEPTION 'table % has foreign keys', relation
            USING ERRCODE = 'feature_not_supported', DETAIL = format('Foreign keys: %s.', names),
                HINT = 'Drop them first: Postgres cannot check them across servers. Those to reference tables of the keyspace can stay.';
    END IF;
    -- A unique index sees the rows of one shard only: it is right if equal entries are always on one shard.
    SELECT string_agg(format('"%s"', i.indexrelid::regclass), ', ' ORDER BY i.indexrelid::regclass::text) INTO names
      FROM pg_index i
     WHERE i.indrelid = relation AND (i.indisunique OR i.indisexclusion)
       AND NOT EXISTS (
            SELECT FROM generate_subscripts(i.indkey, 1) n
             WHERE i.indkey[n] = key AND n < i.indnkeyatts
               AND (i.indisunique OR (SELECT o.oprname = '=' FROM pg_constraint c JOIN pg_operator o
                        ON o.oid = c.conexclop[n + 1] WHERE c.conindid = i.indexrelid AND c.contype = 'x')));
    IF names IS NOT NULL THEN
        RAISE EXCEPTION 'unique constraints of table % do not include the shard key', relation
            USING ERRCODE = 'feature_not_supported',
                DETAIL = format('Constraints or indexes without equality on column "%s": %s.', key_column, names),
                HINT = format('Add "%s" to them, or drop them: uniqueness holds within a shard only.', key_column);
    END IF;
    SELECT string_agg(format('"%s"', c.conname), ', ' ORDER BY c.conname) INTO names
      FROM pg_constraint c WHERE c.conrelid = relation AND c.contype = 'c' AND NOT c.convalidated;
    IF names IS NOT NULL THEN
        RAISE EXCEPTION 'table % has constraints that are not valid', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = format('Constraints: %s.', names),
                HINT = 'ALTER TABLE ... VALIDATE CONSTRAINT first.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_constraints(regclass, name, text) IS 'raises an error unless a shard alone can enforce each of the table''s constraints';
REVOKE ALL ON FUNCTION shardmap._check_constraints(regclass, name, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_constraints(regclass, name, text) TO shardmap_admin;

-- Objects that depend on the table and are not carried over.
CREATE FUNCTION shardmap._foreign_dependents(relation regclass) RETURNS TABLE (description text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH targets (classid, objid) AS (
        SELECT 'pg_class'::regclass::oid, relation::oid
        UNION ALL SELECT 'pg_type'::regclass, t.oid FROM pg_type t
             WHERE t.typrelid = relation OR t.typelem = (SELECT r.reltype FROM pg_class r WHERE r.oid = relation)
        UNION ALL SELECT 'pg_constraint'::regclass, c.oid FROM pg_constraint c WHERE c.conrelid = relation
    ), dependents AS (
        SELECT d.classid, d.objid, d.objsubid FROM targets t
          JOIN pg_depend d ON d.refclassid = t.classid AND d.refobjid = t.objid
         WHERE d.deptype = 'n' AND (d.classid, d.objid) NOT IN (SELECT t2.classid, t2.objid FROM targets t2)
    )
    SELECT DISTINCT CASE c.relkind WHEN 'm' THEN format('materialized view %s', c.oid::regclass)
            WHEN 'v' THEN format('view %s, which groups by the primary key', c.oid::regclass)
            ELSE pg_describe_object(d.classid, d.objid, d.objsubid) END
      FROM dependents d
      LEFT JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
      LEFT JOIN pg_class c ON c.oid = r.ev_class
     WHERE NOT EXISTS (SELECT FROM pg_policy p
                        WHERE d.classid = 'pg_policy'::regclass AND p.oid = d.objid AND p.polrelid = relation)
       AND NOT EXISTS (SELECT FROM pg_attrdef a
                        WHERE d.classid = 'pg_attrdef'::regclass AND a.oid = d.objid AND a.adrelid = relation)
       AND c.oid IS DISTINCT FROM relation -- its own rules are listed below
       AND (c.relkind IS DISTINCT FROM 'v' OR r.rulename <> '_RETURN'
            OR EXISTS (SELECT FROM pg_depend k JOIN pg_constraint o ON o.oid = k.refobjid
                        WHERE k.classid = d.classid AND k.objid = d.objid
                          AND k.refclassid = 'pg_constraint'::regclass AND o.conrelid = relation))
    UNION ALL
    SELECT format('rule "%s"', r.rulename) FROM pg_rewrite r WHERE r.ev_class = relation
    UNION ALL
    SELECT format('trigger "%s"', g.tgname) FROM pg_trigger g WHERE g.tgrelid = relation AND NOT g.tgisinternal
    UNION ALL
    SELECT format('publication "%s"', p.pubname) FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
     WHERE r.prrelid = relation
$$;
COMMENT ON FUNCTION shardmap._foreign_dependents(regclass) IS 'objects that depend on a table and could not be kept if it were replaced';
REVOKE ALL ON FUNCTION shardmap._foreign_dependents(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._foreign_dependents(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._check_dependents(relation regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    names text;
BEGIN
    SELECT string_agg(d.description, ', ' ORDER BY d.description) INTO names FROM shardmap._foreign_dependents(relation) d;
    IF names IS NOT NULL THEN
        RAISE EXCEPTION 'other objects depend on table %', relation
            USING ERRCODE = 'dependent_objects_still_exist', DETAIL = format('Objects: %s.', names),
                HINT = 'Drop them first, and create them again when the table has been replaced. Plain views need not be dropped.';
    END IF;
    SELECT string_agg(v.oid::regclass::text, ', ' ORDER BY v.oid::regclass::text) INTO names
      FROM shardmap._dependent_views(relation) d JOIN pg_class v ON v.oid = d.view
     WHERE NOT pg_has_role(v.relowner, 'USAGE');
    IF names IS NOT NULL THEN
        RAISE EXCEPTION 'must be owner of the views on table %', relation
            USING ERRCODE = 'insufficient_privilege', DETAIL = format('Views of others: %s.', names);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_dependents(regclass) IS 'raises an error unless all that depends on the table can be carried over';
REVOKE ALL ON FUNCTION shardmap._check_dependents(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_dependents(regclass) TO shardmap_admin;
