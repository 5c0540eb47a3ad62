"""Kernels in Triton's interpreter, on the CPU: the arithmetic and the indexing, not the speed.

Triton decides when it is imported whether it interprets, so these tests have a process of their own:
`TRITON_INTERPRET=1 pytest tests/unit/kernels/interpreted`, which `make test` runs.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from types import FunctionType

import numpy as np
import pytest

from tests.support.lacks import skip_for


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 from the start of the process")
        for item in items:
            if "interpreted" in str(item.path):
                item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def language_is_replaced_once() -> Iterator[None]:
    """Let a launch replace the functions of Triton's language once: its interpreter does it again at each call of a
    function within a kernel, which is a fifth of the time of these tests."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # one of another version
        yield
        return
    replace, replaced = interpreter._patch_lang, set[int]()

    def replace_once(function: FunctionType) -> object:
        values = map(id, function.__globals__.values())
        wanted = {id(tl), id(tl.core)}.intersection(values)
        is_launch = not replaced
        if not is_launch and wanted <= replaced:
            return interpreter._LangPatchScope()
        replaced.update(wanted)
        scope = replace(function)
        if is_launch:
            restore = scope.restore

            def end() -> None:
                replaced.clear()
                restore()

            scope.restore = end
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield


REFUSED = "only 0-dimensional arrays can be converted to Python scalars"
"""NumPy's words, from 2.4 on."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a kernel with a loop where Triton's interpreter fails at every loop: before 3.7 it takes `int()` of the
    bounds, arrays of one element, which NumPy refuses."""
    try:
        return (yield)
    except Exception as error:
        if REFUSED not in str(error) or not loops_fail():
            raise
        skip_for("loops in Triton's interpreter", f"numpy {np.__version__}")


def loops_fail() -> bool:
    import triton  # not everywhere: files of tests skip for that first

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        return False
    try:
        int(np.zeros(1))
    except TypeError as error:
        return str(error) == REFUSED
    return False
