# On a fresh machine with Python 3.11+ and make:  make train  and  make test  are all there is to do.
# Both set up .venv the first time and whenever pyproject.toml, constraints.txt or a file of C changes.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (default: the first one >= 3.11 found)
#   ARGS="..."          further arguments for the command: make train ARGS="--epochs 3 --replicas 2"
#   WORKERS=0           processes that `make test` uses (default: 2, which takes two thirds of the time on
#                       two cores; a test that ends its process ends the run, and is named; 0: none beside its own)
#   N=200               how many faults `make chaos` commits in a training,
#   KILLS=2000          how many workers of parameter tables it kills,
#   SERVER_KILLS=2000   how many servers of hosts,
#   RANK_KILLS=300      how many ranks of process groups,
#   ELASTIC_KILLS=20    and how many of ranks that survive;
#   FRAMES=10000000     how many mutated frames it has servers and clients read
#   CELLS="3.12:2.8.0"  the versions of Python and torch that `make matrix` tries

.DEFAULT_GOAL := help
.PHONY: help venv train test test-fast matrix check format bits house promises docs wheels bench chaos night gpu clean .venv/moved

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2
N ?= 200
KILLS ?= 2000
SERVER_KILLS ?= 2000
RANK_KILLS ?= 300
ELASTIC_KILLS ?= 20
FRAMES ?= 10000000
CELLS ?= 3.12:2.8.0 3.13:2.13.0

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AUTOLOAD := src/phalanx_autoload.py  # stands in site-packages itself, as a copy
# What takes longest on a device, or says least there, runs on it at night only.
ON_DEVICE_AT_NIGHT = $(wildcard tests/meta/test_conftest.py \
    tests/conformance/test_parity.py $(addprefix tests/contracts/test_, torch7.py mxnet_metrics.py))
ON_DEVICE = tests/device $(filter-out $(ON_DEVICE_AT_NIGHT),\
    $(shell grep -rl --include='test_*.py' -e 'mark\.gpu' -e 'mark\.devices' tests))
FAST := -m "not slow and not night and not alone" $(wildcard tests/unit tests/contracts tests/conformance)
ALONE = $(shell grep -rl --include='*.py' 'mark\.alone' tests)
# By itself pip would compile every file that comes, a minute and a half; Python compiles those that are used.
INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
COMPILED := $(wildcard src/phalanx/native/*.[ch] src/phalanx/distributed/*.[ch])

# The stamp holds the folder it was made in: scripts in a virtual environment name their interpreter
# by absolute path, so one that came here with a copied tree is made again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
STALE := .venv/moved
endif

# Targets with one `#` are for the developers of Phalanx, and not shown.
help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

venv: $(STAMP)  ## set up .venv (done by the other targets where needed)

.venv/moved:

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(AUTOLOAD) $(COMPILED) $(STALE)
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	    echo "make: \`PYTHON\` must be a Python interpreter, but is '$(PYTHON)', which is not found." \
	         "Install Python 3.11 or newer, or name one: make PYTHON=python3.12 venv" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "make: \`PYTHON\` must be Python 3.11 or newer, but '$(PYTHON)' is" \
	         "$$("$(PYTHON)" --version 2>&1). Name another: make PYTHON=python3.12 venv" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "make: '$(PYTHON)' must come with the modules venv and ensurepip, but has not." \
	         "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@if [ -n "$(STALE)" ]; then rm -rf $(VENV); fi
	@if ! $(BIN)/python -c '' 2>/dev/null; then "$(PYTHON)" -m venv --clear $(VENV); fi
	@echo "Installing into $(VENV) (once; a minute or a few)"
	@$(INSTALL) -e '.[dev]'
	@unset PYTHONDONTWRITEBYTECODE; $(BIN)/python -c 'import torch, torchmetrics, matplotlib.pyplot, phalanx.cli.app'
	@printf '%s\n' '$(CURDIR)' > $(STAMP)

train: $(STAMP)  ## train the default model on the default data and show the result
	@$(BIN)/phalanx train $(or $(ARGS),digits)

# Files go whole to one of WORKERS processes, since fixtures of a module start workers and ranks. They
# go in the order of their names: the long ones of chaos and conformance begin. More processes than two gain
# nothing, as most of the time is of tests that have two or three workers themselves. What is marked
# `alone` looks at the whole machine, and only the files that say so are read. No test of either part
# may be chosen by ARGS: pytest says so by 5, and so does a machine without a C++ compiler, which cannot
# play the test device (tests/device): without ARGS, its tests and those for a GPU come last, in one process, as
# collecting them in a second one takes as long as half of them. Where Python may not keep what it has compiled, pytest would
# compile all tests anew, and each worker all modules: here it may. Threads of OpenMP that wait for work sleep:
# by default they spin, and take the cores from the other worker (three times the CPU time of a test of weights).
test test-fast matrix night: export OMP_WAIT_POLICY := PASSIVE
test: $(STAMP)  ## run the whole test suite
	@failed=0; unset PYTHONDONTWRITEBYTECODE; \
	$(BIN)/python -m pytest -m "not night and not alone" -n $(WORKERS) --dist loadfile \
	    --no-loadscope-reorder $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	$(BIN)/python -m pytest -m "alone and not night" $(or $(ARGS),$(ALONE)) || [ $$? -eq 5 ] || failed=1; \
	[ -n "$(ARGS)" ] || TEST_DEVICES=4 $(BIN)/python -m pytest --device dev $(ON_DEVICE) \
	    || [ $$? -eq 5 ] || failed=1; \
	echo "processor time of this shell and of all tests, user and system:"; times; \
	exit $$failed

test-fast: $(STAMP)  ## run the tests that need no other process: a minute or two
	@unset PYTHONDONTWRITEBYTECODE; $(BIN)/python -m pytest $(FAST) -n $(WORKERS) --dist loadfile $(ARGS)

matrix: $(STAMP)  # run the fast tests with other versions of Python and torch; 5 GB a cell, removed afterwards
	@$(BIN)/python -m tests.matrix $(CELLS) -- $(FAST) -n $(WORKERS) --dist loadfile $(ARGS)

check: $(STAMP)  # formatting, lint, layers, types, plain English
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy
	$(BIN)/python tools/prose.py

format: $(STAMP)  # put the sources into the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bits: $(STAMP)  # train three small models in every configuration and print hashes of their weights
	@$(BIN)/python -W ignore -m tests.meta.bits

house: $(STAMP)  # print the size of the package, its doubled names, and how far one call walks, beside the aims
	@$(BIN)/python -W ignore -m tests.meta.house $(ARGS)

promises: $(STAMP)  # write docs/promises.md from tests/promises.toml and the tests' markers
	@$(BIN)/python -m tests.promises

$(VENV)/.docs: $(STAMP)
	@echo "Installing what builds the site into $(VENV) (once)"
	@$(INSTALL) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs  ## build the site into out/site; open out/site/index.html, no server is needed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "out/site/index.html"

$(VENV)/.wheels: $(STAMP)
	@echo "Installing what builds wheels into $(VENV) (once; zig has 100 MB)"
	@$(INSTALL) -e '.[wheels]'
	@touch $@

wheels: $(VENV)/.wheels  # build the sdist and the wheels of two machines into dist/, check them, and try ours in an empty environment
	@rm -rf dist
	@$(BIN)/python -m hatchling build -t sdist
	@for machine in x86_64 aarch64; do PHALANX_WHEEL=$$machine $(BIN)/python -m hatchling build -t wheel; done
	@for wheel in dist/*.whl; do $(BIN)/python -m auditwheel show $$wheel | grep -A1 'following platform tag'; done
	@$(BIN)/python -m twine check --strict dist/*
	@rm -rf build/empty; "$(PYTHON)" -m venv build/empty
	@build/empty/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*$$(uname -m).whl
	@cd build && empty/bin/phalanx train digits --model mlp --epochs 1 --out empty/run \
	    && empty/bin/python -c 'from phalanx import tables; tables.TableGroup'

bench: $(STAMP)  ## run all benchmarks into one page, out/bench/index.html (half an hour)
	@$(BIN)/python -m benchmarks all $(ARGS)

chaos: $(STAMP)  # kill workers and ranks at random, of trainings, tables and groups; bits and books must stay; mutated frames
	@$(BIN)/python -m tests.chaos.soak --kills $(N) $(ARGS)
	@$(BIN)/python -m tests.chaos.ledger --kills $(KILLS)
	@$(BIN)/python -m tests.chaos.server_kills --kills $(SERVER_KILLS)
	@$(BIN)/python -m tests.chaos.rank_kills --kills $(RANK_KILLS)
	@$(BIN)/python -W ignore -m tests.chaos.elastic_kills --kills $(ELASTIC_KILLS)
	@$(BIN)/python -m tests.chaos.frames_fuzz --frames $(FRAMES)

night: $(STAMP)  # every kind of fault at every point in every worker, whole products, torch's own distributed tests
	@$(BIN)/python -m pytest -m "night or not night" tests/chaos tests/conformance tests/contracts $(ARGS)
	@$(BIN)/python -m pytest -m night --ignore=tests/chaos --ignore=tests/conformance --ignore=tests/contracts $(ARGS)
	@[ -n "$(ARGS)" ] || TEST_DEVICES=2 $(BIN)/python -m pytest -m "night or not night" --device dev $(ON_DEVICE) \
	    $(ON_DEVICE_AT_NIGHT) \
	    || [ $$? -eq 5 ]
	@[ -n "$(ARGS)" ] || TEST_DEVICES=2 TEST_DEV_FIRST=1 $(BIN)/python -m pytest -m devices --device dev $(ON_DEVICE) $(ON_DEVICE_AT_NIGHT) \
	    || [ $$? -eq 5 ]
	@[ -n "$(ARGS)" ] || $(MAKE) matrix

gpu: $(STAMP)  ## the tests that run on a GPU, and the benchmark beside nn.DataParallel and DDP over NCCL
	@kind=$$($(BIN)/python -c 'import torch; print(torch.accelerator.current_accelerator(check_available=True) or "")'); \
	[ -n "$$kind" ] || { echo "make: torch must see a GPU for this, but sees none; $(BIN)/phalanx doctor may say why." \
	    "To try the benchmark without one: python -m benchmarks gpu --device cpu" >&2; exit 1; }; \
	$(BIN)/python -m pytest -m "night or not night" --device $$kind $(or $(ARGS),$(ON_DEVICE) $(ON_DEVICE_AT_NIGHT)) \
	    && $(BIN)/python -m benchmarks gpu

clean:  ## remove .venv and what tools left behind
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
