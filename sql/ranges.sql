-- Ranges: the directory of keyspaces of strategy range.
--
-- Decides whether a range can be given to a shard, cut in two, or joined with its neighbour. What always holds: a range's
-- version is that of the map in which it last changed, and a change names the version that it has seen, so that of two
-- changes made at once one is told (40001) and nothing of it is done; rows of a range are where its owner is. Refuses
-- overlaps, and a new owner while rows of the range are on another shard. Read tables_checks.sql next.

CREATE FUNCTION shardmap._range_text(lower text, upper text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('[%s, %s)', coalesce(quote_literal(lower), '-infinity'), coalesce(quote_literal(upper), 'infinity'))
$$;
COMMENT ON FUNCTION shardmap._range_text(text, text) IS 'a range for messages';

CREATE FUNCTION shardmap._bound_less(range_order text, a text, b text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE range_order WHEN 'integer' THEN a::bigint < b::bigint
        ELSE convert_to(a, 'UTF8') < convert_to(b, 'UTF8') END
$$;
COMMENT ON FUNCTION shardmap._bound_less(text, text, text) IS 'whether a bound is below another, in the order of the keyspace';

CREATE FUNCTION shardmap._lock_ranges(keyspace text) RETURNS shardmap.keyspace
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space shardmap.keyspace := shardmap._lock_keyspace(keyspace);
BEGIN
    IF space.strategy <> 'range' THEN
        RAISE EXCEPTION 'keyspace "%" is not divided by ranges', keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = format('Its strategy is "%s".', space.strategy),
                HINT = 'Create a keyspace with strategy ''range'', or use shardmap.pin_key.';
    END IF;
    RETURN space;
END
$$;
COMMENT ON FUNCTION shardmap._lock_ranges(text) IS 'the row of a keyspace of strategy range, locked against other changes';
REVOKE ALL ON FUNCTION shardmap._lock_ranges(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._lock_ranges(text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_range_version(range shardmap.key_range, version bigint, expected bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF expected IS DISTINCT FROM version THEN
        RAISE EXCEPTION 'range % of keyspace "%" %', shardmap._range_text(range.lower, range.upper), range.keyspace,
                CASE WHEN version = 0 THEN format('does not exist, version %s was expected', expected)
                    WHEN expected IS NULL THEN format('exists already, at version %s', version)
                    ELSE format('is at version %s, version %s was expected', version, expected) END
            USING ERRCODE = 'serialization_failure', DETAIL = 'Nothing was changed.',
                HINT = 'Read shardmap.key_range again and pass the version that you have seen.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_range_version(shardmap.key_range, bigint, bigint) IS 'raises 40001 unless the caller has seen the range as it is';
REVOKE ALL ON FUNCTION shardmap._check_range_version(shardmap.key_range, bigint, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_range_version(shardmap.key_range, bigint, bigint) TO shardmap_admin;

CREATE FUNCTION shardmap._save_range(keyspace text, lower text, upper text, shard text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space shardmap.keyspace := shardmap._lock_ranges(keyspace);
BEGIN
    DELETE FROM shardmap.key_range r
     WHERE r.keyspace = $1 AND r.lower IS NOT DISTINCT FROM $2 AND r.upper IS NOT DISTINCT FROM $3;
    IF shard IS NOT NULL THEN
        INSERT INTO shardmap.key_range (keyspace, lower, upper, shard, version) VALUES ($1, $2, $3, $4, space.version + 1);
    END IF;
    RETURN shardmap.publish_map(keyspace);
END
$$;
COMMENT ON FUNCTION shardmap._save_range(text, text, text, text) IS 'enters a range in the catalog, or takes it out (shard NULL), and publishes the map; returns the range''s version';
REVOKE ALL ON FUNCTION shardmap._save_range(text, text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._save_range(text, text, text, text) TO shardmap_admin;

-- Pinned keys do not follow the range that they are in.
CREATE FUNCTION shardmap._check_range_rows(space shardmap.keyspace, lower text, upper text, owner text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    pinned text[] := ARRAY(SELECT p.key FROM shardmap.pin p WHERE p.keyspace = space.name);
    query text;
    shard text;
    tables text;
BEGIN
    SELECT string_agg(format('SELECT %L::pg_catalog.text WHERE EXISTS (SELECT FROM ONLY %s WHERE %s AND %s AND %s)', t.relation,
            shardmap._shard_table(t.relation),
            CASE WHEN lower IS NULL THEN 'true' WHEN space.range_order = 'integer' THEN format('%I >= %L::bigint', t.key_column, lower)
                ELSE format('pg_catalog.convert_to(%s, ''UTF8'') >= pg_catalog.convert_to(%L, ''UTF8'')', k.sql, lower) END,
            CASE WHEN upper IS NULL THEN 'true' WHEN space.range_order = 'integer' THEN format('%I < %L::bigint', t.key_column, upper)
                ELSE format('pg_catalog.convert_to(%s, ''UTF8'') < pg_catalog.convert_to(%L, ''UTF8'')', k.sql, upper) END,
            CASE WHEN pinned = '{}' THEN 'true' ELSE format('%s <> ALL (%L::pg_catalog.text[])', k.sql, pinned) END),
        ' UNION ALL ') INTO query
      FROM shardmap.logical_table t, LATERAL (SELECT shardmap.key_sql(t.key_type, quote_ident(t.key_column)) AS sql) k
     WHERE t.keyspace = space.name;
    IF query IS NULL THEN
        RETURN;
    END IF;
    FOR shard IN SELECT s.name FROM shardmap.shard s WHERE s.keyspace = space.name AND s.name IS DISTINCT FROM owner ORDER BY s.number LOOP
        SELECT string_agg(r[1], ', ' ORDER BY r[1]) INTO tables FROM shardmap.remote_rows(shard, query) r;
        IF tables IS NOT NULL THEN
            RAISE EXCEPTION 'range % of keyspace "%" has rows on shard "%"', shardmap._range_text(lower, upper), space.name, shard
                USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = format('They are in %s.', tables),
                    HINT = 'Giving a range to another shard does not move rows. Split off the part without rows with shardmap.split_range.';
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._check_range_rows(shardmap.keyspace, text, text, text) IS 'raises an error if rows of a range are on another shard than the one that is to own it';
REVOKE ALL ON FUNCTION shardmap._check_range_rows(shardmap.keyspace, text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_range_rows(shardmap.keyspace, text, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap.set_range(keyspace text, lower text, upper text, shard text, expected_version bigint DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space shardmap.keyspace := shardmap._lock_ranges(keyspace);
    least text := CASE space.range_order WHEN 'integer' THEN lower::bigint::text ELSE lower END;
    most text := CASE space.range_order WHEN 'integer' THEN upper::bigint::text ELSE upper END;
    met shardmap.key_range;
BEGIN
    IF NOT shardmap._bound_less(space.range_order, least, most) THEN
        RAISE EXCEPTION 'range % holds no key', shardmap._range_text(least, most)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The lower bound belongs to a range and must be below the upper bound.';
    ELSIF shard IS NOT NULL THEN
        PERFORM shardmap._check_shard_of(keyspace, shard);
    END IF;
    SELECT r.* INTO met FROM shardmap.key_range r
     WHERE r.keyspace = space.name
       AND coalesce(shardmap._bound_less(space.range_order, r.lower, most), true)
       AND coalesce(shardmap._bound_less(space.range_order, least, r.upper), true)
     ORDER BY r.lower IS NOT DISTINCT FROM least AND r.upper IS NOT DISTINCT FROM most, r.lower NULLS FIRST LIMIT 1;
    IF NOT FOUND THEN
        met.keyspace := space.name;
        met.lower := least;
        met.upper := most;
        PERFORM shardmap._check_range_version(met, 0, coalesce(expected_version, 0));
    ELSIF met.lower IS DISTINCT FROM least OR met.upper IS DISTINCT FROM most THEN
        RAISE EXCEPTION 'range % overlaps range % of shard "%"', shardmap._range_text(least, most),
                shardmap._range_text(met.lower, met.upper), met.shard
            USING ERRCODE = 'invalid_object_definition', HINT = 'Name a whole range; see shardmap.split_range and shardmap.merge_ranges.';
    ELSE
        PERFORM shardmap._check_range_version(met, met.version, expected_version);
        IF met.shard = shard THEN
            RETURN met.version;
        END IF;
    END IF;
    PERFORM shardmap._check_no_overlap(jsonb_populate_record(NULL::shardmap.move,
        jsonb_build_object('keyspace', space.name, 'kind', 'range', 'lower', least, 'upper', most, 'except_keys', '{}'::text[])));
    PERFORM shardmap._lock_tables(keyspace);
    PERFORM shardmap._check_range_rows(space, least, most, shard);
    RETURN shardmap._save_range(keyspace, least, most, shard);
END
$$;
COMMENT ON FUNCTION shardmap.set_range(text, text, text, text, bigint) IS 'gives a range of keys to a shard (or to none, if NULL) if it still has the expected version (none for a new range); returns its new version';
REVOKE ALL ON FUNCTION shardmap.set_range(text, text, text, text, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.set_range(text, text, text, text, bigint) TO shardmap_admin;

CREATE FUNCTION shardmap.split_range(keyspace text, at text, expected_version bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space shardmap.keyspace := shardmap._lock_ranges(keyspace);
    bound text := CASE space.range_order WHEN 'integer' THEN at::bigint::text ELSE at END;
    cut shardmap.key_range;
BEGIN
    IF at IS NULL THEN
        RAISE EXCEPTION 'cannot split a range at null' USING ERRCODE = 'null_value_not_allowed';
    END IF;
    SELECT r.* INTO cut FROM shardmap.key_range r
     WHERE r.keyspace = space.name AND coalesce(shardmap._bound_less(space.range_order, r.lower, bound), true)
       AND coalesce(shardmap._bound_less(space.range_order, bound, r.upper), true);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no range of keyspace "%" can be split at "%"', keyspace, bound
            USING ERRCODE = 'undefined_object', DETAIL = 'No range holds that key together with lower ones.',
                HINT = 'See shardmap.key_range.';
    END IF;
    PERFORM shardmap._check_range_version(cut, cut.version, expected_version);
    UPDATE shardmap.key_range r SET upper = bound, version = space.version + 1
     WHERE r.keyspace = space.name AND r.lower IS NOT DISTINCT FROM cut.lower;
    INSERT INTO shardmap.key_range (keyspace, lower, upper, shard, version)
    VALUES (space.name, bound, cut.upper, cut.shard, space.version + 1);
    RETURN shardmap.publish_map(keyspace);
END
$$;
COMMENT ON FUNCTION shardmap.split_range(text, text, bigint) IS 'cuts the range that holds a key in two, at the key, if it still has the expected version; returns the version of both';
REVOKE ALL ON FUNCTION shardmap.split_range(text, text, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.split_range(text, text, bigint) TO shardmap_admin;

CREATE FUNCTION shardmap.merge_ranges(keyspace text, at text, expected_version bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space shardmap.keyspace := shardmap._lock_ranges(keyspace);
    bound text := CASE space.range_order WHEN 'integer' THEN at::bigint::text ELSE at END;
    low shardmap.key_range;
    high shardmap.key_range;
BEGIN
    SELECT r.* INTO low FROM shardmap.key_range r WHERE r.keyspace = space.name AND r.upper = bound;
    SELECT r.* INTO high FROM shardmap.key_range r WHERE r.keyspace = space.name AND r.lower = bound;
    IF low.keyspace IS NULL OR high.keyspace IS NULL THEN
        RAISE EXCEPTION 'no two ranges of keyspace "%" meet at "%"', keyspace, bound
            USING ERRCODE = 'undefined_object', HINT = 'See shardmap.key_range.';
    END IF;
    -- Versions only grow, so that a change of either shows in the greater.
    PERFORM shardmap._check_range_version(CASE WHEN low.version > high.version THEN low ELSE high END,
        greatest(low.version, high.version), expected_version);
    IF low.shard <> high.shard THEN
        RAISE EXCEPTION 'ranges % and % belong to different shards', shardmap._range_text(low.lower, low.upper),
                shardmap._range_text(high.lower, high.upper)
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = format('To shard "%s" and shard "%s".', low.shard, high.shard),
                HINT = 'Give one of them to the other''s shard first with shardmap.set_range.';
    END IF;
    DELETE FROM shardmap.key_range r WHERE r.keyspace = space.name AND r.lower = bound;
    UPDATE shardmap.key_range r SET upper = high.upper, version = space.version + 1
     WHERE r.keyspace = space.name AND r.upper = bound;
    RETURN shardmap.publish_map(keyspace);
END
$$;
COMMENT ON FUNCTION shardmap.merge_ranges(text, text, bigint) IS 'joins the two ranges of one shard that meet at a key, if the greater of their versions is the expected one; returns the new version';
REVOKE ALL ON FUNCTION shardmap.merge_ranges(text, text, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.merge_ranges(text, text, bigint) TO shardmap_admin;
