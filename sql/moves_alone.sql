-- Moves: one run at a time, on the shards too.
--
-- Decides whose statements a shard still takes. A run that lost its connection, or whose server is gone, may have sent a
-- statement that comes late, or left a transaction open of which the shard does not know that nobody will end it. What
-- always holds: for the time of a move each of its shards has a schema shardmap_move_ID_run with one table, named after the
-- run that goes on now; every transaction of a move that writes there or holds locks begins by locking that table. A new
-- run ends the sessions that hold the lock, drops the table and makes one of its own: so what comes from a run before it
-- fails, for want of its table, and what was under way is rolled back. The table goes last. Read moves_floors.sql next.

CREATE FUNCTION shardmap._run_schema(id bigint) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$ SELECT format('shardmap_move_%s_run', id) $$;
COMMENT ON FUNCTION shardmap._run_schema(bigint) IS 'schema, on a move''s shards, of the table that names the run';

-- No dump and no reader takes that lock.
CREATE FUNCTION shardmap._run_guard(job shardmap.move) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(format('LOCK TABLE %I.run_%s IN ROW SHARE MODE; ', shardmap._run_schema(job.id), job.run), '')
$$;
COMMENT ON FUNCTION shardmap._run_guard(shardmap.move) IS 'before statements of a move: lets them fail if another run goes on now';

-- Those of other users are waited for.
CREATE FUNCTION shardmap._end_old_run(id bigint, shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap.remote_rows(shard, format($query$
        SELECT pg_catalog.pg_terminate_backend(l.pid)::pg_catalog.text
          FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
         WHERE l.locktype = 'relation' AND l.mode = 'RowShareLock' AND l.pid <> pg_catalog.pg_backend_pid() AND a.usename = current_user
           AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
           AND l.relation IN (SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %L)
        $query$, shardmap._run_schema(id)), false);
EXCEPTION
    WHEN insufficient_privilege THEN NULL; -- they are waited for
END
$$;
COMMENT ON FUNCTION shardmap._end_old_run(bigint, text) IS 'ends sessions on a shard that a run of a move before this one has left in a transaction';
REVOKE ALL ON FUNCTION shardmap._end_old_run(bigint, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._end_old_run(bigint, text) TO shardmap_admin;

-- By itself on each shard: should that of one be lost with this server, the next run does it again. Returns the run's number.
CREATE FUNCTION shardmap._take_over(job shardmap.move) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    run constant bigint := pg_current_xact_id()::text::bigint;
    shard text;
BEGIN
    FOREACH shard IN ARRAY ARRAY[job.source, job.target] LOOP
        FOR attempt IN 1..10 LOOP
            PERFORM shardmap._end_old_run(job.id, shard);
            BEGIN
                PERFORM shardmap.remote_execute(shard, format('SET LOCAL client_min_messages = error; SET LOCAL lock_timeout = ''1s''; '
                    'DROP SCHEMA IF EXISTS %I CASCADE; CREATE SCHEMA %1$I; CREATE TABLE %1$I.run_%s ()', shardmap._run_schema(job.id), run), false);
                EXIT;
            EXCEPTION
                WHEN lock_not_available THEN
                    IF attempt = 10 THEN
                        RAISE EXCEPTION 'a run of move % before this one has not ended on shard "%"', job.id, shard
                            USING ERRCODE = 'object_in_use', DETAIL = format('Its transaction there holds a lock on a table in schema %s.', shardmap._run_schema(job.id)),
                                HINT = 'Look there in pg_locks and pg_prepared_xacts, end it, and run the move again. See shardmap.in_doubt before.';
                    END IF;
            END;
            -- What was about to be prepared may be so by now.
            PERFORM shardmap.resolve_transactions();
        END LOOP;
    END LOOP;
    RETURN run;
END
$$;
COMMENT ON FUNCTION shardmap._take_over(shardmap.move) IS 'makes sure that nothing of a run before this one happens on a move''s shards any more; returns this one''s number';
REVOKE ALL ON FUNCTION shardmap._take_over(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._take_over(shardmap.move) TO shardmap_admin;

-- With this transaction, which may hold its lock.
CREATE FUNCTION shardmap._end_run(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shard text;
BEGIN
    FOREACH shard IN ARRAY ARRAY[job.source, job.target] LOOP
        PERFORM shardmap.remote_execute(shard, format('SET LOCAL client_min_messages = error; DROP SCHEMA IF EXISTS %I CASCADE', shardmap._run_schema(job.id)));
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._end_run(shardmap.move) IS 'drops what names the run on a move''s shards: no statement of the move is taken there any more';
REVOKE ALL ON FUNCTION shardmap._end_run(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._end_run(shardmap.move) TO shardmap_admin;
