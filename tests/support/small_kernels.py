"""Kernels of a few lines, for tests of compiling, caching and launching kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.compiler import Constant, Variant

# mypy: disable-error-code="no-untyped-def,untyped-decorator"


@triton.jit
def _scaled(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EPS: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n)
    tl.store(y_ptr + place, x * 2 + EPS, mask=place < n)


@triton.jit
def _deaf(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EPS: tl.constexpr):
    """Takes an epsilon but computes with another: the key and the body disagree."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n)
    tl.store(y_ptr + place, x * 2 + 1e-5, mask=place < n)


@triton.jit
def _crowded(x_ptr, y_ptr, n, SIDE: tl.constexpr):
    """Keeps more values per thread than there are registers."""
    row = tl.arange(0, SIDE)
    place = row[:, None] * SIDE + row[None, :]
    x = tl.load(x_ptr + place)
    y = tl.load(y_ptr + place)
    for _ in range(n):
        x, y = x * y + x, tl.exp(x) - y
    tl.store(y_ptr + place, x + y)


def scaled(block: Constant = 128, eps: Constant = 1e-6, *, warps: int = 4) -> Variant:
    return Variant(
        _scaled, ("*fp32", "*fp32", "i32"), (("BLOCK", block), ("EPS", eps)), warps=warps
    )


def deaf(eps: float) -> Variant:
    return Variant(_deaf, ("*fp32", "*fp32", "i32"), (("BLOCK", 128), ("EPS", eps)))


def crowded(side: int, warps: int) -> Variant:
    return Variant(_crowded, ("*fp32", "*fp32", "i32"), (("SIDE", side),), warps=warps)
