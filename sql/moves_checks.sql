-- Moves: what is looked at before the first byte, beyond tables and rights.
--
-- Decides whether a move's shards are alike enough, have room, and are not held up. What always holds: who is in the way is
-- named. Postgres tells nobody over SQL how much of a disk is free: a shard's capacity is what an administrator has said it
-- is, and without a word of his nothing is refused for want of room. Read moves_plan.sql for the other checks.

CREATE TABLE shardmap.shard_capacity (
    shard text COLLATE pg_catalog."C" PRIMARY KEY REFERENCES shardmap.shard ON DELETE CASCADE,
    bytes bigint NOT NULL
        CONSTRAINT shard_capacity_range CHECK (bytes > 0)
);
COMMENT ON TABLE shardmap.shard_capacity IS 'how large the databases of shards may become, as administrators say';
COMMENT ON COLUMN shardmap.shard_capacity.shard IS 'the shard';
COMMENT ON COLUMN shardmap.shard_capacity.bytes IS 'no move to it begins that would make its database larger';
GRANT SELECT ON shardmap.shard_capacity TO PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('shardmap.shard_capacity', '');

CREATE FUNCTION shardmap._note_capacity(shard text, bytes bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM shardmap.shard_capacity c WHERE c.shard = $1;
    INSERT INTO shardmap.shard_capacity (shard, bytes) SELECT $1, $2 WHERE $2 IS NOT NULL;
END
$$;
COMMENT ON FUNCTION shardmap._note_capacity(text, bigint) IS 'enters the capacity of a shard, NULL: takes it out';
REVOKE ALL ON FUNCTION shardmap._note_capacity(text, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._note_capacity(text, bigint) TO shardmap_admin;

CREATE FUNCTION shardmap.set_shard_capacity(name text, bytes bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM shardmap.shard s WHERE s.name = $1) THEN
        RAISE EXCEPTION 'shard "%" does not exist', name USING ERRCODE = 'undefined_object', HINT = 'The view shardmap.shards lists the shards.';
    ELSIF bytes <= 0 THEN
        RAISE EXCEPTION 'invalid capacity % of shard "%"', bytes, name
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give the bytes that its database may grow to, or NULL for no limit.';
    END IF;
    PERFORM shardmap._note_capacity(name, bytes);
END
$$;
COMMENT ON FUNCTION shardmap.set_shard_capacity(text, bigint) IS 'says how large a shard''s database may become: moves that would make it larger are refused; NULL: any size';
REVOKE ALL ON FUNCTION shardmap.set_shard_capacity(text, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.set_shard_capacity(text, bigint) TO shardmap_admin;

-- Rows that other moves are still to bring there count.
CREATE FUNCTION shardmap._check_room(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    capacity constant bigint := (SELECT c.bytes FROM shardmap.shard_capacity c WHERE c.shard = job.target);
    size bigint;
    coming bigint;
BEGIN
    IF capacity IS NULL THEN
        RETURN;
    END IF;
    SELECT r[1] INTO size FROM shardmap.remote_rows(job.target,
        'SELECT pg_catalog.pg_database_size(pg_catalog.current_database())::pg_catalog.text AS bytes') r;
    SELECT coalesce(sum(greatest(m.bytes_planned - m.bytes_copied, 0)), 0) INTO coming FROM shardmap.move m
     WHERE m.target = job.target AND m.id <> job.id AND m.state IN ('prechecked', 'copying');
    IF size + coming + job.bytes_planned > capacity THEN
        RAISE EXCEPTION 'shard "%" has no room for the rows of move %', job.target, job.id
            USING ERRCODE = 'disk_full',
                DETAIL = format('Its capacity is %s; its database has %s, other moves bring %s, and this one %s.', pg_size_pretty(capacity),
                    pg_size_pretty(size), pg_size_pretty(coming), pg_size_pretty(job.bytes_planned)),
                HINT = format('Make room, raise it with shardmap.set_shard_capacity(%L, ..), or give the move up with shardmap.cancel_move(%s).',
                    job.target, job.id);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_room(shardmap.move) IS 'raises an error if a move would make the target larger than its capacity';
REVOKE ALL ON FUNCTION shardmap._check_room(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_room(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._old_transaction() RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$ SELECT interval '1 minute' $$;
COMMENT ON FUNCTION shardmap._old_transaction() IS 'a move does not begin while transactions of this age have written to its tables';

-- Triggers are made, and writers held off, only when those are through who have written before. Who may not see others'
-- sessions there learns of prepared transactions only.
CREATE FUNCTION shardmap._check_holders(job shardmap.move, shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    holders text;
BEGIN
    SELECT string_agg(r[1], '; ') INTO holders FROM shardmap.remote_rows(shard, format($query$
        SELECT concat_ws(' ', CASE WHEN l.pid IS NULL THEN 'prepared transaction ' || quote_literal(p.gid) ELSE 'process ' || l.pid || ' of ' || a.usename END,
                'holds', string_agg(DISTINCT l.mode, ', '), 'on', string_agg(DISTINCT l.relation::regclass::text, ', '), 'since',
                date_trunc('second', now() - coalesce(a.xact_start, p.prepared))::text) AS holder
          FROM pg_catalog.pg_locks l
          LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
          LEFT JOIN pg_catalog.pg_locks x ON l.pid IS NULL AND x.locktype = 'transactionid' AND x.virtualtransaction = l.virtualtransaction
          LEFT JOIN pg_catalog.pg_prepared_xacts p ON p.transaction = x.transactionid
         WHERE l.locktype = 'relation' AND l.granted AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
           AND l.relation IN (%1$s) AND l.mode NOT IN ('AccessShareLock', 'RowShareLock')
           AND coalesce(a.xact_start, p.prepared) < now() - %2$L::interval
         GROUP BY l.pid, a.usename, p.gid, a.xact_start, p.prepared ORDER BY coalesce(a.xact_start, p.prepared) LIMIT 5
        $query$, (SELECT string_agg(format('to_regclass(%L)', shardmap._shard_table(t.relation)), ', ') FROM shardmap.move_table t WHERE t.move = job.id),
            shardmap._old_transaction())) r;
    IF holders IS NOT NULL THEN
        RAISE EXCEPTION 'transactions on shard "%" would hold move % up', shard, job.id
            USING ERRCODE = 'object_in_use', DETAIL = holders || '.',
                HINT = 'Let them come to an end, or end them there: pg_terminate_backend, ROLLBACK PREPARED. See shardmap.in_doubt before.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_holders(shardmap.move, text) IS 'raises an error that names transactions older than a minute that have written to a move''s tables on a shard';
REVOKE ALL ON FUNCTION shardmap._check_holders(shardmap.move, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_holders(shardmap.move, text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_alike(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    query constant text := 'SELECT pg_catalog.current_setting(''server_version_num''), pg_catalog.current_setting(''server_encoding'')';
    here text[] := (SELECT r FROM shardmap.remote_rows(job.source, query) r);
    there text[] := (SELECT r FROM shardmap.remote_rows(job.target, query) r);
BEGIN
    IF here[2] <> there[2] THEN
        RAISE EXCEPTION 'shards "%" and "%" have different encodings', job.source, job.target
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = format('They are %s and %s.', here[2], there[2]),
                HINT = 'Rows that are equal would not look so when they are compared. Use databases of one encoding.';
    ELSIF here[1]::integer / 10000 <> there[1]::integer / 10000 THEN
        RAISE WARNING 'shards "%" and "%" are of Postgres % and %', job.source, job.target, here[1]::integer / 10000, there[1]::integer / 10000
            USING HINT = 'Should a type''s text differ between the two, the move stops when rows are compared, before the map changes.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_alike(shardmap.move) IS 'raises an error if the encodings of a move''s shards differ; warns if their versions do';
REVOKE ALL ON FUNCTION shardmap._check_alike(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_alike(shardmap.move) TO shardmap_admin;

CREATE FUNCTION shardmap._check_surroundings(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap._check_alike(job);
    PERFORM shardmap._check_room(job);
    IF EXISTS (SELECT FROM shardmap.move_table t WHERE t.move = job.id) THEN
        PERFORM shardmap._check_holders(job, job.source), shardmap._check_holders(job, job.target);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_surroundings(shardmap.move) IS 'raises an error if the shards of a move are not alike enough, lack room, or are held up';
REVOKE ALL ON FUNCTION shardmap._check_surroundings(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_surroundings(shardmap.move) TO shardmap_admin;

-- What decides the order of a table's primary key on a shard.
CREATE FUNCTION shardmap._key_order(relation regclass, key_columns text[], shard text) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT r[1] FROM shardmap.remote_rows(shard, format($query$
        SELECT string_agg(CASE WHEN c.collname = 'default' THEN concat_ws(' ', 'default', d.d ->> 'datlocprovider', d.d ->> 'datcollate',
                    d.d ->> 'daticulocale', d.d ->> 'datlocale', d.d ->> 'datcollversion', d.d ->> 'daticurules')
                ELSE concat_ws(' ', c.collname, c.c ->> 'collprovider', c.c ->> 'collcollate', c.c ->> 'colliculocale', c.c ->> 'colllocale',
                    c.c ->> 'collversion', c.c ->> 'collicurules') END, ', ' ORDER BY a.attname) AS names
          FROM pg_catalog.pg_attribute a
          JOIN (SELECT x.oid, x.collname, to_jsonb(x) AS c FROM pg_catalog.pg_collation x) c ON c.oid = a.attcollation,
            (SELECT to_jsonb(x) AS d FROM pg_catalog.pg_database x WHERE x.datname = current_database()) d
         WHERE a.attrelid = to_regclass(%L) AND a.attname = ANY (%L)
        $query$, shardmap._shard_table(relation), key_columns)) r
$$;
COMMENT ON FUNCTION shardmap._key_order(regclass, text[], text) IS 'collations of a table''s primary key on a shard, with their versions; NULL: none';
REVOKE ALL ON FUNCTION shardmap._key_order(regclass, text[], text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._key_order(regclass, text[], text) TO shardmap_admin;

CREATE FUNCTION shardmap._restart_table(move bigint, "position" integer) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE shardmap.move_table t SET watermark = NULL, rows_copied = 0 WHERE t.move = $1 AND t.position = $2
$$;
COMMENT ON FUNCTION shardmap._restart_table(bigint, integer) IS 'notes that nothing of a table of a move was copied';
REVOKE ALL ON FUNCTION shardmap._restart_table(bigint, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._restart_table(bigint, integer) TO shardmap_admin;
