#!/bin/sh
# Fetches nginx and HAProxy for tests/service/test_fronts.py into build/fronts. They are not
# installed, and so not started either. Needs root and apt; where that is missing the tests take what
# is installed, or are skipped.
set -u

cd "$(dirname "$0")/.."
FOLDER=$PWD/build/fronts
PACKAGES="nginx haproxy"

[ -f "$FOLDER/.done" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "nginx and HAProxy are not fetched: that needs root and apt" >&2
    exit 0
fi
mkdir -p "$FOLDER/archives/partial"
# With what they depend on and this host does not have. Their lists of packages may be missing or old.
fetch() {
    # $PACKAGES is several words.
    # shellcheck disable=SC2086
    timeout 300 apt-get install --yes -qq --download-only --reinstall --no-install-recommends \
        -o "Dir::Cache::archives=$FOLDER/archives" $PACKAGES >"$FOLDER/log" 2>&1
}
if fetch || { timeout 300 apt-get update -qq >/dev/null 2>&1 && fetch; }; then
    for package in "$FOLDER"/archives/*.deb; do
        dpkg --extract "$package" "$FOLDER"
    done
    touch "$FOLDER/.done"
else
    echo "nginx and HAProxy could not be fetched: $(tail -n 1 "$FOLDER/log")" >&2
fi
