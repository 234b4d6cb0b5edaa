-- The audit's look at the shards: findings as rows; nothing is written.
--
-- Decides what counts as found. What always holds: a range, or a pin, has drifted only if its owner was read and has nothing of it in
-- any table, and one other shard has something; rows found in a sample are counted in full before anything is said
-- about them. Read audit_run.sql next.

CREATE FUNCTION shardmap._audit_counts(keyspace text, sampled boolean, lower text, upper text, keys text[])
RETURNS TABLE (relation regclass, shard text, entry integer, rows bigint, error text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shards text[] := ARRAY(SELECT s.name FROM shardmap.shard s WHERE s.keyspace = $1 ORDER BY s.number);
    entry_sql text := shardmap._entry_sql(keyspace);
    scope text;
    answers jsonb;
    strange integer[];
BEGIN
    FOR relation IN SELECT l.relation FROM shardmap.logical_table l WHERE l.keyspace = $1 ORDER BY l.relation::text LOOP
        scope := shardmap._scope_sql(relation, lower => $3, upper => $4, keys => $5);
        SELECT jsonb_agg(to_jsonb(a)) INTO answers
          FROM shardmap._ask_shards(shards, shardmap._count_sql(relation, entry_sql, scope, sampled, 'true'), false) a;
        IF sampled THEN
            strange := ARRAY(SELECT DISTINCT (b ->> 0)::integer FROM jsonb_to_recordset(answers) a (shard text, answer text),
                    jsonb_array_elements(a.answer::jsonb) b JOIN shardmap._map_entries(keyspace) e ON e.entry = (b ->> 0)::integer
                WHERE e.kind <> 'moving' AND e.owner IS DISTINCT FROM a.shard);
            IF strange = '{}' THEN
                answers := (SELECT coalesce(jsonb_agg(a), '[]') FROM jsonb_array_elements(answers) a WHERE a ->> 'error' IS NOT NULL);
            ELSE
                SELECT jsonb_agg(to_jsonb(a)) INTO answers
                  FROM shardmap._ask_shards(shards, shardmap._count_sql(relation, entry_sql, scope, false,
                    format('s.bucket = ANY (%L::integer[])', strange)), false) a;
            END IF;
        END IF;
        RETURN QUERY SELECT relation, a.shard, (b ->> 0)::integer, (b ->> 1)::bigint, a.error
            FROM jsonb_to_recordset(answers) a (shard text, answer text, error text)
            LEFT JOIN LATERAL jsonb_array_elements(a.answer::jsonb) b ON true
           WHERE b IS NOT NULL OR a.error IS NOT NULL;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._audit_counts(text, boolean, text, text, text[]) IS
    'how many rows each shard has of each entry of the map, by table; sampled: only of entries of which a sample has rows on a shard that does not own them';
REVOKE ALL ON FUNCTION shardmap._audit_counts(text, boolean, text, text, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._audit_counts(text, boolean, text, text, text[]) TO shardmap_admin;

CREATE FUNCTION shardmap._audit_rows(keyspace text, sampled boolean, lower text DEFAULT NULL, upper text DEFAULT NULL, keys text[] DEFAULT NULL)
RETURNS TABLE (kind text, table_name text, shard text, owner text, key text, lower_bound text, upper_bound text, rows bigint,
    entry_version bigint, detail text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    counts jsonb := (SELECT coalesce(jsonb_agg(jsonb_build_object('relation', c.relation::oid::bigint, 'shard', c.shard, 'entry', c.entry,
        'rows', c.rows, 'error', c.error)), '[]') FROM shardmap._audit_counts($1, $2, $3, $4, $5) c);
    drifted integer[] := '{}';
    found record;
BEGIN
    RETURN QUERY SELECT 'unknown', shardmap._shard_table(c.relation::oid::regclass), c.shard, NULL, NULL, NULL, NULL, NULL::bigint, NULL::bigint, c.error
        FROM jsonb_to_recordset(counts) c (relation bigint, shard text, error text) WHERE c.error IS NOT NULL;
    FOR found IN
        SELECT e.entry, e.owner, e.pin, e.lower, e.upper, e.version, max(c.shard) AS holder, sum(c.rows)::bigint AS rows
          FROM jsonb_to_recordset(counts) c (shard text, entry integer, rows bigint)
          JOIN shardmap._map_entries($1) e ON e.entry = c.entry
         WHERE e.kind IN ('range', 'pin') AND NOT EXISTS (SELECT FROM jsonb_to_recordset(counts) u (shard text, error text)
                WHERE u.error IS NOT NULL AND u.shard = e.owner)
         GROUP BY e.entry, e.owner, e.pin, e.lower, e.upper, e.version
        HAVING count(DISTINCT c.shard) = 1 AND max(c.shard) IS DISTINCT FROM e.owner ORDER BY e.entry
    LOOP
        drifted := drifted || found.entry;
        RETURN QUERY SELECT 'drifted', NULL, found.holder, found.owner, found.pin, found.lower, found.upper, found.rows, found.version,
            format('%s has all rows of %s, %s', found.holder, coalesce('key "' || found.pin || '"', 'range ' || shardmap._range_text(found.lower, found.upper)),
                coalesce('its owner ' || found.owner || ' has none', 'which no shard owns'));
    END LOOP;
    FOR found IN
        SELECT c.relation::oid::regclass AS relation, c.shard, array_agg(c.entry) AS entries
          FROM jsonb_to_recordset(counts) c (relation bigint, shard text, entry integer)
          JOIN shardmap._map_entries($1) e ON e.entry = c.entry
         WHERE e.kind <> 'moving' AND e.owner IS DISTINCT FROM c.shard AND e.entry <> ALL (drifted) GROUP BY c.relation, c.shard
    LOOP
        RETURN QUERY SELECT f.finding, shardmap._shard_table(found.relation), found.shard, f.owner, e.pin, e.lower, e.upper, count(*), max(e.version),
                format('%s; rows %s', min(f.detail), (array_to_string((array_agg(f.row_id ORDER BY f.row_id))[:5], ', ')
                    || CASE WHEN count(*) > 5 THEN ', ...' ELSE '' END))
            FROM shardmap._foreign_rows(found.relation, shardmap._primary_key(found.relation, ARRAY[found.shard], false), found.shard,
                    found.entries, 1000) f
            JOIN shardmap._map_entries($1) e ON e.entry = f.entry
           GROUP BY f.finding, f.owner, e.pin, e.lower, e.upper;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._audit_rows(text, boolean, text, text, text[]) IS 'findings of an audit about rows, of a range of keys, of some keys, or of all';
REVOKE ALL ON FUNCTION shardmap._audit_rows(text, boolean, text, text, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._audit_rows(text, boolean, text, text, text[]) TO shardmap_admin;

CREATE FUNCTION shardmap._audit_layouts(keyspace text) RETURNS TABLE (kind text, table_name text, shard text, detail text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shards text[] := ARRAY(SELECT s.name FROM shardmap.shard s WHERE s.keyspace = $1 ORDER BY s.number);
    here text[];
    wanted text[];
    answers jsonb;
BEGIN
    FOR table_name IN SELECT shardmap._shard_table(l.relation) FROM shardmap.logical_table l WHERE l.keyspace = $1 ORDER BY 1 LOOP
        EXECUTE shardmap._layout_sql(table_name, false) INTO here;
        SELECT jsonb_agg(to_jsonb(a)) INTO answers
          FROM shardmap._ask_shards(shards, shardmap._layout_sql(table_name, true), false) a;
        -- Keys, checks and indexes: what most shards have.
        SELECT mode() WITHIN GROUP (ORDER BY ARRAY(SELECT l FROM unnest(a.answer::text[]) l WHERE l NOT LIKE 'column %' ORDER BY 1))
          INTO wanted FROM jsonb_to_recordset(answers) a (answer text) WHERE a.answer <> '{}';
        RETURN QUERY SELECT CASE WHEN a.error IS NULL THEN 'layout' ELSE 'unknown' END, table_name, a.shard, coalesce(a.error,
                CASE WHEN a.answer = '{}' THEN 'the shard has no such table' ELSE concat_ws('; ', 'lacks ' || d.lacks, 'has ' || d.has) END)
            FROM jsonb_to_recordset(answers) a (shard text, answer text, error text),
            LATERAL (SELECT (SELECT string_agg(l, ', ') FROM (SELECT unnest(here || wanted) EXCEPT SELECT unnest(a.answer::text[]) ORDER BY 1) x (l)) AS lacks,
                (SELECT string_agg(l, ', ') FROM (SELECT unnest(a.answer::text[]) EXCEPT SELECT unnest(here || wanted) ORDER BY 1) x (l)) AS has) d
           WHERE a.error IS NOT NULL OR d.lacks IS NOT NULL OR d.has IS NOT NULL;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._audit_layouts(text) IS 'shards whose table has other columns than the logical table, or other constraints or indexes than most';
REVOKE ALL ON FUNCTION shardmap._audit_layouts(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._audit_layouts(text) TO shardmap_admin;

CREATE FUNCTION shardmap._audit_copies(keyspace text, sampled boolean) RETURNS TABLE (kind text, table_name text, shard text, detail text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off SET timezone = 'UTC'
SET datestyle = 'ISO, YMD' SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
DECLARE
    shards text[] := ARRAY(SELECT s.name FROM shardmap.shard s WHERE s.keyspace = $1 ORDER BY s.number);
    relation regclass;
    query text;
    here text;
    rest text[];
    answers jsonb;
    before jsonb;
    is_still boolean;
BEGIN
    FOR relation IN SELECT r.relation FROM shardmap.reference_table r WHERE r.keyspace = $1 ORDER BY r.relation::text LOOP
        table_name := shardmap._shard_table(relation);
        SELECT jsonb_agg(to_jsonb(a)) INTO answers FROM shardmap._ask_shards(shards,
            format('SELECT (to_regclass(%L) IS NOT NULL)::text AS answer', table_name), false) a;
        RETURN QUERY SELECT CASE WHEN a.error IS NULL THEN 'missing_copy' ELSE 'unknown' END, table_name, a.shard,
                coalesce(a.error, 'the shard has no such table')
            FROM jsonb_to_recordset(answers) a (shard text, answer text, error text) WHERE a.answer IS DISTINCT FROM 'true';
        CONTINUE WHEN sampled;
        query := format('SELECT concat_ws('', '', x.a, x.b) AS answer FROM (%s) x (a, b)', shardmap._reference_checksum_sql(relation));
        rest := ARRAY(SELECT e.shard FROM jsonb_to_recordset(answers) e (shard text, answer text) WHERE e.answer = 'true');
        -- Who writes meanwhile is not held off: what differs is looked at again, until two looks in succession are alike.
        before := NULL;
        FOR look IN 1..6 LOOP
            EXECUTE query INTO here;
            SELECT jsonb_agg(to_jsonb(a) || jsonb_build_object('here', here)) INTO answers FROM shardmap._ask_shards(rest, query, false) a
             WHERE a.answer IS DISTINCT FROM here;
            is_still := answers = before;
            EXIT WHEN answers IS NULL OR is_still;
            before := answers;
            rest := ARRAY(SELECT e ->> 'shard' FROM jsonb_array_elements(answers) e);
            PERFORM pg_sleep(0.1 * look);
        END LOOP;
        RETURN QUERY SELECT CASE WHEN a.error IS NULL AND is_still THEN 'differing_copy' ELSE 'unknown' END, table_name, a.shard,
                coalesce(a.error, CASE WHEN is_still THEN format('rows and checksum there: %s; here: %s', a.answer, a.here)
                    ELSE 'the table was written to whenever it was compared; shardmap.verify_reference() holds off writers' END)
            FROM jsonb_to_recordset(answers) a (shard text, answer text, here text, error text);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._audit_copies(text, boolean) IS 'shards without a copy of a reference table; not sampled: or with other rows in it';
REVOKE ALL ON FUNCTION shardmap._audit_copies(text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._audit_copies(text, boolean) TO shardmap_admin;
