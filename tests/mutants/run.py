"""Plant each defect of `mutants.tsv` in a copy of this tree, and report what notices it.

    python -m tests.mutants.run                      every mutant; --jobs 2 at a time
    python -m tests.mutants.run labels_rolled ...    these
    python -m tests.mutants.run --kind data store    all of these kinds

A mutant is killed by a test that fails in the mutated copy, or by `engine verify` of this tree, which finds that a run
made by the mutated copy is not what it says. Which of them is in the table; an empty field is a survivor, with
the reason. Where the table is wrong, in either direction, the exit code is 1.

`edits/NAME.edit` is the defect: the name of a file, and what to put in place of text that it has exactly once.

    engine/data/batches.py
    <<<<<<<
    the text
    =======
    its replacement
    >>>>>>>
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COPIED = ("engine", "workbench", "tests", "contracts", "docs", "pyproject.toml", "apr_workbench.py")
VERIFY, RESUMED = "verify", "resumed"
KINDS = ("data", "step", "saving", "store", "figures", "time")
LIMIT_S = 600.0

SPECS = {"demo": "engine/demo/demo.toml", "chat": "engine/demo/chat.toml"}
STEPS, EVERY = 12, 6
SHORT = (
    f"train.steps={STEPS} train.warmup_steps=4 train.rows=4 data.max_bytes=400000 eval.rows=8"
    f" eval.every={EVERY} checkpoint.every={EVERY} checks.enabled=false checks.every=-1 checks.on_fail=report"
).split()
"""Settings of a run of a few seconds. The run's own checks are off: what notices the mutant is not the mutant."""


class EditError(Exception):
    """An edit whose text is not in its file exactly once."""


@dataclass(frozen=True)
class Mutant:
    name: str
    kind: str
    run: str
    """What to train for `verify`: demo or chat, `resumed`, and settings. Empty: no run shows it."""
    killed_by: str
    """Names of tests, or `verify`. Empty: nothing."""
    what: str
    why: str
    """Why a survivor survives."""

    @property
    def tests(self) -> list[str]:
        return [] if self.killed_by == VERIFY else self.killed_by.split()


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str


def read_table(path: Path = HERE / "mutants.tsv") -> list[Mutant]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Mutant(**row) for row in rows]


def read_edits(name: str) -> list[Edit]:
    """Read the edits of a mutant."""
    text = (HERE / "edits" / f"{name}.edit").read_text(encoding="utf-8")
    found, file, end = [], "", 0
    for block in re.finditer(r"(\S+\.\w+\n)?<{7}\n((?:.*\n)*?)={7}\n((?:.*\n)*?)>{7}\n", text):
        file = (block[1] or file).strip()
        if block.start() != end or not file:
            raise EditError(f"{name}: expected a file name and <<<<<<<, found {text[end:][:60]!r}")
        found.append(Edit(file, block[2], block[3]))
        end = block.end()
    if end != len(text) or not found:
        raise EditError(f"{name}: expected blocks of <<<<<<< ======= >>>>>>>, found {text[end:]!r}")
    return found


def mutated(name: str, root: Path = ROOT) -> dict[str, str]:
    """Return the changed files of a mutant by path. Raises EditError where a text is not there exactly once."""
    files: dict[str, str] = {}
    for edit in read_edits(name):
        text = files.get(edit.file) or (root / edit.file).read_text(encoding="utf-8")
        # From the beginning of a line.
        count = f"\n{text}".count(f"\n{edit.old}")
        if count != 1:
            raise EditError(f"{name}: expected once in {edit.file}, found {count} of:\n{edit.old}")
        files[edit.file] = f"\n{text}".replace(f"\n{edit.old}", f"\n{edit.new}")[1:]
    return files


def copy_tree(folder: Path) -> None:
    """Copy what runs and tests read of this tree. Compiled modules come along: few of them change."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True)
        else:
            shutil.copy2(source, folder / name)


def plant(name: str, folder: Path) -> None:
    for file, text in mutated(name, folder).items():
        path = folder / file
        path.write_text(text, encoding="utf-8")
        # A file of the same size in the same second would be taken for the one that was compiled.
        os.utime(path, (1, 1))


def environment(tree: Path, cache: Path) -> dict[str, str]:
    """The environment of a process that imports `tree`, without the settings of a suite that runs this."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "APR_", "PYTHON"))
    }
    paths = os.pathsep.join((str(tree), str(tree / "engine/attach/probe")))
    return kept | {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}


def _process(words: Sequence[object], tree: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=tree,
        env=environment(tree, cache),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def failed_test(tests: Sequence[str], tree: Path, scratch: Path) -> str | None:
    """Return the first of `tests` that fails in `tree`; None where all pass."""
    words = ("pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-rfE", "--tb=no")
    done = _process((*words, f"--basetemp={scratch / 'pytest'}", *tests), tree, scratch / "cache")
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or found is None:
        raise RuntimeError(
            f"pytest {tests}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return found[1]


def verified(run_of: str, tree: Path, scratch: Path) -> str | None:
    """Train with `tree` and verify the run with this tree; return what differs, or that the run failed; None where
    nothing does."""
    spec, *words = run_of.split()
    resumed = RESUMED in words
    sets = [*SHORT, *(word for word in words if word != RESUMED)]
    if resumed:
        sets.append(f"train.stop_after={EVERY}")
    run = scratch / "run"

    def train(*words: object) -> subprocess.CompletedProcess[str]:
        # Its own cache: tokens made by a mutant are not those of others.
        return _process(("engine", "distill", *words), tree, scratch / "cache")

    trained = train(SPECS[spec], *(part for one in sets for part in ("--set", one)), "--out", run)
    if resumed:
        changed = ("--set", "train.stop_after=0", "--allow-change", "train.stop_after")
        trained = train("--resume", run, *changed)
    if trained.returncode:
        return f"the run: exit {trained.returncode}: {trained.stderr.strip()[-300:]}"
    done = _process(("engine", "verify", run, "--all", "--json"), ROOT, scratch / "clean-cache")
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"engine verify: exit {done.returncode}\n{done.stderr[-2000:]}")
    return f"{VERIFY}: {json.loads(done.stdout)['reason']}" if done.returncode == 1 else None


def killer(mutant: Mutant, folder: Path) -> str | None:
    """Return what kills a mutant, None for a survivor: a test of the table, else `verify` where it has a run."""
    with tempfile.TemporaryDirectory(prefix=f"{mutant.name}-", dir=folder) as name:
        scratch = Path(name)
        tree = scratch / "tree"
        tree.mkdir()
        copy_tree(tree)
        plant(mutant.name, tree)
        if mutant.tests and (failed := failed_test(mutant.tests, tree, scratch)):
            return failed
        return verified(mutant.run, tree, scratch) if mutant.run else None


def judge(mutant: Mutant, found: str | None) -> str:
    """Return what is wrong with the table's line about a mutant; empty where nothing is."""
    if not mutant.killed_by:
        return "" if found is None else f"expected a survivor, found {found}"
    # A test has its parameters behind its name.
    if found is not None and any(found.startswith(name) for name in mutant.killed_by.split()):
        return ""
    return f"expected {mutant.killed_by}, found {found or 'nothing'}"


def control(table: Sequence[Mutant], folder: Path, jobs: int) -> list[str]:
    """Return what tests and `verify` find in a copy without a mutant, which kills nothing."""
    scratch = folder / "control"
    tree = scratch / "tree"
    tree.mkdir(parents=True)
    copy_tree(tree)
    tests = sorted({test for mutant in table for test in mutant.tests})
    failed = failed_test(tests, tree, scratch) if tests else None
    runs = sorted({mutant.run for mutant in table if mutant.run})

    def differs(run_of: str) -> str | None:
        with tempfile.TemporaryDirectory(dir=scratch) as name:
            return verified(run_of, tree, Path(name))

    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(runs, pool.map(differs, runs), strict=True))
    return [
        *([f"{failed} fails"] if failed else []),
        *(f"{run_of}: {what}" for run_of, what in found.items() if what),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="these mutants; none: all")
    parser.add_argument("--kind", nargs="*", choices=KINDS, help="all mutants of these kinds")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    table = read_table()
    if unknown := set(options.names) - {one.name for one in table}:
        parser.error(f"not in the table: {', '.join(sorted(unknown))}")
    if options.names or options.kind:
        table = [m for m in table if m.name in options.names or m.kind in (options.kind or ())]
    wrong, survivors = 0, []
    with tempfile.TemporaryDirectory(prefix="apr-mutants-") as name:
        folder = Path(name)
        if found_without := control(table, folder, options.jobs):
            print("without a mutant:", *found_without, sep="\n  ", file=sys.stderr)
            return 1
        with ThreadPoolExecutor(options.jobs) as pool:
            for mutant, found in zip(
                table, pool.map(lambda one: killer(one, folder), table), strict=True
            ):
                problem = judge(mutant, found)
                wrong += bool(problem)
                said = problem or found or f"survives: {mutant.why}"
                mark = "WRONG" if problem else "ok"
                print(f"{mark:5}  {mutant.kind:7}  {mutant.name:34}  {said}", flush=True)
                if found is None:
                    survivors.append(mutant)
    print(f"{len(table) - len(survivors)} of {len(table)} killed", end="")
    in_time = [m for m in table if m.kind == "time"]
    slow = [m for m in survivors if m.kind == "time"]
    print(f"; {len(in_time) - len(slow)} of {len(in_time)} of those in time")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
