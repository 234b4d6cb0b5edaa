-- Planning: arithmetic on arguments, for all.
--
-- Decides nothing and reads nothing: every figure is the caller's. Refuses arguments out of range (22023). Read
-- export.sql next.

CREATE FUNCTION shardmap.plan_capacity(target_writes double precision, per_shard_writes double precision,
    headroom double precision DEFAULT 0.3) RETURNS TABLE (minimum bigint, with_headroom bigint)
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'plan_capacity_wrapper';
COMMENT ON FUNCTION shardmap.plan_capacity(double precision, double precision, double precision) IS
    'how many shards carry a load of writes a second, just so and with headroom (0.3: 30 %) for skew and failover';

CREATE FUNCTION shardmap.compare_topologies(target double precision, small_capacity double precision,
    small_price_per_hour double precision, large_capacity double precision, large_price_per_hour double precision,
    replicas_per_primary integer DEFAULT 1, operations_per_instance double precision DEFAULT 0,
    licence_per_instance double precision DEFAULT 0, hours_per_month double precision DEFAULT 730)
RETURNS TABLE (topology text, primaries bigint, instances bigint, compute double precision, operations double precision,
    licences double precision, total double precision, writes_lost double precision, splits_to_double bigint,
    saving double precision, saving_part double precision)
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'compare_topologies_wrapper';
COMMENT ON FUNCTION shardmap.compare_topologies(double precision, double precision, double precision, double precision,
    double precision, integer, double precision, double precision, double precision) IS
    'many small instances against few large ones: cost of a month, part of the writes lost with one primary, splits to double; saving is against the small ones';

CREATE FUNCTION shardmap.fanout_tail(mean double precision, sd double precision,
    widths integer[] DEFAULT '{1,8,32,128,512}') RETURNS TABLE (width integer, p99 double precision, ratio double precision)
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'fanout_tail_wrapper';
COMMENT ON FUNCTION shardmap.fanout_tail(double precision, double precision, integer[]) IS
    '99th percentile of the slowest of N shards, by order statistics, for latencies that are normal with this mean and deviation; ratio is to one shard''s';

CREATE FUNCTION shardmap.simulate(keys integer DEFAULT 20000, shards integer DEFAULT 6, vnodes integer DEFAULT 100)
RETURNS TABLE (moved_ring bigint, moved_modulo bigint, min double precision, max double precision, mean double precision,
    stdev double precision, max_over_mean double precision)
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'simulate_wrapper';
COMMENT ON FUNCTION shardmap.simulate(integer, integer, integer) IS
    'gives keys key-0, key-1, ... to shards shard-0, shard-1, ...: how many move when one more shard is added, on a ring and by modulo, and how many keys a shard of the ring has';
