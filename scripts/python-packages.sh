#!/usr/bin/env bash
# Installs requirements.txt, and other lists of this folder that are named, into .tools/venv, each once for its content.
. "$(dirname "$0")/lib.sh"
install() {
    local list
    for list in requirements.txt "$@"; do
        if cmp -s "$ROOT/scripts/$list" "$TOOLS/venv/$list"; then continue; fi
        timed "installing $(sed -n 's/^\([a-z-]*\).*==.*/\1/p' "$ROOT/scripts/$list" | paste -sd' ') into .tools/venv" "10 s" \
            "$TOOLS/venv/bin/python" -m pip install --quiet --requirement "$ROOT/scripts/$list"
        cp "$ROOT/scripts/$list" "$TOOLS/venv/$list"
    done
}
locked python-packages install "$@"
