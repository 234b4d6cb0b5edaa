-- Shards: how one is weighted anew, drained, and dropped.
--
-- Decides what is wanted of a shard from now on. What always holds: no row changes its owner here; while a keyspace is
-- empty, every change takes effect at once, else shardmap.rebalance moves the rows, and the notice says which. Refuses to
-- drop what owns keys or holds rows. Read ranges.sql next.

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

CREATE FUNCTION shardmap._update_shard(name text, weight double precision, state text, wanted_tokens bigint[], at_once boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space text := (SELECT s.keyspace FROM shardmap.shard s WHERE s.name = $1);
BEGIN
    PERFORM shardmap._note_tokens(space);
    UPDATE shardmap.keyspace k SET wanted_slots = NULL
      FROM shardmap.shard s WHERE s.name = $1 AND k.name = s.keyspace AND s.state <> $3 AND k.wanted_slots IS NOT NULL;
    UPDATE shardmap.shard s SET weight = $2, state = $3, wanted_tokens = $4 WHERE s.name = $1;
    IF at_once THEN
        PERFORM shardmap._settle(space);
    END IF;
    PERFORM shardmap.publish_map(space);
END
$$;
COMMENT ON FUNCTION shardmap._update_shard(text, double precision, text, bigint[], boolean) IS 'changes a shard in the catalog and publishes the map; at_once: the keyspace becomes what it should be';
REVOKE ALL ON FUNCTION shardmap._update_shard(text, double precision, text, bigint[], boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._update_shard(text, double precision, text, bigint[], boolean) TO shardmap_admin;

-- Slots that name it are there only while the keyspace has no rows.
CREATE FUNCTION shardmap._delete_shard(name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    gone shardmap.shard;
BEGIN
    SELECT s.* INTO gone FROM shardmap.shard s WHERE s.name = $1;
    UPDATE shardmap.keyspace k SET slots = nullif(array_remove(k.slots, gone.number), '{}'),
        wanted_slots = CASE WHEN gone.number = ANY (k.wanted_slots) THEN NULL ELSE k.wanted_slots END
     WHERE k.name = gone.keyspace AND gone.number = ANY (k.slots || k.wanted_slots);
    DELETE FROM shardmap.shard s WHERE s.name = $1;
    UPDATE shardmap.keyspace k SET slots = NULL
     WHERE k.name = gone.keyspace AND k.slots = ARRAY(SELECT s.number FROM shardmap.shard s
            WHERE s.keyspace = k.name AND s.state <> 'joining' ORDER BY s.number);
    PERFORM shardmap.publish_map(gone.keyspace);
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
    space jsonb := shardmap._wish(shard.keyspace);
    wanted bigint[] := shard.wanted_tokens;
    at_once boolean := false;
BEGIN
    PERFORM shardmap._check_weight(name, weight);
    IF space ->> 'strategy' = 'ring' AND shard.state <> 'draining' AND weight <> shard.weight THEN
        wanted := shardmap._choose_tokens(shardmap._without_shard(space, name), name, weight);
        PERFORM shardmap._lock_tables(shard.keyspace);
        at_once := shardmap._is_empty(shard.keyspace);
    END IF;
    PERFORM shardmap._update_shard(name, weight, shard.state, wanted, at_once);
    IF NOT at_once AND wanted IS DISTINCT FROM shard.wanted_tokens THEN
        PERFORM shardmap._tell_wish(shard.keyspace, format('shard "%s" keeps what it owns for now', name));
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.set_shard_weight(text, double precision) IS 'changes a shard''s share of load; at once in a keyspace without rows, else rows follow by shardmap.rebalance';
REVOKE ALL ON FUNCTION shardmap.set_shard_weight(text, double precision) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.set_shard_weight(text, double precision) TO shardmap_admin;

CREATE FUNCTION shardmap.drain_shard(name text, drain boolean DEFAULT true) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shard shardmap.shard := shardmap._find_shard(name);
    at_once boolean;
BEGIN
    IF shard.state <> (CASE WHEN drain THEN 'active' ELSE 'draining' END) THEN
        RAISE EXCEPTION 'shard "%" is %', name, shard.state
            USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = CASE WHEN drain THEN 'Only an active shard can be drained.' ELSE 'Only a draining shard can be kept.' END;
    ELSIF drain AND NOT EXISTS (
        SELECT FROM shardmap.shard s WHERE s.keyspace = shard.keyspace AND s.name <> $1 AND s.state <> 'draining')
    THEN
        RAISE EXCEPTION 'shard "%" is the only active shard of keyspace "%"', name, shard.keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Add another shard first.';
    END IF;
    PERFORM shardmap._lock_tables(shard.keyspace);
    at_once := shardmap._is_empty(shard.keyspace);
    PERFORM shardmap._update_shard(name, shard.weight, CASE WHEN drain THEN 'draining' ELSE 'active' END, CASE WHEN drain THEN '{}' ELSE
        shardmap._choose_tokens(shardmap._without_shard(shardmap._wish(shard.keyspace), name), name, shard.weight) END, at_once);
    IF NOT at_once THEN
        PERFORM shardmap._tell_wish(shard.keyspace, format('shard "%s" keeps what it owns for now', name));
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.drain_shard(text, boolean) IS 'marks a shard as one to be emptied, or takes the mark back; at once in a keyspace without rows, else rows follow by shardmap.rebalance';
REVOKE ALL ON FUNCTION shardmap.drain_shard(text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.drain_shard(text, boolean) TO shardmap_admin;

-- `abandon`: the shard itself is not asked.
CREATE FUNCTION shardmap._check_droppable(shard shardmap.shard, abandon boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    owns boolean := cardinality(shard.tokens) > 0 OR (SELECT k.strategy = 'modulo' AND CASE WHEN k.slots IS NULL THEN shard.state <> 'joining'
        ELSE shard.number = ANY (k.slots) END FROM shardmap.keyspace k WHERE k.name = shard.keyspace);
    space jsonb := shardmap._keyspace_json(shard.keyspace);
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
                HINT = 'Move them away with shardmap.drain_shard and shardmap.rebalance, or undistribute the tables, first.';
    END IF;
    IF owns AND abandon THEN
        RAISE EXCEPTION 'shard "%" owns a part of keyspace "%"', shard.name, shard.keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = 'The rows that it may hold would be lost.',
                HINT = 'Only a shard that owns nothing can be dropped without being asked.';
    ELSIF owns AND shardmap._keyspace_has_rows(shard.keyspace) THEN
        RAISE EXCEPTION 'shard "%" owns a part of keyspace "%", which holds rows', shard.name, shard.keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state',
                DETAIL = format('To move: %s.', shardmap._describe_flows(space, shardmap._without_shard(space, shard.name))),
                HINT = format('Use shardmap.drain_shard(%L) and shardmap.rebalance(%L) first.', shard.name, shard.keyspace);
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
