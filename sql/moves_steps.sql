-- Moves: the steps.
--
-- Decides what is done in each state of a job. What always holds: a step is one local transaction, which can be broken
-- off anywhere and taken again; the state that it leads to is committed with what it has done. A step that reads from the
-- source in several statements has one snapshot of it (REPEATABLE READ here, and so there). The map is changed under a
-- lock that keeps all writers of the keyspace away, and those of the source's tables too, whoever they are; that lock is
-- held for shardmap.fence_timeout at most. Readers are never held up. Order of states: src/core/reshard. Read docs/moves.md.

-- Transactions that may read a keyspace's tables by a plan from before now.
CREATE FUNCTION shardmap._table_users(keyspace text) RETURNS text[]
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(array_agg(DISTINCT l.virtualtransaction), '{}') FROM pg_locks l
     WHERE l.locktype = 'relation' AND l.granted AND l.pid <> pg_backend_pid()
       AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
       AND l.relation IN (SELECT t.relation FROM shardmap.logical_table t WHERE t.keyspace = $1
            UNION ALL SELECT i.inhrelid FROM shardmap.logical_table t JOIN pg_inherits i ON i.inhparent = t.relation WHERE t.keyspace = $1)
$$;
COMMENT ON FUNCTION shardmap._table_users(text) IS 'transactions that have locked a logical table of a keyspace';
REVOKE ALL ON FUNCTION shardmap._table_users(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._table_users(text) TO shardmap_admin;

-- Whether all are gone who used the tables when this was first asked in the move's state.
CREATE FUNCTION shardmap._have_readers_gone(job shardmap.move) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    now_there text[] := shardmap._table_users(job.keyspace);
    left_over text[] := ARRAY(SELECT unnest(coalesce(job.readers, now_there)) INTERSECT SELECT unnest(now_there));
BEGIN
    IF left_over = '{}' THEN
        RETURN true;
    END IF;
    PERFORM shardmap._update_move(job.id, jsonb_build_object('readers', left_over));
    PERFORM pg_sleep(0.02);
    RETURN false;
END
$$;
COMMENT ON FUNCTION shardmap._have_readers_gone(shardmap.move) IS 'whether nobody reads any more by the map before; waits a little if not';
REVOKE ALL ON FUNCTION shardmap._have_readers_gone(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._have_readers_gone(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._fence_limit() RETURNS interval
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$ SELECT current_setting('shardmap.fence_timeout')::interval $$;
COMMENT ON FUNCTION shardmap._fence_limit() IS 'shardmap.fence_timeout';

-- Less than what makes Postgres look for deadlocks: it is the move that gives way, and no writer.
CREATE FUNCTION shardmap._lock_limit() RETURNS integer
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT greatest(EXTRACT(epoch FROM least(shardmap._fence_limit(), current_setting('deadlock_timeout')::interval * 0.8)) * 1000, 1)::integer
$$;
COMMENT ON FUNCTION shardmap._lock_limit() IS 'milliseconds for which a move waits for a lock';

CREATE FUNCTION shardmap._limit_locks() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$ SELECT set_config('lock_timeout', shardmap._lock_limit()::text, true) $$;
COMMENT ON FUNCTION shardmap._limit_locks() IS 'lets this transaction wait for locks, here and on shards, as long as a fence may last, and not until a deadlock is looked for';
REVOKE ALL ON FUNCTION shardmap._limit_locks() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._limit_locks() TO shardmap_admin;

-- First the target's rows are hidden; when nobody reads without the filter any more, changes are logged.
CREATE FUNCTION shardmap._prepare_move(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM shardmap.move_table t WHERE t.move = job.id)
        AND NOT EXISTS (SELECT FROM shardmap.hidden_rows h WHERE h.move = job.id)
    THEN
        PERFORM shardmap._hide_rows(job.id, job.target);
        PERFORM shardmap._update_move(job.id, jsonb_build_object('readers', NULL, 'replicates', job.engine = 'logical'));
        PERFORM shardmap._crash_here('move_hidden');
    ELSIF shardmap._have_readers_gone(job) THEN
        BEGIN
            PERFORM shardmap._limit_locks();
            IF job.replicates THEN
                PERFORM shardmap._begin_replication(job);
            ELSE
                PERFORM shardmap._install_log(job);
            END IF;
            PERFORM shardmap._crash_here('move_logging');
            PERFORM shardmap._update_move(job.id, '{"readers": null, "last_error": null}', 'prepared');
            RETURN 'snapshot';
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected THEN
                PERFORM shardmap._update_move(job.id, jsonb_build_object('last_error', SQLERRM));
        END;
        PERFORM pg_sleep(0.2 + random() * 0.3);
    END IF;
    RETURN 'plain';
END
$$;
COMMENT ON FUNCTION shardmap._prepare_move(shardmap.move) IS 'a step of a move that is prechecked';
REVOKE ALL ON FUNCTION shardmap._prepare_move(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._prepare_move(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._source_snapshot(job shardmap.move) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT r[1] FROM shardmap.remote_rows(job.source, shardmap._run_guard(job) || 'SELECT pg_catalog.pg_current_snapshot()::pg_catalog.text AS snapshot') r
$$;
COMMENT ON FUNCTION shardmap._source_snapshot(shardmap.move) IS 'what this step sees of the source''s transactions';
REVOKE ALL ON FUNCTION shardmap._source_snapshot(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._source_snapshot(shardmap.move) TO shardmap_admin;

-- A session that died may have left rows on the target that no committed watermark covers. Where the target would order the
-- primary key in another way than the source did, that says nothing: the table is copied from its beginning again.
CREATE FUNCTION shardmap._drop_uncovered(job shardmap.move) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved shardmap.move_table;
    dropped bigint;
    total bigint := 0;
BEGIN
    FOR moved IN SELECT t.* FROM shardmap.move_table t WHERE t.move = job.id AND NOT t.copied ORDER BY t.position LOOP
        IF moved.watermark IS NOT NULL AND shardmap._key_order(moved.relation, moved.key_columns, job.source)
            IS DISTINCT FROM shardmap._key_order(moved.relation, moved.key_columns, job.target)
        THEN
            PERFORM shardmap._restart_table(job.id, moved.position);
            moved.watermark := NULL;
        END IF;
        SELECT r[1] INTO dropped FROM shardmap.remote_rows(job.target, format('%sWITH gone AS (DELETE FROM ONLY %s WHERE %s AND %s '
            'RETURNING 1) SELECT pg_catalog.count(*)::pg_catalog.text AS rows FROM gone', shardmap._move_prefix(job),
            shardmap._shard_table(moved.relation), shardmap._beyond(job, moved, '>'), shardmap._move_condition(job, moved.relation))) r;
        total := total + dropped;
    END LOOP;
    RETURN total;
END
$$;
COMMENT ON FUNCTION shardmap._drop_uncovered(shardmap.move) IS 'deletes rows of a move on the target that are beyond the watermarks; returns their number';
REVOKE ALL ON FUNCTION shardmap._drop_uncovered(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._drop_uncovered(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._copy_batch(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved shardmap.move_table;
    snapshot text := shardmap._source_snapshot(job);
    recopied bigint := CASE WHEN job.resumed THEN shardmap._drop_uncovered(job) ELSE 0 END;
    changed bigint := shardmap._apply_changes(job);
    batch constant bigint := shardmap._move_batch();
    piped text[] := '{0,0}';
    is_last boolean := true;
BEGIN
    SELECT t.* INTO moved FROM shardmap.move_table t WHERE t.move = job.id AND NOT t.copied ORDER BY t.position LIMIT 1;
    IF FOUND THEN
        PERFORM shardmap._read_in_order(job, job.source);
        piped := shardmap._pipe_rows(job.source, format('SELECT %s FROM ONLY %s WHERE %s AND %s ORDER BY %s LIMIT %s',
                shardmap._name_list(moved.columns), shardmap._shard_table(moved.relation), shardmap._beyond(job, moved, '>'),
                shardmap._move_condition(job, moved.relation), shardmap._name_list(moved.key_columns), batch),
            job.target, format('%sCOPY %s (%s) FROM STDIN', shardmap._move_prefix(job), shardmap._shard_table(moved.relation),
                shardmap._name_list(moved.columns)), cardinality(moved.key_columns), true);
        PERFORM shardmap._update_move_table(job.id, moved.position, nullif(piped[3:], '{}'), piped[1]::bigint < batch, piped[1]::bigint);
        PERFORM shardmap._pace_rows(piped[1]::bigint);
        is_last := false;
    END IF;
    PERFORM shardmap._crash_here(CASE WHEN is_last THEN 'move_copied' ELSE 'move_batch' END);
    PERFORM shardmap._update_move(job.id, jsonb_build_object('snapshot', snapshot, 'resumed', false, 'last_error', shardmap._unknown_lag(),
            'rows_copied', job.rows_copied + piped[1]::bigint, 'bytes_copied', job.bytes_copied + piped[2]::bigint,
            'rows_recopied', job.rows_recopied + recopied, 'changes', job.changes + changed, 'last_changes', changed),
        CASE WHEN is_last THEN 'copied' END);
    RETURN 'snapshot';
END
$$;
COMMENT ON FUNCTION shardmap._copy_batch(shardmap.move) IS 'a step of a move that is copying';
REVOKE ALL ON FUNCTION shardmap._copy_batch(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._copy_batch(shardmap.move) TO shardmap_admin;

-- Few enough changes to apply them while writers wait.
CREATE FUNCTION shardmap._few_changes() RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$ SELECT 100::bigint $$;
COMMENT ON FUNCTION shardmap._few_changes() IS 'changes that may be left for the fence';

CREATE FUNCTION shardmap._catch_up(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    snapshot text := shardmap._source_snapshot(job);
    changed bigint := shardmap._apply_changes(job);
    is_small boolean := changed <= shardmap._few_changes();
    moved shardmap.move_table;
BEGIN
    IF job.state = 'verifying' THEN
        FOR moved IN SELECT t.* FROM shardmap.move_table t WHERE t.move = job.id ORDER BY t.position LOOP
            PERFORM shardmap._verify_moved(job, moved);
        END LOOP;
    END IF;
    PERFORM shardmap._crash_here(CASE job.state WHEN 'verifying' THEN 'move_verified' ELSE 'move_caught_up' END);
    job := shardmap._update_move(job.id, jsonb_build_object('snapshot', snapshot, 'last_error', NULL, 'changes', job.changes + changed,
            'last_changes', changed, 'verified', job.verified OR job.state = 'verifying'),
        CASE WHEN job.state = 'verifying' OR is_small AND job.verified THEN 'verified' WHEN is_small THEN 'caught_up' END);
    RETURN CASE job.state WHEN 'fencing' THEN 'plain' ELSE 'snapshot' END;
END
$$;
COMMENT ON FUNCTION shardmap._catch_up(shardmap.move) IS 'a step of a move that is catching up or verifying';
REVOKE ALL ON FUNCTION shardmap._catch_up(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._catch_up(shardmap.move) TO shardmap_admin;

-- EXCLUSIVE: whoever has locked a row to change it later counts as a writer.
CREATE FUNCTION shardmap._fence_tables(keyspace text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    names text;
BEGIN
    SELECT string_agg(shardmap._shard_table(t.relation), ', ' ORDER BY t.relation::oid) INTO names
      FROM shardmap.logical_table t WHERE t.keyspace = $1;
    IF names IS NOT NULL THEN
        EXECUTE format('LOCK TABLE %s IN EXCLUSIVE MODE', names);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._fence_tables(text) IS 'holds off all writers of a keyspace, and who locks rows, until the transaction ends';
REVOKE ALL ON FUNCTION shardmap._fence_tables(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._fence_tables(text) TO shardmap_admin;

CREATE FUNCTION shardmap._flip(id bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    job shardmap.move;
BEGIN
    SELECT m.* INTO STRICT job FROM shardmap.move m WHERE m.id = $1;
    job := shardmap._directed(job);
    PERFORM shardmap._next_move_state(job.state, 'flip', job.reversed);
    PERFORM shardmap._lock_keyspace(job.keyspace);
    PERFORM shardmap._check_source(job);
    PERFORM shardmap._give_part(job, job.target);
    RETURN shardmap._hide_rows(id, job.source);
END
$$;
COMMENT ON FUNCTION shardmap._flip(bigint) IS 'makes a move''s target the owner, hides the source''s rows instead, and publishes the map; returns its version';
REVOKE ALL ON FUNCTION shardmap._flip(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._flip(bigint) TO shardmap_admin;

-- A lock takes no snapshot. NULL: the move has no tables.
CREATE FUNCTION shardmap._fence_sql(job shardmap.move) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT 'LOCK TABLE ' || string_agg('ONLY ' || shardmap._shard_table(t.relation), ', ' ORDER BY t.position) || ' IN SHARE MODE'
      FROM shardmap.move_table t WHERE t.move = job.id
$$;
COMMENT ON FUNCTION shardmap._fence_sql(shardmap.move) IS 'statement that holds off, on its source, all who write to a move''s tables, until the transaction ends';
REVOKE ALL ON FUNCTION shardmap._fence_sql(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._fence_sql(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._fence_and_flip(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    backlog bigint;
    began timestamptz;
    pause interval;
    changed bigint := 0;
    version bigint;
    fence constant text := shardmap._run_guard(job) || shardmap._fence_sql(job);
    limits constant interval := shardmap._fence_limit();
BEGIN
    SELECT sum(r[1]::bigint) INTO backlog FROM shardmap.remote_rows(job.source, (
        SELECT string_agg(format('SELECT pg_catalog.count(*)::pg_catalog.text FROM (SELECT FROM %I.changes_%s c WHERE %s LIMIT %s) x',
            shardmap._move_schema(job), t.position, shardmap._unseen(job), shardmap._few_changes() + 1), ' UNION ALL ')
          FROM shardmap.move_table t WHERE t.move = job.id AND NOT job.replicates)) r;
    IF backlog > shardmap._few_changes() OR job.replicates AND NOT shardmap._has_replicated(job) THEN
        PERFORM shardmap._update_move(job.id, '{}', 'fell_behind');
        RETURN 'snapshot';
    ELSIF NOT job.logs_back THEN
        RETURN shardmap._prepare_back(job);
    END IF;
    BEGIN
        PERFORM shardmap._limit_locks();
        began := clock_timestamp();
        PERFORM shardmap._fence_tables(job.keyspace);
        -- Who writes there without us, or for a session here that has died, is waited for too, and sees to it that nobody begins.
        PERFORM shardmap.remote_execute(job.source, fence);
        PERFORM shardmap._crash_here('move_fenced');
        IF job.replicates THEN
            PERFORM shardmap._await_last_change(job, limits - (clock_timestamp() - began));
        ELSE
            changed := shardmap._apply_changes(job, fenced => true);
        END IF;
        PERFORM shardmap._raise_floor(job.target);
        version := shardmap._flip(job.id);
        pause := clock_timestamp() - began;
        IF pause > limits THEN
            RAISE EXCEPTION 'move % held off writers for %, longer than shardmap.fence_timeout', job.id, pause USING ERRCODE = 'lock_not_available';
        END IF;
        PERFORM shardmap._update_move(job.id, jsonb_build_object('flipped_at', coalesce(job.flipped_at, clock_timestamp()), 'pause', pause, 'map_version', version, 'snapshot', NULL,
            'fences', job.fences + 1, 'readers', NULL, 'last_error', NULL, 'changes', job.changes + changed, 'last_changes', changed), 'flip');
        PERFORM shardmap._crash_here('move_flip');
        RETURN 'plain';
    EXCEPTION
        WHEN lock_not_available OR deadlock_detected THEN
            PERFORM shardmap._update_move(job.id, jsonb_build_object('fences', job.fences + 1, 'last_error', SQLERRM), 'fell_behind');
    END;
    -- The writers go on meanwhile.
    PERFORM pg_sleep(0.2 + random() * 0.3);
    RETURN 'snapshot';
END
$$;
COMMENT ON FUNCTION shardmap._fence_and_flip(shardmap.move) IS 'a step of a move that is fencing';
REVOKE ALL ON FUNCTION shardmap._fence_and_flip(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._fence_and_flip(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._wait_to_clean(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    seconds double precision := EXTRACT(epoch FROM job.flipped_at - clock_timestamp() + current_setting('shardmap.cleanup_delay')::interval);
BEGIN
    PERFORM shardmap._crash_here('move_flipped');
    IF shardmap._is_canary(job.id) THEN
        RAISE NOTICE 'move % is a canary: what becomes of it is decided by shardmap.canary', job.id;
        RETURN NULL;
    ELSIF seconds > 0 THEN
        PERFORM pg_sleep(least(seconds, 0.5));
    ELSIF shardmap._have_readers_gone(job) THEN
        PERFORM shardmap._update_move(job.id, '{"readers": null}', 'released');
    END IF;
    RETURN 'plain';
END
$$;
COMMENT ON FUNCTION shardmap._wait_to_clean(shardmap.move) IS 'a step of a move that is flipped';
REVOKE ALL ON FUNCTION shardmap._wait_to_clean(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._wait_to_clean(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._clean(job shardmap.move, shard text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    deleted bigint := 0;
    has_written constant boolean := job.run IS NOT NULL;
BEGIN
    BEGIN
        PERFORM shardmap._limit_locks();
        IF has_written THEN
            PERFORM shardmap._remove_log(job);
        END IF;
    EXCEPTION
        WHEN lock_not_available OR deadlock_detected THEN
            PERFORM shardmap._update_move(job.id, jsonb_build_object('last_error', SQLERRM));
            PERFORM pg_sleep(0.2 + random() * 0.3);
            RETURN 'plain';
    END;
    IF has_written THEN
        deleted := shardmap._delete_moved(job, shard);
    END IF;
    PERFORM shardmap._crash_here(CASE job.state WHEN 'rolling_back' THEN 'move_rollback' WHEN 'cleaning' THEN 'move_cleaning' END);
    PERFORM shardmap._pace_rows(deleted);
    IF deleted = 0 THEN
        IF has_written THEN
            PERFORM shardmap._end_run(job);
            PERFORM shardmap._raise_floor(shard);
        END IF;
        PERFORM shardmap._hide_rows(job.id, NULL);
        PERFORM shardmap._update_move(job.id, jsonb_build_object('finished_at', clock_timestamp(), 'last_error', NULL, 'wish', NULL, 'readers', NULL), 'cleaned');
        PERFORM shardmap._crash_here('move_done');
        RETURN NULL;
    END IF;
    PERFORM shardmap._update_move(job.id, jsonb_build_object('rows_deleted', job.rows_deleted + deleted, 'last_error', shardmap._unknown_lag()));
    RETURN 'plain';
END
$$;
COMMENT ON FUNCTION shardmap._clean(shardmap.move, text) IS 'a step of a move that is cleaning or rolling back: deletes rows on a shard that does not own them';
REVOKE ALL ON FUNCTION shardmap._clean(shardmap.move, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._clean(shardmap.move, text) TO shardmap_admin;

-- Returns what the next step needs, "snapshot" or "plain"; NULL: there is none for now.
CREATE FUNCTION shardmap._move_step(id bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    job shardmap.move;
    has_snapshot constant boolean := current_setting('transaction_isolation') = 'repeatable read';
BEGIN
    PERFORM shardmap._hold_move(id);
    PERFORM shardmap._await_own_commits();
    job := shardmap._directed(shardmap._update_move(id, '{}'));
    IF job.wish = 'cancel' AND shardmap._can_cancel_move(job.state, job.reversed) THEN
        PERFORM shardmap._update_move(id, '{"wish": null, "readers": null}', 'cancel');
        RETURN 'plain';
    ELSIF job.wish = 'rollback' AND job.state = 'flipped' AND NOT job.replicates THEN
        PERFORM shardmap._check_not_replicated(job);
        PERFORM shardmap._update_move(id, '{"wish": null, "readers": null, "verified": false, "last_error": null}', 'reverse');
        PERFORM shardmap._crash_here('move_reversed');
        RETURN 'plain';
    ELSIF job.wish = 'pause' THEN
        RAISE NOTICE 'move % is paused', id USING HINT = format('Go on: SELECT shardmap.resume_move(%s); CALL shardmap.run_move(%1$s).', id);
        RETURN NULL;
    END IF;
    IF job.run = 0 THEN
        PERFORM shardmap._spare_source(job);
        PERFORM shardmap._update_move(id, jsonb_build_object('run', shardmap._take_over(job)));
        RETURN 'plain';
    END IF;
    IF job.replicates AND job.state IN ('flipped', 'cleaning', 'rolling_back') AND NOT has_snapshot THEN
        RETURN shardmap._end_replication(job);
    END IF;
    PERFORM shardmap._tell_progress(job);
    IF job.replicates AND has_snapshot = shardmap._move_needs_snapshot(job.state) AND job.state IN ('copying', 'catching_up', 'verifying') THEN
        RETURN shardmap._replication_step(job);
    END IF;
    IF (job.state IN ('cleaning', 'rolling_back') OR job.state = 'copying' AND NOT job.replicates) AND shardmap._wait_for_pace(job) THEN
        RETURN 'plain';
    ELSIF has_snapshot <> shardmap._move_needs_snapshot(job.state) THEN
        RETURN CASE WHEN has_snapshot THEN 'plain' ELSE 'snapshot' END;
    END IF;
    CASE job.state
        WHEN 'planned' THEN
            PERFORM shardmap._check_no_canary(job);
            PERFORM shardmap._update_move(id, jsonb_build_object('fires', shardmap._check_move(job), 'run', 0, 'last_error', NULL), 'checked');
            PERFORM shardmap._check_replication(job);
            RETURN 'plain';
        WHEN 'prechecked' THEN RETURN shardmap._prepare_move(job);
        WHEN 'copying' THEN
            PERFORM shardmap._forget_changes(job);
            RETURN shardmap._copy_batch(job);
        WHEN 'catching_up', 'verifying' THEN
            PERFORM shardmap._forget_changes(job);
            RETURN shardmap._catch_up(job);
        WHEN 'fencing' THEN RETURN shardmap._fence_and_flip(job);
        WHEN 'flipped' THEN RETURN shardmap._wait_to_clean(job);
        WHEN 'cleaning' THEN RETURN shardmap._clean(job, job.source);
        WHEN 'rolling_back' THEN RETURN shardmap._clean_target(job);
        ELSE RETURN NULL;
    END CASE;
END
$$;
COMMENT ON FUNCTION shardmap._move_step(bigint) IS 'takes the next step of a move; returns what the one after needs: snapshot or plain; NULL if there is none';
REVOKE ALL ON FUNCTION shardmap._move_step(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._move_step(bigint) TO shardmap_admin;

CREATE FUNCTION shardmap._begin_run(id bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    job shardmap.move := shardmap._find_move(id);
BEGIN
    IF job.state IN ('done', 'rolled_back') THEN
        RAISE NOTICE 'move % is %', id, replace(job.state, '_', ' ');
        RETURN NULL;
    END IF;
    PERFORM shardmap._check_no_block('shardmap.run_move');
    PERFORM shardmap._hold_move(id);
    job := shardmap._find_move(id);
    -- What a run before this one has left prepared on the shards is committed or rolled back first.
    PERFORM shardmap.resolve_transactions();
    PERFORM shardmap._update_move(id, jsonb_build_object('resumed', true, 'run', job.run * 0, 'started_at', coalesce(job.started_at, clock_timestamp())));
    RETURN 'plain';
END
$$;
COMMENT ON FUNCTION shardmap._begin_run(bigint) IS 'what comes before the first step of a run; returns what that needs';
REVOKE ALL ON FUNCTION shardmap._begin_run(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._begin_run(bigint) TO shardmap_admin;

-- No search_path of its own: a procedure that has one cannot commit. It names everything in full, and uses no operator.
CREATE PROCEDURE shardmap.run_move(id bigint)
LANGUAGE plpgsql AS $$
DECLARE
    next text := shardmap._begin_run(id);
    failed boolean := false;
    code text;
    said text;
    detail text;
    hint text;
BEGIN
    WHILE next IS NOT NULL LOOP
        IF pg_catalog.texteq(next, 'snapshot') THEN
            COMMIT; -- nothing may come between
            SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
        ELSE
            COMMIT;
        END IF;
        BEGIN
            next := shardmap._move_step(id);
        EXCEPTION
            WHEN serialization_failure THEN NULL; -- another session has run it, or asked for something: again
            WHEN OTHERS THEN
                GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, said = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
                failed := true;
        END;
        IF failed THEN
            COMMIT;
            PERFORM shardmap._update_move(id, pg_catalog.jsonb_build_object('last_error', said));
            PERFORM shardmap._release_move(id);
            COMMIT;
            RAISE EXCEPTION USING ERRCODE = code, MESSAGE = said,
                DETAIL = CASE WHEN pg_catalog.texteq(detail, '') THEN pg_catalog.format('Move %s has stopped.', id) ELSE detail END,
                HINT = CASE WHEN pg_catalog.texteq(hint, '') THEN pg_catalog.format('CALL shardmap.run_move(%s) goes on where it was.', id) ELSE hint END;
        END IF;
    END LOOP;
    PERFORM shardmap._release_move(id);
END
$$;
COMMENT ON PROCEDURE shardmap.run_move(bigint) IS 'runs a move to its end, step by step, each committed; after a failure or a crash it goes on where it was';
REVOKE ALL ON PROCEDURE shardmap.run_move(bigint) FROM PUBLIC;
GRANT EXECUTE ON PROCEDURE shardmap.run_move(bigint) TO shardmap_admin;
