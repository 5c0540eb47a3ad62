"""Contracts: what the code promises, with equations, last result and age, as in `engine contracts list`.

Evaluating receipts parses every contract and hashes the code it binds; it starts nothing and runs no test. No
comm is opened: the cell shows the state when it ran; run it again for the current state.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

from engine.contracts.measured import FOLDER
from engine.contracts.status import Status, overview
from engine.contracts.text import contract_lines, summary
from engine.errors import BadInput
from engine.log.text import one_line
from engine.terminal import as_html
from engine.verdict import Verdict, lowest
from workbench.notebook.outputs import show


class Contracts:
    """The contracts of the project in the folder `root`, or the named ones among them.

        Contracts()                        every contract, each with its equations folded out by a click
        Contracts("kd-loss-v1").verdict    as a value

    Raises BadInput where there is none, or none of a name.
    """

    def __init__(self, *ids: str, root: str | Path = ".", receipts: str | Path = FOLDER) -> None:
        found = {s.id: s for s in overview(root=Path(root), receipts=Path(receipts))}
        for id_ in ids:
            if id_ not in found:
                raise BadInput.expected(
                    "contract", id_, f"one of {', '.join(found)}", "none of them"
                )
        self.statuses: tuple[Status, ...] = tuple(found[id_] for id_ in ids or found)

    @property
    def verdict(self) -> Verdict:
        """The lowest verdict of the contracts that count; demoted ones do not."""
        return lowest(status.answer.verdict for status in self.statuses if status.counts)

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield one line for each contract, with its equations below it."""
        for status in self.statuses:
            yield summary(status)
            for name, formula in status.contract.equations if status.contract else ():
                yield f"    {name}: {one_line(formula)}"

    def page(self) -> str:
        """Return the same as HTML; a click on a contract opens its details."""
        parts = []
        for status in self.statuses:
            rows = status.contract.equations if status.contract else ()
            equations = "".join(
                f"<tr><td>{as_html(name)}</td><td><code>{as_html(one_line(formula))}</code>"
                "</td></tr>"
                for name, formula in rows
            )
            all_of_it = as_html("\n".join(contract_lines(status)))
            parts.append(
                f"<details><summary><code>{as_html(summary(status))}</code></summary>"
                f"<pre>{all_of_it}</pre></details><table>{equations}</table>"
            )
        return f"<div>{''.join(parts)}</div>"

    def _ipython_display_(self) -> None:
        bundle = {"text/html": self.page(), "text/plain": "\n".join(self.lines())}
        show(bundle, uuid.uuid4().hex[:12])
