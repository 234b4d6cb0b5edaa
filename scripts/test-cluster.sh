#!/usr/bin/env bash
# Tests with real servers: tests/cluster, and tests/isolation with several sessions, by pytest. Arguments go to pytest.
# Tests import cluster.py, server.py and asking.py. SOAK=no leaves the long ones out that are marked so.
. "$(dirname "$0")/lib.sh"
"$ROOT/scripts/python-packages.sh"
cd "$ROOT"
[ "${SOAK:-}" != no ] || set -- -m "not soak" "$@"
export PYTHONPATH=$ROOT/scripts:$ROOT/tests/cluster PYTHONDONTWRITEBYTECODE=1 PG
timed "cluster tests, Postgres $PG" "some minutes" \
    "$TOOLS/venv/bin/python" -m pytest -q -p no:cacheprovider --durations=5 --timeout 900 tests/cluster tests/isolation "$@"
