-- Correcting the map: a range goes to the shard that has its rows.
--
-- Decides whether a finding may change the map: it is confirmed, the range is still at the version that the caller names,
-- and another look, with the new map, finds nothing. What always holds: compare and swap; of two corrections, or a
-- correction and another change, one is told (40001) and nothing of it is done. The finding stays corrected until a full audit
-- after COMMIT, when every session has the new map, finds nothing either. Read audit_repair.sql next.

CREATE FUNCTION shardmap._find_confirmed(finding bigint, kinds text[]) RETURNS shardmap.audit_findings
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one shardmap.audit_findings;
BEGIN
    SELECT f.* INTO one FROM shardmap.audit_findings f WHERE f.id = finding;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'finding % does not exist', finding USING ERRCODE = 'undefined_object', HINT = 'See shardmap.audit_findings.';
    ELSIF one.kind <> ALL (kinds) THEN
        RAISE EXCEPTION 'finding % is of kind "%"', finding, one.kind
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = format('This is for findings of kind %s.', array_to_string(kinds, ', ')),
                HINT = 'shardmap.correct() changes the map, shardmap.repair() the rows.';
    ELSIF one.state <> 'confirmed' THEN
        RAISE EXCEPTION 'finding % is %', finding, one.state
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = 'Nothing was changed.',
                HINT = 'A finding is confirmed when two consecutive audits agree on it: SELECT shardmap.audit(...) again.';
    END IF;
    RETURN one;
END
$$;
COMMENT ON FUNCTION shardmap._find_confirmed(bigint, text[]) IS 'a finding, if it is confirmed and of one of the kinds; else an error';
REVOKE ALL ON FUNCTION shardmap._find_confirmed(bigint, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._find_confirmed(bigint, text[]) TO shardmap_admin;

CREATE FUNCTION shardmap._set_finding_state(finding bigint, expected text, state text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE shardmap.audit_findings f SET state = $3 WHERE f.id = $1 AND f.state = $2;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'finding % is not % any more', finding, expected
            USING ERRCODE = 'serialization_failure', DETAIL = 'Nothing was changed.', HINT = 'See shardmap.audit_findings.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._set_finding_state(bigint, text, text) IS 'changes the state of a finding, if it is the expected one';
REVOKE ALL ON FUNCTION shardmap._set_finding_state(bigint, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._set_finding_state(bigint, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap.correct(finding bigint, expected_version bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one shardmap.audit_findings := shardmap._find_confirmed(finding, '{drifted}');
    range shardmap.key_range;
    version bigint;
    left_over text;
BEGIN
    IF expected_version IS NULL THEN
        RAISE EXCEPTION 'the expected version must not be null'
            USING ERRCODE = 'null_value_not_allowed', HINT = 'Pass the entry_version of the finding, as you have seen it.';
    END IF;
    PERFORM shardmap._check_transaction('shardmap.correct');
    PERFORM shardmap._lock_ranges(one.keyspace);
    SELECT r.* INTO range FROM shardmap.key_range r
     WHERE r.keyspace = one.keyspace AND r.lower IS NOT DISTINCT FROM one.lower AND r.upper IS NOT DISTINCT FROM one.upper;
    version := coalesce(range.version, 0);
    range.keyspace := one.keyspace;
    range.lower := one.lower;
    range.upper := one.upper;
    PERFORM shardmap._check_range_version(range, version, expected_version);
    version := shardmap.set_range(one.keyspace, one.lower, one.upper, one.shard, expected_version);
    SELECT string_agg(concat_ws(' ', r.kind, r.table_name, r.shard, r.detail), '; ') INTO left_over
      FROM shardmap._audit_rows(one.keyspace, false, one.lower, one.upper) r;
    IF left_over IS NOT NULL THEN
        RAISE EXCEPTION 'range % would still not be where its rows are', shardmap._range_text(one.lower, one.upper)
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = left_over, HINT = 'Nothing was changed. Audit the keyspace again.';
    END IF;
    PERFORM shardmap._set_finding_state(finding, 'confirmed', 'corrected');
    RETURN version;
END
$$;
COMMENT ON FUNCTION shardmap.correct(bigint, bigint) IS
    'gives the range of a confirmed finding "drifted" to the shard that has its rows, if it is still at the expected version (0: no shard owns it), and looks again; else nothing is changed (40001); returns its new version';
REVOKE ALL ON FUNCTION shardmap.correct(bigint, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.correct(bigint, bigint) TO shardmap_admin;
