# make demo   a live distillation on screen (headless without a terminal); with ARGS=--chat on conversations, with ARGS=--on-policy on the student's own text
# make demo-watch   somebody's script on the Trainer of transformers, watched, and its mistake named
# make real   two models on the hub to a published student, with a report
# make test   the whole suite               make check   format, lint, types, import layers
# make contracts   run what the contracts promise, then plant each bug and see it caught
# make ci     what .ci/run runs: check, current-docs, promises, test
# make mutants   plant each defect of tests/mutants in a copy of this tree: a test, or `engine verify`, notices it
# make perf   what asserts times, alone     make soak   the long proofs, to the end, with a list of what failed
# make frameworks   `engine watch` on scripts of Transformers, TRL, Lightning, Accelerate, and of two ranks; labels beside TRL's
# All make .venv first, at the versions in constraints.txt.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN = .venv/bin
# Modules are compiled when they are imported: most of what is installed never is.
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
export PIP_NO_INPUT = 1

.PHONY: demo demo-watch real ci test suite interpreted unit orders perf skips docs current-docs check types style contracts promises untested drills format soak attack notebooks fuzz gpu peers frameworks wheel mutants clean

demo: .venv/.installed
	@$(BIN)/apr-workbench demo $(ARGS)

# The script knows nothing of the engine.
demo-watch: .venv/.watch-demo
	@$(BIN)/engine watch -- $(BIN)/python notebooks/watch_demo.py $(ARGS)

# From two models on the hub to a published student on one GPU; the same command goes on where it stopped. OUT keeps it.
TEACHER ?= Qwen/Qwen2.5-1.5B
STUDENT ?= Qwen/Qwen2.5-0.5B
DATA ?= python-stdlib
STEPS ?= 500
OUT ?= runs/real
# transformers and `hf` are installed together with it.
real: .venv/.watch-demo
	@$(BIN)/python evidence/real/real.py --teacher "$(TEACHER)" --student "$(STUDENT)" --data "$(DATA)" --steps $(STEPS) --out "$(OUT)" \
		$(SET:%=--set %) $(if $(HUMANEVAL),--humaneval "$(HUMANEVAL)") $(if $(filter-out 0,$(OFFLINE)),--offline)

# Files of tests lie in memory where 4 GiB of it are free for that: many wait for a disk at each line.
IN_MEMORY = $(shell test "$$(df --output=avail -B 1M /dev/shm 2>/dev/null | tail -1)" -ge 4096 2>/dev/null && echo PYTEST_DEBUG_TEMPROOT=/dev/shm)

# What a machine with nothing but Python skips, and for lack of what: a skip that is not in it fails.
SKIPS = tests/skips.tsv

# Kernels are interpreted in the time in which the other tests wait for something; at a lower priority than 5 the
# work of others on the machine would leave them no time at all.
test: .venv/.dev
	@$(MAKE) --no-print-directory -j 2 suite interpreted
	@cat build/skipped.txt

PYTEST = env -u PYTHONDONTWRITEBYTECODE $(IN_MEMORY) $(BIN)/python -m pytest
SUITE = $(PYTEST) -q -n 2 -m "not soak and not fuzz" --ignore $(INTERPRETED)
suite: .venv/.dev
	$(SUITE) --dist worksteal --known-skips $(SKIPS) --say-skips build/skipped.txt $(ARGS)

interpreted: .venv/.dev
	TRITON_INTERPRET=1 nice -n 5 $(PYTEST) -q -m "not soak" $(INTERPRETED)

# The tests that start no process, in about a minute.
unit: .venv/.dev
	$(SUITE) --dist worksteal --known-skips $(SKIPS) tests/unit $(ARGS)

# The suite in other orders: no test may need what another left behind.
orders: .venv/.dev
	$(SUITE) --dist worksteal --reverse $(ARGS)
	$(SUITE) --dist loadfile $(ARGS)

# The list of skips anew, on a machine that lacks all that the list is about; its difference is to be read.
skips: .venv/.dev
	$(SUITE) --dist worksteal --write-skips $(SKIPS) $(ARGS)

# What asserts a time, with nothing beside it; elsewhere these tests assert all but their times.
# `make perf ARGS=--collect-only` lists them.
perf: .venv/.dev
	APR_MEASURE_TIMES=1 $(PYTEST) -v -m "perf and not fuzz" --timeout=3600 $(ARGS)

check: .venv/.dev
	@$(MAKE) --no-print-directory -j 2 types style

types: .venv/.dev
	$(BIN)/mypy

style: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

# Unknown (exit 2) is not a failure of the code: a test of a GPU is unknown where there is none.
RECEIPTS ?= evidence/contracts
contracts: .venv/.dev
	$(BIN)/engine contracts validate
	$(BIN)/engine contracts run --jobs 2 --receipts $(RECEIPTS) $(ARGS) || test $$? -eq 2

promises: .venv/.dev
	$(BIN)/engine contracts validate

# Types take one core for a minute without a cache; the others run one after the other beside them, interpreted
# kernels last, which take as long.
untested: .venv/.dev
	@$(MAKE) --no-print-directory -j 2 types style current-docs promises interpreted

# What CI runs, what fails soonest first; each part says how long it took. Short runs of the demo, and a drill of each
# kind, are in the suite.
CI = untested suite
ci: .venv/.dev
	@begin=$$(date +%s); for part in $(CI); do \
		echo "== make $$part"; from=$$(date +%s); \
		$(MAKE) --no-print-directory $$part; code=$$?; now=$$(date +%s); \
		if test $$code -ne 0; then echo "== make $$part failed after $$((now - from)) s" >&2; exit 1; fi; \
		echo "== make $$part: $$((now - from)) s, $$((now - begin)) s in all"; \
	done
	@cat build/skipped.txt

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

# Each drill that a CPU is enough for must name its incident; one that needs more is unknown (exit 2) where there is no more.
drills_where = $(BIN)/engine drill --list --json | \
	$(BIN)/python -c "import json, sys; print(*(one['id'] for one in json.load(sys.stdin) if $(1)))"
drills: .venv/.dev
	$(call drills_where,not one['needs']) | xargs -n 4 -P 2 $(BIN)/engine drill
	$(BIN)/engine drill $$($(call drills_where,one['needs'])) || test $$? -eq 2

# To the end whatever fails, and then the list of it. What asserts a time is run by `make perf`.
INTERPRETED = tests/unit/kernels/interpreted
soak: .venv/.dev
	$(PYTEST) -v -rfE -n 2 -m "soak and not fuzz and not perf" --ignore $(INTERPRETED) --timeout=3600 $(ARGS); first=$$?; \
	TRITON_INTERPRET=1 $(PYTEST) -v -rfE -n 2 -m soak $(INTERPRETED) && exit $$first

# Each defect of tests/mutants/mutants.tsv in a copy of this tree; `make mutants ARGS=labels_rolled` plants one.
mutants: .venv/.dev
	$(BIN)/python -m tests.mutants.run $(ARGS)

# Hostile inputs, programs, logs and signals from seeds: part of soak, a quarter of an hour on two cores.
attack: .venv/.dev
	$(BIN)/python -m pytest -v -n 2 -m attack --timeout=900 $(ARGS)

# The notebooks in a real JupyterLab and Chromium; pictures of what was seen go to build/screenshots.
notebooks: .venv/.dev
	APR_SCREENSHOTS=$${APR_SCREENSHOTS:-build/screenshots} $(BIN)/python -m pytest -v -m soak --timeout=1800 tests/system/workbench/notebook/test_browser.py tests/system/workbench/notebook/test_page.py $(ARGS)

fuzz: .venv/.dev
	$(BIN)/python -m pytest -q -m fuzz --timeout=3600 $(ARGS)

# Four at a time; what measures memory or time has the GPU to itself.
gpu: .venv/.dev
	$(BIN)/python -m pytest -q -m gpu -n 4 $(ARGS)

# The other programs that `engine publish --verify` asks; llama.cpp is compiled, which takes minutes.
peers: .venv/.dev
	$(PIP) --editable ".[peers]"
	$(BIN)/python -m pytest -v tests/system/export/test_publish_verify.py $(ARGS)

# The frameworks whose scripts `engine watch` is tried on, one at a time: a script of two ranks is six processes.
# Then the labels of conversations beside those of TRL's own trainer.
frameworks: .venv/.frameworks
	$(PYTEST) -v --timeout=900 tests/system/attach/test_frameworks.py tests/system/attach/test_ranks.py \
		tests/system/data/test_chat_masks_trl.py $(ARGS)

# Two, of which no file is in both: for looking, without torch, and the rest.
wheel: .venv/.dev
	rm -rf build/lib build/whole
	$(BIN)/python -m build --wheel --outdir build/whole
	$(BIN)/python -m wheels.split build/whole/*.whl dist

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "make: expected Python 3.11 or newer with venv, found none (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing into .venv (first time only; torch is large)" >&2
	$(PIP) --editable .
	@touch $@

.venv/.watch-demo: .venv/.installed
	@echo "installing transformers and accelerate into .venv (first time only)" >&2
	$(PIP) --editable ".[watch-demo]"
	@touch $@

.venv/.dev: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing into .venv (first time only; torch is large)" >&2
	$(PIP) --editable ".[dev]"
	@touch .venv/.installed .venv/.watch-demo $@

.venv/.frameworks: .venv/.dev
	$(PIP) --editable ".[frameworks]"
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
