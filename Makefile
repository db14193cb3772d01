# `make` alone lists the targets. Needs python3 (3.11 or newer) with its venv module, nothing else.
#
#   PYTHON=python3.12   another interpreter for the virtual environment
#   ARGS="..."          more arguments: of `rtxd train`, of pytest, of the benchmarks

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
MADE := .venv/.made
INSTALLED := .venv/.installed
INSTALLED_DEV := .venv/.installed-dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test check bench soak install dev clean

help:
	@echo 'make train    train a small model on this machine, about a minute on 2 CPU cores'
	@echo 'make test     run the tests'
	@echo 'make check    lint, format, types, layers, spelling'
	@echo 'make bench    run the benchmarks'
	@echo 'make soak     run the long campaigns that `make test` leaves out'
	@echo 'make install  make .venv and install the package; `make dev`: with what tests need'
	@echo 'make clean    remove .venv and caches; runs/ stays'

train: $(INSTALLED)
	$(BIN)/rtxd train --model.preset tiny $(ARGS)

test: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -m 'not soak' $(ARGS)

check: $(INSTALLED_DEV)
	VIRTUAL_ENV= scripts/check

bench: $(INSTALLED_DEV)
	$(BIN)/rtxd launch --nproc 2 benchmarks/step_cost.py $(ARGS)
	$(BIN)/rtxd launch --nproc 1 benchmarks/step_cost.py $(ARGS)

soak: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -m soak $(ARGS)

install: $(INSTALLED)

dev: $(INSTALLED_DEV)

$(MADE):
	@command -v $(PYTHON) >/dev/null || \
	  { echo 'make: `$(PYTHON)` was not found; install Python 3.11 or newer, or name one: make PYTHON=...' >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: Python 3.11 or newer is needed, \`$(PYTHON)\` is $$($(PYTHON) -V 2>&1); name one: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'make: `$(PYTHON)` cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 2; }
	$(PYTHON) -m venv --clear .venv
	@touch $@

$(INSTALLED): $(MADE) pyproject.toml constraints.txt
	$(PIP) --editable .
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./runs -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +
