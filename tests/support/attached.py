"""Run training scripts that know nothing of the probe, with and without it, and read what they print and log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.log.folder import RunFolder
from engine.log.view import RunView
from tests.support.forked import run_fork
from tests.support.made_once import made_once
from tests.support.paths import ROOT
from tests.support.running import wait_until_ended

PROBE = ROOT / "engine" / "attach" / "probe"
_ON_PATH = Path(f"{PROBE}{os.pathsep}{ROOT}")

BEGIN = """
import json, os, sys
import torch
torch.manual_seed(7)
torch.set_num_threads(1)

def model(width=8):
    return torch.nn.Sequential(
        torch.nn.Linear(width, 16), torch.nn.ReLU(inplace=True), torch.nn.Dropout(0.1),
        torch.nn.Linear(16, 1))

def say(**numbers):
    print(json.dumps(numbers), flush=True)

saved = []

def save(*modules):
    saved.append(len(saved))
    torch.save([m.state_dict() for m in modules] + [torch.get_rng_state()], f"weights-{len(saved)}.pt")
"""
"""Beginning of every script; `say` prints what the log's line of a step must hold. Scripts that are concatenated are
trainings of one process, which imports torch once."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of a script."""

    folder: Path
    returncode: int
    stdout: str
    stderr: str

    @property
    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines() if line.startswith("{")]

    @property
    def weights(self) -> dict[str, bytes]:
        """Bytes of each file of weights: every training saves its own, and so does every rank."""
        return {path.name: path.read_bytes() for path in self.folder.glob("*.pt")}

    @property
    def lines(self) -> list[dict[str, Any]]:
        return self.lines_of("run")

    def lines_of(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def trainings(self) -> list[list[dict[str, Any]]]:
        """Log of each training below the command, in the order in which they began."""
        folders = [path for path in self.folder.glob("run*") if (path / "events.jsonl").exists()]
        folders.sort(key=lambda path: (len(path.name), path.name))
        return [self.lines_of(path.name) for path in folders]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.of_kind("step")


def begin_run(
    folder: Path,
    script: str,
    *options: str,
    watched: bool,
    path: Path | None = None,
    asked: str = "",
) -> subprocess.Popen[str]:
    """Start a script in a folder of its own; `path` is what the user has on PYTHONPATH."""
    environment = _write_script(folder, script, watched, path, asked)
    return subprocess.Popen(
        [sys.executable, *options, "train.py"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _write_script(
    folder: Path, script: str, watched: bool, path: Path | None, asked: str
) -> dict[str, str]:
    """Write the script into its folder; returns the environment of its process."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    (folder / "run" / "effective.json").write_text('{"spec": {}, "command": {}}')
    (folder / "train.py").write_text(BEGIN + script)
    names = ("APR_WATCH_RUN", "PYTHONPATH", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    entries = [str(path)] if path else []
    if watched:
        environment["APR_WATCH_RUN"] = str(folder / "run")
        environment["APR_WATCH_ASK"] = asked
        entries.insert(0, str(PROBE))
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return {**environment, "OMP_NUM_THREADS": "1"}


def end_run(folder: Path, process: subprocess.Popen[str]) -> Ran:
    stdout, stderr = process.communicate(timeout=300)
    return Ran(folder=folder, returncode=process.returncode, stdout=stdout, stderr=stderr)


def run_watched(folder: Path, script: str, *options: str) -> Ran:
    """Run a script with the probe: in a fork, unless Python or a launcher is given options."""
    if options:
        return end_run(folder, begin_run(folder, script, *options, watched=True))
    return run_forked(folder, script, watched=True)


def run_forked(
    folder: Path, script: str, *, watched: bool, path: Path | None = None, asked: str = ""
) -> Ran:
    """Run a script in a fork of a process that has imported torch."""
    environment = _write_script(folder, script, watched, path, asked)
    returncode, stdout, stderr = run_fork(folder, environment)
    return Ran(folder=folder, returncode=returncode, stdout=stdout, stderr=stderr)


def _run_alone(folder: Path, script: str, *options: str, path: Path | None = None) -> Ran:
    """Run a script without the probe."""
    if options or path not in (None, PROBE) or "cuda" in script:
        # Python's own handling of options and paths is compared too; a GPU's driver cannot be forked.
        return end_run(folder, begin_run(folder, script, *options, watched=False, path=path))
    return run_forked(folder, script, watched=False, path=path)


def run_twice(
    folder: Path,
    script: str,
    *options: str,
    path: Path | None = None,
    asked: str = "",
    forked: bool = False,
) -> tuple[Ran, Ran]:
    """Run a script with and without the probe; both must succeed and agree. With `forked`, both are forks, for tests
    that do not depend on how the probe gets into a process."""
    if forked:
        watched = run_forked(folder / "watched", script, watched=True, path=path, asked=asked)
        alone = _run_alone(folder / "alone", script, path=path)
    else:
        begun = begin_run(
            folder / "watched", script, *options, watched=True, path=path, asked=asked
        )
        alone = _run_alone(folder / "alone", script, *options, path=path)
        watched = end_run(folder / "watched", begun)
    _must_agree_with_probe(watched, alone)
    return watched, alone


def _must_agree_with_probe(watched: Ran, alone: Ran) -> None:
    for ran in (watched, alone):
        assert ran.returncode == 0, ran.stderr
    assert watched.stdout == alone.stdout
    # Python's warnings name the folder.
    stderr, expected = (
        without_times(ran.stderr.replace(str(ran.folder), "")) for ran in (watched, alone)
    )
    assert stderr == expected, f"{stderr}\nalone: {expected}"
    assert watched.weights == alone.weights and alone.weights
    assert not alone.lines


def watched_once(
    factory: pytest.TempPathFactory, name: str, *arguments: Any, twice: bool = True, **more: Any
) -> Ran:
    """Return the watched run of `run_twice`, made once for all test workers; without `twice`, only that run is made."""

    def make(folder: Path) -> None:
        if twice:
            watched, _ = run_twice(folder, *arguments, **more)
        else:
            watched = run_watched(folder / "watched", *arguments, **more)
            assert watched.returncode == 0, watched.stderr
        (folder / "said.json").write_text(json.dumps([watched.stdout, watched.stderr]))

    folder = made_once(factory, name, make)
    stdout, stderr = json.loads((folder / "said.json").read_text())
    return Ran(folder=folder / "watched", returncode=0, stdout=stdout, stderr=stderr)


def without_times(stderr: str) -> str:
    """Cut the time and the process from lines of torch's own log, and the process from Python's warning of a fork
    beside threads (3.12 on)."""
    logged = re.sub(r"^([IWE])\d{4} [\d:.]+ \d+", r"\1", stderr, flags=re.MULTILINE)
    return re.sub(r"\(pid=\d+\)", "(pid)", logged)


def agree(ran: Ran, trainings: int = 1, *, compared: slice = slice(None)) -> None:
    """Check that the log has as many steps as the script printed, each with the printed numbers; each training has a
    log of its own. `compared` selects the trainings whose steps are compared."""
    logs = ran.trainings
    assert len(logs) == trainings
    unread, trainings_said = ran.said, []
    for lines in logs:
        steps = [line for line in lines if line["kind"] == "step"]
        assert steps and len(unread) >= len(steps)
        trainings_said.append((lines, steps, unread[: len(steps)]))
        unread = unread[len(steps) :]
    assert not unread
    for training in trainings_said[compared]:
        _must_log_what_was_said(*training)


def _must_log_what_was_said(
    lines: list[dict[str, Any]], steps: list[dict[str, Any]], told: list[dict[str, Any]]
) -> None:
    for number, (step, said) in enumerate(zip(steps, told, strict=True), 1):
        assert step["step"] == number
        assert {name: step[name] for name in said} == said, number
        assert step["step_s"] > 0 and set(step["phases"]) == {
            "data",
            "forward",
            "backward",
            "optimizer",
            "rest",
        }
        # Both sums are of the same differences, in another order.
        assert abs(sum(step["phases"].values()) - step["step_s"]) < 1e-6
        assert step["data_s"] == step["phases"]["data"]
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    assert [line["kind"] for line in lines[:3]] == ["log_opened", "watched", "phase"]
    assert lines[-1]["kind"] == "script_ended"


@dataclass(frozen=True)
class Lined:
    """A script that had the engine's line in it, and its run folder."""

    ran: Ran
    run: RunFolder
    view: RunView


def begin_lined(folder: Path, script: str) -> subprocess.Popen[str]:
    """Start a script with the lines that it marks with #LINE; it finds the probe and the engine."""
    return begin_run(folder, script.replace("#LINE ", ""), watched=False, path=_ON_PATH)


def run_lined(folder: Path, script: str) -> Ran:
    """Run a script with the lines that it marks, in a fork: a line of a script finds torch imported as well."""
    return run_forked(folder, script.replace("#LINE ", ""), watched=False, path=_ON_PATH)


def with_and_without(folder: Path, script: str, *, forked: bool = True) -> Lined:
    """Run a script with the lines that it marks and without them; both must agree."""
    if forked:
        ran = run_lined(folder / "lined", script)
        alone = _run_alone(folder / "alone", script)
    else:
        begun = begin_lined(folder / "lined", script)
        alone = _run_alone(folder / "alone", script)
        ran = end_run(folder / "lined", begun)
    _must_agree_with_line(ran, alone)
    return lined(ran)


def _must_agree_with_line(ran: Ran, alone: Ran) -> None:
    for each_run in (ran, alone):
        assert each_run.returncode == 0, each_run.stderr
    assert ran.stdout == alone.stdout
    assert ran.weights == alone.weights and alone.weights
    assert ran.stderr.startswith("apr_watch: watched, apr-workbench line\n")


def in_three_ways(factory: pytest.TempPathFactory, name: str, script: str) -> tuple[Ran, Lined]:
    """Run a script with the probe, with the lines that it marks, and alone, once for all workers; both have to agree
    with what it does alone."""

    def make(folder: Path) -> None:
        watched, alone = run_twice(folder, script)
        ran = run_lined(folder / "lined", script)
        _must_agree_with_line(ran, alone)
        said = {one.folder.name: [one.stdout, one.stderr] for one in (watched, ran)}
        (folder / "said.json").write_text(json.dumps(said))

    folder = made_once(factory, name, make)
    said = json.loads((folder / "said.json").read_text())
    watched, ran = (
        Ran(folder=folder / way, returncode=0, stdout=said[way][0], stderr=said[way][1])
        for way in ("watched", "lined")
    )
    return watched, lined(ran)


def lined(ran: Ran, run: str = "line") -> Lined:
    follower = wait_until_ended(ran.folder / run)
    return Lined(ran, RunFolder(ran.folder / run), follower.view)


def events_of(lined_run: Lined, kind: type) -> list:  # type: ignore[type-arg]
    return [line.event for line in lined_run.view.lines if isinstance(line.event, kind)]
