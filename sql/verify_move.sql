-- Verification of a move: both sides compared in full, whenever both have rows.
--
-- Decides what of a difference is one: not what is not copied yet, nor a row that stands in the log of changes, nor one
-- that is equal when it is looked at again. What always holds: a row that nobody touches is compared; a difference that
-- stays is named; what could not be read is an error. Nothing is locked, and the move goes on meanwhile. Read docs/moves.md.

CREATE FUNCTION shardmap._check_verifiable(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF job.state NOT IN ('copying', 'catching_up', 'verifying', 'fencing', 'flipped') THEN
        RAISE EXCEPTION 'move % is %', job.id, replace(job.state, '_', ' ')
            USING ERRCODE = 'object_not_in_prerequisite_state',
                DETAIL = CASE WHEN job.state IN ('planned', 'prechecked') THEN 'Nothing was copied yet.' ELSE 'Rows of one side are deleted, or were.' END,
                HINT = 'Whether all rows lie where they belong, shardmap.verify() of each table says.';
    ELSIF job.replicates AND job.state <> 'flipped' THEN
        RAISE EXCEPTION 'move % goes by logical replication, and is %', job.id, replace(job.state, '_', ' ')
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = 'Nothing tells which rows have changed and are not on the target yet.',
                HINT = 'It compares all rows itself before the map changes; from then on they can be verified.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_verifiable(shardmap.move) IS 'raises an error unless both sides of a move have rows to be compared';
REVOKE ALL ON FUNCTION shardmap._check_verifiable(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_verifiable(shardmap.move) TO shardmap_admin;

-- Rows whose change is logged, as _row_id_sql() names them. After the flip those are the target's, logged for the way back.
-- The log goes when the move is cleaned.
CREATE FUNCTION shardmap._logged_rows(job shardmap.move, moved shardmap.move_table) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF job.state = 'flipped' THEN
        job.reversed := true;
        job := shardmap._directed(job);
    END IF;
    RETURN (SELECT coalesce(array_agg(r[1]), '{}') FROM shardmap.remote_rows(job.source, format(
        'SELECT DISTINCT ROW(%s)::pg_catalog.text AS row_id FROM %I.changes_%s c', shardmap._name_list(moved.key_columns, 'c.'),
        shardmap._move_schema(job), moved.position), false) r);
EXCEPTION
    WHEN undefined_table OR invalid_schema_name THEN
        RAISE EXCEPTION 'move % has gone on while it was verified', job.id USING ERRCODE = 'serialization_failure', HINT = 'See shardmap.moves.';
END
$$;
COMMENT ON FUNCTION shardmap._logged_rows(shardmap.move, shardmap.move_table) IS 'primary keys of rows that have changed on the shard that owns them, and may not be copied anew yet';
REVOKE ALL ON FUNCTION shardmap._logged_rows(shardmap.move, shardmap.move_table) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._logged_rows(shardmap.move, shardmap.move_table) TO shardmap_admin;

CREATE FUNCTION shardmap._verify_move_table(job shardmap.move, moved shardmap.move_table, max_rows integer)
RETURNS TABLE (finding text, key text, row_id text, source_rows bigint, target_rows bigint, detail text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    many constant integer := 10000;
    scope text := concat_ws(' AND ', shardmap._move_condition(job, moved.relation, 't.'),
        CASE WHEN NOT moved.copied THEN shardmap._beyond(job, moved, '<=') END);
    seen jsonb;
    differing jsonb;
    suspects jsonb;
    logged text[];
    is_whole boolean;
BEGIN
    FOR look IN 1..4 LOOP
        SELECT jsonb_agg(to_jsonb(c)) INTO seen FROM shardmap._compare_shards(moved.relation, job.source, job.target, scope, max_rows => many,
            by_key => job.kind = 'key') c;
        EXIT WHEN seen IS NULL;
        is_whole := (SELECT count(*) FILTER (WHERE s ->> 'finding' = 'bucket') <= 16 AND count(*) FILTER (WHERE s ->> 'finding' <> 'bucket') < many
            FROM jsonb_array_elements(seen) s);
        logged := shardmap._logged_rows(job, moved);
        SELECT coalesce(jsonb_object_agg(s ->> 'row_id', s), '{}') INTO differing FROM jsonb_array_elements(seen) s
         WHERE s ->> 'finding' <> 'bucket' AND (suspects IS NULL OR suspects ? (s ->> 'row_id'))
           AND s ->> 'row_id' <> ALL (logged);
        suspects := differing;
        EXIT WHEN suspects = '{}' AND is_whole;
        PERFORM pg_sleep(0.1 * look);
    END LOOP;
    IF seen IS NULL OR suspects = '{}' AND is_whole THEN
        RETURN QUERY SELECT 'equal', NULL, NULL, NULL::bigint, NULL::bigint,
            CASE WHEN NOT moved.copied THEN 'up to the row copied last: ' || array_to_string(moved.watermark, ', ') END;
        RETURN;
    END IF;
    RETURN QUERY SELECT d.value ->> 'finding', d.value ->> 'key', d.key, (d.value ->> 'source_rows')::bigint, (d.value ->> 'target_rows')::bigint,
            d.value ->> 'detail'
        FROM jsonb_each(suspects) d ORDER BY d.key LIMIT max_rows;
    IF NOT is_whole THEN
        RETURN QUERY SELECT 'bucket', NULL, NULL, (s ->> 'source_rows')::bigint, (s ->> 'target_rows')::bigint,
                format('tokens %s to %s: %s', s ->> 'token_from', s ->> 'token_to', s ->> 'detail')
            FROM jsonb_array_elements(seen) s WHERE s ->> 'finding' = 'bucket';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._verify_move_table(shardmap.move, shardmap.move_table, integer) IS 'compares a move''s rows of one table on both sides: a row "equal", or one for each difference';
REVOKE ALL ON FUNCTION shardmap._verify_move_table(shardmap.move, shardmap.move_table, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._verify_move_table(shardmap.move, shardmap.move_table, integer) TO shardmap_admin;

CREATE FUNCTION shardmap.verify_move(id bigint, max_rows integer DEFAULT 100)
RETURNS TABLE (relation regclass, finding text, key text, row_id text, source_rows bigint, target_rows bigint, detail text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    job shardmap.move := shardmap._directed(shardmap._find_move(id));
    was constant shardmap.move := job;
    moved shardmap.move_table;
BEGIN
    PERFORM shardmap._check_transaction('shardmap.verify_move');
    PERFORM shardmap._check_verifiable(job);
    FOR moved IN SELECT t.* FROM shardmap.move_table t WHERE t.move = verify_move.id ORDER BY t.position LOOP
        IF moved.copied OR moved.watermark IS NOT NULL THEN
            RETURN QUERY SELECT moved.relation, f.* FROM shardmap._verify_move_table(job, moved, max_rows) f;
        ELSE
            RETURN QUERY SELECT moved.relation, 'not copied', NULL, NULL, NULL::bigint, NULL::bigint, NULL;
        END IF;
    END LOOP;
    job := shardmap._find_move(id);
    IF job.reversed <> was.reversed OR job.state <> was.state AND job.state NOT IN ('copying', 'catching_up', 'verifying', 'fencing') THEN
        RAISE EXCEPTION 'move % has become % while it was verified', id, replace(job.state, '_', ' ') ||
                CASE WHEN job.reversed AND NOT was.reversed THEN ', on its way back,' ELSE '' END
            USING ERRCODE = 'serialization_failure', HINT = 'Verify it again.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.verify_move(bigint, integer) IS
    'compares the rows of a move on source and target, while it goes on: for each table a row "equal" (so far as it is copied), "not copied", or one for each row that is missing on the target, extra or doubled there, or changed';
REVOKE ALL ON FUNCTION shardmap.verify_move(bigint, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.verify_move(bigint, integer) TO shardmap_admin;
