"""Flip: test a suspicion with one click in a cell.

    flip = Flip("runs/kd-1")                                       choose what to test
    flip = Flip("runs/kd-1", set="teacher.backend=quantized")      name it
    flip.start(); flip.wait(); flip.result

The chooser offers what the run itself suggests: a flip for each alert that names one, then each automatic
choice that could have been made otherwise. The plan below the form is the one that would be registered. The
flip is `engine flip` in its own process: closing the widget or the kernel does not end it, and `Flip(run,
out=folder)` shows the same one again.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ipywidgets

from engine.errors import EngineError, UsageError
from engine.flips.proposals import proposals
from engine.log.folder import RunFolder, open_run
from engine.report.chart import flip_figure
from engine.terminal import as_html
from engine.units import parse_time
from workbench.feed import RunFeed, command_of
from workbench.flip_snapshots import FlipFeed, FlipSnapshot, Wanted, flip_lines, running_flip
from workbench.jobs import Job
from workbench.notebook.panel import Panel, hide_still

FLIPS = Path("flips")
REFRESH_S = 1.0


class Flip(Panel):
    """One flip of a run: its form, then its pairs and its verdict."""

    def __init__(
        self,
        run: str | Path | RunFolder,
        *,
        set: str = "",
        hypothesis: str = "",
        budget: str = "5m",
        out: str | Path | None = None,
        flips: str | Path = FLIPS,
        refresh_s: float = REFRESH_S,
    ) -> None:
        super().__init__(refresh_s)
        self._run = run if isinstance(run, RunFolder) else open_run(Path(run))
        self._out, self._flips = None if out is None else Path(out).absolute(), Path(flips)
        self._feed: FlipFeed | None = None
        self._started: Job | None = None
        self._starting = threading.Lock()
        self._planned: Wanted | None = None
        self._suggested = False
        self._ends: dict[str, str] = {}
        """Problem that each suggestion would fix, by its assignment."""
        self.snapshot: FlipSnapshot | None = None
        wide = {"width": "98%"}
        self._choice = ipywidgets.Dropdown(options=[("choose what to test", "")], layout=wide)
        self._set = self._field("B differs in", set, "teacher.backend=quantized", wide)
        self._hypothesis = self._field("hypothesis", hypothesis, "", wide)
        self._budget = self._field("budget", budget, "5m", {"width": "200px"})
        self._start_button = ipywidgets.Button(description="run flip")
        self._stop_button = ipywidgets.Button(description="stop flip", disabled=True)
        self._progress = ipywidgets.HTML()
        self._choice.observe(self._choose, names="value")
        for field in (self._set, self._hypothesis, self._budget):
            field.observe(lambda _: self._wake.set(), names="value")
        self._start_button.on_click(
            lambda _: self._command("flip", lambda: f"folder: {self.start()}")
        )
        self._stop_button.on_click(lambda _: self.stop())
        buttons = ipywidgets.HBox([self._start_button, self._stop_button, self._said])
        form = [self._choice, self._set, self._hypothesis, self._budget]
        folder = self._out or running_flip(self._flips, self._run.path)
        if folder is not None and (folder / "pairs.jsonl").is_file():
            self._feed = FlipFeed(folder)
        self._begin(ipywidgets.VBox([*form, buttons, self._progress]))

    @staticmethod
    def _field(words: str, value: str, example: str, layout: dict[str, str]) -> ipywidgets.Text:
        return ipywidgets.Text(
            value=value,
            description=words,
            placeholder=example,
            layout=layout,
            continuous_update=False,
        )

    def __repr__(self) -> str:
        return f"Flip({str(self._run.path)!r}, set={self._set.value!r})"

    @property
    def result(self) -> dict[str, Any] | None:
        """The verdict, the fields of verdict.json; None while there is none."""
        snapshot = self.snapshot
        return None if snapshot is None or snapshot.going_on else snapshot.verdict

    def start(self) -> Path:
        """Start the flip that the form describes, or attach to the one already started; returns its folder. Raises
        BadInput, UsageError."""
        # A second click while the first is being answered must not start a second flip.
        with self._starting:
            feed = self._feed
            if feed is None:
                feed = self._feed = self._start_form()
        self._wake.set()
        return feed.folder

    def stop(self) -> None:
        """End the flip and keep its measurements; a verdict so far is written. Has no effect on a flip that another
        process started."""
        if self._started is not None:
            self._started.stop()

    def _start_form(self) -> FlipFeed:
        wanted = self._form()
        if not wanted.assignment:
            raise UsageError("Flip: expected a setting to change, found none")
        parse_time("budget", wanted.budget)
        folder = self._out or wanted.folder(self._flips)
        self.snapshot = None
        self._started = wanted.start(self._run.path, folder)
        return FlipFeed(folder, self._started)

    def _form(self) -> Wanted:
        return Wanted(
            assignment=self._set.value.strip(),
            hypothesis=self._hypothesis.value.strip(),
            budget=self._budget.value.strip(),
            ends=self._ends.get(self._set.value.strip(), ""),
        )

    def _choose(self, change: Any) -> None:
        """Copy the choice into the form, on any thread."""
        chosen = self._choice.value
        if chosen:
            self._set.value, self._hypothesis.value = chosen

    # The polling thread.

    def tick(self) -> None:
        """Read the flip, or show the plan for the form."""
        feed = self._feed
        if feed is None:
            self._suggest()
            self._plan()
            return
        was_over = self.is_over
        snapshot = feed.poll()
        if not snapshot.going_on and snapshot.verdict is None:
            # The flip may have ended after its files were read and before its process was checked.
            snapshot = feed.poll()
        self.snapshot = snapshot
        self._start_button.disabled = True
        self._stop_button.disabled = self._started is None or not self._started.is_alive
        self._show(flip_lines(snapshot), figure=snapshot.plan is not None)
        if self.is_over and not was_over:
            self._update_still()
        if self._was_refused(snapshot):
            # Nothing was started: the form can be changed, and the refusal stays visible until then.
            self._feed, self._planned = None, self._form()
            self._start_button.disabled = False

    @staticmethod
    def _was_refused(snapshot: FlipSnapshot) -> bool:
        return not snapshot.going_on and snapshot.plan is None and snapshot.verdict is None

    @property
    def is_over(self) -> bool:
        return self.snapshot is not None and not self.snapshot.going_on

    def _suggest(self) -> None:
        if self._suggested:
            return
        self._suggested = True
        suggestions = proposals(RunFeed(self._run).read_all().view, command=command_of(self._run))
        options = [
            (f"{s.assignment}   {s.source}"[:160], (s.assignment, s.hypothesis))
            for s in suggestions
        ]
        self._ends = {proposal.assignment: proposal.ends for proposal in suggestions}
        self._choice.options = [*self._choice.options, *options]

    def _plan(self) -> None:
        form = self._form()
        if form == self._planned:
            return
        self._planned = form
        lines = [form.problem()]
        if not lines[0]:
            try:
                lines = form.check(self._run.path, self._flips)
            except EngineError as problem:
                lines = [str(problem)]
        self._show(lines, figure=False)

    def _show(self, lines: list[str], *, figure: bool) -> None:
        drawn = ""
        if figure and self.snapshot is not None and self.snapshot.plan is not None:
            drawn = flip_figure(self.snapshot.plan, self.snapshot.pairs)
        text = f"{hide_still(self.key)}{drawn}<pre>{as_html(chr(10).join(lines))}</pre>"
        if not self.is_closed and self._progress.value != text:
            self._progress.value = text

    def still(self) -> tuple[list[str], list[str]]:
        snapshot = self.snapshot
        if snapshot is None:
            return [], [f"{self!r}: not started"]
        figures = [] if snapshot.plan is None else [flip_figure(snapshot.plan, snapshot.pairs)]
        return figures, flip_lines(snapshot)
