#!/usr/bin/env bash
# A ninth shard is added, and gets its part of all files while clients write: the last part of `make demo`, which has set up the
# cluster and the environment of psql. Takes half a minute.
#
# Each of the clients' updates adds one to a counter. At the end the counters are compared with what the clients were told.

. "$(dirname "$0")/lib.sh"
SECONDS_OF_LOAD=20
export PGOPTIONS="-c shardmap.fanout_policy=allow -c client_min_messages=warning"
run() { psql -X -q -v ON_ERROR_STOP=1 "$@"; }
load=$(mktemp -d)
trap 'rm -rf "$load"' EXIT

printf '\n== A ninth shard: rows move to it while clients write.\n\n'
run -b -P footer=off <<'SQL'
\set ECHO queries
CREATE TABLE visits (file_key text PRIMARY KEY, number bigint NOT NULL);
SELECT shardmap.distribute_table('visits', 'file_key');
ALTER DATABASE app SET shardmap.cleanup_delay = '1s';
INSERT INTO visits SELECT 'file-' || i, 0 FROM generate_series(0, 4999) i;
INSERT INTO objects SELECT 'file-' || i % 5000, 1000000 + i, 'object ' || i, 1 FROM generate_series(1, 300000) i;
SQL
before=$(run -At -c "SELECT count(*) FROM objects")

cat >"$load/visit.sql" <<'SQL'
\set n random(0, 4999)
UPDATE visits SET number = number + 1 WHERE file_key = 'file-' || :n;
SQL
note "four clients update the visits of 5000 files, 1000 times a second, for $SECONDS_OF_LOAD s"
pgbench -n -c 4 -T "$SECONDS_OF_LOAD" -R 1000 -f "$load/visit.sql" >"$load/log" 2>&1 &
clients=$!

# The database of the new shard stands beside that of the first.
run -c "SELECT shardmap.remote_execute('shard-0', 'CREATE DATABASE shard_8', false)" >"$load/created"
run -b -P footer=off -v port="$(run -At -c "SELECT port FROM shardmap.shards WHERE name = 'shard-0'")" <<'SQL'
\set ECHO queries
SELECT shardmap.add_shard('shard-8', host => '127.0.0.1', port => :port, dbname => 'shard_8');
SELECT move, relation, source, rows, pg_size_pretty(bytes) AS size FROM shardmap.rebalance() WHERE relation = 'objects'::regclass;
SELECT count(*) AS workers_run_them FROM shardmap.start_moves();
SQL
printf '\n   moves done   under way                copied   rows seen by all    visits\n'
open=1
while [ "$open" != 0 ]; do
    line=$(run -At -F '|' <<'SQL'
SELECT count(*) FILTER (WHERE state <> 'done'), count(*) FILTER (WHERE state = 'done'),
       coalesce(string_agg(id || ' ' || state, ', ' ORDER BY id) FILTER (WHERE state NOT IN ('planned', 'done')), '-'),
       round(100 * sum(rows_copied) / sum(rows_planned)), (SELECT count(*) FROM objects), (SELECT sum(number) FROM visits)
  FROM shardmap.moves
SQL
    )
    IFS='|' read -r open moved under_way copied rows visits <<<"$line"
    printf '   %10s   %-23s %5s %%   %16s   %7s\n' "$moved" "$under_way" "$copied" "$rows" "$visits"
    [ "$rows" = "$before" ] || die "$rows rows instead of $before"
    sleep 0.5
done
wait "$clients" || { cat "$load/log"; die "the clients failed"; }
printf '\n== The count never wavered. What the clients were told, and what there is:\n\n'
note "$(grep 'transactions actually processed' "$load/log")"
run -b -P footer=off <<'SQL'
\set ECHO queries
SELECT sum(number) AS visits FROM visits;
SELECT sum(rows_copied) AS rows_copied, sum(changes) AS changes, max(pause) AS writers_waited_at_most FROM shardmap.moves;
SELECT count(*) FILTER (WHERE finding <> 'clean') AS misplaced FROM shardmap.verify('objects');
SELECT shard, result -> 0 -> 'count' AS objects FROM shardmap.run_on_shards('SELECT count(*) FROM public.objects');
SQL
