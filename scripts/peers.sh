#!/usr/bin/env bash
# What the benchmark compares with, besides Postgres' own: PgBouncer, and PL/Proxy for a Postgres 15. With arguments, only
# those: tests take PgBouncer.
#
# Debian's packages are unpacked into .tools/peers, never installed; PL/Proxy's files go into .tools/pg15. Where one cannot
# be had a line says so, and the benchmark leaves its figures out. Next: bench/harness/peers.py.

. "$(dirname "$0")/lib.sh"
PEERS=$TOOLS/peers

# unpack FOLDER PACKAGE...: the packages' files in FOLDER, which appears whole or not at all. Here and below, each step
# says itself what its failure means: nothing ends the script, as the benchmark goes on without.
unpack() {
    local folder=$1 deb; shift
    if [ -d "$folder" ]; then return; fi
    rm -rf "$folder.part"
    mkdir -p "$folder.part/download"
    note "fetching $*"
    (cd "$folder.part/download" && apt-get download -qq -o APT::Sandbox::User="$(id -un)" "$@") || return 1
    for deb in "$folder.part"/download/*.deb; do dpkg -x "$deb" "$folder.part" || return 1; done
    rm -rf "$folder.part/download"
    mv "$folder.part" "$folder"
}

offered() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    if [ -n "$IS_ROOT" ]; then apt_lists || true; fi
    [ -n "$(apt-cache madison "$1" 2>/dev/null)" ]
}

# The installed one, or Debian's with those of its libraries that few machines have.
pgbouncer() {
    local folder=$PEERS/pgbouncer program libraries
    if [ -x "$PEERS/bin/pgbouncer" ]; then return; fi
    program=$(command -v pgbouncer || echo /usr/sbin/pgbouncer)
    if [ ! -x "$program" ]; then
        offered pgbouncer || return 1
        libraries=$(apt-cache depends pgbouncer | sed -nE 's/^ +Depends: (libevent.*|libc-ares.*)/\1/p')
        unpack "$folder" pgbouncer $libraries || return 1
        program=$folder/usr/sbin/pgbouncer
    fi
    mkdir -p "$PEERS/bin"
    libraries=$(printf '%s:' "$folder"/usr/lib/*-linux-gnu*)
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$libraries" "$program" >"$PEERS/pgbouncer.part"
    chmod +x "$PEERS/pgbouncer.part"
    "$PEERS/pgbouncer.part" --version >/dev/null || return 1
    mv "$PEERS/pgbouncer.part" "$PEERS/bin/pgbouncer"
}

plproxy() {
    local folder=$PEERS/plproxy config=$TOOLS/pg15/bin/pg_config
    if [ -e "$PEERS/bin/plproxy" ] && [ -e "$("$config" --pkglibdir)/plproxy.so" ]; then return; fi
    rm -f "$PEERS/bin/plproxy"
    offered postgresql-15-plproxy || return 1
    PG=15 PG_CONFIG='' "$ROOT/scripts/postgres.sh" || return 1
    unpack "$folder" postgresql-15-plproxy || return 1
    cp "$folder/usr/lib/postgresql/15/lib/plproxy.so" "$("$config" --pkglibdir)/" &&
        cp "$folder"/usr/share/postgresql/15/extension/plproxy* "$("$config" --sharedir)/extension/" || return 1
    mkdir -p "$PEERS/bin"
    touch "$PEERS/bin/plproxy"
}

for peer in ${*:-pgbouncer plproxy}; do
    (locked "$peer" "$peer") || note "there is no $peer here: its figures are left out"
done
