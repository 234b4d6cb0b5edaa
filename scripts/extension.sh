#!/usr/bin/env bash
# extension.sh release|debug: builds the extension for PG and installs it into that version's private Postgres.
#
# Demo, cluster and bench use release; the tests use debug, which builds faster and checks arithmetic. The last one
# installed is what new servers load. Files are replaced by renaming, so a server that runs on the old library keeps it
# (cargo pgrx install would overwrite it in place and crash that server).

. "$(dirname "$0")/lib.sh"
valid_version
profile=${1:-debug}
package=$TOOLS/build/package-$PG
config=$TOOLS/pg$PG/bin/pg_config

build() {
    local flags=(--no-default-features --features "pg$PG")
    [ "$profile" = release ] || flags+=(--debug)
    rm -rf "$package"
    (cd "$ROOT" && cargo pgrx package --pg-config "$config" --out-dir "$package" "${flags[@]}") 2>&1 | plain
}

# The package mirrors the server's absolute paths. Only what changed is replaced.
install_files() {
    local file target changed=0
    while read -r file; do
        target=${file#"$package"}
        if cmp -s "$file" "$target"; then continue; fi
        cp "$file" "$target.part"
        mv -f "$target.part" "$target"
        changed=$((changed + 1))
    done < <(find "$package" -type f)
    note "$changed files changed in .tools/pg$PG"
}

build_and_install() {
    case $profile in release | debug) ;; *) die "$profile is neither release nor debug" ;; esac
    [ -x "$config" ] || die "there is no .tools/pg$PG" "Run: make postgres PG=$PG"
    timed "building the extension for Postgres $PG, $profile" "2 to 3 minutes the first time, then 20 s" build
    install_files
}

locked "extension-$PG" build_and_install
