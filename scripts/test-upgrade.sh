#!/usr/bin/env bash
# Coordinators that move to another major version: tests/upgrade, by pytest, from and to each other version whose tree in
# .tools has the same build of the extension as PG's. None is fetched or built for it. Arguments go to pytest.
. "$(dirname "$0")/lib.sh"
"$ROOT/scripts/python-packages.sh"
cd "$ROOT"
export PYTHONPATH=$ROOT/scripts:$ROOT/tests/cluster PYTHONDONTWRITEBYTECODE=1 PG
timed "upgrade tests, Postgres $PG" "15 s for each other version" \
    "$TOOLS/venv/bin/python" -m pytest -q -rs -p no:cacheprovider --timeout 900 tests/upgrade "$@"
