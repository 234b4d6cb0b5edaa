-- Moves: of ranges, and of all that a keyspace's shards should own and do not.
--
-- Decides which moves bring a keyspace to what is wanted of it: one for each giver and gainer, each of all tables, each
-- by itself: after any of them the map is whole. What always holds: a dry run enters nothing; what is where it should be
-- does not move; pinned keys stay. Refuses parts that a move under way has. Read docs/rebalance.md.

CREATE FUNCTION shardmap._copy_rate() RETURNS double precision
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce((SELECT sum(m.rows_copied) / nullif(sum(EXTRACT(epoch FROM m.flipped_at - m.started_at)), 0) FROM (
            SELECT * FROM shardmap.move WHERE state = 'done' AND rows_copied >= 1000 ORDER BY id DESC LIMIT 20) m), 20000)::double precision
$$;
COMMENT ON FUNCTION shardmap._copy_rate() IS 'rows a second of the last moves of a thousand rows or more, from their start to the flip; 20000 before there are such';

CREATE FUNCTION shardmap._plan_part(planned shardmap.move, dry_run boolean)
RETURNS TABLE (move bigint, part text, relation regclass, source text, target text, rows bigint, bytes bigint, expected interval, steps text)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT p.move, shardmap._part_text(planned), p.relation, p.source, p.target, p.rows, p.bytes,
        date_trunc('milliseconds', p.rows / shardmap._copy_rate() * interval '1 second'),
        format('%s, catch up, verify, hold off writers for %s at most, flip, wait %s, delete', CASE WHEN planned.engine = 'logical' THEN 'copy by logical replication' WHEN b.batches = 1 THEN 'copy 1 batch'
                ELSE format('copy %s batches', b.batches) END,
            current_setting('shardmap.fence_timeout'), current_setting('shardmap.cleanup_delay'))
      FROM shardmap._plan_move(planned, dry_run) p,
        LATERAL (SELECT greatest(ceil(p.rows / current_setting('shardmap.move_batch_rows')::numeric), 1)::bigint AS batches) b
$$;
COMMENT ON FUNCTION shardmap._plan_part(shardmap.move, boolean) IS 'plans a move of a part, as _plan_move, and says how it will go';
REVOKE ALL ON FUNCTION shardmap._plan_part(shardmap.move, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._plan_part(shardmap.move, boolean) TO shardmap_admin;

-- Ranges that meet, of one shard, are one part. What nobody owns has no rows.
CREATE FUNCTION shardmap._range_pieces(space shardmap.keyspace, lower text, upper text, target text)
RETURNS TABLE (piece_lower text, piece_upper text, source text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH met AS (
        SELECT CASE WHEN $2 IS NULL OR shardmap._bound_less(space.range_order, $2, r.lower) THEN r.lower ELSE $2 END AS lower,
            CASE WHEN $3 IS NULL OR shardmap._bound_less(space.range_order, r.upper, $3) THEN r.upper ELSE $3 END AS upper, r.shard,
            row_number() OVER (ORDER BY CASE space.range_order WHEN 'integer' THEN r.lower::bigint END NULLS FIRST,
                convert_to(r.lower, 'UTF8') NULLS FIRST) AS place
          FROM shardmap.key_range r
         WHERE r.keyspace = space.name AND coalesce(shardmap._bound_less(space.range_order, r.lower, $3), true)
           AND coalesce(shardmap._bound_less(space.range_order, $2, r.upper), true)
    ), begun AS (
        SELECT m.*, (m.lower = lag(m.upper) OVER w AND m.shard = lag(m.shard) OVER w) IS NOT TRUE AS begins FROM met m WINDOW w AS (ORDER BY m.place)
    ), numbered AS (
        SELECT b.*, count(*) FILTER (WHERE b.begins) OVER (ORDER BY b.place) AS piece FROM begun b
    )
    SELECT (array_agg(n.lower ORDER BY n.place))[1], (array_agg(n.upper ORDER BY n.place DESC))[1], n.shard
      FROM numbered n WHERE n.shard <> target GROUP BY n.piece, n.shard ORDER BY n.piece
$$;
COMMENT ON FUNCTION shardmap._range_pieces(shardmap.keyspace, text, text, text) IS 'ranges between two bounds that are not on the target, with their shards';
REVOKE ALL ON FUNCTION shardmap._range_pieces(shardmap.keyspace, text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._range_pieces(shardmap.keyspace, text, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap.move_range(lower text, upper text, shard text, keyspace text DEFAULT 'main', dry_run boolean DEFAULT false,
    engine text DEFAULT 'triggers')
RETURNS TABLE (move bigint, part text, relation regclass, source text, target text, rows bigint, bytes bigint, expected interval, steps text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    space shardmap.keyspace := shardmap._lock_ranges(keyspace);
    planned shardmap.move;
    piece record;
BEGIN
    planned.keyspace := space.name;
    planned.kind := 'range';
    planned.engine := shardmap._check_engine(engine);
    planned.target := shard;
    planned.lower := CASE space.range_order WHEN 'integer' THEN $1::bigint::text ELSE $1 END;
    planned.upper := CASE space.range_order WHEN 'integer' THEN $2::bigint::text ELSE $2 END;
    IF NOT coalesce(shardmap._bound_less(space.range_order, planned.lower, planned.upper), true) THEN
        RAISE EXCEPTION 'range % holds no key', shardmap._range_text(planned.lower, planned.upper)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The lower bound belongs to a range and must be below the upper bound.';
    END IF;
    PERFORM shardmap._check_shard_of(space.name, shard);
    PERFORM shardmap._check_no_overlap(planned);
    FOR piece IN SELECT p.* FROM shardmap._range_pieces(space, planned.lower, planned.upper, shard) p LOOP
        planned.lower := piece.piece_lower;
        planned.upper := piece.piece_upper;
        planned.source := piece.source;
        RETURN QUERY SELECT p.* FROM shardmap._plan_part(planned, dry_run) p;
    END LOOP;
    IF planned.source IS NULL THEN
        RAISE NOTICE 'nothing of range % is on another shard than "%"', shardmap._range_text(planned.lower, planned.upper), shard;
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.move_range(text, text, text, text, boolean, text) IS
    'plans to move all rows of a range to a shard: keys from lower to below upper, NULL: no limit; returns what would move, by table; dry_run: enters nothing; engine: triggers, or logical for logical replication';
REVOKE ALL ON FUNCTION shardmap.move_range(text, text, text, text, boolean, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.move_range(text, text, text, text, boolean, text) TO shardmap_admin;

CREATE FUNCTION shardmap.rebalance(keyspace text DEFAULT 'main', dry_run boolean DEFAULT false, engine text DEFAULT 'triggers')
RETURNS TABLE (move bigint, part text, relation regclass, source text, target text, rows bigint, bytes bigint, expected interval, steps text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    space shardmap.keyspace := shardmap._lock_keyspace(keyspace);
    wanted jsonb := shardmap._wanted_keyspace(keyspace);
    planned shardmap.move;
    kept record;
BEGIN
    PERFORM shardmap._check_engine(engine);
    IF wanted IS NULL THEN
        RAISE NOTICE 'keyspace "%" is as it should be', space.name;
    END IF;
    FOR planned IN
        SELECT m.* FROM shardmap._moves_between(space.name, shardmap._keyspace_json(space.name), wanted) m
         ORDER BY m.source COLLATE "default", m.target COLLATE "default"
    LOOP
        planned.engine := engine;
        RETURN QUERY SELECT p.* FROM shardmap._plan_part(planned, dry_run) p;
    END LOOP;
    FOR kept IN SELECT s.name, count(*) AS pins, min(p.key) AS key FROM shardmap.shard s JOIN shardmap.pin p ON p.keyspace = s.keyspace AND p.shard = s.name
        WHERE s.keyspace = space.name AND s.state = 'draining' GROUP BY s.name ORDER BY 1
    LOOP
        RAISE NOTICE 'shard "%" is draining, and keeps % pinned keys', kept.name, kept.pins
            USING HINT = format('Move them one by one with shardmap.move_key; the first is "%s".', kept.key);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap.rebalance(text, boolean, text) IS
    'plans the moves that bring a keyspace to what its shards'' states and weights ask for, one for each giver and gainer; returns what would move, by table; dry_run: enters nothing; engine: triggers, or logical for logical replication';
REVOKE ALL ON FUNCTION shardmap.rebalance(text, boolean, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.rebalance(text, boolean, text) TO shardmap_admin;

CREATE FUNCTION shardmap._next_move(keyspace text, after bigint) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT min(m.id) FROM shardmap.move m
     WHERE m.keyspace = $1 AND m.id > $2 AND m.state NOT IN ('done', 'rolled_back') AND m.wish IS DISTINCT FROM 'pause'
$$;
COMMENT ON FUNCTION shardmap._next_move(text, bigint) IS 'the next move of a keyspace that is to be run';

-- No search_path of its own: a procedure that has one cannot commit.
CREATE PROCEDURE shardmap.run_moves(keyspace text DEFAULT 'main')
LANGUAGE plpgsql AS $$
DECLARE
    next bigint := shardmap._next_move(keyspace, 0);
BEGIN
    WHILE next IS NOT NULL LOOP
        CALL shardmap.run_move(next);
        next := shardmap._next_move(keyspace, next);
    END LOOP;
END
$$;
COMMENT ON PROCEDURE shardmap.run_moves(text) IS 'runs all moves of a keyspace, one after the other, but for those that are paused; stops at a failure';
REVOKE ALL ON PROCEDURE shardmap.run_moves(text) FROM PUBLIC;
GRANT EXECUTE ON PROCEDURE shardmap.run_moves(text) TO shardmap_admin;
