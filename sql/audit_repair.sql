-- Repairing rows: those that lie on a shard that does not own them go home, or away.
--
-- Decides what is done to a row: an orphan, of which the owner has the same, is deleted; a misplaced one, of which the
-- owner has nothing, is inserted there and deleted here. What always holds: the rows are looked at again under locks
-- that keep writers away from both tables; all or nothing, on both shards, in the caller's transaction; without
-- dry_run => false nothing is done. Refuses doubled rows: which of the two is right, only their owner's owner
-- knows. Many rows are repaired batch by batch, each in a transaction of its own, so that locks are short.

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

CREATE FUNCTION shardmap._foreign_entries(one shardmap.audit_findings) RETURNS integer[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT ARRAY(SELECT e.entry FROM shardmap._map_entries(one.keyspace) e WHERE e.owner = one.owner AND e.kind <> 'moving'
        AND (one.key IS NULL OR e.pin = one.key) AND (one.lower IS NULL OR e.lower = one.lower) AND (one.upper IS NULL OR e.upper = one.upper))
$$;
COMMENT ON FUNCTION shardmap._foreign_entries(shardmap.audit_findings) IS 'entries of the map that the rows of a finding belong to';
REVOKE ALL ON FUNCTION shardmap._foreign_entries(shardmap.audit_findings) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._foreign_entries(shardmap.audit_findings) TO shardmap_admin;

CREATE FUNCTION shardmap.repair(finding bigint, dry_run boolean DEFAULT true, max_rows integer DEFAULT 1000)
RETURNS TABLE (row_id text, key text, action text, detail text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one shardmap.audit_findings := shardmap._find_confirmed(finding, '{misplaced,orphan}');
    relation regclass := one.table_name::regclass;
    primary_key text[];
    entries integer[];
    looked_at integer := max_rows;
    seen bigint;
    found jsonb;
    row_ids text[];
    done bigint;
BEGIN
    IF dry_run IS NULL THEN
        RAISE EXCEPTION 'dry_run must not be null' USING ERRCODE = 'null_value_not_allowed';
    ELSIF max_rows IS NULL OR max_rows NOT BETWEEN 1 AND 1000000 THEN
        RAISE EXCEPTION 'max_rows must be from 1 to 1000000' USING ERRCODE = 'invalid_parameter_value';
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
    entries := shardmap._foreign_entries(one);
    LOOP
        SELECT count(*), coalesce((jsonb_agg(to_jsonb(f) ORDER BY f.key, f.row_id) FILTER (WHERE f.finding = one.kind AND f.owner = one.owner
                AND f.detail NOT LIKE 'whether the owner%')), '[]') INTO seen, found
          FROM shardmap._foreign_rows(relation, primary_key, one.shard, entries, looked_at, NOT dry_run) f;
        -- Rows that are not to be repaired may stand before those that are.
        EXIT WHEN found <> '[]' OR seen < looked_at OR looked_at >= 1000000;
        looked_at := least(looked_at * 4, 1000000);
    END LOOP;
    found := (SELECT jsonb_agg(f ORDER BY n) FROM jsonb_array_elements(found) WITH ORDINALITY x (f, n) WHERE n <= max_rows);
    found := coalesce(found, '[]');
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
COMMENT ON FUNCTION shardmap.repair(bigint, boolean, integer) IS
    'deletes the orphans of a confirmed finding, or moves its misplaced rows to their owner, at most max_rows; a row for each; dry_run: only says what it would do';
REVOKE ALL ON FUNCTION shardmap.repair(bigint, boolean, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.repair(bigint, boolean, integer) TO shardmap_admin;

CREATE FUNCTION shardmap._count_repair(finding bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one shardmap.audit_findings := shardmap._find_confirmed(finding, '{misplaced,orphan}');
    relation regclass := one.table_name::regclass;
    answer record;
BEGIN
    SELECT a.* INTO answer FROM shardmap._ask_shards(ARRAY[one.shard], shardmap._count_sql(relation, shardmap._entry_sql(one.keyspace),
        'true', false, format('s.bucket = ANY (%L::integer[])', shardmap._foreign_entries(one))), false) a;
    PERFORM shardmap._check_answer(relation, one.shard, answer.error);
    RAISE NOTICE 'finding %: shard "%" has % rows of table % that belong to shard "%"', finding, one.shard,
        (SELECT coalesce(sum((b ->> 1)::bigint), 0) FROM json_array_elements(answer.answer::json) b), one.table_name, one.owner
        USING DETAIL = 'Nothing was changed.', HINT = format('SELECT * FROM shardmap.repair(%s) names the first of them that are %s; '
            'CALL shardmap.run_repair(%1$s, dry_run => false) repairs all that are.', finding, one.kind);
END
$$;
COMMENT ON FUNCTION shardmap._count_repair(bigint) IS 'says how many rows a finding is about';
REVOKE ALL ON FUNCTION shardmap._count_repair(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._count_repair(bigint) TO shardmap_admin;

-- An audit may have closed the finding meanwhile, as nothing of it is left.
CREATE FUNCTION shardmap._repair_batch(finding bigint, batch_rows integer, so_far bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    repaired bigint;
BEGIN
    PERFORM shardmap._check_no_block('shardmap.run_repair');
    PERFORM shardmap._await_own_commits();
    IF so_far > 0 AND NOT EXISTS (SELECT FROM shardmap.audit_findings f WHERE f.id = finding AND f.state = 'confirmed') THEN
        RETURN 0;
    END IF;
    SELECT count(*) INTO repaired FROM shardmap.repair(finding, false, batch_rows);
    RAISE NOTICE 'finding %: % rows repaired', finding, so_far + repaired;
    RETURN repaired;
END
$$;
COMMENT ON FUNCTION shardmap._repair_batch(bigint, integer, bigint) IS 'repairs some rows of a finding; returns how many; 0: none are left';
REVOKE ALL ON FUNCTION shardmap._repair_batch(bigint, integer, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._repair_batch(bigint, integer, bigint) TO shardmap_admin;

-- No search_path of its own: see run_move().
CREATE PROCEDURE shardmap.run_repair(finding bigint, dry_run boolean DEFAULT true, batch_rows integer DEFAULT 1000)
LANGUAGE plpgsql AS $$
DECLARE
    repaired bigint;
    total bigint := 0;
BEGIN
    IF dry_run IS DISTINCT FROM false THEN
        PERFORM shardmap._count_repair(finding);
        RETURN;
    END IF;
    LOOP
        repaired := shardmap._repair_batch(finding, batch_rows, total);
        COMMIT;
        EXIT WHEN pg_catalog.int8eq(repaired, 0);
        total := pg_catalog.int8pl(total, repaired);
    END LOOP;
END
$$;
COMMENT ON PROCEDURE shardmap.run_repair(bigint, boolean, integer) IS
    'repairs all rows of a confirmed finding, as repair() does, batch_rows in each transaction; dry_run: only says how many there are';
REVOKE ALL ON PROCEDURE shardmap.run_repair(bigint, boolean, integer) FROM PUBLIC;
GRANT EXECUTE ON PROCEDURE shardmap.run_repair(bigint, boolean, integer) TO shardmap_admin;
