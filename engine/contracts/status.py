"""What each contract has reached, from its receipts alone, and what a front end shows of it.

    none      the file has errors, or was not run since it or its code changed
    basic     the file is valid
    standard  and every active test passes
    strict    and every planted bug is caught, so the tests are known to be able to fail
    proven    and there are proofs, and all of them hold

The names are upstream's; there they are counts of text, here they are computed each time from what ran.
The verdict of a contract is the meet of its tests, proofs and planted bugs: one that skipped makes it
Unknown. What was demoted is neither run nor counted, and is shown with the finding that demoted it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from engine.contracts.answer import Answer, Rank, meet_all
from engine.contracts.contract import Contract
from engine.contracts.load import Loaded
from engine.contracts.receipt import FOLDER, VALID, Receipt, answer_of, code_hash, read_receipts
from engine.contracts.resolve import checked_contracts
from engine.contracts.source import Sources
from engine.errors import BadInput


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
    """test, proof or planted."""
    says: str
    """The prediction, the harness with its bound, or the bug."""
    answer: Answer
    age_s: float | None
    """Seconds since it ran; None where it never did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    contract: Contract | None
    """None for a file with errors."""
    id: str
    path: Path
    problems: tuple[str, ...]
    reached: Reached
    answer: Answer
    checks: tuple[Check, ...]
    age_s: float | None
    """Seconds since the oldest of its receipts."""

    @property
    def counts(self) -> bool:
        """Whether it takes part in the answer of all: one that was demoted does not."""
        return self.contract is None or not self.contract.demoted_by


def overview(
    paths: Sequence[Path] = (),
    *,
    root: Path = Path(),
    receipts: Path = FOLDER,
    now_s: float | None = None,
) -> list[Status]:
    """Every contract of a project with its equations, its last results and their age. Raises BadInput
    where there is no contract. Loads no torch and starts nothing: for screens and notebooks."""
    loaded = checked_contracts(paths, root)
    folder = receipts if receipts.is_absolute() else root / receipts
    return [status_of(one, root, folder, now_s or time.time()) for one in loaded]


def status_of(one: Loaded, root: Path, folder: Path, now_s: float) -> Status:
    problems = tuple(str(problem) for problem in one.problems)
    contract = one.contract
    if contract is None:
        answer = Answer(Rank.FAIL, "the file has errors")
        return _status(one, None, problems, answer, (), None)
    try:
        found = read_receipts(folder, contract.id)
    except BadInput as error:
        answer = Answer(Rank.NOT_RUN, error.message)
        return _status(one, contract, problems, answer, (), None)
    code_sha256 = code_hash(contract, Sources(root))

    def check(id_: str, kind: str, says: str) -> Check:
        receipt: Receipt | None = found.get(id_)
        if receipt is None:
            answer = Answer(Rank.NOT_RUN, "no receipt; `engine contracts run`")
            return Check(id=id_, kind=kind, says=says, answer=answer, age_s=None)
        answer = answer_of(receipt, contract, code_sha256)
        return Check(id=id_, kind=kind, says=says, answer=answer, age_s=now_s - receipt.unix_s)

    checks = (
        check(VALID, VALID, "the file has no errors"),
        *(check(f.id, "test", f.prediction) for f in contract.active),
        *(check(p.id, "proof", f"{p.engine} {p.harness}, {p.bound}") for p in contract.proofs),
        *(check(p.id, "planted", p.what) for p in contract.planted),
    )
    answer = _overall(contract, checks)
    ages = [c.age_s for c in checks if c.age_s is not None]
    return _status(one, contract, problems, answer, checks, max(ages, default=None))


def _overall(contract: Contract, checks: Sequence[Check]) -> Answer:
    asked = [c for c in checks if c.kind != VALID]
    if contract.demoted_by:
        return Answer(Rank.REPORT, f"demoted by {contract.demoted_by}")
    if not contract.runs:
        return Answer(Rank.NO_CHECKABLE, "not of dialect engine-1: nothing in it runs here")
    lowest = meet_all(check.answer for check in asked)
    if lowest.rank is Rank.PASS:
        return Answer(Rank.PASS, f"{len(asked)} checks passed")
    ids = [check.id for check in asked if check.answer.rank is lowest.rank]
    more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
    return Answer(lowest.rank, f"{ids[0]}{more}: {lowest.text}" if ids else lowest.text)


def _status(
    one: Loaded,
    contract: Contract | None,
    problems: tuple[str, ...],
    answer: Answer,
    checks: tuple[Check, ...],
    age_s: float | None,
) -> Status:
    return Status(
        contract=contract,
        id=one.path.stem,
        path=one.path,
        problems=problems,
        reached=reached(checks),
        answer=answer,
        checks=checks,
        age_s=age_s,
    )


def reached(checks: Sequence[Check]) -> Reached:
    """The level, from the answers of the checks."""

    def all_of(kind: str) -> bool:
        answers = [c.answer.rank for c in checks if c.kind == kind]
        return bool(answers) and all(rank is Rank.PASS for rank in answers)

    level = Reached.NONE
    for kind, next_level in (
        (VALID, Reached.BASIC),
        ("test", Reached.STANDARD),
        ("planted", Reached.STRICT),
        ("proof", Reached.PROVEN),
    ):
        if not all_of(kind):
            break
        level = next_level
    return level
