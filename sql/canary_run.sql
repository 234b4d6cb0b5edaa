-- Canaries: how one is run.
--
-- Decides whether what a canary has moved stays, by its rows and by the statistics of both shards: before the move, and since
-- the flip. What always holds: each step is one transaction, and a canary whose session is gone is taken up where it was by
-- the next CALL; its own comparisons are not counted, for nothing is while it compares; a condition has failed when it
-- does so at two looks in a row, or at the last; a difference of rows at once. Judged by src/core/canary.rs.

CREATE FUNCTION shardmap._judge_canary(before double precision[], since double precision[], error_rate double precision,
        slowdown double precision, statements double precision)
    RETURNS TABLE (place integer, outcome text, said text)
    LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'judge_canary_wrapper';
COMMENT ON FUNCTION shardmap._judge_canary(double precision[], double precision[], double precision, double precision, double precision) IS
    'whether source (0) and target (1) bear a canary, by their statements, errors and milliseconds before and since: met, broken or not judged';

CREATE FUNCTION shardmap._canary_counters(job shardmap.move) RETURNS double precision[]
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT array_agg(c.value ORDER BY s.place, c.n)
      FROM (VALUES (0, job.source), (1, job.target)) s (place, shard)
      LEFT JOIN shardmap.stat_shards t ON t.keyspace = job.keyspace AND t.shard = s.shard
     CROSS JOIN LATERAL (VALUES (0, coalesce(t.statements, 0)::double precision), (1, coalesce(t.errors, 0)), (2, coalesce(t.wait_ms, 0))) c (n, value)
$$;
COMMENT ON FUNCTION shardmap._canary_counters(shardmap.move) IS 'statements, errors and milliseconds of a move''s source, then of its target, by shardmap.stat_shards';

-- NULL: counters have been reset meanwhile.
CREATE FUNCTION shardmap._counted(sum double precision[], was double precision[], now double precision[]) RETURNS double precision[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN bool_and(now[n] >= was[n]) THEN array_agg(coalesce(sum[n], 0) + now[n] - was[n] ORDER BY n) END FROM generate_series(1, 6) n
$$;
COMMENT ON FUNCTION shardmap._counted(double precision[], double precision[], double precision[]) IS 'a sum, and what was counted since';

CREATE FUNCTION shardmap._canary_findings(run shardmap.canary_run, job shardmap.move) RETURNS TABLE (outcome text, said text)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT j.outcome, format('%s "%s": %s', CASE j.place WHEN 0 THEN 'source' ELSE 'target' END, CASE j.place WHEN 0 THEN job.source ELSE job.target END, j.said)
      FROM shardmap._judge_canary(run.before, run.during, run.max_error_rate, run.max_slowdown, run.min_statements) j
$$;
COMMENT ON FUNCTION shardmap._canary_findings(shardmap.canary_run, shardmap.move) IS 'how a canary stands by the statistics, in words';

CREATE FUNCTION shardmap._canary_differences(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved shardmap.move_table;
    found text;
BEGIN
    FOR moved IN SELECT t.* FROM shardmap.move_table t WHERE t.move = job.id ORDER BY t.position LOOP
        SELECT string_agg(concat_ws(', ', CASE d.finding WHEN 'missing' THEN 'not on the target' WHEN 'extra' THEN 'not on the source'
                WHEN 'bucket' THEN NULL ELSE d.finding END, d.detail), '; ')
          INTO found FROM (SELECT f.* FROM shardmap._verify_move_table(job, moved, 3) f WHERE f.finding <> 'equal' LIMIT 3) d;
        IF found IS NOT NULL THEN
            RETURN format('rows of table %s differ: %s', moved.relation, found);
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION shardmap._canary_differences(shardmap.move) IS 'rows of a flipped move that differ on its shards and have not changed since; NULL: none';

-- Steps return the number of a move that is to be run, 0 if there is none for now, NULL if the canary is over or paused.

CREATE FUNCTION shardmap._begin_canary(keyspace text, bake interval, baseline interval, share double precision, max_error_rate double precision,
    max_slowdown double precision, min_statements bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space shardmap.keyspace := shardmap._lock_keyspace(keyspace);
    run shardmap.canary_run;
    chosen record;
    job shardmap.move;
BEGIN
    PERFORM shardmap._check_no_block('shardmap.canary');
    SELECT c.* INTO run FROM shardmap.canary_run c WHERE c.keyspace = space.name AND c.finished_at IS NULL;
    IF FOUND THEN
        PERFORM shardmap._hold_move(run.move);
        RAISE NOTICE 'canary of keyspace "%" goes on: it is %', space.name, replace(run.state, '_', ' ')
            USING DETAIL = 'Its limits are those with which it was begun, see shardmap.canaries.';
        RETURN run.move;
    END IF;
    IF (bake > interval '0' AND baseline >= interval '0' AND share > 0 AND share <= 1 AND max_error_rate >= 0 AND max_slowdown >= 1
        AND min_statements >= 0) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'a limit of the canary is out of range'
            USING ERRCODE = 'invalid_parameter_value',
                DETAIL = 'bake is above 0; share is above 0, at most 1; max_slowdown is at least 1; baseline, max_error_rate and min_statements are not negative.',
                HINT = 'Leave out what you are not sure of.';
    END IF;
    PERFORM shardmap._check_not_begun(space.name);
    SELECT c.* INTO chosen FROM shardmap._choose_canary(space.name, share) c;
    run.keyspace := space.name;
    run.bake := bake;
    run.baseline := baseline;
    run.max_error_rate := max_error_rate;
    run.max_slowdown := max_slowdown;
    run.min_statements := min_statements;
    run.move := shardmap._enter_canary(run, chosen.piece, chosen.other);
    PERFORM shardmap._hold_move(run.move);
    job := shardmap._find_move(run.move);
    RAISE NOTICE 'canary of keyspace "%" is move %: % from shard "%" to shard "%"', space.name, job.id, shardmap._part_text(job), job.source, job.target
        USING DETAIL = format('%s rows, %s; %s statements a second. Moves that wait for it: %s.', job.rows_planned, pg_size_pretty(job.bytes_planned),
            round(chosen.load::numeric, 2), (SELECT coalesce(nullif(array_to_string(c.rest, ', '), ''), 'none') FROM shardmap.canary_run c WHERE c.move = job.id));
    RETURN job.id;
END
$$;
COMMENT ON FUNCTION shardmap._begin_canary(text, interval, interval, double precision, double precision, double precision, bigint) IS
    'begins a canary, or takes up the one that is under way; returns the number of its move';

CREATE FUNCTION shardmap._check_not_begun(keyspace text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    met shardmap.move;
BEGIN
    SELECT m.* INTO met FROM shardmap.move m WHERE m.keyspace = $1 AND m.state NOT IN ('planned', 'done', 'rolled_back') ORDER BY m.id LIMIT 1;
    IF FOUND THEN
        PERFORM shardmap._refuse_overlap(met);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_not_begun(text) IS 'raises an error if a move of a keyspace is under way';

CREATE FUNCTION shardmap._measure_canary(run shardmap.canary_run, job shardmap.move) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    now_there constant double precision[] := shardmap._canary_counters(job);
    counted double precision[];
    left_over double precision;
BEGIN
    IF run.baseline = interval '0' THEN
        counted := now_there;
    ELSIF run.counters IS NULL THEN
        RAISE NOTICE 'canary of keyspace "%" is measured for % before it moves', run.keyspace, run.baseline;
        PERFORM shardmap._update_canary(job.id, jsonb_build_object('counters', now_there, 'since', clock_timestamp()));
        RETURN 0;
    ELSE
        counted := shardmap._counted(NULL, run.counters, now_there);
        left_over := extract(epoch FROM run.since + run.baseline - clock_timestamp());
        IF counted IS NULL THEN -- reset: from now on
            PERFORM shardmap._update_canary(job.id, '{"counters": null}');
            RETURN 0;
        ELSIF left_over > 0 THEN
            PERFORM pg_sleep(least(left_over, 0.5));
            RETURN 0;
        END IF;
    END IF;
    RAISE NOTICE 'canary of keyspace "%" is moving', run.keyspace;
    PERFORM shardmap._update_canary(job.id, jsonb_build_object('before', counted, 'counters', NULL, 'since', NULL, 'state', 'moving'));
    RETURN 0;
END
$$;
COMMENT ON FUNCTION shardmap._measure_canary(shardmap.canary_run, shardmap.move) IS 'a step of a canary that is measuring';

CREATE FUNCTION shardmap._fail_canary(run shardmap.canary_run, why text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE NOTICE 'canary of keyspace "%" is taken back: %', run.keyspace, why;
    PERFORM shardmap._update_canary(run.move, jsonb_build_object('state', 'taking_back', 'counters', NULL, 'verdict', why));
    RETURN 0;
END
$$;
COMMENT ON FUNCTION shardmap._fail_canary(shardmap.canary_run, text) IS 'lets a canary be taken back';

-- A look at the statistics; at some of them, and at the last, rows are compared too.
CREATE FUNCTION shardmap._look_at_canary(run shardmap.canary_run, job shardmap.move) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    is_over constant boolean := clock_timestamp() >= run.since + run.bake;
    broken text;
    judged text;
    said text;
BEGIN
    run.during := shardmap._counted(run.during, run.counters, shardmap._canary_counters(job));
    IF run.during IS NULL THEN
        RAISE NOTICE 'canary of keyspace "%" bakes anew, for the statistics were reset', run.keyspace;
        PERFORM shardmap._update_canary(job.id, jsonb_build_object('during', NULL, 'counters', NULL, 'since', clock_timestamp(), 'suspected', NULL));
        RETURN 0;
    END IF;
    SELECT string_agg(f.said, '; ') FILTER (WHERE f.outcome = 'broken'), string_agg(f.said, '; ') INTO broken, judged
      FROM shardmap._canary_findings(run, job) f;
    PERFORM shardmap._update_canary(job.id, jsonb_build_object('during', run.during, 'counters', shardmap._canary_counters(job),
        'looked_at', clock_timestamp(), 'suspected', broken));
    IF broken IS NOT NULL AND (is_over OR run.suspected IS NOT NULL) THEN
        RETURN shardmap._fail_canary(run, broken);
    ELSIF is_over OR run.verified_at IS NULL OR clock_timestamp() >= run.verified_at + run.bake / 4 THEN
        said := shardmap._canary_differences(job);
        IF said IS NOT NULL THEN
            RETURN shardmap._fail_canary(run, said);
        END IF;
        run.verifications := run.verifications + 1;
        PERFORM shardmap._update_canary(job.id, jsonb_build_object('counters', NULL, 'verified_at', clock_timestamp(), 'verifications', run.verifications));
    END IF;
    IF is_over THEN
        said := concat_ws('; ', judged, format('rows compared %s times', run.verifications));
        RAISE NOTICE 'canary of keyspace "%" has passed: %', run.keyspace, said;
        PERFORM shardmap._update_canary(job.id, jsonb_build_object('state', 'spreading', 'verdict', said));
    ELSIF shardmap._is_progress_due('canary') THEN
        RAISE NOTICE 'canary of keyspace "%" has baked for % of %: %', run.keyspace, date_trunc('second', clock_timestamp() - run.since), run.bake, judged;
    END IF;
    RETURN 0;
END
$$;
COMMENT ON FUNCTION shardmap._look_at_canary(shardmap.canary_run, shardmap.move) IS 'looks whether a canary that bakes is within its bounds';

CREATE FUNCTION shardmap._bake_canary(run shardmap.canary_run, job shardmap.move) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    between constant interval := greatest(least(run.bake / 50, interval '10 s'), interval '0.2 s');
    left_over double precision;
BEGIN
    IF job.wish = 'rollback' OR job.reversed OR job.state <> 'flipped' THEN
        RETURN shardmap._fail_canary(run, 'its move was rolled back');
    ELSIF run.counters IS NULL THEN
        PERFORM shardmap._update_canary(job.id, jsonb_build_object('counters', shardmap._canary_counters(job), 'looked_at', clock_timestamp()));
        RETURN 0;
    END IF;
    left_over := extract(epoch FROM run.looked_at + between - clock_timestamp());
    IF left_over > 0 THEN
        PERFORM pg_sleep(least(left_over, 0.5));
        RETURN 0;
    END IF;
    RETURN shardmap._look_at_canary(run, job);
END
$$;
COMMENT ON FUNCTION shardmap._bake_canary(shardmap.canary_run, shardmap.move) IS 'a step of a canary that bakes';

CREATE FUNCTION shardmap._take_canary_back(run shardmap.canary_run, job shardmap.move) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF job.state = 'rolled_back' THEN
        PERFORM shardmap._plan_again(run);
        PERFORM shardmap._update_canary(job.id, jsonb_build_object('state', 'failed', 'finished_at', clock_timestamp()));
        RETURN NULL;
    ELSIF NOT job.reversed AND job.state <> 'rolling_back' AND job.wish IS DISTINCT FROM 'rollback' THEN
        PERFORM shardmap.rollback_move(job.id);
    END IF;
    RETURN job.id;
END
$$;
COMMENT ON FUNCTION shardmap._take_canary_back(shardmap.canary_run, shardmap.move) IS 'a step of a canary that is taken back';

CREATE FUNCTION shardmap._spread_canary(run shardmap.canary_run) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    following bigint;
    is_run boolean;
BEGIN
    SELECT m.id, EXISTS (SELECT FROM shardmap._move_locks(3) l WHERE l.number = m.id & 4294967295 AND l.pid <> pg_backend_pid()) INTO following, is_run
      FROM shardmap.move m WHERE m.id = ANY (run.move || run.rest) AND m.state NOT IN ('done', 'rolled_back') AND m.wish IS DISTINCT FROM 'pause'
     ORDER BY m.id = run.move DESC, 2, m.id LIMIT 1;
    IF is_run THEN -- by a worker, say: it is waited for
        PERFORM pg_sleep(0.2);
        RETURN 0;
    ELSIF following IS NULL THEN
        PERFORM shardmap._update_canary(run.move, jsonb_build_object('state', 'passed', 'finished_at', clock_timestamp()));
    END IF;
    RETURN following;
END
$$;
COMMENT ON FUNCTION shardmap._spread_canary(shardmap.canary_run) IS 'a step of a canary that has passed: it is cleaned, then the moves that have waited for it are run';

CREATE FUNCTION shardmap._canary_step(id bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    run shardmap.canary_run;
    job shardmap.move;
BEGIN
    PERFORM shardmap._hold_move(id);
    PERFORM shardmap._await_own_commits();
    job := shardmap._find_move(id);
    run := shardmap._update_canary(id, '{}');
    PERFORM shardmap._crash_here('canary_' || run.state);
    IF run.finished_at IS NOT NULL THEN
        RETURN NULL;
    ELSIF job.wish = 'pause' THEN
        RAISE NOTICE 'the canary of keyspace "%" is paused', run.keyspace
            USING HINT = format('Go on: SELECT shardmap.resume_move(%s); CALL shardmap.canary(%L).', id, run.keyspace);
        RETURN NULL;
    END IF;
    CASE run.state
        WHEN 'measuring' THEN RETURN shardmap._measure_canary(run, job);
        WHEN 'moving' THEN
            IF job.state = 'rolled_back' THEN
                RETURN shardmap._fail_canary(run, 'its move was given up');
            ELSIF job.state <> 'flipped' OR job.wish IS NOT NULL THEN
                RETURN id;
            END IF;
            RAISE NOTICE 'canary of keyspace "%" bakes for %', run.keyspace, run.bake;
            PERFORM shardmap._update_canary(id, jsonb_build_object('state', 'baking', 'since', clock_timestamp()));
            RETURN 0;
        WHEN 'baking' THEN RETURN shardmap._bake_canary(run, job);
        WHEN 'taking_back' THEN RETURN shardmap._take_canary_back(run, job);
        ELSE RETURN shardmap._spread_canary(run);
    END CASE;
END
$$;
COMMENT ON FUNCTION shardmap._canary_step(bigint) IS 'takes the next step of a canary; returns the number of a move to be run, 0: none for now, NULL: there is no next step';

CREATE FUNCTION shardmap._conclude_canary(id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    run shardmap.canary_run;
BEGIN
    SELECT c.* INTO STRICT run FROM shardmap.canary_run c WHERE c.move = id;
    IF run.state = 'failed' THEN
        RAISE EXCEPTION 'the canary of keyspace "%" has failed: %', run.keyspace, run.verdict
            USING ERRCODE = 'object_not_in_prerequisite_state',
                DETAIL = format('Move %s was taken back. What was planned is planned, and not begun.', id),
                HINT = format('See shardmap.canaries. CALL shardmap.canary(%L) tries again.', run.keyspace);
    ELSIF run.finished_at IS NOT NULL THEN
        RAISE NOTICE 'the canary of keyspace "%" has %', run.keyspace, CASE run.state WHEN 'passed' THEN 'passed, and the other moves are done' ELSE 'been given up' END;
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._conclude_canary(bigint) IS 'says how a canary ended: an error if it has failed';

-- No search_path of its own: a procedure that has one cannot commit. It names everything in full, and uses no operator.
CREATE PROCEDURE shardmap.canary(
    keyspace text DEFAULT 'main',
    bake interval DEFAULT '10 minutes',
    baseline interval DEFAULT '1 minute',
    share double precision DEFAULT 0.05,
    max_error_rate double precision DEFAULT 0.01,
    max_slowdown double precision DEFAULT 2,
    min_statements bigint DEFAULT 100
)
LANGUAGE plpgsql AS $$
DECLARE
    id bigint := shardmap._begin_canary(keyspace, bake, baseline, share, max_error_rate, max_slowdown, min_statements);
    next bigint := 0;
BEGIN
    WHILE next IS NOT NULL LOOP
        COMMIT;
        next := shardmap._canary_step(id);
        IF pg_catalog.int8gt(next, 0) THEN
            COMMIT;
            CALL shardmap.run_move(next);
        END IF;
    END LOOP;
    PERFORM shardmap._release_move(id);
    COMMIT;
    PERFORM shardmap._conclude_canary(id);
END
$$;
COMMENT ON PROCEDURE shardmap.canary(text, interval, interval, double precision, double precision, double precision, bigint) IS
    'runs the planned moves of a keyspace, a small part of low traffic first: that bakes for a time, and is taken back, and nothing else moved, if rows differ, or errors or waits of its shards go beyond what they were before; after a failure or a crash it goes on where it was';

REVOKE ALL ON FUNCTION shardmap._canary_counters(shardmap.move), shardmap._canary_findings(shardmap.canary_run, shardmap.move),
    shardmap._canary_differences(shardmap.move),
    shardmap._begin_canary(text, interval, interval, double precision, double precision, double precision, bigint), shardmap._check_not_begun(text),
    shardmap._measure_canary(shardmap.canary_run, shardmap.move), shardmap._fail_canary(shardmap.canary_run, text),
    shardmap._look_at_canary(shardmap.canary_run, shardmap.move), shardmap._bake_canary(shardmap.canary_run, shardmap.move),
    shardmap._take_canary_back(shardmap.canary_run, shardmap.move), shardmap._spread_canary(shardmap.canary_run),
    shardmap._canary_step(bigint), shardmap._conclude_canary(bigint) FROM PUBLIC;
REVOKE ALL ON PROCEDURE shardmap.canary(text, interval, interval, double precision, double precision, double precision, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._canary_counters(shardmap.move), shardmap._canary_findings(shardmap.canary_run, shardmap.move),
    shardmap._canary_differences(shardmap.move),
    shardmap._begin_canary(text, interval, interval, double precision, double precision, double precision, bigint), shardmap._check_not_begun(text),
    shardmap._measure_canary(shardmap.canary_run, shardmap.move), shardmap._fail_canary(shardmap.canary_run, text),
    shardmap._look_at_canary(shardmap.canary_run, shardmap.move), shardmap._bake_canary(shardmap.canary_run, shardmap.move),
    shardmap._take_canary_back(shardmap.canary_run, shardmap.move), shardmap._spread_canary(shardmap.canary_run),
    shardmap._canary_step(bigint), shardmap._conclude_canary(bigint) TO shardmap_admin;
GRANT EXECUTE ON PROCEDURE shardmap.canary(text, interval, interval, double precision, double precision, double precision, bigint) TO shardmap_admin;
