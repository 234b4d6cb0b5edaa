#!/usr/bin/env bash
# postgres-copy.sh PG_CONFIG TARGET: a private copy of an installed server.
#
# Postgres finds its libraries and share folder relative to its own program, so a copy that keeps the whole layout
# (/usr/lib/postgresql/15/bin as TARGET/usr/lib/postgresql/15/bin) works from any place. LLVM's bitcode is left out,
# it is large and serves only inlining by the JIT.

. "$(dirname "$0")/lib.sh"
config=$1 target=$2

dirs=()
for what in bindir pkglibdir sharedir includedir includedir-server; do
    dir=$(realpath "$("$config" --$what)")
    # /usr/include itself may hold the client's headers; libpq is then taken from the system.
    case $dir in /usr/include | /usr/share | /usr/lib | /usr/bin) continue ;; esac
    dirs+=("$dir")
done
tar -cf - -C / --exclude=bitcode $(printf '%s\n' "${dirs[@]#/}" | sort -u) | tar -xf - -C "$target"
ln -sfn "$(realpath --relative-to="$target" "$target$(realpath "$("$config" --bindir)")")" "$target/bin"
