# `make demo` and `make test` set up all they need in .venv and run; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
TOOLS := .tools/.set-up
# xdist workers: one a core. Torch's own threads would fight over the same cores.
JOBS ?= $(shell nproc)
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint format unit faults conformance bench bench-gpu performance docs \
	deploy-test clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(STAMP): pyproject.toml constraints.txt deploy/setup-venv.sh
	PYTHON=$(PYTHON) VENV=$(VENV) sh deploy/setup-venv.sh
	@touch $@

$(TOOLS): deploy/setup-tools.sh
	sh deploy/setup-tools.sh || echo "Tests that need these tools are skipped." >&2
	@mkdir -p $(@D) && touch $@

demo: $(STAMP) ## Decode real text through the service and check every token
	$(BIN)/hisparse-service demo

test: $(STAMP) $(TOOLS) lint ## Lint, types, import rules and all tests that CI runs
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow and not gpu"

lint: $(STAMP) ## ruff, strict mypy, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Rewrite the code as ruff formats it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: $(STAMP) ## The pure tests only
	$(BIN)/python -m pytest -n $(JOBS) tests/unit

conformance: ## vLLM's own code over the service; makes .venv-vllm at the first run
	PYTHON=$(PYTHON) sh deploy/setup-vllm-venv.sh
	.venv-vllm/bin/python -m pytest -o filterwarnings=ignore -o timeout=240 tests/conformance

# The long form takes about an hour on 2 cores, QUICK=1 a few minutes.
ifdef QUICK
FAULTS := HISPARSE_FAULTS_EVERY=8 HISPARSE_FAULTS_EXAMPLES=4
KILLS ?= 20
FRAMES ?= 200000
else
FAULTS := HISPARSE_FAULTS_EVERY=1 HISPARSE_FAULTS_EXAMPLES=40
KILLS ?= 1000
FRAMES ?= 10000000
endif
SEED ?= 1

faults: $(STAMP) ## Kill everything at every step, fuzz, storm; QUICK=1: a sample of it
	$(FAULTS) $(BIN)/python -m pytest -n $(JOBS) tests/faults
	$(BIN)/python -m tests.faults.fuzz --frames $(FRAMES) --seed $(SEED)
	$(BIN)/python -m tests.faults.storm --kills $(KILLS) --seed $(SEED) --workers 3

bench: $(STAMP) ## Speed of the control plane and the pool, as ratios, both sides in one run
	$(BIN)/python -m benchmarks

# Runs with the Python that has CUDA's torch, not with .venv. ONLY=gather.single,resolve.hit runs a part.
ONLY ?=
bench-gpu: ## Speed of the kernels, on a machine with a GPU
	@mkdir -p build
	$(PYTHON) -m benchmarks.gpu.bench_kernels --out build/gpu-kernels.json --only "$(ONLY)" \
		--commit "$$(git rev-parse --short HEAD)"

performance: $(STAMP) ## docs/performance.md and its plots, from benchmarks/results
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'matplotlib>=3.8'
	$(BIN)/python -m benchmarks.performance_page

docs: $(STAMP) ## The documentation as a site in build/site; reference pages are written anew
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --quiet

deploy-test: $(STAMP) $(TOOLS) ## Units, image, manifests, rules, documentation; the slow tests too
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup tests/deploy

clean: ## Remove what make built
	rm -rf $(VENV) .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
