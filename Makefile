# Two verbs do everything on a fresh machine that has Python >= 3.11 and make:
#   make demo    install into .venv, compare paged with contiguous allocation, show where the results are
#   make test    install the test extras too, run the suite (slow tests: make deep)

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# The versions the suite was last run with; `make CONSTRAINTS= ...` takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
INSTALL := $(PIP) install -q $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# Test processes; the suite is written for one and gains from two.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n > 4 ? 4 : n)))
PYTEST := $(BIN)/python -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS))

.PHONY: help demo test deep deep-again check bench fuzz mutation docs format clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -3
	@echo "also: make check (ruff, mypy), make deep, make bench, make fuzz, make mutation, make docs, make format, make clean"

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then echo "kvsim needs Python 3.11 or newer, and none was found: install one, or say make PYTHON=/path/to/python"; exit 2; fi
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m virtualenv -q $(VENV) 2>/dev/null; } || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"; exit 2; }

$(VENV)/installed: pyproject.toml $(wildcard $(CONSTRAINTS)) | $(BIN)/python
	@echo "installing kvsim into $(VENV) ..."
	@$(INSTALL) -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml $(wildcard $(CONSTRAINTS)) | $(BIN)/python
	@echo "installing kvsim with its test extras into $(VENV) ..."
	@$(INSTALL) -e '.[dev]'
	@touch $(VENV)/installed $@

$(VENV)/installed-docs: $(VENV)/installed-dev
	@$(INSTALL) -e '.[docs]'
	@touch $@

demo: $(VENV)/installed
	@$(BIN)/kvsim compare scenarios/quickstart.yaml

test: $(VENV)/installed-dev
	$(PYTEST) -m "not deep"

# pytest says 5 when no test is selected. Files stay together: what their tests share is simulated once.
deep: $(VENV)/installed-dev
	$(PYTEST) $(if $(filter-out 1,$(JOBS)),--dist loadfile) -m deep || [ $$? -eq 5 ]

# Those slow tests that failed last, one after another.
deep-again: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m deep --last-failed --last-failed-no-failures none

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed-dev
	$(BIN)/kvsim bench

# Damaged scenarios and traces, for MINUTES.
fuzz: MINUTES ?= 10
fuzz: $(VENV)/installed-dev
	$(BIN)/python -W error benchmarks/fuzz.py --minutes $(MINUTES)

# Small faults put into the code, each run against the tests of its area; hours on one core.
mutation: NUM ?= 300
mutation: SEED ?= 1
mutation: MINUTES ?= 600
mutation: $(VENV)/installed-dev
	$(BIN)/python benchmarks/mutation.py --num $(NUM) --seed $(SEED) --minutes $(MINUTES)

docs: $(VENV)/installed-docs
	$(BIN)/python docs/_gen/generate.py
	$(BIN)/mkdocs build --strict

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis site
