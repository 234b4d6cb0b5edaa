#!/usr/bin/env bash
# The benchmark: one figure a line, "name value", on standard output; what is being done on standard error.
#
# Runs every program bench/*.sh and bench/*.py with the environment of a release cluster of eight shards (PGHOST,
# PGPORT, ..., SHARD_0_DSN ..., PATH); each prints its figures. Arguments name programs; without any, all run. BENCH_ONLY,
# a regular expression, chooses figures by name; a program in Python does not measure what is not asked for.

. "$(dirname "$0")/lib.sh"
valid_version
cd "$ROOT"
{ scripts/prerequisites.sh; scripts/postgres.sh; scripts/extension.sh "${PROFILE:-release}"; scripts/python-packages.sh; scripts/peers.sh; } >&2
dir=$(mktemp -d /tmp/shardmap-XXXXXX)
trap 'python3 scripts/cluster.py destroy --dir "$dir" >/dev/null 2>&1; rm -rf "$dir"' EXIT
python3 scripts/cluster.py up --pg "$PG" --shards 8 --dir "$dir" >&2
. "$dir/env"
export CLUSTER_DIR=$dir PYTHONPATH=$ROOT/scripts:$ROOT/tests/cluster PYTHONDONTWRITEBYTECODE=1 PG

found=
for program in bench/*.sh bench/*.py; do
    [ -f "$program" ] || continue
    name=$(basename "${program%.*}")
    if [ $# -gt 0 ]; then case " $* " in *" $name "*) ;; *) continue ;; esac; fi
    found=1
    say "bench/$name" >&2
    case $program in
        *.sh) bash "$program" | { grep -E -- "${BENCH_ONLY:-.}" || [ $? = 1 ]; } ;;
        *) "$TOOLS/venv/bin/python" "$program" ;;
    esac
done
[ -n "$found" ] || die "there is nothing to run in bench/"
