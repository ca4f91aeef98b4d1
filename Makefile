# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone.
#   PYTHON            the interpreter that .venv is made with; 3.11 or newer for the pinned versions
#   HFPAR_REAL_MODEL  folder of the real model for the tests marked `real`
#   PYTEST_ARGS       more arguments for pytest, such as `-k packing`
#   BENCH_ARGS        arguments for the benchmark, such as `--json throughput.json`

PYTHON ?= python3
HFPAR_REAL_MODEL ?= .cache/smollm2
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
GET_MODEL := ../shared/tools/get_smollm2.sh
override HFPAR_REAL_MODEL := $(abspath $(HFPAR_REAL_MODEL))
export HFPAR_REAL_MODEL

.PHONY: help venv demo test test-real check bench clean
.DELETE_ON_ERROR:

help:
	@echo "make venv | demo | test | test-real | check | bench | clean"

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "The pinned versions need Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 2; }
	@echo "Installing hfpar and what it needs into .venv (minutes, the first time)"
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) -e ".[deepspeed,quantization,tracking,zstd,math,dev]"
	@touch $@

demo: venv
	$(BIN)/hfpar demo

test: venv
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests

test-real: venv $(HFPAR_REAL_MODEL)/config.json
	$(BIN)/python -m pytest -m real $(PYTEST_ARGS) tests

$(HFPAR_REAL_MODEL)/config.json: | $(INSTALLED)
	@if [ -f $(GET_MODEL) ]; then \
		PYTHON=$(BIN)/python bash $(GET_MODEL) $(HFPAR_REAL_MODEL); \
	else \
		echo "Put SmolLM2-135M-Instruct (a Hugging Face folder) into $(HFPAR_REAL_MODEL)," \
			"or name its folder: make test-real HFPAR_REAL_MODEL=FOLDER" >&2; exit 2; \
	fi

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv
	$(PIP_INSTALL) -e ".[benchmark]"
	$(BIN)/python benchmarks/train_throughput.py $(BENCH_ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
