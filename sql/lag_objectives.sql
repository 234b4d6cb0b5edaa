-- Objectives for the lag of replicas, and what follows from them.
--
-- Decides how an objective is set, and shows how it burns (the alerts are in audit_alerts.sql). What always holds: an objective that is changed is held against the
-- minutes that are kept, not from now on only. Read src/core/lag/objective.rs next.

CREATE FUNCTION shardmap._store_objective(replica text, threshold interval, target double precision, calm interval) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO shardmap.lag_objective AS o (replica, threshold, target, calm) VALUES ($1, $2, $3, $4)
        ON CONFLICT ON CONSTRAINT lag_objective_pkey DO UPDATE SET threshold = $2, target = $3, calm = $4
$$;
COMMENT ON FUNCTION shardmap._store_objective(text, interval, double precision, interval) IS 'enters an objective in the catalog';

CREATE FUNCTION shardmap._delete_objective(replica text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM shardmap.lag_objective o WHERE o.replica = $1
$$;
COMMENT ON FUNCTION shardmap._delete_objective(text) IS 'takes an objective out of the catalog';

CREATE FUNCTION shardmap.set_lag_objective(
    replica text, threshold interval, target double precision DEFAULT 0.99, calm interval DEFAULT '10 minutes') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM shardmap.replica r WHERE r.name = $1) THEN
        PERFORM shardmap._no_replica(replica);
    ELSIF threshold IS NULL THEN
        PERFORM shardmap._delete_objective(replica);
        RETURN;
    ELSIF NOT (threshold > '0' AND threshold <= '30 days') THEN
        RAISE EXCEPTION 'invalid threshold %', threshold
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is the greatest lag that is good: more than 0, at most 30 days.';
    ELSIF target IS NULL OR NOT (target > 0 AND target < 1) THEN
        RAISE EXCEPTION 'invalid target %', target
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is the share of time in which lag should be good: 0.99 for 99 %.';
    ELSIF calm IS NULL OR NOT (calm >= '0' AND calm <= '30 days') THEN
        RAISE EXCEPTION 'invalid calm time %', calm
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is how long a replica must be good before it gets reads again: 0 to 30 days.';
    END IF;
    PERFORM shardmap._store_objective(replica, threshold, target, calm);
END
$$;
COMMENT ON FUNCTION shardmap.set_lag_objective(text, interval, double precision, interval) IS 'says what is expected of a replica: a share of time (target) under a lag (threshold), and for how long (calm) before it gets reads again; threshold NULL: nothing';

DO $$
DECLARE
    function text;
BEGIN
    FOREACH function IN ARRAY ARRAY['_store_objective(text, interval, double precision, interval)', '_delete_objective(text)',
        'set_lag_objective(text, interval, double precision, interval)'] LOOP
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION shardmap.%s FROM PUBLIC', function);
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION shardmap.%s TO shardmap_admin', function);
    END LOOP;
END
$$;

CREATE VIEW shardmap.replica_state AS
SELECT r.shard, r.name AS replica, s.rotation, s.since, s.why, o.threshold, o.target, o.calm, s.burn_5m, s.burn_30m, s.burn_1h,
       s.burn_6h, s.burn_3d, s.budget_left
  FROM shardmap.replica r
  LEFT JOIN pg_catalog.pg_foreign_server f ON f.srvname OPERATOR(pg_catalog.=) r.name
  LEFT JOIN LATERAL shardmap._lag_summary(f.oid) s ON true
  LEFT JOIN shardmap.lag_objective o ON o.replica OPERATOR(pg_catalog.=) r.name;
COMMENT ON VIEW shardmap.replica_state IS 'which reads each replica gets, since when and why; its objective, and how fast that burns';
COMMENT ON COLUMN shardmap.replica_state.shard IS 'shard whose primary it follows';
COMMENT ON COLUMN shardmap.replica_state.replica IS 'the replica';
COMMENT ON COLUMN shardmap.replica_state.rotation IS 'in: all reads; out of read-your-writes: those without a token; out, drained: none; NULL: not watched yet';
COMMENT ON COLUMN shardmap.replica_state.since IS 'since when; at the latest since the sampler was started';
COMMENT ON COLUMN shardmap.replica_state.why IS 'why';
COMMENT ON COLUMN shardmap.replica_state.threshold IS 'greatest lag that is good; NULL: there is no objective';
COMMENT ON COLUMN shardmap.replica_state.target IS 'share of time in which it should be good';
COMMENT ON COLUMN shardmap.replica_state.calm IS 'how long it must be good before it gets reads again';
COMMENT ON COLUMN shardmap.replica_state.burn_5m IS 'how many times too fast the error budget burned in the last 5 minutes; 1: just as fast as it lasts';
COMMENT ON COLUMN shardmap.replica_state.burn_30m IS 'in the last half hour';
COMMENT ON COLUMN shardmap.replica_state.burn_1h IS 'in the last hour';
COMMENT ON COLUMN shardmap.replica_state.burn_6h IS 'in the last 6 hours';
COMMENT ON COLUMN shardmap.replica_state.burn_3d IS 'in the last 3 days';
COMMENT ON COLUMN shardmap.replica_state.budget_left IS 'share of the error budget of 3 days that is left; less than 0: overdrawn';
GRANT SELECT ON shardmap.replica_state TO PUBLIC;
