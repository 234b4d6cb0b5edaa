#!/usr/bin/env bash
# Installs requirements.txt into .tools/venv, once for each content of that file.
. "$(dirname "$0")/lib.sh"
install() {
    if cmp -s "$ROOT/scripts/requirements.txt" "$TOOLS/venv/requirements.txt"; then return; fi
    timed "installing pytest and psycopg into .tools/venv" "10 s" \
        "$TOOLS/venv/bin/python" -m pip install --quiet --requirement "$ROOT/scripts/requirements.txt"
    cp "$ROOT/scripts/requirements.txt" "$TOOLS/venv/requirements.txt"
}
locked python-packages install
