# Shared by all scripts here: where things are, how we speak, who runs the servers, how packages are installed.
#
# Always true after sourcing: $ROOT is the clone, $TOOLS is its .tools folder (it exists), $RUN_USER is the ordinary
# user that servers run as (Postgres refuses root). Everything downloaded or built for the set-up lies under $TOOLS.
# Next: prerequisites.sh, postgres.sh, extension.sh, cluster.py.

set -Eeuo pipefail
umask 022
trap 'failed_at "${BASH_SOURCE[0]##*/}" "$LINENO" "$BASH_COMMAND"' ERR

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
TOOLS=$ROOT/.tools
VERSIONS="15 16 17 18"
PG=${PG:-16}

if [ "$(id -u)" = 0 ]; then IS_ROOT=1; RUN_USER=shardmap; else IS_ROOT=; RUN_USER=$(id -un); fi

say() { printf '==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
die() { printf 'error: %s\n' "$1" >&2; shift; for line; do printf '       %s\n' "$line" >&2; done; exit 1; }

# What set -e ends, and where; a failure under a lock or a timer has been reported by then.
failed_at() {
    case $3 in '( flock'* | 'return $?') ;; *) printf 'error: %s, line %s: %s\n' "$@" >&2 ;; esac
}

# timed WHAT USUALLY COMMAND...: says what runs and how long it usually takes, runs it, says how long it took.
timed() {
    local what=$1 usually=$2 begin=$SECONDS; shift 2
    say "$what (usually $usually)"
    "$@" || return $?
    note "done in $((SECONDS - begin)) s"
}

# cargo pgrx colours its output even in a log file.
plain() { if [ -t 1 ]; then cat; else sed -u 's/\x1b\[[0-9;]*m//g'; fi; }

# Sets up $TOOLS. Run as root, servers run as $RUN_USER; where that user cannot reach the clone (one under /root, say),
# .tools becomes a link to a folder that he can reach.
make_tools() {
    if [ -n "$IS_ROOT" ] && ! id "$RUN_USER" >/dev/null 2>&1; then
        say "creating the system user $RUN_USER, because Postgres refuses to run as root"
        useradd --system --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin "$RUN_USER"
    fi
    if [ -L "$TOOLS" ]; then mkdir -p "$(readlink "$TOOLS")"; fi
    if [ -d "$TOOLS" ]; then return; fi
    if [ -n "$IS_ROOT" ] && ! as_run_user test -x "$ROOT"; then
        local away
        away=/var/cache/pg_shardmap/$(printf '%s' "$ROOT" | cksum | cut -d' ' -f1)
        say "$RUN_USER cannot reach $ROOT: .tools is a link to $away"
        mkdir -p "$away"
        ln -sfn "$away" "$TOOLS"
    else
        mkdir -p "$TOOLS"
    fi
}

# Runs a command as the user that owns the servers.
as_run_user() {
    if [ -n "$IS_ROOT" ]; then
        (cd / && exec setpriv --reuid "$RUN_USER" --regid "$RUN_USER" --clear-groups "$@")
    else
        "$@"
    fi
}

# locked NAME COMMAND...: one at a time among all that work in this clone.
locked() {
    local name=$1; shift
    (
        flock -n 9 || { note "waiting for another run of $name"; flock 9; }
        "$@" 9>&-
    ) 9>"$TOOLS/$name.lock"
}

# apt_install WHY PACKAGE...: installs Debian packages when root; otherwise says what is missing.
apt_install() {
    local why=$1; shift
    command -v apt-get >/dev/null ||
        die "missing: $*" "$why" "Install what your system calls these packages, then run this again."
    [ -n "$IS_ROOT" ] || die "missing: $*" "$why" "Ask an administrator for: apt-get install $*"
    say "installing $* ($why; usually under a minute)"
    apt_lists
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >"$TOOLS/apt.log" 2>&1 ||
        { tail -20 "$TOOLS/apt.log" >&2; die "apt-get install $* failed" "The log is $TOOLS/apt.log."; }
}

# Refreshes apt's lists, once per hour.
apt_lists() {
    if [ -n "$(find "$TOOLS/apt.stamp" -mmin -60 2>/dev/null)" ]; then return; fi
    apt-get update -qq && touch "$TOOLS/apt.stamp"
}

valid_version() {
    case " $VERSIONS " in *" $PG "*) ;; *) die "PG=$PG is not one of: $VERSIONS" ;; esac
}

# The version of pgrx and cargo-pgrx is named once, in Cargo.toml.
pgrx_version() {
    local version
    version=$(sed -n 's/^pgrx *=.*"=\([0-9.]*\)".*/\1/p' "$ROOT/Cargo.toml" 2>/dev/null | head -1)
    printf '%s\n' "${version:-0.18.1}"
}

export USER=${USER:-$(id -un)}  # pgrx's tests connect as $USER
make_tools
TOOLS=$(cd "$TOOLS" && pwd -P)
export PGRX_HOME=${PGRX_HOME:-$TOOLS/pgrx}
PATH=$TOOLS/cargo/bin:$TOOLS/bin:$PATH
# cargo-pgrx builds with linker flags of its own, against linkers that drop the section with the SQL's description. Ours
# on x86-64 keeps it, and without those flags all that depends on pgrx is compiled once, not twice.
if [ "$(uname -m)" = x86_64 ]; then export CARGO_PGRX_DISABLE_GC_SECTIONS_WORKAROUND=1; fi
if [ -d "$TOOLS/libclang" ]; then
    export LIBCLANG_PATH=$TOOLS/libclang
    export BINDGEN_EXTRA_CLANG_ARGS="-isystem $(gcc -print-file-name=include)"
fi
