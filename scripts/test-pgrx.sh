#!/usr/bin/env bash
# The tests that run inside a server: pgrx-tests, by cargo pgrx test. Arguments name tests.
#
# They install a build of their own, with the tests in it. So that no cluster loads that one, they get a second tree,
# .tools/pgNN-test, whose files are links to the first. As root the server runs as another user, by sudo.

. "$(dirname "$0")/lib.sh"
valid_version
tree=$TOOLS/pg$PG copy=$TOOLS/pg$PG-test

second_tree() {
    if [ "$copy/source" -ef "$tree/source" ]; then return; fi
    rm -rf "$copy" "$copy.part"
    mkdir "$copy.part"
    (cd "$tree" && find . -mindepth 1 -maxdepth 1 ! -name data -exec cp -al {} "$copy.part/" \;)
    find "$copy.part" -name 'pg_shardmap*' -delete
    mv "$copy.part" "$copy"
}

locked "pgrx-tree-$PG" second_tree
export PGRX_HOME=$TOOLS/pgrx-test-$PG
if [ ! -e "$PGRX_HOME/config.toml" ]; then
    mkdir -p "$PGRX_HOME"
    printf '[configs]\npg%s = "%s"\n' "$PG" "$copy/bin/pg_config" >"$PGRX_HOME/config.toml"
fi

data=$(mktemp -d /tmp/shardmap-XXXXXX)
trap 'rm -rf "$data"' EXIT
as_other=()
if [ -n "$IS_ROOT" ]; then
    chown "$RUN_USER:" "$data"
    as_other=(--runas "$RUN_USER")
fi
run() {
    (cd "$ROOT" && cargo pgrx test "pg$PG" "$@" --no-default-features "${as_other[@]}" --pgdata "$data") 2>&1 | plain
}
timed "tests inside Postgres $PG" "2 to 3 minutes the first time, then 30 s" run "$@"
