-- Moves: how one is planned, looked at before its first byte, and given up.
--
-- Decides whether rows of a part can go to another shard. What always holds: all that could stand in the way is looked at
-- before anything is written; a dry run writes nothing at all; a move to where the rows are is none. Refuses tables
-- without a primary key, tables that differ between the shards, shards that are replicas, missing privileges, rows of
-- the part that are on the target already. Read moves_alone.sql next.

-- Of a logical table, asked of a shard: relkind, columns with types, primary key, its types, columns to copy with the
-- primary key first, whether something fires when rows are written, whether rows may be hidden, missing privileges.
CREATE FUNCTION shardmap._shard_layout(relation regclass, shard text) RETURNS text[]
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT r FROM pg_class l JOIN pg_namespace n ON n.oid = l.relnamespace, shardmap.remote_rows(shard, format($query$
        SELECT c.relkind::text,
            (SELECT array_agg(format('%%I %%s', a.attname, format_type(a.atttypid, a.atttypmod)) ORDER BY a.attname)
               FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)::text,
            k.names::text, k.types::text,
            (SELECT array_agg(a.attname::text ORDER BY coalesce(array_position(k.names, a.attname::text), 2000), a.attnum)
               FROM pg_catalog.pg_attribute a
              WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '')::text,
            EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname !~ '^shardmap_move_')::text,
            row_security_active(c.oid)::text,
            (SELECT string_agg(p, ', ') FROM unnest(ARRAY['SELECT', 'INSERT', 'DELETE', 'TRIGGER']) p
              WHERE NOT has_table_privilege(c.oid, p))
          FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
          LEFT JOIN LATERAL (
            SELECT array_agg(a.attname::text ORDER BY x.position) AS names,
                array_agg(format_type(a.atttypid, a.atttypmod) ORDER BY x.position) AS types
              FROM pg_catalog.pg_index i, unnest(i.indkey) WITH ORDINALITY x (attnum, position), pg_catalog.pg_attribute a
             WHERE i.indrelid = c.oid AND i.indisprimary AND a.attrelid = c.oid AND a.attnum = x.attnum AND a.attgenerated = ''
               AND x.position <= i.indnkeyatts) k ON true
         WHERE n.nspname = %L AND c.relname = %L
        $query$, n.nspname, l.relname)) r
     WHERE l.oid = relation
$$;
COMMENT ON FUNCTION shardmap._shard_layout(regclass, text) IS 'what a move must know of a logical table on a shard';
REVOKE ALL ON FUNCTION shardmap._shard_layout(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._shard_layout(regclass, text) TO shardmap_admin;

CREATE FUNCTION shardmap._move_condition(job shardmap.move, relation regclass, prefix text DEFAULT '') RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._part_sql(job, t.key_type, prefix || quote_ident(t.key_column))
      FROM shardmap.logical_table t WHERE t.relation = $2
$$;
COMMENT ON FUNCTION shardmap._move_condition(shardmap.move, regclass, text) IS 'condition, for a shard, that rows of a table belong to a move';
REVOKE ALL ON FUNCTION shardmap._move_condition(shardmap.move, regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._move_condition(shardmap.move, regclass, text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_move_server(shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    what text;
    hint text;
BEGIN
    SELECT f.what, f.hint INTO what, hint FROM (
        SELECT r[1]::integer AS version, r[2]::boolean AS is_replica, r[3] = 'on' AS is_read_only, r[4]::boolean AS may_create,
            r[5]::boolean AS has_language, r[6]::bigint AS prepared
          FROM shardmap.remote_rows(shard, $query$
            SELECT current_setting('server_version_num'), pg_is_in_recovery()::text, current_setting('default_transaction_read_only'),
                has_database_privilege(current_database(), 'CREATE')::text,
                EXISTS (SELECT FROM pg_catalog.pg_language WHERE lanname = 'plpgsql')::text,
                (SELECT count(*) FROM pg_catalog.pg_prepared_xacts WHERE database = current_database() AND prepared < now() - interval '1 minute')::text
            $query$) r) s,
        LATERAL (VALUES
            (s.is_replica, 'is a replica', 'Let its foreign server name the primary.'),
            (s.is_read_only, 'is read-only', 'Look at default_transaction_read_only there.'),
            (s.version < 130000, 'is of a version before 13', 'Upgrade it.'),
            (NOT s.may_create, 'does not let this user create schemas', 'GRANT CREATE ON DATABASE to the user of the user mapping.'),
            (NOT s.has_language, 'lacks the language plpgsql', 'CREATE EXTENSION plpgsql there: triggers log the changes.'),
            (s.prepared > 0, format('has %s prepared transactions older than a minute', s.prepared),
                'See shardmap.in_doubt and pg_prepared_xacts there: they hold locks.')) f (holds, what, hint)
     WHERE f.holds LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'shard "%" %', shard, what USING ERRCODE = 'object_not_in_prerequisite_state', HINT = hint;
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_move_server(text) IS 'raises an error unless rows can be moved from and to a shard';
REVOKE ALL ON FUNCTION shardmap._check_move_server(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_move_server(text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_move_table(relation regclass, shard text, layout text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    what text;
    hint text;
BEGIN
    SELECT f.what, f.hint INTO what, hint FROM (VALUES
        (layout IS NULL, 'is missing', 'Restore it there from a backup.'),
        (layout[1] <> 'r', 'is no ordinary table', 'Only ordinary tables can be moved.'),
        (layout[3] IS NULL, 'has no primary key', 'Add one that includes the shard key: rows are copied in its order.'),
        (layout[7]::boolean, 'has row security that may hide rows', 'Map a user there who bypasses it.'),
        (layout[8] IS NOT NULL, 'does not allow ' || layout[8], 'GRANT it to the user of the user mapping.')) f (holds, what, hint)
     WHERE f.holds LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'cannot move rows of table %: on shard "%" it %', relation, shard, what
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = hint;
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_move_table(regclass, text, text[]) IS 'raises an error unless a table''s layout on a shard lets its rows be moved';
REVOKE ALL ON FUNCTION shardmap._check_move_table(regclass, text, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_move_table(regclass, text, text[]) TO shardmap_admin;

-- With triggers or foreign keys on the shards' tables rows are written as a replica would.
CREATE FUNCTION shardmap._check_writes_as_replica(shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap.remote_execute(shard, 'SET LOCAL session_replication_role = replica; SET LOCAL session_replication_role = origin');
EXCEPTION
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'shard "%" does not let this user move rows past triggers and foreign keys', shard
            USING ERRCODE = 'insufficient_privilege',
                HINT = 'There, GRANT SET ON PARAMETER session_replication_role to the user of the user mapping (since Postgres 15), or map a superuser.';
END
$$;
COMMENT ON FUNCTION shardmap._check_writes_as_replica(text) IS 'raises an error unless session_replication_role can be set on a shard';
REVOKE ALL ON FUNCTION shardmap._check_writes_as_replica(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_writes_as_replica(text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_source(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF shardmap._part_owners(job) IS DISTINCT FROM ARRAY[job.source] THEN
        RAISE EXCEPTION '% of keyspace "%" is not on shard "%" any more', shardmap._part_text(job), job.keyspace, job.source
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = format('Give the move up with shardmap.cancel_move(%s), and plan another.', job.id);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_source(shardmap.move) IS 'raises an error unless the map gives all of a move''s part to its source';
REVOKE ALL ON FUNCTION shardmap._check_source(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_source(shardmap.move) TO shardmap_admin;

-- All that could stand in the way of a job. Returns whether its tables have triggers or foreign keys.
CREATE FUNCTION shardmap._check_move(job shardmap.move) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved shardmap.move_table;
    here text[];
    there text[];
    fires boolean := false;
BEGIN
    PERFORM shardmap._check_move_server(job.source);
    PERFORM shardmap._check_move_server(job.target);
    PERFORM shardmap._check_source(job);
    PERFORM shardmap._check_surroundings(job);
    FOR moved IN SELECT t.* FROM shardmap.move_table t WHERE t.move = job.id ORDER BY t.position LOOP
        here := shardmap._shard_layout(moved.relation, job.source);
        there := shardmap._shard_layout(moved.relation, job.target);
        PERFORM shardmap._check_move_table(moved.relation, job.source, here);
        PERFORM shardmap._check_move_table(moved.relation, job.target, there);
        IF here[2:5] IS DISTINCT FROM there[2:5] THEN
            RAISE EXCEPTION 'table % differs on shards "%" and "%"', moved.relation, job.source, job.target
                USING ERRCODE = 'object_not_in_prerequisite_state',
                    DETAIL = format('Columns: %s and %s; primary key: %s and %s.', here[2], there[2], here[3], there[3]),
                    HINT = 'Make them alike.';
        ELSIF here[3]::text[] IS DISTINCT FROM moved.key_columns OR here[5]::text[] IS DISTINCT FROM moved.columns THEN
            RAISE EXCEPTION 'table % has changed since move % was planned', moved.relation, job.id
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = format('Give it up with shardmap.cancel_move(%s), and plan another.', job.id);
        ELSIF EXISTS (SELECT FROM shardmap.remote_rows(job.target, format('SELECT ''x'' AS found FROM ONLY %s WHERE %s LIMIT 1',
                shardmap._shard_table(moved.relation), shardmap._move_condition(job, moved.relation))))
        THEN
            RAISE EXCEPTION 'shard "%" has rows of % in table % already', job.target, shardmap._part_text(job), moved.relation
                USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = 'They are not its own, for it does not own their keys.',
                    HINT = 'Delete them there.';
        END IF;
        fires := fires OR here[6]::boolean OR there[6]::boolean;
    END LOOP;
    IF fires THEN
        PERFORM shardmap._check_writes_as_replica(job.source);
        PERFORM shardmap._check_writes_as_replica(job.target);
    END IF;
    RETURN fires;
END
$$;
COMMENT ON FUNCTION shardmap._check_move(shardmap.move) IS 'raises an error if something stands in the way of a move; returns whether its rows must be written past triggers or foreign keys';
REVOKE ALL ON FUNCTION shardmap._check_move(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_move(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._enter_move(job shardmap.move, tables shardmap.move_table[]) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    number bigint;
BEGIN
    INSERT INTO shardmap.move (keyspace, kind, key, literal, arcs, modulus, remainders, lower, upper, except_keys, engine, source, target,
        rows_planned, bytes_planned)
    VALUES (job.keyspace, job.kind, job.key, job.literal, job.arcs, job.modulus, job.remainders, job.lower, job.upper, job.except_keys,
        coalesce(job.engine, 'triggers'), job.source, job.target, job.rows_planned, job.bytes_planned)
    RETURNING id INTO number;
    INSERT INTO shardmap.move_table (move, position, relation, key_columns, key_types, columns)
    SELECT number, t.position, t.relation, t.key_columns, t.key_types, t.columns FROM unnest(tables) t;
    RETURN number;
END
$$;
COMMENT ON FUNCTION shardmap._enter_move(shardmap.move, shardmap.move_table[]) IS 'enters a move in the catalog; returns its number';
REVOKE ALL ON FUNCTION shardmap._enter_move(shardmap.move, shardmap.move_table[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._enter_move(shardmap.move, shardmap.move_table[]) TO shardmap_admin;

CREATE FUNCTION shardmap._part_size(job shardmap.move, relation regclass) RETURNS text[]
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT r FROM shardmap.remote_rows(job.source, format(
        'SELECT pg_catalog.count(*)::pg_catalog.text, coalesce(pg_catalog.sum(pg_catalog.pg_column_size(t.*)), 0)::pg_catalog.text '
        'FROM ONLY %s t WHERE %s', shardmap._shard_table(relation), shardmap._move_condition(job, relation, 't.'))) r
$$;
COMMENT ON FUNCTION shardmap._part_size(shardmap.move, regclass) IS 'number and bytes of the rows of a table that a move has to move';
REVOKE ALL ON FUNCTION shardmap._part_size(shardmap.move, regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._part_size(shardmap.move, regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._check_engine(engine text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF engine IS NULL OR engine NOT IN ('triggers', 'logical') THEN
        RAISE EXCEPTION 'there is no engine "%" for moves', engine
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is triggers or logical.';
    END IF;
    RETURN engine;
END
$$;
COMMENT ON FUNCTION shardmap._check_engine(text) IS 'the name of an engine; an error if there is none of that name';
REVOKE ALL ON FUNCTION shardmap._check_engine(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_engine(text) TO shardmap_admin;

-- Of `planned`, the caller has set keyspace, kind, part, source and target, and the engine if it is not the usual one.
CREATE FUNCTION shardmap._plan_move(planned shardmap.move, dry_run boolean)
RETURNS TABLE (move bigint, relation regclass, source text, target text, rows bigint, bytes bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    tables shardmap.move_table[] := '{}';
    moved shardmap.move_table;
    layout text[];
    size text[];
    logical regclass;
    row_counts bigint[] := '{}';
    byte_counts bigint[] := '{}';
BEGIN
    PERFORM shardmap._check_shard_of(planned.keyspace, planned.target);
    PERFORM shardmap._check_no_overlap(planned);
    planned.except_keys := CASE planned.kind WHEN 'key' THEN '{}'
        ELSE ARRAY(SELECT p.key FROM shardmap.pin p WHERE p.keyspace = planned.keyspace AND shardmap._part_has_key(planned, p.key) ORDER BY 1) END;
    planned.rows_planned := 0;
    planned.bytes_planned := 0;
    FOR logical IN
        SELECT t.relation FROM shardmap.logical_table t
         WHERE t.keyspace = planned.keyspace
           AND (planned.kind <> 'key' OR shardmap._table_can_hold_key(t.relation, t.key_type, planned.literal, planned.key))
         ORDER BY t.relation::oid
    LOOP
        layout := shardmap._shard_layout(logical, planned.source);
        PERFORM shardmap._check_move_table(logical, planned.source, layout);
        moved.position := cardinality(tables) + 1;
        moved.relation := logical;
        moved.key_columns := layout[3];
        moved.key_types := layout[4];
        moved.columns := layout[5];
        tables := tables || moved;
        size := shardmap._part_size(planned, logical);
        planned.rows_planned := planned.rows_planned + size[1]::bigint;
        planned.bytes_planned := planned.bytes_planned + size[2]::bigint;
        row_counts := row_counts || size[1]::bigint;
        byte_counts := byte_counts || size[2]::bigint;
    END LOOP;
    IF NOT dry_run THEN
        planned.id := shardmap._enter_move(planned, tables);
        RAISE NOTICE 'move % is planned: % from shard "%" to shard "%"', planned.id, shardmap._part_text(planned), planned.source, planned.target
            USING DETAIL = format('%s rows, %s.', planned.rows_planned, pg_size_pretty(planned.bytes_planned)),
                HINT = format('Run it: CALL shardmap.run_move(%s).', planned.id);
    END IF;
    RETURN QUERY SELECT planned.id, (tables[i]).relation, planned.source, planned.target, row_counts[i], byte_counts[i]
        FROM generate_subscripts(tables, 1) i ORDER BY i;
END
$$;
COMMENT ON FUNCTION shardmap._plan_move(shardmap.move, boolean) IS 'plans a move of a part of a keyspace, which is locked against other changes of the map';
REVOKE ALL ON FUNCTION shardmap._plan_move(shardmap.move, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._plan_move(shardmap.move, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap._moves_between(keyspace text, before jsonb, after jsonb) RETURNS SETOF shardmap.move
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    flow record;
    planned shardmap.move;
BEGIN
    FOR flow IN
        SELECT p.* FROM shardmap._map_parts(shardmap._map_json(jsonb_build_array(before)),
            CASE WHEN after IS NOT NULL THEN shardmap._map_json(jsonb_build_array(after)) END) p
    LOOP
        planned.keyspace := keyspace;
        planned.kind := CASE WHEN flow.arcs IS NOT NULL THEN 'arcs' WHEN flow.modulus IS NOT NULL THEN 'remainders' ELSE 'range' END;
        planned.arcs := flow.arcs;
        planned.modulus := flow.modulus;
        planned.remainders := flow.remainders;
        planned.lower := flow.lower;
        planned.upper := flow.upper;
        planned.source := flow.giver;
        planned.target := flow.gainer;
        RETURN NEXT planned;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._moves_between(text, jsonb, jsonb) IS
    'moves, for _plan_move, by which a keyspace, as _keyspace_json, becomes another; NULL: none';
REVOKE ALL ON FUNCTION shardmap._moves_between(text, jsonb, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._moves_between(text, jsonb, jsonb) TO shardmap_admin;

CREATE FUNCTION shardmap._plan_move_of_key(keyspace text, literal text, canonical text, shard text, dry_run boolean, engine text)
RETURNS TABLE (move bigint, relation regclass, source text, target text, rows bigint, bytes bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    planned shardmap.move;
BEGIN
    IF canonical IS NULL THEN
        RAISE EXCEPTION 'cannot move a null key' USING ERRCODE = 'null_value_not_allowed';
    END IF;
    PERFORM shardmap._lock_keyspace(keyspace);
    PERFORM shardmap._check_shard_of(keyspace, shard);
    planned.engine := shardmap._check_engine(engine);
    planned.keyspace := $1;
    planned.kind := 'key';
    planned.literal := $2;
    planned.key := canonical;
    planned.source := shardmap.owner_of(canonical, $1);
    planned.target := shard;
    IF planned.source = shard THEN
        PERFORM shardmap._check_no_overlap(planned);
        RAISE NOTICE 'key "%" is on shard "%" already', canonical, shard;
        RETURN;
    END IF;
    RETURN QUERY SELECT p.* FROM shardmap._plan_move(planned, dry_run) p;
END
$$;
COMMENT ON FUNCTION shardmap._plan_move_of_key(text, text, text, text, boolean, text) IS 'plans a move of a key, given as literal and as canonical text';
REVOKE ALL ON FUNCTION shardmap._plan_move_of_key(text, text, text, text, boolean, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._plan_move_of_key(text, text, text, text, boolean, text) TO shardmap_admin;

CREATE FUNCTION shardmap.move_key(key text, shard text, keyspace text DEFAULT 'main', dry_run boolean DEFAULT false, engine text DEFAULT 'triggers')
RETURNS TABLE (move bigint, relation regclass, source text, target text, rows bigint, bytes bigint)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT p.move, p.relation, p.source, p.target, p.rows, p.bytes FROM shardmap._plan_move_of_key(keyspace, key, key, shard, dry_run, engine) p
$$;
CREATE FUNCTION shardmap.move_key(key anyelement, shard text, keyspace text DEFAULT 'main', dry_run boolean DEFAULT false, engine text DEFAULT 'triggers')
RETURNS TABLE (move bigint, relation regclass, source text, target text, rows bigint, bytes bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' AS $$
BEGIN
    RETURN QUERY SELECT p.move, p.relation, p.source, p.target, p.rows, p.bytes
        FROM shardmap._plan_move_of_key(keyspace, key::text, shardmap.canonical_key(key), shard, dry_run, engine) p;
END
$$;
COMMENT ON FUNCTION shardmap.move_key(text, text, text, boolean, text) IS 'plans to move all rows of a key to a shard of its own choosing; returns what would move, by table; dry_run: enters nothing; engine: triggers, or logical for logical replication';
COMMENT ON FUNCTION shardmap.move_key(anyelement, text, text, boolean, text) IS 'plans to move all rows of a key to a shard of its own choosing; returns what would move, by table; dry_run: enters nothing; engine: triggers, or logical for logical replication';
REVOKE ALL ON FUNCTION shardmap.move_key(text, text, text, boolean, text), shardmap.move_key(anyelement, text, text, boolean, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.move_key(text, text, text, boolean, text), shardmap.move_key(anyelement, text, text, boolean, text) TO shardmap_admin;

CREATE FUNCTION shardmap._wish_for_move(id bigint, wish text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    job shardmap.move;
BEGIN
    PERFORM shardmap._find_move(id);
    job := shardmap._update_move(id, jsonb_build_object('wish', wish));
    IF wish = 'cancel' THEN
        PERFORM shardmap._next_move_state(job.state, 'cancel', job.reversed); -- an error if it is too late
    ELSIF wish = 'rollback' THEN
        PERFORM shardmap._next_move_state(job.state, 'reverse', job.reversed);
    END IF;
    IF wish IS DISTINCT FROM 'pause' THEN
        PERFORM shardmap._want_worker(id, false);
    END IF;
    RETURN job.state;
END
$$;
COMMENT ON FUNCTION shardmap._wish_for_move(bigint, text) IS 'notes what is to become of a move; returns its state';
REVOKE ALL ON FUNCTION shardmap._wish_for_move(bigint, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._wish_for_move(bigint, text) TO shardmap_admin;

CREATE FUNCTION shardmap.pause_move(id bigint) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$ SELECT shardmap._wish_for_move(id, 'pause') $$;
COMMENT ON FUNCTION shardmap.pause_move(bigint) IS 'lets a move stop after the step under way; returns its state';
CREATE FUNCTION shardmap.resume_move(id bigint) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$ SELECT shardmap._wish_for_move(id, NULL) $$;
COMMENT ON FUNCTION shardmap.resume_move(bigint) IS 'lets a paused move be run again; returns its state';
CREATE FUNCTION shardmap.cancel_move(id bigint) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$ SELECT shardmap._wish_for_move(id, 'cancel') $$;
COMMENT ON FUNCTION shardmap.cancel_move(bigint) IS 'gives up a move whose target does not own the rows yet: shardmap.run_move then takes back what it has done; or lets a move that is on its way back go forward; returns its state';
REVOKE ALL ON FUNCTION shardmap.pause_move(bigint), shardmap.resume_move(bigint), shardmap.cancel_move(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.pause_move(bigint), shardmap.resume_move(bigint), shardmap.cancel_move(bigint) TO shardmap_admin;
