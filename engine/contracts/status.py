"""Compute the status of a contract from its receipts: the result of each check, the result of the contract, and its
level.

    Fail  <  NotRun  <  Skip  <  ...  <  PositiveControlFailed  <  Pass

This is `Fail < Unknown(reason) < Pass`. The reasons of Unknown have the order and the names of the verdict lattice of
`aprender-contracts` (upstream); they are the first nine of its fifteen. The meet of two results is the lower one, so a
single Fail makes the result Fail. A gate accepts only Pass. A check that was skipped, is stale, was not collected or
needs an absent tool is Unknown, exit code 2.

    none      the file has errors, or the contract was not run since the file or its code changed
    basic     the file is valid
    standard  and there are active tests, and all of them pass
    strict    and there are planted bugs, and each is caught, which shows that the tests can fail
    proven    and there are proofs, and all of them hold

The names of the levels are upstream's. Upstream derives the level from what the file lists; here it is computed each
time from the results. A demoted claim is not run and does not count; it is shown with the finding that demoted it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from engine.contracts.contract import Contract, Loaded, checked_contracts
from engine.contracts.measured import (
    FOLDER,
    PLANTED,
    PROOF,
    TEST,
    VALID,
    WAS_PLANTED,
    Receipt,
    code_hash,
    read_receipts,
)
from engine.contracts.proving import ABSENT, PROVED, REFUTED
from engine.contracts.source import Sources
from engine.errors import BadInput
from engine.verdict import Level, Verdict


class Rank(IntEnum):
    """Every element of the lattice, lowest first."""

    FAIL = 0
    NOT_RUN = 1
    """The check has not been run."""
    SKIP = 2
    """The test was skipped, or failed as expected (xfail)."""
    REPORT = 3
    """The result is informational and decides nothing."""
    WARN = 4
    """The result is a warning and decides nothing."""
    TOOL_ABSENT = 5
    """The tool for the check is not installed."""
    NOT_ARMED = 6
    """The check exists, but nothing triggers it."""
    NO_CHECKABLE = 7
    """No test was collected, or the tool gave up, so there is no result."""
    WITNESS_STALE = 8
    """The receipt is of another contract or of other code."""
    POSITIVE_CONTROL_FAILED = 9
    """The planted bug was not caught, or could not be planted, so a passing test shows nothing."""
    PASS = 10


@dataclass(frozen=True, slots=True)
class Answer:
    rank: Rank
    text: str

    @property
    def level(self) -> Level:
        if self.rank in (Rank.FAIL, Rank.PASS):
            return Level[self.rank.name]
        return Level.UNKNOWN

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.level, str(self))

    @property
    def label(self) -> str:
        """`Fail`, `Pass` or the reason of Unknown, spelt as in receipts: `ToolAbsent`."""
        return self.rank.name.title().replace("_", "")

    def __str__(self) -> str:
        if self.level is Level.UNKNOWN:
            return f"{self.label}: {self.text}"
        return self.text


# contract: verdict-lattice-v1
def meet(a: Answer, b: Answer) -> Answer:
    """Return the result of lower rank; the first if the ranks are equal."""
    return min(a, b, key=lambda answer: answer.rank)


# contract: verdict-lattice-v1
def meet_all(answers: Iterable[Answer]) -> Answer:
    """Return the meet of all results. Without results it is NotRun, not Pass, because nothing was checked."""
    listed = list(answers)
    if not listed:
        return Answer(Rank.NOT_RUN, "no check was run")
    return functools.reduce(meet, listed)


def answer_of(receipt: Receipt, contract: Contract, code_sha256: str) -> Answer:
    """Return the result of a receipt for the current contract and code; stale if one of them has changed."""
    if receipt.contract_sha256 != contract.sha256:
        return Answer(Rank.WITNESS_STALE, "the contract has changed since")
    if receipt.code_sha256 != code_sha256:
        return Answer(Rank.WITNESS_STALE, "code or tests have changed since")
    if receipt.kind == VALID:
        errors = receipt.counts.get("problems", {}).get("errors", -1)
        return Answer(Rank.PASS if errors == 0 else Rank.FAIL, f"{errors} error(s)")
    for bug in contract.planted:
        if receipt.kind == PLANTED and bug.id == receipt.check:
            return _planted_answer(receipt, bug.turns_red)
    judges = {TEST: _test_answer, PROOF: _proof_answer}
    if (judge := judges.get(receipt.kind)) is not None:
        return judge(receipt)
    return Answer(Rank.NO_CHECKABLE, f"a receipt of an unknown kind: {receipt.kind}")


def _test_answer(receipt: Receipt) -> Answer:
    counts = receipt.counts.get(receipt.check, {})
    collected = counts.get("collected", 0)

    def answer(rank: Rank, word: str) -> Answer:
        return Answer(rank, f"{counts.get(word, 0)} of {collected} {word}: {receipt.detail}")

    if counts.get("failed"):
        return answer(Rank.FAIL, "failed")
    if counts.get("errors"):
        return answer(Rank.NO_CHECKABLE, "errors")
    if receipt.rc is None:
        return Answer(Rank.NO_CHECKABLE, f"stopped at its limit: {receipt.detail}")
    if not collected:
        return Answer(Rank.NO_CHECKABLE, f"no test was collected; {receipt.detail}")
    for word in ("skipped", "xfailed"):
        if counts.get(word):
            return answer(Rank.SKIP, word)
    if counts.get("passed") != collected:
        return answer(Rank.NO_CHECKABLE, "passed")
    return Answer(Rank.PASS, f"{collected} of {collected} passed")


def _proof_answer(receipt: Receipt) -> Answer:
    if receipt.result == ABSENT:
        return Answer(Rank.TOOL_ABSENT, receipt.detail)
    if receipt.result == REFUTED:
        return Answer(Rank.FAIL, f"counterexample: {receipt.detail}")
    has_cases = receipt.counts.get("cases", {}).get("all", 0) > 0
    if receipt.result == PROVED and receipt.rc == 0 and has_cases:
        return Answer(Rank.PASS, receipt.detail)
    return Answer(Rank.NO_CHECKABLE, receipt.detail or f"no answer (exit {receipt.rc})")


def _planted_answer(receipt: Receipt, turns_red: Sequence[str]) -> Answer:
    if receipt.result != WAS_PLANTED:
        return Answer(Rank.POSITIVE_CONTROL_FAILED, f"not planted: {receipt.detail}")
    missed = [id_ for id_ in turns_red if not receipt.counts.get(id_, {}).get("failed")]
    if missed:
        return Answer(Rank.POSITIVE_CONTROL_FAILED, f"not caught by {', '.join(missed)}")
    return Answer(Rank.PASS, f"caught by {', '.join(turns_red)}")


class Reached(IntEnum):
    NONE = 0
    BASIC = 1
    STANDARD = 2
    STRICT = 3
    PROVEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    id: str
    kind: str
    """valid, test, proof or planted."""
    says: str
    """Prediction of the test, harness of the proof with its bound, or description of the bug."""
    details: tuple[str, ...]
    """Further lines: of a test its node and the meaning of its failure, of a bug its module and tests."""
    answer: Answer
    age_s: float | None
    """Seconds since the check ran; None if it never did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    id: str
    path: Path
    problems: tuple[str, ...]
    contract: Contract | None
    """None if the file has errors."""
    answer: Answer
    checks: tuple[Check, ...] = ()

    @property
    def reached(self) -> Reached:
        """Level of the contract, computed from the results of its checks."""
        level = Reached.NONE
        for kind, next_level in (
            (VALID, Reached.BASIC),
            (TEST, Reached.STANDARD),
            (PLANTED, Reached.STRICT),
            (PROOF, Reached.PROVEN),
        ):
            ranks = {check.answer.rank for check in self.checks if check.kind == kind}
            if ranks != {Rank.PASS}:
                break
            level = next_level
        return level

    @property
    def age_s(self) -> float | None:
        """Age of the oldest receipt, in seconds."""
        return max((c.age_s for c in self.checks if c.age_s is not None), default=None)

    @property
    def counts(self) -> bool:
        """Whether the contract counts in the result of all contracts; a demoted one does not."""
        return self.contract is None or not self.contract.demoted_by


def overview(
    paths: Sequence[Path] = (),
    *,
    root: Path = Path(),
    receipts: Path = FOLDER,
    now_s: float | None = None,
) -> list[Status]:
    """Return the status of the given contracts (default: all of the project), from their files and last receipts.
    Raises BadInput if there is no contract. Imports no torch and starts no process, so screens and notebooks can call
    it."""
    folder = receipts if receipts.is_absolute() else root / receipts
    now_s, sources = now_s or time.time(), Sources(root)
    return [_status(file, sources, folder, now_s) for file in checked_contracts(paths, root)]


def _status(file: Loaded, sources: Sources, folder: Path, now_s: float) -> Status:
    contract, checks = file.contract, tuple[Check, ...]()
    if contract is None:
        answer = Answer(Rank.FAIL, "the file has errors")
    else:
        try:
            receipts = read_receipts(folder, contract.id)
            checks = tuple(_checks(contract, receipts, code_hash(contract, sources), now_s))
            answer = _overall(contract, checks)
        except BadInput as error:
            answer = Answer(Rank.NOT_RUN, error.message)
    return Status(
        id=file.path.stem,
        path=file.path,
        problems=tuple(str(problem) for problem in file.problems),
        contract=contract,
        answer=answer,
        checks=checks,
    )


def _checks(
    contract: Contract, receipts: dict[str, Receipt], code_sha256: str, now_s: float
) -> Iterable[Check]:
    for id_, kind, says, *details in (
        (VALID, VALID, "the file has no errors"),
        *(
            (
                falsifier.id,
                TEST,
                falsifier.prediction,
                falsifier.test,
                f"if it fails: {falsifier.if_fails}",
                *(
                    [f"differs from the published contract: {falsifier.differs}"]
                    if falsifier.differs
                    else ()
                ),
            )
            for falsifier in contract.active
        ),
        *(
            (proof.id, PROOF, f"{proof.engine} {proof.harness}, {proof.bound}")
            for proof in contract.file.proof_harnesses
        ),
        *(
            (
                bug.id,
                PLANTED,
                bug.what,
                f"in {bug.edit.module}; must fail: {', '.join(bug.turns_red)}",
            )
            for bug in contract.planted
        ),
    ):
        answer, age_s = Answer(Rank.NOT_RUN, "no receipt; `engine contracts run`"), None
        if (receipt := receipts.get(id_)) is not None:
            answer, age_s = answer_of(receipt, contract, code_sha256), now_s - receipt.unix_s
        yield Check(
            id=id_, kind=kind, says=says, details=tuple(details), answer=answer, age_s=age_s
        )


def _overall(contract: Contract, checks: Sequence[Check]) -> Answer:
    """Return Report for a demoted contract, else the lowest result of its tests, proofs and planted bugs."""
    counted = [c for c in checks if c.kind != VALID]
    if contract.demoted_by:
        return Answer(Rank.REPORT, f"demoted by {contract.demoted_by}")
    lowest = meet_all(check.answer for check in counted)
    if lowest.rank is Rank.PASS:
        return Answer(Rank.PASS, f"{len(counted)} checks passed")
    ids = [check.id for check in counted if check.answer.rank is lowest.rank]
    others = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
    return Answer(lowest.rank, f"{ids[0]}{others}: {lowest.text}" if ids else lowest.text)
