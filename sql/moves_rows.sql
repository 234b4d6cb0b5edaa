-- Moves: rows on their way, and what tells both sides apart.
--
-- Decides how rows are copied, changes applied, both sides compared, and rows deleted. What always holds: a row is copied
-- or applied by its primary key, as it is at the snapshot of the source that the step has; a change is applied again
-- rather than missed; nothing is deleted of a shard that owns the part. For the time of a job, both shards have a schema
-- shardmap_move_ID: on the source with a log of changed primary keys for each table, filled by triggers; on the target
-- with a place for those being applied. Read moves_steps.sql next.

CREATE FUNCTION shardmap._move_schema(id bigint) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$ SELECT 'shardmap_move_' || id $$;
CREATE FUNCTION shardmap._move_schema(job shardmap.move) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._move_schema(job.id) || CASE WHEN job.reversed THEN '_back' ELSE '' END
$$;
COMMENT ON FUNCTION shardmap._move_schema(shardmap.move) IS 'the one that it uses now: the way back has its own';
COMMENT ON FUNCTION shardmap._move_schema(bigint) IS 'schema of a move''s own tables on its shards';

CREATE FUNCTION shardmap._name_list(names text[], prefix text DEFAULT '') RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT string_agg(format('%s%I', prefix, n.name), ', ' ORDER BY n.position) FROM unnest(names) WITH ORDINALITY n (name, position)
$$;
COMMENT ON FUNCTION shardmap._name_list(text[], text) IS 'quoted names between commas';

-- Before statements that write a move's rows. Others begin with _run_guard alone.
CREATE FUNCTION shardmap._move_prefix(job shardmap.move) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._run_guard(job) || CASE WHEN job.fires THEN 'SET LOCAL session_replication_role = replica; ' ELSE '' END
$$;
COMMENT ON FUNCTION shardmap._move_prefix(shardmap.move) IS 'what lets statements write past triggers and foreign keys, if the tables have some';

-- Comparison of a table's primary key with a watermark. One key's rows are told apart by the other columns: with these alone the
-- index is entered at the watermark, else at the key's first row, over and over. Without other columns the key has one row.
CREATE FUNCTION shardmap._beyond(job shardmap.move, moved shardmap.move_table, operator text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN moved.watermark IS NULL THEN 'true' ELSE coalesce((
        SELECT format('(%s) %s (%s)', string_agg(quote_ident(w.name), ', ' ORDER BY w.position), operator,
                string_agg(format('%L::%s', w.value, w.type), ', ' ORDER BY w.position))
          FROM unnest(moved.key_columns, moved.watermark, moved.key_types) WITH ORDINALITY w (name, value, type, position)
         WHERE job.kind <> 'key' OR w.name <> (SELECT l.key_column FROM shardmap.logical_table l WHERE l.relation = moved.relation)
        HAVING count(*) > 0), (operator = '<=')::text) END
$$;
COMMENT ON FUNCTION shardmap._beyond(shardmap.move, shardmap.move_table, text) IS 'condition, for a shard, on rows before or after a table''s watermark';

CREATE FUNCTION shardmap._install_log(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    schema text := shardmap._move_schema(job);
    moved shardmap.move_table;
    log text;
    source text := format('DROP SCHEMA IF EXISTS %I CASCADE; CREATE SCHEMA %1$I', schema);
    target text := source;
    old_values text;
    new_values text;
    changes text;
BEGIN
    FOR moved IN SELECT t.* FROM shardmap.move_table t WHERE t.move = job.id ORDER BY t.position LOOP
        log := format('%I.changes_%s', schema, moved.position);
        old_values := shardmap._name_list(moved.key_columns, 'OLD.');
        new_values := shardmap._name_list(moved.key_columns, 'NEW.');
        changes := format('INSERT INTO %s (%s) VALUES', log, shardmap._name_list(moved.key_columns));
        source := source || format($ddl$;
            CREATE TABLE %1$s AS SELECT %2$s FROM ONLY %3$s WITH NO DATA;
            ALTER TABLE %1$s ADD shardmap_xid pg_catalog.xid8 NOT NULL DEFAULT pg_catalog.pg_current_xact_id();
            CREATE FUNCTION %4$I.log_%5$s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
            BEGIN
                IF TG_OP <> 'INSERT' THEN
                    %6$s (%7$s);
                END IF;
                IF TG_OP <> 'DELETE' THEN
                    %6$s (%8$s);
                END IF;
                RETURN NULL;
            END
            $body$;
            CREATE TRIGGER %9$I AFTER INSERT ON %3$s FOR EACH ROW WHEN (%10$s) EXECUTE FUNCTION %4$I.log_%5$s();
            CREATE TRIGGER %11$I AFTER UPDATE ON %3$s FOR EACH ROW WHEN (%10$s OR %12$s) EXECUTE FUNCTION %4$I.log_%5$s();
            CREATE TRIGGER %13$I AFTER DELETE ON %3$s FOR EACH ROW WHEN (%12$s) EXECUTE FUNCTION %4$I.log_%5$s()
            $ddl$, log, shardmap._name_list(moved.key_columns), shardmap._shard_table(moved.relation), schema, moved.position,
            changes, old_values, new_values, schema || '_insert', shardmap._move_condition(job, moved.relation, 'NEW.'),
            schema || '_update', shardmap._move_condition(job, moved.relation, 'OLD.'), schema || '_delete');
        target := target || format('; CREATE TABLE %s AS SELECT %s FROM ONLY %s WITH NO DATA', log,
            shardmap._name_list(moved.key_columns), shardmap._shard_table(moved.relation));
    END LOOP;
    PERFORM shardmap.remote_execute(job.target, shardmap._run_guard(job) || 'SET LOCAL client_min_messages = error; ' || target);
    PERFORM shardmap.remote_execute(job.source, shardmap._run_guard(job) || 'SET LOCAL client_min_messages = error; ' || source);
END
$$;
COMMENT ON FUNCTION shardmap._install_log(shardmap.move) IS 'lets triggers on the source log what changes, and makes room on the target for what is applied';
REVOKE ALL ON FUNCTION shardmap._install_log(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._install_log(shardmap.move) TO shardmap_admin;

-- The triggers first, by table: who writes it holds that, and waits for the log.
CREATE FUNCTION shardmap._remove_log(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shard text;
    found text;
BEGIN
    FOREACH shard IN ARRAY ARRAY[job.source, job.target] LOOP
        -- At once on each: a statement over all shards may hold a lock on the other one.
        FOR found IN SELECT r[1] FROM shardmap.remote_rows(shard, format(
            'SELECT pg_catalog.string_agg(pg_catalog.format(''DROP TRIGGER %%I ON %%s'', t.tgname, t.tgrelid::pg_catalog.regclass), ''; '')::text AS drops '
            'FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace '
            'WHERE n.nspname IN (%L, %L) GROUP BY t.tgrelid', shardmap._move_schema(job.id), shardmap._move_schema(job.id) || '_back')) r
        LOOP
            PERFORM shardmap.remote_execute(shard, shardmap._run_guard(job) || found, false);
        END LOOP;
        SELECT r[1] INTO found FROM shardmap.remote_rows(shard, format(
            'SELECT pg_catalog.string_agg(pg_catalog.quote_ident(n.nspname), '', '')::text AS names FROM pg_catalog.pg_namespace n WHERE n.nspname IN (%L, %L)',
            shardmap._move_schema(job.id), shardmap._move_schema(job.id) || '_back')) r;
        IF found IS NOT NULL THEN
            PERFORM shardmap.remote_execute(shard, format('%sSET LOCAL client_min_messages = error; DROP SCHEMA %s CASCADE', shardmap._run_guard(job), found), false);
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._remove_log(shardmap.move) IS 'drops what a move has made on its shards: log, triggers, schema';
REVOKE ALL ON FUNCTION shardmap._remove_log(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._remove_log(shardmap.move) TO shardmap_admin;

-- Log entries that no step has applied: those of transactions that the last step's snapshot did not see.
CREATE FUNCTION shardmap._unseen(job shardmap.move) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN job.snapshot IS NULL THEN 'true'
        ELSE format('NOT pg_catalog.pg_visible_in_snapshot(c.shardmap_xid, %L::pg_catalog.pg_snapshot)', job.snapshot) END
$$;
COMMENT ON FUNCTION shardmap._unseen(shardmap.move) IS 'condition, for the source, on changes that were not applied';

CREATE FUNCTION shardmap._refuse_flip(job shardmap.move, relation regclass, detail text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'rows of table % differ on shards "%" and "%"', relation, job.source, job.target
        USING ERRCODE = 'data_corrupted', DETAIL = detail,
            HINT = format('Nothing was flipped. Look for who writes on the target, or give up with shardmap.cancel_move(%s).', job.id);
END
$$;
COMMENT ON FUNCTION shardmap._refuse_flip(shardmap.move, regclass, text) IS 'raises an error: a table''s rows of a move are not equal on both sides';
REVOKE ALL ON FUNCTION shardmap._refuse_flip(shardmap.move, regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._refuse_flip(shardmap.move, regclass, text) TO shardmap_admin;

-- All of a table's rows, in this transaction's sessions: the source at its snapshot, the target with what it has got so far.
CREATE FUNCTION shardmap._verify_moved(job shardmap.move, moved shardmap.move_table) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found text;
BEGIN
    SELECT string_agg(concat_ws(' ', c.finding, 'at token', c.token_from::text || ':', c.detail), '; ') INTO found FROM (
        SELECT s.* FROM shardmap._compare_shards(moved.relation, job.source, job.target,
            shardmap._move_condition(job, moved.relation, 't.'), transactional => true, max_rows => 5, by_key => job.kind = 'key') s
         ORDER BY s.finding = 'bucket', s.token_from, s.row_id LIMIT 6) c;
    IF found IS NOT NULL THEN
        PERFORM shardmap._refuse_flip(job, moved.relation, format('Found: %s.', found));
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._verify_moved(shardmap.move, shardmap.move_table) IS 'raises an error that names the differences unless a table''s rows of a move are equal on both sides';
REVOKE ALL ON FUNCTION shardmap._verify_moved(shardmap.move, shardmap.move_table) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._verify_moved(shardmap.move, shardmap.move_table) TO shardmap_admin;

-- Of rows that have changed since all were compared: count and sum of hashes, whatever the order.
CREATE FUNCTION shardmap._compare_moved(job shardmap.move, moved shardmap.move_table, source_condition text, target_condition text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    query text := format('SELECT pg_catalog.count(*)::pg_catalog.text, coalesce(pg_catalog.sum(pg_catalog.hashtextextended('
        'ROW(%s)::pg_catalog.text, 0)::pg_catalog.numeric), 0)::pg_catalog.text FROM ONLY %s t WHERE %s AND ',
        shardmap._name_list(moved.columns, 't.'), shardmap._shard_table(moved.relation), shardmap._move_condition(job, moved.relation, 't.'));
    here text[];
    there text[];
BEGIN
    SELECT r INTO here FROM shardmap.remote_rows(job.source, query || source_condition) r;
    SELECT r INTO there FROM shardmap.remote_rows(job.target, query || target_condition) r;
    IF here IS DISTINCT FROM there THEN
        PERFORM shardmap._refuse_flip(job, moved.relation,
            format('Rows: %s and %s; sum of their hashes: %s and %s.', here[1], there[1], here[2], there[2]));
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._compare_moved(shardmap.move, shardmap.move_table, text, text) IS 'raises an error unless a table''s rows of a job, as far as the conditions hold, are equal on both sides';
REVOKE ALL ON FUNCTION shardmap._compare_moved(shardmap.move, shardmap.move_table, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._compare_moved(shardmap.move, shardmap.move_table, text, text) TO shardmap_admin;

-- Rows whose copying has not come to them are left out: they will be copied as they are by then.
-- What comes after all rows were compared is compared too. `fenced`: nothing else changes the source; what is done on the
-- target commits by itself.
CREATE FUNCTION shardmap._apply_changes(job shardmap.move, fenced boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved shardmap.move_table;
    log text;
    keys text;
    name text;
    changed text;
    count bigint;
    total bigint := 0;
    guard constant text := shardmap._run_guard(job);
    own constant text := shardmap._move_prefix(job);
BEGIN
    FOR moved IN
        SELECT t.* FROM shardmap.move_table t WHERE t.move = job.id AND (t.copied OR t.watermark IS NOT NULL) ORDER BY t.position
    LOOP
        log := format('%I.changes_%s', shardmap._move_schema(job), moved.position);
        keys := shardmap._name_list(moved.key_columns);
        name := shardmap._shard_table(moved.relation);
        changed := format('(%s) IN (SELECT %s FROM %s c WHERE %s)', shardmap._name_list(moved.key_columns, 't.'),
            shardmap._name_list(moved.key_columns, 'c.'), log, shardmap._unseen(job));
        IF NOT EXISTS (SELECT FROM shardmap.remote_rows(job.source, format('SELECT ''x'' AS found FROM %s c WHERE %s LIMIT 1', log, shardmap._unseen(job)))) THEN
            CONTINUE;
        END IF;
        PERFORM shardmap.remote_execute(job.target, format('%sDELETE FROM %s', guard, log), NOT fenced);
        count := (shardmap._pipe_rows(job.source, format('SELECT DISTINCT %s FROM %s c WHERE %s', keys, log, shardmap._unseen(job)),
            job.target, format('%sCOPY %s (%s) FROM STDIN', guard, log, keys), 0, NOT fenced))[1];
        PERFORM shardmap.remote_execute(job.target, format('%sDELETE FROM ONLY %s t USING %s c WHERE (%s) = (%s)', own, name, log,
            shardmap._name_list(moved.key_columns, 't.'), shardmap._name_list(moved.key_columns, 'c.')), NOT fenced);
        PERFORM shardmap._pipe_rows(job.source, format('SELECT %s FROM ONLY %s t WHERE %s AND %s AND %s', shardmap._name_list(moved.columns),
                name, shardmap._move_condition(job, moved.relation, 't.'), changed,
                CASE WHEN moved.copied THEN 'true' ELSE shardmap._beyond(job, moved, '<=') END),
            job.target, format('%sCOPY %s (%s) FROM STDIN', own, name, shardmap._name_list(moved.columns)), 0, NOT fenced);
        IF fenced OR job.verified THEN
            PERFORM shardmap._compare_moved(job, moved, changed, format('(%s) IN (SELECT %s FROM %s c)',
                shardmap._name_list(moved.key_columns, 't.'), shardmap._name_list(moved.key_columns, 'c.'), log));
        END IF;
        total := total + count;
    END LOOP;
    RETURN total;
END
$$;
COMMENT ON FUNCTION shardmap._apply_changes(shardmap.move, boolean) IS 'makes the rows that have changed on the source since the last step the same on the target; returns their number';
REVOKE ALL ON FUNCTION shardmap._apply_changes(shardmap.move, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._apply_changes(shardmap.move, boolean) TO shardmap_admin;

-- Entries that a committed step has applied.
CREATE FUNCTION shardmap._forget_changes(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF job.snapshot IS NOT NULL THEN
        PERFORM shardmap.remote_execute(job.source, shardmap._run_guard(job) || (
            SELECT string_agg(format('DELETE FROM %I.changes_%s c WHERE NOT (%s)', shardmap._move_schema(job), t.position, shardmap._unseen(job)), '; ')
              FROM shardmap.move_table t WHERE t.move = job.id), false);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._forget_changes(shardmap.move) IS 'deletes what is applied from the log on the source';
REVOKE ALL ON FUNCTION shardmap._forget_changes(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._forget_changes(shardmap.move) TO shardmap_admin;

-- Rows of a part lie between others. By the index of the primary key they are found in its order, without a sort, and
-- each batch begins where the last one ended. The rows of one key may have a better index.
CREATE FUNCTION shardmap._read_in_order(job shardmap.move, shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF job.kind <> 'key' THEN
        PERFORM shardmap.remote_rows(shard, 'SELECT set_config(''enable_sort'', ''off'', true), set_config(''enable_seqscan'', ''off'', true), '
            'set_config(''enable_bitmapscan'', ''off'', true)');
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._read_in_order(shardmap.move, text) IS 'lets this transaction read rows of a part on a shard by the index of their primary key';
REVOKE ALL ON FUNCTION shardmap._read_in_order(shardmap.move, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._read_in_order(shardmap.move, text) TO shardmap_admin;

CREATE FUNCTION shardmap._delete_batch(job shardmap.move, shard text, moved shardmap.move_table) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    deleted text[];
BEGIN
    PERFORM shardmap._read_in_order(job, shard);
    moved.watermark := moved.cleaned;
    SELECT r INTO deleted FROM shardmap.remote_rows(shard, format($query$%1$s
        WITH found AS MATERIALIZED (SELECT %2$s, ctid AS shardmap_ctid FROM ONLY %3$s WHERE %4$s AND %5$s ORDER BY %2$s LIMIT %6$s),
            gone AS (DELETE FROM ONLY %3$s WHERE ctid = ANY (ARRAY(SELECT f.shardmap_ctid FROM found f))),
            last AS (SELECT * FROM found ORDER BY %7$s LIMIT 1)
        SELECT (SELECT pg_catalog.count(*)::pg_catalog.text FROM found), %8$s FROM (VALUES (0)) one LEFT JOIN last l ON true$query$,
        shardmap._move_prefix(job), shardmap._name_list(moved.key_columns), shardmap._shard_table(moved.relation),
        shardmap._beyond(job, moved, '>'), shardmap._move_condition(job, moved.relation), shardmap._move_batch(),
        (SELECT string_agg(quote_ident(k) || ' DESC', ', ' ORDER BY n) FROM unnest(moved.key_columns) WITH ORDINALITY u (k, n)),
        (SELECT string_agg(format('l.%I::pg_catalog.text', k), ', ' ORDER BY n) FROM unnest(moved.key_columns) WITH ORDINALITY u (k, n)))) r;
    RETURN deleted;
END
$$;
COMMENT ON FUNCTION shardmap._delete_batch(shardmap.move, text, shardmap.move_table) IS
    'deletes a batch of a move''s rows on a shard, in the order of the primary key; returns their number and the primary key of the last';
REVOKE ALL ON FUNCTION shardmap._delete_batch(shardmap.move, text, shardmap.move_table) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._delete_batch(shardmap.move, text, shardmap.move_table) TO shardmap_admin;

-- Returns how many; 0: there are none left, by a look at all of the table.
CREATE FUNCTION shardmap._delete_moved(job shardmap.move, shard text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved shardmap.move_table;
    deleted text[];
BEGIN
    IF shard = ANY (shardmap._part_owners(job)) THEN
        RAISE EXCEPTION 'shard "%" owns %: nothing of it is deleted there', shard, shardmap._part_text(job)
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'The map was changed past the move: see shardmap.pin and shardmap.tokens.';
    END IF;
    PERFORM shardmap._check_not_replicated(job);
    FOR moved IN SELECT t.* FROM shardmap.move_table t WHERE t.move = job.id ORDER BY t.position DESC LOOP
        LOOP
            deleted := shardmap._delete_batch(job, shard, moved);
            EXIT WHEN deleted[1]::bigint > 0 OR moved.cleaned IS NULL;
            moved.cleaned := NULL; -- what was deleted may have been rolled back there
        END LOOP;
        IF deleted[1]::bigint > 0 THEN
            PERFORM shardmap._note_cleaned(job.id, moved.position, deleted[2:]);
            RETURN deleted[1];
        END IF;
    END LOOP;
    RETURN 0;
END
$$;
COMMENT ON FUNCTION shardmap._delete_moved(shardmap.move, text) IS 'deletes a batch of a move''s rows on a shard that does not own them; returns their number';
REVOKE ALL ON FUNCTION shardmap._delete_moved(shardmap.move, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._delete_moved(shardmap.move, text) TO shardmap_admin;
