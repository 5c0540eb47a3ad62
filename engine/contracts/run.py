"""Run contracts: their tests, their proofs, and then each planted bug, which must make its tests fail.

One process runs all tests of a contract, one runs each proof, and one runs the tests of each planted bug. Every process
has its own session and a time limit, and is killed with everything that it started. It inherits this process's
environment without the settings of the engine (`APR_*` and its aliases), so that the result depends on the code and not
on the shell. A check that was not reached has no receipt, which means Unknown(NotRun). Nothing here decides a verdict:
receipts hold counts.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.contracts import measured as kinds
from engine.contracts import plant
from engine.contracts.contract import Contract, Falsifier, Planted, Proof
from engine.contracts.measured import Receipt, code_hash, host, tools, write_receipts
from engine.contracts.proving import UNKNOWN
from engine.contracts.source import Sources, split_node
from engine.signals import scratch_folder

TESTS_LIMIT_S = 900.0
_TAIL = 400
"""Maximum length of the last line of an output, in characters."""
_NOT_INHERITED = ("APR_", "PYTEST_", "MANAGED_MEMORY", "PYTHONPATH")
"""Prefixes of environment variables that are not passed on: a shell, or a test that runs contracts, may have set them.
"""
_TEMPORARY_NAMES = (
    r"(?:pytest-of-[\w.-]*(?:/pytest-\d*)?/?|apr-contract-\w*/?|tmp[a-z0-9_]{8}(?![\w.-])/?)?"
)
"""Pattern of the names that pytest, tempfile and a run of a contract create in the folder of temporary files. A
truncated message may end within a name."""


@dataclass(frozen=True, slots=True)
class Runner:
    root: Path
    folder: Path
    """Folder of the receipts."""
    tell: Callable[[str], None]

    def run(self, contracts: Sequence[Contract], jobs: int = 1) -> None:
        """Run each contract and write its receipts, `jobs` contracts at a time."""
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            # `list` waits for all of them and raises the first error.
            list(pool.map(self._run_one, contracts))

    def _run_one(self, contract: Contract) -> None:
        begin = time.perf_counter()
        # Receipts get the code's hash of the start, so that code that changes during the run makes them stale.
        code_sha256 = code_hash(contract, Sources(self.root))
        receipts = list(
            self._receipts(contract, functools.partial(_receipt, contract, code_sha256))
        )
        write_receipts(self.folder, contract.id, receipts)
        self.tell(f"{contract.id}: {len(receipts)} checks in {time.perf_counter() - begin:.1f} s")

    def _receipts(self, contract: Contract, receipt: Callable[..., Receipt]) -> Iterator[Receipt]:
        # A contract reaches this line only if its file has no errors.
        validated = Ran(argv=["validate"], rc=0)
        yield receipt(kinds.VALID, kinds.VALID, validated, {"problems": {"errors": 0}})
        if contract.active:
            self.tell(f"{contract.id}: {len(contract.active)} tests")
            tested = run_tests(contract.active, self.root, TESTS_LIMIT_S)
            for id_, counts in tested.counts.items():
                detail = tested.details[id_]
                yield receipt(kinds.TEST, id_, tested.ran, {id_: counts}, detail=detail)
        for proof in contract.file.proof_harnesses:
            self.tell(f"{contract.id}: proof {proof.id}")
            ran, answer = run_proof(proof, self.root)
            cases = {"cases": {"all": answer["cases"]}}
            yield receipt(kinds.PROOF, proof.id, ran, cases, answer["result"], answer["detail"])
        for planted in contract.planted:
            self.tell(f"{contract.id}: planted bug {planted.id}")
            must_fail = [
                falsifier for falsifier in contract.active if falsifier.id in planted.turns_red
            ]
            tested = run_tests(must_fail, self.root, TESTS_LIMIT_S, planted)
            result, detail = "not loaded", tested.trouble
            if tested.was_planted:
                result, detail = kinds.WAS_PLANTED, next(iter(tested.details.values()), "")
            yield receipt(kinds.PLANTED, planted.id, tested.ran, tested.counts, result, detail)


def _receipt(
    contract: Contract,
    code_sha256: str,
    kind: str,
    check: str,
    ran: Ran,
    counts: dict[str, dict[str, int]],
    result: str = "",
    detail: str = "",
) -> Receipt:
    return Receipt(
        check=check,
        kind=kind,
        contract_sha256=contract.sha256,
        code_sha256=code_sha256,
        tools=tools(),
        argv=ran.argv,
        rc=ran.rc,
        counts=counts,
        result=result,
        detail=without_machine(detail, Path.cwd()),
        duration_s=round(ran.duration_s, 3),
        host=host(),
        unix_s=round(time.time(), 3),
    )


def without_machine(text: str, root: Path) -> str:
    """Replace paths of this machine in a text: the project's by `.`, and by `TMP/` the folder of temporary files,
    including names of pytest and tempfile, which differ in each run."""
    folders = {"/tmp", tempfile.gettempdir(), os.path.realpath(tempfile.gettempdir())}
    text = text.replace(str(root), ".")
    for folder in sorted(folders, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(folder)}/{_TEMPORARY_NAMES}", "TMP/", text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    argv: list[str]
    rc: int | None
    """None if the process was stopped at its time limit."""
    stdout: str = ""
    stderr: str = ""
    duration_s: float = 0.0

    @property
    def tail(self) -> str:
        lines = [line for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return " ".join(lines[-1].split())[-_TAIL:] if lines else "it printed nothing"


def start(arguments: Sequence[str], root: Path, limit_s: float, env: dict[str, str]) -> Ran:
    """Run `python ARGUMENTS` in the project, for at most `limit_s` seconds."""
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
    # Receipts must not contain paths of this machine.
    argv = ["python", *(a.replace(str(root), ".") for a in arguments)]
    return Ran(argv=argv, rc=rc, stdout=stdout, stderr=stderr, duration_s=took_s)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the whole session: a test may have started a run."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


@dataclass(slots=True)
class Tested:
    """The outcomes of the requested tests."""

    ran: Ran
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    was_planted: bool = True
    trouble: str = ""


def run_tests(
    falsifiers: Sequence[Falsifier], root: Path, limit_s: float, planted: Planted | None = None
) -> Tested:
    """Run the tests of some falsifiers in one process, with a planted bug if one is given."""
    nodes = {f.id: f.node for f in falsifiers}
    files = sorted({split_node(node)[0] for node in nodes.values()})
    plugins = ("-p", "no:cacheprovider", "-p", "engine.contracts.pytest_plugin")
    options = ("-q", "--tb=short", "--continue-on-collection-errors", "--hypothesis-seed=0")
    with scratch_folder("apr-contract-") as folder:
        report = folder / "report.json"
        env = {
            "APR_CONTRACT_NODES": "\n".join(dict.fromkeys(nodes.values())),
            "APR_CONTRACT_REPORT": str(report),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        }
        if planted is not None:
            env |= _plant(planted, folder)
        tested = Tested(start(["-m", "pytest", *options, *plugins, *files], root, limit_s, env))
        if planted is not None:
            tested.was_planted = (folder / "seen").exists()
        try:
            outcomes = json.loads(report.read_text("utf-8"))
        except (OSError, ValueError):
            outcomes = {"nodes": {}, "errors": [f"no report: {tested.ran.tail}"]}
    tested.trouble = next(iter(outcomes["errors"]), "")
    for id_, node in nodes.items():
        _count(tested, id_, outcomes["nodes"].get(node, []))
    return tested


def _count(tested: Tested, id_: str, outcomes: list[dict[str, str]]) -> None:
    words = ("passed", "failed", "errors", "skipped", "xfailed")
    words_of_outcomes = [outcome["outcome"] for outcome in outcomes]
    counts = {word: words_of_outcomes.count(word) for word in words}
    tested.counts[id_] = {"collected": len(outcomes), **counts}
    # The detail is the first of the worst outcome.
    details = {outcome["outcome"]: outcome["detail"] for outcome in reversed(outcomes)}
    worst = [details[word] for word in words[1:] if word in details]
    tested.details[id_] = worst[0] if worst else tested.trouble


def _plant(planted: Planted, folder: Path) -> dict[str, str]:
    site = folder / "site"
    site.mkdir()
    shutil.copy(plant.__file__, site / "sitecustomize.py")
    bug = {
        "module": planted.edit.module,
        "replace": planted.edit.replace,
        "with": planted.edit.by,
        "seen": str(folder / "seen"),
    }
    (folder / "bug.json").write_text(json.dumps(bug), encoding="utf-8")
    return {
        "APR_PLANTED": str(folder / "bug.json"),
        "APR_CONTRACT_MUTATED": "1",
        "PYTHONPATH": str(site),
    }


def run_proof(proof: Proof, root: Path) -> tuple[Ran, dict[str, Any]]:
    """Run a harness in a process. Return how the process ended, and its report: result, cases, detail."""
    ran = start(["-m", "engine.contracts.proving", proof.harness], root, proof.timeout_s, {})
    try:
        answer = json.loads(ran.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        how = "stopped at its limit" if ran.rc is None else f"exit {ran.rc}"
        answer = {"result": UNKNOWN, "cases": 0, "detail": f"{how}: {ran.tail}"}
    return ran, answer
