"""Tests of this folder start no process. One that does, that compiles models, or that goes through whole runs is a
test of the system and belongs there.

Those marked `gpu` may: Triton and torch start compilers for a kernel that is not in their caches.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_started: list[str] = []


def _note(event: str, _: tuple[object, ...]) -> None:
    # Names of a module are None when the interpreter ends.
    if STARTS and event in STARTS:
        stack = traceback.extract_stack()
        # An import may ask the machine what it is, in whichever test comes first.
        if not any(frame.filename.startswith("<frozen importlib") for frame in stack):
            _started.append(f"{event}\n{''.join(traceback.format_list(stack[-8:-1]))}")


sys.addaudithook(_note)


@pytest.fixture(autouse=True)
def starts_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    _started.clear()
    yield
    assert request.node.get_closest_marker("gpu") or not _started, (
        f"a unit test started a process: {_started[0]}"
    )
