-- Operator classes that make Postgres' hash partitioning follow the map.
--
-- Decides which classes a keyspace has: one a key type, made when the first table with such a key is distributed. What
-- always holds: equality is the type's own; FUNCTION 1 is the type's ordinary hash, so that a hash join or an aggregate
-- that picks the class is right; FUNCTION 2 is ours and looks up the key's owner. The classes and functions are no
-- members of the extension, for only so pg_dump brings them back before the tables that use them. Refuses types that
-- have no canonical text. Read shards.sql next.

-- Postgres' own hash functions under the types that a class of ours declares them for: amvalidate insists on that.
CREATE FUNCTION shardmap.hash_date(date) RETURNS integer
    LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'hashint4';
CREATE FUNCTION shardmap.hash_timestamptz(timestamp with time zone) RETURNS integer
    LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'timestamp_hash';
CREATE FUNCTION shardmap.hash_bytea(bytea) RETURNS integer
    LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'hashvarlena';
COMMENT ON FUNCTION shardmap.hash_date(date) IS 'Postgres'' hash of a date, for operator classes of key types';
COMMENT ON FUNCTION shardmap.hash_timestamptz(timestamp with time zone) IS 'Postgres'' hash of a timestamp with time zone, for operator classes of key types';
COMMENT ON FUNCTION shardmap.hash_bytea(bytea) IS 'Postgres'' hash of a bytea, for operator classes of key types';

-- What a key can be: a type of pg_catalog, the hash function of its equality, and the family it belongs to.
CREATE VIEW shardmap._key_types AS
    SELECT * FROM (VALUES
        ('int2', 'pg_catalog.hashint2', 'integer'),
        ('int4', 'pg_catalog.hashint4', 'integer'),
        ('int8', 'pg_catalog.hashint8', 'integer'),
        ('text', 'pg_catalog.hashtext', 'text'), -- varchar too
        ('bpchar', 'pg_catalog.hashbpchar', 'bpchar'),
        ('uuid', 'pg_catalog.uuid_hash', 'uuid'),
        ('numeric', 'pg_catalog.hash_numeric', 'numeric'),
        ('date', 'shardmap.hash_date', 'date'),
        ('timestamp', 'pg_catalog.timestamp_hash', 'timestamp'),
        ('timestamptz', 'shardmap.hash_timestamptz', 'timestamptz'),
        ('bytea', 'shardmap.hash_bytea', 'bytea')
    ) AS key_types (type, hash, family);
COMMENT ON VIEW shardmap._key_types IS 'types that a key can have, with their hash functions and operator families';
COMMENT ON COLUMN shardmap._key_types.type IS 'name of the type in pg_catalog';
COMMENT ON COLUMN shardmap._key_types.hash IS 'hash function that goes with the type''s equality';
COMMENT ON COLUMN shardmap._key_types.family IS 'operator family of its classes: types whose values can be equal share one';

CREATE FUNCTION shardmap._base_type(type regtype) RETURNS regtype
LANGUAGE sql STABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    WITH RECURSIVE base(oid, typtype, typbasetype) AS (
        SELECT t.oid, t.typtype, t.typbasetype FROM pg_type t WHERE t.oid = type
        UNION ALL
        SELECT t.oid, t.typtype, t.typbasetype FROM base b JOIN pg_type t ON t.oid = b.typbasetype WHERE b.typtype = 'd'
    )
    SELECT b.oid::regtype FROM base b WHERE b.typtype <> 'd'
$$;
COMMENT ON FUNCTION shardmap._base_type(regtype) IS 'the type that a domain is made of, down to the last; else the type itself';
REVOKE ALL ON FUNCTION shardmap._base_type(regtype) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._base_type(regtype) TO shardmap_admin;

CREATE FUNCTION shardmap._key_class_name(keyspace text, type text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('shardmap.%I', keyspace || '_' || type || '_ops')
$$;
COMMENT ON FUNCTION shardmap._key_class_name(text, text) IS 'qualified and quoted name of a keyspace''s operator class or family';
REVOKE ALL ON FUNCTION shardmap._key_class_name(text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._key_class_name(text, text) TO shardmap_admin;

CREATE FUNCTION shardmap._create_key_class(keyspace text, type text, hash text, family text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    function text := format('shardmap.%I', 'hash_' || keyspace || '_' || type);
    class text := shardmap._key_class_name(keyspace, type);
BEGIN
    EXECUTE format(
        'CREATE FUNCTION %s(pg_catalog.%I, pg_catalog.int8) RETURNS pg_catalog.int8 LANGUAGE c '
        'IMMUTABLE STRICT PARALLEL SAFE AS ''$libdir/pg_shardmap'', ''shardmap_partition_hash''', function, type);
    EXECUTE format('COMMENT ON FUNCTION %s(pg_catalog.%I, pg_catalog.int8) IS %L', function, type,
        'hash by which Postgres'' partitioning follows the map of keyspace ' || keyspace);
    EXECUTE format(
        'CREATE OPERATOR CLASS %1$s FOR TYPE pg_catalog.%2$I USING hash FAMILY %3$s AS '
        'OPERATOR 1 pg_catalog.= (pg_catalog.%2$I, pg_catalog.%2$I), '
        'FUNCTION 1 %4$s(pg_catalog.%2$I), FUNCTION 2 %5$s(pg_catalog.%2$I, pg_catalog.int8)',
        class, type, shardmap._key_class_name(keyspace, family), hash, function);
    EXECUTE format('COMMENT ON OPERATOR CLASS %s USING hash IS %L', class,
        'partitions by the map of keyspace ' || keyspace);
    INSERT INTO shardmap.key_class (keyspace, key_type, hash_function, family)
    VALUES ($1, format('pg_catalog.%I', type)::regtype,
        format('%s(pg_catalog.%I, pg_catalog.int8)', function, type)::regprocedure::text, $1 || '_' || $4 || '_ops');
END
$$;
COMMENT ON FUNCTION shardmap._create_key_class(text, text, text, text) IS 'makes one operator class of a keyspace, in an existing family; the arguments are names of pg_catalog';
REVOKE ALL ON FUNCTION shardmap._create_key_class(text, text, text, text) FROM PUBLIC;

CREATE FUNCTION shardmap._ensure_key_class(keyspace text, key_type regtype) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    base text; -- name in pg_catalog of the type that has the class
    family_of text;
    member record;
BEGIN
    PERFORM shardmap._lock_keyspace(keyspace);
    SELECT CASE t.typname WHEN 'varchar' THEN 'text' ELSE t.typname::text END INTO base
      FROM pg_type t
     WHERE t.oid = shardmap._base_type(key_type) AND t.typnamespace = 'pg_catalog'::regnamespace;
    SELECT k.family INTO family_of FROM shardmap._key_types k WHERE k.type = base;
    IF family_of IS NULL THEN
        RAISE EXCEPTION 'type % cannot be a shard key', format_type(key_type, NULL)
            USING ERRCODE = 'feature_not_supported',
                HINT = 'Use a key of an integer, text, uuid, numeric, date, timestamp or bytea type.';
    END IF;
    IF NOT EXISTS (SELECT FROM shardmap.key_class c
                    WHERE c.keyspace = $1 AND c.key_type = format('pg_catalog.%I', base)::regtype) THEN
        EXECUTE format('CREATE OPERATOR FAMILY %s USING hash', shardmap._key_class_name(keyspace, family_of));
        EXECUTE format('COMMENT ON OPERATOR FAMILY %s USING hash IS %L', shardmap._key_class_name(keyspace, family_of),
            'key types of keyspace ' || keyspace || ' whose values can be equal');
        FOR member IN SELECT k.type, k.hash FROM shardmap._key_types k WHERE k.family = family_of LOOP
            PERFORM shardmap._create_key_class(keyspace, member.type, member.hash, family_of);
        END LOOP;
        -- Equality across the members, so that int8_key = int4_value prunes too.
        FOR member IN
            SELECT a.type AS left_type, b.type AS right_type FROM shardmap._key_types a, shardmap._key_types b
             WHERE a.family = family_of AND b.family = family_of AND a.type <> b.type
        LOOP
            EXECUTE format('ALTER OPERATOR FAMILY %s USING hash ADD OPERATOR 1 pg_catalog.= (pg_catalog.%I, pg_catalog.%I)',
                shardmap._key_class_name(keyspace, family_of), member.left_type, member.right_type);
        END LOOP;
        PERFORM shardmap._validate_key_classes(keyspace, family_of);
    END IF;
    RETURN shardmap._key_class_name(keyspace, base);
END
$$;
COMMENT ON FUNCTION shardmap._ensure_key_class(text, regtype) IS 'name of the operator class for keys of a type in a keyspace; makes it, with its family, when first needed';
REVOKE ALL ON FUNCTION shardmap._ensure_key_class(text, regtype) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._ensure_key_class(text, regtype) TO shardmap_admin;

CREATE FUNCTION shardmap._validate_key_classes(keyspace text, family text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    class record;
BEGIN
    FOR class IN
        SELECT o.oid, o.opcname FROM pg_opclass o JOIN pg_opfamily f ON f.oid = o.opcfamily
         WHERE f.opfnamespace = 'shardmap'::regnamespace AND f.opfname = keyspace || '_' || family || '_ops'
    LOOP
        -- CREATE OPERATOR CLASS does not check this; a class that lacks a part would lose rows.
        IF NOT amvalidate(class.oid) THEN
            RAISE EXCEPTION 'operator class "%" is not valid', class.opcname USING ERRCODE = 'internal_error';
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._validate_key_classes(text, text) IS 'raises an error unless amvalidate accepts all operator classes of a family';
REVOKE ALL ON FUNCTION shardmap._validate_key_classes(text, text) FROM PUBLIC;

CREATE FUNCTION shardmap._drop_key_classes(keyspace text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    class record;
BEGIN
    FOR class IN
        SELECT c.hash_function, c.family, t.typname FROM shardmap.key_class c JOIN pg_type t ON t.oid = c.key_type
         WHERE c.keyspace = $1 ORDER BY t.typname
    LOOP
        EXECUTE format('DROP OPERATOR CLASS %s USING hash', shardmap._key_class_name(keyspace, class.typname));
    END LOOP;
    FOR class IN SELECT DISTINCT c.family FROM shardmap.key_class c WHERE c.keyspace = $1 LOOP
        EXECUTE format('DROP OPERATOR FAMILY shardmap.%I USING hash', class.family);
    END LOOP;
    FOR class IN DELETE FROM shardmap.key_class c WHERE c.keyspace = $1 RETURNING c.hash_function::text AS function LOOP
        EXECUTE format('DROP FUNCTION %s', class.function);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._drop_key_classes(text) IS 'drops the operator classes of a keyspace, which no table may use';
REVOKE ALL ON FUNCTION shardmap._drop_key_classes(text) FROM PUBLIC;
