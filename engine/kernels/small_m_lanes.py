"""Up to 8 rows of x times Q4_K or Q6_K blocks with each thread on its own: no matrix unit, no shared memory.

`small_m_codes.py` brings codes and inputs to a matrix unit through shared memory, and every program of
4 warps waits for itself twice a block. Here a thread owns 16 bytes of low bits of a row, multiplies
their 32 codes four at a time (`dp4a`: four products of bytes, added to a 32-bit sum), and meets the
other threads of its row once, when the columns are through. Inputs are the same whole numbers
(`small_m_inputs.py`), and one load of them serves all the rows that a thread has in its registers.

    p[u] = 128 sum q upper + sum q lower      16 codes of nibble u = 0, 1 of the thread's 16 bytes
    s = sc[0] p[0] + sc[1] p[1]               exact
    y += scale (d s - dmin mn X)              Q4_K: the 8 threads of a block have a minimum each
    y += scale d s                            Q6_K, with q - 32 for q

With nibbles masked where they lie, the upper ones are 16 q, which costs no shift: for Q4_K the others
are made 16 q through their scale, and `scale` is divided by 16, exactly. s is below 2^31.

Sums differ from those of `codes` in the order of float32 additions: here a thread adds its share of the
blocks first. A row of x gets the same bits whatever the number of rows beside it, here too.

One matrix at a time. Not what `fused_linear` launches; `evidence/kernels/one_row.py` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from engine.errors import InternalError
from engine.kernels.key import Variant
from engine.kernels.registry import launch, pointer_type
from engine.kernels.small_m_inputs import Inputs
from engine.kernels.small_m_parts import after_others, half
from engine.quant.blocks import BLOCK_TYPES, BlockType
from engine.quant.planes import PackedMatrix

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Arguments: as in small_m_codes.py, of one matrix. Program (i, s) does TURNS times GROUP rows, blocks s
# split_blocks to (s + 1) split_blocks, BLOCKS of them at a time. Threads of a warp lie along a row
# first, then over GROUP rows; TURNS rows are one thread's. EARLY begins while the kernel before runs.
# Shapes: T turns, G rows of a group, L threads of a row (8 a block), M rows of x


@triton.jit
def _split4(words):
    """The 4 words at the end of each vector of shape (A, G, L, 4), each of shape (A, G, L)."""
    A: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    L: tl.constexpr = words.shape[2]
    even, odd = tl.split(tl.reshape(words, [A, G, L, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _dot4(codes, x, total, PLAIN: tl.constexpr):
    """`total` plus the 16 products of unsigned bytes of the 4 words of codes and signed ones of x."""
    if PLAIN:
        place = 8 * tl.arange(0, 4)
        for i in tl.static_range(4):
            code = (tl.expand_dims(codes[i], -1) >> place) & 255
            total += tl.sum(code * ((tl.expand_dims(x[i], -1) << (24 - place)) >> 24), axis=-1)
    else:
        total = tl.inline_asm_elementwise(
            "{ .reg .s32 t; dp4a.u32.s32 t, $1, $5, $9; dp4a.u32.s32 t, $2, $6, t;"
            " dp4a.u32.s32 t, $3, $7, t; dp4a.u32.s32 $0, $4, $8, t; }",
            "=r,r,r,r,r,r,r,r,r,r",
            [codes[0], codes[1], codes[2], codes[3], x[0], x[1], x[2], x[3], total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return total


@triton.jit
def _words(at, ONCE: tl.constexpr):
    """The 4 words from each `at` on: of weights, which are needed ONCE, or of inputs."""
    words = at[:, :, :, None] + tl.arange(0, 4)[None, None, None, :]
    return tl.load(words, eviction_policy="evict_first" if ONCE else "")


@triton.jit
def _row(words_TGL):
    return tl.expand_dims(words_TGL, 0)


@triton.jit
def _input(words_MGL):
    return tl.expand_dims(words_MGL, 1)


@triton.jit
def _one_sum(codes, upper, lower, first, PLAIN: tl.constexpr):
    """`first`, plus 128 times the sum with the upper bytes of x, plus that with the lower ones."""
    a, b, c, d = _split4(upper)
    total = _dot4(codes, (_input(a), _input(b), _input(c), _input(d)), first * 0, PLAIN)
    a, b, c, d = _split4(lower)
    return _dot4(codes, (_input(a), _input(b), _input(c), _input(d)), total * 128 + first, PLAIN)


@triton.jit
def _sum_of_inputs(upper, lower, PLAIN: tl.constexpr):
    """The sum of 16 inputs, of shape (M, G, L)."""
    a, b, c, d = _split4(upper)
    one = a * 0 + 0x01010101
    total = _dot4((one, one, one, one), (a, b, c, d), a * 0, PLAIN)
    a, b, c, d = _split4(lower)
    return _dot4((one, one, one, one), (a, b, c, d), total * 128, PLAIN)


@triton.jit
def _signed_byte(word, place, PLAIN: tl.constexpr):
    """The signed byte of a word that `place` numbers, 0 to 3."""
    if PLAIN:
        out = (word << (24 - 8 * place)) >> 24
    else:
        # Three times the byte's sign above it, which is what 8 added to its number selects.
        out = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, $2;",
            "=r,r,r",
            [word, 0x8880 + 0x1111 * place],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return out


@triton.jit
def _issued(PLAIN: tl.constexpr):
    """Loads before it are issued before it: the assembler would move them to where they are used."""
    if not PLAIN:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
            "=r,r",
            [tl.zeros([1], tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _weights(low_ptr, high_ptr, header_ptr, d_ptr, block_TGL, piece_L, KIND: tl.constexpr):
    """What a thread needs of a block of each of its rows."""
    block = block_TGL.to(tl.int64)
    low = _words(low_ptr.to(tl.pointer_type(tl.int32)) + piece_L * 4 + block * 32, True)
    if KIND == "Q4_K":
        found = (low, _words(header_ptr + 0 * piece_L + block * 4, True))
    else:
        h_L = piece_L // 4
        high_L = high_ptr.to(tl.pointer_type(tl.int32)) + (h_L * 8 + piece_L % 2 * 4)
        scales = header_ptr + h_L * 2 + block * 4
        d = tl.load(d_ptr.to(tl.pointer_type(tl.float16)) + 0 * piece_L + block)
        high = _words(high_L + block * 16, True)
        found = (low, high, tl.load(scales), tl.load(scales + 1), d)  # type: ignore[assignment]
    return found


@triton.jit
def _times_q4_k(
    y, weights, x_ptr, scale_ptr, sums_ptr, block_MGL, there_L, piece_L, PLAIN: tl.constexpr
):
    """`y` plus the products of a block. Of a thread: chunk c of 64 values, half h of its low nibbles,
    which are of sub-block 2 c, and of the upper ones, of 2 c + 1; its minimum is that of 2 c + h."""
    L: tl.constexpr = 0x0F0F0F0F
    U: tl.constexpr = -0x0F0F0F10
    c_L = piece_L // 2
    h_L = piece_L % 2
    late_L = c_L >= 2
    shift_L = 16 * (c_L % 2)
    mn_shift_L = shift_L + 8 * h_L
    x = x_ptr.to(tl.pointer_type(tl.int32)) + (c_L * 16 + h_L * 4) + block_MGL * 128
    upper_0 = _words(x, False)
    lower_0 = _words(x + 64, False)
    upper_1 = _words(x + 8, False)
    lower_1 = _words(x + 72, False)
    X = tl.load(sums_ptr + piece_L + block_MGL * 8) * -16
    scale = tl.load(scale_ptr + 0 * piece_L + block_MGL) * 0.0625
    both, first, second, third = _split4(weights[1])
    # Scales of both nibbles at once, in two bytes.
    sc = (tl.where(late_L, third, first) >> shift_L) & tl.where(late_L, 0x0F0F, 0x3F3F)
    sc |= (first >> (shift_L + 2)) & tl.where(late_L, 0x3030, 0)
    mn = tl.where(late_L, third, second) >> (mn_shift_L + tl.where(late_L, 4, 0))
    mn &= tl.where(late_L, 15, 63)
    mn |= (second >> (mn_shift_L + 2)) & tl.where(late_L, 48, 0)
    w0, w1, w2, w3 = _split4(weights[0])
    zero = tl.zeros(y.shape, tl.int32)
    q = (_row(w0 & L), _row(w1 & L), _row(w2 & L), _row(w3 & L))
    s = _one_sum(q, upper_0, lower_0, zero, PLAIN) * _row((sc & 255) << 4)
    q = (_row(w0 & U), _row(w1 & U), _row(w2 & U), _row(w3 & U))
    s += _one_sum(q, upper_1, lower_1, zero, PLAIN) * _row(sc >> 8)
    t = _row(mn) * _input(X)
    part = _row(half(both, 0)) * s.to(tl.float32)
    part = tl.fma(_row(half(both, 16)), t.to(tl.float32), part)
    return tl.fma(_input(tl.where(there_L, scale, 0.0)), part, y)


@triton.jit
def _times_q6_k(y, weights, x_ptr, scale_ptr, block_MGL, there_L, piece_L, PLAIN: tl.constexpr):
    """`y` plus the products of a block. Of a thread: half h of a block, 32 values v of it, 16 values k
    of those, for low nibbles and upper ones."""
    L: tl.constexpr = 0x0F0F0F0F
    U: tl.constexpr = -0x0F0F0F10
    h_L = piece_L // 4
    v_L = piece_L // 2 % 2
    k_L = piece_L % 2
    x = x_ptr.to(tl.pointer_type(tl.int32)) + (h_L * 32 + v_L * 8 + k_L * 4) + block_MGL * 128
    upper_0 = _words(x, False)
    lower_0 = _words(x + 64, False)
    upper_1 = _words(x + 16, False)
    lower_1 = _words(x + 80, False)
    scale = tl.load(scale_ptr + 0 * piece_L + block_MGL)
    # Of each byte, bits 0 and 1 belong to the low nibbles, 4 and 5 to the upper ones.
    h0, h1, h2, h3 = _split4((weights[1] >> (2 * v_L)[:, :, :, None]) & 0x33333333)
    w0, w1, w2, w3 = _split4(weights[0])
    q0 = _row((w0 & L) | ((h0 << 4) & U))
    q1 = _row((w1 & L) | ((h1 << 4) & U))
    q2 = _row((w2 & L) | ((h2 << 4) & U))
    q3 = _row((w3 & L) | ((h3 << 4) & U))
    zero = _input(-32 * _sum_of_inputs(upper_0, lower_0, PLAIN))
    s = _one_sum((q0, q1, q2, q3), upper_0, lower_0, zero, PLAIN)
    s *= _row(_signed_byte(weights[2], 2 * v_L + k_L, PLAIN))
    q0 = _row(((w0 >> 4) & L) | (h0 & U))
    q1 = _row(((w1 >> 4) & L) | (h1 & U))
    q2 = _row(((w2 >> 4) & L) | (h2 & U))
    q3 = _row(((w3 >> 4) & L) | (h3 & U))
    zero = _input(-32 * _sum_of_inputs(upper_1, lower_1, PLAIN))
    p = _one_sum((q0, q1, q2, q3), upper_1, lower_1, zero, PLAIN)
    s += p * _row(_signed_byte(weights[3], 2 * v_L + k_L, PLAIN))
    part = _row(weights[4].to(tl.float32)) * s.to(tl.float32)
    return tl.fma(_input(tl.where(there_L, scale, 0.0)), part, y)


@triton.jit
def _times(
    y,
    weights,
    x_ptr,
    scale_ptr,
    sums_ptr,
    block_MGL,
    there_L,
    piece_L,
    KIND: tl.constexpr,
    PLAIN: tl.constexpr,
):
    if KIND == "Q4_K":
        out = _times_q4_k(
            y, weights, x_ptr, scale_ptr, sums_ptr, block_MGL, there_L, piece_L, PLAIN
        )
    else:
        out = _times_q6_k(y, weights, x_ptr, scale_ptr, block_MGL, there_L, piece_L, PLAIN)
    return out


@triton.jit
def _lanes(
    x_ptr,
    scale_ptr,
    sums_ptr,
    low_ptr,
    high_ptr,
    header_ptr,
    d_ptr,
    bias_ptr,
    y_ptr,
    rows,
    row_blocks,
    m,
    split_blocks,
    KIND: tl.constexpr,
    MP: tl.constexpr,
    TURNS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    tl.static_assert(KIND == "Q4_K" or KIND == "Q6_K")
    LANES: tl.constexpr = 8 * BLOCKS
    first_row = tl.program_id(0) * (TURNS * GROUP)
    start = tl.program_id(1) * split_blocks
    end = tl.minimum(start + split_blocks, row_blocks)
    g_G = tl.arange(0, GROUP)[None, :, None]
    e_L = tl.arange(0, LANES)[None, None, :]
    own_L = e_L // 8
    piece_L = e_L % 8
    row_TG = first_row + tl.arange(0, TURNS)[:, None, None] * GROUP + g_G
    row_TGL = tl.minimum(row_TG, rows - 1) * row_blocks + 0 * e_L
    m_M = tl.arange(0, MP)[:, None, None]
    # Where m is less than MP, its last row again.
    row_MGL = tl.minimum(m_M, m - 1) * row_blocks + 0 * g_G + 0 * e_L
    y = tl.zeros([MP, TURNS, GROUP, LANES], tl.float32)
    last_L = end - 1
    if STAGES == 2:
        # Two steps at once, so that what is loaded ahead need not be moved.
        at_L = tl.minimum(start + own_L, last_L)
        this = _weights(low_ptr, high_ptr, header_ptr, d_ptr, row_TGL + at_L, piece_L, KIND)
        if EARLY:
            after_others()
        for step in tl.range(start, end, 2 * BLOCKS, num_stages=1):
            at_L = tl.minimum(step + own_L, last_L)
            after_L = tl.minimum(step + BLOCKS + own_L, last_L)
            then = _weights(low_ptr, high_ptr, header_ptr, d_ptr, row_TGL + after_L, piece_L, KIND)
            _issued(PLAIN)
            y = _times(
                y, this, x_ptr, scale_ptr, sums_ptr, row_MGL + at_L, step + own_L < end, piece_L,
                KIND, PLAIN,
            )  # fmt: skip
            at_L = tl.minimum(step + 2 * BLOCKS + own_L, last_L)
            this = _weights(low_ptr, high_ptr, header_ptr, d_ptr, row_TGL + at_L, piece_L, KIND)
            _issued(PLAIN)
            y = _times(
                y, then, x_ptr, scale_ptr, sums_ptr, row_MGL + after_L,
                step + BLOCKS + own_L < end, piece_L, KIND, PLAIN,
            )  # fmt: skip
    else:
        if EARLY:
            after_others()
        for step in tl.range(start, end, BLOCKS, num_stages=STAGES):
            at_L = tl.minimum(step + own_L, last_L)
            this = _weights(low_ptr, high_ptr, header_ptr, d_ptr, row_TGL + at_L, piece_L, KIND)
            y = _times(
                y, this, x_ptr, scale_ptr, sums_ptr, row_MGL + at_L, step + own_L < end, piece_L,
                KIND, PLAIN,
            )  # fmt: skip
    y = tl.sum(y, axis=3)
    row = first_row + tl.arange(0, TURNS)[None, :, None] * GROUP
    row += tl.arange(0, GROUP)[None, None, :]
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < rows, other=0).to(tl.float32)
    at = (tl.program_id(1) * m + m_M).to(tl.int64) * rows + row
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=(row < rows) & (m_M < m))


TYPES = ("Q4_K", "Q6_K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """How the kernel is launched. The order of a sum is that of `blocks` and `splits`."""

    turns: int
    """Rows of W of one thread, 1, 2, 4 or 8: inputs are loaded once for all."""
    blocks: int
    """Neighbouring blocks of a row that are multiplied at a time, 8 threads each: a power of two."""
    warps: int
    stages: int
    """1 loads nothing ahead, 2 the next blocks into registers, 3 and 4 into shared memory."""
    splits: int = 1
    """Programs that share the sums of a row of W, at most."""

    @property
    def rows(self) -> int:
        """Rows of W of one program."""
        return self.turns * self.group

    @property
    def group(self) -> int:
        return 4 * self.warps // self.blocks


def product_by_lanes(
    x: Inputs,
    weight: PackedMatrix,
    y: Tensor,
    lanes: Lanes,
    bias_N: Tensor | None = None,
    *,
    early: bool = False,
) -> None:
    """Writes x W^T for 1 to 8 rows of x into y of shape (splits, M, N); the bias is added where no sums
    are split. `early`: begins while the kernel before runs, on compute capability 9 and above."""
    m = len(x.scales_MB)
    blocks = weight.row_blocks
    split_blocks = triton.cdiv(blocks, lanes.splits)
    splits = triton.cdiv(blocks, split_blocks)
    wanted = (splits, m, weight.rows)
    if weight.type.name not in TYPES or not 1 <= m <= 8 or y.numel() != splits * m * weight.rows:
        raise InternalError(
            f"product by lanes: expected 1 to 8 rows times {' or '.join(TYPES)} into {wanted}, "
            f"found {m} times {weight.type.name} into {tuple(y.shape)}"
        )
    # Blocks are numbered in 32 bits.
    if lanes.group < 1 or weight.rows * blocks >= 1 << 31:
        raise InternalError(
            f"product by lanes: expected at most {4 * lanes.warps} blocks at a time of fewer than "
            f"2^31, found {lanes.blocks} of {weight.rows * blocks:,}"
        )
    planes = weight.planes()
    low = planes["low"]
    if weight.type.name == "Q6_K":
        rest = (planes["high"], planes["scales"].view(torch.int32), planes["d"].view(torch.uint8))
    else:
        rest = (low, planes["header"], low)
    bias_type = None if bias_N is None else bias_N.dtype
    launch(
        variant(weight.type, lanes, m, y.dtype, bias_type, early=early),
        (triton.cdiv(weight.rows, lanes.rows), splits),
        *x,
        low,
        *rest,
        x.scales_MB if bias_N is None else bias_N,
        y,
        weight.rows,
        blocks,
        m,
        split_blocks,
    )


def variant(
    type_: BlockType,
    lanes: Lanes,
    m: int,
    out: torch.dtype,
    bias: torch.dtype | None,
    *,
    early: bool = False,
    plain: bool = False,
) -> Variant:
    """The kernel of `product_by_lanes`; `plain` is the form without PTX."""
    constants = (
        ("KIND", type_.name),
        ("MP", 1 << (m - 1).bit_length()),
        ("TURNS", lanes.turns),
        ("GROUP", lanes.group),
        ("BLOCKS", lanes.blocks),
        ("BIAS", bias is not None and lanes.splits == 1),
        ("PLAIN", plain or bool(knobs.runtime.interpret)),
        ("STAGES", lanes.stages),
        ("EARLY", early),
    )
    ends = (pointer_type(torch.float32 if bias is None else bias), pointer_type(out))
    return Variant(
        function=_lanes,
        types=("*i8", "*fp32", "*i32", "*u8", "*u8", "*i32", "*u8", *ends, *["i32"] * 4),
        constants=constants,
        warps=lanes.warps,
        stages=max(lanes.stages, 1),
        # Rounded where it is written, so that no number of rows rounds elsewhere.
        fp_fusion=False,
        dependent=early,
    )


def variants() -> tuple[Variant, ...]:
    """One row times each type, with 2 rows a thread and the next blocks in registers."""
    lanes = Lanes(turns=2, blocks=1, warps=4, stages=2)
    return tuple(variant(BLOCK_TYPES[name], lanes, 1, torch.float32, None) for name in TYPES)
