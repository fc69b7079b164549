#!/bin/sh
# Everything that needs no device and no model: format, lint, types, import contracts, and the fast
# suites. All steps run even if one fails; prints the time, which has a budget of 90 s when warm.
set -u

cd "$(dirname "$0")/.."
BIN=.venv/bin
PATHS="pdnode tui tests scripts packaging"
begin=$(date +%s)
failed=""

step() {
    name=$1
    shift
    if "$@"; then
        printf '%-8s passed\n' "$name"
    else
        printf '%-8s FAILED\n' "$name"
        failed="$failed $name"
    fi
}

# $PATHS is several words.
# shellcheck disable=SC2086
step format "$BIN/ruff" format --check --quiet $PATHS
# shellcheck disable=SC2086
step lint "$BIN/ruff" check --quiet $PATHS
step types "$BIN/mypy" --no-error-summary
step imports "$BIN/lint-imports" --no-logo --no-cache
step tests scripts/suites.sh "$@"

printf 'make check: %d s\n' $(($(date +%s) - begin))
if [ -n "$failed" ]; then
    printf 'failed:%s\n' "$failed"
    exit 1
fi
