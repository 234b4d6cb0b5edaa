-- DROP TABLE on a logical or reference table.
--
-- Decides what becomes of the shards' tables: an administrator's DROP TABLE drops them too, in the same transaction;
-- anyone else's, and DROP SCHEMA, DROP OWNED and the like, leave them, and say so. What always holds: the catalog does not
-- name a table that is gone. To drop a table here whose shard is gone for good: shardmap._forget_table first. Read
-- planning.sql next.

CREATE FUNCTION shardmap._forget_dropped_tables() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM shardmap.logical_table t WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = t.relation);
    DELETE FROM shardmap.move_table t WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = t.relation);
    DELETE FROM shardmap.reference_table t WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = t.relation);
END
$$;
COMMENT ON FUNCTION shardmap._forget_dropped_tables() IS 'takes tables that do not exist any more out of the catalog';

CREATE FUNCTION shardmap._follow_drop() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    dropped record;
    shard text;
BEGIN
    FOR dropped IN
        SELECT o.objid, o.schema_name, o.object_name, t.keyspace FROM pg_event_trigger_dropped_objects() o
          JOIN (SELECT l.relation, l.keyspace FROM shardmap.logical_table l
                UNION ALL SELECT r.relation, r.keyspace FROM shardmap.reference_table r) t
            ON t.relation = o.objid AND o.classid = 'pg_class'::regclass AND o.objsubid = 0
    LOOP
        PERFORM shardmap._check_no_move(dropped.keyspace);
        IF TG_TAG = 'DROP TABLE' AND has_function_privilege('shardmap.remote_execute(text, text, boolean)', 'EXECUTE') THEN
            PERFORM shardmap._check_unused(dropped.objid, format('%I.%I', dropped.schema_name, dropped.object_name));
            FOR shard IN SELECT s.name FROM shardmap.shard s WHERE s.keyspace = dropped.keyspace ORDER BY s.number LOOP
                PERFORM shardmap._remote_ddl(shard, format('DROP TABLE IF EXISTS %I.%I', dropped.schema_name, dropped.object_name));
            END LOOP;
        ELSE
            RAISE NOTICE 'table "%" is still on its shards', dropped.object_name
                USING HINT = format('An administrator can drop it there: SELECT * FROM shardmap.run_on_shards(%L, %L).',
                    format('DROP TABLE %I.%I', dropped.schema_name, dropped.object_name), dropped.keyspace);
        END IF;
    END LOOP;
    IF FOUND THEN
        PERFORM shardmap._forget_dropped_tables();
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._follow_drop() IS 'event trigger: lets the catalog and, for administrators, the shards follow DROP TABLE';

CREATE EVENT TRIGGER shardmap_follow_drop ON sql_drop EXECUTE FUNCTION shardmap._follow_drop();
COMMENT ON EVENT TRIGGER shardmap_follow_drop IS 'lets the catalog and the shards follow DROP TABLE on a logical table';
