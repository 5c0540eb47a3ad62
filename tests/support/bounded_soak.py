"""`--soak-minutes N`: run as much of the soak as fits into N minutes, so that CI runs a part of it each time.

One case of each test function runs first, then the others, in an order drawn from a seed that is printed
(`--soak-seed` repeats it). When the time is over, the remaining tests are skipped with that reason. Tests
that loop over many seeds or points themselves use `soak_part` to take some of them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

# The share that a bounded soak takes of what a test loops over itself.
SHARE = 0.1
_SEED = "APR_SOAK_SEED"

T = TypeVar("T")


def soak_count(whole: int) -> int:
    """Return `whole`, or in a bounded soak a tenth of it, and never less than two."""
    return whole if _SEED not in os.environ else min(whole, max(2, round(whole * SHARE)))


def soak_part(whole: Sequence[T]) -> Sequence[T]:
    """Return all of `whole`, or in a bounded soak a sample of `soak_count` items; the order is kept."""
    seed = os.environ.get(_SEED)
    if seed is None:
        return whole
    places = random.Random(seed).sample(range(len(whole)), soak_count(len(whole)))
    return [whole[place] for place in sorted(places)]


def soak_stride(first: int, step: int) -> tuple[int, int]:
    """Return a start and a stride; a bounded soak uses ten times the stride and a random start."""
    seed = os.environ.get(_SEED)
    if seed is None:
        return first, step
    times = round(1 / SHARE)
    return first + step * random.Random(seed).randrange(times), step * times


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--soak-minutes", type=float, help="run what of the soak fits into N minutes")
    group.addoption("--soak-seed", type=int, help="the order of a bounded soak (drawn and printed)")


def pytest_configure(config: pytest.Config) -> None:
    """Pass the options through the environment, which xdist's workers inherit: they must agree on the order."""
    option = config.option
    if option.soak_minutes is not None and not hasattr(config, "workerinput"):
        seed = random.randrange(1_000_000) if option.soak_seed is None else option.soak_seed
        os.environ[_SEED] = str(seed)


def pytest_report_header(config: pytest.Config) -> str | None:
    minutes = config.option.soak_minutes
    if minutes is None:
        return None
    return f"soak: {minutes:g} minutes, in the order of --soak-seed {os.environ[_SEED]}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put one case of each function first, then the rest: in the same order in each worker, as xdist requires."""
    if config.option.soak_minutes is None:
        return
    draw = random.Random(os.environ[_SEED])
    draw.shuffle(items)
    seen: set[str] = set()
    turn: dict[str, bool] = {}
    for item in items:
        function = item.nodeid.split("[")[0]
        turn[item.nodeid] = function in seen
        seen.add(function)
    items.sort(key=lambda item: turn[item.nodeid])


def pytest_collection_finish(session: pytest.Session) -> None:
    # Measured from here and not from the start: importing all test files takes up to a minute.
    minutes = session.config.option.soak_minutes
    if minutes is not None:
        session.config.stash[_END] = time.monotonic() + 60 * minutes


_END: pytest.StashKey[float] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    end = item.config.stash.get(_END, None)
    if end is not None and time.monotonic() > end:
        minutes = item.config.option.soak_minutes
        pytest.skip(f"not run: the bounded soak's {minutes:g} minutes were over")
