-- Pins: keys with a shard of their own choosing.
--
-- Decides whether a key can be given to a shard ahead of the rule, or back to the rule. What always holds: rows of the
-- key are where its owner is; a key is stored as its canonical text, the same that the tables of the keyspace compute.
-- Refuses a change that would leave rows of the key on another shard, and a key written so that a table's type reads it
-- differently. Read ranges.sql next.

CREATE FUNCTION shardmap._save_pin(keyspace text, key text, shard text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM shardmap.pin p WHERE p.keyspace = $1 AND p.key = $2;
    IF shard IS NOT NULL THEN
        INSERT INTO shardmap.pin (keyspace, key, shard) VALUES ($1, $2, $3);
    END IF;
    PERFORM shardmap.publish_map(keyspace);
END
$$;
COMMENT ON FUNCTION shardmap._save_pin(text, text, text) IS 'enters a pin in the catalog, or takes it out (shard NULL), and publishes the map';
REVOKE ALL ON FUNCTION shardmap._save_pin(text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._save_pin(text, text, text) TO shardmap_admin;

-- Whether a table can hold the key; an error if the table's type reads `literal` as another key.
CREATE FUNCTION shardmap._table_can_hold_key(relation regclass, key_type regtype, literal text, canonical text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    read text;
BEGIN
    BEGIN
        EXECUTE format('SELECT shardmap.canonical_key(%L::%s)', literal, format_type(key_type, -1)) INTO read; -- -1: bpchar, not char(1)
    EXCEPTION
        WHEN data_exception OR integrity_constraint_violation THEN RETURN false; -- no value of the type, or the domain
    END;
    IF read <> canonical THEN
        RAISE EXCEPTION 'key "%" is key "%" in table %', canonical, read, relation
            USING ERRCODE = 'invalid_parameter_value', DETAIL = format('The table''s key is of type %s.', format_type(key_type, NULL)),
                HINT = format('Give the key that type: %L::%s.', literal, format_type(key_type, NULL));
    END IF;
    RETURN true;
END
$$;
COMMENT ON FUNCTION shardmap._table_can_hold_key(regclass, regtype, text, text) IS 'whether a key written as literal is a value of the table''s key type; raises an error if it is another key there';
REVOKE ALL ON FUNCTION shardmap._table_can_hold_key(regclass, regtype, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._table_can_hold_key(regclass, regtype, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_key_rows(keyspace text, literal text, canonical text, owner text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    query text;
    shard text;
    tables text;
BEGIN
    SELECT string_agg(format('SELECT %L::pg_catalog.text WHERE EXISTS (SELECT FROM ONLY %s WHERE %I OPERATOR(pg_catalog.=) %L)',
            t.relation, shardmap._shard_table(t.relation), t.key_column, literal), ' UNION ALL ') INTO query
      FROM shardmap.logical_table t
     WHERE t.keyspace = $1 AND shardmap._table_can_hold_key(t.relation, t.key_type, literal, canonical);
    IF query IS NULL THEN
        RETURN;
    END IF;
    FOR shard IN
        SELECT s.name FROM shardmap.shard s WHERE s.keyspace = $1 AND s.name IS DISTINCT FROM owner ORDER BY s.number
    LOOP
        SELECT string_agg(r[1], ', ' ORDER BY r[1]) INTO tables FROM shardmap.remote_rows(shard, query) r;
        IF tables IS NOT NULL THEN
            RAISE EXCEPTION 'key "%" has rows on shard "%"', canonical, shard
                USING ERRCODE = 'object_not_in_prerequisite_state',
                    DETAIL = format('They are in %s; the owner would be %s.', tables, coalesce('shard "' || owner || '"', 'none')),
                    HINT = 'This does not move rows; shardmap.move_key does.';
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._check_key_rows(text, text, text, text) IS 'raises an error if rows of a key are on another shard than the one that is to own it';
REVOKE ALL ON FUNCTION shardmap._check_key_rows(text, text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_key_rows(text, text, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_shard_of(keyspace text, shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF shard IS NULL OR NOT EXISTS (SELECT FROM shardmap.shard s WHERE s.name = shard AND s.keyspace = $1) THEN
        RAISE EXCEPTION 'keyspace "%" has no shard "%"', keyspace, shard
            USING ERRCODE = 'undefined_object', HINT = 'See shardmap.shards.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_shard_of(text, text) IS 'raises an error unless a keyspace has the shard';
REVOKE ALL ON FUNCTION shardmap._check_shard_of(text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_shard_of(text, text) TO shardmap_admin;

CREATE FUNCTION shardmap._pin(keyspace text, literal text, canonical text, shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF canonical IS NULL THEN
        RAISE EXCEPTION 'cannot pin a null key' USING ERRCODE = 'null_value_not_allowed';
    END IF;
    PERFORM shardmap._lock_keyspace(keyspace);
    PERFORM shardmap._check_shard_of(keyspace, shard);
    PERFORM shardmap._check_no_move(keyspace, canonical);
    PERFORM shardmap._lock_tables(keyspace);
    PERFORM shardmap._check_key_rows(keyspace, literal, canonical, shard);
    PERFORM shardmap._save_pin(keyspace, canonical, shard);
END
$$;
COMMENT ON FUNCTION shardmap._pin(text, text, text, text) IS 'pins a key, given as literal and as canonical text';
REVOKE ALL ON FUNCTION shardmap._pin(text, text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._pin(text, text, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap._unpin(keyspace text, literal text, canonical text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    owner text;
BEGIN
    PERFORM shardmap._lock_keyspace(keyspace);
    IF NOT EXISTS (SELECT FROM shardmap.pin p WHERE p.keyspace = $1 AND p.key = canonical) THEN
        RAISE EXCEPTION 'key "%" of keyspace "%" is not pinned', canonical, keyspace
            USING ERRCODE = 'undefined_object', HINT = 'See shardmap.pin; a key of another type than text must be given that type.';
    END IF;
    PERFORM shardmap._check_no_move(keyspace, canonical);
    PERFORM shardmap._lock_tables(keyspace);
    PERFORM shardmap._save_pin(keyspace, canonical, NULL);
    BEGIN
        owner := shardmap.owner_of(canonical, keyspace);
    EXCEPTION
        WHEN check_violation OR object_not_in_prerequisite_state THEN owner := NULL; -- no range, or no shard, holds it
    END;
    PERFORM shardmap._check_key_rows(keyspace, literal, canonical, owner);
END
$$;
COMMENT ON FUNCTION shardmap._unpin(text, text, text) IS 'gives a pinned key back to the rule, given as literal and as canonical text';
REVOKE ALL ON FUNCTION shardmap._unpin(text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._unpin(text, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap.pin_key(key text, shard text, keyspace text DEFAULT 'main') RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._pin(keyspace, key, key, shard)
$$;
CREATE FUNCTION shardmap.pin_key(key anyelement, shard text, keyspace text DEFAULT 'main') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' AS $$
BEGIN
    PERFORM shardmap._pin(keyspace, key::text, shardmap.canonical_key(key), shard);
END
$$;
CREATE FUNCTION shardmap.unpin_key(key text, keyspace text DEFAULT 'main') RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._unpin(keyspace, key, key)
$$;
CREATE FUNCTION shardmap.unpin_key(key anyelement, keyspace text DEFAULT 'main') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' AS $$
BEGIN
    PERFORM shardmap._unpin(keyspace, key::text, shardmap.canonical_key(key));
END
$$;
COMMENT ON FUNCTION shardmap.pin_key(text, text, text) IS 'gives a key to a shard, ahead of the rule; refused while another shard has rows of it';
COMMENT ON FUNCTION shardmap.pin_key(anyelement, text, text) IS 'gives a key to a shard, ahead of the rule; refused while another shard has rows of it';
COMMENT ON FUNCTION shardmap.unpin_key(text, text) IS 'gives a pinned key back to the rule; refused while it has rows and the rule names another shard';
COMMENT ON FUNCTION shardmap.unpin_key(anyelement, text) IS 'gives a pinned key back to the rule; refused while it has rows and the rule names another shard';
REVOKE ALL ON FUNCTION shardmap.pin_key(text, text, text), shardmap.pin_key(anyelement, text, text),
    shardmap.unpin_key(text, text), shardmap.unpin_key(anyelement, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.pin_key(text, text, text), shardmap.pin_key(anyelement, text, text),
    shardmap.unpin_key(text, text), shardmap.unpin_key(anyelement, text) TO shardmap_admin;
