#!/usr/bin/env bash
# Drivers against a cluster of four shards: tests/drivers/node (node-postgres, its NAME.test.js or .mjs, by node --test), tests/drivers/rust
# (tokio-postgres, a crate of its own), tests/drivers/pgbench (each NAME.sql in all three modes, after setup.sql).
# psycopg is in tests/cluster. They find the cluster by PGHOST, PGPORT, PGUSER, PGDATABASE.

. "$(dirname "$0")/lib.sh"
valid_version
cd "$ROOT"
dir=$(mktemp -d /tmp/shardmap-XXXXXX)
trap 'python3 scripts/cluster.py destroy --dir "$dir" >/dev/null 2>&1; rm -rf "$dir"' EXIT

node_packages() {
    local store=$TOOLS/node
    scripts/prerequisites.sh npm
    if ! cmp -s tests/drivers/node/package.json "$store/package.json"; then
        mkdir -p "$store.part" && cp tests/drivers/node/package*.json "$store.part/"
        timed "installing node-postgres into .tools/node" "5 s" npm install --silent --prefix "$store.part"
        rm -rf "$store" && mv "$store.part" "$store"
    fi
    ln -sfn "$store/node_modules" tests/drivers/node/node_modules
}

pgbench_modes() {
    local script mode
    if [ -f tests/drivers/pgbench/setup.sql ]; then
        psql -Xq -v ON_ERROR_STOP=1 -f tests/drivers/pgbench/setup.sql
    fi
    for script in tests/drivers/pgbench/*.sql; do
        [ "$(basename "$script")" != setup.sql ] || continue
        for mode in simple extended prepared; do
            pgbench -n -M "$mode" -c 4 -j 2 -t 100 -f "$script" >"$dir/pgbench.out" 2>&1 &&
                grep -q 'number of failed transactions: 0' "$dir/pgbench.out" &&
                grep -q 'number of transactions actually processed: 400/400' "$dir/pgbench.out" ||
                { cat "$dir/pgbench.out"; die "pgbench -M $mode failed on $script"; }
            note "pgbench $(basename "$script" .sql), $mode: ok"
        done
    done
}

python3 scripts/cluster.py up --pg "$PG" --shards 4 --dir "$dir" >/dev/null
. "$dir/env"
if [ -f tests/drivers/node/package.json ]; then
    node_packages
    timed "node-postgres" "5 s" node --test tests/drivers/node/*.test.*js
fi
if [ -f tests/drivers/rust/Cargo.toml ]; then
    timed "tokio-postgres" "1 minute the first time" cargo test --quiet --manifest-path tests/drivers/rust/Cargo.toml
fi
if [ -d tests/drivers/pgbench ]; then timed "pgbench in three modes" "10 s" pgbench_modes; fi
