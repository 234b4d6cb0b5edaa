#!/usr/bin/env bash
# The product in one go: builds the extension, starts a coordinator and eight shards, runs demo.sql on them, and
# gives a ninth shard its part under load.
#
# The cluster is thrown away at the end; KEEP=1 leaves it running and says how to connect.

. "$(dirname "$0")/lib.sh"
valid_version
cd "$ROOT"
say "on a fresh machine this takes up to 12 minutes, most of it for building; later runs take 1"
scripts/prerequisites.sh
scripts/postgres.sh
scripts/extension.sh release

dir=$(mktemp -d /tmp/shardmap-demo-XXXXXX)
chmod 755 "$dir"
destroy() { [ -n "${KEEP:-}" ] || { python3 scripts/cluster.py destroy --dir "$dir" >/dev/null 2>&1; rm -rf "$dir"; }; }
trap destroy EXIT
timed "starting a coordinator and eight shards" "10 s" python3 scripts/cluster.py up --pg "$PG" --shards 8 --dir "$dir"
. "$dir/env"
printf '\n'
psql -X -q -v ON_ERROR_STOP=1 -f scripts/demo.sql
scripts/demo-moves.sh
if [ -n "${KEEP:-}" ]; then
    printf '\n'
    say "the cluster still runs: . $dir/env; psql"
    note "stop it with: make cluster-down DIR=$dir"
fi
