-- Moves: by logical replication, instead of copying in batches and logging by triggers.
--
-- Decides how a move with engine "logical" brings rows to the target: a publication on the source with the part's condition as
-- its row filter, a slot, and a subscription on the target that copies and then follows. What always holds: what the target
-- has is known by a mark, a row of a table of the move's own that is replicated like the others: where it is, all is that was
-- committed before it; writers are held off until a mark has come, before rows are compared and before the map changes;
-- subscription, slot and publication are gone before a row is deleted, or taken back. Refuses shards that lack what
-- logical replication needs, before anything is written. After the flip, the way back is that of every move: moves_back.sql.
-- What is made here commits by itself, each statement: read `_begin_replication` for why that can be done again anywhere.

CREATE FUNCTION shardmap._subscribe(target text, source text, command text, transactional boolean) RETURNS void
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'subscribe_wrapper';
COMMENT ON FUNCTION shardmap._subscribe(text, text, text, boolean) IS
    'runs a command on the target in which %s stands for the literal by which it reaches the source, which nobody gets to see';
REVOKE ALL ON FUNCTION shardmap._subscribe(text, text, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._subscribe(text, text, text, boolean) TO shardmap_admin;

-- Names of slots are a server's: those of two databases must differ.
CREATE FUNCTION shardmap._slot_name(job shardmap.move) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT r[1] FROM shardmap.remote_rows(job.source, format(
        'SELECT %L || d.oid::text AS name FROM pg_catalog.pg_database d WHERE d.datname = current_database()', shardmap._move_schema(job.id) || '_'), false) r
$$;
COMMENT ON FUNCTION shardmap._slot_name(shardmap.move) IS 'name of the replication slot of a move on its source';
REVOKE ALL ON FUNCTION shardmap._slot_name(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._slot_name(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._publication_sql(job shardmap.move, further text DEFAULT '') RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('CREATE PUBLICATION %I FOR TABLE %s%s WITH (publish = ''insert, update, delete'')', shardmap._move_schema(job.id),
        string_agg(format('ONLY %s WHERE (%s)', shardmap._shard_table(t.relation), shardmap._move_condition(job, t.relation)), ', ' ORDER BY t.position), further)
      FROM shardmap.move_table t WHERE t.move = job.id
$$;
COMMENT ON FUNCTION shardmap._publication_sql(shardmap.move, text) IS 'makes the publication of a move, on its source';
REVOKE ALL ON FUNCTION shardmap._publication_sql(shardmap.move, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._publication_sql(shardmap.move, text) TO shardmap_admin;

-- Slots of the move on its source, those of tables being copied too (their names match `pattern`), and who uses them there. What is
-- in use after two seconds is ended.
CREATE FUNCTION shardmap._drop_slots(job shardmap.move, pattern text, is_late boolean) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    condition constant text := format('s.database = current_database() AND (s.slot_name = %L OR s.slot_name ~ %L)', shardmap._slot_name(job), pattern);
    user_of text;
    is_used boolean := false;
BEGIN
    BEGIN
        PERFORM shardmap.remote_rows(job.source, format(
            'SELECT s.slot_name::text FROM pg_catalog.pg_replication_slots s, LATERAL pg_catalog.pg_drop_replication_slot(s.slot_name) WHERE NOT s.active AND %s', condition), false);
    EXCEPTION
        WHEN object_in_use OR undefined_object THEN NULL;
    END;
    FOR user_of IN SELECT r[1] FROM shardmap.remote_rows(job.source, format('SELECT s.active_pid::text FROM pg_catalog.pg_replication_slots s WHERE %s '
        'UNION SELECT w.pid::text FROM pg_catalog.pg_stat_replication w WHERE w.application_name ~ %L', condition, pattern), false) r
    LOOP
        is_used := true;
        IF is_late AND user_of IS NOT NULL THEN
            PERFORM shardmap.remote_rows(job.source, format('SELECT pg_catalog.pg_terminate_backend(%s)::text AS ended', user_of), false);
        END IF;
    END LOOP;
    RETURN NOT is_used;
END
$$;
COMMENT ON FUNCTION shardmap._drop_slots(shardmap.move, text, boolean) IS 'drops the replication slots of a move; false: they are still in use';
REVOKE ALL ON FUNCTION shardmap._drop_slots(shardmap.move, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._drop_slots(shardmap.move, text, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap._stop_workers(job shardmap.move, subscription text, is_late boolean) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker text;
    is_running boolean := false;
BEGIN
    FOR worker IN SELECT r[1] FROM shardmap.remote_rows(job.target, format(
        'SELECT w.pid::text FROM pg_catalog.pg_stat_subscription w WHERE w.subid = %s AND w.pid IS NOT NULL', subscription), false) r
    LOOP
        is_running := true;
        IF is_late THEN
            PERFORM shardmap.remote_rows(job.target, format('SELECT pg_catalog.pg_terminate_backend(%s)::text AS ended', worker), false);
        END IF;
    END LOOP;
    RETURN NOT is_running;
END
$$;
COMMENT ON FUNCTION shardmap._stop_workers(shardmap.move, text, boolean) IS 'ends the workers of a disabled subscription, if they are late to end themselves; false: some run';
REVOKE ALL ON FUNCTION shardmap._stop_workers(shardmap.move, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._stop_workers(shardmap.move, text, boolean) TO shardmap_admin;

-- First nobody is left who could make a slot: DROP SUBSCRIPTION would wait for one that is being made on its own server, and
-- that for all transactions there. It is told another address, so that it does not ask the source at all. The subscription
-- goes last on the target: it knows the names of slots of tables.
CREATE FUNCTION shardmap._unsubscribe(job shardmap.move) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name constant text := quote_ident(shardmap._move_schema(job.id));
    guard constant text := shardmap._run_guard(job) || 'SET LOCAL client_min_messages = error; ';
    began constant timestamptz := clock_timestamp();
    subscription text[];
    is_late boolean := false;
BEGIN
    SELECT r INTO subscription FROM shardmap.remote_rows(job.target, format('SELECT s.oid::text, s.subenabled::text, '
        'pg_catalog.format(''^pg_%%s_sync_[0-9]+_%%s$'', s.oid, c.system_identifier) FROM pg_catalog.pg_subscription s, pg_catalog.pg_control_system() c '
        'WHERE s.subname = %L AND s.subdbid = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())', name), false) r;
    IF subscription[2]::boolean THEN
        PERFORM shardmap.remote_execute(job.target, format('%sALTER SUBSCRIPTION %s DISABLE', guard, name), false);
    END IF;
    WHILE subscription IS NOT NULL AND NOT shardmap._stop_workers(job, subscription[1], is_late)
        OR NOT shardmap._drop_slots(job, coalesce(subscription[3], '^$'), is_late)
    LOOP
        IF clock_timestamp() > began + interval '10 seconds' THEN
            RETURN false;
        END IF;
        is_late := clock_timestamp() > began + interval '2 seconds';
        PERFORM pg_sleep(0.05);
    END LOOP;
    IF subscription IS NOT NULL THEN
        PERFORM shardmap.remote_execute(job.target, format('%sALTER SUBSCRIPTION %s SET (slot_name = NONE)', guard, name), false);
        PERFORM shardmap.remote_execute(job.target, format('%sALTER SUBSCRIPTION %s CONNECTION %L', guard, name, 'host=/ dbname=none user=none password=none'), false);
        PERFORM shardmap._crash_here('move_unsubscribing');
        PERFORM shardmap.remote_execute(job.target, format('%sDROP SUBSCRIPTION %s', guard, name), false);
    END IF;
    PERFORM shardmap.remote_execute(job.source, format('%sDROP PUBLICATION IF EXISTS %s', guard, name), false);
    RETURN true;
END
$$;
COMMENT ON FUNCTION shardmap._unsubscribe(shardmap.move) IS 'drops subscription, slots and publication of a move, as far as there are any; false: they are still in use';
REVOKE ALL ON FUNCTION shardmap._unsubscribe(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._unsubscribe(shardmap.move) TO shardmap_admin;

-- Where the target cannot be asked the move's slot goes all the same, when it is not wanted any more: it would keep the
-- source's write-ahead log.
CREATE FUNCTION shardmap._spare_source(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF job.replicates AND job.state IN ('flipped', 'cleaning', 'rolling_back') THEN
        PERFORM shardmap.remote_rows(job.target, 'SELECT ''x'' AS answer', false);
    END IF;
EXCEPTION
    WHEN OTHERS THEN
        FOR attempt IN 1..20 LOOP
            EXIT WHEN shardmap._drop_slots(job, '^$', true);
            PERFORM pg_sleep(0.1);
        END LOOP;
        RAISE;
END
$$;
COMMENT ON FUNCTION shardmap._spare_source(shardmap.move) IS 'drops the slot of a move that needs it no more, before the error that its target cannot be asked';
REVOKE ALL ON FUNCTION shardmap._spare_source(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._spare_source(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._end_replication(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap._crash_here('move_unsubscribe');
    IF shardmap._unsubscribe(job) THEN
        PERFORM shardmap._update_move(job.id, '{"replicates": false, "last_error": null}');
        PERFORM shardmap._crash_here('move_unsubscribed');
    ELSE
        PERFORM shardmap._update_move(job.id, jsonb_build_object('last_error', format('waits: the replication slot on shard "%s" is in use', job.source)));
    END IF;
    RETURN 'plain';
END
$$;
COMMENT ON FUNCTION shardmap._end_replication(shardmap.move) IS 'a step of a move that replicates and needs to no more';
REVOKE ALL ON FUNCTION shardmap._end_replication(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._end_replication(shardmap.move) TO shardmap_admin;

-- Else what is deleted on the source would be on the target too.
CREATE FUNCTION shardmap._check_not_replicated(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    source constant text := CASE WHEN job.reversed THEN job.target ELSE job.source END;
BEGIN
    job.source := source;
    IF job.engine = 'logical' AND EXISTS (SELECT FROM shardmap.remote_rows(source, format(
        'SELECT ''x'' AS found FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = %L', shardmap._slot_name(job)), false))
    THEN
        RAISE EXCEPTION 'changes on shard "%" are still replicated by move %', source, job.id
            USING ERRCODE = 'object_in_use', DETAIL = format('There is a replication slot "%s" there.', shardmap._slot_name(job)),
                HINT = 'Nothing was deleted or taken back. Drop the subscription of that name on the other shard, and the slot.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_not_replicated(shardmap.move) IS 'raises an error if changes on a move''s source still reach its target';
REVOKE ALL ON FUNCTION shardmap._check_not_replicated(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_not_replicated(shardmap.move) TO shardmap_admin;

-- Whatever an attempt before has left goes first, with the rows that it brought. The publication comes before the slot: what
-- is decoded must know it. The slot is made here, for a subscription cannot make one on its own server; it waits for all
-- transactions there that have written.
CREATE FUNCTION shardmap._begin_replication(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    schema constant text := quote_ident(shardmap._move_schema(job.id));
    slot constant text := shardmap._slot_name(job);
    quiet constant text := shardmap._run_guard(job) || 'SET LOCAL client_min_messages = error; ';
    moved shardmap.move_table;
BEGIN
    IF NOT shardmap._unsubscribe(job) THEN
        RAISE EXCEPTION 'the replication slot "%" on shard "%" is in use', slot, job.source USING ERRCODE = 'lock_not_available';
    END IF;
    FOR moved IN SELECT t.* FROM shardmap.move_table t WHERE t.move = job.id LOOP
        PERFORM shardmap.remote_execute(job.target, format('%sDELETE FROM ONLY %s WHERE %s', shardmap._move_prefix(job),
            shardmap._shard_table(moved.relation), shardmap._move_condition(job, moved.relation)), false);
    END LOOP;
    PERFORM shardmap.remote_execute(s, format('%sDROP SCHEMA IF EXISTS %s CASCADE; CREATE SCHEMA %2$s; CREATE TABLE %2$s.mark (id pg_catalog.int8 PRIMARY KEY)', quiet, schema), false)
        FROM unnest(ARRAY[job.source, job.target]) s;
    PERFORM shardmap.remote_execute(job.source, quiet || shardmap._publication_sql(job, format(', %s.mark', schema)), false);
    PERFORM shardmap.remote_rows(job.source, format('%sSET LOCAL lock_timeout = ''5s''; SELECT (pg_catalog.pg_create_logical_replication_slot(%L, ''pgoutput'')).slot_name::text', quiet, slot), false);
    PERFORM shardmap._crash_here('move_subscribing');
    PERFORM shardmap._subscribe(job.target, job.source, quiet || format('CREATE SUBSCRIPTION %s CONNECTION %%s PUBLICATION %1$s '
        'WITH (connect = false, slot_name = %L, streaming = off, disable_on_error = true)', schema, slot), false);
    PERFORM shardmap.remote_execute(job.target, format('%sALTER SUBSCRIPTION %s ENABLE', quiet, schema), false);
    PERFORM shardmap.remote_execute(job.target, format('ALTER SUBSCRIPTION %s REFRESH PUBLICATION', schema), false);
END
$$;
COMMENT ON FUNCTION shardmap._begin_replication(shardmap.move) IS 'lets rows of a move be replicated from its source to its target';
REVOKE ALL ON FUNCTION shardmap._begin_replication(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._begin_replication(shardmap.move) TO shardmap_admin;

-- What is known of a subscription: whether it is enabled, tables that are not copied, running workers, rows and bytes
-- that are being copied. In sessions of their own: a step's transaction is to take its snapshot later.
CREATE FUNCTION shardmap._replication_progress(job shardmap.move) RETURNS text[]
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT r FROM shardmap.remote_rows(job.target, format($query$
        SELECT s.subenabled::text, (SELECT count(*) FROM pg_catalog.pg_subscription_rel r WHERE r.srsubid = s.oid AND r.srsubstate NOT IN ('s', 'r'))::text,
            (SELECT count(*) FROM pg_catalog.pg_stat_subscription w WHERE w.subid = s.oid AND w.pid IS NOT NULL)::text,
            (SELECT coalesce(sum(c.tuples_processed), 0) FROM pg_catalog.pg_stat_progress_copy c WHERE c.pid IN (
                SELECT w.pid FROM pg_catalog.pg_stat_subscription w WHERE w.subid = s.oid AND w.relid IS NOT NULL))::text,
            (SELECT array_agg(r.srrelid::pg_catalog.regclass::text) FROM pg_catalog.pg_subscription_rel r WHERE r.srsubid = s.oid AND r.srsubstate IN ('s', 'r'))::text
          FROM pg_catalog.pg_subscription s
         WHERE s.subname = %L AND s.subdbid = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
        $query$, shardmap._move_schema(job.id)), false) r
$$;
COMMENT ON FUNCTION shardmap._replication_progress(shardmap.move) IS 'what the target knows of a move''s subscription; NULL: there is none';
REVOKE ALL ON FUNCTION shardmap._replication_progress(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._replication_progress(shardmap.move) TO shardmap_admin;

-- Returns why it does not get on, if that may mend itself. A run that takes a move up lets a subscription go on that an
-- error has stopped; then rows are compared again.
CREATE FUNCTION shardmap._check_subscription(job shardmap.move, progress text[]) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    slot text[];
BEGIN
    SELECT r INTO slot FROM shardmap.remote_rows(job.source, format(
        'SELECT s.wal_status::text, s.active::text FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = %L', shardmap._slot_name(job)), false) r;
    IF slot IS NULL OR coalesce(slot[1], 'lost') = 'lost' OR progress IS NULL THEN
        RAISE EXCEPTION '% of move % on shard "%" is lost', CASE WHEN progress IS NULL THEN 'subscription' ELSE 'replication slot' END, job.id,
                CASE WHEN progress IS NULL THEN job.target ELSE job.source END
            USING ERRCODE = 'object_not_in_prerequisite_state',
                DETAIL = 'Somebody has dropped it, or the target fell behind more than max_slot_wal_keep_size on the source. Nothing was flipped.',
                HINT = format('Give the move up with shardmap.cancel_move(%s), and plan it again.', job.id);
    ELSIF NOT progress[1]::boolean AND job.resumed THEN
        PERFORM shardmap.remote_execute(job.target, format('%sALTER SUBSCRIPTION %I ENABLE', shardmap._run_guard(job), shardmap._move_schema(job.id)), false);
        PERFORM shardmap._update_move(job.id, '{"verified": false}');
    ELSIF NOT progress[1]::boolean THEN
        RAISE EXCEPTION 'subscription of move % on shard "%" was stopped by an error', job.id, job.target
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = 'The log of that server tells which. Nothing was flipped.',
                HINT = format('See to it; then CALL shardmap.run_move(%s) lets the subscription go on.', job.id);
    END IF;
    RETURN CASE WHEN progress[3]::integer = 0 THEN format('waits: no worker replicates on shard "%s"; its log may tell why', job.target)
        WHEN NOT slot[2]::boolean THEN format('waits: shard "%s" is not connected to shard "%s"; its log may tell why', job.target, job.source) END;
END
$$;
COMMENT ON FUNCTION shardmap._check_subscription(shardmap.move, text[]) IS 'raises an error if a move''s replication has ended; returns what it waits for, if it does';
REVOKE ALL ON FUNCTION shardmap._check_subscription(shardmap.move, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_subscription(shardmap.move, text[]) TO shardmap_admin;

-- Flushed at once, or the source would not send it yet; no standby is waited for. Returns its number and the snapshot from before.
CREATE FUNCTION shardmap._set_mark(job shardmap.move) RETURNS text[]
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT r FROM shardmap.remote_rows(job.source, format('%1$sSET LOCAL synchronous_commit = local; INSERT INTO %2$I.mark AS m (id) '
        'SELECT coalesce(pg_catalog.max(o.id), 0) + 1 FROM %2$I.mark o RETURNING m.id::text, pg_catalog.pg_current_snapshot()::text', shardmap._run_guard(job), shardmap._move_schema(job.id)), false) r
$$;
COMMENT ON FUNCTION shardmap._set_mark(shardmap.move) IS 'sets a mark on the source: when the target has it, it has all that was committed before';
REVOKE ALL ON FUNCTION shardmap._set_mark(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._set_mark(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._sees_mark(job shardmap.move, shard text, mark text, transactional boolean) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM shardmap.remote_rows(shard, format('SELECT ''x'' AS found FROM %I.mark WHERE id = %s', shardmap._move_schema(job.id), mark), transactional))
$$;
COMMENT ON FUNCTION shardmap._sees_mark(shardmap.move, text, text, boolean) IS 'whether a shard has a mark; transactional: in the snapshot of this transaction';
REVOKE ALL ON FUNCTION shardmap._sees_mark(shardmap.move, text, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._sees_mark(shardmap.move, text, text, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap._await_mark(job shardmap.move, mark text, deadline timestamptz) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    WHILE NOT shardmap._sees_mark(job, job.target, mark, false) LOOP
        IF clock_timestamp() > deadline THEN
            RETURN false;
        END IF;
        PERFORM pg_sleep(0.003);
    END LOOP;
    RETURN true;
END
$$;
COMMENT ON FUNCTION shardmap._await_mark(shardmap.move, text, timestamptz) IS 'waits until the target has a mark; false: it has not in time';
REVOKE ALL ON FUNCTION shardmap._await_mark(shardmap.move, text, timestamptz) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._await_mark(shardmap.move, text, timestamptz) TO shardmap_admin;

-- Before writers are held off: whether the target is so near that it will have the last change in time.
CREATE FUNCTION shardmap._has_replicated(job shardmap.move) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._await_mark(job, (shardmap._set_mark(job))[1], clock_timestamp() + shardmap._fence_limit() / 2)
$$;
COMMENT ON FUNCTION shardmap._has_replicated(shardmap.move) IS 'whether the target follows the source closely enough for a fence';
REVOKE ALL ON FUNCTION shardmap._has_replicated(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._has_replicated(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._await_last_change(job shardmap.move, "limit" interval) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT shardmap._await_mark(job, (shardmap._set_mark(job))[1], clock_timestamp() + "limit") THEN
        RAISE EXCEPTION 'shard "%" had not all changes of move % within shardmap.fence_timeout', job.target, job.id USING ERRCODE = 'lock_not_available';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._await_last_change(shardmap.move, interval) IS 'waits, under the fence, until the target has all changes; an error if it has not in time';
REVOKE ALL ON FUNCTION shardmap._await_last_change(shardmap.move, interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._await_last_change(shardmap.move, interval) TO shardmap_admin;

-- One point in time on both sides: writers to the source are held off until the target has the mark; then each side's
-- transaction takes its snapshot, which stays when the savepoint, and with it the lock, is gone. That neither took it too early
-- is seen by the mark. (LOCK and SET take none.)
CREATE FUNCTION shardmap._meet_at_mark(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    fence constant text := shardmap._fence_sql(job);
    mark text;
    began timestamptz;
    said text;
BEGIN
    -- Here both transactions begin, or they would end with the savepoint.
    PERFORM shardmap.remote_execute(s, format('%sSET LOCAL lock_timeout = %s', shardmap._run_guard(job), shardmap._lock_limit())) FROM unnest(ARRAY[job.source, job.target]) s;
    BEGIN
        began := clock_timestamp();
        PERFORM shardmap.remote_execute(job.source, fence);
        mark := (shardmap._set_mark(job))[1];
        said := CASE WHEN NOT shardmap._await_mark(job, mark, began + shardmap._fence_limit()) THEN 'waits: the target does not follow within shardmap.fence_timeout'
            WHEN NOT shardmap._sees_mark(job, job.source, mark, true) OR NOT shardmap._sees_mark(job, job.target, mark, true) THEN 'waits for a common snapshot' END;
        RAISE EXCEPTION USING ERRCODE = 'SM001', MESSAGE = 'lifts the lock';
    EXCEPTION
        WHEN SQLSTATE 'SM001' THEN NULL;
        WHEN lock_not_available OR deadlock_detected THEN said := SQLERRM;
    END;
    RETURN said;
END
$$;
COMMENT ON FUNCTION shardmap._meet_at_mark(shardmap.move) IS 'lets this transaction see source and target as they were at one moment, both with the same changes; returns why it does not';
REVOKE ALL ON FUNCTION shardmap._meet_at_mark(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._meet_at_mark(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._verify_replicated(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    said constant text := shardmap._meet_at_mark(job);
    moved shardmap.move_table;
BEGIN
    IF said IS NOT NULL THEN
        -- What sessions carry over is sent before the next transaction then.
        PERFORM shardmap.remote_rows(s, 'SELECT 1::text') FROM unnest(ARRAY[job.source, job.target]) s;
        PERFORM shardmap._update_move(job.id, jsonb_build_object('fences', job.fences + 1, 'last_error', said));
        PERFORM pg_sleep(0.1 + random() * 0.2);
        RETURN 'snapshot';
    END IF;
    FOR moved IN SELECT t.* FROM shardmap.move_table t WHERE t.move = job.id ORDER BY t.position LOOP
        PERFORM shardmap._verify_moved(job, moved);
    END LOOP;
    PERFORM shardmap._crash_here('move_verified');
    PERFORM shardmap._update_move(job.id, jsonb_build_object('fences', job.fences + 1, 'last_error', NULL, 'verified', true), 'verified');
    RETURN 'plain';
END
$$;
COMMENT ON FUNCTION shardmap._verify_replicated(shardmap.move) IS 'a step of a move that is verifying, and replicates';
REVOKE ALL ON FUNCTION shardmap._verify_replicated(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._verify_replicated(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._follow_copying(job shardmap.move, progress text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved shardmap.move_table;
    counted text[];
    rows bigint := 0;
    bytes bigint := 0;
BEGIN
    FOR moved IN
        SELECT t.* FROM shardmap.move_table t WHERE t.move = job.id AND NOT t.copied
           AND t.relation::text = ANY (progress[5]::text[]) ORDER BY t.position
    LOOP
        SELECT r INTO counted FROM shardmap.remote_rows(job.target, format('SELECT pg_catalog.count(*)::text, coalesce(pg_catalog.sum(pg_catalog.pg_column_size(t.*)), 0)::text '
            'FROM ONLY %s t WHERE %s', shardmap._shard_table(moved.relation), shardmap._move_condition(job, moved.relation, 't.')), false) r;
        PERFORM shardmap._update_move_table(job.id, moved.position, NULL, true, counted[1]::bigint);
        bytes := bytes + counted[2]::bigint;
    END LOOP;
    SELECT coalesce(sum(t.rows_copied), 0) INTO rows FROM shardmap.move_table t WHERE t.move = job.id;
    PERFORM shardmap._update_move(job.id, jsonb_build_object('rows_copied', rows + progress[4]::bigint, 'bytes_copied', job.bytes_copied + bytes));
END
$$;
COMMENT ON FUNCTION shardmap._follow_copying(shardmap.move, text[]) IS 'notes how many rows of a move the target''s subscription has copied';
REVOKE ALL ON FUNCTION shardmap._follow_copying(shardmap.move, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._follow_copying(shardmap.move, text[]) TO shardmap_admin;

CREATE FUNCTION shardmap._replication_step(job shardmap.move) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    progress constant text[] := shardmap._replication_progress(job);
    waits constant text := shardmap._check_subscription(job, progress);
    mark text[];
BEGIN
    job := shardmap._update_move(job.id, jsonb_build_object('resumed', false, 'last_error', waits));
    IF job.state = 'copying' THEN
        PERFORM shardmap._follow_copying(job, progress);
        IF progress[2] = '0' THEN
            PERFORM shardmap._crash_here('move_copied');
            PERFORM shardmap._update_move(job.id, '{}', 'copied');
        ELSE
            PERFORM shardmap._crash_here('move_batch');
            PERFORM pg_sleep(0.1);
        END IF;
        RETURN 'snapshot';
    ELSIF job.state = 'verifying' THEN
        RETURN shardmap._verify_replicated(job);
    END IF;
    mark := shardmap._set_mark(job);
    IF NOT shardmap._await_mark(job, mark[1], clock_timestamp() + shardmap._fence_limit() / 2) THEN
        PERFORM shardmap._update_move(job.id, jsonb_build_object('last_error', coalesce(waits, 'waits: the target does not follow within half of shardmap.fence_timeout')));
        PERFORM pg_sleep(0.1);
        RETURN 'snapshot';
    END IF;
    PERFORM shardmap._crash_here('move_caught_up');
    job := shardmap._update_move(job.id, jsonb_build_object('snapshot', mark[2], 'last_error', NULL), CASE WHEN job.verified THEN 'verified' ELSE 'caught_up' END);
    RETURN CASE job.state WHEN 'fencing' THEN 'plain' ELSE 'snapshot' END;
END
$$;
COMMENT ON FUNCTION shardmap._replication_step(shardmap.move) IS 'a step of a move that replicates, and is copying, catching up or verifying';
REVOKE ALL ON FUNCTION shardmap._replication_step(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._replication_step(shardmap.move) TO shardmap_admin;
