"""The list of contracts: each with its level, verdict and age, computed from receipts alone.

Evaluating all contracts parses their files and hashes the code they bind, which takes a second or
more. So it is repeated only when a contract, a receipt or a source file has changed, or on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.contracts.measured import FOLDER, code_files
from engine.contracts.source import Sources
from engine.contracts.status import Status, overview
from engine.contracts.text import contract_lines
from engine.errors import BadInput
from engine.verdict import Level, lowest
from workbench.listing import TONE_OF, Listing, Row, age_text
from workbench.paths import stamps

NONE = """\
No contract here: {problem}

Contracts are files `contracts/NAME.yaml` of a project; each says what its code promises, and how that is \
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
        """Return the current status of every contract. Raises BadInput where there is none."""
        if self._seen is None or self._stamps() != self._seen:
            self._statuses = tuple(overview(root=self._root, receipts=self._receipts))
            contracts = [
                status.contract for status in self._statuses if status.contract is not None
            ]
            sources = Sources(self._root)
            self._code = {file for contract in contracts for file in code_files(contract, sources)}
            self._seen = self._stamps()
        return self._statuses

    def poll(self) -> Listing:
        """Return the list of contracts."""
        try:
            statuses = self.statuses()
        except BadInput as problem:
            return Listing(head="contracts: none", empty=NONE.format(problem=problem))
        return listing_of(statuses)

    def _stamps(self) -> object:
        """Return what differs once a file that a status depends on has changed."""
        folders = (self._root / "contracts", self._root / self._receipts)
        files = {file for folder in folders if folder.is_dir() for file in folder.iterdir()}
        return stamps(files | self._code)


def listing_of(statuses: Sequence[Status]) -> Listing:
    """Return contracts as rows, and how many hold; a demoted one does not count."""
    counted = [status.answer.verdict for status in statuses if status.counts]
    levels = [verdict.level for verdict in counted]
    counts = ", ".join(
        f"{levels.count(level)} {level.name.lower()}"
        for level in (Level.PASS, Level.FAIL, Level.UNKNOWN)
    )
    return Listing(
        head=f"contracts: {lowest(counted).level.name}, {counts} of {len(statuses)}",
        rows=tuple(
            Row(
                key=status.id,
                name=status.id,
                text=f"{status.answer.level.name:7}  "
                f"{status.reached.name.lower():8}  {age_text(status.age_s):>7}",
                tone=TONE_OF[status.answer.level] if status.counts else "quiet",
                lines=tuple(contract_lines(status)),
            )
            for status in statuses
        ),
    )
