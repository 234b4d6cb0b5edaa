-- Moves by logical replication: what is looked at first.
--
-- Decides whether a move's shards and tables let its rows be replicated. What always holds: nothing is made that stays; what
-- is missing is named, with its shard. Read moves_logical.sql for the steps.

-- A table's copy needs a slot of its own for a while.
CREATE FUNCTION shardmap._check_replication_servers(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    here jsonb;
    there jsonb;
    what text;
    hint text;
    shard text;
    query constant text := $query$
        SELECT json_build_object('version', current_setting('server_version_num')::integer, 'wal_level', current_setting('wal_level'),
            'slots', current_setting('max_replication_slots')::integer - (SELECT count(*) FROM pg_catalog.pg_replication_slots),
            'senders', current_setting('max_wal_senders')::integer - (SELECT count(*) FROM pg_catalog.pg_stat_replication),
            'workers', current_setting('max_logical_replication_workers')::integer - (SELECT count(*) FROM pg_catalog.pg_stat_subscription WHERE pid IS NOT NULL),
            'origins', coalesce(current_setting('max_active_replication_origins', true), current_setting('max_replication_slots'))::integer
                - (SELECT count(*) FROM pg_catalog.pg_replication_origin),
            'may_replicate', r.rolsuper OR r.rolreplication OR EXISTS (
                SELECT FROM pg_catalog.pg_roles g WHERE g.rolname = 'rds_replication' AND pg_has_role(r.oid, g.oid, 'MEMBER')),
            'may_subscribe', r.rolsuper OR EXISTS (
                SELECT FROM pg_catalog.pg_roles g WHERE g.rolname = 'pg_create_subscription' AND pg_has_role(r.oid, g.oid, 'USAGE')),
            'is_ours', EXISTS (SELECT FROM pg_catalog.pg_locks l WHERE l.pid = %s AND l.locktype = 'transactionid' AND l.transactionid = %L::xid
                AND l.mode = 'ExclusiveLock'))::text AS answer
          FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
        $query$;
BEGIN
    SELECT r[1] INTO here FROM shardmap.remote_rows(job.source, format(query, pg_backend_pid(), pg_current_xact_id()::xid)) r;
    SELECT r[1] INTO there FROM shardmap.remote_rows(job.target, format(query, pg_backend_pid(), pg_current_xact_id()::xid)) r;
    SELECT f.shard, f.what, f.hint INTO shard, what, hint FROM (VALUES
        ((here ->> 'version')::integer < 150000, job.source, 'is of a version before 15', 'Row filters of publications came with 15.'),
        ((there ->> 'version')::integer < 150000, job.target, 'is of a version before 15', 'Subscriptions that stop at an error came with 15.'),
        (here ->> 'wal_level' <> 'logical', job.source, format('has wal_level %s', here ->> 'wal_level'), 'Set wal_level = logical there, and restart it.'),
        ((here ->> 'is_ours')::boolean, job.source, 'is a database of this server', 'A slot cannot be made while this transaction is open.'),
        (NOT (here ->> 'may_replicate')::boolean, job.source, 'does not let this user replicate', 'There, ALTER ROLE the user of the user mapping REPLICATION.'),
        (NOT (there ->> 'may_subscribe')::boolean, job.target, 'does not let this user subscribe',
            'There, GRANT pg_create_subscription to the user of the user mapping (since Postgres 16), or map a superuser.'),
        ((here ->> 'slots')::integer < 2, job.source, format('has %s free replication slots', greatest((here ->> 'slots')::integer, 0)), 'Two are needed: raise max_replication_slots there.'),
        ((here ->> 'senders')::integer < 2, job.source, format('has %s free WAL senders', greatest((here ->> 'senders')::integer, 0)), 'Two are needed: raise max_wal_senders there.'),
        ((there ->> 'workers')::integer < 2, job.target, format('has %s free workers for replication', greatest((there ->> 'workers')::integer, 0)),
            'Two are needed: raise max_logical_replication_workers there.'),
        ((there ->> 'origins')::integer < 2, job.target, format('has %s free replication origins', greatest((there ->> 'origins')::integer, 0)),
            'Two are needed: raise max_replication_slots there (max_active_replication_origins since Postgres 18).')) f (holds, shard, what, hint)
     WHERE f.holds LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'shard "%" %', shard, what
            USING ERRCODE = CASE WHEN what ~ ' free ' THEN 'configuration_limit_exceeded' WHEN what ~ 'does not let' THEN 'insufficient_privilege'
                    ELSE 'object_not_in_prerequisite_state' END,
                DETAIL = format('Move %s is to go by logical replication.', job.id), HINT = hint || ' Or plan it with engine => ''triggers''.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_replication_servers(shardmap.move) IS 'raises an error unless the shards of a move have what logical replication needs';
REVOKE ALL ON FUNCTION shardmap._check_replication_servers(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_replication_servers(shardmap.move) TO shardmap_admin;

-- Without the key among the columns that tell rows apart, applications could not update or delete rows any more.
CREATE FUNCTION shardmap._check_replica_identity(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved record;
    holds boolean;
BEGIN
    FOR moved IN SELECT t.relation, l.key_column FROM shardmap.move_table t JOIN shardmap.logical_table l ON l.relation = t.relation
        WHERE t.move = job.id ORDER BY t.position
    LOOP
        SELECT r[1] INTO holds FROM shardmap.remote_rows(job.source, format($query$
            SELECT (c.relreplident = 'f' OR EXISTS (SELECT FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid
                  AND a.attnum = ANY (i.indkey::pg_catalog.int2[])
                WHERE i.indrelid = c.oid AND a.attname = %L AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END))::text AS holds
              FROM pg_catalog.pg_class c WHERE c.oid = %L::pg_catalog.regclass
            $query$, moved.key_column, shardmap._shard_table(moved.relation))) r;
        IF NOT holds THEN
            RAISE EXCEPTION 'cannot replicate table %: on shard "%" its replica identity lacks column "%"', moved.relation, job.source, moved.key_column
                USING ERRCODE = 'object_not_in_prerequisite_state',
                    HINT = 'ALTER TABLE .. REPLICA IDENTITY DEFAULT there, with a primary key that includes the shard key. Or plan the move with engine => ''triggers''.';
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._check_replica_identity(shardmap.move) IS 'raises an error unless what tells a move''s rows apart includes the shard key';
REVOKE ALL ON FUNCTION shardmap._check_replica_identity(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_replica_identity(shardmap.move) TO shardmap_admin;

-- Since Postgres 16 rows are written as the tables' owner, whom the subscription's must be able to become.
CREATE FUNCTION shardmap._check_writes_as_owner(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved regclass;
    owner text;
BEGIN
    FOR moved IN SELECT t.relation FROM shardmap.move_table t WHERE t.move = job.id ORDER BY t.position LOOP
        SELECT r[1] INTO owner FROM shardmap.remote_rows(job.target, format($query$
            SELECT pg_catalog.pg_get_userbyid(c.relowner)::text FROM pg_catalog.pg_class c WHERE c.oid = %L::pg_catalog.regclass
               AND CASE WHEN current_setting('server_version_num')::integer >= 160000 THEN NOT pg_has_role(c.relowner, 'SET') END
            $query$, shardmap._shard_table(moved))) r;
        IF FOUND THEN
            RAISE EXCEPTION 'shard "%" does not let this user write to table % as its owner', job.target, moved
                USING ERRCODE = 'insufficient_privilege', DETAIL = format('The owner there is "%s".', owner),
                    HINT = 'Map a user there who owns the tables, or GRANT him their owner. Or plan the move with engine => ''triggers''.';
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._check_writes_as_owner(shardmap.move) IS 'raises an error unless a subscription on a move''s target can write to its tables';
REVOKE ALL ON FUNCTION shardmap._check_writes_as_owner(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_writes_as_owner(shardmap.move) TO shardmap_admin;

-- A subscription that connects is made, and unmade: only the target knows whether the source lets it in, and only after asking
-- for the password that Postgres wants of others than superusers. It is made by a function, of which the target's log only has
-- the name: errors and warnings (that there is no such publication yet) would bring the way to the source there.
CREATE FUNCTION shardmap._check_connection(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    code text;
BEGIN
    PERFORM shardmap._subscribe(job.target, job.source, 'SELECT pg_catalog.set_config(''shardmap_move.source'', %s, true)', true);
    PERFORM shardmap.remote_execute(job.target, format($command$SET LOCAL client_min_messages = error; CREATE SCHEMA IF NOT EXISTS %1$I; DO $do$ BEGIN
            EXECUTE pg_catalog.format('CREATE FUNCTION %1$I.subscribe() RETURNS void LANGUAGE sql AS %%L', pg_catalog.format(
                'CREATE SUBSCRIPTION %1$I CONNECTION %%L PUBLICATION %1$I WITH (enabled = false, create_slot = false, slot_name = NONE)',
                pg_catalog.current_setting('shardmap_move.source')));
            PERFORM %1$I.subscribe();
        EXCEPTION WHEN OTHERS THEN
            RAISE EXCEPTION USING ERRCODE = 'SM002', MESSAGE = SQLERRM, DETAIL = SQLSTATE;
        END $do$ $command$, shardmap._move_schema(job.id)));
    RAISE EXCEPTION USING ERRCODE = 'SM001', MESSAGE = 'undo';
EXCEPTION
    WHEN SQLSTATE 'SM001' THEN NULL;
    WHEN SQLSTATE 'SM002' THEN
        GET STACKED DIAGNOSTICS code = PG_EXCEPTION_DETAIL;
        RAISE EXCEPTION 'shard "%" cannot subscribe to shard "%": %', job.target, job.source, SQLERRM
            USING ERRCODE = code, DETAIL = format('Move %s is to go by logical replication.', job.id),
                HINT = CASE WHEN code = '2F003' THEN 'Let the user mapping of the source have a password, and pg_hba.conf there ask the target for it; or map a superuser of the target.'
                    ELSE 'The target must reach the source as the coordinator does, or ALTER SERVER .. OPTIONS (ADD peer_host .., ADD peer_port ..); see pg_hba.conf on the source.'
                    END || ' Or plan the move with engine => ''triggers''.';
END
$$;
COMMENT ON FUNCTION shardmap._check_connection(shardmap.move) IS 'raises an error unless a move''s target can subscribe to its source';
REVOKE ALL ON FUNCTION shardmap._check_connection(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_connection(shardmap.move) TO shardmap_admin;

-- The publication is made, and unmade: Postgres itself knows best whether it can be.
CREATE FUNCTION shardmap._check_replication(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    said text;
BEGIN
    IF job.engine <> 'logical' OR NOT EXISTS (SELECT FROM shardmap.move_table t WHERE t.move = job.id) THEN
        RETURN;
    END IF;
    PERFORM shardmap._check_replication_servers(job);
    PERFORM shardmap._check_replica_identity(job);
    PERFORM shardmap._check_writes_as_owner(job);
    BEGIN
        PERFORM shardmap.remote_execute(job.source, 'SET LOCAL client_min_messages = error; ' || shardmap._publication_sql(job));
        RAISE EXCEPTION USING ERRCODE = 'SM001', MESSAGE = 'undo';
    EXCEPTION
        WHEN SQLSTATE 'SM001' THEN NULL;
        WHEN insufficient_privilege THEN
            RAISE EXCEPTION 'shard "%" does not let this user publish the tables of move %', job.source, job.id
                USING ERRCODE = 'insufficient_privilege', DETAIL = SQLERRM,
                    HINT = 'Map a user there who owns the tables. Or plan the move with engine => ''triggers''.';
        WHEN feature_not_supported OR invalid_parameter_value OR wrong_object_type THEN
            GET STACKED DIAGNOSTICS said = PG_EXCEPTION_DETAIL;
            RAISE EXCEPTION 'shard "%" cannot publish the rows of move %', job.source, job.id
                USING ERRCODE = 'feature_not_supported', DETAIL = concat_ws(': ', SQLERRM, nullif(said, '')), HINT = 'Plan it with engine => ''triggers''.';
    END;
    PERFORM shardmap._check_connection(job);
END
$$;
COMMENT ON FUNCTION shardmap._check_replication(shardmap.move) IS 'raises an error if something stands in the way of a move by logical replication';
REVOKE ALL ON FUNCTION shardmap._check_replication(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_replication(shardmap.move) TO shardmap_admin;
