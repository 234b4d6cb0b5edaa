-- Moves: how fast they go, and what they say meanwhile.
--
-- Decides when rows are not copied or deleted yet: by shardmap.move_rows_per_second, and while a replica of source or target
-- lags more than shardmap.move_max_replica_lag. What always holds: who waits says so, in last_error if it is for a replica; a
-- wait is many short steps, so that a pause or a cancel takes effect meanwhile; a replica of which nothing is known is not
-- waited for for ever. Read src/pg/moves/pace.rs next.

CREATE FUNCTION shardmap._pace_rows(rows bigint) RETURNS void
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'pace_rows_wrapper';
COMMENT ON FUNCTION shardmap._pace_rows(bigint) IS 'notes that this session has moved rows';
CREATE FUNCTION shardmap._pace_left() RETURNS double precision
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'pace_left_wrapper';
COMMENT ON FUNCTION shardmap._pace_left() IS 'seconds until shardmap.move_rows_per_second lets this session move rows again';
CREATE FUNCTION shardmap._note_unknown_lag(said text) RETURNS double precision
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'note_unknown_lag_wrapper';
COMMENT ON FUNCTION shardmap._note_unknown_lag(text) IS 'notes what is to be said of a replica whose lag is unknown, NULL: there is none; returns for how many seconds it has been';
CREATE FUNCTION shardmap._unknown_lag() RETURNS text
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'unknown_lag_wrapper';
COMMENT ON FUNCTION shardmap._unknown_lag() IS 'what is to be said of a replica whose lag is unknown';
CREATE FUNCTION shardmap._is_progress_due(state text) RETURNS boolean
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'is_progress_due_wrapper';
COMMENT ON FUNCTION shardmap._is_progress_due(text) IS 'whether progress in a state is to be told: every few seconds';
REVOKE ALL ON FUNCTION shardmap._pace_rows(bigint), shardmap._pace_left(), shardmap._note_unknown_lag(text), shardmap._unknown_lag(),
    shardmap._is_progress_due(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._pace_rows(bigint), shardmap._pace_left(), shardmap._note_unknown_lag(text), shardmap._unknown_lag(),
    shardmap._is_progress_due(text) TO shardmap_admin;

CREATE FUNCTION shardmap._move_batch() RETURNS bigint
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'move_batch_wrapper';
COMMENT ON FUNCTION shardmap._move_batch() IS 'rows that the step copies or deletes that begins now: by what the one before took, at most shardmap.move_batch_rows, and what a second allows';
REVOKE ALL ON FUNCTION shardmap._move_batch() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._move_batch() TO shardmap_admin;

CREATE FUNCTION shardmap._unknown_lag_limit() RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$ SELECT 60::double precision $$;
COMMENT ON FUNCTION shardmap._unknown_lag_limit() IS 'seconds for which a move waits for a replica whose lag is unknown';

-- Lag is as the sampler knows it: shardmap.lag_sample_interval.
CREATE FUNCTION shardmap._is_replica_behind(job shardmap.move) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    limits constant interval := current_setting('shardmap.move_max_replica_lag')::interval;
    late record;
    says text;
    waits boolean;
BEGIN
    SELECT l.replica, l.shard, l.lag, l.reason INTO late
      FROM shardmap.replica_lag l JOIN shardmap.replica r ON r.name = l.replica
     WHERE limits >= interval '0' AND l.shard IN (job.source, job.target) AND NOT r.drained AND (l.lag IS NULL OR l.lag > limits)
     ORDER BY l.lag DESC NULLS LAST LIMIT 1;
    IF late.replica IS NULL THEN
        PERFORM shardmap._note_unknown_lag(NULL);
        RETURN false;
    ELSIF late.lag IS NULL THEN
        says := format('the lag of replica "%s" of shard "%s" is unknown: %s', late.replica, late.shard, coalesce(late.reason, 'it is not watched yet'));
        waits := shardmap._note_unknown_lag('WARNING: goes on although ' || says) < shardmap._unknown_lag_limit();
    ELSE
        PERFORM shardmap._note_unknown_lag(NULL);
        says := format('replica "%s" of shard "%s" lags %s, more than shardmap.move_max_replica_lag', late.replica, late.shard, date_trunc('second', late.lag));
        waits := true;
    END IF;
    says := 'waits: ' || says;
    IF waits AND job.last_error IS DISTINCT FROM says THEN
        PERFORM shardmap._update_move(job.id, jsonb_build_object('last_error', says));
    END IF;
    RETURN waits;
END
$$;
COMMENT ON FUNCTION shardmap._is_replica_behind(shardmap.move) IS 'whether a move is to wait for a replica of its shards; says so in last_error';
REVOKE ALL ON FUNCTION shardmap._is_replica_behind(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._is_replica_behind(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._wait_for_pace(job shardmap.move) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    seconds double precision := shardmap._pace_left();
BEGIN
    IF seconds <= 0 AND shardmap._is_replica_behind(job) THEN
        seconds := 0.2;
    END IF;
    IF seconds > 0 THEN
        PERFORM pg_sleep(least(seconds, 0.5));
    END IF;
    RETURN seconds > 0;
END
$$;
COMMENT ON FUNCTION shardmap._wait_for_pace(shardmap.move) IS 'waits a little if rows are not to be moved yet; returns whether it did';
REVOKE ALL ON FUNCTION shardmap._wait_for_pace(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._wait_for_pace(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._tell_progress(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT shardmap._is_progress_due(job.state) THEN
        RETURN;
    ELSIF job.state = 'copying' THEN
        RAISE NOTICE 'move % has copied % of % rows (% %%), % to go%', job.id, job.rows_copied, job.rows_planned,
            floor(100 * least(job.rows_copied::numeric / nullif(job.rows_planned, 0), 1)), coalesce(shardmap._remaining(job)::text, 'unknown time'),
            coalesce(': ' || job.last_error, '');
    ELSIF job.state IN ('cleaning', 'rolling_back') THEN
        RAISE NOTICE 'move % has deleted % rows%', job.id, job.rows_deleted, coalesce(': ' || job.last_error, '');
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._tell_progress(shardmap.move) IS 'says every few seconds how far a move has come';
REVOKE ALL ON FUNCTION shardmap._tell_progress(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._tell_progress(shardmap.move) TO shardmap_admin;
