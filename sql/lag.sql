-- Lag of replicas: objectives, history, and views over what the sampler publishes.
--
-- Decides what users see of it. What always holds: the views read shared memory and local tables, so that they answer while shards
-- are down; what is unknown is NULL with a reason, never 0; readable by all, changed by administrators. The history is this
-- server's own and no part of a dump. Read src/pg/replicas/sampler.rs next.

CREATE TABLE shardmap.lag_objective (
    replica text COLLATE pg_catalog."C" PRIMARY KEY REFERENCES shardmap.replica ON DELETE CASCADE,
    threshold interval NOT NULL
        CONSTRAINT lag_objective_threshold_range CHECK (threshold > '0' AND threshold <= '30 days'),
    target double precision NOT NULL
        CONSTRAINT lag_objective_target_range CHECK (target > 0 AND target < 1),
    calm interval NOT NULL DEFAULT '10 minutes'
        CONSTRAINT lag_objective_calm_range CHECK (calm >= '0' AND calm <= '30 days')
);
COMMENT ON TABLE shardmap.lag_objective IS 'what is expected of replicas';
COMMENT ON COLUMN shardmap.lag_objective.replica IS 'the replica';
COMMENT ON COLUMN shardmap.lag_objective.threshold IS 'greatest lag that is good';
COMMENT ON COLUMN shardmap.lag_objective.target IS 'share of time in which it should be good: 0.99 for 99 %';
COMMENT ON COLUMN shardmap.lag_objective.calm IS 'how long it must be good before a replica that was taken out gets reads again';
GRANT SELECT ON shardmap.lag_objective TO PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('shardmap.lag_objective', '');

CREATE TABLE shardmap._lag_minute (
    replica text COLLATE pg_catalog."C" NOT NULL,
    minute timestamp with time zone NOT NULL,
    samples bigint NOT NULL,
    unknown bigint NOT NULL,
    p50_ms bigint,
    p90_ms bigint,
    p99_ms bigint,
    max_ms bigint,
    lag_ms bigint[] NOT NULL,
    times bigint[] NOT NULL,
    watched_ms bigint NOT NULL,
    PRIMARY KEY (replica, minute)
);
COMMENT ON TABLE shardmap._lag_minute IS 'samples of each replica''s lag, a minute a row; brings distribution and error budget back after a restart';
COMMENT ON COLUMN shardmap._lag_minute.replica IS 'the replica';
COMMENT ON COLUMN shardmap._lag_minute.minute IS 'when the minute began';
COMMENT ON COLUMN shardmap._lag_minute.samples IS 'samples taken';
COMMENT ON COLUMN shardmap._lag_minute.unknown IS 'those of which the lag was not known';
COMMENT ON COLUMN shardmap._lag_minute.p50_ms IS 'milliseconds that half of the known samples did not exceed';
COMMENT ON COLUMN shardmap._lag_minute.p90_ms IS 'nine in ten';
COMMENT ON COLUMN shardmap._lag_minute.p99_ms IS '99 in 100';
COMMENT ON COLUMN shardmap._lag_minute.max_ms IS 'the greatest';
COMMENT ON COLUMN shardmap._lag_minute.lag_ms IS 'the values that came, right to one percent';
COMMENT ON COLUMN shardmap._lag_minute.times IS 'how often each came';
COMMENT ON COLUMN shardmap._lag_minute.watched_ms IS 'milliseconds of the minute that the samples stand for';

-- Numbers of Postgres that have no sign stand here as they are in memory, so that half of them are negative.
CREATE TABLE shardmap._primary_place (
    shard text COLLATE pg_catalog."C" NOT NULL,
    at timestamp with time zone NOT NULL,
    system_identifier bigint NOT NULL,
    timeline bigint NOT NULL,
    lsn bigint NOT NULL,
    PRIMARY KEY (shard, at)
);
COMMENT ON TABLE shardmap._primary_place IS 'where each primary was, once a minute for a day; lets lag be known soon after a restart';
COMMENT ON COLUMN shardmap._primary_place.shard IS 'shard of the primary';
COMMENT ON COLUMN shardmap._primary_place.at IS 'when it was there';
COMMENT ON COLUMN shardmap._primary_place.system_identifier IS 'whose log it wrote';
COMMENT ON COLUMN shardmap._primary_place.timeline IS 'timeline that it wrote';
COMMENT ON COLUMN shardmap._primary_place.lsn IS 'bytes from the beginning of the log';

CREATE TABLE shardmap._fork (
    shard text COLLATE pg_catalog."C" NOT NULL,
    system_identifier bigint NOT NULL,
    timeline bigint NOT NULL,
    parent bigint NOT NULL,
    at bigint NOT NULL,
    CONSTRAINT _fork_pkey PRIMARY KEY (shard, system_identifier, timeline)
);
COMMENT ON TABLE shardmap._fork IS 'where timelines of the shards'' logs began, as far as it is known for certain; up to there tokens of the parent still hold';
COMMENT ON COLUMN shardmap._fork.shard IS 'the shard';
COMMENT ON COLUMN shardmap._fork.system_identifier IS 'whose log';
COMMENT ON COLUMN shardmap._fork.timeline IS 'timeline that began';
COMMENT ON COLUMN shardmap._fork.parent IS 'timeline that it left';
COMMENT ON COLUMN shardmap._fork.at IS 'bytes from the beginning of the log';

CREATE FUNCTION shardmap._replicas_changed() RETURNS void
LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'replicas_changed_wrapper';
COMMENT ON FUNCTION shardmap._replicas_changed() IS 'lets the sampler know at commit that replicas or objectives have changed';
REVOKE ALL ON FUNCTION shardmap._replicas_changed() FROM PUBLIC;

CREATE FUNCTION shardmap._on_replicas_changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM shardmap._replicas_changed();
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION shardmap._on_replicas_changed() IS 'trigger: lets the sampler know of a change';
REVOKE ALL ON FUNCTION shardmap._on_replicas_changed() FROM PUBLIC;

CREATE TRIGGER replicas_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON shardmap.replica
    FOR EACH STATEMENT EXECUTE FUNCTION shardmap._on_replicas_changed();
COMMENT ON TRIGGER replicas_changed ON shardmap.replica IS 'lets the sampler know';
CREATE TRIGGER objectives_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON shardmap.lag_objective
    FOR EACH STATEMENT EXECUTE FUNCTION shardmap._on_replicas_changed();
COMMENT ON TRIGGER objectives_changed ON shardmap.lag_objective IS 'lets the sampler know';

CREATE FUNCTION shardmap._observation(
    server oid, OUT sampled_at timestamp with time zone, OUT state text, OUT reason text, OUT lag double precision,
    OUT lag_bytes bigint, OUT replay_lsn text, OUT receive_lsn text, OUT timeline bigint, OUT system_identifier text,
    OUT receiver text, OUT replay_paused boolean, OUT round_trip double precision)
RETURNS SETOF record LANGUAGE c VOLATILE STRICT PARALLEL SAFE ROWS 1
AS 'MODULE_PATHNAME', 'replica_observation_wrapper';
COMMENT ON FUNCTION shardmap._observation(oid) IS 'what was last heard of a primary or a replica; lag in seconds, round_trip in milliseconds';

CREATE FUNCTION shardmap._lag_windows(
    server oid, OUT "window" text, OUT samples bigint, OUT unknown bigint, OUT p50 double precision,
    OUT p90 double precision, OUT p99 double precision, OUT max double precision)
RETURNS SETOF record LANGUAGE c VOLATILE STRICT PARALLEL SAFE ROWS 4
AS 'MODULE_PATHNAME', 'replica_windows_wrapper';
COMMENT ON FUNCTION shardmap._lag_windows(oid) IS 'a replica''s distribution of lag, in seconds';

CREATE FUNCTION shardmap._lag_summary(
    server oid, OUT shape text, OUT burst_hours integer[], OUT rotation text, OUT since timestamp with time zone, OUT why text,
    OUT alert text, OUT alert_since timestamp with time zone, OUT early_warning boolean, OUT burn_5m double precision,
    OUT burn_30m double precision, OUT burn_1h double precision, OUT burn_6h double precision, OUT burn_3d double precision, OUT budget_left double precision)
RETURNS SETOF record LANGUAGE c VOLATILE STRICT PARALLEL SAFE ROWS 1
AS 'MODULE_PATHNAME', 'replica_summary_wrapper';
COMMENT ON FUNCTION shardmap._lag_summary(oid) IS 'shape of a replica''s lag, its rotation, and how its objective burns';

CREATE FUNCTION shardmap._lag_impact(
    percentile integer, reads_per_second double precision, OUT per_second double precision, OUT per_day double precision)
RETURNS SETOF record LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE ROWS 1
AS 'MODULE_PATHNAME', 'lag_impact_of_wrapper';
COMMENT ON FUNCTION shardmap._lag_impact(integer, double precision) IS 'reads that meet a lag at or past a percentile';

CREATE FUNCTION shardmap.lag_impact(
    p90 interval, p99 interval, reads_per_second double precision,
    OUT percentile text, OUT lag interval, OUT reads_per_second_affected double precision, OUT reads_per_day_affected double precision)
RETURNS SETOF record
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE ROWS 2 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF reads_per_second IS NULL OR NOT (reads_per_second >= 0 AND reads_per_second < 'Infinity') THEN
        RAISE EXCEPTION 'invalid number of reads a second: %', reads_per_second
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give the reads that the replica serves each second.';
    ELSIF p99 < p90 THEN
        RAISE EXCEPTION 'p99 is less than p90'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give the percentiles in the order p90, p99.';
    END IF;
    RETURN QUERY
        SELECT v.name, v.lag, i.per_second, i.per_day
          FROM (VALUES ('p90', p90, 90), ('p99', p99, 99)) v (name, lag, share),
            LATERAL shardmap._lag_impact(v.share, lag_impact.reads_per_second) i;
END
$$;
COMMENT ON FUNCTION shardmap.lag_impact(interval, interval, double precision) IS 'how many reads a second and a day meet a lag of p90 and of p99 or more; takes reads and lag to be independent';

CREATE VIEW shardmap.replica_lag AS
SELECT r.shard, r.name AS replica, o.state, o.reason, pg_catalog.make_interval(secs => o.lag) AS lag, o.lag_bytes,
       o.replay_lsn::pg_catalog.pg_lsn AS replay_lsn, o.receive_lsn::pg_catalog.pg_lsn AS receive_lsn, o.timeline,
       o.system_identifier, o.receiver, o.replay_paused, o.round_trip AS round_trip_ms, o.sampled_at, s.shape, s.burst_hours,
       s.rotation
  FROM shardmap.replica r
  LEFT JOIN pg_catalog.pg_foreign_server f ON f.srvname OPERATOR(pg_catalog.=) r.name
  LEFT JOIN LATERAL shardmap._observation(f.oid) o ON true
  LEFT JOIN LATERAL shardmap._lag_summary(f.oid) s ON true;
COMMENT ON VIEW shardmap.replica_lag IS 'replicas with what was last heard of them';
COMMENT ON COLUMN shardmap.replica_lag.shard IS 'shard whose primary it follows';
COMMENT ON COLUMN shardmap.replica_lag.replica IS 'the replica';
COMMENT ON COLUMN shardmap.replica_lag.state IS 'replica: lag is known; unknown: it is not, see reason; invalid: not a replica of the shard, see reason; NULL: not watched yet';
COMMENT ON COLUMN shardmap.replica_lag.reason IS 'why the lag is unknown, or the replica invalid';
COMMENT ON COLUMN shardmap.replica_lag.lag IS 'time since the primary left the position that the replica has replayed; 0: it has replayed all; NULL: unknown';
COMMENT ON COLUMN shardmap.replica_lag.lag_bytes IS 'bytes of write-ahead log by which it is behind';
COMMENT ON COLUMN shardmap.replica_lag.replay_lsn IS 'up to where it has replayed';
COMMENT ON COLUMN shardmap.replica_lag.receive_lsn IS 'up to where it has received by streaming';
COMMENT ON COLUMN shardmap.replica_lag.timeline IS 'timeline that it is on';
COMMENT ON COLUMN shardmap.replica_lag.system_identifier IS 'system identifier of the cluster that it is a copy of; NULL: the user of the shard may not see it';
COMMENT ON COLUMN shardmap.replica_lag.receiver IS 'its WAL receiver: running, stopped, or not used (it reads an archive)';
COMMENT ON COLUMN shardmap.replica_lag.replay_paused IS 'whether replay is paused';
COMMENT ON COLUMN shardmap.replica_lag.round_trip_ms IS 'milliseconds that its last answer took';
COMMENT ON COLUMN shardmap.replica_lag.sampled_at IS 'when it answered, or was found not to';
COMMENT ON COLUMN shardmap.replica_lag.shape IS 'look of the last 24 hours: steady, bursty, degrading, or unclear (fewer than 60 samples)';
COMMENT ON COLUMN shardmap.replica_lag.burst_hours IS 'hours of the day, UTC, in which the last 24 hours had bursts';
COMMENT ON COLUMN shardmap.replica_lag.rotation IS 'which reads it gets, see shardmap.replica_state';

CREATE VIEW shardmap.replica_lag_windows AS
SELECT r.shard, r.name AS replica, w."window"::pg_catalog.interval AS "window", w.samples,
       w.unknown / nullif(w.samples, 0)::double precision AS unknown_share,
       pg_catalog.make_interval(secs => w.p50) AS p50, pg_catalog.make_interval(secs => w.p90) AS p90,
       pg_catalog.make_interval(secs => w.p99) AS p99, pg_catalog.make_interval(secs => w.max) AS max
  FROM shardmap.replica r
  JOIN pg_catalog.pg_foreign_server f ON f.srvname OPERATOR(pg_catalog.=) r.name
  CROSS JOIN LATERAL shardmap._lag_windows(f.oid) w;
COMMENT ON VIEW shardmap.replica_lag_windows IS 'distribution of each replica''s lag over the last minute, 5 minutes, hour and 24 hours';
COMMENT ON COLUMN shardmap.replica_lag_windows.shard IS 'shard whose primary it follows';
COMMENT ON COLUMN shardmap.replica_lag_windows.replica IS 'the replica';
COMMENT ON COLUMN shardmap.replica_lag_windows."window" IS 'length of time up to now';
COMMENT ON COLUMN shardmap.replica_lag_windows.samples IS 'samples in it';
COMMENT ON COLUMN shardmap.replica_lag_windows.unknown_share IS 'share of the samples of which the lag was not known, 0 to 1';
COMMENT ON COLUMN shardmap.replica_lag_windows.p50 IS 'lag that half of the known samples did not exceed, right to one percent';
COMMENT ON COLUMN shardmap.replica_lag_windows.p90 IS 'lag that nine in ten did not exceed';
COMMENT ON COLUMN shardmap.replica_lag_windows.p99 IS 'lag that 99 in 100 did not exceed';
COMMENT ON COLUMN shardmap.replica_lag_windows.max IS 'the greatest lag';

CREATE VIEW shardmap.replica_lag_history AS
SELECT r.shard, m.replica, m.minute, m.samples, m.unknown / m.samples::double precision AS unknown_share,
       pg_catalog.make_interval(secs => m.p50_ms / 1000.0::double precision) AS p50,
       pg_catalog.make_interval(secs => m.p90_ms / 1000.0::double precision) AS p90,
       pg_catalog.make_interval(secs => m.p99_ms / 1000.0::double precision) AS p99,
       pg_catalog.make_interval(secs => m.max_ms / 1000.0::double precision) AS max
  FROM shardmap._lag_minute m JOIN shardmap.replica r ON r.name OPERATOR(pg_catalog.=) m.replica;
COMMENT ON VIEW shardmap.replica_lag_history IS 'lag of each replica, minute by minute, as long as shardmap.lag_history_retention says';
COMMENT ON COLUMN shardmap.replica_lag_history.shard IS 'shard whose primary it follows';
COMMENT ON COLUMN shardmap.replica_lag_history.replica IS 'the replica';
COMMENT ON COLUMN shardmap.replica_lag_history.minute IS 'when the minute began';
COMMENT ON COLUMN shardmap.replica_lag_history.samples IS 'samples in it';
COMMENT ON COLUMN shardmap.replica_lag_history.unknown_share IS 'share of the samples of which the lag was not known, 0 to 1';
COMMENT ON COLUMN shardmap.replica_lag_history.p50 IS 'lag that half of the known samples did not exceed';
COMMENT ON COLUMN shardmap.replica_lag_history.p90 IS 'lag that nine in ten did not exceed';
COMMENT ON COLUMN shardmap.replica_lag_history.p99 IS 'lag that 99 in 100 did not exceed';
COMMENT ON COLUMN shardmap.replica_lag_history.max IS 'the greatest lag';
GRANT SELECT ON shardmap.replica_lag, shardmap.replica_lag_windows, shardmap.replica_lag_history TO PUBLIC;

CREATE FUNCTION shardmap._read_counts(
    server oid, OUT reads bigint, OUT waited bigint, OUT waited_ms double precision, OUT waited_in_vain bigint, OUT lost bigint,
    OUT fallbacks bigint, OUT since timestamp with time zone)
RETURNS SETOF record LANGUAGE c VOLATILE STRICT PARALLEL SAFE ROWS 1
AS 'MODULE_PATHNAME', 'read_counts_wrapper';
COMMENT ON FUNCTION shardmap._read_counts(oid) IS 'counts of the reads of a primary or a replica';

CREATE VIEW shardmap.stat_reads AS
SELECT v.shard, v.server, v.role, c.reads,
       c.reads / nullif(pg_catalog.sum(c.reads) OVER (PARTITION BY v.shard), 0)::double precision AS share, c.waited, c.waited_ms,
       c.waited_in_vain, c.lost, CASE v.role WHEN 'primary' THEN c.fallbacks END AS fallbacks, c.since
  FROM (SELECT s.name AS shard, s.name AS server, 'primary' AS role FROM shardmap.shard s
        UNION ALL SELECT r.shard, r.name, 'replica' FROM shardmap.replica r) v
  JOIN pg_catalog.pg_foreign_server f ON f.srvname OPERATOR(pg_catalog.=) v.server
  CROSS JOIN LATERAL shardmap._read_counts(f.oid) c;
COMMENT ON VIEW shardmap.stat_reads IS 'who has answered reads, by server; a statement that only reads and locks nothing counts once for each shard that it asks';
COMMENT ON COLUMN shardmap.stat_reads.shard IS 'the shard';
COMMENT ON COLUMN shardmap.stat_reads.server IS 'its primary, under the shard''s name, or a replica';
COMMENT ON COLUMN shardmap.stat_reads.role IS 'primary or replica';
COMMENT ON COLUMN shardmap.stat_reads.reads IS 'reads sent there';
COMMENT ON COLUMN shardmap.stat_reads.share IS 'their share of the shard''s reads, 0 to 1; NULL: there were none';
COMMENT ON COLUMN shardmap.stat_reads.waited IS 'those for which the replica was waited for until it had caught up';
COMMENT ON COLUMN shardmap.stat_reads.waited_ms IS 'milliseconds waited for it in all, in vain or not';
COMMENT ON COLUMN shardmap.stat_reads.waited_in_vain IS 'reads that the primary answered, because the replica had not caught up within shardmap.catchup_timeout';
COMMENT ON COLUMN shardmap.stat_reads.lost IS 'reads that moved on to another server, because the replica was lost or could not run them';
COMMENT ON COLUMN shardmap.stat_reads.fallbacks IS 'reads that the primary answered because no replica would do; NULL: a replica';
COMMENT ON COLUMN shardmap.stat_reads.since IS 'since when they are counted: the last start of the server, registration or reset';
GRANT SELECT ON shardmap.stat_reads TO PUBLIC;

CREATE FUNCTION shardmap.reset_stat_reads() RETURNS void
LANGUAGE c VOLATILE STRICT PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'reset_stat_reads_wrapper';
COMMENT ON FUNCTION shardmap.reset_stat_reads() IS 'sets the counters of shardmap.stat_reads to 0 for this database';
REVOKE ALL ON FUNCTION shardmap.reset_stat_reads() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.reset_stat_reads() TO shardmap_admin;
