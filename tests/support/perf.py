"""Assertions about time: made under `make perf`, where nothing runs beside them, and nowhere else.

A test that makes one is marked `perf`. In the suite it runs as well, and asserts everything but the time: on a
machine that others keep busy a time says nothing about the code.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

SWITCH = "APR_MEASURE_TIMES"


def measuring() -> bool:
    return os.environ.get(SWITCH) == "1"


def many(count: int, otherwise: int) -> int:
    """Return `count` where times are measured; elsewhere fewer, which show everything but the time."""
    return count if measuring() else otherwise


def within(took_s: float, limit_s: float) -> None:
    """Assert that something took less than a limit, where times are measured."""
    assert "perf" in _marks(), "a test that asserts a time has the mark `perf`"
    print(f"{took_s:.3f} s of at most {limit_s:g} s")
    assert not measuring() or took_s < limit_s, f"{took_s:.3f} s, expected less than {limit_s:g} s"


def ratio_within(measure: Callable[[], float], limit: float, tries: int) -> None:
    """Assert a ratio of two times. The best of some tries: what else goes on can only make one slower."""
    assert "perf" in _marks(), "a test that asserts a time has the mark `perf`"
    if not measuring():
        measure()  # what it asserts about the result
        return
    found = []
    for _ in range(tries):
        found.append(measure())
        if found[-1] < limit:
            return
    raise AssertionError(f"ratios {found}, expected one below {limit}")


_current: list[pytest.Item] = []


def _marks() -> set[str]:
    return {mark.name for mark in _current[-1].iter_markers()} if _current else set()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _current[:] = [item]
