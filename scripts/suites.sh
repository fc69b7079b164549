#!/bin/sh
# Runs the named test suites (folders of tests/) one after the other, all of them even if one fails,
# and prints the time of each.
#
#   scripts/suites.sh [--coverage] SUITE…
#
# With --coverage the branch coverage of pdnode/core by its own suites must reach what pyproject.toml
# asks for; the other suites run without, at their own speed.
set -u

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
measure=no
if [ "${1:-}" = --coverage ]; then
    measure=yes
    shift
    mkdir -p build
    "$PYTHON" -m coverage erase
fi

table=""
failed=""
for suite in "$@"; do
    printf '\n== %s\n' "$suite"
    start=$(date +%s)
    options=-q
    case "$measure $suite" in
    "yes unit" | "yes property" | "yes sim") options="-q --cov --cov-append --cov-report= --cov-fail-under=0" ;;
    esac
    # $options is several words.
    # shellcheck disable=SC2086
    if "$PYTHON" -m pytest $options "tests/$suite"; then
        result=passed
    else
        result=FAILED
        failed="$failed $suite"
    fi
    table="$table$(printf '%-10s %-7s %4d s' "$suite" "$result" $(($(date +%s) - start)))
"
done

if [ $measure = yes ]; then
    printf '\n== branch coverage of pdnode/core\n'
    "$PYTHON" -m coverage report || failed="$failed coverage"
fi
printf '\n%s' "$table"
if [ -n "$failed" ]; then
    printf 'failed:%s\n' "$failed"
    exit 1
fi
