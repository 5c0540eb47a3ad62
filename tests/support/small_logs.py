"""Short logs that are treated as long ones, and the view that results from reading them line by line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import strategies as st

import engine.log.fold as fold_module
import engine.log.read as read_module
from engine.log.events import AnyEvent, Evaluated, Event, LogOpened, Note
from engine.log.fold import fold
from engine.log.read import LogReader, decode_line
from engine.log.view import RunView, Source
from engine.log.write import encode
from tests.support.run_events import fold_events, numbered, opened, runs, started, step, write_log
from tests.support.run_folders import Unknown


class small_sizes:
    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        for module, name, value in (
            (fold_module, "LOG_LINES_KEPT", 3),
            (read_module, "NEWEST_BYTES", 4000),
            (read_module, "PART_BYTES", 600),
        ):
            self.patch.setattr(module, name, value)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


EXTRA: list[Event] = [
    Unknown(cups=3),
    Note(level="info", text="x"),
    Evaluated(step=3, subject="student", loss=math.nan, labelled=9, eval_s=None),
    step(7, phases={"loss": math.inf}),
]


@st.composite
def long_logs(draw: st.DrawFn) -> dict[Source, bytes]:
    """Draw the bytes of the logs of a run: with kinds of another version, NaN in any place, a clock that is set,
    and a torn last line."""
    logs = {}
    for source, events in draw(runs()).items():
        rows: list[Any] = list(events)
        # Only the trainer logs its steps.
        some = EXTRA if source == "events" else EXTRA[:2]
        for extra in draw(st.lists(st.sampled_from(some), max_size=4)):
            rows.insert(draw(st.integers(1, len(rows))) if rows else 0, extra)
        if rows and type(rows[0]) is not LogOpened:
            rows.insert(0, opened(5.0))
        set_to = st.sampled_from([5.0, 2.0, 9_000.0, 40_000.0])
        rows = [opened(draw(set_to)) if type(row) is LogOpened else row for row in rows]
        lines = [encode(cast(Event, e), e.seq, e.t_s) for e in numbered(rows, 0.25)]
        torn = draw(st.integers(0, 60)) if lines else 0
        logs[source] = b"".join(lines) + (
            lines[-1][: min(torn, len(lines[-1]) - 1)] if lines else b""
        )
    return logs


def one_by_one(view: RunView, source: Source, data: bytes) -> RunView:
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        event = decode_line(line, "")
        view = fold_events(view, source, [event])
    return view


def followed(
    view: RunView,
    source: Source,
    reader: LogReader,
    most: int = 1 << 20,
) -> RunView:
    """Return `view` after what follows in a log, read as a Follower reads a long one."""
    reader._older_as_rows = True
    while found := reader.poll(most):
        view = fold(view, source, found)
    return view


def long_log(path: Path, count: int = 200) -> list[AnyEvent]:
    return write_log(path, [opened(1.0), started(), *(step(n) for n in range(1, count))])
