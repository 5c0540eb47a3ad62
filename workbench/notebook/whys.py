"""Whys: a finding in a cell: its tree, and what can be done with it.

    whys = Whys("hang", claim="no step in 90 minutes")     begins it in ./evidence, or opens it
    whys.link(live, "n1", metric="loss")                   the window selected in Live, else the whole run
    whys.link(flip, "n2")                                  the verdict of a Flip
    whys.add("attention ran on the CPU", why_of=["n1"])

Each change is made under the lock of the bundle and shown at once; what is refused is said in the words of
the engine. The buttons verify and export; the form adds an answer to a why. Closing a finding is left
to `engine why close`, where its rules are answered.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

import ipywidgets

from engine.errors import EngineError, UsageError
from engine.evidence.bundle import Bundle, find_bundle, find_bundles
from engine.evidence.capture import Capture, capture_metric, capture_window
from engine.evidence.context import run_blobs
from engine.evidence.finding import Finding
from engine.evidence.flips import capture_flip
from engine.evidence.redact import Redactor
from engine.evidence.report import tree_lines
from engine.evidence.verify import Checked, check_bundle
from engine.evidence.whys import add_node, blobs_of, link, new_finding, refute
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
        self._buttons: dict[str, ipywidgets.Button] = {}
        for name, tooltip, call in (
            ("add", "add this answer to the why", self._add),
            ("verify", "hash and evaluate all evidence again", self._verify),
            ("export", "enter the finding into LOG.md", self._export),
        ):
            button = ipywidgets.Button(description=name, tooltip=tooltip)
            button.on_click(lambda _, name=name, call=call: self._command(name, call))
            self._buttons[name] = button
        form = ipywidgets.HBox([self._of, self._kind])
        row = ipywidgets.HBox([*self._buttons.values(), self._said])
        self._begin(ipywidgets.VBox([self._tree, form, self._claim, row]))

    def __repr__(self) -> str:
        return f"Whys({self.bundle.path.name!r})"

    # What a person does

    def add(self, claim: str, *, why_of: Sequence[str], kind: str = "hypothesis") -> str:
        """Add an answer to why `why_of` is so; returns its id. Raises BadInput."""
        done = self._change(lambda f: (add_node(f, claim, why_of=why_of, kind=kind), None))  # type: ignore[arg-type]
        return done.nodes[-1].id

    def refute(self, node: str, reason: str) -> None:
        """Say that a claim does not hold. Raises BadInput."""
        self._change(lambda f: (refute(f, node, reason), None))

    def link(
        self, source: Live | Flip, node: str, *, metric: str = "", says: str = "supports"
    ) -> str:
        """Put evidence under a node; returns its id. Of a Live: `metric` (as `loss`, `gpu0.gpu_util_pct`) over
        the window that is selected there, or all events of that window; of a Flip: its verdict. Raises
        BadInput, UsageError."""
        capture = _captured(source, metric)

        def change(finding: Finding) -> tuple[Finding, Capture]:
            linked = link(finding, node, capture, says=says, relative_to=self.bundle.path)  # type: ignore[arg-type]
            return linked, capture

        return self._change(change).node(node).evidence[-1].id

    def verify(self) -> Checked:
        """Hash and evaluate all evidence again."""
        return check_bundle(self.bundle)

    def export(self) -> Path:
        """Enter the finding into LOG.md beside it. Raises BadInput for one that is not sound."""
        return self.bundle.export().path

    def _change(self, change: Callable[[Finding], tuple[Finding, Capture | None]]) -> Finding:
        with self.bundle.locked():
            finding, capture = change(self.bundle.load())
            done = self.bundle.save(finding, blobs_of(capture) if capture is not None else [])
        self._wake.set()
        return done

    # Buttons

    def _add(self) -> str:
        parents = self._of.value.replace(",", " ").split()
        return f"added {self.add(self._claim.value, why_of=parents, kind=self._kind.value)}"

    def _verify(self) -> str:
        verdict = self.verify().verdict
        return f"{verdict.level.name.lower()}: {verdict.reason}"

    def _export(self) -> str:
        return f"exported {self.export()}"

    # What the thread does

    def tick(self) -> None:
        """Show the tree as it is on disk: a shell may have changed it."""
        text = f"{hide_still(self.key)}<pre>{html.escape(chr(10).join(self.still()[1]))}</pre>"
        if not self.is_closed and self._tree.value != text:
            self._tree.value = text
            self._update_still()

    @property
    def is_over(self) -> bool:
        """A finding is never over."""
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
    # The same cell, run again, goes on with the finding that it began.
    for bundle in find_bundles(folder):
        if bundle.path.name[11:] == name:
            return bundle
    return Bundle.create(folder, new_finding(name, claim))


def _captured(source: Live | Flip, metric: str) -> Capture:
    redactor = Redactor()
    if isinstance(source, Flip):
        if source.result is None:
            raise UsageError(f"{source!r}: expected a flip with a verdict, found none yet")
        return capture_flip(source.result.folder, redactor)
    run = source.run
    if run is None:
        raise UsageError(f"{source!r}: expected a run that was started, found none")
    if source.window is None and not metric:
        raise UsageError(f"{source!r}: expected a metric or a selected window, found neither")
    begin, end = source.window or (float("-inf"), float("inf"))
    if metric:
        found = capture_metric(run, metric, redactor, from_unix_s=begin, to_unix_s=end)
    else:
        found = capture_window(run, "events", begin, end, redactor)
    return found.with_attached(run_blobs(run, redactor))
