"""Dequantisation kernels of types with blocks of 32 values: Q8_0, Q4_0 and Q5_0.

`dequantize_triton.py` describes how they work and their common arguments; the bit layouts are in
`engine/quant/reference.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.dequantize_k import _as_words, _floats, _words

# mypy: disable-error-code="no-untyped-def,untyped-decorator"


@triton.jit
def _dequantize_q8_0(
    low_ptr,  # *i8      (blocks, 32)
    d_ptr,  # *fp16      (blocks)
    out_ptr,  # *        (blocks, 32)
    first,
    count,
    BLOCKS: tl.constexpr,
):
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    there = block < count
    source = first + block.to(tl.int64)
    codes = _words(_as_words(low_ptr) + source * 8 + tl.arange(0, 8)[None, :], there)
    d = tl.load(d_ptr + source, mask=there, other=0).to(tl.float32)
    # Flipping the top bit of a signed byte adds 128 to its value.
    value = d * tl.reshape(_floats(codes ^ 0x80808080, 128.0), (BLOCKS, 32))
    out = out_ptr + block.to(tl.int64) * 32 + tl.arange(0, 32)[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _nibbles(low_ptr, source, there):
    """Return the low and the high nibbles of blocks of 32 values, each in the bytes of 4 words."""
    word = tl.arange(0, 4)[None, :]
    codes = _words(_as_words(low_ptr) + source * 4 + word, there)
    return codes & 0x0F0F0F0F, (codes >> 4) & 0x0F0F0F0F


@triton.jit
def _tops(high_ptr, source, there, START: tl.constexpr):
    """Return bits START to START + 16 of a block's word of high bits, as bit 4 of the bytes of 4
    words.
    """
    shift = (tl.arange(0, 4)[None, :] * 4 + START).to(tl.uint32)
    four = (_words(_as_words(high_ptr) + source, there) >> shift) & 15
    # Copies at distances of 7 put bit i at bit 8 i.
    return ((four * 0x00204081) & 0x01010101) << 4


@triton.jit
def _store_32(out_ptr, block, there, w0, w1):
    out = out_ptr + block.to(tl.int64) * 32 + tl.arange(0, 16)[None, :]
    tl.store(out, w0.to(out_ptr.dtype.element_ty), mask=there)
    tl.store(out + 16, w1.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _dequantize_q4_0(
    low_ptr,  # *u8      (blocks, 16)
    d_ptr,  # *fp16      (blocks)
    out_ptr,  # *        (blocks, 32)
    first,
    count,
    BLOCKS: tl.constexpr,
):
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    there = block < count
    source = first + block.to(tl.int64)
    low, high = _nibbles(low_ptr, source, there)
    d = tl.load(d_ptr + source, mask=there, other=0).to(tl.float32)
    w0 = d * tl.reshape(_floats(low, 8.0), (BLOCKS, 16))
    w1 = d * tl.reshape(_floats(high, 8.0), (BLOCKS, 16))
    _store_32(out_ptr, block, there, w0, w1)


@triton.jit
def _dequantize_q5_0(
    low_ptr,  # *u8      (blocks, 16)
    high_ptr,  # *i32    (blocks)
    d_ptr,  # *fp16      (blocks)
    out_ptr,  # *        (blocks, 32)
    first,
    count,
    BLOCKS: tl.constexpr,
):
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    there = block < count
    source = first + block.to(tl.int64)
    low, high = _nibbles(low_ptr, source, there)
    low |= _tops(high_ptr, source, there, 0)
    high |= _tops(high_ptr, source, there, 16)
    d = tl.load(d_ptr + source, mask=there, other=0).to(tl.float32)
    w0 = d * tl.reshape(_floats(low, 16.0), (BLOCKS, 16))
    w1 = d * tl.reshape(_floats(high, 16.0), (BLOCKS, 16))
    _store_32(out_ptr, block, there, w0, w1)
