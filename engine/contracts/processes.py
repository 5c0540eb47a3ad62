"""The processes in which tests, commands and proofs of a contract run, each within its time.

A process is started in a session of its own and is ended with all that it started. What it reads from
the environment is this process's, without the settings of the engine (`APR_*` and its aliases), so that
a contract is asked of the code and not of a shell.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.contracts import hook
from engine.contracts.contract import Falsifier, Planted, Proof
from engine.contracts.proving import ABSENT, PROVED, REFUTED, UNKNOWN
from engine.contracts.source import split_node
from engine.signals import scratch_folder

_TAIL = 400
_PYTHON = "python"
"""How the interpreter is written in receipts, which name no path of the machine."""
_NOT_INHERITED = ("APR_", "PYTEST_", "MANAGED_MEMORY", "PYTHONPATH")
"""How names begin of what a shell, or a test that runs this, may have set."""
_CROSSHAIR_CONFIRMED = "Confirmed over all paths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    argv: list[str]
    rc: int | None
    stdout: str
    stderr: str
    duration_s: float

    @property
    def tail(self) -> str:
        lines = [line for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return " ".join(lines[-1].split())[-_TAIL:] if lines else "it said nothing"


@dataclass(slots=True)
class Tested:
    """What became of each test that was asked for."""

    ran: Ran
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    was_planted: bool = True
    trouble: str = ""


def start(arguments: Sequence[str], root: Path, limit_s: float, env: dict[str, str]) -> Ran:
    """`python ARGUMENTS` in the project."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)
    }
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=root,
        env=inherited | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    rc: int | None
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
        rc = process.returncode
    except subprocess.TimeoutExpired:
        _end(process)
        stdout, stderr = process.communicate()
        rc = None
    except BaseException:
        _end(process)
        process.wait()
        raise
    took_s = time.perf_counter() - begin
    argv = [_PYTHON, *(a.replace(str(root), ".") for a in arguments)]
    return Ran(argv=argv, rc=rc, stdout=stdout, stderr=stderr, duration_s=took_s)


def _end(process: subprocess.Popen[str]) -> None:
    """The whole session: a test may have started a run."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def run_tests(
    falsifiers: Sequence[Falsifier], root: Path, limit_s: float, planted: Planted | None = None
) -> Tested:
    """The tests of some falsifiers in one process, with a bug planted where one is given."""
    nodes = {f.id: f.test.partition(":")[2] for f in falsifiers}
    files = sorted({split_node(node)[0] for node in nodes.values()})
    arguments = [
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "engine.contracts.reporting",
        "--continue-on-collection-errors",
        "--hypothesis-seed=0",
        *files,
    ]
    with scratch_folder("apr-contract-") as folder:
        report = folder / "report.json"
        env = {
            "APR_CONTRACT_NODES": "\n".join(dict.fromkeys(nodes.values())),
            "APR_CONTRACT_REPORT": str(report),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        }
        if planted is not None:
            env |= _plant(planted, folder)
        tested = Tested(start(arguments, root, limit_s, env))
        if planted is not None:
            tested.was_planted = (folder / "seen").exists()
        try:
            found = json.loads(report.read_text("utf-8"))
        except (OSError, ValueError):
            tested.trouble = f"no report: {tested.ran.tail}"
            found = {"nodes": {}, "errors": []}
    if found["errors"]:
        tested.trouble = found["errors"][0]
    for id_, node in nodes.items():
        _count(tested, id_, found["nodes"].get(node, []))
    return tested


def _count(tested: Tested, id_: str, outcomes: list[dict[str, str]]) -> None:
    words = {"passed": "passed", "failed": "failed", "error": "errors"}
    counts = dict.fromkeys(("collected", "passed", "failed", "errors", "skipped", "xfailed"), 0)
    counts["collected"] = len(outcomes)
    for one in outcomes:
        counts[words.get(one["outcome"], one["outcome"])] += 1
    tested.counts[id_] = counts
    # The worst of them says why.
    for word in ("failed", "error", "skipped", "xfailed"):
        said = next((one["detail"] for one in outcomes if one["outcome"] == word), None)
        if said is not None:
            tested.details[id_] = said
            return
    tested.details[id_] = tested.trouble


def _plant(planted: Planted, folder: Path) -> dict[str, str]:
    site = folder / "site"
    site.mkdir()
    shutil.copy(hook.__file__, site / "sitecustomize.py")
    bug = {
        "module": planted.module,
        "replace": planted.replace,
        "with": planted.by,
        "seen": str(folder / "seen"),
    }
    (folder / "bug.json").write_text(json.dumps(bug), encoding="utf-8")
    return {
        "APR_PLANTED": str(folder / "bug.json"),
        "APR_CONTRACT_MUTATED": "1",
        "PYTHONPATH": str(site),
    }


def run_command(falsifier: Falsifier, root: Path, limit_s: float) -> Ran:
    """`bench:...` and `flip:...` are those commands of the engine, by their exit codes."""
    command, _, arguments = falsifier.test.partition(":")
    program = "import sys; from engine.cli.main import main; raise SystemExit(main(sys.argv[1:]))"
    return start(["-c", program, command, *shlex.split(arguments)], root, limit_s, {})


def run_proof(proof: Proof, root: Path) -> tuple[Ran, dict[str, Any]]:
    """A harness in its own process, and what it said: result, cases, detail."""
    if proof.engine == "kani":
        return _absent("kani")
    if proof.engine == "crosshair":
        return _run_crosshair(proof, root)
    ran = start(["-m", "engine.contracts.proving", proof.harness], root, proof.timeout_s, {})
    try:
        said = json.loads(ran.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        how = "stopped at its limit" if ran.rc is None else f"exit {ran.rc}"
        said = {"result": UNKNOWN, "cases": 0, "detail": f"{how}: {ran.tail}"}
    return ran, said


def _run_crosshair(proof: Proof, root: Path) -> tuple[Ran, dict[str, Any]]:
    """Only `Confirmed over all paths` is a proof; that nothing was found in its time is none."""
    if importlib.util.find_spec("crosshair") is None:
        return _absent("crosshair")
    module, _, name = proof.harness.partition(":")
    options = ["--analysis_kind=asserts", "--report_all"]
    options.append(f"--per_condition_timeout={proof.timeout_s}")
    arguments = ["-m", "crosshair", "check", *options, f"{module}.{name}"]
    ran = start(arguments, root, proof.timeout_s + 30, {})
    result = UNKNOWN
    if ran.rc == 0 and _CROSSHAIR_CONFIRMED in ran.stdout:
        result = PROVED
    elif ran.rc == 1:
        result = REFUTED
    return ran, {"result": result, "cases": 1, "detail": ran.tail}


def _absent(tool: str) -> tuple[Ran, dict[str, Any]]:
    ran = Ran(argv=[tool], rc=None, stdout="", stderr="", duration_s=0.0)
    return ran, {"result": ABSENT, "cases": 0, "detail": f"{tool} is not installed"}
