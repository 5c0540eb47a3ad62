"""Running contracts: their tests, their proofs, and then each planted bug, which must be caught.

One process runs the tests of a contract together; one more for every planted bug. What was not reached
has no receipt, and no receipt is Unknown(NotRun). Nothing here decides: receipts hold what was counted.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.contracts import receipt as kinds
from engine.contracts.contract import Contract, Falsifier
from engine.contracts.processes import Ran, run_command, run_proof, run_tests
from engine.contracts.receipt import Receipt, code_hash, host, tools, write_receipts
from engine.contracts.source import Sources

TESTS_LIMIT_S = 900.0
COMMAND_LIMIT_S = 3600.0
_MADE = r"(?:pytest-of-[\w.-]*(?:/pytest-\d*)?/?|apr-contract-\w*/?|tmp[a-z0-9_]{8}(?![\w.-])/?)?"
"""What pytest, tempfile and a run of a contract make in the folder of temporary files; a text that was cut
may end within it."""


@dataclass(frozen=True, slots=True)
class Runner:
    root: Path
    folder: Path
    """Where receipts are kept."""
    tell: Callable[[str], None]

    def run(self, contracts: Sequence[Contract], jobs: int = 1) -> None:
        """Run each contract and keep its receipts. Processes do the work; `jobs` run at once."""
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            # A list, so that the first error comes out of here.
            list(pool.map(self._run_one, contracts))

    def _run_one(self, contract: Contract) -> None:
        begin = time.perf_counter()
        make = _Maker(contract, code_hash(contract, Sources(self.root)), tools(), host())
        receipts = [make.valid(), *self._tests(contract, make), *self._proofs(contract, make)]
        receipts += self._planted(contract, make)
        # Code that changed meanwhile would leave receipts of neither: their hash is that of the start.
        write_receipts(self.folder, contract.id, receipts)
        self.tell(f"{contract.id}: {len(receipts)} checks in {time.perf_counter() - begin:.1f} s")

    def _tests(self, contract: Contract, make: _Maker) -> Iterator[Receipt]:
        tests = _tests_of(contract.active)
        if tests:
            self.tell(f"{contract.id}: {len(tests)} tests")
            tested = run_tests(tests, self.root, TESTS_LIMIT_S)
            for falsifier in tests:
                counts = {falsifier.id: tested.counts[falsifier.id]}
                detail = tested.details[falsifier.id]
                yield make.of(kinds.TEST, falsifier.id, tested.ran, counts, detail=detail)
        for falsifier in contract.active:
            if falsifier.test.startswith(("bench:", "flip:")):
                self.tell(f"{contract.id}: {falsifier.id}")
                ran = run_command(falsifier, self.root, COMMAND_LIMIT_S)
                yield make.of(kinds.COMMAND, falsifier.id, ran, {}, detail=ran.tail)

    def _proofs(self, contract: Contract, make: _Maker) -> Iterator[Receipt]:
        for proof in contract.proofs:
            self.tell(f"{contract.id}: proof {proof.id}")
            ran, said = run_proof(proof, self.root)
            counts = {"cases": {"all": said["cases"]}}
            result, detail = said["result"], said["detail"]
            yield make.of(kinds.PROOF, proof.id, ran, counts, result=result, detail=detail)

    def _planted(self, contract: Contract, make: _Maker) -> Iterator[Receipt]:
        by_id = {falsifier.id: falsifier for falsifier in contract.active}
        for planted in contract.planted:
            self.tell(f"{contract.id}: planted bug {planted.id}")
            tests = _tests_of([by_id[id_] for id_ in planted.turns_red if id_ in by_id])
            if not tests:
                continue  # commands of the engine take no planted bugs: it is not run
            tested = run_tests(tests, self.root, TESTS_LIMIT_S, planted)
            result = kinds.WAS_PLANTED if tested.was_planted else "not loaded"
            detail = (
                next(iter(tested.details.values()), "") if tested.was_planted else tested.trouble
            )
            yield make.of(
                kinds.PLANTED, planted.id, tested.ran, tested.counts, result=result, detail=detail
            )


def _tests_of(falsifiers: Sequence[Falsifier]) -> list[Falsifier]:
    return [falsifier for falsifier in falsifiers if falsifier.test.startswith("python:")]


def without_machine(text: str, root: Path) -> str:
    """A text without places of this machine: the project is `.`, and `TMP/` stands for the folder of
    temporary files with what pytest or tempfile made there, whose names are others in each run."""
    folders = {"/tmp", tempfile.gettempdir(), os.path.realpath(tempfile.gettempdir())}
    text = text.replace(str(root), ".")
    for folder in sorted(folders, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(folder)}/{_MADE}", "TMP/", text)
    return text


@dataclass(frozen=True, slots=True)
class _Maker:
    contract: Contract
    code_sha256: str
    tools: dict[str, str | None]
    host: dict[str, Any]

    def of(
        self,
        kind: str,
        check: str,
        ran: Ran,
        counts: dict[str, dict[str, int]],
        *,
        result: str = "",
        detail: str = "",
    ) -> Receipt:
        return Receipt(
            check=check,
            kind=kind,
            contract_sha256=self.contract.sha256,
            code_sha256=self.code_sha256,
            tools=self.tools,
            argv=ran.argv,
            rc=ran.rc,
            counts=counts,
            result=result,
            detail=without_machine(detail, Path.cwd()),
            duration_s=round(ran.duration_s, 3),
            host=self.host,
            unix_s=round(time.time(), 3),
        )

    def valid(self) -> Receipt:
        """That the file was read without an error: a contract with one is not run."""
        ran = Ran(argv=["validate"], rc=0, stdout="", stderr="", duration_s=0.0)
        return self.of(kinds.VALID, kinds.VALID, ran, {"problems": {"errors": 0}})
