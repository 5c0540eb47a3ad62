"""Define the block types of weight files in one table. To add a type, add a row here and a parity test.

A row of a quantised matrix is a sequence of whole blocks. A block holds `block_size` adjacent
values of the row and is decoded independently of all others. The table defines everything about a
type; all other code reads it:

    its number in a GGUF file, whether an .apr has it, its sizes    readers, writers, `engine.export`
    the byte layout (`Layout`)                                      `reference.py`: bytes to values
                                                                    `planes.py`: order on a device
    candidate ranges, largest value (only of types                  `quantize.py`: values to bytes
    that are written)
    the type that replaces it if blocks do not fill a row           `fallback`
    expected error of a model quantised with it                     the gate, `engine publish --verify`

The value of a code q:

    name    id  values  bytes  bits/weight  a value is
    F32      0     1      4      32          itself
    F16      1     1      2      16          itself
    Q4_0     2    32     18       4.5        d (q - 8)
    Q4_1     3    32     20       5          d q + m
    Q5_0     6    32     22       5.5        d (q - 16)
    Q5_1     7    32     24       6          d q + m
    Q8_0     8    32     34       8.5        d q                 q signed
    Q2_K    10   256     84       2.625      d sc q - dmin mn    sc, mn: 4 bits for each 16 values
    Q3_K    11   256    110       3.4375     d (sc - 32)(q - 4)  sc: 6 bits for each 16 values
    Q4_K    12   256    144       4.5        d sc q - dmin mn    sc, mn: 6 bits for each 32 values
    Q5_K    13   256    176       5.5        d sc q - dmin mn    as Q4_K, q of 5 bits
    Q6_K    14   256    210       6.5625     d sc (q - 32)       sc: int8 for each 16 values
    IQ4_NL  20    32     18       4.5        d book[q]
    IQ4_XS  23   256    136       4.25       d (sc - 32) book[q] sc: 6 bits for each 32 values
    BF16    30     1      2      16          itself

The bytes of each field of a block:

    type     d        second     scales                       low bits           high bits
    Q4_0       0..1                                             2..17   16 x 4
    Q4_1       0..1     m 2..3                                  4..19   16 x 4
    Q5_0       0..1                                             6..21   16 x 4     2..5      1 x 1
    Q5_1       0..1     m 2..3                                  8..23   16 x 4     4..7      1 x 1
    Q8_0       0..1                                             2..33   int8
    Q2_K      80..81    dmin 82..83   0..15 16 x 4             16..79   32 x 2
    Q3_K     108..109               96..103 8 x 4, 104..107 4 x 2  32..95 32 x 2   0..31    32 x 1
    Q4_K       0..1     dmin 2..3     4..15                    16..143  32 x 4
    Q5_K       0..1     dmin 2..3     4..15                    48..175  32 x 4    16..47    32 x 1
    Q6_K     208..209               192..207 int8               0..127  64 x 4   128..191   32 x 2
    IQ4_NL     0..1                                             2..17   16 x 4
    IQ4_XS     0..1                 4..7 1 x 4, 2..3 1 x 2      8..135  16 x 4

d, m and dmin are little-endian fp16. `R x W` is
a run of R bytes in which each byte holds 8 / W values of W bits: the first R values are the lowest
W bits of the R bytes, the next R values are the next W bits, and so on. So `32 x 4` is 32 low
nibbles, then the 32 high nibbles of the same bytes, and `1 x 1` is the bits of a little-endian
integer in order. A code is its low bits plus its high bits shifted left by the width of the low bits;
a scale with two bit fields is built in the same way. If a type has scales and minima, the scales come first.

The module holds only numbers and does not import torch, so that a file can be listed and its sizes
checked without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import WeightsError


class QuantError(WeightsError, ValueError):
    """Values cannot be quantised to a block type, or bytes are not valid blocks of their type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """A bit field of a block: `count` bytes in runs of `run`, `width` bits per value."""

    start: int
    count: int
    run: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The byte positions and meaning of the fields of a block."""

    d: int
    second: int | None = None
    """Byte offset of dmin (types of 256) or m (Q4_1, Q5_1)."""
    scales: Bits | None = None
    """Scales of the sub-blocks, followed by their minima if there is a `second`. Scales of 8 bits are signed; scales
    of 6 bits are packed as in `engine.quant.reference`.
    """
    scales_high: Bits | None = None
    """Upper two bits of 6-bit scales whose lower bits are stored as nibbles."""
    scale_zero: int = 0
    """Stored value of a scale of 0."""
    sub_block: int = 32
    """Number of values that share a scale."""
    low: Bits
    high: Bits | None = None
    zero: int = 0
    """Code of the value 0, in types without a minimum."""
    codebook: tuple[int, ...] | None = None
    """Number that each code represents, if not the code itself."""
    levels: int = 0
    """Largest code; codes begin at 0, those of Q8_0 at -128. Only for types that are written."""
    steps: tuple[float, float] = (0.0, 0.0)
    """Smallest and largest number added to `levels` for the candidate ranges of quantisation: a candidate divides the
    range of the values into `levels` plus this many steps. Found by measurement. Only for types that are written.
    """


class Floor(NamedTuple):
    """Distance of the output of a quantised model from that of the original.

    The figures are those of llama.cpp for 7B and 8B models on Wikitext-2
    (tools/perplexity/README.md), the smallest KL if there are several: Q4_K_M has 0.0127 for Llama-2-7B
    and 0.0313 for Llama-3-8B. They are not properties of the format: small models have more error than
    large ones, and the evaluated text matters too. They are used as a limit for a model's KL, and are
    reported next to it.
    """

    kl: float
    """KL in nats per token: mean of sum_v p_v (ln p_v - ln q_v), p of the 16-bit model, q of the quantised one."""
    agreement: float
    """Fraction of positions at which both models have the same most probable token."""


HALF_MAX = 65504.0
"""The largest fp16 number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """One row of the table. Types are equal if their name, number and sizes are."""

    name: str
    ggml_id: int
    """Type id in a GGUF file; an .apr that has the type uses the same id."""
    block_size: int = 1
    """Number of values in a block; 1 for the float types."""
    block_bytes: int
    file_type: int = field(compare=False, repr=False)
    """llama.cpp's `general.file_type` of a GGUF file with most of its weights in this type."""
    in_apr: bool = field(default=False, compare=False, repr=False)
    largest: float | None = field(default=None, compare=False, repr=False)
    """Largest magnitude that can be stored with either sign. None for a type that is only read and never written."""
    layout: Layout | None = field(default=None, compare=False, repr=False)
    """Fields of a block; None for the float types."""
    float_dtype: str | None = field(default=None, compare=False, repr=False)
    """torch's name of a float type; None for block types."""
    shorter: str | None = field(default=None, compare=False, repr=False)
    """Type that llama.cpp's quantiser uses instead if rows are not a multiple of 256 values."""
    mixture: tuple[str, Floor] | None = field(default=None, compare=False, repr=False)
    """Name in `engine convert --quant` of a file with most weights in this type, and the error of such a file."""

    @property
    def in_blocks(self) -> Layout:
        """Layout of a block type."""
        assert self.layout is not None
        return self.layout

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_size


# torch's constants, copied because this module does not import torch.
_FLOAT32_MAX = 3.4028234663852886e38
_BFLOAT16_MAX = 3.3895313892515355e38

_NL_BOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_ROWS = (
    BlockType(
        name="F32",
        ggml_id=0,
        block_bytes=4,
        file_type=0,
        in_apr=True,
        largest=_FLOAT32_MAX,
        float_dtype="float32",
    ),
    BlockType(
        name="F16",
        ggml_id=1,
        block_bytes=2,
        file_type=1,
        in_apr=True,
        largest=HALF_MAX,
        float_dtype="float16",
    ),
    BlockType(
        name="Q4_0",
        ggml_id=2,
        block_size=32,
        block_bytes=18,
        file_type=2,
        layout=Layout(d=0, low=Bits(start=2, count=16, run=16, width=4), zero=8),
    ),
    BlockType(
        name="Q4_1",
        ggml_id=3,
        block_size=32,
        block_bytes=20,
        file_type=3,
        layout=Layout(d=0, second=2, low=Bits(start=4, count=16, run=16, width=4)),
    ),
    BlockType(
        name="Q5_0",
        ggml_id=6,
        block_size=32,
        block_bytes=22,
        file_type=8,
        largest=15 * HALF_MAX,
        layout=Layout(
            d=0,
            low=Bits(start=6, count=16, run=16, width=4),
            high=Bits(start=2, count=4, run=1, width=1),
            zero=16,
            levels=31,
            steps=(-3.0, 0.5),
        ),
    ),
    BlockType(
        name="Q5_1",
        ggml_id=7,
        block_size=32,
        block_bytes=24,
        file_type=9,
        layout=Layout(
            d=0,
            second=2,
            low=Bits(start=8, count=16, run=16, width=4),
            high=Bits(start=4, count=4, run=1, width=1),
        ),
    ),
    BlockType(
        name="Q8_0",
        ggml_id=8,
        block_size=32,
        block_bytes=34,
        file_type=7,
        largest=127 * HALF_MAX,
        layout=Layout(
            d=0,
            low=Bits(start=2, count=32, run=32, width=8),
            levels=127,
            steps=(-5.0, 3.0),
        ),
        mixture=("q8_0", Floor(3.7e-4, 0.9885)),
    ),
    BlockType(
        name="Q2_K",
        ggml_id=10,
        block_size=256,
        block_bytes=84,
        file_type=10,
        layout=Layout(
            d=80,
            second=82,
            scales=Bits(start=0, count=16, run=16, width=4),
            sub_block=16,
            low=Bits(start=16, count=64, run=32, width=2),
        ),
    ),
    BlockType(
        name="Q3_K",
        ggml_id=11,
        block_size=256,
        block_bytes=110,
        file_type=12,
        layout=Layout(
            d=108,
            scales=Bits(start=96, count=8, run=8, width=4),
            scales_high=Bits(start=104, count=4, run=4, width=2),
            scale_zero=32,
            sub_block=16,
            low=Bits(start=32, count=64, run=32, width=2),
            high=Bits(start=0, count=32, run=32, width=1),
            zero=4,
        ),
    ),
    BlockType(
        name="Q4_K",
        ggml_id=12,
        block_size=256,
        block_bytes=144,
        file_type=15,
        in_apr=True,
        largest=63 * HALF_MAX,
        layout=Layout(
            d=0,
            second=2,
            scales=Bits(start=4, count=12, run=4, width=6),
            low=Bits(start=16, count=128, run=32, width=4),
            levels=15,
            steps=(-2.0, 0.5),
        ),
        shorter="Q5_0",
        mixture=("q4_k_m", Floor(1.27e-2, 0.9467)),
    ),
    BlockType(
        name="Q5_K",
        ggml_id=13,
        block_size=256,
        block_bytes=176,
        file_type=17,
        layout=Layout(
            d=0,
            second=2,
            scales=Bits(start=4, count=12, run=4, width=6),
            low=Bits(start=48, count=128, run=32, width=4),
            high=Bits(start=16, count=32, run=32, width=1),
        ),
    ),
    BlockType(
        name="Q6_K",
        ggml_id=14,
        block_size=256,
        block_bytes=210,
        file_type=18,
        in_apr=True,
        largest=31 * 127 * HALF_MAX,
        layout=Layout(
            d=208,
            scales=Bits(start=192, count=16, run=16, width=8),
            sub_block=16,
            low=Bits(start=0, count=128, run=64, width=4),
            high=Bits(start=128, count=64, run=32, width=2),
            zero=32,
            levels=63,
            steps=(-5.0, 3.0),
        ),
        shorter="Q8_0",
        mixture=("q6_k", Floor(2.10e-3, 0.9752)),
    ),
    BlockType(
        name="IQ4_NL",
        ggml_id=20,
        block_size=32,
        block_bytes=18,
        file_type=25,
        layout=Layout(d=0, low=Bits(start=2, count=16, run=16, width=4), codebook=_NL_BOOK),
    ),
    BlockType(
        name="IQ4_XS",
        ggml_id=23,
        block_size=256,
        block_bytes=136,
        file_type=30,
        layout=Layout(
            d=0,
            scales=Bits(start=4, count=4, run=1, width=4),
            scales_high=Bits(start=2, count=2, run=1, width=2),
            scale_zero=32,
            low=Bits(start=8, count=128, run=16, width=4),
            codebook=_NL_BOOK,
        ),
    ),
    BlockType(
        name="BF16",
        ggml_id=30,
        block_bytes=2,
        file_type=32,
        in_apr=True,
        largest=_BFLOAT16_MAX,
        float_dtype="bfloat16",
    ),
)

BLOCK_TYPES: dict[str, BlockType] = {row.name: row for row in _ROWS}
LAYOUTS: dict[str, Layout] = {row.name: row.layout for row in _ROWS if row.layout is not None}
WRITTEN: tuple[str, ...] = tuple(row.name for row in _ROWS if row.largest is not None)
"""Types that values can be quantised or cast to; the others are only read."""
NOISE_FLOORS: dict[str, Floor] = dict(row.mixture for row in _ROWS if row.mixture is not None)
"""Noise floors by the name in `engine convert --quant`."""
QUANTS = {"q4_k_m": "Q4_K", "q6_k": "Q6_K", "q8_0": "Q8_0", "bf16": "BF16", "f32": "F32"}
"""Type of the matrices, for each name in `engine convert --quant`."""
TYPES_OF = {
    "safetensors": tuple(name for name, kind in BLOCK_TYPES.items() if kind.float_dtype),
    "gguf": tuple(BLOCK_TYPES),
    "apr": tuple(name for name, kind in BLOCK_TYPES.items() if kind.in_apr),
}
"""Types that a file can hold, for each format."""


GGML_NAMES = {row.ggml_id: row.name for row in _ROWS} | {
    4: "Q4_2, of 2023",
    5: "Q4_3, of 2023",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4, which llama.cpp makes of Q4_0 as it loads",
    32: "Q4_0_4_8, which llama.cpp makes of Q4_0 as it loads",
    33: "Q4_0_8_8, which llama.cpp makes of Q4_0 as it loads",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4, which llama.cpp makes of IQ4_NL as it loads",
    37: "IQ4_NL_4_8, which llama.cpp makes of IQ4_NL as it loads",
    38: "IQ4_NL_8_8, which llama.cpp makes of IQ4_NL as it loads",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0, 128 weights in 18 bytes",
    42: "Q2_0, 64 weights in a block",
}
"""The type ids of GGUF files, including types that cannot be read, so that an error message can
name them.
"""

GROUP_ROWS = 16
"""Rows of a K-quant that are stored together on a device (`engine.quant.planes`)."""


def group_rows(type_: BlockType) -> int:
    """Return how many rows are stored together on a device, in a padded group."""
    return GROUP_ROWS if type_.block_size == 256 else 1


def row_bytes(type_: BlockType, values: int) -> int:
    """Return the size of a row of `values` values in bytes. Raises `QuantError`, naming the
    fallback type, if blocks do not fill the row.
    """
    if values < 0 or values % type_.block_size:
        raise QuantError.expected(
            f"{type_.name} row",
            "row length",
            f"a multiple of {type_.block_size} values",
            f"{values:,}",
            hint=f"{fallback(type_, values).name} fits this row" if values > 0 else None,
        )
    return values // type_.block_size * type_.block_bytes


def fallback(type_: BlockType, values: int) -> BlockType:
    """Return the type to use for rows of `values` values if `type_` is requested.

    It is the first of these whose blocks fill the row: `type_` itself; a type with blocks of 32 and at
    least as many bits (for Q4_K, Q5_0; for Q5_K, Q5_1; for Q6_K, Q8_0); F16. llama.cpp makes the same
    choice.
    """
    for name in (type_.name, type_.shorter):
        if name is not None and values % BLOCK_TYPES[name].block_size == 0:
            return BLOCK_TYPES[name]
    return BLOCK_TYPES["F16"]
