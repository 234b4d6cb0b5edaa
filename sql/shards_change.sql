-- Shards: how one is weighted anew, drained, and dropped.
--
-- Decides whether such a change would move rows. What always holds: no row changes its owner, for rows do not follow by
-- themselves; while a keyspace is empty, every change takes effect at once. Refuses the rest, with what would move in
-- the detail. Read ranges.sql next.

CREATE FUNCTION shardmap._find_shard(name text) RETURNS shardmap.shard
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_one shardmap.shard;
BEGIN
    -- The keyspace first: its row is the lock on all that belongs to it.
    PERFORM shardmap._lock_keyspace(s.keyspace) FROM shardmap.shard s WHERE s.name = $1;
    SELECT s.* INTO found_one FROM shardmap.shard s WHERE s.name = $1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'shard "%" does not exist', name
            USING ERRCODE = 'undefined_object', HINT = 'See shardmap.shards.';
    END IF;
    RETURN found_one;
END
$$;
COMMENT ON FUNCTION shardmap._find_shard(text) IS 'a shard''s row, with its keyspace locked against other changes';
REVOKE ALL ON FUNCTION shardmap._find_shard(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._find_shard(text) TO shardmap_admin;

CREATE FUNCTION shardmap._update_shard(name text, weight double precision, state text, tokens bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space text;
BEGIN
    UPDATE shardmap.shard s SET weight = $2, state = $3, tokens = $4 WHERE s.name = $1 RETURNING s.keyspace INTO space;
    PERFORM shardmap.publish_map(space);
END
$$;
COMMENT ON FUNCTION shardmap._update_shard(text, double precision, text, bigint[]) IS 'changes a shard in the catalog and publishes the map';
REVOKE ALL ON FUNCTION shardmap._update_shard(text, double precision, text, bigint[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._update_shard(text, double precision, text, bigint[]) TO shardmap_admin;

CREATE FUNCTION shardmap._delete_shard(name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space text;
BEGIN
    DELETE FROM shardmap.shard s WHERE s.name = $1 RETURNING s.keyspace INTO space;
    PERFORM shardmap.publish_map(space);
END
$$;
COMMENT ON FUNCTION shardmap._delete_shard(text) IS 'takes a shard out of the catalog and publishes the map';
REVOKE ALL ON FUNCTION shardmap._delete_shard(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._delete_shard(text) TO shardmap_admin;

CREATE FUNCTION shardmap._drop_partitions(shard text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    partition text;
BEGIN
    FOR partition IN
        SELECT shardmap._shard_table(f.ftrelid) FROM shardmap.shard h
          JOIN shardmap.logical_table t ON t.keyspace = h.keyspace
          JOIN pg_inherits i ON i.inhparent = t.relation
          JOIN pg_foreign_table f ON f.ftrelid = i.inhrelid
          JOIN pg_foreign_server v ON v.oid = f.ftserver AND v.srvname = h.name
         WHERE h.name = shard
    LOOP
        EXECUTE format('DROP FOREIGN TABLE %s', partition);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._drop_partitions(text) IS 'drops the partitions of all logical tables on a shard';
REVOKE ALL ON FUNCTION shardmap._drop_partitions(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._drop_partitions(text) TO shardmap_admin;

CREATE FUNCTION shardmap.set_shard_weight(name text, weight double precision) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shard shardmap.shard := shardmap._find_shard(name);
    tokens bigint[] := shard.tokens;
BEGIN
    PERFORM shardmap._check_weight(name, weight);
    IF cardinality(shard.tokens) > 0 AND weight <> shard.weight THEN
        tokens := shardmap._choose_tokens(shardmap._without_shard(shardmap._keyspace_json(shard.keyspace), name), name, weight);
        PERFORM shardmap._lock_tables(shard.keyspace);
        IF NOT (tokens @> shard.tokens AND tokens <@ shard.tokens) AND shardmap._keyspace_has_rows(shard.keyspace) THEN
            RAISE EXCEPTION 'cannot set the weight of shard "%": rows would change their owner', name
                USING ERRCODE = 'object_not_in_prerequisite_state',
                    DETAIL = format('To move: %s.', shardmap._describe_change(shard.keyspace, '{}', jsonb_build_object(name, weight))),
                    HINT = 'Weights take effect at once only while the keyspace holds no rows. See shardmap.preview_change.';
        END IF;
    END IF;
    PERFORM shardmap._update_shard(name, weight, shard.state, tokens);
END
$$;
COMMENT ON FUNCTION shardmap.set_shard_weight(text, double precision) IS 'changes a shard''s share of load; refused where rows would change their owner';
REVOKE ALL ON FUNCTION shardmap.set_shard_weight(text, double precision) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.set_shard_weight(text, double precision) TO shardmap_admin;

CREATE FUNCTION shardmap.drain_shard(name text, drain boolean DEFAULT true) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shard shardmap.shard := shardmap._find_shard(name);
    has_rows boolean;
BEGIN
    IF shard.state <> (CASE WHEN drain THEN 'active' ELSE 'draining' END) THEN
        RAISE EXCEPTION 'shard "%" is %', name, shard.state
            USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = CASE WHEN drain THEN 'Only an active shard can be drained.' ELSE 'Only a draining shard can be kept.' END;
    ELSIF drain AND NOT EXISTS (
        SELECT FROM shardmap.shard s WHERE s.keyspace = shard.keyspace AND s.name <> $1 AND s.state = 'active')
    THEN
        RAISE EXCEPTION 'shard "%" is the only active shard of keyspace "%"', name, shard.keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Add another shard first.';
    END IF;
    PERFORM shardmap._lock_tables(shard.keyspace);
    has_rows := shardmap._keyspace_has_rows(shard.keyspace);
    IF has_rows THEN
        PERFORM shardmap._update_shard(name, shard.weight, CASE WHEN drain THEN 'draining' ELSE 'active' END, shard.tokens);
    ELSIF drain THEN
        PERFORM shardmap._update_shard(name, shard.weight, 'draining', '{}');
    ELSE
        PERFORM shardmap._update_shard(name, shard.weight, 'active', shardmap._choose_tokens(
            shardmap._without_shard(shardmap._keyspace_json(shard.keyspace), name), name, shard.weight));
    END IF;
    IF drain AND has_rows THEN
        RAISE NOTICE 'shard "%" keeps what it owns until that is moved away', name;
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.drain_shard(text, boolean) IS 'marks a shard as one to be emptied, or takes the mark back; while its keyspace holds no rows, a draining shard owns nothing';
REVOKE ALL ON FUNCTION shardmap.drain_shard(text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.drain_shard(text, boolean) TO shardmap_admin;

-- `abandon`: the shard itself is not asked.
CREATE FUNCTION shardmap._check_droppable(shard shardmap.shard, abandon boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    strategy text := (SELECT k.strategy FROM shardmap.keyspace k WHERE k.name = shard.keyspace);
    owns boolean := strategy = 'modulo' AND shard.state <> 'joining' OR cardinality(shard.tokens) > 0;
    names text;
BEGIN
    SELECT concat_ws('; ',
        (SELECT format(CASE count(*) WHEN 1 THEN 'pinned key %2$L' ELSE '%1$s pinned keys, among them %2$L' END, count(*), min(p.key)) FROM shardmap.pin p
          WHERE p.keyspace = shard.keyspace AND p.shard = shard.name HAVING count(*) > 0),
        (SELECT format('ranges %s', string_agg(format('[%s, %s)', coalesce(quote_literal(r.lower), '-infinity'),
                coalesce(quote_literal(r.upper), 'infinity')), ', ' ORDER BY r.lower NULLS FIRST))
           FROM shardmap.key_range r WHERE r.keyspace = shard.keyspace AND r.shard = shard.name HAVING count(*) > 0))
      INTO names;
    IF names <> '' THEN
        RAISE EXCEPTION 'shard "%" owns keys by name', shard.name
            USING ERRCODE = 'dependent_objects_still_exist', DETAIL = format('It owns %s.', names),
                HINT = 'Use shardmap.unpin_key, or give the ranges to another shard with shardmap.set_range.';
    END IF;
    IF NOT abandon THEN
        SELECT string_agg(t.relation::text, ', ' ORDER BY t.relation::text) INTO names FROM shardmap._tables_with_rows(shard.name) t;
    END IF;
    IF names <> '' THEN
        RAISE EXCEPTION 'shard "%" holds rows', shard.name
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = format('It holds rows of %s.', names),
                HINT = 'Move them away, or undistribute the tables, first.';
    END IF;
    IF owns AND abandon THEN
        RAISE EXCEPTION 'shard "%" owns a part of keyspace "%"', shard.name, shard.keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = 'The rows that it may hold would be lost.',
                HINT = 'Only a shard that owns nothing can be dropped without being asked.';
    ELSIF owns AND shardmap._keyspace_has_rows(shard.keyspace) THEN
        RAISE EXCEPTION 'shard "%" owns a part of keyspace "%", which holds rows', shard.name, shard.keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state',
                DETAIL = format('To move: %s.', shardmap._describe_change(shard.keyspace, ARRAY[shard.name], '{}')),
                HINT = 'Move away what it owns first. See shardmap.preview_change.';
    END IF;
    IF EXISTS (SELECT FROM shardmap.logical_table t WHERE t.keyspace = shard.keyspace)
        AND NOT EXISTS (SELECT FROM shardmap.shard s WHERE s.keyspace = shard.keyspace AND s.name <> shard.name AND s.state = 'active')
    THEN
        RAISE EXCEPTION 'shard "%" is the last of keyspace "%", which has tables', shard.name, shard.keyspace
            USING ERRCODE = 'dependent_objects_still_exist', HINT = 'Use shardmap.undistribute_table first.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_droppable(shardmap.shard, boolean) IS 'raises an error if a shard owns keys or holds rows';
REVOKE ALL ON FUNCTION shardmap._check_droppable(shardmap.shard, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_droppable(shardmap.shard, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap.drop_shard(name text, abandon boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning AS $$
DECLARE
    shard shardmap.shard := shardmap._find_shard(name);
    relation regclass;
BEGIN
    IF EXISTS (SELECT FROM shardmap.replica r WHERE r.shard = $1) THEN
        RAISE EXCEPTION 'shard "%" has replicas', name
            USING ERRCODE = 'dependent_objects_still_exist', DETAIL = (SELECT format('Replicas: %s.', string_agg(r.name, ', ' ORDER BY r.name)) FROM shardmap.replica r WHERE r.shard = $1),
                HINT = 'Drop them first with shardmap.drop_replica.';
    END IF;
    PERFORM shardmap._check_no_move(shard.keyspace);
    PERFORM shardmap._lock_tables(shard.keyspace);
    PERFORM shardmap._check_droppable(shard, abandon);
    FOR relation IN SELECT t.relation FROM shardmap.logical_table t WHERE t.keyspace = shard.keyspace AND NOT abandon LOOP
        PERFORM shardmap._remote_ddl(name, format('DROP TABLE IF EXISTS %s', shardmap._shard_table(relation)));
    END LOOP;
    FOR relation IN SELECT t.relation FROM shardmap.reference_table t WHERE t.keyspace = shard.keyspace ORDER BY t.relation::oid LOOP
        PERFORM shardmap._lock_reference(relation);
        IF NOT abandon THEN
            PERFORM shardmap._remote_ddl(name, format('DROP TABLE IF EXISTS %s', shardmap._shard_table(relation)));
        END IF;
    END LOOP;
    PERFORM shardmap._drop_partitions(name);
    PERFORM shardmap._delete_shard(name);
    EXECUTE format('DROP SERVER IF EXISTS %I CASCADE', name);
END
$$;
COMMENT ON FUNCTION shardmap.drop_shard(text, boolean) IS 'drops a shard that owns nothing and holds no rows: its empty tables, its server and user mappings; abandon: one that cannot be reached, leaving what is there';
REVOKE ALL ON FUNCTION shardmap.drop_shard(text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.drop_shard(text, boolean) TO shardmap_admin;
