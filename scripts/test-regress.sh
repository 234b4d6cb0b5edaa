#!/usr/bin/env bash
# SQL regression: tests/regress/sql/NAME.sql against expected/NAME.out. Arguments name tests; without any, all run.
. "$(dirname "$0")/lib.sh"
exec python3 "$ROOT/scripts/regress.py" "$@"
