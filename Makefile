# Two commands do everything on a bare machine with Python 3.11 or 3.12: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test lint types unit suite chaos long bench docs lock clean

help:  ## what can be made
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## the virtual environment .venv with exact versions

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 12) else f"manyhands needs Python 3.11 or 3.12, and $(PYTHON) is {v[0]}.{v[1]}: try  make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@echo "Setting up $(VENV) (once; about a minute) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup  ## train the first example on two workers and show the result
	@$(BIN)/manyhands train examples/digits.py --strategy allreduce --workers 2

test: setup lint types unit  ## everything that continuous integration checks

lint: setup  ## ruff: format and lint
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet .

types: setup  ## mypy on src
	@$(BIN)/mypy

WHOLE := tests/api tests/chaos tests/cli tests/examples tests/hosts tests/strategies
THREADS := tests/strategies/test_in_process.py tests/strategies/test_pairs_in_process.py

unit: setup  ## the tests, in two processes: those of whole runs mostly wait
	@others=$$(mktemp); { $(BIN)/python -m pytest $(WHOLE:%=--ignore=%); one=$$?; \
		$(BIN)/python -m pytest --core 0 $(THREADS) && exit $$one; } > $$others 2>&1 & others_id=$$!; \
	$(BIN)/python -m pytest $(WHOLE) $(THREADS:%=--ignore=%); whole=$$?; \
	wait $$others_id; other=$$?; cat $$others; rm $$others; exit $$((whole + other))

suite: setup  ## the conformance suite with threads: all strategies and pairs, in less than a minute on two cores
	@began=$$(date +%s); log=$$(mktemp); pytest="$(BIN)/python -m pytest -q $(THREADS)"; \
	$$pytest --core 1 --part 2/2 > $$log 2>&1 & second_id=$$!; \
	$$pytest --core 0 --part 1/2; first=$$?; \
	wait $$second_id; second=$$?; cat $$log; rm $$log; \
	echo "all of it in $$(($$(date +%s) - began)) s"; exit $$((first + second))

chaos: setup  ## kill over 200 members of runs, and check that no sample was lost or counted twice
	@$(BIN)/python -m manyhands.testing.chaos

long: setup  ## the long tests; says at the end how long they took
	@$(BIN)/python -m pytest -m long

bench: setup  ## the overhead over a hand-written DDP loop
	@$(BIN)/python benchmarks/overhead.py

docs: setup  ## the documentation as a site, in site/; a warning or a dead link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict && echo "site/index.html"

lock: setup  ## write requirements.lock anew from what .venv holds
	@{ sed -n '/^#/p' requirements.lock; $(BIN)/python -m pip freeze --all --exclude-editable \
		| grep -viE '^(pip|setuptools|wheel)==' | sed -E 's/\+(cpu|cu[0-9]+)$$//'; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache
