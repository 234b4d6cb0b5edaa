-- Correcting the map: a range, or a pinned key, goes to the shard that has its rows.
--
-- Decides whether a finding may change the map: it is confirmed, the range (for a pin, the map) is still at the version
-- that the caller names, and another look, with the new map, finds nothing. What always holds: compare and swap; of two corrections, or a
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

CREATE FUNCTION shardmap._correct_range(one shardmap.audit_findings, expected_version bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    range shardmap.key_range;
BEGIN
    PERFORM shardmap._lock_ranges(one.keyspace);
    SELECT r.* INTO range FROM shardmap.key_range r
     WHERE r.keyspace = one.keyspace AND r.lower IS NOT DISTINCT FROM one.lower AND r.upper IS NOT DISTINCT FROM one.upper;
    range.keyspace := one.keyspace;
    range.lower := one.lower;
    range.upper := one.upper;
    PERFORM shardmap._check_range_version(range, coalesce(range.version, 0), expected_version);
    RETURN shardmap.set_range(one.keyspace, one.lower, one.upper, one.shard, expected_version);
END
$$;
COMMENT ON FUNCTION shardmap._correct_range(shardmap.audit_findings, bigint) IS 'gives a drifted range to the shard that has its rows, if it is at the expected version; returns its new one';

-- A pin has no version of its own. What it says is compared too.
CREATE FUNCTION shardmap._correct_pin(one shardmap.audit_findings, expected_version bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' AS $$
DECLARE
    space shardmap.keyspace := shardmap._lock_keyspace(one.keyspace);
    owner text := (SELECT p.shard FROM shardmap.pin p WHERE p.keyspace = one.keyspace AND p.key = one.key);
BEGIN
    IF space.version <> expected_version OR owner IS DISTINCT FROM one.owner THEN
        RAISE EXCEPTION 'the map of keyspace "%" is at version %, version % was expected', one.keyspace, space.version, expected_version
            USING ERRCODE = 'serialization_failure', DETAIL = format('Key "%s" %s. Nothing was changed.', one.key,
                    coalesce('is pinned to shard "' || owner || '"', 'is not pinned')),
                HINT = 'Audit the keyspace again and pass the entry_version of the finding.';
    END IF;
    PERFORM shardmap._pin(one.keyspace, one.key, one.key, one.shard);
    RETURN shardmap.map_version(one.keyspace);
END
$$;
COMMENT ON FUNCTION shardmap._correct_pin(shardmap.audit_findings, bigint) IS 'pins a drifted key to the shard that has its rows, if the map is at the expected version; returns its new one';

-- The rules of a ring and of remainders cannot be wrong about a key: only rows can be in the wrong place.
CREATE FUNCTION shardmap._refuse_rule_correction(finding bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_one record;
BEGIN
    SELECT f.*, k.strategy INTO found_one FROM shardmap.audit_findings f JOIN shardmap.keyspace k ON k.name = f.keyspace
     WHERE f.id = finding AND f.kind IN ('misplaced', 'orphan', 'doubled') AND f.key IS NULL AND k.strategy <> 'range';
    IF FOUND THEN
        RAISE EXCEPTION 'finding % is about rows; the map of keyspace "%" follows from a rule', finding, found_one.keyspace
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = format('By strategy "%s" the keys of these rows belong to shard "%s".',
                    found_one.strategy, found_one.owner),
                HINT = format('CALL shardmap.run_repair(%s) brings the rows home. A key all of whose rows are to stay where they are is given to '
                    'that shard by shardmap.pin_key(); if another map was meant, compare with the other coordinators.', finding);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._refuse_rule_correction(bigint) IS 'raises an error if the map cannot be what is wrong';

CREATE FUNCTION shardmap.correct(finding bigint, expected_version bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one shardmap.audit_findings;
    version bigint;
    left_over text;
BEGIN
    PERFORM shardmap._refuse_rule_correction(finding);
    one := shardmap._find_confirmed(finding, '{drifted}');
    IF expected_version IS NULL THEN
        RAISE EXCEPTION 'the expected version must not be null'
            USING ERRCODE = 'null_value_not_allowed', HINT = 'Pass the entry_version of the finding, as you have seen it.';
    END IF;
    PERFORM shardmap._check_transaction('shardmap.correct');
    version := CASE WHEN one.key IS NULL THEN shardmap._correct_range(one, expected_version) ELSE shardmap._correct_pin(one, expected_version) END;
    SELECT string_agg(concat_ws(' ', r.kind, r.table_name, r.shard, r.detail), '; ') INTO left_over
      FROM shardmap._audit_rows(one.keyspace, false, one.lower, one.upper, CASE WHEN one.key IS NOT NULL THEN ARRAY[one.key] END) r;
    IF left_over IS NOT NULL THEN
        RAISE EXCEPTION '% would still not be where its rows are', coalesce('key "' || one.key || '"', 'range ' || shardmap._range_text(one.lower, one.upper))
            USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = left_over, HINT = 'Nothing was changed. Audit the keyspace again.';
    END IF;
    PERFORM shardmap._set_finding_state(finding, 'confirmed', 'corrected');
    RETURN version;
END
$$;
COMMENT ON FUNCTION shardmap.correct(bigint, bigint) IS
    'gives the range or the pinned key of a confirmed finding "drifted" to the shard that has its rows, if the range (0: no shard owns it), or for a pin the map, is still at the expected version, and looks again; else nothing is changed (40001); returns the new version';
DO $$
DECLARE
    function text;
BEGIN
    FOREACH function IN ARRAY ARRAY['_correct_range(shardmap.audit_findings, bigint)', '_correct_pin(shardmap.audit_findings, bigint)',
        '_refuse_rule_correction(bigint)', 'correct(bigint, bigint)'] LOOP
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION shardmap.%s FROM PUBLIC', function);
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION shardmap.%s TO shardmap_admin', function);
    END LOOP;
END
$$;
