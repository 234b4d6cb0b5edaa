#!/usr/bin/env bash
# Formatting, clippy with warnings as errors, and the rules of the house: unsafe only in src/pg, no file over 500 lines,
# scripts that parse. PG chooses the headers that clippy sees.

. "$(dirname "$0")/lib.sh"
valid_version
cd "$ROOT"
[ -x "$TOOLS/pg$PG/bin/pg_config" ] || { scripts/prerequisites.sh; scripts/postgres.sh; }
failed=

fail() { printf 'lint: %s\n' "$*" >&2; failed=1; }

ours() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r file; do
    if [ -f "$file" ]; then printf '%s\n' "$file"; fi
done; }

clippy() {
    cargo clippy --quiet --workspace --all-targets --no-default-features --features "pg$PG" -- -D warnings
}

cargo fmt --all --check || fail "cargo fmt would change files"
timed "running clippy for Postgres $PG" "2 minutes the first time, then 10 s" clippy || fail "clippy has warnings"

# Comments may say the word; #![forbid(unsafe_code)] is another word.
for file in $(ours 'src/*.rs'); do
    case $file in src/pg/* | src/lib.rs) continue ;; esac
    if sed 's,//.*,,' "$file" | grep -qw unsafe; then fail "$file: unsafe is allowed in src/pg only"; fi
done

for file in $(ours '*.rs' '*.sql' '*.py' '*.sh' '*.toml' '*.js' '*.mjs' Makefile); do
    lines=$(wc -l <"$file")
    if [ "$lines" -gt 500 ]; then fail "$file has $lines lines; 500 at most: it is two ideas"; fi
done

for file in $(ours '*.sh' .ci/run); do bash -n "$file" || fail "$file does not parse"; done
for file in $(ours '*.py'); do
    python3 -c 'import ast, sys; ast.parse(open(sys.argv[1]).read(), sys.argv[1])' "$file" || fail "$file does not parse"
done

[ -z "$failed" ] || die "lint found faults"
note "lint: nothing to complain about"
