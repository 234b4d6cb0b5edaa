#!/usr/bin/env bash
# Clients on a cluster whose servers lag, die and are promoted, for MINUTES instead of the seconds that `make test` spends:
# tests/cluster/test_consistency.py, which reads CONSISTENCY_MINUTES. PgBouncer is fetched if it can be.
. "$(dirname "$0")/lib.sh"
valid_version
"$ROOT/scripts/prerequisites.sh"
"$ROOT/scripts/postgres.sh"
"$ROOT/scripts/extension.sh" debug
"$ROOT/scripts/peers.sh"
export CONSISTENCY_MINUTES=${MINUTES:-10}
exec "$ROOT/scripts/test-cluster.sh" -k test_consistency -s "$@"
