-- Alerts: replicas whose lag misses its objective, and what audits have found.
--
-- Decides what is worth one: of findings those that are confirmed, and what could not be read at all. What always holds:
-- an alert names no row, so that all may read it; who listens is told of each change, when it is committed.

CREATE FUNCTION shardmap._finding_severity(kind text, state text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN kind = 'unknown' AND state IN ('suspected', 'confirmed') THEN 'warn'
        WHEN state <> 'confirmed' THEN NULL
        WHEN kind IN ('layout', 'coordinator_behind', 'coordinator_ahead') THEN 'warn' ELSE 'page' END
$$;
COMMENT ON FUNCTION shardmap._finding_severity(text, text) IS 'how urgent a finding is, as in shardmap.alerts; NULL: it is no alert';

-- Pins and ranges are readable by all; single rows are not.
CREATE FUNCTION shardmap._finding_text(finding shardmap.audit_findings) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('audit of keyspace "%s" has found "%s"', finding.keyspace, finding.kind)
        || coalesce(' in table ' || finding.table_name, '')
        || coalesce(', key "' || finding.key || '"', CASE WHEN coalesce(finding.lower, finding.upper) IS NOT NULL
            THEN ', range ' || shardmap._range_text(finding.lower, finding.upper) END, '')
        || coalesce(', owned by shard "' || finding.owner || '"', '')
$$;
COMMENT ON FUNCTION shardmap._finding_text(shardmap.audit_findings) IS 'a finding for messages, without its rows';

CREATE FUNCTION shardmap._on_finding_changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    was text := CASE TG_OP WHEN 'UPDATE' THEN shardmap._finding_severity(OLD.kind, OLD.state) END;
    severity text := shardmap._finding_severity(NEW.kind, NEW.state);
BEGIN
    IF severity IS DISTINCT FROM was THEN
        PERFORM pg_notify('shardmap_alerts', json_build_object('finding', NEW.id, 'keyspace', NEW.keyspace, 'shard', NEW.shard,
            'alert', coalesce(severity, 'ok'), 'was', json_build_object('alert', coalesce(was, 'ok')), 'kind', NEW.kind,
            'state', NEW.state, 'why', left(shardmap._finding_text(NEW), 1000))::text);
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION shardmap._on_finding_changed() IS 'trigger: tells listeners of an alert that begins or ends';
REVOKE ALL ON FUNCTION shardmap._on_finding_changed() FROM PUBLIC;

CREATE TRIGGER finding_changed AFTER INSERT OR UPDATE OF state ON shardmap.audit_findings
    FOR EACH ROW EXECUTE FUNCTION shardmap._on_finding_changed();
COMMENT ON TRIGGER finding_changed ON shardmap.audit_findings IS 'tells listeners of alerts';

CREATE VIEW shardmap.alerts AS
SELECT r.shard, r.name AS replica, v.severity, v.since, v.message, NULL::bigint AS finding
  FROM shardmap.replica r
  JOIN pg_catalog.pg_foreign_server f ON f.srvname OPERATOR(pg_catalog.=) r.name
  CROSS JOIN LATERAL shardmap._lag_summary(f.oid) s
  CROSS JOIN LATERAL (
    SELECT s.alert AS severity, s.alert_since AS since,
           pg_catalog.format('error budget burns %s times too fast over 5 minutes, %s over 30 minutes, %s over 1 hour, %s over 6 hours, %s over 3 days',
               pg_catalog.round(s.burn_5m::pg_catalog.numeric, 1), pg_catalog.round(s.burn_30m::pg_catalog.numeric, 1), pg_catalog.round(s.burn_1h::pg_catalog.numeric, 1),
               pg_catalog.round(s.burn_6h::pg_catalog.numeric, 1), pg_catalog.round(s.burn_3d::pg_catalog.numeric, 1)) AS message
     WHERE s.alert OPERATOR(pg_catalog.<>) 'ok'
    UNION ALL
    SELECT 'early warning', NULL, 'the greatest lag grows while p99 stays: bad moments get worse before they get frequent'
     WHERE s.early_warning
  ) v
UNION ALL
SELECT f.shard, NULL, shardmap._finding_severity(f.kind, f.state), f.first_seen, shardmap._finding_text(f), f.id
  FROM shardmap.audit_findings f WHERE shardmap._finding_severity(f.kind, f.state) IS NOT NULL
UNION ALL
SELECT NULL, NULL, 'warn', r.started_at, pg_catalog.format('audits of keyspace "%s" fail, see shardmap.audit_run', r.keyspace), NULL
  FROM shardmap.keyspace k CROSS JOIN LATERAL (SELECT a.* FROM shardmap.audit_run a WHERE a.keyspace OPERATOR(pg_catalog.=) k.name
        ORDER BY a.id DESC LIMIT 1) r
 WHERE r.error IS NOT NULL;
COMMENT ON VIEW shardmap.alerts IS 'replicas that somebody should look at, and what audits have found; empty: nothing';
COMMENT ON COLUMN shardmap.alerts.shard IS 'shard that it is about, or whose primary the replica follows; a coordinator, if a finding is about one';
COMMENT ON COLUMN shardmap.alerts.replica IS 'the replica; NULL: it is not about one';
COMMENT ON COLUMN shardmap.alerts.severity IS 'page: now, statements answer wrongly or the error budget will soon be gone; warn: some time; early warning: it may begin';
COMMENT ON COLUMN shardmap.alerts.since IS 'since when; NULL: not known';
COMMENT ON COLUMN shardmap.alerts.message IS 'what is wrong';
COMMENT ON COLUMN shardmap.alerts.finding IS 'number of the finding in shardmap.audit_findings';
GRANT SELECT ON shardmap.alerts TO PUBLIC;
