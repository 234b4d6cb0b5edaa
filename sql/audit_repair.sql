-- Repairing rows: those that lie on a shard that does not own them go home, or away.
--
-- Decides what is done to a row: an orphan, of which the owner has the same, is deleted; a misplaced one, of which the
-- owner has nothing, is inserted there and deleted here. What always holds: the rows are looked at again under locks
-- that keep writers away from both tables; all or nothing, on both shards, in the caller's transaction; without
-- dry_run => false nothing is done. Refuses doubled rows: which of the two is right, only their owner's owner knows.

CREATE FUNCTION shardmap._send_rows_home(relation regclass, primary_key text[], source text, target text, row_ids text[]) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on SET row_security = off
SET timezone = 'UTC' SET datestyle = 'ISO, YMD' SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
DECLARE
    columns text := (SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FROM pg_attribute a
        WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '');
    name text := shardmap._shard_table(relation);
    id_sql text := shardmap._row_id_sql(relation, primary_key);
    sent bigint;
    rows text;
BEGIN
    SELECT count(*), string_agg('(' || (SELECT string_agg(quote_nullable(v), ', ' ORDER BY n) FROM unnest(r) WITH ORDINALITY u (v, n)) || ')', ', ')
      INTO sent, rows
      FROM shardmap.remote_rows(source, format('SELECT %s FROM ONLY %s AS t WHERE %s = ANY (%L::text[])', columns, name, id_sql, row_ids)) r;
    IF sent > 0 THEN
        PERFORM shardmap.remote_execute(target, format('INSERT INTO %s (%s) OVERRIDING SYSTEM VALUE VALUES %s', name, columns, rows));
    END IF;
    RETURN sent;
END
$$;
COMMENT ON FUNCTION shardmap._send_rows_home(regclass, text[], text, text, text[]) IS 'inserts rows that one shard has into the table of another, in this transaction; returns how many';
REVOKE ALL ON FUNCTION shardmap._send_rows_home(regclass, text[], text, text, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._send_rows_home(regclass, text[], text, text, text[]) TO shardmap_admin;

CREATE FUNCTION shardmap.repair(finding bigint, dry_run boolean DEFAULT true)
RETURNS TABLE (row_id text, key text, action text, detail text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one shardmap.audit_findings := shardmap._find_confirmed(finding, '{misplaced,orphan}');
    relation regclass := one.table_name::regclass;
    primary_key text[];
    entries integer[];
    found jsonb;
    row_ids text[];
    done bigint;
BEGIN
    IF dry_run IS NULL THEN
        RAISE EXCEPTION 'dry_run must not be null' USING ERRCODE = 'null_value_not_allowed';
    ELSIF one.owner IS NULL THEN
        RAISE EXCEPTION 'no shard owns the rows of finding %', finding
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Give their range to a shard with shardmap.set_range first.';
    ELSIF NOT dry_run THEN
        PERFORM shardmap._check_transaction('shardmap.repair');
        PERFORM shardmap._lock_keyspace(one.keyspace); -- the map stays as it is
        PERFORM shardmap._remote_ddl(s, format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', shardmap._shard_table(relation)))
           FROM unnest(ARRAY[least(one.shard, one.owner), greatest(one.shard, one.owner)]) s;
    END IF;
    primary_key := shardmap._primary_key(relation, ARRAY[one.shard, one.owner], NOT dry_run);
    entries := ARRAY(SELECT e.entry FROM shardmap._map_entries(one.keyspace) e WHERE e.owner = one.owner AND e.kind <> 'moving'
        AND (one.key IS NULL OR e.pin = one.key) AND (one.lower IS NULL OR e.lower = one.lower) AND (one.upper IS NULL OR e.upper = one.upper));
    SELECT coalesce(jsonb_agg(to_jsonb(f) ORDER BY f.key, f.row_id), '[]') INTO found
      FROM shardmap._foreign_rows(relation, primary_key, one.shard, entries, 1000, NOT dry_run) f
     WHERE f.finding = one.kind AND f.owner = one.owner AND f.detail NOT LIKE 'whether the owner%';
    RETURN QUERY SELECT f.row_id, f.key, format(CASE one.kind WHEN 'orphan' THEN '%sdelete on %s' ELSE '%smove from %s to %s' END,
            CASE WHEN dry_run THEN 'would ' ELSE '' END, one.shard, one.owner), f.detail
        FROM jsonb_to_recordset(found) f (row_id text, key text, detail text);
    row_ids := ARRAY(SELECT f ->> 'row_id' FROM jsonb_array_elements(found) f);
    IF dry_run OR row_ids = '{}' THEN
        RETURN;
    END IF;
    IF one.kind = 'misplaced' THEN
        done := shardmap._send_rows_home(relation, primary_key, one.shard, one.owner, row_ids);
        IF done <> cardinality(row_ids) THEN
            RAISE EXCEPTION '% of % rows were sent to shard "%"', done, cardinality(row_ids), one.owner USING ERRCODE = 'data_corrupted';
        END IF;
    END IF;
    done := substring(shardmap.remote_execute(one.shard, format('DELETE FROM ONLY %s AS t WHERE %s = ANY (%L::text[])',
        shardmap._shard_table(relation), shardmap._row_id_sql(relation, primary_key), row_ids)) FROM '\d+$')::bigint;
    IF done <> cardinality(row_ids) THEN
        RAISE EXCEPTION '% instead of % rows were deleted on shard "%"', done, cardinality(row_ids), one.shard USING ERRCODE = 'data_corrupted';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.repair(bigint, boolean) IS
    'deletes the orphans of a confirmed finding, or moves its misplaced rows to their owner, at most 1000 a call; a row for each; dry_run: only says what it would do';
REVOKE ALL ON FUNCTION shardmap.repair(bigint, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.repair(bigint, boolean) TO shardmap_admin;
