# make demo   a live distillation on screen (headless without a terminal)
# make test   the whole suite               make check   format, lint, types, import layers
# make contracts   run what the contracts promise, then plant each bug and see it caught
# make ci     all of it and more, bounded: what .ci/run runs
# All make .venv first, at the versions in constraints.txt.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
export PIP_NO_INPUT = 1

.PHONY: demo ci test suite interpreted unit docs current-docs check contracts drills format soak bounded-soak attack notebooks fuzz gpu peers wheel clean

demo: .venv/.installed
	@$(BIN)/apr-workbench demo $(ARGS)

# Files of tests lie in memory where 4 GiB of it are free for that: many wait for a disk at each line.
IN_MEMORY = $(shell test "$$(df --output=avail -B 1M /dev/shm 2>/dev/null | tail -1)" -ge 4096 2>/dev/null && echo PYTEST_DEBUG_TEMPROOT=/dev/shm)

# Kernels are interpreted in the time in which the other tests wait for something.
test: .venv/.dev
	@$(MAKE) --no-print-directory -j 2 suite interpreted

# Without bytecode each of hundreds of processes compiles the engine anew, and each worker the tests.
suite: .venv/.dev
	env -u PYTHONDONTWRITEBYTECODE $(IN_MEMORY) $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not soak and not fuzz" --ignore $(INTERPRETED) $(ARGS)

interpreted: .venv/.dev
	TRITON_INTERPRET=1 nice -n 19 $(BIN)/python -m pytest -q -m "not soak" $(INTERPRETED)

# The tests that start no process, in about a minute.
unit: .venv/.dev
	env -u PYTHONDONTWRITEBYTECODE $(IN_MEMORY) $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not soak and not fuzz" tests/unit --ignore tests/unit/kernels/interpreted $(ARGS)

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Unknown (exit 2) is not a failure of the code: a test of a GPU is unknown where there is none.
RECEIPTS ?= evidence/contracts
contracts: .venv/.dev
	$(BIN)/engine contracts validate
	$(BIN)/engine contracts run --jobs 2 --receipts $(RECEIPTS) $(ARGS) || test $$? -eq 2

# What CI runs, what fails soonest first; each part says how long it took.
CI = check current-docs test drills contracts bounded-soak
ci: .venv/.dev
	@begin=$$(date +%s); for part in $(CI); do \
		echo "== make $$part"; from=$$(date +%s); \
		$(MAKE) --no-print-directory RECEIPTS=build/contracts $$part; code=$$?; now=$$(date +%s); \
		if test $$code -ne 0; then echo "== make $$part failed after $$((now - from)) s" >&2; exit 1; fi; \
		echo "== make $$part: $$((now - from)) s, $$((now - begin)) s in all"; \
	done

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The reference pages from the code, then all pages as a site in build/site; a broken link fails.
docs: .venv/.dev
	$(BIN)/python docs/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Fails, with the difference, where a page that is made from the code is not what the code says.
current-docs: .venv/.dev
	rm -rf build/docs-before && mkdir -p build && cp -r docs build/docs-before
	$(MAKE) --no-print-directory docs
	diff -r --exclude=__pycache__ build/docs-before docs

# Each drill that a CPU is enough for must name its defect; one that needs more is unknown (exit 2) where there is no more.
drills_where = $(BIN)/engine drill --list --json | \
	$(BIN)/python -c "import json, sys; print(*(one['id'] for one in json.load(sys.stdin) if $(1)))"
drills: .venv/.dev
	$(call drills_where,not one['needs']) | xargs -n 4 -P 2 $(BIN)/engine drill
	$(BIN)/engine drill $$($(call drills_where,one['needs'])) || test $$? -eq 2

# What measures time is run alone, not beside another worker.
MEASURED = tests/system/workbench/test_budget.py tests/system/workbench/test_million.py
INTERPRETED = tests/unit/kernels/interpreted
BESIDE = -n 2 -m "soak and not fuzz" $(addprefix --ignore ,$(MEASURED) $(INTERPRETED))
soak: .venv/.dev
	$(BIN)/python -m pytest -v $(BESIDE) --timeout=3600 $(ARGS)
	$(BIN)/python -m pytest -v -m soak --timeout=3600 $(MEASURED)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -v -n 2 -m soak $(INTERPRETED)

# Some of it each time, in an order that is drawn; what did not fit is skipped by that reason. `make drills` runs the drills.
SOAK_MINUTES ?= 20
BOUNDED = env -u PYTHONDONTWRITEBYTECODE $(IN_MEMORY) $(BIN)/python -m pytest -v --maxschedchunk 1 --timeout=600
bounded-soak: .venv/.dev
	$(BOUNDED) --soak-minutes $(SOAK_MINUTES) $(BESIDE) --deselect tests/system/drills/test_drill_runs.py::test_every_drill_is_named_or_says_why_it_cannot_be_tried $(ARGS)
	$(BOUNDED) --soak-minutes 3 -m soak $(MEASURED)
	TRITON_INTERPRET=1 $(BOUNDED) --soak-minutes 2 -n 2 -m soak $(INTERPRETED)

# Hostile inputs, programs, logs and signals from seeds: part of soak, a quarter of an hour on two cores.
attack: .venv/.dev
	$(BIN)/python -m pytest -v -n 2 -m attack --timeout=900 $(ARGS)

# The notebooks in a real JupyterLab and Chromium; pictures of what was seen go to build/screenshots.
notebooks: .venv/.dev
	APR_SCREENSHOTS=$${APR_SCREENSHOTS:-build/screenshots} $(BIN)/python -m pytest -v -m soak --timeout=1800 tests/system/workbench/notebook/test_browser.py tests/system/workbench/notebook/test_page.py $(ARGS)

fuzz: .venv/.dev
	$(BIN)/python -m pytest -q -m fuzz --timeout=3600 $(ARGS)

gpu: .venv/.dev
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

# The other programs that `engine publish --verify` asks; llama.cpp is compiled, which takes minutes.
peers: .venv/.dev
	$(PIP) --editable ".[peers]"
	$(BIN)/python -m pytest -v tests/system/export/test_publish_verify.py $(ARGS)

wheel: .venv/.dev
	$(BIN)/python -m build --wheel

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "make: expected Python 3.11 or newer with venv, found none (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing into .venv (first time only; torch is large)" >&2
	$(PIP) --editable .
	@touch $@

.venv/.dev: .venv/.installed
	$(PIP) --editable ".[dev]"
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
