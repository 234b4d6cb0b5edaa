-- What a logical table must not become.
--
-- Postgres lets an owner rename a key column, rename or move the table, detach a partition, or attach one of his own.
-- Each would make the table stop being what the shards hold: rows would be missing from answers in silence, or the
-- statements on it would not be ours any more. Refuses those, with a hint. Lets everything else be altered; columns and
-- indexes must then be altered on the shards too (shardmap.run_on_shards). Read planning.sql next.

CREATE FUNCTION shardmap._broken_table(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH parts AS (
        SELECT i.inhrelid, s.srvname,
            (SELECT o.option_value FROM pg_options_to_table(f.ftoptions) o WHERE o.option_name = 'schema_name') AS schema_name,
            (SELECT o.option_value FROM pg_options_to_table(f.ftoptions) o WHERE o.option_name = 'table_name') AS table_name
          FROM pg_inherits i LEFT JOIN pg_foreign_table f ON f.ftrelid = i.inhrelid
          LEFT JOIN pg_foreign_server s ON s.oid = f.ftserver
         WHERE i.inhparent = $1
    )
    SELECT CASE
        WHEN NOT EXISTS (SELECT FROM pg_attribute a
                          WHERE a.attrelid = t.relation AND a.attname = t.key_column AND NOT a.attisdropped)
            THEN 'Its key column has another name.'
        WHEN EXISTS (SELECT FROM parts p WHERE p.schema_name <> n.nspname OR p.table_name <> c.relname)
            THEN 'It has another name or schema than its tables on the shards.'
        WHEN EXISTS (SELECT FROM shardmap.shard s WHERE s.keyspace = t.keyspace
                        AND NOT EXISTS (SELECT FROM parts p WHERE p.srvname = s.name))
            THEN 'The partition of a shard is missing.'
        WHEN EXISTS (SELECT FROM parts p WHERE NOT EXISTS (
                        SELECT FROM shardmap.shard s WHERE s.keyspace = t.keyspace AND s.name = p.srvname))
            THEN 'It has a partition that is no shard''s.'
        WHEN EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = t.relation)
            THEN 'It is a part of another table.'
        END
      FROM shardmap.logical_table t JOIN pg_class c ON c.oid = t.relation JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE t.relation = $1
$$;
COMMENT ON FUNCTION shardmap._broken_table(regclass) IS 'why a logical table is not what the catalog says it is; NULL if it is, or if it is not a logical table';

-- Postgres believes the constraints of a foreign table, and leaves it to the other side to enforce them.
CREATE FUNCTION shardmap._constraints(relation regclass) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(array_agg(DISTINCT x.line), '{}') FROM (
        SELECT pg_get_constraintdef(c.oid) FROM pg_constraint c
         WHERE c.contype = 'c' AND (c.conrelid = $1 OR c.conrelid IN (SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = $1))
        UNION ALL
        SELECT format('%I IS NOT NULL', a.attname) FROM pg_attribute a
         WHERE a.attnotnull AND NOT a.attisdropped AND a.attnum > 0
           AND (a.attrelid = $1 OR a.attrelid IN (SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = $1))) x (line)
$$;
COMMENT ON FUNCTION shardmap._constraints(regclass) IS 'the CHECK and NOT NULL constraints of a table and its partitions, one line each';

CREATE FUNCTION shardmap._note_constraints() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.enforced := shardmap._constraints(NEW.relation) || NEW.enforced;
    NEW.enforced_as_of := current_setting('server_version_num');
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION shardmap._note_constraints() IS 'remembers the constraints that a table was distributed with, or restored with from a dump';

CREATE TRIGGER note_constraints BEFORE INSERT ON shardmap.logical_table
    FOR EACH ROW EXECUTE FUNCTION shardmap._note_constraints();
COMMENT ON TRIGGER note_constraints ON shardmap.logical_table IS 'remembers the constraints that a table was distributed with';

-- Another version of Postgres may describe constraints in other words (a name that has become a key word is quoted). What
-- a table has when a command finds it there, no command has added in vain: the guard below was there before as well.
CREATE FUNCTION shardmap._describe_constraints_anew() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    version constant integer := current_setting('server_version_num');
BEGIN
    IF EXISTS (SELECT FROM shardmap.logical_table t WHERE t.enforced_as_of IS DISTINCT FROM version) THEN
        UPDATE shardmap.logical_table t
           SET enforced = shardmap._constraints(t.relation) || t.enforced, enforced_as_of = version
         WHERE t.enforced_as_of IS DISTINCT FROM version;
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._describe_constraints_anew() IS 'describes the constraints of logical tables in the words of this version of Postgres, once after an upgrade';
REVOKE ALL ON FUNCTION shardmap._describe_constraints_anew() FROM PUBLIC;

-- Whether administration is at work: it takes tables through such states itself, and checks them at its end.
CREATE FUNCTION shardmap._is_administration(stack text) RETURNS boolean
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT stack ~ '(?n)^PL/pgSQL function shardmap\.(?!_guard_)'
$$;
COMMENT ON FUNCTION shardmap._is_administration(text) IS 'whether a call stack has a function of the extension in it, guards aside';

CREATE FUNCTION shardmap._refuse_broken(relations oid[], command text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    broken record;
BEGIN
    FOR broken IN
        SELECT t.relation, shardmap._broken_table(t.relation) AS reason FROM shardmap.logical_table t
         WHERE t.relation = ANY (relations) AND EXISTS (SELECT FROM pg_class c WHERE c.oid = t.relation)
    LOOP
        IF broken.reason IS NOT NULL THEN
            RAISE EXCEPTION '% would break logical table %', command, broken.relation
                USING ERRCODE = 'feature_not_supported', DETAIL = broken.reason,
                    HINT = 'Take the table back with shardmap.undistribute_table(), alter it, and distribute it again.';
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._refuse_broken(oid[], text) IS 'raises an error if one of the tables is a logical table that is not what the catalog says it is';

-- `touched`: the servers that a command has dropped, or the one that it has renamed, by the names that they have now.
CREATE FUNCTION shardmap._refuse_lost_servers(touched text[], command text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    lost record;
BEGIN
    FOR lost IN
        SELECT x.name, x.kind FROM (
            SELECT s.name, 'shard' FROM shardmap.shard s UNION ALL SELECT r.name, 'replica' FROM shardmap.replica r
            UNION ALL SELECT c.name, 'coordinator' FROM shardmap.coordinator c) x (name, kind)
         WHERE NOT EXISTS (SELECT FROM pg_foreign_server f WHERE f.srvname = x.name)
           AND (command = 'ALTER SERVER' OR x.name = ANY (touched))
         ORDER BY 2, 1
    LOOP
        CONTINUE WHEN command = 'ALTER SERVER' AND EXISTS (
            SELECT FROM shardmap.shard s WHERE s.name = ANY (touched) UNION ALL SELECT FROM shardmap.replica r WHERE r.name = ANY (touched)
            UNION ALL SELECT FROM shardmap.coordinator c WHERE c.name = ANY (touched));
        RAISE EXCEPTION '% would lose % "%"', command, lost.kind, lost.name
            USING ERRCODE = 'dependent_objects_still_exist', DETAIL = format('The foreign server says where the %s is.', lost.kind),
                HINT = format('Use shardmap.drop_%1$s(), and shardmap.add_%1$s() for another name.', lost.kind);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._refuse_lost_servers(text[], text) IS 'raises an error if the foreign server of a shard, replica or coordinator is gone, or has another name';

-- The stack is read in English whatever the session's language, for which the owner's rights are needed.
CREATE FUNCTION shardmap._guard_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lc_messages = 'C' AS $$
DECLARE
    stack text;
    touched oid[];
    added record;
BEGIN
    GET DIAGNOSTICS stack = PG_CONTEXT;
    IF shardmap._is_administration(stack) THEN
        RETURN;
    END IF;
    IF TG_TAG IN ('ALTER SERVER', 'ALTER SCHEMA') THEN
        SELECT array_agg(t.relation) INTO touched FROM shardmap.logical_table t;
    ELSE
        SELECT array_agg(x.relation) INTO touched FROM (
            SELECT c.objid FROM pg_event_trigger_ddl_commands() c WHERE c.classid = 'pg_class'::regclass
            UNION SELECT i.inhparent FROM pg_event_trigger_ddl_commands() c JOIN pg_inherits i ON i.inhrelid = c.objid
             WHERE c.classid = 'pg_class'::regclass
            UNION SELECT i.inhrelid FROM pg_event_trigger_ddl_commands() c JOIN pg_inherits i ON i.inhparent = c.objid
             WHERE c.classid = 'pg_class'::regclass
            UNION SELECT i.indrelid FROM pg_event_trigger_ddl_commands() c JOIN pg_index i ON i.indexrelid = c.objid) x (relation)
         WHERE EXISTS (SELECT FROM shardmap.logical_table t WHERE t.relation = x.relation);
    END IF;
    PERFORM shardmap._refuse_broken(touched, TG_TAG);
    IF TG_TAG = 'ALTER SERVER' THEN
        PERFORM shardmap._refuse_lost_servers(ARRAY(
            SELECT f.srvname::text FROM pg_event_trigger_ddl_commands() c JOIN pg_foreign_server f ON f.oid = c.objid
             WHERE c.classid = 'pg_foreign_server'::regclass), TG_TAG);
    END IF;
    IF touched IS NULL THEN
        RETURN;
    END IF;
    FOR added IN
        SELECT t.relation, l.line FROM shardmap.logical_table t, unnest(shardmap._constraints(t.relation)) l (line)
         WHERE t.relation = ANY (touched) AND l.line <> ALL (coalesce(t.enforced, '{}'))
    LOOP
        RAISE EXCEPTION 'constraint on logical table % would not be enforced', added.relation
            USING ERRCODE = 'feature_not_supported', DETAIL = format('The shards were not given it: %s', added.line),
                HINT = 'Let the shards alone have it, by shardmap.run_on_shards(): they enforce it.';
    END LOOP;
    IF TG_TAG = 'CREATE INDEX' THEN
        RAISE WARNING 'the shards have not got this index'
            USING HINT = 'Create it there: SELECT * FROM shardmap.run_on_shards(''CREATE INDEX ...'').';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._guard_ddl() IS 'refuses what would make a logical table differ from what the shards hold';
REVOKE ALL ON FUNCTION shardmap._guard_ddl() FROM PUBLIC;

CREATE FUNCTION shardmap._guard_drop() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lc_messages = 'C' AS $$
DECLARE
    stack text;
BEGIN
    GET DIAGNOSTICS stack = PG_CONTEXT;
    IF shardmap._is_administration(stack) OR NOT EXISTS (
        SELECT FROM pg_event_trigger_dropped_objects() d WHERE d.object_type IN ('foreign table', 'server'))
    THEN
        RETURN;
    END IF;
    PERFORM shardmap._refuse_broken(ARRAY(SELECT t.relation FROM shardmap.logical_table t), TG_TAG);
    PERFORM shardmap._refuse_lost_servers(ARRAY(
        SELECT d.object_name FROM pg_event_trigger_dropped_objects() d WHERE d.object_type = 'server'), TG_TAG);
END
$$;
COMMENT ON FUNCTION shardmap._guard_drop() IS 'refuses the drop of a shard''s or replica''s server, or of a partition of a logical table';
REVOKE ALL ON FUNCTION shardmap._guard_drop() FROM PUBLIC;

CREATE EVENT TRIGGER shardmap_describe_anew ON ddl_command_start
    WHEN TAG IN ('ALTER TABLE', 'ALTER FOREIGN TABLE', 'CREATE TABLE', 'CREATE FOREIGN TABLE', 'CREATE INDEX', 'ALTER SERVER',
        'ALTER SCHEMA')
    EXECUTE FUNCTION shardmap._describe_constraints_anew();
COMMENT ON EVENT TRIGGER shardmap_describe_anew IS 'prepares for shardmap_guard_ddl after an upgrade of the server';

CREATE EVENT TRIGGER shardmap_guard_ddl ON ddl_command_end
    WHEN TAG IN ('ALTER TABLE', 'ALTER FOREIGN TABLE', 'CREATE TABLE', 'CREATE FOREIGN TABLE', 'CREATE INDEX', 'ALTER SERVER',
        'ALTER SCHEMA')
    EXECUTE FUNCTION shardmap._guard_ddl();
COMMENT ON EVENT TRIGGER shardmap_guard_ddl IS 'refuses what would make a logical table differ from what the shards hold';

CREATE EVENT TRIGGER shardmap_guard_drop ON sql_drop EXECUTE FUNCTION shardmap._guard_drop();
COMMENT ON EVENT TRIGGER shardmap_guard_drop IS 'refuses the drop of a shard''s or replica''s server, or of a partition of a logical table';
