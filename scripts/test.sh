#!/usr/bin/env bash
# All tests with Postgres PG, stage after stage. A failed stage does not stop the others, unless it is one that they
# need; the table at the end says what passed, failed or had nothing to run, and how long each took.
#
# STAGES="core lint" runs only those, in that order. Each stage is also a program of its own: scripts/test-NAME.sh.

. "$(dirname "$0")/lib.sh"
valid_version
cd "$ROOT"
all="core lint extension regress cluster upgrade drivers pgrx"
wanted=${STAGES:-$all}
results=() failed= begin=$SECONDS

# What a stage needs to be there; it is skipped until then.
folder() {
    case $1 in
        regress) echo tests/regress/sql ;;
        cluster) echo tests/cluster ;;
        upgrade) echo tests/upgrade ;;
        drivers) echo tests/drivers ;;
        pgrx) echo pgrx-tests ;;
        *) echo . ;;
    esac
}

run_stage() {
    case $1 in
        lint) scripts/lint.sh ;;
        extension) scripts/extension.sh debug ;;
        *) "scripts/test-$1.sh" ;;
    esac
}

record() { results+=("$(printf '%-11s %-8s %5d s' "$1" "$2" "$3")"); }

scripts/prerequisites.sh
scripts/postgres.sh
for stage in $wanted; do
    case " $all " in *" $stage "*) ;; *) die "no such stage: $stage (there are: $all)" ;; esac
    if [ ! -e "$(folder "$stage")" ]; then record "$stage" nothing 0; continue; fi
    printf '\n'
    say "test stage $stage, Postgres $PG"
    started=$SECONDS
    if run_stage "$stage"; then
        record "$stage" passed $((SECONDS - started))
    else
        record "$stage" FAILED $((SECONDS - started))
        failed+=" $stage"
        # Without the library the stages after this one would only repeat its failure.
        [ "$stage" != extension ] || break
    fi
done

printf '\n'
say "Postgres $PG, $((SECONDS - begin)) s in all"
printf '    %s\n' "${results[@]}"
[ -z "$failed" ] || die "failed:$failed"
