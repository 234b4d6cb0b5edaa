-- What a shard must be, and how it is reached.
--
-- Decides whether a database can be a shard: reachable, Postgres 13 or later, not a standby, not this database, the
-- same encoding, the same time zones, a collation that sorts as this database's default does. What always holds: the
-- same query is asked here and there, so that what is compared is the same thing. Refuses with the difference by name.
-- Read shards.sql next.

CREATE FUNCTION shardmap._parse_options(options text) RETURNS TABLE (name text, value text)
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rest text := ltrim(options, E' \t\r\n');
    part text[]; -- all of it, name, quoted value, bare value
BEGIN
    WHILE rest <> '' LOOP
        part := regexp_match(rest, E'^(([A-Za-z_][A-Za-z0-9_]*)\\s*=\\s*(?:''((?:[^''\\\\]|\\\\.)*)''|((?:[^''\\\\\\s]|\\\\.)*))(?:\\s+|$))');
        IF part IS NULL THEN
            RAISE EXCEPTION 'invalid connection options near "%"', left(rest, 20)
                USING ERRCODE = 'syntax_error',
                    HINT = 'Write name=value pairs as libpq takes them, for example: sslmode=verify-full user=app password=''two words''.';
        END IF;
        name := lower(part[2]);
        value := regexp_replace(coalesce(part[3], part[4]), E'\\\\(.)', E'\\1', 'g');
        RETURN NEXT;
        rest := substr(rest, length(part[1]) + 1);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._parse_options(text) IS 'reads connection options as libpq writes them: name=value pairs, values quoted where need be';
REVOKE ALL ON FUNCTION shardmap._parse_options(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._parse_options(text) TO shardmap_admin;

-- What is compared, as one row of text. Columns that not all versions have are read by to_jsonb.
CREATE FUNCTION shardmap._probe_sql() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT $probe$
SELECT current_setting('server_version_num') AS version,
    CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE 'primary' END AS role,
    current_setting('server_encoding') AS encoding,
    coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') AS provider,
    d.datcollate::text AS collate,
    d.datctype::text AS ctype,
    coalesce(to_jsonb(d) ->> 'datlocale', to_jsonb(d) ->> 'daticulocale', '') AS locale,
    d.oid || '@' || extract(epoch FROM pg_postmaster_start_time()) AS identity,
    (SELECT string_agg(extract(epoch FROM z::timestamptz)::bigint::text, ',' ORDER BY z)
       FROM unnest(ARRAY['2024-07-01 12:00 America/New_York', '2024-12-01 12:00 Europe/Berlin',
            '2024-07-01 12:00 Asia/Kolkata', '2024-12-01 12:00 Australia/Sydney',
            '2020-12-01 12:00 America/Sao_Paulo', '1975-07-01 12:00 Europe/London']) z) AS zones,
    (SELECT string_agg(extract(epoch FROM z::timestamptz)::bigint::text, ',' ORDER BY z)
       FROM unnest(ARRAY['2023-07-01 12:00 America/Mexico_City', '2022-12-01 12:00 Asia/Amman',
            '2023-12-01 12:00 America/Godthab', '2024-06-01 12:00 Asia/Almaty',
            '2025-07-01 12:00 America/Asuncion']) z) AS late_zones
  FROM pg_catalog.pg_database d WHERE d.datname = current_database()
$probe$
$$;
COMMENT ON FUNCTION shardmap._probe_sql() IS 'query that says what a database is, for comparing a shard with this one';
REVOKE ALL ON FUNCTION shardmap._probe_sql() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._probe_sql() TO shardmap_admin;

CREATE FUNCTION shardmap._same_locale(a text, b text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN upper(a) = 'POSIX' THEN 'c' ELSE lower(replace(a, '-', '')) END
         = CASE WHEN upper(b) = 'POSIX' THEN 'c' ELSE lower(replace(b, '-', '')) END
$$;
COMMENT ON FUNCTION shardmap._same_locale(text, text) IS 'whether two names of a locale mean the same one: en_US.UTF-8 and en_US.utf8, C and POSIX';
REVOKE ALL ON FUNCTION shardmap._same_locale(text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._same_locale(text, text) TO shardmap_admin;

-- Query that names, of pg_catalog, the collations that sort as the default of the database described in `probe` does.
CREATE FUNCTION shardmap._collation_sql(probe text[]) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format($query$
SELECT c.collname::text AS name
  FROM pg_catalog.pg_collation c
 WHERE c.collnamespace = 'pg_catalog'::regnamespace AND c.collprovider::text = %1$L AND c.collisdeterministic
   AND c.collencoding IN (-1, (SELECT d.encoding FROM pg_catalog.pg_database d WHERE d.datname = current_database()))
   AND CASE WHEN %1$L = 'c' THEN
            lower(replace(CASE c.collcollate WHEN 'POSIX' THEN 'C' ELSE c.collcollate END, '-', '')) = %2$L
        AND lower(replace(CASE c.collctype WHEN 'POSIX' THEN 'C' ELSE c.collctype END, '-', '')) = %3$L
       ELSE coalesce(to_jsonb(c) ->> 'colllocale', to_jsonb(c) ->> 'colliculocale', c.collcollate::text) = %4$L END
 ORDER BY c.collname = 'POSIX', length(c.collname), c.collname
$query$, probe[4], lower(replace(replace(probe[5], 'POSIX', 'C'), '-', '')),
        lower(replace(replace(probe[6], 'POSIX', 'C'), '-', '')), probe[7])
$$;
COMMENT ON FUNCTION shardmap._collation_sql(text[]) IS 'query for the collations that equal the default of the database that a probe described';
REVOKE ALL ON FUNCTION shardmap._collation_sql(text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._collation_sql(text[]) TO shardmap_admin;

CREATE FUNCTION shardmap._probe_local() RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    probe text[];
BEGIN
    EXECUTE format('SELECT ARRAY[p.version, p.role, p.encoding, p.provider, p.collate, p.ctype, p.locale, p.identity, '
        'p.zones, p.late_zones] FROM (%s) p', shardmap._probe_sql()) INTO probe;
    RETURN probe;
END
$$;
COMMENT ON FUNCTION shardmap._probe_local() IS 'what this database is, as _probe_sql describes it';
REVOKE ALL ON FUNCTION shardmap._probe_local() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._probe_local() TO shardmap_admin;

-- The collation that a shard's text columns must name so that they sort as here; '' where the default does.
CREATE FUNCTION shardmap._shard_collation(shard text) RETURNS text
LANGUAGE plpgsql STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    here text[] := shardmap._probe_local();
    there text[];
    name text;
BEGIN
    SELECT r INTO STRICT there FROM shardmap.remote_rows(shard, shardmap._probe_sql()) r;
    IF here[4] = there[4] AND (here[4] = 'c' OR here[7] = there[7])
        AND (here[4] <> 'c' OR shardmap._same_locale(here[5], there[5]) AND shardmap._same_locale(here[6], there[6]))
    THEN
        RETURN '';
    END IF;
    FOR name IN EXECUTE shardmap._collation_sql(here) LOOP
        IF EXISTS (SELECT FROM shardmap.remote_rows(shard, shardmap._collation_sql(here)) r WHERE r[1] = name) THEN
            RETURN format('pg_catalog.%I', name);
        END IF;
    END LOOP;
    RAISE EXCEPTION 'shard "%" has no collation that sorts as this database''s default', shard
        USING ERRCODE = 'collation_mismatch',
            DETAIL = format('The default here is "%s" (provider "%s"), there "%s" (provider "%s").',
                coalesce(nullif(here[7], ''), here[5]), here[4], coalesce(nullif(there[7], ''), there[5]), there[4]),
            HINT = 'Create the shard''s database with this database''s locale, or install that locale on the shard''s server.';
END
$$;
COMMENT ON FUNCTION shardmap._shard_collation(text) IS 'collation to name on a shard''s text columns so that they sort as here; empty if its default does';
REVOKE ALL ON FUNCTION shardmap._shard_collation(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._shard_collation(text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_shard(shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    here text[] := shardmap._probe_local();
    there text[];
BEGIN
    -- Not in a transaction: a standby refuses one that may write, and would not say what it is.
    SELECT r INTO STRICT there FROM shardmap.remote_rows(shard, shardmap._probe_sql(), false) r;
    IF there[1]::integer < 130000 THEN
        RAISE EXCEPTION 'server of shard "%" is too old', shard
            USING ERRCODE = 'feature_not_supported', DETAIL = format('Its version is %s.', there[1]),
                HINT = 'Use PostgreSQL 13 or later.';
    ELSIF there[8] = here[8] THEN
        RAISE EXCEPTION 'shard "%" would be this database itself', shard
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name another database: a shard holds rows only.';
    ELSIF there[2] = 'standby' THEN
        RAISE EXCEPTION 'server of shard "%" is a standby', shard
            USING ERRCODE = 'read_only_sql_transaction', HINT = 'Name its primary.';
    ELSIF there[3] <> here[3] THEN
        RAISE EXCEPTION 'shard "%" has encoding "%", this database has "%"', shard, there[3], here[3]
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Create the shard''s database with this database''s encoding.';
    ELSIF there[9] <> here[9] THEN
        RAISE EXCEPTION 'shard "%" has other time zones than this server', shard
            USING ERRCODE = 'invalid_parameter_value',
                DETAIL = 'A time of day in a well-known zone is another moment there.',
                HINT = 'Bring the time zone data (tzdata) of both servers to the same version.';
    ELSIF there[10] <> here[10] THEN
        RAISE WARNING 'shard "%" has time zone data of another version than this server', shard
            USING DETAIL = 'Recent changes of some zones are known to one of them only.',
                HINT = 'Bring the time zone data (tzdata) of both servers to the same version.';
    END IF;
    PERFORM shardmap._shard_collation(shard);
END
$$;
COMMENT ON FUNCTION shardmap._check_shard(text) IS 'raises an error unless the database behind a foreign server can be a shard';
REVOKE ALL ON FUNCTION shardmap._check_shard(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_shard(text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_distinct_shards(keyspace text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shard text;
    identity text;
    known jsonb := '{}'; -- what has been met, with the name of its shard
BEGIN
    FOR shard IN SELECT s.name FROM shardmap.shard s WHERE s.keyspace = $1 ORDER BY s.number LOOP
        SELECT r[1] INTO identity FROM shardmap.remote_rows(shard, 'SELECT d.oid || ''@'' || extract(epoch FROM '
            'pg_postmaster_start_time()) FROM pg_catalog.pg_database d WHERE d.datname = current_database()') r;
        IF known ? identity THEN
            RAISE EXCEPTION 'shards "%" and "%" are the same database', known ->> identity, shard
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Drop one of them with shardmap.drop_shard.';
        END IF;
        known := known || jsonb_build_object(identity, shard);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._check_distinct_shards(text) IS 'raises an error if two shards of a keyspace are one database: what one of them did would wait for the other for ever';
REVOKE ALL ON FUNCTION shardmap._check_distinct_shards(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_distinct_shards(text) TO shardmap_admin;
