-- Functions, types and operators that the shards know, though they are not built in.
--
-- Decides what may stand in a statement that goes whole to a shard, besides what every Postgres has: what an administrator
-- has marked, and what belongs to an extension that all servers of a keyspace list in their option "extensions". A mark is
-- a promise about the shards, which nothing checks. What always holds: a mark is kept as a name, so that it can be dumped;
-- it ends with what it names. Refuses types whose values' text depends on what they are made of.

CREATE FUNCTION shardmap._save_shippable(kind text, name text, argument_types text, marked boolean) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF marked THEN
        INSERT INTO shardmap.shippable_mark (kind, name, argument_types) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING;
    ELSE
        DELETE FROM shardmap.shippable_mark m WHERE m.kind = $1 AND m.name = $2;
    END IF;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM shardmap.invalidate_caches();
    RETURN true;
END
$$;
COMMENT ON FUNCTION shardmap._save_shippable(text, text, text, boolean) IS 'enters a mark in the catalog, or takes it out; false if there was nothing to do';
REVOKE ALL ON FUNCTION shardmap._save_shippable(text, text, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._save_shippable(text, text, text, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap._set_shippable(function regprocedure, type regtype, operator regoperator, marked boolean) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := coalesce(function::text, type::text, operator::text);
    argument_types text;
BEGIN
    IF num_nonnulls(function, type, operator) <> 1 THEN
        RAISE EXCEPTION 'one of function, type and operator must be given'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'As in: mark_shippable(type => ''mood'').';
    END IF;
    IF type IS NOT NULL AND (SELECT t.typtype NOT IN ('b', 'e', 'd') OR t.typsubscript = 'array_subscript_handler'::regproc
            FROM pg_type t WHERE t.oid = type) THEN
        RAISE EXCEPTION 'type % cannot be marked', type
            USING ERRCODE = 'feature_not_supported', DETAIL = 'Only enums, domains and base types can.',
                HINT = 'An array goes where its elements'' type goes.';
    END IF;
    SELECT string_agg(a.type::regtype::text, E'\n' ORDER BY a.number) INTO argument_types
      FROM (SELECT t.type, t.number FROM pg_proc p, unnest(p.proargtypes) WITH ORDINALITY t (type, number) WHERE p.oid = function
            UNION ALL
            SELECT t.type, t.number FROM pg_operator o, unnest(ARRAY[o.oprleft, o.oprright]) WITH ORDINALITY t (type, number)
             WHERE o.oid = operator AND t.type <> 0) a;
    RETURN shardmap._save_shippable(
        CASE WHEN function IS NOT NULL THEN 'function' WHEN type IS NOT NULL THEN 'type' ELSE 'operator' END,
        name, coalesce(argument_types, ''), marked);
END
$$;
COMMENT ON FUNCTION shardmap._set_shippable(regprocedure, regtype, regoperator, boolean) IS 'marks one of the three as known to all shards, or takes the mark away';
REVOKE ALL ON FUNCTION shardmap._set_shippable(regprocedure, regtype, regoperator, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._set_shippable(regprocedure, regtype, regoperator, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap.mark_shippable(function regprocedure DEFAULT NULL, type regtype DEFAULT NULL,
    operator regoperator DEFAULT NULL) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._set_shippable(function, type, operator, true)
$$;
CREATE FUNCTION shardmap.unmark_shippable(function regprocedure DEFAULT NULL, type regtype DEFAULT NULL,
    operator regoperator DEFAULT NULL) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._set_shippable(function, type, operator, false)
$$;
COMMENT ON FUNCTION shardmap.mark_shippable(regprocedure, regtype, regoperator) IS 'lets statements with this function, type or operator run whole on a shard: promises that every shard has it, under the same name and with the same meaning; false if it is marked already';
COMMENT ON FUNCTION shardmap.unmark_shippable(regprocedure, regtype, regoperator) IS 'takes back mark_shippable(); false if it was not marked';
REVOKE ALL ON FUNCTION shardmap.mark_shippable(regprocedure, regtype, regoperator),
    shardmap.unmark_shippable(regprocedure, regtype, regoperator) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.mark_shippable(regprocedure, regtype, regoperator),
    shardmap.unmark_shippable(regprocedure, regtype, regoperator) TO shardmap_admin;

-- What is renamed has not the name any more that the shards know; the next one of that name is another object.
CREATE FUNCTION shardmap._forget_lost_marks() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_EVENT = 'sql_drop' THEN
        IF NOT EXISTS (SELECT FROM pg_event_trigger_dropped_objects() o
                        WHERE o.classid IN ('pg_proc'::regclass, 'pg_type'::regclass, 'pg_operator'::regclass)) THEN
            RETURN;
        END IF;
    END IF;
    DELETE FROM shardmap.shippable_mark m
     WHERE CASE WHEN EXISTS (SELECT FROM string_to_table(nullif(m.argument_types, ''), E'\n') a WHERE to_regtype(a) IS NULL) THEN NULL
               WHEN m.kind = 'function' THEN to_regprocedure(m.name)::oid
               WHEN m.kind = 'type' THEN to_regtype(m.name)::oid
               ELSE to_regoperator(m.name)::oid END IS NULL;
    IF FOUND THEN
        PERFORM shardmap.invalidate_caches();
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._forget_lost_marks() IS 'event trigger: forgets marks of what is dropped or has another name now';
REVOKE ALL ON FUNCTION shardmap._forget_lost_marks() FROM PUBLIC;

CREATE EVENT TRIGGER shardmap_follow_drop_of_marked ON sql_drop EXECUTE FUNCTION shardmap._forget_lost_marks();
COMMENT ON EVENT TRIGGER shardmap_follow_drop_of_marked IS 'forgets what shardmap.mark_shippable() marked when it is dropped';

CREATE EVENT TRIGGER shardmap_follow_rename_of_marked ON ddl_command_end
    WHEN TAG IN ('ALTER FUNCTION', 'ALTER AGGREGATE', 'ALTER PROCEDURE', 'ALTER ROUTINE', 'ALTER TYPE', 'ALTER DOMAIN',
        'ALTER OPERATOR', 'ALTER SCHEMA', 'ALTER EXTENSION')
    EXECUTE FUNCTION shardmap._forget_lost_marks();
COMMENT ON EVENT TRIGGER shardmap_follow_rename_of_marked IS 'forgets what shardmap.mark_shippable() marked when it gets another name';

CREATE VIEW shardmap.shippable AS
    SELECT m.kind, m.name, k.name AS keyspace FROM shardmap.shippable_mark m CROSS JOIN shardmap.keyspace k
    UNION ALL
    SELECT 'extension', e.name, e.keyspace
      FROM (SELECT s.keyspace, pg_catalog.btrim(l.name) AS name, pg_catalog.count(DISTINCT s.name) AS listed
              FROM shardmap.shard s JOIN pg_catalog.pg_foreign_server f ON f.srvname = s.name,
                   LATERAL pg_catalog.pg_options_to_table(f.srvoptions) o,
                   LATERAL pg_catalog.string_to_table(o.option_value, ',') l (name)
             WHERE o.option_name = 'extensions' GROUP BY 1, 2) e
     WHERE e.listed = (SELECT pg_catalog.count(*) FROM shardmap.shard s WHERE s.keyspace = e.keyspace)
       AND EXISTS (SELECT FROM pg_catalog.pg_extension x WHERE x.extname = e.name)
     ORDER BY 3, 1, 2;
COMMENT ON VIEW shardmap.shippable IS 'what may stand in a statement that goes whole to a shard, besides what is built in';
COMMENT ON COLUMN shardmap.shippable.kind IS 'function, type or operator (marked by mark_shippable()), or extension (listed by all servers of the keyspace)';
COMMENT ON COLUMN shardmap.shippable.name IS 'what it is called';
COMMENT ON COLUMN shardmap.shippable.keyspace IS 'keyspace whose shards know it';
GRANT SELECT ON shardmap.shippable TO PUBLIC;
