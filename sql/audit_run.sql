-- The audit: a look at the shards, written down and compared with the one before.
--
-- Decides when a finding is confirmed and when it is closed. What always holds: audits of a keyspace are made one after
-- the other; one during which the map changed says nothing (40001); an audit that would not have found a thing for sure
-- does not come between two that did. Read audit_correct.sql next.

-- What every audit looks at in full; rows and their checksums are a full one's.
CREATE FUNCTION shardmap._is_in_samples(kind text) RETURNS boolean
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT kind IN ('unknown', 'layout', 'missing_copy', 'coordinator_differs', 'coordinator_behind', 'coordinator_ahead')
$$;
COMMENT ON FUNCTION shardmap._is_in_samples(text) IS 'whether an audit of mode sample finds findings of this kind for sure';

CREATE FUNCTION shardmap._record_audit(keyspace text, mode text, map_version bigint, started_at timestamptz, findings jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    this bigint;
    one shardmap.audit_findings;
    known shardmap.audit_findings;
    unknown text[] := ARRAY(SELECT f ->> 'shard' FROM jsonb_array_elements($5) f WHERE f ->> 'kind' = 'unknown');
BEGIN
    INSERT INTO shardmap.audit_run (keyspace, mode, map_version, map_digest, started_at, finished_at, findings)
    VALUES ($1, $2, $3, shardmap.map_digest($1), $4, clock_timestamp(), jsonb_array_length($5)) RETURNING id INTO this;
    FOR one IN SELECT (jsonb_populate_record(NULL::shardmap.audit_findings, f)).* FROM jsonb_array_elements(findings) f LOOP
        SELECT f.* INTO known FROM shardmap.audit_findings f
         WHERE f.keyspace = $1 AND f.state <> 'closed'
           AND ROW(f.kind, f.table_name, f.shard, f.owner, f.key, f.lower, f.upper)
                IS NOT DISTINCT FROM ROW(one.kind, one.table_name, one.shard, one.owner, one.key, one.lower, one.upper) FOR UPDATE;
        IF NOT FOUND THEN
            INSERT INTO shardmap.audit_findings (keyspace, kind, state, table_name, shard, owner, key, lower, upper, rows, entry_version,
                map_version, detail, first_seen, last_seen, last_audit)
            VALUES ($1, one.kind, 'suspected', one.table_name, one.shard, one.owner, one.key, one.lower, one.upper, one.rows,
                one.entry_version, $3, one.detail, clock_timestamp(), clock_timestamp(), this);
        ELSE
            UPDATE shardmap.audit_findings f
               SET seen = CASE WHEN c.again THEN f.seen + 1 ELSE 1 END, state = CASE WHEN c.again THEN 'confirmed' ELSE 'suspected' END,
                   rows = one.rows, detail = one.detail, entry_version = one.entry_version, map_version = $3,
                   last_seen = clock_timestamp(), last_audit = this
              FROM (SELECT known.state <> 'corrected' AND (known.kind <> 'drifted' OR known.entry_version = one.entry_version)
                        AND NOT EXISTS (SELECT FROM shardmap.audit_run r WHERE r.keyspace = $1 AND r.error IS NULL
                            AND r.id > known.last_audit AND r.id < this
                            AND (r.mode = 'full' OR shardmap._is_in_samples(one.kind))) AS again) c
             WHERE f.id = known.id;
        END IF;
    END LOOP;
    UPDATE shardmap.audit_findings f SET state = 'closed', closed_at = clock_timestamp()
     WHERE f.keyspace = $1 AND f.state <> 'closed' AND f.last_audit <> this
       AND f.shard <> ALL (unknown) AND (f.owner <> ALL (unknown)) IS NOT FALSE
       AND (mode = 'full' OR shardmap._is_in_samples(f.kind));
    RETURN this;
END
$$;
COMMENT ON FUNCTION shardmap._record_audit(text, text, bigint, timestamptz, jsonb) IS 'writes down what an audit has found, and what it has not found any more';
REVOKE ALL ON FUNCTION shardmap._record_audit(text, text, bigint, timestamptz, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._record_audit(text, text, bigint, timestamptz, jsonb) TO shardmap_admin;

CREATE FUNCTION shardmap.audit(keyspace text DEFAULT 'main', mode text DEFAULT 'sample') RETURNS SETOF shardmap.audit_findings
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    version bigint := shardmap.map_version(keyspace);
    entries text;
    started timestamptz := clock_timestamp();
    found jsonb;
    this bigint;
BEGIN
    IF version IS NULL THEN
        RAISE EXCEPTION 'keyspace "%" does not exist', keyspace USING ERRCODE = 'undefined_object', HINT = 'See shardmap.keyspace.';
    ELSIF mode IS NULL OR mode NOT IN ('sample', 'full') THEN
        RAISE EXCEPTION 'mode of an audit must be "sample" or "full"' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM shardmap._check_transaction('shardmap.audit');
    PERFORM pg_advisory_xact_lock(hashtextextended('shardmap.audit ' || keyspace, 0));
    version := shardmap.map_version(keyspace);
    entries := shardmap._entries_digest(keyspace);
    SELECT coalesce(jsonb_agg(to_jsonb(f)), '[]') INTO found FROM (
        SELECT DISTINCT ON (a.kind, a.table_name, a.shard, a.owner, a.key, a.lower, a.upper) a.* FROM (
            SELECT r.kind, r.table_name, r.shard, r.owner, r.key, r.lower_bound, r.upper_bound, r.rows, r.entry_version, r.detail
              FROM shardmap._audit_rows($1, $2 = 'sample') r
            UNION ALL SELECT l.kind, l.table_name, l.shard, NULL, NULL, NULL, NULL, NULL, NULL, l.detail FROM shardmap._audit_layouts($1) l
            UNION ALL SELECT c.kind, c.table_name, c.shard, NULL, NULL, NULL, NULL, NULL, NULL, c.detail FROM shardmap._audit_copies($1, $2 = 'sample') c
            UNION ALL SELECT o.kind, NULL, o.coordinator, NULL, NULL, NULL, NULL, NULL, NULL, o.detail FROM shardmap._audit_coordinators($1) o
            ) a (kind, table_name, shard, owner, key, lower, upper, rows, entry_version, detail)) f;
    IF shardmap._entries_digest(keyspace) IS DISTINCT FROM entries THEN
        RAISE EXCEPTION 'the map of keyspace "%" changed during the audit', keyspace
            USING ERRCODE = 'serialization_failure', HINT = 'Audit it again.';
    END IF;
    this := shardmap._record_audit(keyspace, mode, version, started, found);
    RETURN QUERY SELECT f.* FROM shardmap.audit_findings f WHERE f.last_audit = this ORDER BY f.id;
END
$$;
COMMENT ON FUNCTION shardmap.audit(text, text) IS
    'compares the map of a keyspace with what its shards hold and returns what differs; mode full: counts all rows, sample: some; kept in shardmap.audit_findings';
REVOKE ALL ON FUNCTION shardmap.audit(text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.audit(text, text) TO shardmap_admin;
