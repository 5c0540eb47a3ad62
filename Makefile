# make demo   a live distillation on screen (headless without a terminal)
# make test   the whole suite               make check   format, lint, types, import layers
# make contracts   run what the contracts promise, then plant each bug and see it caught
# All make .venv first, at the versions in constraints.txt.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
export PIP_NO_INPUT = 1

.PHONY: demo test unit docs check contracts format soak attack notebooks fuzz gpu peers wheel clean

demo: .venv/.installed
	@$(BIN)/apr-workbench demo $(ARGS)

# Files of tests lie in memory where 4 GiB of it are free for that: many wait for a disk at each line.
IN_MEMORY = $(shell test "$$(df --output=avail -B 1M /dev/shm 2>/dev/null | tail -1)" -ge 4096 2>/dev/null && echo PYTEST_DEBUG_TEMPROOT=/dev/shm)

# Hundreds of processes are started: without bytecode each compiles the engine anew.
test: .venv/.dev
	env -u PYTHONDONTWRITEBYTECODE $(IN_MEMORY) $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not soak and not fuzz" --ignore tests/unit/kernels/interpreted $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m "not soak" tests/unit/kernels/interpreted

# The tests that start no process.
unit: .venv/.dev
	$(IN_MEMORY) $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not soak and not fuzz" tests/unit --ignore tests/unit/kernels/interpreted $(ARGS)

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Unknown (exit 2) is not a failure of the code: a test of a GPU is unknown where there is none.
contracts: .venv/.dev
	$(BIN)/engine contracts validate
	$(BIN)/engine contracts run --jobs 2 $(ARGS) || test $$? -eq 2

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The reference pages from the code, then all pages as a site in build/site; a broken link fails.
docs: .venv/.dev
	$(BIN)/python docs/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

soak: .venv/.dev
	$(BIN)/python -m pytest -v -n 2 -m "soak and not fuzz" --timeout=3600 --ignore tests/unit/kernels/interpreted $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -v -n 2 -m soak tests/unit/kernels/interpreted

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
