#!/usr/bin/env bash
# clean.sh DIR: stops and removes the cluster in DIR, then target and everything in .tools.
. "$(dirname "$0")/lib.sh"
if [ -e "$1/cluster.json" ]; then python3 "$ROOT/scripts/cluster.py" destroy --dir "$1"; fi
say "removing target and .tools"
rm -rf "$ROOT/target" "$TOOLS" "$ROOT/.tools"
