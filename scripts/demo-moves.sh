#!/usr/bin/env bash
# A file that has grown large moves to a shard of its own choosing while clients write: the last part of `make demo`, which has set
# up the cluster and the environment of psql. Takes 12 s.
#
# Each of the clients' updates adds one to a counter. At the end the counters are compared with what the clients were told.

. "$(dirname "$0")/lib.sh"
SECONDS_OF_LOAD=8
export PGOPTIONS="-c shardmap.fanout_policy=allow -c client_min_messages=warning"
run() { psql -X -q -v ON_ERROR_STOP=1 "$@"; }
load=$(mktemp -d)
trap 'rm -rf "$load"' EXIT

printf '\n== Rows move while clients write: a large file gets another shard.\n\n'
run -b -P footer=off <<'SQL'
\set ECHO queries
CREATE TABLE visits (file_key text PRIMARY KEY, number bigint NOT NULL);
SELECT shardmap.distribute_table('visits', 'file_key');
ALTER DATABASE app SET shardmap.cleanup_delay = '1s';
INSERT INTO visits SELECT 'file-' || i, 0 FROM generate_series(0, 49) i;
INSERT INTO objects SELECT 'file-42', 1000000 + i, 'object ' || i, 1 FROM generate_series(1, 100000) i;
SQL
source=$(run -At -c "SELECT shard_for('file-42')")
before=$(run -At -c "SELECT count(*) FROM objects")
target=shard-$(((${source#shard-} + 1) % SHARDS))

cat >"$load/visit.sql" <<'SQL'
\set n random(0, 49)
UPDATE visits SET number = number + 1 WHERE file_key = 'file-' || :n;
SQL
note "four clients update the visits of 50 files, file-42 among them, for $SECONDS_OF_LOAD s"
pgbench -n -c 4 -T "$SECONDS_OF_LOAD" -R 1000 -f "$load/visit.sql" >"$load/log" 2>&1 &
clients=$!

run -b -P footer=off -v target="$target" <<'SQL'
\set ECHO queries
SELECT move, relation, source, target, rows FROM shardmap.move_key('file-42', :'target');
SELECT shardmap.start_move(1); -- a background worker runs it
SQL
printf '\n   state          copied   rows seen by all    visits\n'
state=
while [ "$state" != done ]; do
    line=$(run -At -F ' ' -c "SELECT state, rows_copied, (SELECT count(*) FROM objects), (SELECT sum(number) FROM visits) FROM shardmap.moves WHERE id = 1")
    read -r state copied rows visits <<<"$line"
    printf '   %-13s %7s   %16s   %7s\n' "$state" "$copied" "$rows" "$visits"
    [ "$rows" = "$before" ] || die "$rows rows instead of $before"
    sleep 0.3
done
wait "$clients" || { cat "$load/log"; die "the clients failed"; }
printf '\n== The count never wavered. What the clients were told, and what there is:\n\n'
note "$(grep 'transactions actually processed' "$load/log")"
run -b -P footer=off <<'SQL'
\set ECHO queries
SELECT sum(number) AS visits FROM visits;
SELECT shard_for('file-42');
SELECT rows_copied, changes, pause AS writers_waited_at_most FROM shardmap.moves;
SELECT count(*) FILTER (WHERE finding <> 'clean') AS misplaced FROM shardmap.verify('objects');
SQL
