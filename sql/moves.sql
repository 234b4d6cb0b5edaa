-- Moves: what the catalog knows of them.
--
-- Decides what a move is, and which rows are hidden meanwhile. What always holds: rows of a key are shown by one shard
-- only; no key belongs to two moves under way; while one is, tables and shards of its keyspace stay as they are. All of
-- it is readable by all, but for primary keys of rows. Changed by the functions of moves_plan.sql and moves_steps.sql only. Read
-- move_parts.sql next.

CREATE SEQUENCE shardmap.move_id_seq;
COMMENT ON SEQUENCE shardmap.move_id_seq IS 'numbers of moves';

-- Who asks, also within SECURITY DEFINER functions.
CREATE FUNCTION shardmap._outer_role() RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE current_setting('role') WHEN 'none' THEN session_user::text ELSE current_setting('role') END
$$;
COMMENT ON FUNCTION shardmap._outer_role() IS 'the session''s role, by SET ROLE if there was one';

CREATE TABLE shardmap.move (
    id bigint PRIMARY KEY DEFAULT pg_catalog.nextval('shardmap.move_id_seq'),
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace,
    kind text NOT NULL DEFAULT 'key'
        CONSTRAINT move_kind_known CHECK (kind IN ('key', 'arcs', 'remainders', 'range')),
    key text COLLATE pg_catalog."C",
    literal text COLLATE pg_catalog."C",
    arcs int8multirange
        CONSTRAINT move_arcs_on_ring CHECK (NOT pg_catalog.isempty(arcs) AND arcs <@ '{[0,4294967296)}'::int8multirange),
    modulus integer
        CONSTRAINT move_modulus_range CHECK (modulus BETWEEN 1 AND 65536),
    remainders integer[]
        CONSTRAINT move_remainders_of_modulus CHECK (pg_catalog.cardinality(remainders) > 0 AND 0 <= ALL (remainders)
            AND modulus > ALL (remainders) AND pg_catalog.array_position(remainders, NULL) IS NULL),
    lower text COLLATE pg_catalog."C",
    upper text COLLATE pg_catalog."C",
    except_keys text[] NOT NULL DEFAULT '{}',
    engine text NOT NULL DEFAULT 'triggers'
        CONSTRAINT move_engine_known CHECK (engine IN ('triggers', 'logical')),
    source text COLLATE pg_catalog."C" NOT NULL,
    target text COLLATE pg_catalog."C" NOT NULL,
    state text NOT NULL DEFAULT 'planned'
        CONSTRAINT move_state_known CHECK (state IN ('planned', 'prechecked', 'copying', 'catching_up', 'verifying', 'fencing',
            'flipped', 'cleaning', 'done', 'rolling_back', 'rolled_back')),
    wish text
        CONSTRAINT move_wish_known CHECK (wish IN ('pause', 'cancel', 'rollback')),
    snapshot text,
    applied_at timestamptz,
    verified boolean NOT NULL DEFAULT false,
    resumed boolean NOT NULL DEFAULT false,
    run bigint,
    fires boolean NOT NULL DEFAULT false,
    logs_back boolean NOT NULL DEFAULT false,
    replicates boolean NOT NULL DEFAULT false,
    reversed boolean NOT NULL DEFAULT false,
    planned_by text COLLATE pg_catalog."C" NOT NULL DEFAULT shardmap._outer_role(),
    readers text[],
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    started_at timestamptz,
    flipped_at timestamptz,
    finished_at timestamptz,
    rows_planned bigint NOT NULL DEFAULT 0,
    bytes_planned bigint NOT NULL DEFAULT 0,
    rows_copied bigint NOT NULL DEFAULT 0,
    bytes_copied bigint NOT NULL DEFAULT 0,
    rows_recopied bigint NOT NULL DEFAULT 0,
    rows_deleted bigint NOT NULL DEFAULT 0,
    changes bigint NOT NULL DEFAULT 0,
    last_changes bigint,
    fences integer NOT NULL DEFAULT 0,
    pause interval,
    map_version bigint,
    last_error text,
    CONSTRAINT move_part_of_kind CHECK ((key IS NOT NULL) = (kind = 'key') AND (literal IS NOT NULL) = (kind = 'key')
        AND (arcs IS NOT NULL) = (kind = 'arcs') AND (modulus IS NOT NULL) = (kind = 'remainders')
        AND (remainders IS NOT NULL) = (kind = 'remainders') AND (kind = 'range' OR pg_catalog.num_nonnulls(lower, upper) = 0)
        AND (kind <> 'key' OR except_keys = '{}')),
    CONSTRAINT move_to_another_shard CHECK (source <> target)
);
COMMENT ON TABLE shardmap.move IS 'rows that change their shard, under way and past; see the view shardmap.moves';
COMMENT ON COLUMN shardmap.move.id IS 'number of the move';
COMMENT ON COLUMN shardmap.move.keyspace IS 'keyspace of the rows';
COMMENT ON COLUMN shardmap.move.kind IS 'what moves: a key, arcs of a ring, remainders, or a range';
COMMENT ON COLUMN shardmap.move.key IS 'canonical text of the key whose rows move';
COMMENT ON COLUMN shardmap.move.literal IS 'the key as the tables'' types read it';
COMMENT ON COLUMN shardmap.move.arcs IS 'tokens whose rows move';
COMMENT ON COLUMN shardmap.move.modulus IS 'what the MD5 of keys is divided by';
COMMENT ON COLUMN shardmap.move.remainders IS 'remainders of the keys whose rows move';
COMMENT ON COLUMN shardmap.move.lower IS 'canonical text of the first key of the range; NULL: no limit';
COMMENT ON COLUMN shardmap.move.upper IS 'canonical text of the first key after the range; NULL: no limit';
COMMENT ON COLUMN shardmap.move.except_keys IS 'keys in between that are pinned, and stay where they are';
COMMENT ON COLUMN shardmap.move.engine IS 'how rows get to the target: copied in batches and logged by triggers, or by logical replication';
COMMENT ON COLUMN shardmap.move.source IS 'shard that the rows leave';
COMMENT ON COLUMN shardmap.move.target IS 'shard that they go to';
COMMENT ON COLUMN shardmap.move.state IS 'planned, prechecked, copying, catching_up, verifying, fencing, flipped, cleaning, done; or rolling_back, rolled_back';
COMMENT ON COLUMN shardmap.move.wish IS 'what an administrator has asked for since: pause, cancel or rollback';
COMMENT ON COLUMN shardmap.move.snapshot IS 'snapshot of the source up to which changes are applied on the target';
COMMENT ON COLUMN shardmap.move.applied_at IS 'when that was';
COMMENT ON COLUMN shardmap.move.verified IS 'both sides were compared in full, and were equal';
COMMENT ON COLUMN shardmap.move.resumed IS 'a run has taken it up: what was copied beyond the watermarks is to be dropped first';
COMMENT ON COLUMN shardmap.move.run IS 'number of the run whose statements its shards take; 0: a run is to see to that first; NULL: nothing was written there yet';
COMMENT ON COLUMN shardmap.move.fires IS 'the shards'' tables have triggers or foreign keys, past which the rows are written';
COMMENT ON COLUMN shardmap.move.logs_back IS 'changes on the target are logged, for the way back';
COMMENT ON COLUMN shardmap.move.replicates IS 'there may be a subscription on the target, and a slot and a publication on the source';
COMMENT ON COLUMN shardmap.move.reversed IS 'it is on its way back: each of its shards in the other''s place';
COMMENT ON COLUMN shardmap.move.planned_by IS 'role that planned it: workers run it as this one';
COMMENT ON COLUMN shardmap.move.readers IS 'transactions that may still read by the map before';
COMMENT ON COLUMN shardmap.move.created_at IS 'when it was planned';
COMMENT ON COLUMN shardmap.move.started_at IS 'when it was first run';
COMMENT ON COLUMN shardmap.move.flipped_at IS 'when the target became the owner';
COMMENT ON COLUMN shardmap.move.finished_at IS 'when it came to its end';
COMMENT ON COLUMN shardmap.move.rows_planned IS 'rows to move, counted when it was planned';
COMMENT ON COLUMN shardmap.move.bytes_planned IS 'their size';
COMMENT ON COLUMN shardmap.move.rows_copied IS 'rows copied, without changes';
COMMENT ON COLUMN shardmap.move.bytes_copied IS 'bytes copied, as COPY counts them';
COMMENT ON COLUMN shardmap.move.rows_recopied IS 'rows that had been copied before a crash and were dropped, to be copied again';
COMMENT ON COLUMN shardmap.move.rows_deleted IS 'rows deleted on the shard that does not own them any more';
COMMENT ON COLUMN shardmap.move.changes IS 'rows that had changed since and were copied anew';
COMMENT ON COLUMN shardmap.move.last_changes IS 'of them in the last round';
COMMENT ON COLUMN shardmap.move.fences IS 'how often writers were held off';
COMMENT ON COLUMN shardmap.move.pause IS 'how long writers were held off at the flip, at most';
COMMENT ON COLUMN shardmap.move.map_version IS 'version of the map that names the target';
COMMENT ON COLUMN shardmap.move.last_error IS 'why the last attempt of a step failed';

CREATE UNIQUE INDEX move_of_key ON shardmap.move (keyspace, key) WHERE state NOT IN ('done', 'rolled_back');

CREATE TABLE shardmap.move_table (
    move bigint NOT NULL REFERENCES shardmap.move,
    position integer NOT NULL,
    relation regclass NOT NULL,
    key_columns text[] NOT NULL,
    key_types text[] NOT NULL,
    columns text[] NOT NULL,
    watermark text[],
    cleaned text[],
    copied boolean NOT NULL DEFAULT false,
    rows_copied bigint NOT NULL DEFAULT 0,
    CONSTRAINT move_table_pkey PRIMARY KEY (move, position)
);
COMMENT ON TABLE shardmap.move_table IS 'the tables of a move, in the order in which they are copied';
COMMENT ON COLUMN shardmap.move_table.move IS 'number of the move';
COMMENT ON COLUMN shardmap.move_table.position IS 'place in the order, from 1';
COMMENT ON COLUMN shardmap.move_table.relation IS 'the logical table';
COMMENT ON COLUMN shardmap.move_table.key_columns IS 'columns of its primary key';
COMMENT ON COLUMN shardmap.move_table.key_types IS 'their types';
COMMENT ON COLUMN shardmap.move_table.columns IS 'columns that are copied: all but the computed ones, the primary key first';
COMMENT ON COLUMN shardmap.move_table.watermark IS 'primary key of the last row that was copied';
COMMENT ON COLUMN shardmap.move_table.cleaned IS 'primary key of the last row that was deleted';
COMMENT ON COLUMN shardmap.move_table.copied IS 'all its rows were copied';
COMMENT ON COLUMN shardmap.move_table.rows_copied IS 'rows copied so far';

CREATE TABLE shardmap.hidden_rows (
    move bigint NOT NULL REFERENCES shardmap.move,
    relation regclass NOT NULL,
    shard text COLLATE pg_catalog."C" NOT NULL,
    condition text NOT NULL,
    CONSTRAINT hidden_rows_pkey PRIMARY KEY (move, relation, shard)
);
COMMENT ON TABLE shardmap.hidden_rows IS 'rows that a shard has and does not own: no statement sees them';
COMMENT ON COLUMN shardmap.hidden_rows.move IS 'the move that they belong to';
COMMENT ON COLUMN shardmap.hidden_rows.relation IS 'the logical table';
COMMENT ON COLUMN shardmap.hidden_rows.shard IS 'the shard';
COMMENT ON COLUMN shardmap.hidden_rows.condition IS 'SQL condition on their key, which is called key';

CREATE TABLE shardmap.read_floor (
    shard text COLLATE pg_catalog."C" CONSTRAINT read_floor_pkey PRIMARY KEY REFERENCES shardmap.shard ON DELETE CASCADE,
    system text,
    timeline integer NOT NULL,
    lsn text NOT NULL
);
COMMENT ON TABLE shardmap.read_floor IS 'what a shard''s replicas must have replayed before they answer reads: the end of the last move from or to it';
COMMENT ON COLUMN shardmap.read_floor.shard IS 'the shard';
COMMENT ON COLUMN shardmap.read_floor.system IS 'system identifier of its server by then; NULL: it was not to be seen';
COMMENT ON COLUMN shardmap.read_floor.timeline IS 'timeline of its log';
COMMENT ON COLUMN shardmap.read_floor.lsn IS 'place in its log';

CREATE TABLE shardmap.move_run (
    move bigint PRIMARY KEY REFERENCES shardmap.move,
    attempts integer NOT NULL DEFAULT 0,
    place text,
    next_attempt timestamptz
);
COMMENT ON TABLE shardmap.move_run IS 'moves that background workers run';
COMMENT ON COLUMN shardmap.move_run.move IS 'number of the move';
COMMENT ON COLUMN shardmap.move_run.attempts IS 'workers in a row that were started at the same place';
COMMENT ON COLUMN shardmap.move_run.place IS 'how far the move had come when the last worker was started';
COMMENT ON COLUMN shardmap.move_run.next_attempt IS 'no worker is started before';

GRANT SELECT ON shardmap.move, shardmap.hidden_rows, shardmap.read_floor, shardmap.move_run TO PUBLIC;
GRANT SELECT ON shardmap.move_table TO shardmap_admin; -- watermarks are values of rows

SELECT pg_catalog.pg_extension_config_dump('shardmap.move_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.move', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.move_table', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.hidden_rows', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.read_floor', '');

CREATE FUNCTION shardmap._next_move_state(state text, event text, reversed boolean) RETURNS text
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'next_move_state_wrapper';
COMMENT ON FUNCTION shardmap._next_move_state(text, text, boolean) IS 'state of a move, on its way back or not, after an event; an error if the event does not belong to the state';

CREATE FUNCTION shardmap._is_move_reversed(state text, event text, reversed boolean) RETURNS boolean
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'is_move_reversed_wrapper';
COMMENT ON FUNCTION shardmap._is_move_reversed(text, text, boolean) IS 'whether a move is on its way back after an event';

CREATE FUNCTION shardmap._can_cancel_move(state text, reversed boolean) RETURNS boolean
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'can_cancel_move_wrapper';
COMMENT ON FUNCTION shardmap._can_cancel_move(text, boolean) IS 'whether a move in this state can be given up, or its way back: the map has not changed yet';

CREATE FUNCTION shardmap._move_needs_snapshot(state text) RETURNS boolean
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'move_needs_snapshot_wrapper';
COMMENT ON FUNCTION shardmap._move_needs_snapshot(text) IS 'whether the step of this state reads from the source in one snapshot';

CREATE FUNCTION shardmap._crash_here(name text) RETURNS void
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'crash_here_wrapper';
COMMENT ON FUNCTION shardmap._crash_here(text) IS 'a named point at which shardmap.crash_point lets a move break';

CREATE FUNCTION shardmap._pipe_rows(source text, query text, target text, command text, keys integer, transactional boolean) RETURNS text[]
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'pipe_rows_wrapper';
COMMENT ON FUNCTION shardmap._pipe_rows(text, text, text, text, integer, boolean) IS
    'copies the rows of a query on one shard to another, by a COPY FROM STDIN there; returns the numbers of rows and bytes, and the first values of the last row; transactional as in remote_execute(), on the target';
REVOKE ALL ON FUNCTION shardmap._pipe_rows(text, text, text, text, integer, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._pipe_rows(text, text, text, text, integer, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap._find_move(id bigint) RETURNS shardmap.move
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    job shardmap.move;
BEGIN
    SELECT m.* INTO job FROM shardmap.move m WHERE m.id = $1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no move %', id USING ERRCODE = 'undefined_object', HINT = 'See shardmap.moves.';
    END IF;
    RETURN job;
END
$$;
COMMENT ON FUNCTION shardmap._find_move(bigint) IS 'a move; an error if there is none of that number';
REVOKE ALL ON FUNCTION shardmap._find_move(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._find_move(bigint) TO shardmap_admin;

CREATE FUNCTION shardmap._part_text(job shardmap.move) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE job.kind
        WHEN 'key' THEN format('key "%s"', job.key)
        WHEN 'arcs' THEN (SELECT format('%s %s of the ring (%s %%)', count(*), CASE count(*) WHEN 1 THEN 'arc' ELSE 'arcs' END,
                round(sum(upper(r) - lower(r)) * 100 / 4294967296, 2)) FROM unnest(job.arcs) r)
        WHEN 'remainders' THEN CASE WHEN cardinality(job.remainders) > 8 THEN format('%s remainders', cardinality(job.remainders))
                ELSE format('%s %s', CASE cardinality(job.remainders) WHEN 1 THEN 'remainder' ELSE 'remainders' END,
                    array_to_string(job.remainders, ', ')) END || format(' of %s', job.modulus)
        ELSE 'range ' || shardmap._range_text(job.lower, job.upper) END
$$;
COMMENT ON FUNCTION shardmap._part_text(shardmap.move) IS 'the part that a move moves, for messages';

CREATE FUNCTION shardmap._remaining(job shardmap.move) RETURNS interval
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN job.state IN ('copying', 'catching_up', 'verifying', 'fencing') AND job.rows_copied > 0
        THEN date_trunc('second', greatest(job.rows_planned - job.rows_copied, 0)::double precision / job.rows_copied
            * (clock_timestamp() - job.started_at)) END
$$;
COMMENT ON FUNCTION shardmap._remaining(shardmap.move) IS 'time until all rows are copied, if it goes on as it did';

CREATE VIEW shardmap.moves AS
    SELECT m.id, m.keyspace, m.kind, shardmap._part_text(m) AS part, m.key, m.source, m.target, m.state, m.reversed, m.wish,
        CASE WHEN m.rows_planned = 0 THEN CASE WHEN m.state IN ('planned', 'prechecked') THEN 0 ELSE 1 END
            ELSE least(m.rows_copied::double precision / m.rows_planned, 1) END AS progress,
        m.rows_planned, m.rows_copied, m.bytes_planned, m.bytes_copied, m.rows_recopied, m.rows_deleted,
        m.rows_copied / nullif(EXTRACT(epoch FROM coalesce(m.flipped_at, m.finished_at, pg_catalog.clock_timestamp())
            - m.started_at), 0)::double precision AS rows_per_second,
        c.relation AS copying, CASE WHEN pg_catalog.pg_has_role('shardmap_admin', 'USAGE') THEN c.watermark END AS watermark,
        m.changes, m.last_changes, m.fences, m.pause, m.map_version, m.created_at, m.started_at, m.flipped_at, m.finished_at,
        m.last_error,
        CASE WHEN m.state IN ('copying', 'catching_up', 'verifying', 'fencing') THEN pg_catalog.clock_timestamp() - m.applied_at END AS change_lag,
        shardmap._remaining(m) AS remaining, m.planned_by, r.attempts, r.next_attempt, m.engine
      FROM shardmap.move m
      LEFT JOIN shardmap.move_run r ON r.move = m.id
      LEFT JOIN LATERAL (SELECT t.relation, t.watermark FROM shardmap.move_table t
            WHERE t.move = m.id AND NOT t.copied ORDER BY t.position LIMIT 1) c ON true
     ORDER BY m.id;
COMMENT ON VIEW shardmap.moves IS 'moves under way and past';
COMMENT ON COLUMN shardmap.moves.id IS 'number of the move';
COMMENT ON COLUMN shardmap.moves.keyspace IS 'keyspace of the rows';
COMMENT ON COLUMN shardmap.moves.kind IS 'what moves: a key, arcs of a ring, remainders, or a range';
COMMENT ON COLUMN shardmap.moves.part IS 'the same in words';
COMMENT ON COLUMN shardmap.moves.key IS 'canonical text of the key whose rows move';
COMMENT ON COLUMN shardmap.moves.source IS 'shard that the rows leave';
COMMENT ON COLUMN shardmap.moves.target IS 'shard that they go to';
COMMENT ON COLUMN shardmap.moves.state IS 'planned, prechecked, copying, catching_up, verifying, fencing, flipped, cleaning, done; or rolling_back, rolled_back';
COMMENT ON COLUMN shardmap.moves.reversed IS 'it is on its way back, from target to source';
COMMENT ON COLUMN shardmap.moves.wish IS 'what an administrator has asked for since: pause, cancel or rollback';
COMMENT ON COLUMN shardmap.moves.progress IS 'part of the planned rows that was copied, 0 to 1';
COMMENT ON COLUMN shardmap.moves.rows_planned IS 'rows to move, counted when it was planned';
COMMENT ON COLUMN shardmap.moves.rows_copied IS 'rows copied, without changes';
COMMENT ON COLUMN shardmap.moves.bytes_planned IS 'size of the rows to move';
COMMENT ON COLUMN shardmap.moves.bytes_copied IS 'bytes copied, as COPY counts them';
COMMENT ON COLUMN shardmap.moves.rows_recopied IS 'rows that had been copied before a crash and were dropped, to be copied again';
COMMENT ON COLUMN shardmap.moves.rows_deleted IS 'rows deleted on the shard that does not own them any more';
COMMENT ON COLUMN shardmap.moves.rows_per_second IS 'rows copied by time since it was first run';
COMMENT ON COLUMN shardmap.moves.copying IS 'table that is being copied';
COMMENT ON COLUMN shardmap.moves.watermark IS 'primary key of the last row of it that was copied; for administrators';
COMMENT ON COLUMN shardmap.moves.changes IS 'rows that had changed since and were copied anew';
COMMENT ON COLUMN shardmap.moves.last_changes IS 'of them in the last round: how far the target is behind';
COMMENT ON COLUMN shardmap.moves.fences IS 'how often writers were held off';
COMMENT ON COLUMN shardmap.moves.pause IS 'how long writers were held off at the flip, at most';
COMMENT ON COLUMN shardmap.moves.map_version IS 'version of the map that names the target';
COMMENT ON COLUMN shardmap.moves.created_at IS 'when it was planned';
COMMENT ON COLUMN shardmap.moves.started_at IS 'when it was first run';
COMMENT ON COLUMN shardmap.moves.flipped_at IS 'when the target became the owner';
COMMENT ON COLUMN shardmap.moves.finished_at IS 'when it came to its end';
COMMENT ON COLUMN shardmap.moves.last_error IS 'why the last attempt of a step failed';
COMMENT ON COLUMN shardmap.moves.change_lag IS 'changes on the source that are younger are not applied on the target yet';
COMMENT ON COLUMN shardmap.moves.remaining IS 'time until all rows are copied, if it goes on as it did';
COMMENT ON COLUMN shardmap.moves.planned_by IS 'role that planned it: workers run it as this one';
COMMENT ON COLUMN shardmap.moves.attempts IS 'workers in a row that were started at the same place; NULL: none is to run it';
COMMENT ON COLUMN shardmap.moves.next_attempt IS 'no worker is started before';
COMMENT ON COLUMN shardmap.moves.engine IS 'how rows get to the target: triggers (copied in batches and logged by triggers), logical (replicated)';
GRANT SELECT ON shardmap.moves TO PUBLIC;

-- The one way to change a move: `changes` are its columns, `event` brings it to its next state.
CREATE FUNCTION shardmap._update_move(id bigint, changes jsonb, event text DEFAULT NULL) RETURNS shardmap.move
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    old shardmap.move;
    new shardmap.move;
BEGIN
    SELECT m.* INTO STRICT old FROM shardmap.move m WHERE m.id = $1 FOR UPDATE;
    new := jsonb_populate_record(old, changes);
    IF new.snapshot IS DISTINCT FROM old.snapshot THEN
        new.applied_at := now();
    END IF;
    IF event IS NOT NULL THEN
        new.state := shardmap._next_move_state(old.state, event, old.reversed);
        new.reversed := shardmap._is_move_reversed(old.state, event, old.reversed);
        RAISE NOTICE 'move % is %', id, replace(new.state, '_', ' ') ||
            CASE WHEN new.reversed AND new.state NOT IN ('rolling_back', 'rolled_back') THEN ', on its way back' ELSE '' END;
    END IF;
    UPDATE shardmap.move m SET state = new.state, wish = new.wish, snapshot = new.snapshot, applied_at = new.applied_at, verified = new.verified,
            resumed = new.resumed, run = new.run, fires = new.fires, logs_back = new.logs_back, replicates = new.replicates, reversed = new.reversed, readers = new.readers, started_at = new.started_at, flipped_at = new.flipped_at,
            finished_at = new.finished_at, rows_planned = new.rows_planned, bytes_planned = new.bytes_planned,
            rows_copied = new.rows_copied, bytes_copied = new.bytes_copied, rows_recopied = new.rows_recopied,
            rows_deleted = new.rows_deleted, changes = new.changes, last_changes = new.last_changes, fences = new.fences,
            pause = new.pause, map_version = new.map_version, last_error = new.last_error
     WHERE m.id = $1;
    RETURN new;
END
$$;
COMMENT ON FUNCTION shardmap._update_move(bigint, jsonb, text) IS 'changes a move in the catalog, and brings it to its next state; returns it as it is now';
REVOKE ALL ON FUNCTION shardmap._update_move(bigint, jsonb, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._update_move(bigint, jsonb, text) TO shardmap_admin;

CREATE FUNCTION shardmap._update_move_table(move bigint, "position" integer, watermark text[], copied boolean, rows bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE shardmap.move_table t SET watermark = coalesce($3, t.watermark), copied = $4, rows_copied = t.rows_copied + $5
     WHERE t.move = $1 AND t.position = $2
$$;
COMMENT ON FUNCTION shardmap._update_move_table(bigint, integer, text[], boolean, bigint) IS 'notes how far a table of a move was copied';
REVOKE ALL ON FUNCTION shardmap._update_move_table(bigint, integer, text[], boolean, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._update_move_table(bigint, integer, text[], boolean, bigint) TO shardmap_admin;

CREATE FUNCTION shardmap._note_cleaned(move bigint, "position" integer, cleaned text[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE shardmap.move_table t SET cleaned = $3 WHERE t.move = $1 AND t.position = $2
$$;
COMMENT ON FUNCTION shardmap._note_cleaned(bigint, integer, text[]) IS 'notes how far rows of a table of a move were deleted';
REVOKE ALL ON FUNCTION shardmap._note_cleaned(bigint, integer, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._note_cleaned(bigint, integer, text[]) TO shardmap_admin;

-- Of one shard of a move: its rows are hidden, or shown again (shard NULL). Published: cached plans are made anew.
CREATE FUNCTION shardmap._hide_rows(move bigint, shard text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved shardmap.move;
BEGIN
    SELECT m.* INTO STRICT moved FROM shardmap.move m WHERE m.id = $1;
    DELETE FROM shardmap.hidden_rows h WHERE h.move = $1;
    INSERT INTO shardmap.hidden_rows (move, relation, shard, condition)
    SELECT $1, t.relation, $2, shardmap._part_sql(moved, l.key_type, 'key')
      FROM shardmap.move_table t JOIN shardmap.logical_table l ON l.relation = t.relation WHERE t.move = $1 AND $2 IS NOT NULL;
    RETURN shardmap.publish_map(moved.keyspace);
END
$$;
COMMENT ON FUNCTION shardmap._hide_rows(bigint, text) IS 'hides a move''s rows on one shard only, or on none, and publishes the map; returns its version';
REVOKE ALL ON FUNCTION shardmap._hide_rows(bigint, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._hide_rows(bigint, text) TO shardmap_admin;
