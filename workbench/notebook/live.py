"""Live: one run in a cell. The cell starts it, attaches to it, or shows it long after it ended.

    Live("runs/kd-1")                          a run of this machine, active or ended
    Live("kd.toml", set=["train.steps=50"])    a run to be started, by its button or `start()`
    Live("kd.toml", out="runs/first")          the same; if runs/first already exists, it attaches to that

The last form is for notebooks that are run again: after a restart of the kernel the same cell shows the same
run. A page requests the run when it is opened or reloaded (`ready`) and gets it thinned, then the additions.
A kernel that is running a cell does not receive the request; so, from the display of the widget until the
request arrives, the whole run is sent every PREVIEW_S, thinned further.
"""

from __future__ import annotations

import importlib.resources
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import ipywidgets
import traitlets

from engine.errors import BadInput, UsageError
from engine.log.folder import RunFolder, is_run, open_run
from engine.report.chart import run_figures
from engine.watch.verdict_line import run_verdict_lines
from workbench.engine_commands import resume_run, start_run, stop_run
from workbench.feed import RunFeed, Snapshot
from workbench.notebook.panel import Panel
from workbench.notebook.stream import Stream
from workbench.panes import outcome_words

if TYPE_CHECKING:
    import pandas

REFRESH_S = 0.5
PREVIEW_S, PREVIEW, PREVIEW_PANES = 2.0, 48, ("alerts", "result")
PREVIEWS_AFTER = 3
"""Previews still sent after a run has ended: a page may be slow to open."""
STILL_LIMIT = 100


def script(name: str, package: str = "workbench.notebook") -> str:
    """Return the content of a page file: a widget that is given a path is never freed."""
    return (importlib.resources.files(package) / name).read_text(encoding="utf-8")


class RunPlot(anywidget.AnyWidget):
    """The page's half of Live. Its only synced state is `key`; rows are sent as messages."""

    _esm = script("chart.js", "engine.report") + script("live.js")
    _css = script("live.css")
    key = traitlets.Unicode().tag(sync=True)


class Live(Panel):
    """One run, live."""

    def __init__(
        self,
        run: str | Path | RunFolder,
        *,
        set: Sequence[str] = (),
        out: str | Path | None = None,
        refresh_s: float = REFRESH_S,
    ) -> None:
        super().__init__(refresh_s)
        path = run.path if isinstance(run, RunFolder) else Path(run)
        self._spec: Path | None = None
        self._sets, self._out = tuple(set), None if out is None else Path(out)
        self._feed: RunFeed | None = None
        self.snapshot: Snapshot | None = None
        self._stream, self._asked, self._has_page = Stream(), threading.Event(), False
        self._previewed, self._previews_left = 0.0, PREVIEWS_AFTER
        self._starting = threading.Lock()
        if path.is_file():
            self._spec = path
            if self._out is not None and is_run(self._out):
                self._attach(open_run(self._out))
        elif set or out is not None:
            raise BadInput.expected("Live", path, "a spec, where `set` or `out` is given", "none")
        else:
            self._attach(open_run(path))
        self._plot = RunPlot(key=self.key)
        self._plot.on_msg(self._hear)
        self._buttons = {
            name: ipywidgets.Button(description=name, disabled=True, tooltip=tooltip)
            for name, tooltip in (
                ("start", "start the run of this spec"),
                ("stop", "finish the step, save a checkpoint, stop"),
                ("resume", "continue from the newest checkpoint"),
            )
        }
        self._buttons["start"].on_click(
            lambda _: self._command("start", lambda: f"started {self.start().path}")
        )
        self._buttons["stop"].on_click(lambda _: self._command("stop", self.stop))
        self._buttons["resume"].on_click(
            lambda _: self._command("resume", lambda: f"resumed {self.resume().path}")
        )
        self._draw_buttons()
        row = ipywidgets.HBox([*self._buttons.values(), self._said])
        self._begin(ipywidgets.VBox([row, self._plot]))

    def __repr__(self) -> str:
        source = self._spec if self._feed is None else self._feed.run.path
        return f"Live({str(source)!r})"

    @property
    def run(self) -> RunFolder | None:
        """The run; None before it was started."""
        return None if self._feed is None else self._feed.run

    # Actions of the user.

    def start(self) -> RunFolder:
        """Start the run of the spec, or return the one already started. Returns as soon as the run continues
        without this process. Raises BadInput, and UsageError where a run was given instead of a spec."""
        if self._spec is None:
            raise UsageError(f"{self!r}: expected a spec to start, found a run")
        # A second click while the first is being answered must not start a second run.
        with self._starting:
            if self._feed is None:
                self._attach(start_run(self._spec, self._sets, self._out))
        self._wake.set()
        assert self._feed is not None
        return self._feed.run

    def stop(self) -> str:
        """Ask the run to finish its step, save and stop, or send SIGTERM to a watched script; returns the engine's
        message. Raises UsageError before the start."""
        if self._feed is None:
            raise UsageError("Live: expected a run that was started, found none")
        return stop_run(self._feed.run)

    def resume(self) -> RunFolder:
        """Continue a run that ended before its last step. Raises BadInput, and UsageError before the start."""
        if self._feed is None:
            raise UsageError("Live: expected a run that was started, found none")
        resume_run(self._feed.run)
        self._wake.set()
        return self._feed.run

    def frame(self, what: str = "steps") -> pandas.DataFrame:
        """Return what was read so far as a pandas table: steps, device or compiles. Raises UsageError before the first
        reading."""
        from workbench.notebook.frames import frame_of

        if self.snapshot is None:
            raise UsageError("Live: expected a run that was read, found none yet", hint="wait()")
        return frame_of(self.snapshot.view, what)

    def _attach(self, run: RunFolder) -> None:
        self._feed = RunFeed(run)

    # The polling thread.

    def tick(self) -> None:
        """Read the run; send what is new to the page, if there is one."""
        feed = self._feed
        if self._asked.is_set():
            self._asked.clear()
            self._has_page = True
            self._stream.reset()
        if feed is None:
            if self._has_page:
                panes = {"status": f"{self._spec}: not started"}
                self._plot.send({"kind": "words", "panes": panes})
                self._has_page = False
            return
        was_over = self.is_over
        snapshot = self.snapshot = feed.poll()
        self._draw_buttons()
        if self._has_page or self._asked.is_set():
            self._has_page = True
            for message in self._stream.messages(snapshot):
                self._plot.send(message.content, list(message.buffers))
        elif self._shown and not snapshot.behind:
            self._preview(snapshot)
        if self.is_over and not was_over:
            self._update_still()
        if snapshot.behind:
            self._wake.set()

    def _preview(self, snapshot: Snapshot) -> None:
        """Send the whole run, thinned, for a page whose request is not received while a cell runs."""
        now = time.monotonic()
        if now - self._previewed < PREVIEW_S or not self._previews_left:
            return
        self._previewed = now
        for message in Stream(history=PREVIEW, panes=PREVIEW_PANES).messages(snapshot):
            self._plot.send(message.content, list(message.buffers))
        self._previews_left = self._previews_left - 1 if snapshot.has_ended else PREVIEWS_AFTER

    @property
    def is_over(self) -> bool:
        return self.snapshot is not None and self.snapshot.has_ended and not self.snapshot.behind

    @property
    def is_current(self) -> bool:
        return self._looked and (self.snapshot is None or not self.snapshot.behind)

    def still(self) -> tuple[list[str], list[str]]:
        snapshot = self.snapshot
        if snapshot is None:
            return [], [f"{self!r}: nothing was read yet"]
        verdict = run_verdict_lines(snapshot.view, snapshot.state, snapshot.run.path)
        status = f"{snapshot.run.name}: {snapshot.status}"
        lines = [*verdict, status, *outcome_words(snapshot)]
        return run_figures(snapshot.view, limit=STILL_LIMIT), lines

    def _draw_buttons(self) -> None:
        target = None if self.snapshot is None else self.snapshot.target
        self._buttons["start"].disabled = self._spec is None or self._feed is not None
        for action in ("stop", "resume"):
            self._buttons[action].disabled = target is None or not target.can(action)

    def _hear(self, _: Any, content: dict[str, Any], __: Any) -> None:
        """Handle a message of a page, on any thread."""
        if content.get("kind") == "ready":
            self._asked.set()
            self._wake.set()
