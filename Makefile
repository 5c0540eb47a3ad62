# make demo   a live distillation on screen (headless without a terminal)
# make test   the whole suite               make check   format, lint, types, import layers
# Both make .venv first, at the versions in constraints.txt.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
export PIP_NO_INPUT = 1

.PHONY: demo test check format soak fuzz gpu wheel clean

demo: .venv/.installed
	@$(BIN)/apr-workbench demo $(ARGS)

test: .venv/.dev
	$(BIN)/python -m pytest -q -n 2 -m "not soak and not fuzz" --ignore tests/interpreted $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 tests/interpreted

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: .venv/.dev
	$(BIN)/python -m pytest -q -m "soak and not fuzz" --timeout=3600 $(ARGS)

fuzz: .venv/.dev
	$(BIN)/python -m pytest -q -m fuzz --timeout=3600 $(ARGS)

gpu: .venv/.dev
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

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
