-- Verification: what two shards have of a logical table, compared by bucket of the token space, then by row.
--
-- Decides what is asked of a shard: for each bucket the number of rows and of keys, the sum of the rows' checksums, and
-- sum, least and greatest value of the numeric columns; then, of buckets that differ, parts of them, then rows. What
-- always holds: both shards are asked the same, of built-ins only, with the same settings; columns are named, in the
-- order of the logical table; what could not be read is an error, never equal. The core compares (src/core/checksum.rs).
-- Read verify_table.sql next.

CREATE FUNCTION shardmap._compare_summaries(source text, target text, bits integer, parts boolean, figures text)
    RETURNS TABLE (bucket bigint, token_from bigint, token_to bigint, source_rows bigint, target_rows bigint, aspects text)
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'compare_summaries_wrapper';
COMMENT ON FUNCTION shardmap._compare_summaries(text, text, integer, boolean, text) IS
    'buckets (or parts of buckets) of which two shards have not the same, by the answers to _summary_sql(); figures: names of the figures, as JSON';

CREATE FUNCTION shardmap._compare_rows(source text, target text)
    RETURNS TABLE (finding text, key text, row_id text, source_rows bigint, target_rows bigint)
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'compare_row_digests_wrapper';
COMMENT ON FUNCTION shardmap._compare_rows(text, text) IS
    'rows that two shards have not alike, by the answers to _digest_sql()';

-- Settings on which the text of a value depends, for a session that is used for this alone.
CREATE FUNCTION shardmap._plain_settings_sql() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT 'SET LOCAL search_path = pg_catalog; SET LOCAL row_security = off; SET LOCAL TimeZone = ''UTC''; '
        'SET LOCAL DateStyle = ''ISO, YMD''; SET LOCAL IntervalStyle = ''postgres''; SET LOCAL extra_float_digits = 3; '
        'SET LOCAL bytea_output = ''hex''; SET LOCAL lc_monetary = ''C''; '
$$;
COMMENT ON FUNCTION shardmap._plain_settings_sql() IS
    'statements that give a shard''s session, for one transaction, the settings under which rows are compared as text';

CREATE FUNCTION shardmap._ask_each(shards text[], sql text)
    RETURNS TABLE (shard text, success boolean, command text, result jsonb, error text)
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'ask_each_wrapper';
COMMENT ON FUNCTION shardmap._ask_each(text[], text) IS
    'run_on_each() for a question that leaves nothing behind: its sessions serve the next question of this transaction too';
REVOKE ALL ON FUNCTION shardmap._ask_each(text[], text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._ask_each(text[], text) TO shardmap_admin;

CREATE FUNCTION shardmap._ask_together(shards text[], sql text) RETURNS TABLE (shard text, answer text)
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'ask_together_wrapper';
COMMENT ON FUNCTION shardmap._ask_together(text[], text) IS
    'one value of each of some shards, all asked at once, in this transaction: statements that write nothing; a failure is raised';
REVOKE ALL ON FUNCTION shardmap._ask_together(text[], text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._ask_together(text[], text) TO shardmap_admin;

-- Memory to sort and to group in; what is more goes to disk.
CREATE FUNCTION shardmap._plain_memory_sql() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT 'SET LOCAL work_mem = ''64MB''; SET LOCAL hash_mem_multiplier = 1; '
$$;
COMMENT ON FUNCTION shardmap._plain_memory_sql() IS 'statements that give a shard''s session, for one transaction, memory to compare rows';

-- All at once, in this transaction's session on each shard, or in sessions of their own.
CREATE FUNCTION shardmap._ask_shards(shards text[], query text, transactional boolean)
RETURNS TABLE (shard text, answer text, error text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off SET timezone = 'UTC'
SET datestyle = 'ISO, YMD' SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
BEGIN
    IF transactional THEN
        RETURN QUERY SELECT t.shard, t.answer, NULL FROM shardmap._ask_together(shards, shardmap._plain_memory_sql() || query) t;
    ELSE
        RETURN QUERY SELECT e.shard, e.result -> 0 ->> 'answer',
                CASE WHEN e.success AND e.result -> 0 ->> 'answer' IS NULL THEN 'the shard gave no answer' ELSE e.error END
            FROM shardmap._ask_each(shards, shardmap._plain_settings_sql() || shardmap._plain_memory_sql() || query) e;
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._ask_shards(text[], text, boolean) IS
    'one value, called answer, of each shard: transactional, in this transaction (a failure is raised), else in sessions of their own (a failure is a row)';
REVOKE ALL ON FUNCTION shardmap._ask_shards(text[], text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._ask_shards(text[], text, boolean) TO shardmap_admin;

-- Of text in UTF-8, which is what keys are hashed as. (SQL_ASCII says nothing about its letters.)
CREATE FUNCTION shardmap._key_md5_sql(key_sql text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format(CASE WHEN current_setting('server_encoding') IN ('UTF8', 'SQL_ASCII') THEN 'pg_catalog.md5(%s)'
        ELSE 'pg_catalog.md5(pg_catalog.convert_to(%s, ''UTF8''))' END, key_sql)
$$;
COMMENT ON FUNCTION shardmap._key_md5_sql(text) IS 'SQL of the MD5 of a key whose canonical text is key_sql';

CREATE FUNCTION shardmap._token_sql(md5_sql text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    -- No cast of text to bits: postgres_fdw would not send that to a shard.
    SELECT format('pg_catalog.int8(pg_catalog.bit_in(pg_catalog.textout(pg_catalog.textcat(''x'', pg_catalog.right(%s, 8))), 0, 32))', md5_sql)
$$;
COMMENT ON FUNCTION shardmap._token_sql(text) IS 'SQL of the token that belongs to a key''s MD5';

CREATE FUNCTION shardmap._scope_sql(relation regclass, tokens int8multirange DEFAULT NULL, keys text[] DEFAULT NULL,
    lower text DEFAULT NULL, upper text DEFAULT NULL, except_keys text[] DEFAULT '{}') RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT concat_ws(' AND ', 'true',
        -- Even: below a range, between two, or above; odd: within one.
        CASE WHEN tokens IS NOT NULL THEN format('pg_catalog.width_bucket(%s, %L::pg_catalog.int8[]) %% 2 = 1',
            shardmap._token_sql(shardmap._key_md5_sql(k.sql)), ARRAY(SELECT b FROM unnest(tokens) r,
                unnest(ARRAY[coalesce(lower(r), 0), coalesce(upper(r), 4294967296)]) b ORDER BY b)) END,
        CASE WHEN keys IS NOT NULL THEN format('%s = ANY (%L::pg_catalog.text[])', k.sql, keys) END,
        shardmap._range_sql(s.range_order, l.key_type, 't.' || quote_ident(l.key_column), $4, $5),
        CASE WHEN except_keys <> '{}' THEN format('%s <> ALL (%L::pg_catalog.text[])', k.sql, except_keys) END)
      FROM shardmap.logical_table l JOIN shardmap.keyspace s ON s.name = l.keyspace,
        LATERAL (SELECT shardmap.key_sql(l.key_type, 't.' || quote_ident(l.key_column)) AS sql) k
     WHERE l.relation = $1
$$;
COMMENT ON FUNCTION shardmap._scope_sql(regclass, int8multirange, text[], text, text, text[]) IS
    'SQL condition on rows t of a shard''s table: key''s token within tokens, key one of keys, from lower to below upper, not one of except_keys; what is NULL does not count';
REVOKE ALL ON FUNCTION shardmap._scope_sql(regclass, int8multirange, text[], text, text, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._scope_sql(regclass, int8multirange, text[], text, text, text[]) TO shardmap_admin;

-- Arcs, without the pins of the keyspace, which do not follow them.
CREATE FUNCTION shardmap._owned_tokens(shard text) RETURNS int8multirange
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(range_agg(r), '{}') FROM shardmap.tokens t, LATERAL (VALUES
            (int8range(greatest(t.token - t.positions + 1, 0), t.token + 1)),
            (int8range(t.token - t.positions + 1 + 4294967296, CASE WHEN t.token - t.positions + 1 < 0 THEN 4294967296
                ELSE t.token - t.positions + 1 + 4294967296 END))) a (r)
     WHERE t.shard = $1
$$;
COMMENT ON FUNCTION shardmap._owned_tokens(text) IS 'tokens that a shard of a ring owns';

CREATE FUNCTION shardmap._check_answer(relation regclass, shard text, error text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF error IS NOT NULL THEN
        RAISE EXCEPTION 'could not read table % on shard "%"', relation, shard
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = error,
                HINT = 'What could not be read is not known to be equal. Try again when the shard answers.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_answer(regclass, text, text) IS 'raises an error if a shard gave one';

-- A logical table has no primary key here; its tables on the shards may have.
CREATE FUNCTION shardmap._primary_key_sql(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('SELECT array_prepend(row_security_active(%1$L)::text, array_agg(a.attname::text '
            'ORDER BY u.n) FILTER (WHERE u.n > 0))::text AS answer FROM (VALUES (0)) v (n) LEFT JOIN pg_constraint c '
            'ON c.conrelid = %1$L::regclass AND c.contype = ''p'' LEFT JOIN unnest(c.conkey) WITH ORDINALITY u (k, n) ON true '
            'LEFT JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = u.k', shardmap._shard_table(relation))
$$;
COMMENT ON FUNCTION shardmap._primary_key_sql(regclass) IS 'query for whether row security hides rows of a shard''s table, and the columns of its primary key';
REVOKE ALL ON FUNCTION shardmap._primary_key_sql(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._primary_key_sql(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._primary_key(relation regclass, shards text[], transactional boolean) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found record;
    primary_key text[];
BEGIN
    FOR found IN SELECT a.* FROM shardmap._ask_shards(shards, shardmap._primary_key_sql(relation), transactional)
            WITH ORDINALITY a ORDER BY a.ordinality DESC LOOP
        PERFORM shardmap._check_answer(relation, found.shard, found.error);
        primary_key := found.answer::text[];
        IF primary_key[1]::boolean THEN
            PERFORM shardmap._check_answer(relation, found.shard, 'Row security hides rows of the table there.');
        END IF;
    END LOOP;
    RETURN primary_key[2:];
END
$$;
COMMENT ON FUNCTION shardmap._primary_key(regclass, text[], boolean) IS
    'columns of the primary key of the first shard''s table, in their order there; raises an error if the caller does not see all rows on all of the shards';
REVOKE ALL ON FUNCTION shardmap._primary_key(regclass, text[], boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._primary_key(regclass, text[], boolean) TO shardmap_admin;

-- All columns, in the order of the logical table, by their output functions.
CREATE FUNCTION shardmap._row_text_sql(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('ROW(%s)::pg_catalog.text', string_agg(format('t.%I', a.attname), ', ' ORDER BY a.attnum))
      FROM pg_attribute a WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
$$;
COMMENT ON FUNCTION shardmap._row_text_sql(regclass) IS 'SQL of the text of a row t of a shard''s table';

CREATE FUNCTION shardmap._numeric_columns(relation regclass) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(array_agg(a.attname::text ORDER BY a.attnum), '{}') FROM pg_attribute a
     WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
       AND shardmap._base_type(a.atttypid) IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'numeric'::regtype)
$$;
COMMENT ON FUNCTION shardmap._numeric_columns(regclass) IS 'columns of a table whose sum does not depend on the order of the rows: integers and numeric';
REVOKE ALL ON FUNCTION shardmap._numeric_columns(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._numeric_columns(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._figure_names(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(json_agg(format(f.name, c.name) ORDER BY c.n, f.n), '[]')::text
      FROM unnest(shardmap._numeric_columns($1)) WITH ORDINALITY c (name, n),
        unnest(ARRAY['sum(%I)', 'min(%I)', 'max(%I)']) WITH ORDINALITY f (name, n)
$$;
COMMENT ON FUNCTION shardmap._figure_names(regclass) IS 'names of the figures of a summary, in their order, as JSON';
REVOKE ALL ON FUNCTION shardmap._figure_names(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._figure_names(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._row_id_sql(relation regclass, primary_key text[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN primary_key = '{}' THEN format('md5(%s)', shardmap._row_text_sql($1))
        ELSE format('ROW(%s)::text', (SELECT string_agg(format('t.%I', c), ', ' ORDER BY n)
            FROM unnest(primary_key) WITH ORDINALITY p (c, n))) END
$$;
COMMENT ON FUNCTION shardmap._row_id_sql(regclass, text[]) IS 'SQL that names a row t of a shard''s table: its primary key, or for want of one an MD5 of the row';

-- Bucket of a row of _source_sql: the first bits of its token, which is the last four bytes of the MD5; parts: and twelve
-- of what identifies the row.
CREATE FUNCTION shardmap._bucket_sql(bits integer, parts boolean) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format(CASE WHEN bits <= 8 THEN '(get_byte(decode(substr(s.h, 25, 2), ''hex''), 0) >> %s)'
            ELSE '((get_byte(decode(substr(s.h, 25, 4), ''hex''), 0) << 8 | get_byte(decode(substr(s.h, 25, 4), ''hex''), 1)) >> %s)' END || '%s',
        CASE WHEN bits <= 8 THEN 8 ELSE 16 END - bits, CASE WHEN parts THEN ' << 12 | (''x'' || left(md5(s.i), 3))::bit(12)::integer' END)
$$;
COMMENT ON FUNCTION shardmap._bucket_sql(integer, boolean) IS 'SQL of the bucket, or part of a bucket, of a row of _source_sql()';

-- 63 bits of a hash that Postgres has for hash partitions too: the same in every version (among shards of one byte order).
CREATE FUNCTION shardmap._checksum_sql(text_sql text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('(hashtextextended((%s) COLLATE "C", 0) & 9223372036854775807)', text_sql)
$$;
COMMENT ON FUNCTION shardmap._checksum_sql(text) IS 'SQL of the checksum of a text';

-- Rows with bucket, token, MD5 of the key h, its checksum d, key k, id i,
-- MD5 x and checksum c. `OFFSET 0` keeps Postgres from computing them
-- again wherever they are used; what is not used is not computed.
CREATE FUNCTION shardmap._source_sql(relation regclass, primary_key text[], scope text, bucket_sql text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('(SELECT s.*, (%1$s) AS bucket FROM (SELECT r.*, %2$s AS token FROM (SELECT %3$s AS k, %4$s AS h, %10$s AS d, %5$s AS i, '
            'md5(%6$s) AS x, %11$s AS c%7$s FROM ONLY %8$s AS t WHERE %9$s OFFSET 0) r '
            'OFFSET 0) s OFFSET 0)',
        bucket_sql, shardmap._token_sql('r.h'), k.sql, shardmap._key_md5_sql(k.sql),
        shardmap._row_id_sql($1, primary_key), shardmap._row_text_sql($1),
        (SELECT string_agg(format(', t.%I AS n%s', c, n), '' ORDER BY n)
           FROM unnest(shardmap._numeric_columns($1)) WITH ORDINALITY p (c, n)),
        shardmap._shard_table($1), scope, shardmap._checksum_sql(k.sql), shardmap._checksum_sql(shardmap._row_text_sql($1)))
      FROM shardmap.logical_table l, LATERAL (SELECT shardmap.key_sql(l.key_type, 't.' || quote_ident(l.key_column)) AS sql) k
     WHERE l.relation = $1
$$;
COMMENT ON FUNCTION shardmap._source_sql(regclass, text[], text, text) IS 'SQL of the rows of a shard''s table within a scope, each with its bucket';
REVOKE ALL ON FUNCTION shardmap._source_sql(regclass, text[], text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._source_sql(regclass, text[], text, text) TO shardmap_admin;

CREATE FUNCTION shardmap._summary_sql(relation regclass, primary_key text[], scope text, bucket_sql text, condition text DEFAULT 'true')
RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('SELECT coalesce(json_agg(json_build_array(b.bucket, b.rows::text, b.checksum::text, b.keys::text, b.figures)), '
            '''[]'')::text AS answer FROM (SELECT s.bucket, count(*) AS rows, sum(s.c) AS checksum, '
            '%s AS keys, ARRAY[%s]::text[] AS figures FROM %s s WHERE %s GROUP BY s.bucket) b',
        CASE WHEN primary_key = ARRAY[l.key_column] THEN 'count(*)' ELSE 'count(DISTINCT s.d)' END,
        -- Of equal numbers the one with the fewest digits: which of them is met first says nothing.
        (SELECT string_agg(format('sum(s.n%1$s)::text, trim_scale(min(s.n%1$s))::text, trim_scale(max(s.n%1$s))::text', n), ', ' ORDER BY n)
           FROM generate_series(1, cardinality(shardmap._numeric_columns($1))) n),
        shardmap._source_sql($1, primary_key, scope, bucket_sql), condition)
      FROM shardmap.logical_table l WHERE l.relation = $1
$$;
COMMENT ON FUNCTION shardmap._summary_sql(regclass, text[], text, text, text) IS
    'query for the summaries of the buckets of a shard''s table, of rows s that meet a condition';
REVOKE ALL ON FUNCTION shardmap._summary_sql(regclass, text[], text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._summary_sql(regclass, text[], text, text, text) TO shardmap_admin;

-- The same answer where keys have many rows each: what depends on the key is computed once for all of them.
CREATE FUNCTION shardmap._summary_by_key_sql(relation regclass, scope text, bits integer) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('SELECT coalesce(json_agg(json_build_array(b.bucket, b.rows::text, b.checksum::text, b.keys::text, b.figures)), '
            '''[]'')::text AS answer FROM (SELECT %1$s AS bucket, sum(s.rows) AS rows, sum(s.c) AS checksum, count(*) AS keys, '
            'ARRAY[%2$s]::text[] AS figures FROM (SELECT g.*, %3$s AS h FROM (SELECT r.k, count(*) AS rows, sum(r.c) AS c%4$s '
            'FROM (SELECT (%5$s) COLLATE "C" AS k, %6$s AS c%7$s FROM ONLY %8$s AS t WHERE %9$s OFFSET 0) r GROUP BY r.k OFFSET 0) g OFFSET 0) s GROUP BY 1) b',
        shardmap._bucket_sql(bits, false), n.totals, shardmap._key_md5_sql('g.k'), n.sums, k.sql, shardmap._checksum_sql(shardmap._row_text_sql($1)),
        n.columns, shardmap._shard_table($1), scope)
      FROM shardmap.logical_table l,
        LATERAL (SELECT shardmap.key_sql(l.key_type, 't.' || quote_ident(l.key_column)) AS sql) k,
        LATERAL (SELECT string_agg(format(', t.%I AS n%s', c, p), '' ORDER BY p) AS columns,
                string_agg(format(', sum(r.n%1$s) AS s%1$s, min(r.n%1$s) AS l%1$s, max(r.n%1$s) AS g%1$s', p), '' ORDER BY p) AS sums,
                string_agg(format('sum(s.s%1$s)::text, trim_scale(min(s.l%1$s))::text, trim_scale(max(s.g%1$s))::text', p), ', ' ORDER BY p) AS totals
            FROM unnest(shardmap._numeric_columns($1)) WITH ORDINALITY u (c, p)) n
     WHERE l.relation = $1
$$;
COMMENT ON FUNCTION shardmap._summary_by_key_sql(regclass, text, integer) IS
    'query for the summaries of the buckets of a shard''s table, computed by key';
REVOKE ALL ON FUNCTION shardmap._summary_by_key_sql(regclass, text, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._summary_by_key_sql(regclass, text, integer) TO shardmap_admin;

CREATE FUNCTION shardmap._digest_sql(relation regclass, primary_key text[], scope text, bucket_sql text, condition text,
    max_rows integer DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('SELECT coalesce(json_agg(json_build_array(s.k, s.i, s.x, s.bucket)), ''[]'')::text AS answer '
            'FROM (SELECT s.* FROM %s s WHERE %s LIMIT %L) s',
        shardmap._source_sql($1, primary_key, scope, bucket_sql), condition, max_rows)
$$;
COMMENT ON FUNCTION shardmap._digest_sql(regclass, text[], text, text, text, integer) IS
    'query for the rows s of a shard''s table that meet a condition: key, primary key, MD5, bucket';
REVOKE ALL ON FUNCTION shardmap._digest_sql(regclass, text[], text, text, text, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._digest_sql(regclass, text[], text, text, text, integer) TO shardmap_admin;
