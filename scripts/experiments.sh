#!/usr/bin/env bash
# The routing experiments of docs/experiments.md: builds the extension, starts a cluster that is thrown away, writes CSV
# files and charts to RESULTS_DIR (bench/experiments/results).
#
# TOTAL_ROWS (50000), ITERATIONS (200), WARMUP (10) and SEED (1234) are read by bench/experiments/settings.py.

. "$(dirname "$0")/lib.sh"
valid_version
called_from=$PWD
cd "$ROOT"
scripts/prerequisites.sh
scripts/postgres.sh
scripts/extension.sh "${PROFILE:-release}"
scripts/python-packages.sh requirements-charts.txt
export PYTHONPATH=$ROOT/scripts:$ROOT/bench PYTHONDONTWRITEBYTECODE=1 PG
cd "$called_from"  # a relative RESULTS_DIR is the caller's
timed "routing experiments, Postgres $PG" "1 to 3 minutes" "$TOOLS/venv/bin/python" -m experiments
