# On a machine with Python 3.11 or newer, `make train` and `make test` work at once: each target sets up
# .venv the first time, and again when pyproject.toml, constraints.txt or a C file changes.
#   PYTHON=python3.12   the interpreter of .venv (default: python3)
#   ARGS="..."          more arguments for the command: make train ARGS="--epochs 3 --replicas 2"
#   WORKERS=0           processes that run the tests (default: 2)
#   CELLS="3.12:2.8.0"  versions of Python and torch that `make matrix` tries

PYTHON ?= python3
WORKERS ?= 2
CELLS ?= 3.12:2.8.0 3.13:2.13.0
BIN := .venv/bin
STAMP := .venv/.installed
INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
CHAOS := soak ledger server_kills rank_kills elastic_kills frames_fuzz
# A file runs in one process, as its fixtures start workers and ranks. Exit code 5: ARGS choose no test of a part.
PYTEST := unset PYTHONDONTWRITEBYTECODE; $(BIN)/python -m pytest
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
FAST := -m "not slow and not night" $(wildcard tests/unit tests/contracts tests/conformance)
AT_NIGHT = $(wildcard tests/meta/test_conftest.py \
    tests/conformance/test_parity.py tests/contracts/test_torch7.py tests/contracts/test_mxnet_metrics.py)
ON_DEVICE = tests/device $(filter-out $(AT_NIGHT),$(shell grep -rl --include='test_*.py' -e 'mark\.gpu' -e 'mark\.devices' tests))

.DEFAULT_GOAL := help
.PHONY: help venv train test test-fast matrix check bits house promises docs wheels bench \
    chaos night gpu clean moved
# OpenMP's threads sleep while they wait: by default they spin, and take the cores from other tests.
test test-fast matrix night: export OMP_WAIT_POLICY := PASSIVE

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14
venv: $(STAMP)  ## set up .venv; the other targets do it where needed
# The stamp holds the folder that it was made in: scripts in a copied environment name the old one.
$(STAMP): pyproject.toml constraints.txt hatch_build.py src/phalanx_autoload.py $(wildcard src/phalanx/native/*.[ch]) \
    $(if $(subst x$(CURDIR),,x$(shell cat $(STAMP) 2>/dev/null)),moved)
	@"$(PYTHON)" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' || { echo "make: \`PYTHON\` must be \
	Python 3.11 or newer with venv (Debian: apt install python3-venv). Name one: make PYTHON=python3.12 venv" >&2; exit 1; }
	@[ "$$(cat $@ 2>/dev/null)" = '$(CURDIR)' ] && $(BIN)/python -c '' || "$(PYTHON)" -m venv --clear .venv
	@echo "Installing into .venv (once; a minute or a few)"
	@$(INSTALL) --upgrade pip && $(INSTALL) -e . --group dev
	@unset PYTHONDONTWRITEBYTECODE; $(BIN)/python -c 'import torch, torchmetrics, matplotlib.pyplot, phalanx.cli.app'
	@printf '%s\n' '$(CURDIR)' > $@
.venv/.docs .venv/.wheels: .venv/.%: $(STAMP)
	@$(INSTALL) --group $* && touch $@

train: $(STAMP)  ## train a small model on handwritten digits and show the result
	@$(BIN)/phalanx train $(or $(ARGS),digits)
test: $(STAMP)  ## run all tests of a change
	@failed=0; \
	$(PYTEST) -m "not night" $(PARALLEL) $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	[ -n "$(ARGS)" ] || TEST_DEVICES=4 $(BIN)/python -m pytest -m "(devices or gpu) and not night" --device dev $(ON_DEVICE) || [ $$? -eq 5 ] || failed=1; \
	echo "processor time of this shell and of all tests, user and system:"; times; exit $$failed
test-fast: $(STAMP)  ## run the tests that start no other process
	@$(PYTEST) $(FAST) $(PARALLEL) $(ARGS)
matrix: $(STAMP)  # run the fast tests with other versions of Python and torch; 5 GB a cell, removed afterwards
	@$(BIN)/python -m tests.matrix $(CELLS) -- $(FAST) $(PARALLEL) $(ARGS)
check: $(STAMP)  ## formatting, lint, layers, types, plain English
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy && $(BIN)/python tools/prose.py
bits house: $(STAMP)  # bits: hashes of weights in every configuration; house: sizes, and the way of one call
	@$(BIN)/python -W ignore -m tests.meta.$@ $(ARGS)
promises: $(STAMP)  # write docs/promises.md from tests/promises.toml and the tests' markers
	@$(BIN)/python -m tests.promises
docs: .venv/.docs  ## build the site into out/site; open out/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
wheels: .venv/.wheels  # build and check the sdist and the wheels of two machines; try ours in an empty environment
	@rm -rf dist build/empty; $(BIN)/python -m hatchling build -t sdist
	@for machine in x86_64 aarch64; do PHALANX_WHEEL=$$machine $(BIN)/python -m hatchling build -t wheel || exit 1; done
	@for wheel in dist/*.whl; do $(BIN)/python -m auditwheel show $$wheel | grep -A1 'following platform tag' || exit 1; done
	@$(BIN)/python -m twine check --strict dist/* && "$(PYTHON)" -m venv build/empty
	@build/empty/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*$$(uname -m).whl
	@cd build && empty/bin/phalanx train digits --model mlp --epochs 1 --out empty/run && empty/bin/python -c 'from phalanx import tables; tables.TableGroup'
bench: $(STAMP)  ## run all benchmarks into out/bench (half an hour)
	@$(BIN)/python -m benchmarks all $(ARGS)
chaos: $(STAMP)  # kill workers, servers and ranks at random, and mutate messages
	@for each in $(CHAOS); do $(BIN)/python -W ignore -m tests.chaos.$$each $(ARGS) || exit 1; done
night: $(STAMP)  # all tests, also those marked `night`, and the matrix
	@$(PYTEST) -m "night or not night" $(or $(ARGS),tests)
	@[ -n "$(ARGS)" ] || TEST_DEVICES=2 $(BIN)/python -m pytest -m "devices or gpu" --device dev $(ON_DEVICE) $(AT_NIGHT)
	@[ -n "$(ARGS)" ] || TEST_DEVICES=2 TEST_DEV_FIRST=1 $(BIN)/python -m pytest -m devices --device dev $(filter-out tests/device,$(ON_DEVICE)) $(AT_NIGHT)
	@[ -n "$(ARGS)" ] || $(MAKE) matrix
gpu: $(STAMP)  ## run the tests for a GPU, and the benchmark beside nn.DataParallel and DDP over NCCL
	@$(BIN)/python -m pytest -m "devices or gpu" --device cuda $(or $(ARGS),$(ON_DEVICE) $(AT_NIGHT)) && $(BIN)/python -m benchmarks step --device cuda
clean:  ## remove .venv and what tools left behind
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
