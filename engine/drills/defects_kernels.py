"""Defects of the caches of compiled kernels: a request gets another request's kernel.

No kernel is wrong by itself: a key leaves something out, or a file lies in another's place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from engine.drills.planting import own_folder, replaced
from engine.kernels import registry
from engine.kernels.compiler import Constant, Variant

IGNORED = "BIAS"


def kernel_key_deaf() -> AbstractContextManager[None]:
    """Whether a matmul adds a bias is in the code of a kernel but not in its key. So projections without a
    bias get the kernel of those with one, or the other way round."""

    def make(spelled: Callable[..., tuple[tuple[str, str], ...]]) -> Callable[..., Any]:
        return lambda self: tuple(pair for pair in spelled(self) if pair[0] != IGNORED)

    return replaced(Variant, "_spelled", make)


@contextlib.contextmanager
def stale_body() -> Iterator[None]:
    """The cache on disk holds, under the key of the first kernel that is requested, a kernel that was
    compiled for another constant."""

    def make(compile_for: Callable[..., tuple[Any, bool]]) -> Callable[..., tuple[Any, bool]]:
        planted: list[Variant] = []

        def spoilt(variant: Variant, arch: int) -> tuple[Any, bool]:
            if not planted:
                planted.append(variant)
                _lay_over(compile_for(variant, arch)[0], compile_for(_other(variant), arch)[0])
            return compile_for(variant, arch)

        return spoilt

    with own_folder("TRITON_CACHE_DIR"), replaced(registry, "compile_for", make):
        yield


def _other(variant: Variant) -> Variant:
    """The same kernel with its last integer constant doubled."""
    name, value = next(
        (name, value) for name, value in reversed(variant.constants) if type(value) is int
    )
    constants: tuple[tuple[str, Constant], ...] = tuple(
        (n, 2 * value if n == name else v) for n, v in variant.constants
    )
    return Variant(
        variant.function,
        variant.types,
        constants,
        variant.warps,
        variant.stages,
        variant.fp_fusion,
        variant.early,
    )


def _lay_over(victim: Any, other: Any) -> None:
    """Copy every file of the compiled kernel `other`, the index included, over that of `victim`."""
    here, there = (Path(next(iter(b.metadata_group.values()))).parent for b in (victim, other))
    for file in there.iterdir():
        content = file.read_bytes()
        if file.name.startswith("__grp__"):
            content = content.replace(str(there).encode(), str(here).encode())
        (here / file.name).write_bytes(content)
