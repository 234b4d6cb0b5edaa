-- Planning: the published figures.
\set SHOW_CONTEXT never
SELECT * FROM shardmap.plan_capacity(500000, 20000, 0);
SELECT * FROM shardmap.plan_capacity(500000, 20000);
SELECT shardmap.plan_capacity(0, 20000);
SELECT topology, primaries, instances, round(compute::numeric) AS compute, operations, licences, round(total::numeric) AS total,
    writes_lost, splits_to_double, round(saving::numeric) AS saving, round(saving_part::numeric, 3) AS saving_part
  FROM shardmap.compare_topologies(400000, 20000, 0.68, 100000, 3.40, operations_per_instance => 150);
SELECT topology, licences, round(total::numeric) AS total, round(saving::numeric) AS saving
  FROM shardmap.compare_topologies(400000, 20000, 0.68, 100000, 3.40, operations_per_instance => 150, licence_per_instance => 100);
SELECT shardmap.compare_topologies(400000, -1, 0.68, 100000, 3.40);
SELECT width, round(p99::numeric, 2) AS p99, round(ratio::numeric, 2) AS ratio FROM shardmap.fanout_tail(5, 1.5);
SELECT width, round(ratio::numeric, 2) AS ratio FROM shardmap.fanout_tail(5, 1.5, '{4,16}');
SELECT shardmap.fanout_tail(5, 1.5, '{0}');
-- 6 shards become 7: 17098 of 20000 keys move by modulo, 1924 with 1 vnode, 2595 with 100.
SELECT vnodes, moved_ring, moved_modulo, min, max, round(mean::numeric) AS mean, round(stdev::numeric) AS stdev,
    round(max_over_mean::numeric, 2) AS max_over_mean
  FROM unnest(ARRAY[1, 8, 32, 100, 256]) vnodes, shardmap.simulate(20000, 6, vnodes);
SELECT shardmap.simulate(0);
SELECT shardmap.simulate(shards => 5000);
-- All may plan; NULL gives nothing.
SET ROLE pg_monitor;
SELECT * FROM shardmap.plan_capacity(100, 10);
SELECT count(*) FROM shardmap.simulate(NULL);
RESET ROLE;
