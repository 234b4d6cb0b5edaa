-- Shards that bear too much, and shards that bear too little.
--
-- Decides, by limits of rows, bytes and statements a second, which keys are to change their shard, and plans the moves.
-- What always holds: nobody gets more than the giver keeps; what is planned is what is wanted from then on, so that
-- shardmap.rebalance finishes it, and does not take it back; a dry run notes nothing. Refuses while moves are under way or
-- a shard waits to be emptied: both would be planned twice. The core chooses: src/core/burden.rs and relief.rs.

CREATE FUNCTION shardmap._relieve(shards text[], states text[], measures double precision[], most double precision[], target text)
    RETURNS TABLE (giver text, gainer text, part double precision)
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'relieve_shards_wrapper';
COMMENT ON FUNCTION shardmap._relieve(text[], text[], double precision[], double precision[], text) IS
    'who gives which part of what he owns to whom, one after the other, so that nobody is above the limits; measures: rows, bytes and load of each shard in a row';

CREATE FUNCTION shardmap._fold(shards text[], states text[], measures double precision[], lowest double precision[]) RETURNS text[]
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'fold_shards_wrapper';
COMMENT ON FUNCTION shardmap._fold(text[], text[], double precision[], double precision[]) IS
    'shards to be emptied, for they are below all limits, in this order; measures: rows, bytes and load of each shard in a row';

CREATE FUNCTION shardmap._given_map(map text, giver text, gainer text, part double precision, bound text) RETURNS text
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'given_map_wrapper';
COMMENT ON FUNCTION shardmap._given_map(text, text, text, double precision, text) IS
    'an exported map of one keyspace with a part of what a shard owns given to another, or of its ranges all from a bound on; NULL if that is nothing';

CREATE FUNCTION shardmap._burdens(keyspace text)
RETURNS TABLE (shards text[], states text[], measures double precision[])
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT array_agg(s.name::text ORDER BY s.number, m.n) FILTER (WHERE m.n = 1), array_agg(s.state ORDER BY s.number, m.n) FILTER (WHERE m.n = 1),
        array_agg(m.value ORDER BY s.number, m.n)
      FROM shardmap.shard s JOIN shardmap.stat_shards t ON t.shard = s.name CROSS JOIN shardmap.stat_info i
     CROSS JOIN LATERAL shardmap._shard_statistics(s.name) x
     CROSS JOIN LATERAL (VALUES (1, x.rows), (2, x.bytes),
        (3, t.statements / greatest(extract(epoch FROM clock_timestamp() - i.routing_since)::double precision, 1))) m (n, value)
     WHERE s.keyspace = $1
$$;
COMMENT ON FUNCTION shardmap._burdens(text) IS
    'what each shard bears: rows and bytes by its statistics, and statements a second since shardmap.stat_shards was reset';

-- Of rows of all tables; of large ones in a sample of pages. Pinned keys stay.
CREATE FUNCTION shardmap._key_at(keyspace text, shard text, part double precision, below text, above text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    order_of text := (SELECT k.range_order FROM shardmap.keyspace k WHERE k.name = $1);
    pins text[] := ARRAY(SELECT p.key::text FROM shardmap.pin p WHERE p.keyspace = $1);
    found text;
BEGIN
    SELECT r[1] INTO found FROM shardmap.remote_rows(shard, (
        SELECT format($query$
            WITH keys (k) AS MATERIALIZED (%1$s), first AS (SELECT percentile_disc(0) WITHIN GROUP (ORDER BY k) AS k FROM keys)
            SELECT (%2$s)::text FROM (
                SELECT coalesce((SELECT p.k FROM (SELECT percentile_disc(%3$L::double precision) WITHIN GROUP (ORDER BY k) AS k FROM keys) p, first f
                        WHERE p.k > f.k), (SELECT k.k FROM keys k, first f WHERE k.k > f.k ORDER BY k.k LIMIT 1)) AS k) x
            $query$,
            string_agg(format('SELECT %s FROM ONLY %s AS t TABLESAMPLE SYSTEM ((SELECT least(100, 1000000 / greatest(c.reltuples, 1)) '
                    'FROM pg_catalog.pg_class c WHERE c.oid = %L::regclass)) WHERE %s',
                CASE order_of WHEN 'integer' THEN format('(%s)::bigint', s.sql) ELSE format('convert_to(%s, ''UTF8'')', s.sql) END,
                shardmap._shard_table(t.relation), shardmap._shard_table(t.relation),
                shardmap._scope_sql(t.relation, lower => above, upper => below, except_keys => pins)), ' UNION ALL '),
            CASE order_of WHEN 'integer' THEN 'x.k' ELSE 'convert_from(x.k, ''UTF8'')' END, part)
          FROM shardmap.logical_table t, LATERAL shardmap.key_sql(t.key_type, 't.' || quote_ident(t.key_column)) s (sql)
         WHERE t.keyspace = $1)) r;
    RETURN found;
END
$$;
COMMENT ON FUNCTION shardmap._key_at(text, text, double precision, text, text) IS
    'key of a shard of ranges, as canonical text, below which lies about a part of its rows; never the first key; below: only of keys below this one; above: only of this key and those above';

CREATE FUNCTION shardmap._plan_parts(keyspace text, before jsonb, after jsonb, dry_run boolean, engine text)
RETURNS TABLE (move bigint, relation regclass, source text, target text, rows bigint, bytes bigint, part text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    planned shardmap.move;
BEGIN
    FOR planned IN SELECT m.* FROM shardmap._moves_between(keyspace, before, after) m LOOP
        planned.engine := engine;
        RETURN QUERY SELECT p.move, p.relation, p.source, p.target, p.rows, p.bytes, shardmap._part_text(planned)
            FROM shardmap._plan_move(planned, dry_run) p;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._plan_parts(text, jsonb, jsonb, boolean, text) IS 'plans the moves by which a keyspace, as _keyspace_json, becomes another';

-- Of shards that are joining without a part of this, and of those that are to be emptied, the wish stays.
CREATE FUNCTION shardmap._note_wish(space jsonb) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE shardmap.shard s SET wanted_tokens = n.tokens
      FROM (SELECT x ->> 'name' AS name,
                ARRAY(SELECT t::bigint FROM jsonb_array_elements_text(x -> 'tokens') WITH ORDINALITY a (t, n) ORDER BY n) AS tokens
              FROM jsonb_array_elements(space -> 'shards') x) n
     WHERE s.name = n.name AND s.keyspace = space ->> 'name' AND (s.state = 'active' OR s.state = 'joining' AND n.tokens <> '{}');
    UPDATE shardmap.keyspace k
       SET wanted_slots = CASE WHEN space ? 'wanted_slots' THEN
            ARRAY(SELECT s::integer FROM jsonb_array_elements_text(space -> 'wanted_slots') WITH ORDINALITY a (s, n) ORDER BY n) END
     WHERE k.name = space ->> 'name' AND k.strategy = 'modulo'
$$;
COMMENT ON FUNCTION shardmap._note_wish(jsonb) IS 'writes down that a keyspace is to become another, given as _keyspace_json';

CREATE FUNCTION shardmap._check_limits(keyspace text, VARIADIC limits double precision[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    draining text;
BEGIN
    IF num_nonnulls(VARIADIC limits) = 0 OR 0 >= ANY (limits) THEN
        RAISE EXCEPTION 'a limit of rows, bytes or load is required'
            USING ERRCODE = 'invalid_parameter_value', DETAIL = 'Limits are greater than 0.',
                HINT = 'Load is statements a second, see shardmap.stat_shards.';
    END IF;
    PERFORM shardmap._lock_keyspace(keyspace);
    PERFORM shardmap._check_no_move(keyspace);
    SELECT s.name INTO draining FROM shardmap.shard s JOIN shardmap._map_parts(shardmap._map_json(jsonb_build_array(shardmap._keyspace_json($1))),
        shardmap._map_json(jsonb_build_array(shardmap._wish($1)))) p ON p.giver = s.name
     WHERE s.keyspace = $1 AND s.state = 'draining' ORDER BY s.number LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'shard "%" waits to be emptied', draining
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = format('Use shardmap.rebalance(%L) first.', keyspace);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_limits(text, double precision[]) IS 'locks a keyspace; raises an error unless there is a limit, and nothing is moving or to be emptied';

CREATE FUNCTION shardmap.split_hot(
    keyspace text DEFAULT 'main',
    max_rows bigint DEFAULT NULL,
    max_bytes bigint DEFAULT NULL,
    max_load double precision DEFAULT NULL,
    shard text DEFAULT NULL,
    dry_run boolean DEFAULT false,
    engine text DEFAULT 'triggers'
) RETURNS TABLE (move bigint, relation regclass, source text, target text, rows bigint, bytes bigint, part text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    borne record;
    before jsonb;
    after jsonb;
    given jsonb;
    relief record;
    bound text;
    bounds jsonb := '{}';
BEGIN
    PERFORM shardmap._check_engine(engine);
    PERFORM shardmap._check_limits(keyspace, max_rows, max_bytes, max_load);
    IF shard IS NOT NULL THEN
        PERFORM shardmap._check_shard_of(keyspace, shard);
    END IF;
    before := shardmap._keyspace_json(keyspace);
    after := before;
    SELECT b.* INTO borne FROM shardmap._burdens(keyspace) b;
    FOR relief IN SELECT r.* FROM shardmap._relieve(borne.shards, borne.states, borne.measures, ARRAY[max_rows, max_bytes, max_load], shard) r LOOP
        bound := NULL;
        given := NULL;
        IF before ->> 'strategy' = 'range' THEN
            bound := shardmap._key_at(keyspace, relief.giver, 1 - relief.part, bounds ->> relief.giver);
            bounds := bounds || jsonb_build_object(relief.giver, bound);
        END IF;
        IF before ->> 'strategy' <> 'range' OR bound IS NOT NULL THEN
            given := shardmap._given_map(shardmap._map_json(jsonb_build_array(after)), relief.giver, relief.gainer, relief.part, bound)::jsonb
                #> '{keyspaces,0}';
        END IF;
        IF given IS NULL THEN
            RAISE NOTICE 'shard "%" cannot be divided', relief.giver
                USING DETAIL = 'It owns too few keys.', HINT = 'shardmap.move_key gives one key to a shard of its own choosing.';
        END IF;
        after := coalesce(given, after);
    END LOOP;
    IF after = before THEN
        RAISE NOTICE 'nothing to move in keyspace "%"', keyspace
            USING DETAIL = 'No shard is above the limits, or none could take a part without bearing as much.', HINT = 'See shardmap.add_shard.';
        RETURN;
    ELSIF NOT dry_run THEN
        PERFORM shardmap._note_wish(after);
    END IF;
    RETURN QUERY SELECT p.* FROM shardmap._plan_parts(keyspace, before, after, dry_run, engine) p;
END
$$;
COMMENT ON FUNCTION shardmap.split_hot(text, bigint, bigint, double precision, text, boolean, text) IS
    'plans to relieve shards above a limit of rows, bytes or statements a second: each gives up to half of what it owns to the least burdened others, or to shard; dry_run: enters nothing; engine: triggers, or logical for logical replication';

CREATE FUNCTION shardmap.merge_cold(
    keyspace text DEFAULT 'main',
    min_rows bigint DEFAULT NULL,
    min_bytes bigint DEFAULT NULL,
    min_load double precision DEFAULT NULL,
    dry_run boolean DEFAULT false,
    engine text DEFAULT 'triggers'
) RETURNS TABLE (move bigint, relation regclass, source text, target text, rows bigint, bytes bigint, part text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    before jsonb;
    after jsonb;
    cold text[];
BEGIN
    PERFORM shardmap._check_engine(engine);
    PERFORM shardmap._check_limits(keyspace, min_rows, min_bytes, min_load);
    SELECT shardmap._fold(b.shards, b.states, b.measures, ARRAY[min_rows, min_bytes, min_load]) INTO cold FROM shardmap._burdens(keyspace) b;
    IF coalesce(cold, '{}') = '{}' THEN
        RAISE NOTICE 'nothing to move in keyspace "%"', keyspace
            USING DETAIL = 'No active shard is below all limits, or only one is left.';
        RETURN;
    END IF;
    before := shardmap._keyspace_json(keyspace);
    after := shardmap._wanted_map(shardmap._map_json(jsonb_build_array(jsonb_set(before - 'wanted_slots', '{shards}', (
        SELECT jsonb_agg(CASE WHEN s ->> 'name' = ANY (cold) THEN s || '{"state": "draining"}' ELSE s END ORDER BY n)
          FROM jsonb_array_elements(before -> 'shards') WITH ORDINALITY x (s, n))))))::jsonb #> '{keyspaces,0}';
    IF NOT dry_run THEN
        PERFORM shardmap._update_shard(s.name, s.weight, 'draining', '{}', false)
           FROM (SELECT h.* FROM shardmap.shard h WHERE h.name = ANY (cold) ORDER BY array_position(cold, h.name)) s;
    END IF;
    RETURN QUERY SELECT p.* FROM shardmap._plan_parts(keyspace, before, after, dry_run, engine) p;
END
$$;
COMMENT ON FUNCTION shardmap.merge_cold(text, bigint, bigint, double precision, boolean, text) IS
    'plans to empty shards below all limits of rows, bytes and statements a second, the least burdened first; they are draining then, and can be dropped when they are empty; dry_run: enters nothing; engine: triggers, or logical for logical replication';

REVOKE ALL ON FUNCTION shardmap._burdens(text), shardmap._key_at(text, text, double precision, text, text),
    shardmap._plan_parts(text, jsonb, jsonb, boolean, text), shardmap._note_wish(jsonb), shardmap._check_limits(text, double precision[]),
    shardmap.split_hot(text, bigint, bigint, double precision, text, boolean, text),
    shardmap.merge_cold(text, bigint, bigint, double precision, boolean, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._burdens(text), shardmap._key_at(text, text, double precision, text, text),
    shardmap._plan_parts(text, jsonb, jsonb, boolean, text), shardmap._note_wish(jsonb), shardmap._check_limits(text, double precision[]),
    shardmap.split_hot(text, bigint, bigint, double precision, text, boolean, text),
    shardmap.merge_cold(text, bigint, bigint, double precision, boolean, text) TO shardmap_admin;
