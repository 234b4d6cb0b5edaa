#!/usr/bin/env bash
# Generated statements on a distributed schema and on plain tables must give the same: the cluster tests marked
# "differential", for MINUTES instead of the few that `make test` spends (they read DIFFERENTIAL_MINUTES).
. "$(dirname "$0")/lib.sh"
valid_version
"$ROOT/scripts/prerequisites.sh"
"$ROOT/scripts/postgres.sh"
"$ROOT/scripts/extension.sh" debug
export DIFFERENTIAL_MINUTES=${MINUTES:-60}
exec "$ROOT/scripts/test-cluster.sh" -k differential -s "$@"
