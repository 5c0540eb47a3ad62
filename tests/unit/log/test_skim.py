"""Skimming a long log gives the same view as reading every line of it whole."""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.log.fold as fold_module
import engine.log.read as read_module
import engine.log.skim as skim_module
from engine.errors import RunLogError
from engine.log.events import AnyEvent, Event, Known, Note, StepDone
from engine.log.fold import fold
from engine.log.read import BrokenLog, LogReader, decode_line
from engine.log.skim import LINES_KEPT, StepRow, decode_block
from engine.log.view import SOURCES, RunView, Source
from engine.log.write import encode
from tests.support.run_events import (
    KINDS,
    example_of,
    opened,
    picture,
    runs,
    started,
    step,
    write_log,
)


@pytest.fixture(scope="module", autouse=True)
def few_lines_are_kept() -> object:
    """So that logs of some lines are long ones."""
    patch = pytest.MonkeyPatch()
    patch.setattr(skim_module, "LINES_KEPT", 3)
    patch.setattr(fold_module, "LOG_LINES_KEPT", 3)
    yield
    patch.undo()


@settings(max_examples=150, deadline=None)
@given(runs(), st.sampled_from([1, 500, 2000, 1 << 20]))
def test_a_skimmed_run_is_the_same_view(logs: dict[Source, list[AnyEvent]], max_bytes: int) -> None:
    whole, skimmed = RunView(), RunView()
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            path = Path(folder) / source
            path.write_bytes(b"".join(encode(cast(Event, e), e.seq, e.t_s) for e in logs[source]))
            one, other = LogReader(path), LogReader(path)
            while events := one.poll(max_bytes):
                whole = fold(whole, source, events)
            while rows := other.skim(max_bytes):
                skimmed = fold(skimmed, source, rows)
    assert picture(skimmed) == picture(whole)


def long_log(path: Path, count: int = 40, **changes: object) -> list[AnyEvent]:
    return write_log(path, [opened(1.0), *(step(n, **changes) for n in range(1, count))])


def test_old_steps_are_rows_and_new_ones_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    long_log(path, phases={"loss": 0.5})
    events = LogReader(path).skim()
    assert {type(event) for event in events[1:-3]} == {StepRow}
    assert {type(event) for event in events[-3:]} == {StepDone}
    assert fold(RunView(), "events", events[:-3]).phases == {"loss": 0.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_put_back_into_rows(tmp_path: Path, value: float) -> None:
    path = tmp_path / "log"
    long_log(path, loss=value, grad_norm=value, kd=None)
    rows = [event for event in LogReader(path).skim() if isinstance(event, StepRow)]
    assert len(rows) > 30
    assert {repr((row.loss, row.grad_norm, row.kd)) for row in rows} == {repr((value, value, None))}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_is_skimmed_as_it_is_decoded(kind: type[Event]) -> None:
    lines = b"".join(encode(example_of(kind), n, 1.0) for n in range(8))
    fast = decode_block(lines, skim=True)
    slow = [decode_line(line, "") for line in lines.splitlines()]
    assert len(fast) == len(slow)
    for one, other in zip(fast, slow, strict=True):
        if isinstance(one, StepRow):
            names = set(one.__struct_fields__) - {"phases"}
            assert all(getattr(one, name) == getattr(other, name) for name in names)
        else:
            assert one == other


@pytest.mark.parametrize(
    "change",
    [
        {"loss": 3.0, "nf": {"loss": "nan"}},
        {"loss": None, "nf": {"loss": "huge"}},
        {"rows": None, "nf": {"rows": "nan"}},
        {"nf": {"phases/loss": "nan"}},
        {"step": "7"},
        {"position": 1.5},
    ],
)
def test_a_step_that_breaks_its_form_is_refused_when_it_is_skimmed(
    tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "log"
    long_log(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[7] = json.dumps(json.loads(lines[7]) | change).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(BrokenLog, match="breaks its form") as caught:
        LogReader(path).skim()
    assert [event.seq for event in caught.value.before] == list(range(7))
    with pytest.raises(RunLogError):
        decode_line(lines[7], "here")


def test_one_line_of_another_version_does_not_make_a_long_block_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    long_log(path, 4000)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2000] = lines[2000].replace(b'"kind":"step"', b'"kind":"dream"')
    path.write_bytes(b"".join(lines))
    looked = []
    real = read_module.decode_line
    monkeypatch.setattr(
        read_module, "decode_line", lambda line, where: looked.append(1) or real(line, where)
    )
    assert len(LogReader(path).skim()) == 4000
    assert 0 < len(looked) < 2 * read_module.PART_BYTES / min(map(len, lines[1:]))


def test_a_log_is_read_again_from_each_of_its_points(tmp_path: Path) -> None:
    path = tmp_path / "log"
    events = [opened(100.0), started(), *(step(n) for n in range(1, 2500))]
    events += [opened(50.0), started(), *(step(n) for n in range(1, 2500))]
    written = write_log(path, events)
    reader = LogReader(path)
    while reader.skim(1 << 19):
        pass
    assert len(reader.points) > 8
    latest = -math.inf
    begins = {0: 100.0, 2501: 50.0}
    for point in reader.points[1:-1]:
        found = LogReader(path, at=point).poll(4096)
        assert repr(found) == repr(written[point.number : point.number + len(found)])
        opened_s = begins[max(n for n in begins if n < point.number)]
        assert point.opened_unix_s == opened_s
        before = [
            begins[max(b for b in begins if b <= e.seq)] + e.t_s for e in written[: point.number]
        ]
        latest = max(before)
        assert point.unix_s == pytest.approx(latest)


def test_opening_costs_little_more_than_decoding_every_line(tmp_path: Path) -> None:
    """Against the library's own time for the same lines on the same machine, whatever else it does."""
    path = tmp_path / "log"
    phases = {"teacher": 0.1234567, "student": 0.1, "loss": 0.2, "backward": 0.3, "idle": 0.01}
    count = 30_000
    lines = [encode(step(n, loss=2.0 + 1 / n, phases=phases), n, 0.5 * n) for n in range(1, count)]
    path.write_bytes(encode(opened(1.0), 0, 0.0) + b"".join(lines))
    block, decoder = path.read_bytes(), msgspec.json.Decoder(Known)

    def read() -> None:
        view, reader = RunView(), LogReader(path)
        while events := reader.skim():
            view = fold(view, "events", events)
        assert view.last_step == count - 1

    def timed(call: object) -> float:
        assert callable(call)
        begin = time.process_time()
        call()
        return time.process_time() - begin

    # The best of some tries: what else goes on can only make one slower.
    ratios = [timed(read) / timed(lambda: decoder.decode_lines(block)) for _ in range(7)]
    assert min(ratios) < 3.0


def test_more_lines_are_kept_than_a_screen_shows() -> None:
    assert LINES_KEPT >= 1000
    assert isinstance(
        decode_block(encode(Note(level="info", text="x"), 0, 1.0), skim=True)[0], Note
    )
