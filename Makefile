# On a machine that has Python 3.11+, git and make:
#   make demo      train a ternary network on the digits, in every fold of five
#   make quick     the checks to run before a commit (40 s)
#   make test      lint, types and the default lane of the tests (4 minutes on 2 cores)
#   make nightly   every test (an hour); make nightly ROOM=deploy: those of one room
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo install quick test nightly lint types format clean

# -n: one worker per core of the smallest machine that is supported.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal -q

demo: $(VENV)/command
	$(BIN)/softstair train --every-fold

install: $(VENV)/installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What the command needs, and no more: the demo is not kept waiting for the tools of the tests.
$(VENV)/command: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[cli]'
	touch $@

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	touch $@

quick: install lint
	$(PYTEST) --lane quick tests

test: install lint types
	$(PYTEST)

nightly: install lint types
	$(PYTEST) --lane nightly $(if $(ROOM),$(wildcard tests/$(ROOM) tests/test_$(ROOM).py))

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
