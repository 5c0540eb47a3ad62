"""Dequantisation kernels of types with blocks of 256 values: Q4_K to Q6_K.

`dequantize_triton.py` describes how they work; the bit layouts are in `engine/quant/reference.py`.
Here `first` and `count`, i32, are numbers of rows of `row_blocks` blocks each. The planes hold rows
in groups of GROUP: the first block of each row, then the second of each, and so on. A program takes
consecutive blocks of the planes and writes each block to its row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.quant.blocks import GROUP_ROWS

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

GROUP: tl.constexpr = tl.constexpr(GROUP_ROWS)


@triton.jit
def _floats(word, ZERO: tl.constexpr):
    """Return the four bytes of each word, in a new dimension, as float32 minus ZERO."""
    shift = (tl.arange(0, 4) * 8).to(tl.uint32)
    # The bits 0x4B0000xx are the float32 2^23 + xx, and 2^23 is 8388608.
    bits = ((tl.expand_dims(word, -1) >> shift) & 255) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _as_words(pointer):
    """Cast a pointer to bytes to a pointer to 32-bit words."""
    return pointer.to(tl.pointer_type(tl.uint32), bitcast=True)


@triton.jit
def _words(pointer, mask):
    return tl.load(pointer, mask=mask, other=0)


@triton.jit
def _half(word, SHIFT: tl.constexpr):
    """Return the float16 in bits SHIFT to SHIFT + 16 of a word, as float32."""
    return ((word >> SHIFT) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scale_and_min(first, middle, last, chunk, ODD: tl.constexpr):
    """Return sc and mn of sub-block 2 chunk + ODD, from the three words of 6-bit scales, as
    float32.
    """
    shift = ((chunk & 1) * 16 + ODD * 8).to(tl.uint32)
    a, b, c = first >> shift, middle >> shift, last >> shift
    early = chunk < 2
    scale = tl.where(early, a & 63, (c & 15) | ((a >> 2) & 48))
    minimum = tl.where(early, b & 63, ((c >> 4) & 15) | ((b >> 2) & 48))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _places(first, count, row_blocks, BLOCKS: tl.constexpr):
    """Return, for BLOCKS consecutive blocks of the planes, their index in the planes, their index
    in the result, and whether they belong to rows `first` to `first + count`.
    """
    at = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = at // GROUP  # one block of each row of a group
    row = (first // GROUP + column // row_blocks) * GROUP + at % GROUP - first
    source = (first // GROUP * GROUP).to(tl.int64) * row_blocks + at
    target = row.to(tl.int64) * row_blocks + column % row_blocks
    return source, target, (row >= 0) & (row < count)


@triton.jit
def _k45(
    low_ptr, high_ptr, header_ptr, out_ptr, first, count, row_blocks, HIGH: tl.constexpr, BLOCKS
):
    source, target, there = _places(first, count, row_blocks, BLOCKS)
    source, target = source[:, None, None], target[:, None, None]
    there = there[:, None, None]
    chunk = tl.arange(0, 4)[None, :, None]  # of 64 values, in the nibbles of 8 words
    word = tl.arange(0, 8)[None, None, :]
    codes = _words(_as_words(low_ptr) + source * 32 + chunk * 8 + word, there)
    header = _as_words(header_ptr) + source * 4
    both = _words(header, there)
    s0, s1, s2 = _words(header + 1, there), _words(header + 2, there), _words(header + 3, there)
    low, high = codes & 0x0F0F0F0F, (codes >> 4) & 0x0F0F0F0F
    if HIGH:
        # Bit j of byte l is the top bit of value l of sub-block j.
        tops = _words(_as_words(high_ptr) + source * 8 + word, there) >> (chunk * 2).to(tl.uint32)
        low |= (tops & 0x01010101) << 4
        high |= (tops & 0x02020202) << 3
    d, dmin = _half(both, 0), _half(both, 16)
    sc0, mn0 = _scale_and_min(s0, s1, s2, chunk, 0)
    sc1, mn1 = _scale_and_min(s0, s1, s2, chunk, 1)
    w0 = (d * sc0) * tl.reshape(_floats(low, 0.0), (BLOCKS, 4, 32)) - dmin * mn0
    w1 = (d * sc1) * tl.reshape(_floats(high, 0.0), (BLOCKS, 4, 32)) - dmin * mn1
    out = out_ptr + target * 256 + chunk * 64 + tl.arange(0, 32)[None, None, :]
    tl.store(out, w0.to(out_ptr.dtype.element_ty), mask=there)
    tl.store(out + 32, w1.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _dequantize_q4_k(
    low_ptr,  # *u8      (blocks, 128)
    header_ptr,  # *i32  (blocks, 4): d and dmin, three words of scales
    out_ptr,  # *        (blocks, 256)
    first,
    count,
    row_blocks,
    BLOCKS: tl.constexpr,
):
    _k45(low_ptr, low_ptr, header_ptr, out_ptr, first, count, row_blocks, False, BLOCKS)


@triton.jit
def _dequantize_q5_k(
    low_ptr,  # *u8      (blocks, 128)
    high_ptr,  # *u8     (blocks, 32)
    header_ptr,  # *i32  (blocks, 4)
    out_ptr,  # *        (blocks, 256)
    first,
    count,
    row_blocks,
    BLOCKS: tl.constexpr,
):
    _k45(low_ptr, high_ptr, header_ptr, out_ptr, first, count, row_blocks, True, BLOCKS)


@triton.jit
def _dequantize_q6_k(
    low_ptr,  # *u8      (blocks, 128)
    high_ptr,  # *u8     (blocks, 64)
    scales_ptr,  # *i8   (blocks, 16)
    d_ptr,  # *fp16      (blocks)
    out_ptr,  # *        (blocks, 256)
    first,
    count,
    row_blocks,
    BLOCKS: tl.constexpr,
):
    source, target, there = _places(first, count, row_blocks, BLOCKS)
    source, target = source[:, None, None, None], target[:, None, None, None]
    there = there[:, None, None, None]
    half = tl.arange(0, 2)[None, :, None, None]
    part = tl.arange(0, 2)[None, None, :, None]  # of the 16 values that share a scale
    word = tl.arange(0, 4)[None, None, None, :]
    # Groups 0 and 2 of 32 values are the nibbles of `even`, 1 and 3 those of `odd`.
    low = _as_words(low_ptr) + source * 32 + half * 16 + part * 4 + word
    even, odd = _words(low, there), _words(low + 8, there)
    tops = _words(_as_words(high_ptr) + source * 16 + half * 8 + part * 4 + word, there)
    d = tl.load(d_ptr + source, mask=there, other=0).to(tl.float32)
    scales = scales_ptr + source * 16 + half * 8 + part
    out = out_ptr + target * 256 + half * 128 + part * 16
    out += tl.arange(0, 16)[None, None, None, :]
    for group in tl.static_range(4):
        codes = even if group % 2 == 0 else odd
        top = tops << (4 - 2 * group) if group < 2 else tops >> (2 * group - 4)
        code = ((codes >> (group // 2 * 4)) & 0x0F0F0F0F) | (top & 0x30303030)
        scale = d * tl.load(scales + group * 2, mask=there, other=0).to(tl.float32)
        value = scale * tl.reshape(_floats(code, 32.0), (BLOCKS, 2, 2, 16))
        tl.store(out + group * 32, value.to(out_ptr.dtype.element_ty), mask=there)
