"""What a comparison says in words: each run's results, the settings they differ in, their alerts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.log.text import alert_lines
from engine.units import format_bytes, format_count, format_seconds, format_value
from workbench.compared import Compared

ABSENT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that is not the same in all runs."""

    key: str
    values: tuple[tuple[tuple[int, ...], str], ...]
    """Each value once, with the places of the runs that have it, in the order of the runs."""


def differences(runs: Sequence[Compared]) -> list[Difference]:
    """The settings that differ, in the order of the first run; a run whose settings cannot be read
    differs in none."""
    known = [place for place, run in enumerate(runs) if _is_known(run)]
    found = []
    for key in dict.fromkeys(key for place in known for key in runs[place].settings):
        values: dict[str, list[int]] = {}
        for place in known:
            values.setdefault(runs[place].settings.get(key, ABSENT), []).append(place)
        if len(values) > 1:
            grouped = tuple((tuple(places), value) for value, places in values.items())
            found.append(Difference(key=key, values=grouped))
    return found


def _is_known(run: Compared) -> bool:
    """Whether its settings are on record: `section.name`, beside what its log says of models and device."""
    return any("." in key for key in run.settings)


def settings_note(runs: Sequence[Compared], letters: Sequence[str]) -> str:
    """What is to be said below the settings that differ; empty when they say all."""
    unknown = [x for run, x in zip(runs, letters, strict=True) if not _is_known(run)]
    if unknown:
        return f"{', '.join(unknown)}: no settings on record, so not compared"
    return "" if differences(runs) else "every setting is the same in all of them"


def results_table(runs: Sequence[Compared]) -> list[list[str]]:
    """A row for each result: its name, and its value in each run."""
    columns = [_results(run) for run in runs]
    return [[name, *(column[name] for column in columns)] for name in columns[0]] if columns else []


def _results(run: Compared) -> dict[str, str]:
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
        "state": run.snapshot.state,
        "step": f"{view.last_step}/{ABSENT if view.total_steps is None else view.total_steps}",
        "loss": shown(steps.last("loss")),
        "held-out": shown(student[-1] if student else None),
        "best held-out": shown(min(finite, default=None)),
        "teacher's": shown(teacher.loss if teacher else None),
        "tokens/s": shown(view.tokens_per_second(), format_count),
        "tokens": shown(run.tokens[len(steps) - 1] if len(steps) else None, format_count),
        "wall time": shown(seconds, format_seconds),
        "peak memory": shown(getattr(peak, "measured_bytes", None), format_bytes),
        "not finite": str(len(view.non_finite)),
        "alerts": str(len(view.alerts)),
        "sessions": str(view.sessions),
    }


def alerts_words(runs: Sequence[Compared], letters: Sequence[str]) -> list[str]:
    """The alerts that stand in each run, and why one cannot be read."""
    lines = []
    for run, letter in zip(runs, letters, strict=True):
        snapshot = run.snapshot
        lines.append(f"{letter} {snapshot.run.name}: {snapshot.state}")
        lines += [f"  {line}" for alert in run.view.alerts.values() for line in alert_lines(alert)]
        if snapshot.error is not None:
            lines += [f"  {line}" for line in snapshot.error.splitlines()]
        elif not run.view.alerts:
            lines.append("  no alert stands")
    return lines
