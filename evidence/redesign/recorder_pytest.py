"""The pytest plugin of `recorder.py`: which test runs now, how each ends, and which are to run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import recorder

LATE = "recorder: the time is over"


@contextmanager
def running(name: str) -> Iterator[None]:
    """What runs meanwhile is put down to `name`."""
    flush = _flush()
    flush()
    outer = os.environ.get(recorder.RUNNING)
    os.environ[recorder.RUNNING] = name
    try:
        yield
    finally:
        flush()
        if outer is None:
            os.environ.pop(recorder.RUNNING, None)
        else:
            os.environ[recorder.RUNNING] = outer


def _flush() -> Callable[[], object]:
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        current = coverage.Coverage.current()
        if current is not None:
            return lambda: current.switch_context("")
    return lambda: None


def _fixture(definition: Any) -> str:
    return f"fixture {definition.baseid}::{definition.argname}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if "COVERAGE_PROCESS_START" not in os.environ:
        return (yield)
    known = getattr(item, "_fixtureinfo", None)
    definitions = known.name2fixturedefs.values() if known else ()
    shared = [_fixture(found[-1]) for found in definitions if found[-1].scope != "function"]
    recorder.record("test", id=item.nodeid, fixtures=shared)
    with running(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, object, object]:
    """A fixture that several tests share is made in the first of them, and counts for all."""
    if fixturedef.scope == "function" or "COVERAGE_PROCESS_START" not in os.environ:
        return (yield)
    with running(_fixture(fixturedef)):
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get("RECORDER_DEADLINE", "inf")):
        pytest.skip(LATE)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "RECORDER_ONLY" in os.environ:
        wanted = {
            name: order
            for order, name in enumerate(json.loads(Path(os.environ["RECORDER_ONLY"]).read_text()))
        }
        left_out = [item for item in items if item.nodeid not in wanted]
        config.hook.pytest_deselected(items=left_out)
        items[:] = sorted(
            (item for item in items if item.nodeid in wanted),
            key=lambda item: wanted[item.nodeid],
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Outcomes, once: in the process that the user started, not in the workers as well."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    late = report.skipped and LATE in str(report.longrepr)
    recorder.record(
        "outcome",
        id=report.nodeid,
        outcome="late" if late else report.outcome,
        when=report.when,
        seconds=report.duration,
        why=str(report.longrepr)[-600:] if report.failed else "",
    )
