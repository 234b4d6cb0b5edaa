-- Canaries: which move goes first, what is known of it, and what waits for it.
--
-- Decides which planned move of a keyspace is tried before the others: that of the least traffic, and only a small part of
-- it where it can be cut. What always holds: until a canary is decided its source keeps the rows, hidden, so that it can be
-- taken back, and the moves that wait for it do not begin; what was taken back is planned again, as it was before. Refuses while moves of the keyspace are under way. Read canary_run.sql next, and docs/canary.md.

CREATE TABLE shardmap.canary_run (
    move bigint PRIMARY KEY REFERENCES shardmap.move ON DELETE CASCADE,
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace,
    cut_from bigint,
    uncut jsonb,
    rest bigint[] NOT NULL,
    state text NOT NULL DEFAULT 'measuring'
        CONSTRAINT canary_state_known CHECK (state IN ('measuring', 'moving', 'baking', 'taking_back', 'spreading', 'passed', 'failed', 'ended')),
    bake interval NOT NULL,
    baseline interval NOT NULL,
    max_error_rate double precision NOT NULL,
    max_slowdown double precision NOT NULL,
    min_statements bigint NOT NULL,
    started_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    since timestamptz,
    looked_at timestamptz,
    verified_at timestamptz,
    verifications integer NOT NULL DEFAULT 0,
    counters double precision[],
    before double precision[],
    during double precision[],
    suspected text,
    verdict text,
    finished_at timestamptz
);
COMMENT ON TABLE shardmap.canary_run IS 'canaries under way and past; see the view shardmap.canaries';
COMMENT ON COLUMN shardmap.canary_run.move IS 'number of the move that goes first';
COMMENT ON COLUMN shardmap.canary_run.keyspace IS 'its keyspace';
COMMENT ON COLUMN shardmap.canary_run.cut_from IS 'number of the planned move of which it is a part; NULL: of none';
COMMENT ON COLUMN shardmap.canary_run.uncut IS 'what that one moved before';
COMMENT ON COLUMN shardmap.canary_run.rest IS 'numbers of the moves that wait for it';
COMMENT ON COLUMN shardmap.canary_run.state IS 'measuring, moving, baking, spreading, passed; or taking_back, failed; ended: given up';
COMMENT ON COLUMN shardmap.canary_run.bake IS 'for how long it is watched';
COMMENT ON COLUMN shardmap.canary_run.baseline IS 'for how long its shards are watched before; 0: figures since the last reset are taken';
COMMENT ON COLUMN shardmap.canary_run.max_error_rate IS 'errors per statement that are allowed beyond those from before';
COMMENT ON COLUMN shardmap.canary_run.max_slowdown IS 'how many times as long as before a statement may be waited for';
COMMENT ON COLUMN shardmap.canary_run.min_statements IS 'statements of a shard below which it is not judged';
COMMENT ON COLUMN shardmap.canary_run.started_at IS 'when it was begun';
COMMENT ON COLUMN shardmap.canary_run.since IS 'since when it measures, or bakes';
COMMENT ON COLUMN shardmap.canary_run.looked_at IS 'when statistics were last looked at';
COMMENT ON COLUMN shardmap.canary_run.verified_at IS 'when its rows were last compared';
COMMENT ON COLUMN shardmap.canary_run.verifications IS 'how often they were equal';
COMMENT ON COLUMN shardmap.canary_run.counters IS 'statements, errors, milliseconds of source and target when counting began; NULL: nothing is counted just now';
COMMENT ON COLUMN shardmap.canary_run.before IS 'the same of the time before the move';
COMMENT ON COLUMN shardmap.canary_run.during IS 'the same of the time in which it bakes, so far';
COMMENT ON COLUMN shardmap.canary_run.suspected IS 'condition that failed at the last look';
COMMENT ON COLUMN shardmap.canary_run.verdict IS 'why it has failed, or what it has passed by';
COMMENT ON COLUMN shardmap.canary_run.finished_at IS 'when it came to its end';
CREATE UNIQUE INDEX canary_of_keyspace ON shardmap.canary_run (keyspace) WHERE finished_at IS NULL;
GRANT SELECT ON shardmap.canary_run TO shardmap_admin; -- a verdict may name rows
SELECT pg_catalog.pg_extension_config_dump('shardmap.canary_run', '');

CREATE VIEW shardmap.canaries AS
    SELECT c.move, c.keyspace, shardmap._part_text(m) AS part, m.source, m.target, c.state, m.state AS move_state, c.rest, c.bake,
        CASE c.state WHEN 'baking' THEN greatest(c.bake - (pg_catalog.clock_timestamp() - c.since), '0') END AS remaining, c.verifications,
        c.before[4] AS target_statements_before, c.before[5] AS target_errors_before, c.before[6] / nullif(c.before[4], 0) AS target_wait_ms_before,
        c.during[4] AS target_statements, c.during[5] AS target_errors, c.during[6] / nullif(c.during[4], 0) AS target_wait_ms,
        c.before[1] AS source_statements_before, c.before[2] AS source_errors_before, c.before[3] / nullif(c.before[1], 0) AS source_wait_ms_before,
        c.during[1] AS source_statements, c.during[2] AS source_errors, c.during[3] / nullif(c.during[1], 0) AS source_wait_ms,
        c.max_error_rate, c.max_slowdown, c.min_statements,
        CASE WHEN pg_catalog.pg_has_role('shardmap_admin', 'USAGE') THEN c.verdict END AS verdict, c.started_at, c.finished_at
      FROM shardmap.canary_run c JOIN shardmap.move m ON m.id = c.move ORDER BY c.move;
COMMENT ON VIEW shardmap.canaries IS 'canaries under way and past';
COMMENT ON COLUMN shardmap.canaries.move IS 'number of the move that goes first, see shardmap.moves';
COMMENT ON COLUMN shardmap.canaries.keyspace IS 'its keyspace';
COMMENT ON COLUMN shardmap.canaries.part IS 'what it moves';
COMMENT ON COLUMN shardmap.canaries.source IS 'shard that the rows leave';
COMMENT ON COLUMN shardmap.canaries.target IS 'shard that they go to';
COMMENT ON COLUMN shardmap.canaries.state IS 'measuring, moving, baking, spreading, passed; or taking_back, failed; ended: given up';
COMMENT ON COLUMN shardmap.canaries.move_state IS 'state of the move';
COMMENT ON COLUMN shardmap.canaries.rest IS 'numbers of the moves that wait for it';
COMMENT ON COLUMN shardmap.canaries.bake IS 'for how long it is watched';
COMMENT ON COLUMN shardmap.canaries.remaining IS 'for how long still';
COMMENT ON COLUMN shardmap.canaries.verifications IS 'how often its rows were compared, and equal';
COMMENT ON COLUMN shardmap.canaries.target_statements_before IS 'statements that asked the target while it was measured';
COMMENT ON COLUMN shardmap.canaries.target_errors_before IS 'its errors then';
COMMENT ON COLUMN shardmap.canaries.target_wait_ms_before IS 'milliseconds that one of them was waited for';
COMMENT ON COLUMN shardmap.canaries.target_statements IS 'statements that have asked it since the flip, but while rows were compared';
COMMENT ON COLUMN shardmap.canaries.target_errors IS 'its errors';
COMMENT ON COLUMN shardmap.canaries.target_wait_ms IS 'milliseconds that one of them was waited for';
COMMENT ON COLUMN shardmap.canaries.source_statements_before IS 'the same of the source';
COMMENT ON COLUMN shardmap.canaries.source_errors_before IS 'its errors then';
COMMENT ON COLUMN shardmap.canaries.source_wait_ms_before IS 'milliseconds that one of them was waited for';
COMMENT ON COLUMN shardmap.canaries.source_statements IS 'statements that have asked it since the flip, but while rows were compared';
COMMENT ON COLUMN shardmap.canaries.source_errors IS 'its errors';
COMMENT ON COLUMN shardmap.canaries.source_wait_ms IS 'milliseconds that one of them was waited for';
COMMENT ON COLUMN shardmap.canaries.max_error_rate IS 'errors per statement that are allowed beyond those from before';
COMMENT ON COLUMN shardmap.canaries.max_slowdown IS 'how many times as long as before a statement may be waited for';
COMMENT ON COLUMN shardmap.canaries.min_statements IS 'statements of a shard below which it is not judged';
COMMENT ON COLUMN shardmap.canaries.verdict IS 'why it has failed, or what it has passed by; for administrators';
COMMENT ON COLUMN shardmap.canaries.started_at IS 'when it was begun';
COMMENT ON COLUMN shardmap.canaries.finished_at IS 'when it came to its end';
GRANT SELECT ON shardmap.canaries TO PUBLIC;

-- A step of a move asks: may it be cleaned, may it begin.
CREATE FUNCTION shardmap._is_canary(id bigint) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM shardmap.canary_run c WHERE c.move = $1 AND c.state IN ('measuring', 'moving', 'baking', 'taking_back'))
$$;
COMMENT ON FUNCTION shardmap._is_canary(bigint) IS 'whether a move is a canary that is not decided';

CREATE FUNCTION shardmap._check_no_canary(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    run shardmap.canary_run;
BEGIN
    SELECT c.* INTO run FROM shardmap.canary_run c
     WHERE c.keyspace = job.keyspace AND (c.state IN ('moving', 'baking', 'taking_back') AND job.id = ANY (c.rest)
        OR c.state = 'measuring' AND job.id = ANY (c.move || c.rest));
    IF FOUND THEN
        RAISE EXCEPTION 'move % waits for the canary of keyspace "%"', job.id, job.keyspace
            USING ERRCODE = 'object_in_use', DETAIL = format('The canary is move %s, and is %s.', run.move, replace(run.state, '_', ' ')),
                HINT = format('CALL shardmap.canary(%L) goes on with it; shardmap.end_canary(%1$L) gives it up.', job.keyspace);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_no_canary(shardmap.move) IS 'raises an error if a canary is to be decided before a move begins';

-- Nothing if the part cannot be divided. Of a single remainder by as many as the map can hold.
CREATE FUNCTION shardmap._cut_part(job shardmap.move, share double precision) RETURNS shardmap.move[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    piece shardmap.move := job;
    other shardmap.move := job;
    whole bigint;
    cut bigint;
BEGIN
    CASE job.kind
        WHEN 'arcs' THEN
            SELECT sum(upper(r) - lower(r)) INTO whole FROM unnest(job.arcs) r;
            cut := greatest(floor(whole * share), 1);
            SELECT range_agg(int8range(a.lower, least(a.upper, a.lower + cut - a.before))) INTO piece.arcs FROM (
                SELECT lower(r) AS lower, upper(r) AS upper,
                    coalesce(sum(upper(r) - lower(r)) OVER (ORDER BY r ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)::bigint AS before
                  FROM unnest(job.arcs) r) a WHERE a.before < cut;
            other.arcs := job.arcs - piece.arcs;
            RETURN CASE WHEN NOT isempty(other.arcs) THEN ARRAY[piece, other] END;
        WHEN 'remainders' THEN
            whole := cardinality(job.remainders);
            IF whole > 1 THEN
                cut := least(greatest(floor(whole * share), 1), whole - 1);
                piece.remainders := job.remainders[:cut];
                other.remainders := job.remainders[cut + 1:];
                RETURN ARRAY[piece, other];
            END IF;
            SELECT count(*) INTO whole FROM shardmap._map_entries(job.keyspace) e WHERE e.kind = 'remainder';
            SELECT max(n) INTO cut FROM generate_series(2, least(floor(1 / share), 1000)::integer) n
             WHERE lcm(whole, job.modulus::bigint * n) <= 65536;
            piece.modulus := job.modulus * cut;
            other.modulus := piece.modulus;
            other.remainders := ARRAY(SELECT job.remainders[1] + job.modulus * n FROM generate_series(1, cut - 1) n);
            RETURN CASE WHEN cut IS NOT NULL THEN ARRAY[piece, other] END;
        WHEN 'range' THEN
            piece.upper := shardmap._key_at(job.keyspace, job.source, share, job.upper, job.lower);
            other.lower := piece.upper;
            RETURN CASE WHEN other.lower IS NOT NULL THEN ARRAY[piece, other] END;
        ELSE RETURN NULL;
    END CASE;
END
$$;
COMMENT ON FUNCTION shardmap._cut_part(shardmap.move, double precision) IS 'a move in two: about a share of what it moves, and the rest; NULL if it cannot be divided';

CREATE FUNCTION shardmap._measure_part(job shardmap.move) RETURNS shardmap.move
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT coalesce(sum(s.size[1]::bigint), 0), coalesce(sum(s.size[2]::bigint), 0) INTO job.rows_planned, job.bytes_planned
      FROM (SELECT shardmap._part_size(job, t.relation) AS size FROM shardmap.move_table t WHERE t.move = job.id) s;
    RETURN job;
END
$$;
COMMENT ON FUNCTION shardmap._measure_part(shardmap.move) IS 'a move with the rows and bytes that it has to move now';

-- The cut part has the number of the move that it is cut from.
CREATE FUNCTION shardmap._choose_canary(keyspace text, share double precision, OUT piece shardmap.move, OUT other shardmap.move, OUT load double precision)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_one record;
    cut shardmap.move[];
    whole shardmap.move;
BEGIN
    SELECT m AS move, l.load INTO found_one FROM shardmap.move m CROSS JOIN shardmap.stat_info i
      JOIN shardmap.stat_shards t ON t.keyspace = m.keyspace AND t.shard = m.source
     CROSS JOIN LATERAL (SELECT greatest(x.rows, m.rows_planned, 1) AS rows FROM shardmap._shard_statistics(m.source) x) x
     CROSS JOIN LATERAL (SELECT t.statements / greatest(extract(epoch FROM clock_timestamp() - i.routing_since)::double precision, 1)
        * m.rows_planned / x.rows AS load) l
     WHERE m.keyspace = $1 AND m.state = 'planned' AND m.wish IS NULL
     ORDER BY m.rows_planned = 0, l.load, m.rows_planned, m.id LIMIT 1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'keyspace "%" has no planned moves', keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = format('Plan some first, with shardmap.rebalance(%L) for instance.', keyspace);
    END IF;
    whole := found_one.move;
    load := found_one.load;
    piece := whole;
    -- A part without rows would prove nothing.
    WHILE whole.rows_planned > 1 AND share < 1 LOOP
        cut := shardmap._cut_part(whole, share);
        EXIT WHEN cut IS NULL;
        cut[1] := shardmap._measure_part(cut[1]);
        IF cut[1].rows_planned > 0 THEN
            piece := cut[1];
            other := cut[2];
            other.rows_planned := greatest(whole.rows_planned - piece.rows_planned, 0);
            other.bytes_planned := greatest(whole.bytes_planned - piece.bytes_planned, 0);
            load := load * piece.rows_planned / greatest(whole.rows_planned, piece.rows_planned);
            EXIT;
        END IF;
        share := share * 2;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._choose_canary(text, double precision) IS
    'the move, or part of one, that is to go first: of the planned ones that of the least traffic; what is left of it, if it was cut; and its statements a second';

CREATE FUNCTION shardmap.plan_canary(keyspace text DEFAULT 'main', share double precision DEFAULT 0.05)
RETURNS TABLE (cut_from bigint, part text, source text, target text, rows bigint, bytes bigint, load double precision, rest bigint[])
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT (c.piece).id, shardmap._part_text(c.piece), (c.piece).source, (c.piece).target, (c.piece).rows_planned, (c.piece).bytes_planned, c.load,
        ARRAY(SELECT m.id FROM shardmap.move m WHERE m.keyspace = $1 AND m.state = 'planned' AND m.wish IS NULL
            AND (m.id <> (c.piece).id OR (c.other).id IS NOT NULL) ORDER BY m.id)
      FROM shardmap._choose_canary($1, $2) c
$$;
COMMENT ON FUNCTION shardmap.plan_canary(text, double precision) IS
    'what shardmap.canary would try first, of which planned move, with its statements a second, and the moves that would wait for it; changes nothing';

-- The keyspace is locked. Begun moves are seen by those that begin them under the lock of their row.
CREATE FUNCTION shardmap._enter_canary(run shardmap.canary_run, piece shardmap.move, other shardmap.move) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    met shardmap.move;
    tables shardmap.move_table[];
BEGIN
    FOR met IN SELECT m.* FROM shardmap.move m WHERE m.keyspace = run.keyspace AND m.state NOT IN ('done', 'rolled_back') ORDER BY m.id FOR UPDATE LOOP
        IF met.state <> 'planned' THEN
            PERFORM shardmap._refuse_overlap(met);
        END IF;
    END LOOP;
    run.move := piece.id;
    IF other.id IS NOT NULL THEN
        SELECT m.* INTO STRICT met FROM shardmap.move m WHERE m.id = piece.id;
        run.cut_from := met.id;
        run.uncut := jsonb_build_object('arcs', met.arcs, 'modulus', met.modulus, 'remainders', met.remainders, 'lower', met.lower,
            'upper', met.upper, 'rows_planned', met.rows_planned, 'bytes_planned', met.bytes_planned);
        tables := ARRAY(SELECT t FROM shardmap.move_table t WHERE t.move = met.id ORDER BY t.position);
        PERFORM shardmap._save_part(other);
        run.move := shardmap._enter_move(piece, tables);
    END IF;
    run.rest := ARRAY(SELECT m.id FROM shardmap.move m
        WHERE m.keyspace = run.keyspace AND m.state = 'planned' AND m.wish IS NULL AND m.id <> run.move ORDER BY m.id);
    INSERT INTO shardmap.canary_run (move, keyspace, cut_from, uncut, rest, bake, baseline, max_error_rate, max_slowdown, min_statements)
    VALUES (run.move, run.keyspace, run.cut_from, run.uncut, run.rest, run.bake, run.baseline, run.max_error_rate, run.max_slowdown, run.min_statements);
    RETURN run.move;
END
$$;
COMMENT ON FUNCTION shardmap._enter_canary(shardmap.canary_run, shardmap.move, shardmap.move) IS 'enters a canary in the catalog, and its move if it is cut from another; returns its number';

CREATE FUNCTION shardmap._save_part(job shardmap.move) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE shardmap.move m SET arcs = job.arcs, modulus = job.modulus, remainders = job.remainders, lower = job.lower, upper = job.upper,
            except_keys = job.except_keys, rows_planned = job.rows_planned, bytes_planned = job.bytes_planned
     WHERE m.id = job.id AND m.state = 'planned'
$$;
COMMENT ON FUNCTION shardmap._save_part(shardmap.move) IS 'changes what a planned move moves';

CREATE FUNCTION shardmap._plan_again(run shardmap.canary_run) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space shardmap.keyspace := shardmap._lock_keyspace(run.keyspace);
    planned shardmap.move;
BEGIN
    SELECT w.* INTO planned FROM shardmap.move m, LATERAL jsonb_populate_record(m, run.uncut) w WHERE m.id = run.cut_from AND m.state = 'planned';
    IF NOT FOUND THEN
        run.cut_from := NULL;
        planned := shardmap._find_move(run.move);
    END IF;
    IF EXISTS (SELECT FROM shardmap.move m WHERE m.keyspace = space.name AND m.state NOT IN ('done', 'rolled_back')
        AND m.id IS DISTINCT FROM run.cut_from AND shardmap._parts_overlap(m, planned))
    THEN
        RETURN;
    END IF;
    planned.except_keys := CASE planned.kind WHEN 'key' THEN '{}'
        ELSE ARRAY(SELECT p.key FROM shardmap.pin p WHERE p.keyspace = space.name AND shardmap._part_has_key(planned, p.key) ORDER BY 1) END;
    IF run.cut_from IS NOT NULL THEN
        PERFORM shardmap._save_part(planned);
    ELSE
        PERFORM shardmap._enter_move(planned, ARRAY(SELECT t FROM shardmap.move_table t WHERE t.move = run.move ORDER BY t.position));
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._plan_again(shardmap.canary_run) IS
    'plans what a canary has moved and taken back: within the move from which it was cut, or as a move of its own; unless another has that now';

CREATE FUNCTION shardmap._update_canary(id bigint, changes jsonb) RETURNS shardmap.canary_run
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    new shardmap.canary_run;
BEGIN
    SELECT c.* INTO STRICT new FROM shardmap.canary_run c WHERE c.move = $1 FOR UPDATE;
    IF new.finished_at IS NULL THEN
        new := jsonb_populate_record(new, changes);
        UPDATE shardmap.canary_run c SET state = new.state, since = new.since, looked_at = new.looked_at, verified_at = new.verified_at,
                verifications = new.verifications, counters = new.counters, before = new.before, during = new.during,
                suspected = new.suspected, verdict = new.verdict, finished_at = new.finished_at
         WHERE c.move = $1;
    END IF;
    RETURN new;
END
$$;
COMMENT ON FUNCTION shardmap._update_canary(bigint, jsonb) IS 'changes a canary in the catalog, unless it has come to its end; returns it as it is now';

CREATE FUNCTION shardmap.end_canary(keyspace text DEFAULT 'main') RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    run shardmap.canary_run;
BEGIN
    SELECT c.* INTO run FROM shardmap.canary_run c WHERE c.keyspace = $1 AND c.finished_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'keyspace "%" has no canary under way', keyspace
            USING ERRCODE = 'undefined_object', HINT = 'See shardmap.canaries.';
    END IF;
    PERFORM shardmap._update_canary(run.move, jsonb_build_object('state', 'ended', 'finished_at', clock_timestamp(),
        'verdict', concat_ws('; ', run.verdict, 'given up in state ' || run.state)));
    RETURN run.move;
END
$$;
COMMENT ON FUNCTION shardmap.end_canary(text) IS
    'gives up the canary of a keyspace: its move, and those that wait for it, are moves like others from now on, to be run or rolled back; returns the number of the move';

REVOKE ALL ON FUNCTION shardmap._is_canary(bigint), shardmap._check_no_canary(shardmap.move), shardmap._cut_part(shardmap.move, double precision),
    shardmap._measure_part(shardmap.move), shardmap._choose_canary(text, double precision), shardmap.plan_canary(text, double precision),
    shardmap._enter_canary(shardmap.canary_run, shardmap.move, shardmap.move), shardmap._save_part(shardmap.move),
    shardmap._plan_again(shardmap.canary_run), shardmap._update_canary(bigint, jsonb), shardmap.end_canary(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._is_canary(bigint), shardmap._check_no_canary(shardmap.move), shardmap._cut_part(shardmap.move, double precision),
    shardmap._measure_part(shardmap.move), shardmap._choose_canary(text, double precision), shardmap.plan_canary(text, double precision),
    shardmap._enter_canary(shardmap.canary_run, shardmap.move, shardmap.move), shardmap._save_part(shardmap.move),
    shardmap._plan_again(shardmap.canary_run), shardmap._update_canary(bigint, jsonb), shardmap.end_canary(text) TO shardmap_admin;
