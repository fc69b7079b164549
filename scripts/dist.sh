#!/bin/sh
# Builds what is handed out into dist/ and tests it there: sdist, wheel (from the sdist), folder form
# and single file (from the wheel, in a clean venv). torch is always the CPU build.
# The wheel and the rest are for the Python version of .venv.
set -eu

cd "$(dirname "$0")/.."
BUILD=build/dist
OUT=dist
PLATFORM="$(uname -s | tr '[:upper:]' '[:lower:]')-$(uname -m)"
LIMIT_S=1800 # of each step

say() { printf '== %s\n' "$*" >&2; }
limited() { timeout "$LIMIT_S" "$@"; }
pip() { limited "$1" -m pip --disable-pip-version-check "$2" --quiet --constraint constraints/cpu.txt "$3"; }

rm -rf "$BUILD" "$OUT"
mkdir -p "$BUILD" "$OUT"

say sdist
.venv/bin/python -c 'import sys; from scikit_build_core import build; build.build_sdist(sys.argv[1])' "$OUT"

say "wheel, from the sdist"
limited .venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$OUT" \
    "$OUT"/pdnode-*.tar.gz
wheel=$(echo "$OUT"/pdnode-*.whl)

say "a clean venv with the wheel"
.venv/bin/python -m venv "$BUILD/venv"
python=$PWD/$BUILD/venv/bin/python
pip "$python" install "$wheel[libfabric]"
"$python" -m pip check
PDNODE_DIST=1 limited .venv/bin/python -m pytest -q tests/packaging/test_wheel.py

say "the folder form"
pip "$python" install "$wheel[dist]"
# Not `python -m`, which would find the checkout's pdnode before the wheel's.
limited "$BUILD/venv/bin/pyinstaller" --noconfirm --log-level WARN --distpath "$BUILD" \
    --workpath "$BUILD/work" packaging/pdnode.spec
version=$("$python" -c 'import pdnode; print(pdnode.__version__)')
tar --directory "$BUILD" --owner=0 --group=0 --sort=name --use-compress-program='zstd -12 -T0' \
    --create --file "$OUT/pdnode-$version-$PLATFORM.tar.zst" pdnode

say "the single file"
"${CXX:-g++}" -std=c++17 -O2 -Wall -Wextra -Werror -static -s -o "$BUILD/launcher" \
    packaging/launcher.cpp -lzstd
.venv/bin/python packaging/pack.py "$BUILD/launcher" "$BUILD/pdnode" "$OUT/pdnode"
PDNODE_DIST=1 limited .venv/bin/python -m pytest -q tests/packaging/test_single_file.py \
    tests/packaging/test_single_unit.py
ls -l "$OUT" >&2
