-- Audits by the background worker: which are due, and what becomes of those that fail.
--
-- Decides by the settings shardmap.audit_interval and shardmap.audit_full_interval, and by the audits that were made, by
-- whomever. What always holds: a failed audit is written down with its error, and tried again after a minute at the most;
-- what is kept does not grow for ever. Read src/pg/audits next.

CREATE FUNCTION shardmap._audit_role() RETURNS oid
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wanted text := current_setting('shardmap.audit_role');
    role oid;
BEGIN
    IF wanted = '' THEN
        RETURN (SELECT e.extowner FROM pg_extension e WHERE e.extname = 'pg_shardmap');
    END IF;
    SELECT r.oid INTO role FROM pg_roles r WHERE r.rolname = wanted;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'role "%" does not exist', wanted
            USING ERRCODE = 'undefined_object', HINT = 'Correct shardmap.audit_role.';
    END IF;
    RETURN role;
END
$$;
COMMENT ON FUNCTION shardmap._audit_role() IS 'role that scheduled audits are made as: that of shardmap.audit_role, or the owner of the extension';

CREATE FUNCTION shardmap._due_audits() RETURNS TABLE (keyspace text, mode text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT k.name, CASE WHEN d.is_full THEN 'full' ELSE 'sample' END
      FROM (SELECT current_setting('shardmap.audit_interval')::interval AS some, current_setting('shardmap.audit_full_interval')::interval AS all_rows) s
     CROSS JOIN shardmap.keyspace k
      LEFT JOIN LATERAL (SELECT r.* FROM shardmap.audit_run r WHERE r.keyspace = k.name ORDER BY r.id DESC LIMIT 1) l ON true
      LEFT JOIN LATERAL (SELECT r.* FROM shardmap.audit_run r WHERE r.keyspace = k.name AND r.mode = 'full' ORDER BY r.id DESC LIMIT 1) f ON true
     CROSS JOIN LATERAL (SELECT
            s.some > '0' AND coalesce(l.started_at + CASE WHEN l.error IS NULL THEN s.some ELSE least(s.some, '1 minute') END <= clock_timestamp(), true) AS is_some,
            s.all_rows > '0' AND coalesce(f.started_at + CASE WHEN f.error IS NULL THEN s.all_rows ELSE least(s.all_rows, '1 minute') END <= clock_timestamp(), true) AS is_full) d
     WHERE (d.is_some OR d.is_full) AND EXISTS (SELECT FROM shardmap.shard h WHERE h.keyspace = k.name)
     ORDER BY l.started_at NULLS FIRST, k.name
$$;
COMMENT ON FUNCTION shardmap._due_audits() IS 'audits that the background worker is to make now';

CREATE FUNCTION shardmap._note_failed_audit(keyspace text, mode text, started_at timestamptz, error text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO shardmap.audit_run (keyspace, mode, map_version, map_digest, started_at, finished_at, error)
    SELECT k.name, $2, k.version, shardmap.map_digest(k.name), $3, clock_timestamp(), $4 FROM shardmap.keyspace k WHERE k.name = $1
$$;
COMMENT ON FUNCTION shardmap._note_failed_audit(text, text, timestamptz, text) IS 'writes down that an audit has failed';

-- The last thousand audits of a keyspace, and findings that were closed in the last 90 days.
CREATE FUNCTION shardmap._forget_old_audits(keyspace text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM shardmap.audit_run r WHERE r.keyspace = $1 AND r.id <= (SELECT o.id FROM shardmap.audit_run o
        WHERE o.keyspace = $1 ORDER BY o.id DESC OFFSET 1000 LIMIT 1);
    DELETE FROM shardmap.audit_findings f WHERE f.keyspace = $1 AND f.state = 'closed' AND f.closed_at < now() - interval '90 days'
$$;
COMMENT ON FUNCTION shardmap._forget_old_audits(text) IS 'deletes old audits of a keyspace and findings that were closed long ago';
REVOKE ALL ON FUNCTION shardmap._note_failed_audit(text, text, timestamptz, text), shardmap._forget_old_audits(text) FROM PUBLIC;
