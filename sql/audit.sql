-- The audit: what the shards really hold, against the map.
--
-- Decides what a difference is called (see audit_findings) and whether it is to be believed: a finding is confirmed when
-- two consecutive audits agree on it, and closed when an audit that could read everything does not find it any more.
-- What always holds: shards count by entry of the map without knowing the map; a shard that could not be read is a
-- finding of its own and closes nothing; keys that are moving are set apart. Read audit_correct.sql next.

CREATE TABLE shardmap.audit_run (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace ON DELETE CASCADE,
    mode text NOT NULL
        CONSTRAINT audit_run_mode_known CHECK (mode IN ('sample', 'full')),
    map_version bigint NOT NULL,
    map_digest text NOT NULL,
    started_at timestamptz NOT NULL,
    finished_at timestamptz NOT NULL,
    findings integer,
    error text,
    CONSTRAINT audit_run_outcome CHECK ((findings IS NULL) = (error IS NOT NULL))
);
COMMENT ON TABLE shardmap.audit_run IS 'audits that were made';
COMMENT ON COLUMN shardmap.audit_run.id IS 'number of the audit';
COMMENT ON COLUMN shardmap.audit_run.keyspace IS 'keyspace that was audited';
COMMENT ON COLUMN shardmap.audit_run.mode IS 'full: all rows were counted; sample: some of them, and all where something was found';
COMMENT ON COLUMN shardmap.audit_run.map_version IS 'version of the map that the shards were compared with';
COMMENT ON COLUMN shardmap.audit_run.map_digest IS 'digest of that map';
COMMENT ON COLUMN shardmap.audit_run.started_at IS 'when it began';
COMMENT ON COLUMN shardmap.audit_run.finished_at IS 'when it ended';
COMMENT ON COLUMN shardmap.audit_run.findings IS 'number of its findings; NULL: it failed';
COMMENT ON COLUMN shardmap.audit_run.error IS 'why a scheduled audit failed';

CREATE TABLE shardmap.audit_findings (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace ON DELETE CASCADE,
    kind text NOT NULL
        CONSTRAINT audit_findings_kind_known CHECK (kind IN ('drifted', 'misplaced', 'orphan', 'doubled', 'unknown', 'layout',
            'missing_copy', 'differing_copy', 'coordinator_differs', 'coordinator_behind', 'coordinator_ahead')),
    state text NOT NULL
        CONSTRAINT audit_findings_state_known CHECK (state IN ('suspected', 'confirmed', 'corrected', 'closed')),
    table_name text,
    shard text COLLATE pg_catalog."C" NOT NULL,
    owner text COLLATE pg_catalog."C",
    key text,
    lower text,
    upper text,
    rows bigint,
    entry_version bigint,
    map_version bigint NOT NULL,
    detail text,
    seen integer NOT NULL DEFAULT 1,
    first_seen timestamptz NOT NULL,
    last_seen timestamptz NOT NULL,
    last_audit bigint NOT NULL,
    closed_at timestamptz
);
COMMENT ON TABLE shardmap.audit_findings IS 'what audits have found, open and closed';
COMMENT ON COLUMN shardmap.audit_findings.id IS 'number of the finding';
COMMENT ON COLUMN shardmap.audit_findings.keyspace IS 'keyspace that it is about';
COMMENT ON COLUMN shardmap.audit_findings.kind IS 'drifted: the owner of a range, or of a pinned key, has none of it, while another shard has; misplaced, orphan, doubled: rows on a shard that does not own them, as in shardmap.verify(); unknown: could not be read; layout: the shard''s table is not like the others; missing_copy, differing_copy: of a reference table; coordinator_differs: another coordinator has another map of the same version; coordinator_behind, coordinator_ahead: of another version';
COMMENT ON COLUMN shardmap.audit_findings.state IS 'suspected: one audit has found it; confirmed: two in succession; corrected: the map was changed, and no audit has looked since; closed: an audit did not find it any more';
COMMENT ON COLUMN shardmap.audit_findings.table_name IS 'the table; NULL: all of the keyspace';
COMMENT ON COLUMN shardmap.audit_findings.shard IS 'the shard that has the rows, or the shard or coordinator that the finding is about';
COMMENT ON COLUMN shardmap.audit_findings.owner IS 'the shard that owns them by the map; NULL: none does, or the finding is not about rows';
COMMENT ON COLUMN shardmap.audit_findings.key IS 'the pinned key that it is about';
COMMENT ON COLUMN shardmap.audit_findings.lower IS 'first key of the range that it is about';
COMMENT ON COLUMN shardmap.audit_findings.upper IS 'first key after that range';
COMMENT ON COLUMN shardmap.audit_findings.rows IS 'number of rows; of misplaced, orphan and doubled ones at most 1000 a table and shard are looked at';
COMMENT ON COLUMN shardmap.audit_findings.entry_version IS 'version of the range, or of the map, for shardmap.correct()';
COMMENT ON COLUMN shardmap.audit_findings.map_version IS 'version of the map that the shards were last compared with';
COMMENT ON COLUMN shardmap.audit_findings.detail IS 'more about it: rows by primary key, what differs, why it could not be read';
COMMENT ON COLUMN shardmap.audit_findings.seen IS 'how many audits in succession have found it';
COMMENT ON COLUMN shardmap.audit_findings.first_seen IS 'when it was found first';
COMMENT ON COLUMN shardmap.audit_findings.last_seen IS 'when it was found last';
COMMENT ON COLUMN shardmap.audit_findings.last_audit IS 'the audit that found it last';
COMMENT ON COLUMN shardmap.audit_findings.closed_at IS 'when an audit did not find it any more';
COMMENT ON SEQUENCE shardmap.audit_run_id_seq IS 'numbers of audits';
COMMENT ON SEQUENCE shardmap.audit_findings_id_seq IS 'numbers of findings';
GRANT SELECT ON shardmap.audit_run TO PUBLIC;
-- Findings name rows, which not all may see.
GRANT SELECT ON shardmap.audit_findings TO shardmap_admin;

CREATE FUNCTION shardmap.map_version(keyspace text DEFAULT 'main') RETURNS bigint
LANGUAGE sql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
    SELECT k.version FROM shardmap.keyspace k WHERE k.name = $1
$$;
COMMENT ON FUNCTION shardmap.map_version(text) IS 'version of the map of a keyspace; NULL if there is none';

CREATE FUNCTION shardmap.map_digest(keyspace text DEFAULT 'main') RETURNS text
LANGUAGE sql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
    SELECT md5((k.space - 'version' - 'wanted_slots' || jsonb_build_object('shards',
            (SELECT coalesce(jsonb_agg(s - 'options' - 'wanted_tokens' ORDER BY n), '[]') FROM jsonb_array_elements(k.space -> 'shards') WITH ORDINALITY a (s, n))))::text)
      FROM (SELECT shardmap._keyspace_json($1) AS space) k WHERE k.space IS NOT NULL
$$;
COMMENT ON FUNCTION shardmap.map_digest(text) IS
    'MD5 of the map of a keyspace, without its version and without addresses: equal on coordinators that give every key the same shard';

-- Rows by entry of the map. Of large tables in a sample of pages: about as many as 10000 rows take.
CREATE FUNCTION shardmap._count_sql(relation regclass, entry_sql text, scope text, sampled boolean, condition text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('SELECT coalesce(json_agg(json_build_array(b.bucket, b.rows)), ''[]'')::text AS answer FROM (SELECT s.bucket, '
            'count(*) AS rows FROM %s s WHERE %s GROUP BY s.bucket) b',
        CASE WHEN sampled THEN replace(shardmap._source_sql($1, '{}', scope, entry_sql), ' AS t WHERE ', format(
                ' AS t TABLESAMPLE SYSTEM ((SELECT least(100, 1000000 / greatest(c.reltuples, 1)) FROM pg_class c WHERE c.oid = %L::regclass)) WHERE ',
                shardmap._shard_table($1)))
            ELSE shardmap._source_sql($1, '{}', scope, entry_sql) END, condition)
$$;
COMMENT ON FUNCTION shardmap._count_sql(regclass, text, text, boolean, text) IS 'query for the number of rows of a shard''s table by entry of the map';
REVOKE ALL ON FUNCTION shardmap._count_sql(regclass, text, text, boolean, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._count_sql(regclass, text, text, boolean, text) TO shardmap_admin;

-- What a shard's table is, one line each: columns, then what only shards have (here it is left out).
CREATE FUNCTION shardmap._layout_sql(name text, rules boolean) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('SELECT coalesce((SELECT array_agg(l.line ORDER BY l.line) FROM (SELECT concat_ws('' '', ''column'', a.attname, '
            'format_type(a.atttypid, a.atttypmod), CASE WHEN a.attnotnull THEN ''not null'' END, nullif(a.attgenerated::text, '''')) AS line '
            'FROM pg_attribute a WHERE a.attrelid = to_regclass(%1$L) AND a.attnum > 0 AND NOT a.attisdropped%2$s) l), '
            '''{}'')::text AS answer', name, CASE WHEN rules THEN format(
                ' UNION ALL SELECT concat(c.contype, '' '', pg_get_constraintdef(c.oid)) FROM pg_constraint c '
                'WHERE c.conrelid = to_regclass(%1$L) AND c.contype::text <> ''n'' UNION ALL SELECT substr(pg_get_indexdef(i.indexrelid), '
                'strpos(pg_get_indexdef(i.indexrelid), '' USING '')) FROM pg_index i WHERE i.indrelid = to_regclass(%1$L)', name) END)
$$;
COMMENT ON FUNCTION shardmap._layout_sql(text, boolean) IS 'query for the columns of a table, with rules also constraints and indexes, as lines';
