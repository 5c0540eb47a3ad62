"""Events and whole logs for tests of the run log: hand-made, by type, and random."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st

from engine.log.events import (
    AnyEvent,
    CheckpointSaved,
    DecisionMade,
    Evaluated,
    Event,
    FactsRead,
    GpuSample,
    HostSample,
    Known,
    LauncherGone,
    LogOpened,
    Note,
    Notified,
    Phase,
    RunFinished,
    RunStarted,
    StepDone,
    StopForwarded,
    StopRequested,
    TrainerExited,
    TrainerStarted,
)
from engine.log.fold import fold
from engine.log.view import SOURCES, RunView, Source, Table
from engine.log.write import encode
from tests.support.judged import number_event

KINDS: tuple[type[Any], ...] = typing.get_args(Known)
E = TypeVar("E", bound=Event)
_ENVELOPE = ("v", "seq", "t_s", "nf")

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(-9e99, 9e99)
    | st.sampled_from([math.nan, math.inf, -math.inf])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Draw any value of an annotated type in its range, including NaN and infinities for unbounded numbers."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of([values_of(part) for part in arguments])
    if typing.get_origin(hint) is typing.Annotated:
        least, most = arguments[1].ge, arguments[1].le
        if arguments[0] is int:
            return st.integers(least, most)
        odd = st.nothing() if least == 0 else st.sampled_from([math.nan, math.inf, -math.inf])
        return st.floats(least, most) | odd
    match typing.get_origin(hint) or hint:
        case origin if origin is list:
            return st.lists(values_of(arguments[0]), max_size=3)
        case origin if origin is tuple:
            return st.tuples(*(values_of(part) for part in arguments))
        case origin if origin is dict and arguments[1] is Any:
            return st.dictionaries(st.text(max_size=6), JSON, max_size=4)
        case origin if origin is dict:
            return st.dictionaries(st.text(max_size=6), values_of(arguments[1]), max_size=3)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=12),
        bool: st.booleans(),
        types.NoneType: st.none(),
    }
    return plain[hint]


@cache
def events_of(kind: type[Event]) -> st.SearchStrategy[Any]:
    """Draw any event of a kind."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {name: values_of(hint) for name, hint in hints.items() if name not in _ENVELOPE}
    return st.builds(kind, **fields)


def example_of(kind: type[E], **changes: Any) -> E:
    """Return one plain event of a kind: 1, 0.5, 'x' for a field without a default."""
    plain: dict[Any, Any] = {int: 1, float: 0.5, str: "x", bool: False, dict[str, Any]: {"a": 1}}
    fields: dict[str, Any] = {}
    for field in required_fields(kind):
        whole = field.type
        unions = (types.UnionType, typing.Union)
        first = typing.get_args(whole)[0] if typing.get_origin(whole) in unions else whole
        if typing.get_origin(first) is typing.Annotated:
            first = typing.get_args(first)[0]
        is_dict = typing.get_origin(first) is dict and first not in plain
        fields[field.name] = {"x": 0.5} if is_dict else plain[first]
    return kind(**fields | changes)


@cache
def required_fields(kind: type[Event]) -> list[msgspec.structs.FieldInfo]:
    return [field for field in msgspec.structs.fields(kind) if field.required]


def opened(unix_s: float, **changes: Any) -> LogOpened:
    return example_of(LogOpened, unix_s=unix_s, **changes)


def started(steps: int = 100, resumed_from: int | None = None) -> RunStarted:
    return example_of(RunStarted, steps=steps, resumed_from=resumed_from)


def step(number: int, **changes: Any) -> StepDone:
    fields: dict[str, Any] = {
        "loss": 2.0,
        "ce": 2.5,
        "kd": 1.5,
        "agreement": 0.25,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "rows": 4,
        "tokens": 1000,
        "labelled": 990,
        "step_s": 0.5,
        "data_s": 0.01,
        "teacher_s": 0.1,
        "position": 4 * number,
    }
    return StepDone(step=number, **fields | changes)


def exited(state: str) -> TrainerExited:
    return example_of(TrainerExited, state=state, sentence=f"it was {state}")


def finished(state: str, reason: str = "a reason") -> RunFinished:
    return RunFinished(state=state, reason=reason, exit_code=0, step=1)


def numbered(events: Iterable[Event], every_s: float = 1.0) -> list[AnyEvent]:
    """Return `events` as a reader does: `seq` counts all, `t_s` starts at 0 with each opening."""
    out: list[AnyEvent] = []
    t_s = 0.0
    for seq, event in enumerate(events):
        t_s = 0.0 if isinstance(event, LogOpened) else t_s + every_s
        out.append(typing.cast(AnyEvent, msgspec.structs.replace(event, seq=seq, t_s=t_s)))
    return out


def write_log(path: Path, events: Iterable[Event], every_s: float = 1.0) -> list[AnyEvent]:
    """Write a log as bytes, without a writer."""
    out = numbered(events, every_s)
    path.write_bytes(b"".join(encode(typing.cast(Event, e), e.seq, e.t_s) for e in out))
    return out


def fold_events(view: RunView, source: Source, events: Sequence[AnyEvent]) -> RunView:
    """Return `view` after events of one log, in one batch for each session."""
    return fold(view, source, events)


def picture(view: RunView) -> dict[str, str]:
    """Return a view as comparable text: NaN equals NaN, and a table is compared by content."""

    def text(value: Any) -> str:
        if isinstance(value, Table):
            return repr({name: value.values(name) for name in value.columns})
        if isinstance(value, dict):
            return repr(sorted((repr(k), text(v)) for k, v in value.items()))
        return repr(value)

    return {name: text(getattr(view, name)) for name in view.__slots__}


# Random runs.

# A log holds no measurement beyond 1e100: a larger one is written as infinite.
_LOSS = st.none() | st.floats(-1e100, 1e100) | st.sampled_from([math.nan, math.inf, -math.inf])
_TEXT = st.sampled_from(["", "x", "a longer text"])


@st.composite
def _trainer_session(draw: st.DrawFn, session: int, last: int) -> tuple[list[Event], int]:
    """Draw one session of the trainer: its events, and the last step it did."""
    begin = draw(st.integers(0, last)) if session else 0
    events: list[Event] = [opened(10_000.0 * session + 5)]
    if draw(st.integers(0, 9)) == 0:
        return events, last  # it died before it could log what it would do
    events.append(started(1000, begin if session and begin else None))
    number = begin
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.integers(0, 9))
        if kind <= 4:
            number += 1
            changes = {name: draw(_LOSS) for name in ("loss", "kd", "step_s", "grad_norm")}
            events.append(step(number, **changes))
        else:
            events.append(
                {
                    5: Evaluated(step=number, subject="student", loss=1.0, labelled=9, eval_s=None),
                    6: example_of(CheckpointSaved, step=number),
                    7: number_event(step=number, field="loss", value="nan"),
                    8: Note(level="info", text=draw(_TEXT)),
                    9: draw(
                        st.sampled_from(
                            [
                                Phase(name="train"),
                                DecisionMade(knob="a.b", choice="c", reason="d"),
                                StopRequested(reason="SIGTERM", step=number),
                                StopForwarded(signal="SIGTERM"),
                                Notified(message="ended", sent=["a"], failed={"b": "c"}),
                            ]
                        )
                    ),
                }[kind]
            )
    if draw(st.booleans()):
        events.append(finished(draw(st.sampled_from(["completed", "stopped", "failed"]))))
    return events, number


@st.composite
def _supervisor_session(draw: st.DrawFn, session: int) -> tuple[list[Event], list[Event]]:
    """Draw one session of the supervisor: the events of the watch log and of the device log."""
    watch: list[Event] = [opened(10_000.0 * session)]
    device: list[Event] = [opened(10_000.0 * session + 1)]
    watch.append(TrainerStarted(trainer_pid=10 + session, supervisor_pid=9))
    if draw(st.booleans()):
        watch.append(Note(level="warning", text=draw(_TEXT)))
    if draw(st.booleans()):
        watch.append(LauncherGone(how="detached"))
    if draw(st.booleans()):
        watch.append(exited(draw(st.sampled_from(["KILLED_EXTERNAL", "CRASHED"]))))
    if draw(st.booleans()):
        device.append(FactsRead(facts={"session": session}))
    for _ in range(draw(st.integers(0, 8))):
        absent = draw(st.sampled_from([{}, {"load1": "gone"}, {"gpu_power_w": "Not Supported"}]))
        number = draw(st.none() | st.floats(0, 1e12))
        reading = None if absent else number
        if draw(st.booleans()):
            device.append(HostSample(load1=reading, trainer_rss_bytes=number, absent=absent))
        else:
            index = draw(st.integers(0, 1))
            device.append(GpuSample(index=index, gpu_power_w=reading, absent=absent))
    return watch, device


@st.composite
def runs(draw: st.DrawFn) -> dict[Source, list[AnyEvent]]:
    """Draw the three logs of a run that was resumed up to three times, as readers return them."""
    logs: dict[Source, list[Event]] = {source: [] for source in SOURCES}
    last = 0
    for session in range(draw(st.integers(0, 4))):
        watch, device = draw(_supervisor_session(session))
        logs["watch"] += watch
        logs["device"] += device
        if draw(st.integers(0, 9)):
            events, last = draw(_trainer_session(session, last))
            logs["events"] += events
    return {source: numbered(events, 0.25) for source, events in logs.items()}


@st.composite
def dealt(
    draw: st.DrawFn, logs: dict[Source, list[AnyEvent]]
) -> list[tuple[Source, Sequence[AnyEvent]]]:
    """Split the logs into batches of any size, interleaved in any way."""
    left = dict(logs)
    batches: list[tuple[Source, Sequence[AnyEvent]]] = []
    while any(left.values()):
        source = draw(st.sampled_from([s for s in SOURCES if left[s]]))
        size = draw(st.integers(1, len(left[source])))
        batches.append((source, left[source][:size]))
        left[source] = left[source][size:]
    return batches
