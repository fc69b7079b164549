#!/bin/sh
# Sets up a development tree: system packages, .venv, dependencies, the compiled core.
#
# Called by `make setup`. A second run does only what has changed: stamps in .venv remember what
# was installed for which inputs.
#   PYTHON       interpreter for the venv (default python3, at least 3.11)
#   CONSTRAINTS  pip constraints file; empty on a GPU host, where torch comes with CUDA
set -eu

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
CONSTRAINTS=${CONSTRAINTS-constraints/cpu.txt}
VENV=.venv
PACKAGES="g++ make pkg-config python3-dev python3-venv libfabric-dev libxxhash-dev libzstd-dev zstd iproute2 curl tmux systemd openssl"

say() { printf '%s\n' "$*" >&2; }

# What a stamp stands for: a hash of the inputs of its step.
hash_of() { cat "$@" 2>/dev/null | sha256sum | cut -d' ' -f1; }
done_before() { [ -f "$VENV/.stamp-$1" ] && [ "$(cat "$VENV/.stamp-$1")" = "$2" ]; }
mark_done() { printf '%s\n' "$2" >"$VENV/.stamp-$1"; }

system_packages() {
    command -v dpkg-query >/dev/null 2>&1 || {
        say "not a Debian-like system; these packages must be there: $PACKAGES"
        return 0
    }
    missing=""
    for package in $PACKAGES; do
        state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
        [ "$state" = installed ] || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" = 0 ]; then
        say "installing:$missing"
        apt-get update -q
        # One word per package.
        # shellcheck disable=SC2086
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
    else
        say "these system packages are missing; install them and run \`make setup\` again:"
        say "    sudo apt-get install --no-install-recommends$missing"
        exit 1
    fi
}

make_venv() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        say "$PYTHON is $("$PYTHON" --version 2>&1); Python 3.11 or newer is needed (PYTHON=…)"
        exit 1
    }
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

torch_hint() {
    say ""
    say "The dependencies could not be installed. If torch is what was not found:"
    if [ -n "$CONSTRAINTS" ]; then
        say "$CONSTRAINTS pins the CPU build of torch, which is not on the default package index."
        say "Name PyTorch's index for CPU builds in PIP_EXTRA_INDEX_URL (pytorch.org tells its"
        say "address) and run \`make setup\` again. On a GPU host run \`make setup CONSTRAINTS=\`:"
        say "then torch comes with CUDA."
    else
        say "CONSTRAINTS is empty, so torch with CUDA was asked for."
    fi
    exit 1
}

dependencies() {
    inputs=$(hash_of scripts/setup.sh pyproject.toml ${CONSTRAINTS:+"$CONSTRAINTS"})
    done_before dependencies "$inputs" && return 0
    list=$VENV/requirements.txt
    "$VENV/bin/python" - >"$list" <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
names = list(project["project"]["dependencies"])
names += project["project"]["optional-dependencies"]["libfabric"]
names += project["dependency-groups"]["test"]
names += project["build-system"]["requires"] + ["cmake>=3.20", "ninja"]
names += ["pip>=24.1"]  # `pdnode model fetch` reads its raw progress
print("\n".join(names))
PY
    pip install ${CONSTRAINTS:+--constraint "$CONSTRAINTS"} --requirement "$list" || torch_hint
    mark_done dependencies "$inputs"
}

core() {
    inputs=$(hash_of pyproject.toml CMakeLists.txt pdnode/fabric/native/* \
        pdnode/bench/native/*)
    done_before core "$inputs" && return 0
    pip install --no-build-isolation --no-deps --editable '.[libfabric]'
    mark_done core "$inputs"
}

system_packages
make_venv
dependencies
core
