"""What the lists of contracts are fed: each with its level, verdict and age, from receipts alone.

Evaluating all contracts parses their files and hashes the code they bind, which takes a second or
more. So it is done again only when a contract, a receipt or a source file has changed, or is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.contracts.answer import Rank
from engine.contracts.contract import Contract
from engine.contracts.receipt import FOLDER, code_files
from engine.contracts.source import Sources
from engine.contracts.status import Check, Status, overview
from engine.errors import BadInput
from engine.log.text import one_line
from engine.verdict import Level, lowest
from workbench.listing import TONE_OF, Listing, Row, Tone, age_text

NONE = """\
No contract here: {problem}

Contracts are files `contracts/NAME.yaml` of a project; each says what its code promises, and how that is
tested. Start the workbench in the folder that has them, or begin one:

  engine contracts validate contracts/NAME.yaml   what is wrong with it, with line and column
  engine contracts run NAME                       run its tests, proofs and planted bugs"""
JOB = "contracts"


class ContractsFeed:
    """Evaluates the contracts of a project when something has changed."""

    def __init__(self, root: Path = Path(), receipts: Path = FOLDER) -> None:
        self._root, self._receipts = root, receipts
        self._seen: object = None
        self._code: set[Path] = set()
        self._statuses: tuple[Status, ...] = ()

    def statuses(self) -> tuple[Status, ...]:
        """Every contract as it stands now. Raises BadInput where there is none."""
        if self._seen is None or self._fingerprint() != self._seen:
            self._statuses = tuple(overview(root=self._root, receipts=self._receipts))
            found = [status.contract for status in self._statuses if status.contract is not None]
            sources = Sources(self._root)
            self._code = {file for contract in found for file in code_files(contract, sources)}
            self._seen = self._fingerprint()
        return self._statuses

    def poll(self) -> Listing:
        """The list of them."""
        try:
            statuses = self.statuses()
        except BadInput as problem:
            return Listing(head="contracts: none", empty=NONE.format(problem=problem))
        return listing_of(statuses)

    def _fingerprint(self) -> object:
        """Of all files that an answer depends on: when each was changed, and how big it is."""
        folders = (self._root / "contracts", self._root / self._receipts)
        files = {file for folder in folders if folder.is_dir() for file in folder.iterdir()}
        found = []
        for file in sorted(files | self._code):
            try:
                stat = file.stat()
            except OSError:
                continue
            found.append((file, stat.st_mtime_ns, stat.st_size))
        return tuple(found)


def listing_of(statuses: Sequence[Status]) -> Listing:
    """Contracts as rows, and how many hold."""
    levels = [status.answer.level for status in statuses if status.counts]
    counts = ", ".join(
        f"{levels.count(level)} {words}"
        for level, words in (
            (Level.PASS, "pass"),
            (Level.FAIL, "fail"),
            (Level.UNKNOWN, "unknown"),
        )
    )
    overall = lowest(status.answer.verdict for status in statuses if status.counts)
    return Listing(
        head=f"contracts: {overall.level.name}, {counts} of {len(statuses)}",
        rows=tuple(
            Row(
                key=status.id,
                name=status.id,
                text=f"{status.answer.level.name:7}  "
                f"{status.reached.name.lower():8}  {age_text(status.age_s):>7}",
                tone=tone_of(status),
                lines=tuple(contract_lines(status)),
            )
            for status in statuses
        ),
    )


def tone_of(status: Status) -> Tone:
    """How a contract is drawn; a demoted one does not count."""
    return TONE_OF[status.answer.level] if status.counts else "quiet"


def contract_lines(status: Status) -> Iterator[str]:
    """All of one contract: its answer, equations, claims, and each check with its last result."""
    yield f"{status.id}: {status.answer.level.name}"
    yield f"  {one_line(str(status.answer))}"
    oldest = age_text(status.age_s)
    age = "no receipt yet" if status.age_s is None else f"oldest receipt {oldest} old"
    yield f"  level {status.reached.name.lower()}, {age}"
    for problem in status.problems:
        yield f"  {one_line(problem)}"
    contract = status.contract
    if contract is None:
        return
    yield f"  {one_line(contract.description)}"
    if any(check.answer.rank is Rank.WITNESS_STALE for check in status.checks):
        yield "stale"
        reasons = [c.answer.text for c in status.checks if c.answer.rank is Rank.WITNESS_STALE]
        yield from (
            f"  {text}; `engine contracts run {status.id}`" for text in dict.fromkeys(reasons)
        )
        yield f"  bound: {', '.join(contract.binds) or 'nothing'}"
    yield from _claims(contract)
    tests = {falsifier.id: falsifier for falsifier in contract.falsifiers}
    planted = {bug.id: bug for bug in contract.planted}
    for kind, title in (("test", "falsifiers"), ("proof", "proofs"), ("planted", "planted bugs")):
        checks = [check for check in status.checks if check.kind == kind]
        if checks:
            yield title
        for check in checks:
            yield from _check(check)
            if (falsifier := tests.get(check.id)) is not None and kind == "test":
                yield f"      {falsifier.test}"
                yield f"      if it fails: {one_line(falsifier.if_fails)}"
                if falsifier.differs:
                    yield f"      not as published: {one_line(falsifier.differs)}"
            if (bug := planted.get(check.id)) is not None and kind == "planted":
                yield f"      in {bug.module}; must turn red: {', '.join(bug.turns_red)}"


def _claims(contract: Contract) -> Iterator[str]:
    for title, pairs in (("equations", contract.equations), ("obligations", contract.obligations)):
        if pairs:
            yield title
        yield from (f"  {name}: {one_line(text)}" for name, text in pairs)
    if contract.demoted or contract.demoted_by:
        yield "demoted"
    if contract.demoted_by:
        yield f"  all of it, by {contract.demoted_by}"
    yield from (f"  {id_}: {one_line(text)} (by {by})" for id_, text, by in contract.demoted)


def _check(check: Check) -> Iterator[str]:
    sign = {Level.PASS: "+", Level.FAIL: "!", Level.UNKNOWN: "?"}[check.answer.level]
    age = "never run" if check.age_s is None else f"{age_text(check.age_s)} ago"
    yield f"  {sign} {check.id}: {check.answer.level.name.lower()}, {age}; {one_line(check.answer.text)}"
    yield f"      {one_line(check.says)}"
