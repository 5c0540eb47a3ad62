"""Turns on the GPU among the workers of one suite: a test marked `alone` has it to itself.

Workers are processes, so the turns are a lock on a file: shared for most tests of the GPU, exclusive for one that
measures its memory or times it. Waiting is not part of a test's time limit.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "gpu" not in item.keywords:
        return (yield)
    with (Path(tempfile.gettempdir()) / f"apr-workbench-gpu-{os.getuid()}.lock").open("a") as lock:
        alone = item.get_closest_marker("alone") is not None
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)
