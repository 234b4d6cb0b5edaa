#!/usr/bin/env bash
# Moves under load and in trouble: tests/cluster/test_gauntlet.py, with all scenarios or those that SCENARIOS (a regular expression)
# names, again and again for MINUTES (once, if that takes longer). SHARDS to begin with, SEED to repeat a run; the table goes to CSV too.
. "$(dirname "$0")/lib.sh"
valid_version
"$ROOT/scripts/prerequisites.sh"
"$ROOT/scripts/postgres.sh"
"$ROOT/scripts/extension.sh" debug
export GAUNTLET=long GAUNTLET_MINUTES=${MINUTES:-0} GAUNTLET_SEED=${SEED:-} GAUNTLET_SCENARIOS=${SCENARIOS:-} GAUNTLET_SHARDS=${SHARDS:-3}
export GAUNTLET_CSV=${CSV:-$TOOLS/gauntlet.csv}
status=0
"$ROOT/scripts/test-cluster.sh" -k "test_gauntlet and at_length" -s "$@" || status=$?
[ ! -e "$GAUNTLET_CSV" ] || note "as CSV: $GAUNTLET_CSV"
exit "$status"
