"""Kernels in Triton's interpreter, on the CPU: the arithmetic and the indexing, not the speed.

Triton decides when it is imported whether it interprets, so these tests have a process of their own:
`TRITON_INTERPRET=1 pytest tests/unit/kernels/interpreted`, which `make test` runs.
"""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 from the start of the process")
        for item in items:
            if "interpreted" in str(item.path):
                item.add_marker(skip)
