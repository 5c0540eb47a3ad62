"""Up to 8 rows of x times K-quant blocks in integers: what generating text waits for.

Codes of weights have 4 to 6 bits, and rows of x come as 13-bit integers in two bytes
(`small_m_inputs.py`), so that a matrix unit for bytes multiplies them, four times as many at once as
floats, and nothing has to become a float before it does. Of some sub-blocks j of a block:

    s[r] = sum over j of sc[r, j] sum over k in j of q[r, k] x[k]
    t[r] = sum over j of mn[r, j] X[j],  X[j] = sum over k in j of x[k]
    y[r] += scale (d[r] s[r] - dmin[r] t[r])                  Q4_K, Q5_K
    y[r] += scale d[r] s[r], with q - 32 for q                Q6_K

s and t are exact: of a chunk of 64 values, or 16 in two places, the largest that there can be is below 2^31.
What is rounded is x, to 1/4095 of its block's largest value, and the float32 sums over blocks, of which a row
has four, for parts of its blocks (`small_m_codes_k45.py`, `small_m_codes_q6k.py`).

The exact sums do not know how the matrix unit was filled, the float32 operations are the same, and their order
is that of the blocks of a tile: a row of x gets the same bits whatever the number of rows beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.small_m_codes_k45 import codes_k45
from engine.kernels.small_m_codes_q6k import codes_q6_k

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Arguments: `x_ptr`, *i8 (m, row_blocks, 2, 256), `scale_ptr`, *fp32 (m, row_blocks), and `sums_ptr`,
# *i32 (m, row_blocks, 8), the inputs. One to three matrices stand side by side in y: the first two are
# of type KIND, the third of type LAST. Of each the planes `low`, *u8, 128 a block, `high`, *u8, 32 or 64,
# `header`, *i32, 4, which is the scales of Q6_K, and `d`, *u8, 2; what a type lacks is not read, nor is the
# matrix of a number above COUNT. `bias_ptr` to (rows), read if BIAS; `y_ptr` to (splits, m, all rows).
# `tiles` are how many each matrix is cut into; program (i, s) does ROWS rows of one, blocks s split_blocks to
# (s + 1) split_blocks. MP is m, padded to 1, 2, 4 or 8.


@triton.jit
def _one_product(
    program,
    tiles,
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
    stride,
    row_blocks,
    m,
    split_blocks,
    KIND: tl.constexpr,
    MP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if KIND == "Q6_K":
        codes_q6_k(
            program, tiles, x_ptr, scale_ptr, low_ptr, high_ptr, header_ptr, d_ptr, bias_ptr, y_ptr,
            rows, stride, row_blocks, m, split_blocks, MP, TILE, ROWS, BIAS, PLAIN, STAGES, EARLY,
        )  # fmt: skip
    else:
        tl.static_assert(KIND == "Q4_K" or KIND == "Q5_K")
        HIGH: tl.constexpr = KIND == "Q5_K"
        codes_k45(
            program, tiles, x_ptr, scale_ptr, sums_ptr, low_ptr, high_ptr, header_ptr, bias_ptr,
            y_ptr, rows, stride, row_blocks, m, split_blocks, HIGH, MP, TILE, ROWS, BIAS, PLAIN, STAGES, EARLY,
        )  # fmt: skip


@triton.jit
def _products(
    x_ptr,
    scale_ptr,
    sums_ptr,
    low_0,
    high_0,
    header_0,
    d_0,
    low_1,
    high_1,
    header_1,
    d_1,
    low_2,
    high_2,
    header_2,
    d_2,
    bias_ptr,
    y_ptr,
    rows_0,
    rows_1,
    rows_2,
    tiles_0,
    tiles_1,
    tiles_2,
    row_blocks,
    m,
    split_blocks,
    COUNT: tl.constexpr,
    KIND: tl.constexpr,
    LAST: tl.constexpr,
    MP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    tl.static_assert(COUNT <= 3 and (COUNT == 3 or LAST == KIND))
    program = tl.program_id(0)
    stride = rows_0 + rows_1 + rows_2
    first_1 = tiles_0 * (TILE // ROWS)
    first_2 = first_1 + tiles_1 * (TILE // ROWS)
    low, high, header, d, rows, y, tiles = low_0, high_0, header_0, d_0, rows_0, y_ptr, tiles_0
    if COUNT > 1:
        if program >= first_1:
            low, high, header, d, rows, y = low_1, high_1, header_1, d_1, rows_1, y_ptr + rows_0
            tiles = tiles_1
    own = program - tl.where(program >= first_1, first_1, 0)
    if COUNT < 3:
        _one_product(
            own, tiles, x_ptr, scale_ptr, sums_ptr, low, high, header, d, bias_ptr, y, rows, stride,
            row_blocks, m, split_blocks, KIND, MP, TILE, ROWS, BIAS, PLAIN, STAGES, EARLY,
        )  # fmt: skip
    elif program < first_2:
        _one_product(
            own, tiles, x_ptr, scale_ptr, sums_ptr, low, high, header, d, bias_ptr, y, rows, stride,
            row_blocks, m, split_blocks, KIND, MP, TILE, ROWS, BIAS, PLAIN, STAGES, EARLY,
        )  # fmt: skip
    else:
        _one_product(
            program - first_2, tiles_2, x_ptr, scale_ptr, sums_ptr, low_2, high_2, header_2, d_2,
            bias_ptr, y_ptr + rows_0 + rows_1, rows_2, stride, row_blocks, m, split_blocks, LAST, MP,
            TILE, ROWS, BIAS, PLAIN, STAGES, EARLY,
        )  # fmt: skip
