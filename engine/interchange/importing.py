"""Make a run folder from the log of another tool. Its log has the same kinds of records as that of a watched script,
with the times of the original values.

The alert rules are evaluated afterwards, in the order in which a supervisor would have evaluated them during the run.
Their alerts, with their times, are written to watch.jsonl.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine import limits
from engine.errors import BadInput
from engine.files import parse_json
from engine.interchange.kinds import BY_SOURCE
from engine.interchange.names import COUNTS, HELD_OUT, engine_names
from engine.interchange.series import Point, by_step
from engine.interchange.sources import NotALog, Recorded
from engine.log.events import (
    FAIL,
    NUMBER,
    PASS,
    TRAINING,
    Evaluated,
    Event,
    Imported,
    Judged,
    Logged,
    LogOpened,
    Note,
    Phase,
    RunFinished,
    StepDone,
    alert_over,
    name_of_non_finite,
)
from engine.log.folder import COMMAND, RunFolder, create_run
from engine.log.text import one_line
from engine.log.write import LogWriter
from engine.redact import Redactor
from engine.units import format_count
from engine.watch.replay import Diagnosis, diagnose, diagnose_events

VALUES_MOST = 1 << 14
"""Maximum number of values per name that the rules get if no run folder is made. If there are more, they get every
second value, or every fourth, and so on."""
STATE = "imported"
"""State of an imported run whose files do not record how the run ended."""
_AT_ONCE = 200
"""Maximum number of names in one line of the log."""
_SHOWN = 8
"""Maximum number of names in a message."""
_TEXT = 2000
"""Maximum length of a setting's text, in characters."""
_NAME = 100
"""Maximum length of a run's name, in characters."""


def import_run(
    source: str,
    path: Path,
    folder: Path,
    *,
    name: str | None = None,
    given: Mapping[str, str] | None = None,
    partial: bool = False,
) -> tuple[RunFolder, list[Note]]:
    """Create `folder`/NAME from the files at `path`. Return the run folder, and notes for the user, which are also in
    its log.

    `given` is the mapping from `--map`: the engine's name of a value to its name in the files. Raises BadInput
    before anything is written.
    """
    given = given or {}
    recorded = Recorded(path=path, partial=partial)
    BY_SOURCE[source].read(recorded, given)
    names = _find_names(recorded, source, given)
    name = name or re.sub(r"[^\w.-]+", "-", recorded.name).strip(".-")[:_NAME] or source
    place = (folder / name).absolute()
    if os.path.lexists(place):
        hint = "--name gives it another name"
        raise BadInput.expected("run folder", place, "a new folder", "one that exists", hint=hint)
    run = create_run(place, "", _effective(recorded))
    try:
        notes, first_events = _first_records(recorded, source, names)
        _write(run.events, _records(recorded, first_events, names))
        _write_alerts(run)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run, notes


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLog:
    """The result of diagnosing a log without making a run folder."""

    recorded: Recorded
    names: dict[str, str]
    notes: list[Note]
    found: Diagnosis


def diagnose_recorded(recorded: Recorded, source: str, given: Mapping[str, str]) -> JudgedLog:
    """Evaluate the rules on another tool's records as on the run folder that an import would make of them. Raises
    BadInput."""
    names = _find_names(recorded, source, given)
    notes, first_events = _first_records(recorded, source, names)
    found = diagnose_events(_with_times(_records(recorded, first_events, names)))
    return JudgedLog(recorded=recorded, names=names, notes=notes, found=found)


def _with_times(records: Iterable[tuple[float, Event]]) -> Iterator[tuple[Any, float]]:
    """Yield the records as they would be read from a log, each with its `t_s` set."""
    begin_s: float | None = None
    for unix_s, event in records:
        if begin_s is None:
            begin_s = unix_s
            yield LogOpened(unix_s=unix_s, boot_id="", pid=0, writer="import", t_s=0.0), unix_s
        t_s = round(unix_s - begin_s, 6)
        msgspec.structs.force_setattr(event, "t_s", t_s)
        yield event, begin_s + t_s


def _find_names(recorded: Recorded, source: str, given: Mapping[str, str]) -> dict[str, str]:
    names = engine_names(recorded.series, given)
    if not any(engine_name not in HELD_OUT for engine_name in names) and recorded.crash is None:
        shown = _list_some(recorded.series) or "no number"
        expected = "a loss or another known value of a step"
        hint = "--map loss=NAME sets the name of the loss"
        raise NotALog.expected(source, recorded.path, expected, shown, hint=hint)
    return names


def _first_records(
    recorded: Recorded, source: str, names: dict[str, str]
) -> tuple[list[Note], list[Event]]:
    """Return notes on the files, and the first records of the run's log."""
    texts = [("info", text) for text in _describe_names(recorded, names)]
    texts += [("warning", text) for text in recorded.warnings]
    notes = [Note(level=level, text=one_line(text)) for level, text in texts]
    path = str(recorded.path.absolute())
    imported = Imported(source=source, path=path, files=recorded.files, names=names)
    return notes, [imported, *notes, Phase(name=TRAINING)]


def _list_some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(
        [*ordered[:_SHOWN], *([f"{len(ordered) - _SHOWN} more"] * (len(ordered) > _SHOWN))]
    )


def _describe_names(recorded: Recorded, names: Mapping[str, str]) -> list[str]:
    """Return notes on the names in the files: those that are renamed to the engine's names, kept, left out or thinned
    out."""
    texts = [f"{engine_name} from {log_name}" for engine_name, log_name in names.items()]
    lines = [f"names: {', '.join(texts) or 'none'}"]
    if others := recorded.series.keys() - set(names.values()):
        lines.append(f"names kept unchanged: {_list_some(others)}")
    if recorded.left_out:
        texts = [f"{name} ({content})" for name, content in recorded.left_out.items()]
        lines.append(f"left out because they are not numbers: {_list_some(texts)}")
    if replaced := sum(series.replaced for series in recorded.series.values()):
        lines.append(
            f"{format_count(replaced)} values were replaced: a restart went back to an earlier step"
        )
    if not recorded.is_timed:
        lines.append(
            "no time of day in the log: times are summed from the durations of the steps, beginning at the time of "
            "the file"
        )
    if (every := max((series.every for series in recorded.series.values()), default=1)) > 1:
        lines.append(
            f"long curves: of each {every:,} values one is evaluated, and every non-finite value"
        )
    return [*recorded.notes, *lines]


def _effective(recorded: Recorded) -> dict[str, Any]:
    """Return the content of effective.json: the settings by section, redacted, and the command."""
    spec: dict[str, dict[str, Any]] = {}
    for number, (name, value) in enumerate(_leaves(recorded.settings)):
        if number < limits.IMPORT_SETTINGS.most:
            section, dot, key = name.partition(".")
            spec.setdefault(section if dot else "config", {})[key if dot else name] = value
        elif number == limits.IMPORT_SETTINGS.most:
            recorded.warnings.append(f"settings: {limits.IMPORT_SETTINGS} are kept")
    redactor = Redactor()
    command = {
        "arguments": list(redactor.argv(recorded.arguments)[0]),
        "folder": recorded.folder,
        "commit": recorded.commit,
    }
    redacted: dict[str, Any] = parse_json(
        redactor.text(json.dumps(spec)).text, recorded.path, "settings"
    )
    return {"spec": redacted, COMMAND: command}


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            yield prefix + name, str(value)
        elif value is None or isinstance(value, bool | int | float):
            yield prefix + name, value
        else:
            yield prefix + name, (value if isinstance(value, str) else json.dumps(value))[:_TEXT]


def _write(path: Path, records: Iterable[tuple[float, Event]]) -> None:
    """Write a log whose lines have the times of the records; there must be at least one record."""
    records = iter(records)
    now_s, event = next(records)

    def clock() -> float:
        return now_s

    with LogWriter(path, writer="import", monotonic=clock, wall=clock) as log:
        log.write(event)
        for unix_s, event in records:
            now_s = unix_s
            log.write(event)
        log.sync()


def _records(
    recorded: Recorded, first_events: Iterable[Event], names: Mapping[str, str]
) -> Iterator[tuple[float, Event]]:
    """Yield the records of the run, each with its time; the times never decrease."""
    engine_name_of = {log_name: engine_name for engine_name, log_name in names.items()}
    last_step = 0
    times = [series.unix_s[0] for series in recorded.series.values() if series.unix_s]
    now_s = min(times, default=recorded.begin_unix_s)
    yield from ((now_s, event) for event in first_events)
    # Times never decrease. So a value logged long after its step is held back, or it would delay later steps.
    waiting: list[tuple[float, Event]] = []
    for step, points in by_step(recorded.series):
        last_step = step
        done_s, done, others = _events(step, points, engine_name_of)
        if done is not None:
            for unix_s, event in waiting:
                now_s = max(now_s, min(unix_s, done_s))
                yield now_s, event
            waiting = []
            now_s = max(now_s, done_s if recorded.is_timed else now_s + _plausible_s(done.step_s))
            yield now_s, done
            if done.loss is not None and not math.isfinite(done.loss):
                text = name_of_non_finite(done.loss)
                yield now_s, Judged(by=NUMBER, id="loss", level=FAIL, text=text, step=step)
        waiting += others
    for unix_s, event in waiting:
        now_s = max(now_s, unix_s)
        yield now_s, event
    yield now_s, _end(recorded, last_step)


def _plausible_s(seconds: float | None) -> float:
    return seconds if seconds is not None and 0 < seconds < limits.LOG_ELAPSED.most else 0.0


def _events(
    step: int, points: Iterable[Point], engine_name_of: Mapping[str, str]
) -> tuple[float, StepDone | None, list[tuple[float, Event]]]:
    """Return the time and the record of a step, which is None if none of its values has an engine name, and the
    step's other records, each with its time."""
    values: dict[str, Any] = {}
    logged: dict[str, float | None] = {}
    evals: list[tuple[float, Event]] = []
    done_s = logged_s = 0.0
    for _, unix_s, log_name, value in points:
        engine_name = engine_name_of.get(log_name)
        if engine_name in HELD_OUT:
            subject = HELD_OUT[engine_name]
            loss = Evaluated(step=step, subject=subject, loss=value, labelled=None, eval_s=None)
            evals.append((unix_s, loss))
        elif engine_name is None or (engine_name in COUNTS and not _is_count(value)):
            logged[log_name], logged_s = value, max(logged_s, unix_s)
        else:
            values[engine_name] = int(value) if engine_name in COUNTS else value
            done_s = max(done_s, unix_s)
    done = StepDone(step=step, **values) if values else None
    named = list(logged.items())
    groups = [dict(named[begin : begin + _AT_ONCE]) for begin in range(0, len(named), _AT_ONCE)]
    records: list[tuple[float, Event]] = [
        (logged_s, Logged(step=step, values=group)) for group in groups
    ]
    return done_s, done, records + evals


def _is_count(value: float) -> bool:
    return value.is_integer() and 0 <= value <= limits.LOG_COUNT.most


def _end(recorded: Recorded, last_step: int) -> RunFinished:
    if recorded.crash is not None:
        reason = one_line(recorded.crash)
        return RunFinished(state="failed", reason=reason, exit_code=1, step=last_step)
    code = recorded.exit_code
    if code is None:
        reason = "its files do not record how it ended"
        return RunFinished(state=STATE, reason=reason, exit_code=0, step=last_step)
    state = "failed" if code else "completed"
    return RunFinished(
        state=state,
        reason=f"exit code {code}, according to its files",
        exit_code=code,
        step=last_step,
    )


def _write_alerts(run: RunFolder) -> None:
    raised = diagnose(run, None).raised
    if not raised:
        return
    events: list[tuple[float, Event]] = []
    for item in raised:
        events.append((item.unix_s, item.alert))
        if (over_s := item.cleared_unix_s) is not None:
            over = alert_over(item.alert.id, active_s=over_s - item.unix_s, step=0)
            events.append((over_s, over))
    events.sort(key=lambda item: (item[0], isinstance(item[1], Judged) and item[1].level != PASS))
    _write(run.watch, events)
