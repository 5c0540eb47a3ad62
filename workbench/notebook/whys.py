"""Whys: a finding in a cell, as a tree with its actions.

    whys = Whys("hang", claim="no step in 90 minutes")     begins it in ./evidence, or opens it
    whys.link(live, "n1", metric="loss")                   the window selected in Live, else the whole run
    whys.link(flip, "n2")                                  the verdict of a Flip
    whys.add("attention ran on the CPU", why_of=["n1"])
    whys.suspect("n2", "the loader is slow", test="...", if_true="...", if_false="...", minutes=2)
    whys.reproduce("n2", "engine drill cpu_operators", expect_text="gpu_idle")
    whys.answer("a1", "excluded", "data took 2 % of the step", evidence="e3")
    whys.conclude("attention ran on the CPU")

Each change is made under the lock of the bundle and shown at once; a refusal shows the message of
the engine. The buttons do the same from the page: add an answer to a why, link the window that was selected last in
any Live of this kernel, verify, export. `conclude` refuses while a rule is open, and says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipywidgets

from engine.errors import EngineError, UsageError
from engine.findings import changes
from engine.findings.bundle import Bundle, find_bundle, find_bundles
from engine.findings.capture import (
    COMMAND_LIMIT_S,
    Capture,
    capture_command,
    capture_flip,
    capture_part,
)
from engine.findings.changes import Done, Take
from engine.findings.context import run_blobs
from engine.findings.logs import Window
from engine.findings.redact import Redactor
from engine.findings.report import hanging
from engine.findings.text import tree_lines
from engine.findings.verify import Checked, check_bundle
from workbench.notebook.flip import Flip
from workbench.notebook.live import Live
from workbench.notebook.panel import Panel, hide_still

FOLDER = Path("evidence")
KINDS = ("hypothesis", "mechanism", "observation")
REFRESH_S = 5.0


class Whys(Panel):
    """One finding."""

    def __init__(
        self, finding: str | Path, *, claim: str = "", folder: str | Path = FOLDER
    ) -> None:
        super().__init__(REFRESH_S)
        self.bundle = _open(str(finding), claim, Path(folder))
        self._tree = ipywidgets.HTML()
        wide = {"width": "98%"}
        self._of = ipywidgets.Text(value="n1", description="why of", layout={"width": "200px"})
        self._kind = ipywidgets.Dropdown(options=KINDS, description="kind")
        self._claim = ipywidgets.Text(description="because", layout=wide)
        self._node = ipywidgets.Text(
            value="n1", description="evidence of", layout={"width": "200px"}
        )
        self._metric = ipywidgets.Text(
            description="metric", placeholder="loss, gpu0.gpu_util_pct; none: all events"
        )
        self._buttons: dict[str, ipywidgets.Button] = {}
        for name, tooltip, call in (
            ("add", "add this answer to the why", self._add),
            (
                "link window",
                "put the window selected in a Live under this claim",
                self._link_window,
            ),
            ("verify", "hash and evaluate all evidence again", self._verify),
            ("export", "enter the finding into LOG.md", self._export),
        ):
            button = ipywidgets.Button(description=name, tooltip=tooltip)
            button.on_click(lambda _, name=name, call=call: self._command(name, call))
            self._buttons[name] = button
        why = ipywidgets.HBox([self._of, self._kind, self._buttons["add"]])
        evidence = ipywidgets.HBox([self._node, self._metric, self._buttons["link window"]])
        row = ipywidgets.HBox([self._buttons["verify"], self._buttons["export"], self._said])
        self._begin(ipywidgets.VBox([self._tree, why, self._claim, evidence, row]))

    def __repr__(self) -> str:
        return f"Whys({self.bundle.path.name!r})"

    # Actions of the user.

    def add(self, claim: str, *, why_of: Sequence[str], kind: str = "hypothesis") -> str:
        """Add an answer to why `why_of` is so; returns its id. Raises BadInput."""
        done = changes.add(self.bundle, claim, why_of=why_of, kind=kind)  # type: ignore[arg-type]
        return self._wake_after(done).finding.nodes[-1].id

    def refute(self, node: str, reason: str) -> None:
        """Record that a claim does not hold. Raises BadInput."""
        self._wake_after(changes.refute(self.bundle, node, reason))

    def link(
        self,
        source: Live | Flip,
        node: str,
        *,
        metric: str = "",
        alert: str = "",
        check: str = "",
        says: str = "supports",
    ) -> str:
        """Put evidence under a node; returns its id. From a Live: `alert` with its readings, the result of a
        `check`, or `metric` (as `loss`, `gpu0.gpu_util_pct`) over the window selected there, or all events of
        that window. From a Flip: its verdict. Raises BadInput, UsageError."""
        return self._link(node, lambda: _captured(source, metric, alert, check), says)

    def reproduce(
        self,
        node: str,
        command: str | Sequence[str],
        *,
        expect_exit: int | None = None,
        expect_text: str = "",
        says: str = "supports",
        limit_s: float = COMMAND_LIMIT_S,
    ) -> str:
        """Run a command, without a shell, whose exit code or output must match the expectation; returns the id of the
        evidence. The cell waits for it, `limit_s` seconds at most. Raises BadInput."""
        expected: dict[str, Any] = {"expect_exit": expect_exit, "expect_text": expect_text}
        return self._link(
            node, lambda: capture_command(command, Redactor(), **expected, limit_s=limit_s), says
        )

    def suspect(
        self, node: str, claim: str, *, test: str, if_true: str, if_false: str, minutes: float
    ) -> str:
        """Name another explanation, and the cheapest test that tells them apart; returns its id. Raises
        BadInput."""
        asked: dict[str, Any] = {"test": test, "if_true": if_true, "if_false": if_false}
        done = changes.suspect(self.bundle, node, claim, **asked, minutes=minutes)
        return self._wake_after(done).finding.node(node).alternatives[-1].id

    def answer(self, alternative: str, outcome: str, text: str, *, evidence: str) -> None:
        """Record the result of testing another explanation: `excluded`, `holds` or `undecided`. Raises BadInput."""
        self._wake_after(changes.answer(self.bundle, alternative, outcome, text, evidence=evidence))

    def withdraw(self, entry: str, reason: str) -> None:
        """Withdraw a node, evidence or an alternative: it is kept, struck out, and supports nothing any more.
        Raises BadInput."""
        self._wake_after(changes.withdraw(self.bundle, entry, reason))

    def conclude(self, text: str = "", *, unresolved: str = "") -> None:
        """Close the finding with its root cause, or with the reason why it stays without one. Raises CannotClose
        with the open rules."""
        self._wake_after(changes.close(self.bundle, unresolved=unresolved, text=text))

    def _link(self, node: str, take: Take, says: str) -> str:
        done = changes.link(self.bundle, node, take, says=says)  # type: ignore[arg-type]
        return self._wake_after(done).finding.node(node).evidence[-1].id

    def verify(self) -> Checked:
        """Hash and evaluate all evidence again."""
        return check_bundle(self.bundle)

    def export(self) -> Path:
        """Enter the finding into LOG.md beside it. Raises BadInput if it is not sound."""
        return changes.export(self.bundle).path

    def _wake_after(self, done: Done) -> Done:
        self._wake.set()
        return done

    # Buttons

    def _add(self) -> str:
        parents = self._of.value.replace(",", " ").split()
        return f"added {self.add(self._claim.value, why_of=parents, kind=self._kind.value)}"

    def _link_window(self) -> str:
        live = None if Live.selected is None else Live.selected()
        if live is None:
            raise UsageError(
                "Whys: expected a window, found none", hint="drag over a chart of a Live"
            )
        node = self._node.value.strip()
        return f"linked {self.link(live, node, metric=self._metric.value.strip())} under {node}"

    def _verify(self) -> str:
        verdict = self.verify().verdict
        return f"{verdict.level.name.lower()}: {verdict.reason}"

    def _export(self) -> str:
        return f"exported {self.export()}"

    # The polling thread.

    def tick(self) -> None:
        """Show the tree as it is on disk, where a shell may have changed it."""
        text = f"{hide_still(self.key)}{hanging(self.still()[1])}"
        if not self.is_closed and self._tree.value != text:
            self._tree.value = text
            self._update_still()

    @property
    def is_over(self) -> bool:
        """Always False: a finding never ends."""
        return False

    def still(self) -> tuple[list[str], list[str]]:
        try:
            checked = check_bundle(self.bundle)
            faults = [f"changed: {fault}" for fault in checked.faults]
            return [], [*faults, *tree_lines(self.bundle.load(), checked.broken)]
        except EngineError as problem:
            return [], [str(problem)]


def _open(name: str, claim: str, folder: Path) -> Bundle:
    if not claim:
        return find_bundle(name, folder)
    # The same cell, run again, continues the finding that it started.
    for bundle in find_bundles(folder):
        if bundle.path.name[11:] == name:
            return bundle
    return changes.begin(folder, name, claim)


def _captured(source: Live | Flip, metric: str, alert: str, check: str) -> Capture:
    redactor = Redactor()
    if isinstance(source, Flip):
        if source.result is None:
            raise UsageError(f"{source!r}: expected a flip with a verdict, found none yet")
        return capture_flip(source.result.folder, redactor)
    run = source.run
    if run is None:
        raise UsageError(f"{source!r}: expected a run that was started, found none")
    if not (alert or check or metric or source.window):
        wanted = "an alert, a check, a metric or a selected window"
        raise UsageError(f"{source!r}: expected {wanted}, found none of them")
    window = Window(*(source.window or ()))
    asked: dict[str, Any] = {"alert": alert or None, "check": check or None}
    found = capture_part(run, redactor, **asked, metric=metric or None, window=window)
    return found.with_attached(run_blobs(run, redactor))
