"""How large a terminal is: what it says itself, whatever size a parent exported."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from engine.cli.weights import Reporter
from engine.export.convert import Progress
from engine.terminal import columns_of
from tests.support.terminals import STALE, set_size
from workbench.cli import believe_the_terminal


@contextlib.contextmanager
def terminal(columns: int, rows: int) -> Iterator[tuple[TextIO, int]]:
    """A terminal of that size, and the end that reads what is written to it."""
    reader, writer = pty.openpty()
    set_size(writer, columns, rows)
    try:
        with os.fdopen(writer, "w") as stream:
            yield stream, reader
    finally:
        os.close(reader)


@pytest.fixture
def pipe() -> Iterator[TextIO]:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        yield stream
    os.close(reader)


@pytest.mark.parametrize(
    ("size", "left"), [((120, 40), {}), ((0, 0), STALE)], ids=["sized", "without a size"]
)
def test_an_exported_size_is_dropped_where_the_terminal_has_its_own(
    size: tuple[int, int], left: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"TERM": "xterm", **STALE}
    with terminal(*size) as (stream, _):
        monkeypatch.setattr(sys, "__stdout__", stream)
        believe_the_terminal(environ)
    assert environ == {"TERM": "xterm", **left}


def test_an_exported_size_stays_where_there_is_no_terminal(
    pipe: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = dict(STALE)
    for stdout in (pipe, None):
        monkeypatch.setattr(sys, "__stdout__", stdout)
        believe_the_terminal(environ)
        assert environ == STALE


def test_a_line_is_as_wide_as_its_terminal_and_in_a_pipe_as_was_asked_for(
    pipe: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python asks this one where COLUMNS is not set.
    monkeypatch.setattr(sys, "__stdout__", pipe)
    monkeypatch.setenv("COLUMNS", "71")
    with terminal(50, 20) as (stream, _):
        assert columns_of(stream) == 50
        set_size(stream.fileno(), 132, 20)
        assert columns_of(stream) == 132
    with terminal(0, 0) as (stream, _):
        assert columns_of(stream) == 71
    assert columns_of(pipe, 100) == 71
    monkeypatch.delenv("COLUMNS")
    assert columns_of(pipe, 100) == 100


def test_a_redrawn_line_fits_the_terminal_that_it_is_drawn_on(
    pipe: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "__stdout__", pipe)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    with terminal(40, 10) as (stream, reader):
        monkeypatch.setattr(sys, "stderr", stream)
        Reporter()(Progress(done=1, total=2, name="model.layers.0." + "x" * 100))
        drawn = os.read(reader, 4096).decode()
    assert drawn == "\r\x1b[K" + ("1/2 model.layers.0." + "x" * 100)[:39]
