-- What a change of the map would move.
--
-- Decides nothing: builds the keyspace as it is and as it would be, in the form of an exported map, and lets the core
-- compare them. What always holds: fractions are exact; rows and bytes are estimates of the shards' own statistics,
-- spread evenly over what a shard owns. Refuses shards that do not exist and keyspaces of ranges, where a change of
-- shards moves nothing by itself. Read shards_change.sql next.

CREATE FUNCTION shardmap.random_tokens(shard text, count integer) RETURNS bigint[]
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'random_tokens_wrapper';
COMMENT ON FUNCTION shardmap.random_tokens(text, integer) IS 'ring positions of a shard: the low 32 bits of the MD5 of its name, # and a number from 0';

CREATE FUNCTION shardmap.balanced_tokens(map text, shard text, weight double precision, count integer) RETURNS bigint[]
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'balanced_tokens_wrapper';
COMMENT ON FUNCTION shardmap.balanced_tokens(text, text, double precision, integer) IS 'ring positions of a shard that even out the load of the others in an exported map of one keyspace';

CREATE FUNCTION shardmap._map_flows(before text, after text)
    RETURNS TABLE (giver text, gainer text, numerator bigint, denominator bigint)
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'map_flows_wrapper';
COMMENT ON FUNCTION shardmap._map_flows(text, text) IS 'who gives which part of all keys to whom, from one exported map of a keyspace to another';

CREATE FUNCTION shardmap._map_balance(map text)
    RETURNS TABLE (shard text, share double precision, vnodes integer, weight double precision, load double precision,
        max_over_mean double precision, stdev double precision)
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'map_balance_wrapper';
COMMENT ON FUNCTION shardmap._map_balance(text) IS 'share, vnodes, weight and load of each shard of an exported map of one keyspace';

CREATE FUNCTION shardmap._keyspace_json(keyspace text) RETURNS jsonb
LANGUAGE sql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_build_object('name', k.name, 'strategy', k.strategy, 'version', k.version, 'vnodes', k.vnodes,
        'range_order', CASE k.range_order WHEN 'text' THEN 'bytes' ELSE k.range_order END, 'allocation', k.allocation,
        'shards', (SELECT coalesce(jsonb_agg(jsonb_build_object('name', s.name, 'number', s.number, 'weight', s.weight,
                'state', s.state, 'tokens', s.tokens) || CASE WHEN s.wanted_tokens <> s.tokens
                    THEN jsonb_build_object('wanted_tokens', s.wanted_tokens) ELSE '{}' END || jsonb_build_object('options', (
                    SELECT coalesce(jsonb_object_agg(o.option_name, o.option_value), '{}')
                      FROM pg_foreign_server f, pg_options_to_table(f.srvoptions) o WHERE f.srvname = s.name)
                ) ORDER BY s.number), '[]') FROM shardmap.shard s WHERE s.keyspace = k.name),
        'pins', (SELECT coalesce(jsonb_agg(jsonb_build_object('key', p.key, 'shard', p.shard) ORDER BY p.key), '[]')
              FROM shardmap.pin p WHERE p.keyspace = k.name),
        'ranges', (SELECT coalesce(jsonb_agg(jsonb_build_object('lower', r.lower, 'upper', r.upper, 'shard', r.shard,
                'version', r.version) ORDER BY r.lower NULLS FIRST), '[]')
              FROM shardmap.key_range r WHERE r.keyspace = k.name))
        || CASE WHEN k.slots IS NULL THEN '{}' ELSE jsonb_build_object('slots', k.slots) END
        || CASE WHEN k.wanted_slots IS NULL THEN '{}' ELSE jsonb_build_object('wanted_slots', k.wanted_slots) END
      FROM shardmap.keyspace k WHERE k.name = keyspace
$$;
COMMENT ON FUNCTION shardmap._keyspace_json(text) IS 'a keyspace in the form of an exported map; NULL if it does not exist';

CREATE FUNCTION shardmap._map_json(keyspaces jsonb) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_build_object('layout', 1, 'keyspaces', keyspaces)::text
$$;
COMMENT ON FUNCTION shardmap._map_json(jsonb) IS 'exported map of an array of keyspaces';

-- `space`: of _keyspace_json.
CREATE FUNCTION shardmap._choose_tokens(space jsonb, shard text, weight double precision) RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    count double precision := greatest(round(weight * (space ->> 'vnodes')::integer), 1);
BEGIN
    IF space ->> 'strategy' <> 'ring' THEN
        RETURN '{}';
    ELSIF count > 65536 THEN
        RAISE EXCEPTION 'shard "%" would have % ring positions', shard, count
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Use a smaller weight or fewer vnodes: at most 65536 positions.';
    ELSIF space ->> 'allocation' = 'balanced' THEN
        RETURN shardmap.balanced_tokens(shardmap._map_json(jsonb_build_array(space)), shard, weight, count::integer);
    END IF;
    RETURN shardmap.random_tokens(shard, count::integer);
END
$$;
COMMENT ON FUNCTION shardmap._choose_tokens(jsonb, text, double precision) IS 'ring positions for a shard of a weight, by the keyspace''s allocation; none under another strategy';

CREATE FUNCTION shardmap._without_shard(space jsonb, shard text) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_set(jsonb_set(space - 'slots' - 'wanted_slots',
        '{shards}', (SELECT coalesce(jsonb_agg(s), '[]') FROM jsonb_array_elements(space -> 'shards') s
            WHERE s ->> 'name' <> shard)),
        '{pins}', (SELECT coalesce(jsonb_agg(p), '[]') FROM jsonb_array_elements(space -> 'pins') p
            WHERE p ->> 'shard' <> shard))
$$;
COMMENT ON FUNCTION shardmap._without_shard(jsonb, text) IS 'a keyspace without one of its shards and that shard''s pins';

CREATE FUNCTION shardmap._with_shard(space jsonb, shard text, weight double precision) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known jsonb := (SELECT s FROM jsonb_array_elements(space -> 'shards') s WHERE s ->> 'name' = shard);
    others jsonb := (SELECT coalesce(jsonb_agg(s), '[]') FROM jsonb_array_elements(space -> 'shards') s
                      WHERE s ->> 'name' <> shard);
    number integer := coalesce((known ->> 'number')::integer, (
        SELECT min(n) FROM generate_series(0, 1023) n
         WHERE n > coalesce((SELECT max((o ->> 'number')::integer) FROM jsonb_array_elements(others) o), -1)));
BEGIN
    RETURN jsonb_set(space - 'slots' - 'wanted_slots', '{shards}', others || jsonb_build_array(jsonb_build_object('name', shard, 'number', number,
        'weight', weight, 'state', 'active', 'options', '{}'::jsonb,
        'tokens', shardmap._choose_tokens(jsonb_set(space, '{shards}', others), shard, weight))));
END
$$;
COMMENT ON FUNCTION shardmap._with_shard(jsonb, text, double precision) IS 'a keyspace with a shard of a weight, new or as it would be with that weight, active and with its tokens';

-- The keyspace as it would be.
CREATE FUNCTION shardmap._changed_keyspace(space jsonb, add text[], remove text[], weights jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    changed jsonb := space;
    known text[] := ARRAY(SELECT s ->> 'name' FROM jsonb_array_elements(space -> 'shards') s);
    joining text[] := ARRAY(SELECT s ->> 'name' FROM jsonb_array_elements(space -> 'shards') s WHERE s ->> 'state' = 'joining');
    shard text;
BEGIN
    FOREACH shard IN ARRAY remove || ARRAY(SELECT w FROM jsonb_object_keys(weights) w WHERE w <> ALL (add)) LOOP
        IF shard <> ALL (known) THEN
            RAISE EXCEPTION 'keyspace "%" has no shard "%"', space ->> 'name', shard USING ERRCODE = 'undefined_object';
        END IF;
    END LOOP;
    FOREACH shard IN ARRAY remove LOOP
        changed := shardmap._without_shard(changed, shard);
    END LOOP;
    FOR shard IN SELECT w FROM jsonb_object_keys(weights) w WHERE w <> ALL (add) LOOP
        PERFORM shardmap._check_weight(shard, (weights ->> shard)::double precision);
        changed := shardmap._with_shard(changed, shard, (weights ->> shard)::double precision);
    END LOOP;
    FOREACH shard IN ARRAY add LOOP
        IF shard = ANY (known) AND shard <> ALL (joining) THEN
            RAISE EXCEPTION 'shard "%" is in keyspace "%" already', shard, space ->> 'name' USING ERRCODE = 'duplicate_object';
        END IF;
        PERFORM shardmap._check_weight(shard, coalesce((weights ->> shard)::double precision, 1));
        changed := shardmap._with_shard(changed, shard, coalesce((weights ->> shard)::double precision,
            (SELECT (s ->> 'weight')::double precision FROM jsonb_array_elements(space -> 'shards') s WHERE s ->> 'name' = shard), 1));
    END LOOP;
    -- A slot for each shard that has one, without the removed ones, and with those that are added.
    IF space ? 'slots' THEN
        changed := jsonb_set(changed, '{slots}', (SELECT coalesce(jsonb_agg(s -> 'number' ORDER BY (s ->> 'number')::integer), '[]')
            FROM jsonb_array_elements(changed -> 'shards') s WHERE s ->> 'name' = ANY (add) OR space -> 'slots' @> (s -> 'number')));
    END IF;
    RETURN changed;
END
$$;
COMMENT ON FUNCTION shardmap._changed_keyspace(jsonb, text[], text[], jsonb) IS 'a keyspace as it would be with shards added (or their joining ended), removed, and weighted anew';

CREATE FUNCTION shardmap._shard_statistics(shard text) RETURNS TABLE (rows double precision, bytes double precision)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    -- A table that was never analyzed has -1 rows; then the cumulative statistics know better.
    SELECT r[1]::double precision, r[2]::double precision FROM shardmap.remote_rows(shard, (
        SELECT format($query$
            SELECT coalesce(sum(CASE WHEN c.reltuples >= 0 THEN c.reltuples ELSE pg_stat_get_live_tuples(c.oid) END), 0)::text AS rows,
                coalesce(sum(pg_total_relation_size(c.oid)), 0)::text AS bytes
              FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
             WHERE (n.nspname, c.relname) IN (VALUES (NULL::name, NULL::name)%s)
            $query$, string_agg(format(', (%L, %L)', n.nspname, c.relname), ''))
          FROM shardmap.logical_table t JOIN shardmap.shard s ON s.keyspace = t.keyspace
          JOIN pg_class c ON c.oid = t.relation JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE s.name = shard)) r
$$;
COMMENT ON FUNCTION shardmap._shard_statistics(text) IS 'rows and bytes of all logical tables on a shard, by the shard''s statistics';

CREATE FUNCTION shardmap._flows(before jsonb, after jsonb)
RETURNS TABLE (giver text, gainer text, fraction double precision, rows bigint, bytes bigint)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH maps AS (
        SELECT shardmap._map_json(jsonb_build_array(before)) AS before, shardmap._map_json(jsonb_build_array(after)) AS after
    ), flows AS (
        SELECT f.giver, f.gainer, f.numerator / f.denominator::double precision AS fraction
          FROM maps m, shardmap._map_flows(m.before, m.after) f
    ), statistics AS MATERIALIZED (
        SELECT g.giver, x.rows, x.bytes FROM (SELECT DISTINCT f.giver FROM flows f WHERE f.giver IS NOT NULL) g,
            shardmap._shard_statistics(g.giver) x
    )
    SELECT f.giver, f.gainer, f.fraction, coalesce(round(x.rows * f.fraction / nullif(b.share, 0)), 0)::bigint,
        coalesce(round(x.bytes * f.fraction / nullif(b.share, 0)), 0)::bigint
      FROM flows f LEFT JOIN (maps m CROSS JOIN LATERAL shardmap._map_balance(m.before) b) ON b.shard = f.giver
      LEFT JOIN statistics x ON x.giver = f.giver
     ORDER BY f.giver COLLATE "C", f.gainer COLLATE "C"
$$;
COMMENT ON FUNCTION shardmap._flows(jsonb, jsonb) IS 'what moves if a keyspace, as _keyspace_json, becomes another: exact fraction of all keys, estimated rows and bytes';

CREATE FUNCTION shardmap.preview_change(
    keyspace text DEFAULT 'main',
    add text[] DEFAULT '{}',
    remove text[] DEFAULT '{}',
    weights jsonb DEFAULT '{}'
) RETURNS TABLE (giver text, gainer text, fraction double precision, rows bigint, bytes bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space jsonb := shardmap._keyspace_json(keyspace);
BEGIN
    IF space IS NULL THEN
        RAISE EXCEPTION 'keyspace "%" does not exist', keyspace USING ERRCODE = 'undefined_object';
    ELSIF space ->> 'strategy' = 'range' THEN
        RAISE EXCEPTION 'keyspace "%" is divided by ranges', keyspace
            USING ERRCODE = 'feature_not_supported', HINT = 'Shards and weights move nothing there; shardmap.set_range does.';
    END IF;
    RETURN QUERY SELECT f.* FROM shardmap._flows(space, shardmap._changed_keyspace(space, add, remove, weights)) f;
END
$$;
COMMENT ON FUNCTION shardmap.preview_change(text, text[], text[], jsonb) IS 'what would move, from whom to whom, if shards were added, removed or weighted anew: exact fraction of all keys, estimated rows and bytes; weights is an object of shard names and weights';

CREATE FUNCTION shardmap._describe_flows(before jsonb, after jsonb) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(string_agg(format('%s %% of the keys (about %s rows, %s) from "%s" to "%s"', round((p.fraction * 100)::numeric, 1),
        p.rows, pg_size_pretty(p.bytes), p.giver, p.gainer), '; ' ORDER BY p.fraction DESC, p.giver, p.gainer), 'nothing')
      FROM shardmap._flows(before, after) p
$$;
COMMENT ON FUNCTION shardmap._describe_flows(jsonb, jsonb) IS 'what moves if a keyspace becomes another, in words';

CREATE FUNCTION shardmap.ring_balance(keyspace text DEFAULT 'main')
RETURNS TABLE (shard text, weight double precision, vnodes integer, share double precision, load double precision,
    max_over_mean double precision, stdev double precision)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space jsonb := shardmap._keyspace_json(keyspace);
BEGIN
    IF space IS NULL THEN
        RAISE EXCEPTION 'keyspace "%" does not exist', keyspace USING ERRCODE = 'undefined_object';
    ELSIF space ->> 'strategy' <> 'ring' THEN
        RAISE EXCEPTION 'keyspace "%" is not a ring', keyspace
            USING ERRCODE = 'feature_not_supported', DETAIL = format('Its strategy is "%s".', space ->> 'strategy');
    END IF;
    RETURN QUERY SELECT b.shard, b.weight, b.vnodes, b.share, b.load, b.max_over_mean, b.stdev
        FROM shardmap._map_balance(shardmap._map_json(jsonb_build_array(space))) b;
END
$$;
COMMENT ON FUNCTION shardmap.ring_balance(text) IS 'each shard''s share of the ring, and its load: share over weight, 1 is even; max_over_mean and stdev are of all loads';

REVOKE ALL ON FUNCTION shardmap.preview_change(text, text[], text[], jsonb), shardmap._describe_flows(jsonb, jsonb),
    shardmap._flows(jsonb, jsonb), shardmap._shard_statistics(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.preview_change(text, text[], text[], jsonb), shardmap._describe_flows(jsonb, jsonb),
    shardmap._flows(jsonb, jsonb), shardmap._shard_statistics(text) TO shardmap_admin;
