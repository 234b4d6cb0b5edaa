-- Verification: two shards compared.
--
-- Decides how far a difference is followed: of at most 16 buckets into their parts, and of at most 256 parts to the rows.
-- What always holds: every bucket that differs is a row of the answer, also one whose rows were not looked at; no row at
-- all means that both shards were read and have the same. Read verify_table.sql next.

CREATE FUNCTION shardmap._both_answers(relation regclass, source text, target text, query text, transactional boolean)
RETURNS TABLE (here text, there text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found record;
BEGIN
    FOR found IN SELECT a.* FROM shardmap._ask_shards(ARRAY[source, target], query, transactional) a LOOP
        PERFORM shardmap._check_answer(relation, found.shard, found.error);
        here := CASE found.shard WHEN source THEN found.answer ELSE here END;
        there := CASE found.shard WHEN target THEN found.answer ELSE there END;
    END LOOP;
    RETURN NEXT;
END
$$;
COMMENT ON FUNCTION shardmap._both_answers(regclass, text, text, text, boolean) IS 'the answers of two shards to one query; raises an error if one of them gives none';
REVOKE ALL ON FUNCTION shardmap._both_answers(regclass, text, text, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._both_answers(regclass, text, text, text, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap._compare_shards(relation regclass, source text, target text, scope text DEFAULT 'true',
    transactional boolean DEFAULT false, bits integer DEFAULT 8, max_rows integer DEFAULT 100, by_key boolean DEFAULT false)
RETURNS TABLE (finding text, token_from bigint, token_to bigint, key text, row_id text, source_rows bigint, target_rows bigint,
    detail text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    primary_key text[];
    answers record;
    bucket record;
    buckets integer[] := '{}';
    parts integer[];
BEGIN
    IF NOT EXISTS (SELECT FROM shardmap.logical_table l WHERE l.relation = $1) THEN
        RAISE EXCEPTION 'table % is not distributed', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.tables.';
    ELSIF source = target OR source IS NULL OR target IS NULL THEN
        RAISE EXCEPTION 'two shards are needed for a comparison' USING ERRCODE = 'invalid_parameter_value';
    ELSIF bits NOT BETWEEN 0 AND 16 THEN
        RAISE EXCEPTION 'bits must be from 0 to 16' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    primary_key := shardmap._primary_key(relation, ARRAY[source, target], transactional);
    SELECT * INTO answers FROM shardmap._both_answers(relation, source, target,
        CASE WHEN by_key THEN shardmap._summary_by_key_sql(relation, scope, bits)
            ELSE shardmap._summary_sql(relation, primary_key, scope, shardmap._bucket_sql(bits, false)) END, transactional);
    finding := 'bucket';
    FOR bucket IN SELECT c.* FROM shardmap._compare_summaries(answers.here, answers.there, bits, false,
            shardmap._figure_names(relation)) c ORDER BY c.bucket LOOP
        token_from := bucket.token_from;
        token_to := bucket.token_to;
        source_rows := bucket.source_rows;
        target_rows := bucket.target_rows;
        detail := bucket.aspects;
        RETURN NEXT;
        buckets := CASE WHEN cardinality(buckets) < 16 THEN buckets || bucket.bucket::integer ELSE buckets END;
    END LOOP;
    IF buckets = '{}' OR max_rows < 1 THEN
        RETURN;
    END IF;
    SELECT * INTO answers FROM shardmap._both_answers(relation, source, target,
        shardmap._summary_sql(relation, primary_key, scope, shardmap._bucket_sql(bits, true),
            format('s.bucket >> 12 = ANY (%L::integer[])', buckets)), transactional);
    parts := ARRAY(SELECT c.bucket FROM shardmap._compare_summaries(answers.here, answers.there, bits, true,
        shardmap._figure_names(relation)) c ORDER BY c.bucket LIMIT 256);
    SELECT * INTO answers FROM shardmap._both_answers(relation, source, target,
        shardmap._digest_sql(relation, primary_key, scope, shardmap._bucket_sql(bits, true),
            format('s.bucket = ANY (%L::integer[])', parts)), transactional);
    RETURN QUERY SELECT c.finding, t.token, t.token, c.key, c.row_id, c.source_rows, c.target_rows,
            format('%s %s', CASE primary_key WHEN '{}' THEN 'MD5 of the row' ELSE 'primary key' END, c.row_id)
        FROM shardmap._compare_rows(answers.here, answers.there) c,
            LATERAL (SELECT ('x' || right(md5(convert_to(c.key, 'UTF8')), 8))::bit(32)::bigint AS token) t
        ORDER BY t.token, c.row_id LIMIT max_rows;
END
$$;
COMMENT ON FUNCTION shardmap._compare_shards(regclass, text, text, text, boolean, integer, integer, boolean) IS
    'what two shards have not alike of the rows of a logical table within scope (see _scope_sql): a row for each bucket that differs, then for rows that are missing on the target, extra or doubled there, or changed; none if all is equal; transactional: in this transaction''s sessions, so that it sees what they see; by_key: keys have many rows each';
REVOKE ALL ON FUNCTION shardmap._compare_shards(regclass, text, text, text, boolean, integer, integer, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._compare_shards(regclass, text, text, text, boolean, integer, integer, boolean) TO shardmap_admin;
