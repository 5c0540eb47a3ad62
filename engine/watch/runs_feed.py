"""List runs: one row for each run in some folders, however it was started.

A run that has ended is read once, and again only when one of its logs has changed. Active runs are followed. A run
that cannot be read becomes a row with the reason, never an exception.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.errors import RunLogError
from engine.log.events import GpuSample
from engine.log.filters import Subject
from engine.log.fold import Follower
from engine.log.folder import FoundRun, RunFolder, find_all, settings_of
from engine.log.notes import NAME, Notes, read_notes
from engine.log.read import Liveness
from engine.log.sparkline import intervals
from engine.log.table import Table
from engine.log.text import (
    alert_lines,
    has_ended,
    level_text,
    one_line,
    result_lines,
    status_text,
)
from engine.log.view import RunView
from engine.watch.verdict_line import RunVerdict, verdict_of

READ_BUDGET_S = 0.5
"""Time budget for reading in one poll, in seconds."""
UNREADABLE = "unreadable"
READING = "reading"
FILES = ("events.jsonl", "device.jsonl", "watch.jsonl", NAME)
"""Files whose modification times show whether an ended run has changed. The user's notes can change without a log."""
CURVE_POINTS = 12
ALERTS_SHOWN = 6
"""Maximum number of a run's alerts shown in full in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run in a list."""

    path: Path
    name: str
    """The name of the run's folder, with its parent folder if that is not the listed folder."""
    state: str
    last_step: int
    total_steps: int | None
    loss: float | None
    heldout: float | None
    tokens_per_second: float | None
    began_unix_s: float
    """Time of the first line of the run's logs, or of its settings if there is no line yet."""
    error: str | None
    left_s: float | None = None
    """Seconds until its last step at the pace of this session; None for a run that has ended, or if it is
    unknown."""
    alive: bool = False
    """Whether a process of the run exists."""
    alerts: tuple[tuple[str, str], ...] = ()
    """Severity and id of each active alert, errors first."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Each setting by section.key; empty if the settings cannot be read."""
    teacher: str = ""
    student: str = ""
    """Short names of the models."""
    verdict: str = ""
    """Verdict in one line, or the reason why the run cannot be read."""
    level: str = ""
    """Level of the verdict; empty if there is none."""
    curve: tuple[float | None, ...] = ()
    """The loss in at most CURVE_POINTS equal intervals of the run; None for an interval with a
    non-finite loss or without a loss."""
    gpus: tuple[GpuSample, ...] = ()
    """Newest readings of each GPU, while a process of the run exists."""
    tags: tuple[str, ...] = ()
    note: str = ""
    words: tuple[str, ...] = ()
    """Summary of the run: its state in a sentence, its results, its alerts."""

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.began_unix_s)

    @property
    def subject(self) -> Subject:
        """The properties that a filter can test."""
        alerts = (f"{severity} {name}" for severity, name in self.alerts)
        models = (self.teacher, self.student)
        words = (self.name, self.state, *alerts, *self.tags, self.note, self.verdict, *models)
        measured = {"loss": self.loss, "held-out": self.heldout, "step": self.last_step}
        return Subject(
            state=self.state,
            tags=self.tags,
            values={**self.settings, **measured},
            words=" ".join([*words, self.error or ""]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsSnapshot:
    """All runs of some folders as of one poll."""

    folders: tuple[Path, ...]
    rows: tuple[RunRow, ...]
    error: str | None
    """Reason why a folder could not be listed."""
    behind: bool
    """Whether a run has not been read to its end yet."""


def _changed_ns(folder: str) -> tuple[int, ...]:
    """Return the modification time of each of FILES in nanoseconds; -1 for a missing file."""
    changed = []
    for name in FILES:
        try:
            changed.append(os.stat(f"{folder}/{name}").st_mtime_ns)
        except FileNotFoundError:
            changed.append(-1)
    return tuple(changed)


def _notes_of(run: RunFolder) -> Notes:
    """Return the user's notes of a run; if they cannot be read, the reason takes the note's place."""
    try:
        return read_notes(run)
    except RunLogError as problem:
        return Notes(text=one_line(problem.message))


def not_read(run: RunFolder, problem: OSError) -> str:
    return f"run folder: {run.path} — expected to read it, found {problem.strerror}"


class RunsFeed:
    """The runs of some folders, read again at each poll."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        budget_s: float = READ_BUDGET_S,
        first_share: float = 1.0,
        accepts: Callable[[Path], bool] = lambda _: True,
    ) -> None:
        """`first_share` is the share of the time budget that the first poll may use, 0 to 1: with 0 it lists the runs
        without reading them, so that a screen shows them at once. `accepts` is called before a run is read; a run
        that it rejects has no row."""
        self.folders = tuple(folders)
        self._accepts = accepts
        self._budget_s = budget_s
        self._followers: dict[str, Follower] = {}
        self._ended: dict[str, tuple[tuple[int, ...], RunRow]] = {}
        """The row of each ended run that was read to its end, and the modification times of its files."""
        self._share = first_share

    def poll(self) -> RunsSnapshot:
        """Return a row for each run, in the order of the folders and newest first in each."""
        share, self._share = self._share, 1.0
        until_s = time.monotonic() + self._budget_s * share
        runs, error = self._find()
        self._forget_all_but(runs)
        rows = [self._row(run, until_s) for run in runs.values()]
        return RunsSnapshot(
            folders=self.folders,
            rows=tuple(rows),
            error=error,
            behind=any(row.state == READING for row in rows),
        )

    def _find(self) -> tuple[dict[str, FoundRun], str | None]:
        runs: dict[str, FoundRun] = {}
        problems = []
        for folder in self.folders:
            try:
                for run in find_all(folder):
                    if run.key in self._ended or self._accepts(run.folder.path):
                        runs.setdefault(run.key, run)
            except OSError as problem:
                problems.append(f"{folder} — expected to list it, found {problem.strerror}")
        return runs, "; ".join(problems) or None

    def _forget_all_but(self, runs: dict[str, FoundRun]) -> None:
        self._followers = {key: f for key, f in self._followers.items() if key in runs}
        self._ended = {key: e for key, e in self._ended.items() if key in runs}

    def _row(self, run: FoundRun, until_s: float) -> RunRow:
        key = run.key
        if key not in self._ended and key not in self._followers and time.monotonic() >= until_s:
            return _row_of(run, RunView(), READING, None)
        try:
            changed_ns = (run.made_ns, *_changed_ns(key))
        except OSError as problem:
            return _row_of(run, RunView(), UNREADABLE, not_read(run.folder, problem))
        before_ns, row = self._ended.get(key, ((), None))
        if row is not None and before_ns[:-1] == changed_ns[:-1]:
            if before_ns != changed_ns:
                notes = _notes_of(run.folder)
                row = replace(row, tags=notes.tags, note=notes.text)
                self._ended[key] = changed_ns, row
            return row
        if (follower := self._followers.get(key)) is None:
            follower = self._followers[key] = Follower(run.folder)
        state, error = self._read(follower, until_s)
        row = _row_of(run, follower.view, state, error, follower.alive)
        is_over = state == UNREADABLE or (state != READING and has_ended(state))
        if is_over and not row.alive:
            self._ended[key] = changed_ns, row
            del self._followers[key]
        else:
            self._ended.pop(key, None)
        return row

    def _read(self, follower: Follower, until_s: float) -> tuple[str, str | None]:
        """Read new lines as far as the time allows, and return the state and the error."""
        if time.monotonic() >= until_s:
            return READING, None
        try:
            follower.read_all(until_s)
        except RunLogError as problem:
            return UNREADABLE, str(problem)
        except OSError as problem:
            return UNREADABLE, not_read(follower.run, problem)
        return READING if follower.is_behind else follower.state, None


def _row_of(
    run: FoundRun,
    view: RunView,
    state: str,
    error: str | None,
    alive: Liveness | None = None,
) -> RunRow:
    """Return the row of a run; `alive` is None for one that was not read."""
    student = view.eval_of("student")
    verdict = verdict_of(view, state, run.folder.path)
    alerts = [(level_text(alert), name) for name, alert in view.alerts.items()]
    settings = {} if alive is None else settings_of(run.folder)
    notes = Notes() if alive is None else _notes_of(run.folder)
    is_read = state not in (UNREADABLE, READING)
    is_alive = alive is not None and (alive.trainer or alive.supervisor)
    return RunRow(
        path=run.folder.path,
        name=run.name,
        state=state,
        last_step=view.last_step,
        total_steps=view.total_steps,
        loss=view.steps.last("loss"),
        heldout=student.loss if student else None,
        tokens_per_second=view.tokens_per_second(),
        began_unix_s=run.made_ns / 1e9 if view.first_unix_s is None else view.first_unix_s,
        error=error,
        left_s=None if has_ended(state) or state == UNREADABLE else view.eta_s(),
        alive=is_alive,
        # `error` sorts before `warning`, so alphabetical order puts the worst first.
        alerts=tuple(sorted(alerts)),
        settings=settings,
        teacher=model_name(settings.get("teacher.path")),
        student=model_name(settings.get("student.path")),
        # The row already names the run, so its cell shows only the finding.
        verdict=verdict.line if is_read else one_line((error or "").rpartition(" — ")[2]),
        level=verdict.level if is_read else "",
        curve=curve_of(view.steps),
        gpus=tuple(view.gpus.values()) if is_alive else (),
        tags=notes.tags,
        note=notes.text,
        words=_words_of(view, alive, verdict) if is_read and alive is not None else (),
    )


def _words_of(view: RunView, alive: Liveness, verdict: RunVerdict) -> tuple[str, ...]:
    """Return the lines of a run's summary."""
    newest = list(view.alerts.values())[-ALERTS_SHOWN:]
    return (
        verdict.line,
        *filter(
            None, (one_line(verdict.detail), verdict.action and f"do: {one_line(verdict.action)}")
        ),
        *(f"{finding.level}: {finding.text}" for finding in verdict.others),
        *status_text(view, alive).split(" | "),
        *result_lines(view),
        *(line for alert in newest for line in alert_lines(alert)),
    )


def curve_of(steps: Table) -> tuple[float | None, ...]:
    """Return the loss in equal intervals of the steps so far, each as the middle of its range."""
    parts = intervals(len(steps), min(CURVE_POINTS, len(steps)))
    ranges = [steps.range("loss", begin, end) for begin, end in parts]
    return tuple(
        None if r.non_finite or r.low is None or r.high is None else (r.low + r.high) / 2
        for r in ranges
    )


PLAIN_NAMES = frozenset({"student", "model", "snapshots"})
"""Names of files and folders that are too common to identify a model; the parent folder's name is shown instead."""


def model_name(path: object) -> str:
    """Return the short name of a model from its path: the name of its file or folder without suffix; for the student of
    a run, the name of the run."""
    if not isinstance(path, str) or not path:
        return ""
    parts = Path(path).parts
    for part in parts:
        if part.startswith("models--"):
            # A folder of the Hugging Face cache: models--ORG--NAME/snapshots/REVISION.
            return part.rpartition("--")[2]
    kept = [part for part in parts if Path(part).stem not in PLAIN_NAMES] or list(parts)
    last = kept[-1]
    return last.rpartition(".")[0] if last.endswith((".gguf", ".apr", ".safetensors")) else last
