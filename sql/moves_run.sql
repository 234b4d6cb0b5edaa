-- Moves: who runs them.
--
-- Decides when a background worker takes up a move: when it was started, again when a worker has ended before the move did,
-- and later each time if nothing got on. What always holds: one session runs a move at a time; the worker is the role that
-- planned the move; a paused move waits; a dump does not hold what workers are to run, so that a restored copy of this
-- database leaves the shards alone. Read src/pg/moves/worker.rs next.

CREATE FUNCTION shardmap._try_hold_move(id bigint) RETURNS boolean
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'try_hold_move_wrapper';
COMMENT ON FUNCTION shardmap._try_hold_move(bigint) IS 'makes this session the one that runs a move; false: another one does';
REVOKE ALL ON FUNCTION shardmap._try_hold_move(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._try_hold_move(bigint) TO shardmap_admin;

CREATE FUNCTION shardmap._release_move(id bigint) RETURNS void
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'release_move_wrapper';
COMMENT ON FUNCTION shardmap._release_move(bigint) IS 'lets another session run a move, once this transaction has ended';
REVOKE ALL ON FUNCTION shardmap._release_move(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._release_move(bigint) TO shardmap_admin;

CREATE FUNCTION shardmap._call_movers() RETURNS void
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'call_movers_wrapper';
COMMENT ON FUNCTION shardmap._call_movers() IS 'lets workers look for moves once this transaction has ended; an error if the library is not preloaded';
REVOKE ALL ON FUNCTION shardmap._call_movers() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._call_movers() TO shardmap_admin;

CREATE FUNCTION shardmap._move_locks(kind integer) RETURNS TABLE (number bigint, pid integer)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT l.objid::bigint, l.pid FROM pg_locks l
     WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = kind AND l.classid = 'shardmap.move'::regclass
       AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
$$;
COMMENT ON FUNCTION shardmap._move_locks(integer) IS 'sessions that run moves (3), by their number, and workers (4)';
REVOKE ALL ON FUNCTION shardmap._move_locks(integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._move_locks(integer) TO shardmap_admin;

CREATE FUNCTION shardmap._hold_move(id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    holder integer;
BEGIN
    IF NOT shardmap._try_hold_move(id) THEN
        SELECT l.pid INTO holder FROM shardmap._move_locks(3) l WHERE l.number = id & 4294967295 LIMIT 1;
        RAISE EXCEPTION 'move % is being run by another session', id
            USING ERRCODE = 'object_in_use', DETAIL = format('It has process ID %s.', coalesce(holder::text, 'unknown')),
                HINT = format('Look at it in shardmap.moves; let it stop after its step with shardmap.pause_move(%s).', id);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._hold_move(bigint) IS 'makes this session the one that runs a move; an error if another one does';
REVOKE ALL ON FUNCTION shardmap._hold_move(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._hold_move(bigint) TO shardmap_admin;

-- What a try that gets nowhere is measured by.
CREATE FUNCTION shardmap._move_place(job shardmap.move) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('%s %s %s', job.state, job.rows_copied, job.rows_deleted)
$$;
COMMENT ON FUNCTION shardmap._move_place(shardmap.move) IS 'how far a move has come';
REVOKE ALL ON FUNCTION shardmap._move_place(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._move_place(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._move_backoff(attempts integer) RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT least(2 ^ least(attempts - 1, 10), 60) * interval '1 second'
$$;
COMMENT ON FUNCTION shardmap._move_backoff(integer) IS 'time until the next try of a move that got nowhere so often in a row';

-- Called by the launcher's worker. Returns all moves that are to be run and have no runner: with a role those for which a
-- worker is to be started now, and the time, in microseconds, until another try. Noted before: a worker may not live to do it.
CREATE FUNCTION shardmap._claim_moves() RETURNS TABLE (move bigint, role oid, wait bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    free integer := current_setting('shardmap.max_move_workers')::integer - (SELECT count(*) FROM shardmap._move_locks(4));
    job shardmap.move;
    planner oid;
BEGIN
    DELETE FROM shardmap.move_run r USING shardmap.move m WHERE m.id = r.move AND m.state IN ('done', 'rolled_back');
    FOR job IN
        SELECT m.* FROM shardmap.move_run r JOIN shardmap.move m ON m.id = r.move
         WHERE m.wish IS DISTINCT FROM 'pause' ORDER BY r.next_attempt NULLS FIRST, m.id
    LOOP
        SELECT a.oid INTO planner FROM pg_roles a WHERE a.rolname = job.planned_by;
        IF EXISTS (SELECT FROM shardmap._move_locks(3) l WHERE l.number = job.id & 4294967295) THEN
            wait := 5000000;
            role := NULL;
        ELSE
            SELECT coalesce(EXTRACT(epoch FROM r.next_attempt - clock_timestamp()) * 1000000, 0)::bigint INTO wait
              FROM shardmap.move_run r WHERE r.move = job.id;
            role := CASE WHEN wait <= 0 AND free > 0 THEN planner END;
            IF planner IS NULL THEN
                UPDATE shardmap.move m SET last_error = format('role "%s" that planned it is gone: CALL shardmap.run_move as another', job.planned_by) WHERE m.id = job.id;
                wait := 60000000;
            END IF;
        END IF;
        IF role IS NOT NULL THEN
            free := free - 1;
            UPDATE shardmap.move_run r SET place = shardmap._move_place(job), attempts = t.attempts,
                    next_attempt = clock_timestamp() + shardmap._move_backoff(t.attempts)
              FROM (SELECT CASE WHEN o.place = shardmap._move_place(job) THEN o.attempts + 1 ELSE 1 END AS attempts
                      FROM shardmap.move_run o WHERE o.move = job.id) t
             WHERE r.move = job.id;
        END IF;
        move := job.id;
        RETURN NEXT;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._claim_moves() IS 'moves that wait for a worker, and the roles of those that get one now';
REVOKE ALL ON FUNCTION shardmap._claim_moves() FROM PUBLIC;

CREATE FUNCTION shardmap._note_failure(id bigint, message text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE shardmap.move m SET last_error = message WHERE m.id = $1;
    UPDATE shardmap.move_run r SET next_attempt = clock_timestamp() + shardmap._move_backoff(r.attempts) WHERE r.move = $1;
END
$$;
COMMENT ON FUNCTION shardmap._note_failure(bigint, text) IS 'notes why a worker could not go on with a move, and puts off the next try';
REVOKE ALL ON FUNCTION shardmap._note_failure(bigint, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._note_failure(bigint, text) TO shardmap_admin;

-- `wanted`: also if no worker was to run it before.
CREATE FUNCTION shardmap._want_worker(id bigint, wanted boolean) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF wanted THEN
        INSERT INTO shardmap.move_run AS r (move) VALUES (id) ON CONFLICT (move) DO NOTHING;
    END IF;
    UPDATE shardmap.move_run r SET attempts = 0, place = NULL, next_attempt = NULL WHERE r.move = id;
    IF FOUND THEN
        PERFORM shardmap._call_movers();
    END IF;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION shardmap._want_worker(bigint, boolean) IS 'lets a worker try a move at once';
REVOKE ALL ON FUNCTION shardmap._want_worker(bigint, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._want_worker(bigint, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap.start_move(id bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    job shardmap.move := shardmap._find_move(id);
    role record;
BEGIN
    IF job.state IN ('done', 'rolled_back') THEN
        RAISE NOTICE 'move % is %', id, replace(job.state, '_', ' ');
        RETURN job.state;
    END IF;
    SELECT r.rolname, r.rolcanlogin INTO role FROM pg_roles r WHERE r.rolname = job.planned_by;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'role "%" that planned move % is gone', job.planned_by, id
            USING ERRCODE = 'undefined_object', HINT = format('Run it yourself: CALL shardmap.run_move(%s).', id);
    ELSIF NOT role.rolcanlogin AND current_setting('server_version_num')::integer < 170000 THEN
        RAISE EXCEPTION 'role "%" that planned move % cannot log in', role.rolname, id
            USING ERRCODE = 'invalid_authorization_specification', DETAIL = 'A worker is a session of that role.',
                HINT = format('ALTER ROLE %I LOGIN, or CALL shardmap.run_move(%s).', role.rolname, id);
    END IF;
    IF job.wish = 'pause' THEN
        PERFORM shardmap._update_move(id, '{"wish": null}');
    END IF;
    PERFORM shardmap._want_worker(id, true);
    RETURN job.state;
END
$$;
COMMENT ON FUNCTION shardmap.start_move(bigint) IS 'lets a background worker run a move to its end, also after failures and restarts; returns its state';
CREATE FUNCTION shardmap.start_moves(keyspace text DEFAULT 'main') RETURNS TABLE (move bigint, state text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    FOR move IN
        SELECT m.id FROM shardmap.move m WHERE m.keyspace = $1 AND m.state NOT IN ('done', 'rolled_back') ORDER BY m.id
    LOOP
        state := shardmap.start_move(move);
        RETURN NEXT;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap.start_moves(text) IS 'lets background workers run all moves of a keyspace, shardmap.max_move_workers at a time; returns their numbers and states';
REVOKE ALL ON FUNCTION shardmap.start_move(bigint), shardmap.start_moves(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.start_move(bigint), shardmap.start_moves(text) TO shardmap_admin;
