-- The map as it should be, and how it gets there.
--
-- Decides who is to own what: shards that join take part, draining ones own nothing, the tokens of a ring are the wanted
-- ones. What always holds: while a keyspace has rows, only parts that have been moved change hands, each in one step
-- after which the map is whole; once every key is where it is wanted, tokens and slots are exactly the wanted ones; while
-- it has none, what is wanted is done at once. Nothing here moves rows. Read shards_change.sql next.

CREATE FUNCTION shardmap._map_part_rows(before text, after text)
    RETURNS TABLE (giver text, gainer text, arcs bigint[], modulus integer, remainders integer[], lower text, upper text)
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'map_part_rows_wrapper';
COMMENT ON FUNCTION shardmap._map_part_rows(text, text) IS 'as _map_parts, with the bounds of the arcs in a row';

CREATE FUNCTION shardmap._map_parts(before text, after text)
    RETURNS TABLE (giver text, gainer text, arcs int8multirange, modulus integer, remainders integer[], lower text, upper text)
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT p.giver, p.gainer, (SELECT range_agg(int8range(p.arcs[n], p.arcs[n + 1])) FROM generate_series(1, cardinality(p.arcs), 2) n),
        p.modulus, p.remainders, p.lower, p.upper
      FROM shardmap._map_part_rows(before, after) p
$$;
COMMENT ON FUNCTION shardmap._map_parts(text, text) IS
    'which keys change owner from one exported map of a keyspace to another, without pinned ones: one row for each giver and gainer, with tokens or with remainders of MD5; under strategy range one for each range, with its bounds';

CREATE FUNCTION shardmap._wanted_map(map text) RETURNS text
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'wanted_map_wrapper';
COMMENT ON FUNCTION shardmap._wanted_map(text) IS 'an exported map of one keyspace as it should be by its shards'' states and wanted tokens and slots';

CREATE FUNCTION shardmap._reassigned_map(map text, target text, arcs bigint[], modulus integer, remainders integer[]) RETURNS text
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'reassigned_map_wrapper';
COMMENT ON FUNCTION shardmap._reassigned_map(text, text, bigint[], integer, integer[]) IS 'an exported map of one keyspace with arcs, or keys whose MD5 leaves one of the remainders, given to a shard';

CREATE FUNCTION shardmap._wish(keyspace text) RETURNS jsonb
LANGUAGE sql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._wanted_map(shardmap._map_json(jsonb_build_array(shardmap._keyspace_json($1))))::jsonb #> '{keyspaces,0}'
$$;
COMMENT ON FUNCTION shardmap._wish(text) IS 'a keyspace, as _keyspace_json, as it should be';

CREATE FUNCTION shardmap._wanted_keyspace(keyspace text) RETURNS jsonb
LANGUAGE sql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
    SELECT w.wish FROM (SELECT shardmap._wish($1) AS wish) w
     WHERE EXISTS (SELECT FROM shardmap._map_parts(shardmap._map_json(jsonb_build_array(shardmap._keyspace_json($1))),
        shardmap._map_json(jsonb_build_array(w.wish))))
$$;
COMMENT ON FUNCTION shardmap._wanted_keyspace(text) IS
    'a keyspace, as _keyspace_json, as it should be: joining shards take part, draining ones own nothing, shards of a ring have the wanted tokens; NULL if every key is with the wanted shard already';

-- States first: a slot of a joining shard would be none.
CREATE FUNCTION shardmap._save_owners(space jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE shardmap.shard s SET state = n.state, tokens = n.tokens
      FROM (SELECT x ->> 'name' AS name, x ->> 'state' AS state,
                ARRAY(SELECT t::bigint FROM jsonb_array_elements_text(x -> 'tokens') WITH ORDINALITY a (t, n) ORDER BY n) AS tokens
              FROM jsonb_array_elements(space -> 'shards') x) n
     WHERE s.name = n.name AND s.keyspace = space ->> 'name' AND (s.state, s.tokens) IS DISTINCT FROM (n.state, n.tokens);
    UPDATE shardmap.keyspace k SET slots = n.slots
      FROM (SELECT CASE WHEN space ? 'slots' THEN
                ARRAY(SELECT s::integer FROM jsonb_array_elements_text(space -> 'slots') WITH ORDINALITY a (s, n) ORDER BY n) END AS slots) n
     WHERE k.name = space ->> 'name' AND k.slots IS DISTINCT FROM n.slots;
    UPDATE shardmap.key_range r SET shard = n ->> 'shard', version = (n ->> 'version')::bigint
      FROM jsonb_array_elements(space -> 'ranges') n
     WHERE r.keyspace = space ->> 'name' AND r.lower IS NOT DISTINCT FROM n ->> 'lower' AND r.shard <> n ->> 'shard';
END
$$;
COMMENT ON FUNCTION shardmap._save_owners(jsonb) IS 'gives the shards of a keyspace the states, tokens, slots and ranges that a keyspace, as _keyspace_json, says; does not publish';
REVOKE ALL ON FUNCTION shardmap._save_owners(jsonb) FROM PUBLIC;

CREATE FUNCTION shardmap._reassign(keyspace text, target text, arcs int8multirange, modulus integer, remainders integer[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap._lock_keyspace(keyspace);
    PERFORM shardmap._check_shard_of(keyspace, target);
    PERFORM shardmap._save_owners(shardmap._reassigned_map(shardmap._map_json(jsonb_build_array(shardmap._keyspace_json(keyspace))), target,
        CASE WHEN arcs IS NOT NULL THEN ARRAY(SELECT b FROM unnest(arcs) r,
            unnest(ARRAY[coalesce(lower(r), 0), coalesce(upper(r), 4294967296)]) b ORDER BY b) END,
        modulus, remainders)::jsonb #> '{keyspaces,0}');
END
$$;
COMMENT ON FUNCTION shardmap._reassign(text, text, int8multirange, integer, integer[]) IS
    'gives arcs of a ring, or keys whose MD5 leaves one of the remainders, to a shard, which is active then; all other keys keep their owner; does not publish';
REVOKE ALL ON FUNCTION shardmap._reassign(text, text, int8multirange, integer, integer[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._reassign(text, text, int8multirange, integer, integer[]) TO shardmap_admin;

-- Before anything else is wanted of one shard: what the others have is what they should have.
CREATE FUNCTION shardmap._note_tokens(keyspace text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE shardmap.shard s SET wanted_tokens = s.tokens WHERE s.keyspace = $1 AND s.wanted_tokens IS NULL
$$;
COMMENT ON FUNCTION shardmap._note_tokens(text) IS 'writes down the tokens of a keyspace''s shards as wanted, where nothing else is';
REVOKE ALL ON FUNCTION shardmap._note_tokens(text) FROM PUBLIC;

-- Rows that are not there need not be moved.
CREATE FUNCTION shardmap._settle(keyspace text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap._save_owners(shardmap._wish(keyspace));
    UPDATE shardmap.shard s SET wanted_tokens = NULL WHERE s.keyspace = $1 AND s.wanted_tokens IS NOT NULL;
    UPDATE shardmap.keyspace k SET wanted_slots = NULL WHERE k.name = $1 AND k.wanted_slots IS NOT NULL;
END
$$;
COMMENT ON FUNCTION shardmap._settle(text) IS 'makes a keyspace without rows what it should be; does not publish';
REVOKE ALL ON FUNCTION shardmap._settle(text) FROM PUBLIC;

-- Nor is anything on its way.
CREATE FUNCTION shardmap._is_empty(keyspace text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN NOT EXISTS (SELECT FROM shardmap.move m WHERE m.keyspace = $1 AND m.state NOT IN ('done', 'rolled_back'))
        AND NOT shardmap._keyspace_has_rows(keyspace);
END
$$;
COMMENT ON FUNCTION shardmap._is_empty(text) IS 'whether a keyspace has no rows and none are moving, so that it can become what it should be at once';
REVOKE ALL ON FUNCTION shardmap._is_empty(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._is_empty(text) TO shardmap_admin;

CREATE FUNCTION shardmap._tell_wish(keyspace text, what text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space jsonb := shardmap._keyspace_json(keyspace);
    wish jsonb := shardmap._wanted_keyspace(keyspace);
    moves text;
BEGIN
    IF wish IS NOT NULL THEN
        IF space ->> 'strategy' = 'range' THEN
            SELECT string_agg(format('range %s from "%s" to "%s"', shardmap._range_text(p.lower, p.upper), p.giver, p.gainer), '; ' ORDER BY p.n)
              INTO moves FROM shardmap._map_parts(shardmap._map_json(jsonb_build_array(space)), shardmap._map_json(jsonb_build_array(wish)))
                WITH ORDINALITY p (giver, gainer, arcs, modulus, remainders, lower, upper, n);
        ELSE
            moves := shardmap._describe_flows(space, wish);
        END IF;
        RAISE NOTICE '%', what
            USING DETAIL = format('To move: %s.', moves),
                HINT = format('The rows follow by shardmap.rebalance(%L).', keyspace);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._tell_wish(text, text) IS 'says what has to move in a keyspace for it to be as it should, if anything has to';
REVOKE ALL ON FUNCTION shardmap._tell_wish(text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._tell_wish(text, text) TO shardmap_admin;
