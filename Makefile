# `make quickstart` and `make test` are all a new user needs; both set up .venv when it is absent.
PYTHON ?= python3
# Tests run in this many processes of one thread each.
WORKERS ?= 2
# What setup installs along with the project; the targets for developers add dev.
EXTRAS ?= quickstart
# Which PyTorch: default = PyPI's, which has CUDA on Linux; cpu, cu128, ... = that of download.pytorch.org; auto = for a user's setup,
# cpu where there is no NVIDIA GPU and that server answers.
TORCH ?= auto
NVIDIA_SMI ?= $(shell command -v nvidia-smi 2>/dev/null)
INDEX := https://download.pytorch.org/whl

BIN := .venv/bin
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
PIP := $(BIN)/python -m pip install --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
# Long tests: a worker that is done takes over what another has not begun. Files without such tests are not even read.
PYTEST_LONG := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
LONG := $(shell grep -rlE 'mark\.(slow|nightly)' tests --include='test_*.py')

.PHONY: help setup setup-dev install wheel quickstart quickstart-nova quickstart-wan test test-slow test-nightly test-extras test-oldest test-gpu test-mutants check format format-check lint type docs docs-check docs-site bench clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP)  ## make .venv and install the project into it, with what the quickstart needs, unless that is done

setup-dev: $(DEV_STAMP)  ## the same with the tools of developers: tests, formatter, type checker

define venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
  { echo "error: '$(PYTHON)' is missing or older than Python 3.10; name another one: make setup PYTHON=python3.12" >&2; exit 1; }
$(PYTHON) -m venv .venv
$(if $(filter-out auto default,$(TORCH)),$(PIP) --index-url $(INDEX)/$(TORCH) torch torchvision)
endef

$(STAMP): pyproject.toml
	$(venv)
ifeq ($(TORCH)$(NVIDIA_SMI),auto)
	@if $(BIN)/python -c 'from urllib.request import urlopen; urlopen("$(INDEX)/cpu/torch/", timeout=5)' 2>/dev/null; then \
	  echo "no NVIDIA GPU: installing PyTorch without CUDA, which takes 4 GB less (with it: make setup TORCH=default)"; \
	  $(PIP) --index-url $(INDEX)/cpu torch torchvision || echo "that failed: taking PyPI's PyTorch"; \
	fi
endif
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

$(DEV_STAMP): pyproject.toml
	$(venv)
	$(PIP) -e '.[dev,docs,$(EXTRAS)]'
	@touch $(STAMP) $@

install:  ## install the project, not editable and with optional packages, into the environment of PYTHON: what the Dockerfile runs
	$(PYTHON) -m pip install --disable-pip-version-check '.[data,demo,lora,quickstart,wandb]'

wheel: setup  ## build dist/opensora-*.whl, which has scripts, tools, configs and assets inside
	rm -rf build
	$(BIN)/python -m pip wheel --disable-pip-version-check -q --no-deps -w dist .

quickstart: setup  ## train a small STDiT on the clips of assets/ and sample from it; FROM=scratch starts from nothing
	$(BIN)/python -m tools.quickstart $(if $(FROM),--from $(FROM))

quickstart-nova: setup  ## train a small NOVA on the clips, an autoregressive model, and sample images and videos
	$(BIN)/python -m tools.quickstart --from nova

quickstart-wan: setup  ## train a small Wan on the clips from random weights, and sample from it
	$(BIN)/python -m tools.quickstart --from wan

test: setup-dev  ## run the CPU tests that are not marked slow
	$(PYTEST) -m "not slow and not gpu"

test-slow: setup-dev  ## run the CPU tests that are marked slow, but not nightly
	$(PYTEST_LONG) -m "slow and not nightly and not gpu" $(LONG)

test-nightly: setup-dev  ## run the CPU tests that are marked nightly
	$(PYTEST_LONG) -m "nightly and not gpu" $(LONG)

test-extras: setup-dev  ## install what setup does not, and run the tests that need it
	$(PIP) -q -e '.[quant,demo]' playwright
	$(PYTEST) -m "extra and not gpu" tests/acceleration tests/training tests/scripts/test_train_resume.py tests/tools/test_demo.py

test-oldest:  ## run the CPU tests of `make test` with the oldest versions that pyproject.toml allows, in .venv-oldest
	test -d .venv-oldest || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --disable-pip-version-check -q -c tests/oldest.txt -e '.[dev,quickstart]'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu"

test-gpu: setup-dev  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

test-mutants: setup-dev  ## see that the tests notice the mistakes of tests/mutants, each in a copy of the code
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants -j $(WORKERS)

check: format-check lint type docs-check test test-slow test-nightly  ## all that a change must pass

format: setup-dev  ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

format-check: setup-dev
	$(BIN)/ruff format --check .

lint: setup-dev  ## check the code's style
	$(BIN)/ruff check .

type: setup-dev  ## check the types
	$(BIN)/mypy

docs: setup-dev  ## write docs/config.md from the config schema
	$(BIN)/python -m tools.gen_config_docs

docs-check: setup-dev
	$(BIN)/python -m tools.gen_config_docs --check

docs-site: setup-dev  ## build the documentation as a site, in site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup  ## time the training step on this machine
	$(BIN)/python -m tools.benchmark train_step

clean:  ## remove caches and build files; .venv and outputs/ stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
