# On a machine that has Python 3.11+, git and make:
#   make demo   trains a ternary network on the digits, every fold of five, and shows what came of it
#   make test   everything that must hold
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo install test lint types format clean

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

test: install lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

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
