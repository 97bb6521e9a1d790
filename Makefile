# `make quickstart` and `make test` are all a new user needs; both set up .venv when it is absent.
PYTHON ?= python3
# Tests run in this many processes of one thread each.
WORKERS ?= 2
# What setup installs along with the project.
EXTRAS ?= dev,quickstart

BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
# Long tests: a worker that is done takes over what another has not begun.
PYTEST_LONG := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help setup quickstart quickstart-nova test test-slow test-nightly test-extras test-oldest test-gpu test-mutants check format format-check lint type docs docs-check bench clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP)  ## make .venv and install the project into it, unless that is done

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: '$(PYTHON)' is missing or older than Python 3.10; name another one: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

quickstart: setup  ## train a small STDiT on the clips of assets/ and sample from it; FROM=scratch starts from nothing
	$(BIN)/python -m tools.quickstart $(if $(FROM),--from $(FROM))

quickstart-nova: setup  ## train a small NOVA on the clips, an autoregressive model, and sample images and videos
	$(BIN)/python -m tools.quickstart --from nova

test: setup  ## run the CPU tests that are not marked slow
	$(PYTEST) -m "not slow and not gpu"

test-slow: setup  ## run the CPU tests that are marked slow, but not nightly
	$(PYTEST_LONG) -m "slow and not nightly and not gpu"

test-nightly: setup  ## run the CPU tests that are marked nightly
	$(PYTEST_LONG) -m "nightly and not gpu"

test-extras: setup  ## install what setup does not, and run the tests that need it
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[quant]'
	$(PYTEST) -m "extra and not gpu" tests/acceleration

test-oldest:  ## run the CPU tests of `make test` with the oldest versions that pyproject.toml allows, in .venv-oldest
	test -d .venv-oldest || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --disable-pip-version-check -q -c tests/oldest.txt -e '.[dev,quickstart]'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu"

test-gpu: setup  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

test-mutants: setup  ## see that the tests notice the mistakes of tests/mutants, each in a copy of the code
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants -j $(WORKERS)

check: format-check lint type docs-check test test-slow test-nightly  ## all that a change must pass

format: setup  ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

format-check: setup
	$(BIN)/ruff format --check .

lint: setup  ## check the code's style
	$(BIN)/ruff check .

type: setup  ## check the types
	$(BIN)/mypy

docs: setup  ## write docs/config.md from the config schema
	$(BIN)/python -m tools.gen_config_docs

docs-check: setup
	$(BIN)/python -m tools.gen_config_docs --check

bench: setup  ## time the training step on this machine
	$(BIN)/python -m tools.benchmark train_step

clean:  ## remove caches and build files; .venv and outputs/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
