"""Compare runs: their metrics, their results and the settings that differ, for the terminal, the notebook, a report
and the live page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.log.folder import RunFolder, WatchedCommand, settings_of
from engine.log.text import commit_text
from engine.log.view import RunView
from engine.spec.sections import options
from engine.units import format_bytes, format_count, format_seconds, format_value

NOT_SETTINGS = frozenset({"run.name", "run.out"})


@dataclass(frozen=True, slots=True)
class Metric:
    """A value logged at each step, or at each evaluation."""

    name: str
    column: str
    """Column of the table of steps; empty for the held-out loss."""
    text: Callable[[float | None], str] = format_value
    unit: str = ""

    @property
    def title(self) -> str:
        """The name with the unit, for a chart whose numbers have no unit."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


METRICS = (
    Metric("loss", "loss", unit="nats"),
    Metric("held-out", "", unit="nats"),
    Metric("step time", "step_s", format_seconds, "s"),
    Metric("tokens/s", "tokens_per_s", format_count),
    Metric("grad norm", "grad_norm"),
    Metric("lr", "lr"),
    Metric("kd", "kd", unit="nats"),
    Metric("ce", "ce", unit="nats"),
)
"""Metrics in the order of the display, the most common first."""


class Comparable(Protocol):
    """One of the runs that are compared."""

    @property
    def view(self) -> RunView: ...
    @property
    def state(self) -> str: ...
    @property
    def command(self) -> WatchedCommand | None:
        """Command of a watched script; None for a run of the engine."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Every effective setting; for `auto`, the resolved value is added."""

    @property
    def total_tokens(self) -> float | None:
        """Tokens of all steps; None if not known."""


def all_settings(run: RunFolder, view: RunView, command: WatchedCommand | None) -> dict[str, str]:
    """Return every setting of a run as text except NOT_SETTINGS, with the resolved values of `auto`, and the weights,
    device and versions that it used; for a watched script, the facts that are known."""
    of_command = _command_settings(command, view) if command else {}
    return {**_effective_settings(run, view), **of_command}


def _effective_settings(run: RunFolder, view: RunView) -> dict[str, str]:
    settings = {name: str(value) for name, value in settings_of(run).items()}
    for decision in view.decisions:
        requested = settings.get(decision.knob)
        if requested is not None and requested != decision.choice:
            settings[decision.knob] = f"{requested}: {decision.choice}"
    for role, model in view.models.items():
        settings[f"{role} weights"] = f"{model.sha256[:12]} {model.precision}"
    if view.started is not None:
        for name in ("device", "engine", "torch", "python"):
            settings[name] = str(getattr(view.started, name))
    return {key: value for key, value in settings.items() if key not in NOT_SETTINGS}


def _command_settings(command: WatchedCommand, view: RunView) -> dict[str, str]:
    """Return the known facts of a watched script, whose settings are unknown."""
    settings = {
        "command.line": command.line,
        "command.folder": command.folder,
        "command.commit": commit_text(command) or "unknown",
    }
    if (watched := view.watched) is not None:
        settings |= {
            "optimizer": f"{watched.optimizer} of {format_count(watched.parameters)} parameters",
            "device": watched.device,
            "torch": watched.torch,
            "python": watched.python,
        }
    return settings


ABSENT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that differs between runs."""

    key: str
    values: tuple[tuple[tuple[int, ...], str], ...]
    """Each distinct value with the indices of the runs that have it, in the order of the runs."""


FIRST = ("train.lr", "loss.alpha", "loss.temperature", "train.rows", "train.steps")
"""Settings that are listed first, because they are changed most often."""
OPTIONS = {option.key: option for option in options()}


def _place(key: str) -> tuple[int, int]:
    """Return the sort key of a setting that differs: numbers that change what is learnt, other numbers, choices, then
    paths, texts and facts from the log; within each group by `FIRST`."""
    option = OPTIONS.get(key)
    if option is None:
        kind = 3
    elif option.type_name in ("int", "float"):
        kind = 0 if option.changes_results else 1
    else:
        kind = 2 if option.allowed or option.type_name == "bool" else 3
    return kind, FIRST.index(key) if key in FIRST else len(FIRST)


def differing(runs: Sequence[Comparable], text: Callable[[str], str] = str) -> list[Difference]:
    """Return the settings that differ, numbers first, with each value formatted by `text`. A run whose settings
    cannot be read is left out of the comparison."""
    comparable = [index for index, run in enumerate(runs) if _is_known(run)]
    differences = []
    for key in dict.fromkeys(key for index in comparable for key in runs[index].settings):
        values: dict[str, list[int]] = {}
        for index in comparable:
            values.setdefault(runs[index].settings.get(key, ABSENT), []).append(index)
        if len(values) > 1:
            grouped = tuple((tuple(at), text(value)) for value, at in values.items())
            differences.append(Difference(key=key, values=grouped))
    return sorted(differences, key=lambda difference: _place(difference.key))


def _is_known(run: Comparable) -> bool:
    """Return whether the run's settings are recorded (`section.name`), and not only the models and device in its
    log."""
    return any("." in key for key in run.settings)


def settings_note(runs: Sequence[Comparable], letters: Sequence[str]) -> str:
    """Return the note below the settings that differ; empty if none is needed."""
    unknown = [x for run, x in zip(runs, letters, strict=True) if not _is_known(run)]
    if unknown:
        return f"{', '.join(unknown)}: no settings on record, so not compared"
    return "" if differing(runs) else "every setting is the same in all of them"


def results_table(runs: Sequence[Comparable]) -> list[list[str]]:
    """Return a row for each result: its name, and its value in each run."""
    columns = [_results(run) for run in runs]
    return [[name, *(column[name] for column in columns)] for name in columns[0]] if columns else []


def _results(run: Comparable) -> dict[str, str]:
    view = run.view
    steps = view.steps
    student = [e.loss for e in view.evals if e.subject == "student"]
    finite = [loss for loss in student if loss is not None and math.isfinite(loss)]
    teacher = view.eval_of("teacher")
    seconds = None
    if view.first_unix_s is not None and view.last_unix_s is not None:
        seconds = max(0.0, view.last_unix_s - view.first_unix_s)
    peak = view.memory_peak

    def shown(value: float | None, text: Callable[[float | None], str] = format_value) -> str:
        return ABSENT if value is None else text(value)

    return {
        "state": run.state,
        "step": f"{view.last_step}/{ABSENT if view.total_steps is None else view.total_steps}",
        "loss": shown(steps.last("loss")),
        "held-out": shown(student[-1] if student else None),
        "best held-out": shown(min(finite, default=None)),
        "teacher's": shown(teacher.loss if teacher else None),
        "tokens/s": shown(view.tokens_per_second(), format_count),
        # The tokens of a watched script's steps may be unknown.
        "tokens": shown(None if steps.last("tokens") is None else run.total_tokens, format_count),
        "wall time": shown(seconds, format_seconds),
        "peak memory": shown(getattr(peak, "measured_bytes", None), format_bytes),
        # The probe of a watched script logs no events for non-finite values.
        "not finite": ABSENT if run.command else str(len(view.non_finite)),
        "alerts": str(len(view.alerts)),
        "sessions": str(view.sessions),
    }
