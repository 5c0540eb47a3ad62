"""Forward passes on tensors that hold nothing (torch's meta device) and say that they are on a GPU:
all of the code that chooses and prepares a launch runs, and the launch is noted instead of made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.kernels import dequantize_triton
from engine.kernels.compiler import Variant
from engine.kernels.linear import Scratch, packed_linear
from engine.kernels.prewarm import prewarm_variants, types_of
from engine.kernels.registry import pointer_type
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.packed import PackedEmbedding, PackedLinear, head_of, reserve
from engine.quant.blocks import BLOCK_TYPES, BlockType
from engine.quant.planes import PackedMatrix, packed_bytes

CUDA = torch.device("cuda", 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TYPES = tuple(BLOCK_TYPES[name] for name in dequantize_triton.TUNINGS)


class PretendedGpu(TorchFunctionMode):
    """What is made on the GPU is made on the meta device, and says it is on the GPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return CUDA if func(*args).type == "meta" else func(*args)
        if kwargs.get("device") == CUDA:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class Launches:
    """What was launched, with which types of arguments."""

    def __init__(self) -> None:
        self.variants: set[Variant] = set()

    def __call__(self, variant: Variant, grid: tuple[int, ...], *arguments: Tensor | int) -> None:
        types = [
            pointer_type(argument.dtype) if isinstance(argument, Tensor) else "i"
            for argument in arguments
        ]
        wanted = [type_ if type_.startswith("*") else "i" for type_ in variant.types]
        assert types == wanted, f"{variant} launched with {types}"
        self.variants.add(variant)


@pytest.fixture(scope="module")
def launches() -> Iterator[Launches]:
    """The launches of tests, on a GPU that is not there."""
    noted = Launches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dequantize_triton, "launch", noted)
        with PretendedGpu():
            yield noted


def fake(type_: BlockType, rows: int, columns: int) -> PackedMatrix:
    data = torch.empty(packed_bytes(type_, rows, columns), dtype=torch.uint8, device=CUDA)
    return PackedMatrix(type_, rows, columns, data)


@given(
    type_=st.sampled_from(TYPES),
    rows=st.integers(1, 300),
    row_blocks=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    counts=st.lists(st.integers(1, 80) | st.integers(81, 5000), min_size=1, max_size=4),
    limit_rows=st.sampled_from([16, 48, 1000]),
)
def test_products_launch_nothing_that_was_not_warmed(
    launches: Launches,
    type_: BlockType,
    rows: int,
    row_blocks: int,
    dtype: torch.dtype,
    biased: bool,
    counts: list[int],
    limit_rows: int,
) -> None:
    columns = row_blocks * type_.block_size
    launches.variants.clear()
    weight = fake(type_, rows, columns)
    limit = limit_rows * columns * dtype.itemsize
    scratch = Scratch(CUDA, dtype, limit_bytes=limit)
    reserve(scratch, weight, whole=True)
    bias_N = torch.empty(rows, dtype=dtype, device=CUDA) if biased else None
    for count in counts:
        x = torch.empty(count, columns, dtype=dtype, device=CUDA)
        assert packed_linear(x, weight, bias_N, scratch).shape == (count, rows)
    assert launches.variants <= set(prewarm_variants([type_], [dtype]))


CONFIG = ModelConfig(
    family="qwen2",
    vocab_size=700,
    hidden_size=512,
    intermediate_size=768,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)


def packed_decoder(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """A decoder with blocks of several types in it, as llama.cpp mixes them."""
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    scratch = Scratch(CUDA, dtype)
    mixed = ("Q4_K", "Q6_K", "Q5_K", "Q8_0")
    linears = [name for name, part in decoder.named_modules() if isinstance(part, nn.Linear)]
    for place, name in enumerate(linears):
        dense = decoder.get_submodule(name)
        assert isinstance(dense, nn.Linear)
        weight = fake(BLOCK_TYPES[mixed[place % len(mixed)]], *dense.weight.shape)
        reserve(scratch, weight, whole=name != "head")
        packed = PackedLinear(weight, scratch)
        packed.bias = None if dense.bias is None else dense.bias.detach()
        parent, _, leaf = name.rpartition(".")
        setattr(decoder.get_submodule(parent), leaf, packed)
    embedding = fake(BLOCK_TYPES["Q4_0"], config.vocab_size, config.hidden_size)
    reserve(scratch, embedding, whole=False)
    decoder.embed = PackedEmbedding(embedding, scratch)
    return decoder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [(1, 1), (1, 7), (2, 20), (3, 128)])
def test_a_forward_pass_launches_nothing_that_was_not_warmed(
    launches: Launches, dtype: torch.dtype, tokens: tuple[int, int]
) -> None:
    decoder = packed_decoder(CONFIG, dtype)
    launches.variants.clear()
    with torch.inference_mode():
        ids = torch.zeros(tokens, dtype=torch.int64, device=CUDA)
        hidden = decoder(ids)
        for first, slice_RE in head_of(decoder).slices(600, torch.float32):
            assert first >= 0 and slice_RE.shape[1] == CONFIG.hidden_size
    assert hidden.shape[:2] == tokens
    types = types_of(decoder)
    assert launches.variants <= set(prewarm_variants(types, [dtype]))
    # The set is not merely large: each kind of matrix was really launched.
    assert {type_.name for type_ in types} == {"Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q4_0"}
    assert len(launches.variants) == len(types)


def test_what_is_not_warmed_is_missed(launches: Launches) -> None:
    decoder = packed_decoder(CONFIG, torch.bfloat16)
    launches.variants.clear()
    with torch.inference_mode():
        decoder(torch.zeros((1, 128), dtype=torch.int64, device=CUDA))
    without = [type_ for type_ in types_of(decoder) if type_.name != "Q6_K"]
    warmed = prewarm_variants(without, [torch.bfloat16])
    missed = launches.variants - set(warmed)
    assert {variant.name for variant in missed} == {"dequantize_q6_k"}
    wrong_dtype = prewarm_variants(types_of(decoder), [torch.float16])
    assert not launches.variants & set(wrong_dtype)


def test_the_same_type_twice_is_warmed_once() -> None:
    type_ = BLOCK_TYPES["Q6_K"]
    assert prewarm_variants([type_, type_], [*DTYPES, *DTYPES]) == prewarm_variants([type_], DTYPES)
