"""Do the tests still prove as much? Branch coverage, and the share of sampled mutants that the tests catch.

    python evidence/redesign/mutants.py arm --arm before --before DIR --after DIR --out DIR
    python evidence/redesign/mutants.py arm --arm after --before DIR --after DIR --out DIR
    python evidence/redesign/mutants.py compare --out DIR

Both arms draw the same sample from the two checkouts and the seed (`mutations.py` says how), so they can run on
different days. An arm works in a copy of its checkout and goes through three steps, each within its time:

1. The suite without GPU, soak and fuzz tests runs with branch coverage, in all processes that tests start too.
   For each place of the sample it is recorded which tests run it (`recorder.py`).
2. Tests that failed run again without coverage. What fails then fails because of the machine: it is listed, not used.
3. Each mutant gets a copy of the tree with one file replaced, first on PYTHONPATH. Tests that run the mutated lines
   are run, those of least seconds and of least code first, at most `--tests-each` and `--seconds-each` (as they
   took in step 1), until one fails. A test that hangs has caught the mutant; a place that no test runs has survived.
   At last the tests that caught something run once more without any mutant: what fails then has caught nothing.

Results are written as they come: ARM-mutants.jsonl (a line for each), ARM-coverage.json, ARM-tests.json and ARM.json.
`compare` prints both arms and the difference with its 95 % interval.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mutations
from mutations import Place

HERE = Path(__file__).resolve().parent
NOT_COPIED = {"build", "dist", "runs", "__pycache__"}
LEFT_OUT = "not gpu and not soak and not fuzz"
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "recorder_pytest"),
    *("-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:pytest_cov", "-p", "no:randomly"),
    "--hypothesis-seed=0",
)
COVERAGE = """
[run]
branch = true
parallel = true
core = ctrace
data_file = {work}/data/c
include =
    {base}/engine/*
    {base}/workbench/*
patch = _exit
disable_warnings = {quiet}
"""
QUIET = (
    *("couldnt-parse", "trace-changed", "module-not-python", "module-not-imported"),
    *("no-data-collected", "module-not-measured", "no-ctracer", "include-ignored"),
)


@dataclass
class Test:
    """What step 1 saw of a test."""

    seconds: float = 0.0
    outcome: str = "passed"
    why: str = ""
    size: int = 0
    """Pairs of lines of the product that ran: how much a test runs beside what it is about."""
    shared: list[str] = field(default_factory=list)
    """Fixtures of modules and sessions that it uses."""


@dataclass
class Seen:
    """What all recorders wrote down."""

    tests: dict[str, Test]
    runs: dict[int, set[str]]
    """Place -> tests and fixtures that run it."""
    imports: set[int]
    """Places that ran outside of tests: while modules were imported."""
    files: dict[str, set[str]]
    """File -> tests that run some of it."""


class Arm:
    """One checkout, its copy, and how far the work has come."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.name = options, str(options.arm)
        self.began = time.monotonic()
        self.out = Path(options.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        # Where there is room in memory, tests do not wait for a disk.
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and shutil.disk_usage(memory).free > 6 << 30
        self.work = Path(tempfile.mkdtemp(prefix="m.", dir=memory if roomy else None))
        self.base = self.work / "base"
        self.hook = self.work / "hook"
        self.results: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.going: set[int] = set()
        self.over = threading.Event()

    def left_s(self) -> float:
        return float(self.options.limit) - (time.monotonic() - self.began)

    def _mutants_left_s(self) -> float:
        return self.left_s() - float(self.options.confirm_limit)

    def say(self, text: str) -> None:
        print(f"[{self.name} {time.monotonic() - self.began:4.0f} s] {text}", flush=True)

    # --- what processes get

    def prepare(self, tree: Path, places: list[Place]) -> None:
        def left_out(folder: str, names: list[str]) -> set[str]:
            top = Path(folder) == tree
            return {
                name
                for name in names
                if name in NOT_COPIED
                or name.endswith(".egg-info")
                or (top and name.startswith(".") and name != ".ci")
            }

        shutil.copytree(tree, self.base, symlinks=True, ignore=left_out)
        self.hook.mkdir()
        for name in ("recorder.py", "recorder_pytest.py"):
            shutil.copy(HERE / name, self.hook)
        (self.hook / "sitecustomize.py").write_text("import recorder\n\nrecorder.start()\n")
        index: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for place in places:
            index[str(self.base / place.file)].append((*place.lines, place.number))
        (self.work / "places.json").write_text(json.dumps(index))
        (self.work / "data").mkdir()
        (self.work / "coveragerc").write_text(
            COVERAGE.format(work=self.work, base=self.base, quiet=",".join(QUIET))
        )

    def environment(self, tree: Path, records: Path, **more: str) -> dict[str, str]:
        """Product code comes from `tree`, in children too, wherever they run."""
        records.mkdir(parents=True, exist_ok=True)
        inherited = os.environ.get("PYTHONPATH", "")
        dropped = ("PYTHONDONTWRITEBYTECODE", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
        return {key: value for key, value in os.environ.items() if key not in dropped} | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self.hook), str(tree), inherited))),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "RECORDER_OUT": str(records),
            **more,
        }

    def run(
        self, command: list[str], tree: Path, environment: dict[str, str], log: Path, limit_s: float
    ) -> int | None:
        """The exit code; None when time was over, and then nothing that it started lives on."""
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                cwd=tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.going.add(child.pid)
            try:
                return child.wait(max(limit_s, 1.0))
            except subprocess.TimeoutExpired:
                return None
            finally:
                self.going.discard(child.pid)
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                _end_strays(environment["RECORDER_OUT"])

    # --- step 1

    def cover(self) -> None:
        """The suite under coverage; kernels in Triton's interpreter beside it, in a process of their own."""
        options = self.options
        deadline = min(float(options.coverage_limit), self.left_s() - 30)
        wanted = {
            "COVERAGE_PROCESS_START": str(self.work / "coveragerc"),
            "RECORDER_PLACES": str(self.work / "places.json"),
            "RECORDER_DEADLINE": str(time.time() + deadline),
        }
        interpreted = [
            str(path.relative_to(self.base)) for path in self.base.glob("tests/**/interpreted")
        ]
        workers = ["-n", str(options.workers), "--dist", "worksteal", "--timeout=120"]
        suite = [*PYTEST, *workers, "-m", LEFT_OUT, *(f"--ignore={path}" for path in interpreted)]
        named = [one for one in options.tests if not _is_interpreted(one)]
        if options.tests:
            interpreted = [one for one in options.tests if _is_interpreted(one)]
        suite += [f"--basetemp={self.work / 'b1'}", *named]
        aside = [*PYTEST, "-n", str(max(options.workers // 4, 1)), "--timeout=120", "-m", LEFT_OUT]
        aside += [f"--basetemp={self.work / 'b2'}", *interpreted]
        # Each has a folder for its records, which also says what is to be ended with it.
        jobs = []
        if named or not options.tests:
            folder = self.work / "records/suite"
            jobs.append((suite, self.environment(self.base, folder, **wanted), "suite"))
        if interpreted:
            wanted["TRITON_INTERPRET"] = "1"
            folder = self.work / "records/interpreted"
            jobs.append((aside, self.environment(self.base, folder, **wanted), "interpreted"))
        with ThreadPoolExecutor() as pool:
            for (_, _, name), code in zip(
                jobs,
                pool.map(
                    lambda job: self.run(
                        job[0], self.base, job[1], self.work / f"{job[2]}.log", deadline + 30
                    ),
                    jobs,
                ),
                strict=True,
            ):
                last = (self.work / f"{name}.log").read_text(errors="replace").splitlines()[-1:]
                self.say(f"{name} under coverage: exit {code}; {' '.join(last)}")
        for folder in ("b1", "b2"):
            shutil.rmtree(self.work / folder, ignore_errors=True)

    def seen(self) -> Seen:
        records = self.work / "records"
        tests: dict[str, Test] = {}
        for one in _lines(records.glob("*/outcome.*")):
            test = tests.setdefault(one["id"], Test())
            test.seconds += one["seconds"]
            if one["outcome"] == "failed" or (
                one["outcome"] != "passed" and test.outcome == "passed"
            ):
                test.outcome = one["outcome"]
                test.why = one["why"]
        seen = Seen(tests, defaultdict(set), set(), defaultdict(set))
        for one in _lines(records.glob("*/test.*")):
            if one["id"] in tests:
                tests[one["id"]].shared = one["fixtures"]
        for one in _lines(records.glob("*/ran.*")):
            by = one["by"]
            if by in tests:
                tests[by].size += one["size"]
            for number in one["places"]:
                if by:
                    seen.runs[number].add(by)
                else:
                    seen.imports.add(number)
            for file in one["files"] if by in tests else ():
                seen.files[file].add(by)
        return seen

    def report_coverage(self) -> None:
        """Add up the data of all processes and count, for each package, lines and branches."""
        data, rc = self.work / "data", f"--rcfile={self.work / 'coveragerc'}"
        files = sorted(str(path) for path in data.glob("c.*"))
        if not files:
            self.say("coverage: no data")
            return
        tool = [sys.executable, "-m", "coverage"]
        inherited = os.environ | {"COVERAGE_FILE": str(self.work / "whole")}

        def combine(part: list[str], into: str) -> None:
            command = [*tool, "combine", "--keep", "-q", rc, f"--data-file={into}", *part]
            subprocess.run(command, cwd=self.base, env=inherited, check=False, capture_output=True)

        parts = [(files[start::8], str(self.work / f"part.{start}")) for start in range(8)]
        parts = [part for part in parts if part[0]]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda part: combine(*part), parts))
        whole = self.work / "whole"
        combine([into for _, into in parts], str(whole))
        product = [str(path) for path in mutations.product_files(self.base)]
        touch = "import coverage, json, sys; d = coverage.CoverageData(sys.argv[1]); d.read(); "
        touch += "d.touch_files(json.load(sys.stdin)); d.write()"
        subprocess.run(
            [sys.executable, "-c", touch, str(whole)],
            input=json.dumps(product),
            text=True,
            env=inherited,
            check=False,
            capture_output=True,
        )
        written = self.work / "coverage.json"
        done = subprocess.run(
            [*tool, "json", "-q", rc, f"--data-file={whole}", "-i", "-o", str(written)],
            cwd=self.base,
            env=inherited,
            capture_output=True,
            text=True,
        )
        if not written.exists():
            self.say(f"coverage: no report: {done.stdout[-400:]} {done.stderr[-400:]}")
            return
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        kept = {}
        for name, file in json.loads(written.read_text())["files"].items():
            summary = file["summary"]
            count = {
                "lines": summary["num_statements"],
                "lines_run": summary["covered_lines"],
                "branches": summary["num_branches"],
                "branches_taken": summary["covered_branches"],
            }
            kept[name] = count | {"lines_missing": file["missing_lines"]}
            for package in (str(Path(name).parent), "all"):
                counts[package].update(count)
        table = {name: dict(counts[name]) for name in sorted(counts, key=lambda n: (n == "all", n))}
        (self.out / f"{self.name}-coverage.json").write_text(
            json.dumps({"packages": table, "files": kept})
        )
        self.say("coverage\n" + coverage_table(table))

    # --- step 2

    def passing(self, wanted: list[str], limit_s: float, name: str) -> set[str]:
        """Which of these tests pass in the tree without a mutant and without coverage."""
        passed = set()
        for interpret in (False, True):
            some = [one for one in wanted if _is_interpreted(one) == interpret]
            if not some:
                continue
            records = self.work / f"{name}{interpret:d}"
            only = self.work / f"{name}.json"
            only.write_text(json.dumps(some))
            environment = self.environment(
                self.base,
                records,
                RECORDER_ONLY=str(only),
                RECORDER_DEADLINE=str(time.time() + limit_s - 10),
                **({"TRITON_INTERPRET": "1"} if interpret else {}),
            )
            files = sorted({one.split("::")[0] for one in some})
            workers = str(min(self.options.workers, len(some)))
            command = [*PYTEST, "-n", workers, "--dist", "worksteal", "--timeout=60", *files]
            self.run(command, self.base, environment, self.work / f"{name}.log", limit_s)
            worst: dict[str, str] = {}
            for one in _lines(records.glob("outcome.*")):
                if worst.get(one["id"], "passed") == "passed":
                    worst[one["id"]] = one["outcome"]
            passed |= {one for one, outcome in worst.items() if outcome == "passed"}
        return passed

    # --- step 3

    def chosen(self, place: Place, seen: Seen) -> tuple[str, list[str]]:
        """How the place is covered, and the tests to run for it, in order."""
        usable = {one for one, test in seen.tests.items() if test.outcome == "passed"}
        by = seen.runs.get(place.number, set())
        direct = by & usable
        shared = {one for one in usable - direct if by.intersection(seen.tests[one].shared)}
        how = "covered"
        if not by:
            if place.number not in seen.imports:
                return "uncovered", []
            how, direct = "imported", seen.files.get(str(self.base / place.file), set()) & usable
        elif not direct and not shared:
            return "unusable", []
        tests = seen.tests
        fastest = sorted(direct, key=lambda one: (tests[one].seconds, one))
        narrowest = sorted(direct, key=lambda one: (tests[one].size, one))
        order = [one for two in zip(fastest, narrowest, strict=True) for one in two]
        order += sorted(shared, key=lambda one: (tests[one].seconds, one))
        chosen, seconds = [], 0.0
        for one in dict.fromkeys(order):
            if chosen and seconds + tests[one].seconds > self.options.seconds_each:
                continue
            seconds += tests[one].seconds
            chosen.append(one)
            if len(chosen) == self.options.tests_each:
                break
        return how, chosen

    def try_mutant(self, place: Place, seen: Seen) -> dict[str, Any]:
        how, tests = self.chosen(place, seen)
        result: dict[str, Any] = {key: value for key, value in asdict(place).items()}
        result |= {"covered": how, "tests": len(tests), "caught": False, "by": None, "seconds": 0.0}
        if not tests:
            return result
        copy = self.work / f"t{place.number}"
        began = time.monotonic()
        try:
            _link_tree(self.base, copy)
            file = copy / place.file
            source = file.read_bytes()
            file.unlink()
            file.write_bytes(place.mutate(source))
            for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
                compiled.unlink()
            for interpret in (False, True):
                some = [one for one in tests if _is_interpreted(one) == interpret]
                if some and not result["caught"]:
                    result |= self._try(copy, some, seen, interpret)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        result["seconds"] = round(time.monotonic() - began, 1)
        return result

    def _try(self, copy: Path, tests: list[str], seen: Seen, interpret: bool) -> dict[str, Any]:
        records, only = copy / "build" / "records", copy / "build" / "only.json"
        environment = self.environment(
            copy,
            records,
            RECORDER_ONLY=str(only),
            TMPDIR=str(copy / "build"),
            **({"TRITON_INTERPRET": "1"} if interpret else {}),
        )
        only.write_text(json.dumps(tests))
        files = list(dict.fromkeys(one.split("::")[0] for one in tests))
        seconds = [seen.tests[one].seconds for one in tests]
        log = copy / "build" / "log"
        command = [
            *PYTEST,
            *("-x", f"--timeout={max(20, math.ceil(5 * max(seconds)))}"),
            *(f"--basetemp={copy / 'build' / 'b'}", *files),
        ]
        limit = min(float(self.options.mutant_limit), 45 + 4 * sum(seconds))
        code = self.run(command, copy, environment, log, min(limit, self._mutants_left_s()))
        if self._mutants_left_s() <= 1 or self.over.is_set():
            return {"covered": "late"}
        if code is None:
            return {"caught": True, "by": "timeout"}
        if code == 0:
            return {}
        for one in _lines(records.glob("outcome.*")):
            if one["outcome"] == "failed":
                return {"caught": True, "by": one["id"], "why": one["why"][-300:]}
        end = log.read_text(errors="replace")[-600:]
        # 5: nothing was collected. Anything else without a failed test: collecting or pytest itself broke on it.
        return {"covered": "broken", "why": end} if code == 5 else {"caught": True, "by": "start"}

    def try_all(self, places: list[Place], seen: Seen) -> None:
        """All places, in an order that both arms share, as far as the time goes."""
        order = list(places)
        random.Random(self.options.seed).shuffle(order)
        order.sort(key=lambda place: not place.paired if self.options.paired_first else False)
        written = (self.out / f"{self.name}-mutants.jsonl").open("w")

        def work(place: Place) -> None:
            if self._mutants_left_s() < 10:
                return
            try:
                result = self.try_mutant(place, seen)
            except Exception as error:  # noqa: BLE001
                result = {key: value for key, value in asdict(place).items()}
                result |= {"covered": "broken", "caught": False, "why": repr(error)}
            with self.lock:
                if result["covered"] == "late":
                    return
                self.results.append(result)
                written.write(json.dumps(result) + "\n")
                written.flush()
                if len(self.results) % 20 == 0:
                    caught = sum(one["caught"] for one in self.results)
                    self.say(f"{caught} of {len(self.results)} mutants caught")

        with ThreadPoolExecutor(self.options.workers) as pool:
            list(pool.map(work, order))
        written.close()

    def confirm(self) -> None:
        """Tests that fail without a mutant too have caught nothing."""
        killers = {one["by"] for one in self.results if one["caught"] and "::" in (one["by"] or "")}
        limit = self.left_s() - 8
        if not killers or limit < 20:
            self.say("no time to confirm the tests that caught something")
            return
        passed = self.passing(sorted(killers), limit, "confirm")
        if not passed:
            self.say("confirming did not work; nothing is changed by it")
            return
        for one in self.results:
            one["confirmed"] = one["by"] in passed or "::" not in (one["by"] or "")
        doubtful = sum(one["caught"] and not one["confirmed"] for one in self.results)
        self.say(
            f"{len(passed)} of {len(killers)} catching tests pass without mutants; {doubtful} mutants in doubt"
        )

    def write(self, seen: Seen, total: int) -> None:
        tests = Counter(test.outcome for test in seen.tests.values())
        failing = {name: test.why for name, test in seen.tests.items() if test.outcome == "failed"}
        late = [name for name, test in seen.tests.items() if test.outcome == "late"]
        (self.out / f"{self.name}-tests.json").write_text(
            json.dumps({"counts": tests, "failed": failing, "late": late}, indent=1)
        )
        caught = [one for one in self.results if counts_as_caught(one)]
        survivors = [one for one in self.results if not counts_as_caught(one)]
        survivors.sort(key=lambda one: one["number"])
        (self.out / f"{self.name}.json").write_text(
            json.dumps(
                {
                    "arm": self.name,
                    "seed": self.options.seed,
                    "places": total,
                    "tried": len(self.results),
                    "caught": len(caught),
                    "tests": tests,
                    "how": Counter(one["covered"] for one in self.results),
                    "results": {
                        str(one["number"]): [one["paired"], counts_as_caught(one)]
                        for one in self.results
                    },
                    "survivors": survivors,
                },
                indent=1,
            )
        )
        self.say(
            f"{len(caught)} of {len(self.results)} mutants caught ({total} drawn); "
            f"{dict(Counter(one['covered'] for one in self.results))}; tests: {dict(tests)}"
        )


def counts_as_caught(result: dict[str, Any]) -> bool:
    return bool(result["caught"]) and result.get("confirmed", True)


def _is_interpreted(test: str) -> bool:
    return "interpreted/" in test


def _lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    found = []
    for path in sorted(paths):
        for line in path.read_text().splitlines():
            # The last line of a killed process may be cut.
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def _link_tree(source: Path, target: Path) -> None:
    """The same files under another path; a program that replaces one leaves the original as it is."""
    for folder, folders, files in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir()
        for name in files:
            os.link(Path(folder) / name, there / name, follow_symlinks=False)
        for name in list(folders):
            if (Path(folder) / name).is_symlink():
                os.symlink(os.readlink(Path(folder) / name), there / name)
                folders.remove(name)
    (target / "build").mkdir(exist_ok=True)


def _end_strays(mark: str) -> None:
    """End what a test started in a session of its own: it has the name of our folder in its environment."""
    wanted = f"RECORDER_OUT={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def _percent(part: int, whole: int) -> str:
    return f"{part:>7,}/{whole:<7,} {100 * part / whole:5.1f} %" if whole else f"{'—':>23}"


def coverage_table(packages: dict[str, dict[str, int]]) -> str:
    rows = [f"{'package':30} {'lines':>23} {'branches':>23}"]
    for name, count in packages.items():
        lines = _percent(count["lines_run"], count["lines"])
        rows.append(f"{name:30} {lines} {_percent(count['branches_taken'], count['branches'])}")
    return "\n".join(rows)


def measure(options: argparse.Namespace) -> None:
    """All steps of one arm."""
    # Trees of 600 files are millions of objects, none of them garbage.
    gc.disable()
    trees = {"before": Path(options.before).resolve(), "after": Path(options.after).resolve()}
    arm = Arm(options)
    try:
        drawn = mutations.sample(trees["before"], trees["after"], options.seed, options.count)
        places = drawn[arm.name]
        paired = sum(place.paired for place in places)
        arm.say(f"{len(places)} places, {paired} of them in code that both checkouts have")
        arm.say(str(dict(sorted(Counter(place.package for place in places).items()))))
        arm.prepare(trees[arm.name], places)
        arm.cover()
        seen = arm.seen()
        reporting = threading.Thread(target=arm.report_coverage)
        reporting.start()
        failed = sorted(one for one, test in seen.tests.items() if test.outcome == "failed")
        if failed and arm.left_s() > 150:
            again = arm.passing(failed, options.second_look, "again")
            for one in again:
                seen.tests[one].outcome = "passed"
            arm.say(f"{len(failed)} tests failed under coverage; {len(again)} of them pass without")
        arm.write(seen, len(places))
        # A trial takes places that its few tests run.
        if options.mutants:
            places.sort(key=lambda place: not seen.runs.get(place.number))
            places = places[: options.mutants]
        arm.try_all(places, seen)
        arm.write(seen, len(places))
        arm.confirm()
        arm.write(seen, len(places))
        reporting.join(max(arm.left_s(), 1))
    finally:
        arm.over.set()
        if options.keep:
            arm.say(f"kept: {arm.work}")
        else:
            shutil.rmtree(arm.work, ignore_errors=True)


def compare(options: argparse.Namespace) -> None:
    """Both arms side by side. Places in common are compared one by one, the others share by share."""
    out = Path(options.out)
    arms = {name: json.loads((out / f"{name}.json").read_text()) for name in ("before", "after")}
    for name, arm in arms.items():
        table = json.loads((out / f"{name}-coverage.json").read_text())["packages"]
        print(f"{name}\n{coverage_table(table)}")
        print(f"{arm['caught']} of {arm['tried']} mutants caught; places: {arm['how']}\n")
    results = {name: arm["results"] for name, arm in arms.items()}
    pairs = [
        (caught, results["after"][number][1])
        for number, (paired, caught) in results["before"].items()
        if paired and number in results["after"]
    ]
    own = {
        name: [caught for paired, caught in every.values() if not paired]
        for name, every in results.items()
    }
    total = arms["after"]["places"]
    weight = sum(paired for paired, _ in results["after"].values()) / len(results["after"])
    differences = [int(after) - int(before) for before, after in pairs]
    mean = sum(differences) / len(differences)
    spread = sum((one - mean) ** 2 for one in differences) / max(len(differences) - 1, 1)
    variance = weight**2 * spread / len(differences)
    shares = {}
    for name, caught in own.items():
        shares[name] = sum(caught) / len(caught) if caught else 0.0
        variance += (
            (1 - weight) ** 2 * shares[name] * (1 - shares[name]) / len(caught) if caught else 0.0
        )
    whole = weight * mean + (1 - weight) * (shares["after"] - shares["before"])
    width = 1.96 * math.sqrt(variance)
    only = Counter(pairs)
    print(
        f"in common ({len(pairs)}): caught in both {only[True, True]}, before only {only[True, False]}, "
        f"after only {only[False, True]}, in none {only[False, False]}"
    )
    print(
        f"own: before {sum(own['before'])} of {len(own['before'])}, "
        f"after {sum(own['after'])} of {len(own['after'])}"
    )
    print(
        f"difference of {total}: {100 * whole:+.1f} points, "
        f"95 % interval {100 * (whole - width):+.1f} to {100 * (whole + width):+.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Coverage and mutants, before and after.")
    commands = parser.add_subparsers(required=True)
    arm = commands.add_parser("arm", help="measure one checkout")
    arm.set_defaults(go=measure)
    arm.add_argument("--arm", choices=("before", "after"), required=True)
    arm.add_argument("--before", required=True, metavar="DIR")
    arm.add_argument("--after", required=True, metavar="DIR")
    arm.add_argument("--seed", type=int, default=21)
    arm.add_argument("--count", type=int, default=300, help="places to draw")
    arm.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arm.add_argument("--limit", type=float, default=570, help="seconds for everything")
    arm.add_argument("--coverage-limit", type=float, default=270, help="of them for the suite")
    arm.add_argument("--second-look", type=float, default=60, help="of them for failed tests")
    arm.add_argument("--confirm-limit", type=float, default=50, help="of them for catching tests")
    arm.add_argument("--mutant-limit", type=float, default=90, help="seconds for one mutant")
    arm.add_argument("--tests-each", type=int, default=40, help="tests for one mutant")
    arm.add_argument("--seconds-each", type=float, default=15, help="their seconds, unmutated")
    arm.add_argument("--paired-first", action="store_true", help="begin with places in common")
    arm.add_argument("--mutants", type=int, default=0, help="a trial: only so many")
    arm.add_argument("--tests", nargs="*", default=[], help="a trial: only these tests")
    arm.add_argument("--keep", action="store_true", help="keep the working folder")
    both = commands.add_parser("compare", help="print both arms and the difference")
    both.set_defaults(go=compare)
    for one in (arm, both):
        one.add_argument("--out", required=True, metavar="DIR")
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
