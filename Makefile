# `make setup` first; everything else runs in .venv. Targets are explained in CONTRIBUTING.md.
CONSTRAINTS ?= constraints/cpu.txt
PYTHON ?= python3
export CONSTRAINTS

BIN := .venv/bin
# Everything but `parity` (the long grid) and the suites that need a device.
SUITES := tidy unit property sim memory host fabric shardings engine cuda api tui e2e service
CHECK_SUITES := tidy unit property sim
PATHS := pdnode tui tests scripts packaging

.PHONY: setup build demo test tsan check format tidy parity sim fuzz soak faults soak-fabric docs gpu-signatures model fronts dist clean
.DEFAULT_GOAL := check

setup:
	@PYTHON=$(PYTHON) scripts/setup.sh

build: setup

model: setup
	@$(BIN)/pdnode model fetch smollm2 --cache-dir build

demo: setup
	@$(BIN)/pdnode demo --cache-dir build

# nginx and HAProxy for the tests of examples/front, where they can be fetched.
fronts:
	@scripts/fronts.sh

test: model fronts
	@scripts/suites.sh --coverage $(SUITES)

# The core's own suite under the thread sanitizer; `make test` has address and undefined.
tsan: setup
	@PDNODE_SANITIZE=thread $(BIN)/python -m pytest -q tests/fabric/test_native_suite.py

parity: model
	@PDNODE_PARITY=full $(BIN)/python -m pytest -q --timeout 3600 tests/e2e -k parity

# The cluster simulator: RUNS seeds from SEED on; PLANTS=1 looks for the planted faults instead.
SEED ?= 0
RUNS ?= 1000
sim: setup
	@$(BIN)/python -m tests.sim $(if $(PLANTS),--plants,--seed $(SEED) --runs $(RUNS))

# Hostile peers and clients: so many frames on the peer link, so many HTTP requests.
FRAMES ?= 100000
REQUESTS ?= 10000
fuzz: setup
	@PDNODE_FUZZ_FRAMES=$(FRAMES) PDNODE_FUZZ_REQUESTS=$(REQUESTS) \
		$(BIN)/python -m pytest -q -s tests/e2e/test_fuzz_link.py tests/e2e/test_fuzz_http.py

# Many requests through one pair of nodes, one in a hundred cancelled: nothing piles up.
SMOLLM2_REQUESTS ?= 300
soak: model
	@PDNODE_SOAK_REQUESTS=$(REQUESTS) PDNODE_SOAK_SMOLLM2_REQUESTS=$(SMOLLM2_REQUESTS) \
		$(BIN)/python -m pytest -q -s tests/e2e/test_soak.py

# Every fault of tests/e2e/test_fault_runner.py 20 times, and 3 times with SmolLM2: hours.
faults: model
	@PDNODE_FAULTS=20 PDNODE_FAULTS_SMOLLM2=3 $(BIN)/python -m pytest -q -s tests/e2e/test_fault_runner.py

soak-fabric: setup
	@PDNODE_SOAK=full $(BIN)/python -m pytest -q tests/fabric/test_endurance.py

check: setup
	@PDNODE_SIM_RUNS=150 scripts/check.sh $(CHECK_SUITES)

format: setup
	@$(BIN)/ruff check --fix --quiet $(PATHS); $(BIN)/ruff format $(PATHS)

tidy: setup
	@scripts/suites.sh tidy

# Fetches FlashInfer (100 MB) and cuda-python, without what they depend on.
gpu-signatures: setup
	@$(BIN)/python scripts/gpu_signatures.py build/gpu-signatures

docs: setup
	@$(BIN)/python scripts/config_docs.py

# sdist, wheel, folder form and single file into dist/, each tested there.
dist: model
	@scripts/dist.sh

# Keeps the fetched model: it is the same after every build.
clean:
	@if [ -d build ]; then find build -mindepth 1 -maxdepth 1 ! -name models -exec rm -rf {} +; fi
	@rm -rf dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .venv/.stamp-core
	@find pdnode tui tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
