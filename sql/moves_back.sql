-- Moves: the way back, after the map has changed.
--
-- Decides how a move that is flipped is taken back. What always holds: right before writers are held off, triggers on the
-- target begin to log; the source keeps its rows, hidden, until they are cleaned; so the way back is the way there with the
-- shards in each other's place, from catching up on: apply what has changed on the target, verify, fence, flip. Then the
-- target's rows are deleted. Refuses when the source's rows are being deleted. Read src/core/reshard for the order of states.

-- The shards as the steps see them.
CREATE FUNCTION shardmap._directed(job shardmap.move) RETURNS shardmap.move
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    source constant text := job.source;
BEGIN
    IF job.reversed THEN
        job.source := job.target;
        job.target := source;
    END IF;
    RETURN job;
END
$$;
COMMENT ON FUNCTION shardmap._directed(shardmap.move) IS 'a move with the shard first from which rows go now';
REVOKE ALL ON FUNCTION shardmap._directed(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._directed(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._prepare_back(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    back shardmap.move := job;
BEGIN
    back.reversed := true;
    BEGIN
        PERFORM shardmap._limit_locks();
        PERFORM shardmap._install_log(shardmap._directed(back));
        PERFORM shardmap._crash_here('move_logging_back');
        PERFORM shardmap._update_move(job.id, '{"logs_back": true, "last_error": null}');
        RETURN 'plain';
    EXCEPTION
        WHEN lock_not_available OR deadlock_detected THEN
            PERFORM shardmap._update_move(job.id, jsonb_build_object('last_error', SQLERRM));
    END;
    PERFORM pg_sleep(0.2 + random() * 0.3);
    RETURN 'plain';
END
$$;
COMMENT ON FUNCTION shardmap._prepare_back(shardmap.move) IS 'the first step of a move that is fencing: lets triggers on the target log what changes from now on';
REVOKE ALL ON FUNCTION shardmap._prepare_back(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._prepare_back(shardmap.move) TO shardmap_admin;

-- On its way back there was a time when everybody read them.
CREATE FUNCTION shardmap._clean_target(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT job.reversed THEN
        RETURN shardmap._clean(job, job.target);
    ELSIF job.readers IS DISTINCT FROM '{}' THEN
        IF shardmap._have_readers_gone(job) THEN
            PERFORM shardmap._update_move(job.id, '{"readers": []}');
        END IF;
        RETURN 'plain';
    END IF;
    RETURN shardmap._clean(job, job.source);
END
$$;
COMMENT ON FUNCTION shardmap._clean_target(shardmap.move) IS 'a step of a move that is rolling back: deletes its rows on the shard that was to get them';
REVOKE ALL ON FUNCTION shardmap._clean_target(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._clean_target(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap.rollback_move(id bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    job shardmap.move := shardmap._find_move(id);
BEGIN
    job := shardmap._update_move(id, '{}'); -- no step is under way meanwhile
    IF job.reversed OR job.state IN ('rolling_back', 'rolled_back') THEN
        RAISE NOTICE 'move % is on its way back already', id;
        IF job.wish = 'cancel' AND job.reversed THEN
            RETURN shardmap._wish_for_move(id, NULL);
        END IF;
        RETURN job.state;
    ELSIF shardmap._can_cancel_move(job.state, false) THEN
        RETURN shardmap._wish_for_move(id, 'cancel');
    ELSIF job.state <> 'flipped' THEN
        RAISE EXCEPTION 'move % cannot be rolled back any more: it is %', id, job.state
            USING ERRCODE = 'object_not_in_prerequisite_state',
                DETAIL = format('The rows on shard "%s" are being deleted, or are gone.', job.source),
                HINT = 'Move the rows back by another move. shardmap.cleanup_delay is the time for which rolling back is possible.';
    END IF;
    RETURN shardmap._wish_for_move(id, 'rollback');
END
$$;
COMMENT ON FUNCTION shardmap.rollback_move(bigint) IS 'takes a move back, also when its target owns the rows, until they are deleted on the source: shardmap.run_move or its worker then does so; returns its state';
REVOKE ALL ON FUNCTION shardmap.rollback_move(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.rollback_move(bigint) TO shardmap_admin;
