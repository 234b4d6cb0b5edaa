#!/usr/bin/env bash
# The core's tests: golden, property, and its documentation's examples. They need no Postgres.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
timed "testing shardmap_core" "1 minute the first time, then 20 s" cargo test --quiet --package shardmap_core
