# On a machine that has Python 3.11+, git and make:
#   make demo      train a ternary network on the digits, in every fold of five
#   make quick     the checks to run before a commit (40 s)
#   make test      lint, types and the default lane of the tests (4 minutes on 2 cores)
#   make nightly   every test (an hour); make nightly ROOM=deploy: those of one room
#   make packages  export of networks of timm and torchvision, which make nightly includes
#   make runtimes  environments of runtimes whose packages fight, in .venv-runtimes
#   make oldest    part of the tests with the oldest packages that are supported
#   make docs      the API site, in site/
#   make dist      the wheel and the source archive, in dist/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo install quick test default-lane nightly packages runtimes oldest lint types format hooks docs dist clean

# -n: one worker per core of the smallest machine that is supported, with one thread each. Bytecode is written even
# where the environment forbids it: otherwise each worker and each process that a test starts compiles the package.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

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

# mypy uses one core: the tests run at the same time. Either failure fails the target, after both have ended.
test: install lint
	$(MAKE) --no-print-directory -j 2 types default-lane

default-lane: install
	$(PYTEST)

nightly: install lint types
	$(PYTEST) --lane nightly $(if $(ROOM),$(wildcard tests/$(ROOM) tests/test_$(ROOM).py))
	$(if $(filter deploy,$(or $(ROOM),deploy)),$(MAKE) --no-print-directory packages)

# In a folder of their own: other packages would import the torchvision that they see.
packages: install
	$(PIP) --no-deps --upgrade --target $(VENV)/packages timm torchvision
	PYTHONPATH=$(VENV)/packages $(PYTEST) --lane nightly tests/deploy/test_packages.py

# What `softstair verify --runtimes` runs as processes. hls4ml is not for the newest onnx.
RUNTIME_executorch := executorch torch safetensors
RUNTIME_hls4ml := hls4ml qonnx 'onnx<1.20' onnxruntime
RUNTIME_openvino := openvino

runtimes: .venv-runtimes/executorch/installed .venv-runtimes/hls4ml/installed .venv-runtimes/openvino/installed

.venv-runtimes/%/installed: constraints.txt
	$(PYTHON) -m venv .venv-runtimes/$*
	grep -v '^onnx=' constraints.txt > .venv-runtimes/$*/constraints.txt
	.venv-runtimes/$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-c .venv-runtimes/$*/constraints.txt $(RUNTIME_$*)
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The API site, in site/. Read it with `python3 -m http.server --directory site`: the search needs a server.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[docs]'
	touch $@

# The wheel and the source archive, in dist/: built, checked, installed into a fresh environment and tried there.
dist: $(VENV)/dist
	rm -rf dist .venv-dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(echo dist/*.whl)[cli]"
	cd dist && ../.venv-dist/bin/softstair --version
	cd dist && ../.venv-dist/bin/python -I -c "import softstair, softstair.train; print(softstair.__file__)"
	cd dist && ../.venv-dist/bin/softstair zoo
	rm -rf .venv-dist

$(VENV)/dist: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) build twine
	touch $@

# Part of the tests with the oldest packages that pyproject.toml allows, under Python 3.11 or 3.12. Old packages may
# issue deprecation warnings about newer ones.
OLDEST_PYTEST := .venv-oldest/bin/python -m pytest -q -W ignore::DeprecationWarning

oldest: .venv-oldest/installed
	$(OLDEST_PYTEST) --lane quick tests
	$(OLDEST_PYTEST) tests/test_anneal.py tests/convert/test_quantise.py tests/train/test_checkpoint.py

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[cli,onnx]' pytest hypothesis scipy
	touch $@

# Runs lint and types before every commit.
hooks: install
	$(PIP) pre-commit
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) .venv-dist .venv-oldest .venv-runtimes .pytest_cache .mypy_cache .ruff_cache .hypothesis dist site
