# fp8pass: everything runs in a virtual environment that the first target to need it makes.
#
#   make demo     a real model in FP8, compiled with and without fp8pass, side by side
#   make test     linters, types and the whole test suite
#   make dialects tests with the real torchao, compressed-tensors and transformers
#   make test-vllm tests with real engines of vLLM on this CPU
#
# Variables: PYTHON (an interpreter, 3.11 or newer), VENV (folder), TORCH (version of torch),
# TORCH_INDEX (where to look for a CPU build of it; empty: pip's own index), DEMO_ARGS, PYTEST_ARGS,
# JOBS (test processes).
# For another torch, use another folder:  make test VENV=.venv-2.11 TORCH=2.11.0

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; \
	done; echo python3)
VENV ?= .venv
TORCH ?= 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Processes that share the tests, file by file.
JOBS ?= 2
# An environment of its own: vLLM pins what it depends on.
VLLM ?= 0.32.0
VLLM_VENV ?= .venv-vllm

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-torch-$(TORCH)
VLLM_STAMP := $(VLLM_VENV)/.installed-vllm-$(VLLM)

.DEFAULT_GOAL := help
.PHONY: help venv demo test dialects test-vllm test-vllm-smoke lint format bench build clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

venv: $(STAMP)  ## the environment with pinned versions, from nothing

$(STAMP): pyproject.toml fp8pass/_version.py $(wildcard requirements/*.txt) scripts/setup_venv.py
	@rm -f $(VENV)/.installed-*
	$(PYTHON) scripts/setup_venv.py --venv $(VENV) --torch $(TORCH) --torch-index "$(TORCH_INDEX)"
	@touch $@

demo: $(STAMP)  ## SmolLM2-135M: bf16, FP8 under stock Inductor, FP8 under fp8pass
	$(BIN)/fp8pass demo $(DEMO_ARGS)

# pytest comes last, so that the output ends with its summary.
test: lint  ## linters, types, tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

dialects: $(STAMP)  ## tests with the real quantisation libraries (docs/dialects.md)
	$(BIN)/python -m pip install -c requirements/constraints.txt -e ".[dialects,dev]"
	$(BIN)/python -m pytest tests/dialects/with_libraries $(PYTEST_ARGS)

$(VLLM_STAMP): pyproject.toml fp8pass/_version.py requirements/vllm.txt scripts/setup_venv.py
	@rm -f $(VLLM_VENV)/.installed-*
	$(PYTHON) scripts/setup_venv.py --venv $(VLLM_VENV) --torch $(TORCH) \
		--torch-index "$(TORCH_INDEX)" --vllm $(VLLM)
	@touch $@

test-vllm: $(VLLM_STAMP)  ## real engines of vLLM on this CPU (an hour or more)
	$(VLLM_VENV)/bin/python -m pytest tests/with_vllm $(PYTEST_ARGS)

test-vllm-smoke: $(VLLM_STAMP)  ## one engine of vLLM
	$(VLLM_VENV)/bin/python -m pytest tests/with_vllm -m smoke $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff and mypy, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fp8pass

format: $(STAMP)  ## rewrite the source in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## the demo, its measurements written to build/demo.json
	@mkdir -p build
	$(BIN)/fp8pass demo --json build/demo.json $(DEMO_ARGS)

build: $(STAMP)  ## a wheel in dist/
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:  ## remove what the other targets made, the environment included
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find fp8pass tests examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +
