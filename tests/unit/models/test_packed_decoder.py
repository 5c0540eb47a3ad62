"""A decoder whose weights stay in their blocks: the model that the dequantised weights are, frozen,
and no larger than its blocks and one scratch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from engine.errors import BadInput, InternalError, WeightsError
from engine.export.convert import convert
from engine.formats.open import open_weights
from engine.kernels.linear import LIMIT_BYTES
from engine.model_families import FAMILIES
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, load_packed_decoder, save_decoder
from engine.models.packed import PackedEmbedding, PackedLinear, head_of
from engine.models.packed_size import packed_size
from engine.models.read_config import config_of
from engine.quant.blocks import BLOCK_TYPES, LAYOUTS, WRITTEN
from engine.quant.quantize import quantize
from tests.support.packed_models import lively, make_config, random_tokens, write

# fp32 on both sides, and the same values: what differs is the order of sums.
ROUNDING = 2e-5


def layers_of(decoder: Decoder, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in decoder.named_modules() if isinstance(module, kind)]


@torch.no_grad()
def assert_same_model(packed: Decoder, dense: Decoder) -> None:
    tokens_BT = random_tokens(2, 37)
    expected_BTV = dense(tokens_BT)
    assert expected_BTV.std() > 0.3
    torch.testing.assert_close(packed(tokens_BT), expected_BTV, rtol=0, atol=ROUNDING)
    documents_BT = (torch.arange(37) // 9).expand(2, -1)
    torch.testing.assert_close(
        packed.hidden(tokens_BT, documents_BT),
        dense.hidden(tokens_BT, documents_BT),
        rtol=0,
        atol=ROUNDING,
    )


@pytest.mark.parametrize("blocks", [name for name in LAYOUTS if name in WRITTEN])
def test_blocks_of_every_type_give_the_logits_of_their_values(tmp_path: Path, blocks: str) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), blocks)
    packed = load_packed_decoder(path)
    # q, k, v, o, gate, up, down of two layers, and the head
    assert len(layers_of(packed, PackedLinear)) == 15
    assert layers_of(packed, PackedEmbedding) == ["embed"]
    assert_same_model(packed, load_decoder(path))


@pytest.mark.parametrize(
    ("family", "suffix", "tied"),
    [
        # Embeddings are tied in the same way, whatever the family.
        pytest.param(
            *(row.name, suffix, tied), marks=[pytest.mark.soak] * (tied and row.name != "qwen2")
        )
        for row in FAMILIES.values()
        for suffix in ("gguf", "apr")
        for tied in (False, True)
        if suffix == "gguf" or row.apr
    ],
)
def test_every_family_and_format_gives_the_logits_of_its_values(
    tmp_path: Path, family: str, suffix: str, tied: bool
) -> None:
    decoder = lively(make_config(family, tied))
    path = write(tmp_path / f"m.{suffix}", decoder, "Q6_K")
    packed = load_packed_decoder(path)
    # Not what another loader makes of the file: it could have the same rows in the same wrong order.
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.copy_(quantize(parameter, BLOCK_TYPES["Q6_K"]).dequantize())
    assert_same_model(packed, decoder)
    if family == "qwen2":
        assert packed.layers[0].attention.q.bias.abs().sum() > 0  # type: ignore[union-attr,operator]


def test_a_converted_mixture_gives_the_logits_of_its_values(tmp_path: Path) -> None:
    """q4_k_m of rows of 320: Q5_0, Q8_0, and biases and norms in floats."""
    decoder = lively(make_config(hidden_size=320, intermediate_size=512))
    save_decoder(decoder, tmp_path / "plain", torch.float32)
    path = tmp_path / "m.gguf"
    convert(tmp_path / "plain", path, "q4_k_m")
    packed = load_packed_decoder(path)
    types = {m.packed.type.name for m in packed.modules() if isinstance(m, PackedLinear)}
    assert types == {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    assert_same_model(packed, load_decoder(path))


def test_a_matrix_stored_in_floats_stays_a_dense_layer(tmp_path: Path) -> None:
    for floats in ("mlp.down", "embed", "head"):
        path = write(tmp_path / f"{floats}.gguf", lively(make_config()), "Q8_0", floats)
        packed = load_packed_decoder(path)
        dense = [*layers_of(packed, nn.Linear), *layers_of(packed, nn.Embedding)]
        assert dense and all(floats in name for name in dense)
        assert list(packed.parameters()) == []
        assert_same_model(packed, load_decoder(path))


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config(tied=True)), "Q6_K")
    packed = load_packed_decoder(path)
    head, embedding = packed.head, packed.get_submodule("embed")
    assert isinstance(head, PackedLinear) and isinstance(embedding, PackedEmbedding)
    assert head.data is embedding.data
    assert [name for name, _ in packed.named_buffers()].count("head.data") == 0


def test_nothing_of_it_is_a_parameter_or_takes_a_gradient(tmp_path: Path) -> None:
    packed = load_packed_decoder(write(tmp_path / "m.gguf", lively(make_config()), "Q4_K"))
    assert list(packed.parameters()) == []
    packed.requires_grad_(True)
    assert not any(buffer.requires_grad for buffer in packed.buffers())
    linear = packed.layers[0].attention.q  # type: ignore[union-attr]
    x = torch.randn(3, 256, requires_grad=True)
    with pytest.raises(InternalError, match="inputs without gradient"):
        linear(x)  # type: ignore[operator]
    with torch.no_grad():
        assert not linear(x).requires_grad  # type: ignore[operator]
    assert not packed(random_tokens(1, 5)).requires_grad


def test_it_holds_its_blocks_and_one_scratch(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config(num_hidden_layers=3)), "Q4_K")
    packed = load_packed_decoder(path)
    with open_weights(path) as weights:
        size = packed_size(config_of(weights), weights)
        in_file = sum(info.bytes for info in weights.tensors.values())
    held = sum(buffer.nbytes for buffer in packed.buffers())
    # 23 matrices of one plane
    assert size.matrices == 23
    # The last groups of 16 rows of the embedding and the head are filled up.
    filled = 2 * (-packed.config.vocab_size % 16) * 144
    assert held == size.weight_bytes(4) == in_file + filled
    scratches = {m.scratch for m in packed.modules() if isinstance(m, PackedLinear)}
    (scratch,) = scratches
    assert scratch.nbytes == size.scratch_bytes(4) == 2 * 512 * 256 * 4
    assert replace(size, scratch_values=10**10).scratch_bytes(4) == LIMIT_BYTES


def test_the_scratch_may_be_written_in_and_outside_of_inference_mode(tmp_path: Path) -> None:
    packed = load_packed_decoder(write(tmp_path / "m.gguf", lively(make_config()), "Q4_K"))
    tokens_BT = random_tokens(1, 5)
    with torch.inference_mode():
        expected_BTV = packed(tokens_BT)
    assert torch.equal(packed(tokens_BT), expected_BTV)


def test_a_loaded_model_does_not_depend_on_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), "Q4_K")
    packed = load_packed_decoder(path)
    expected_BTV = packed(random_tokens(1, 9))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(path.stat().st_size // 2))
    assert torch.equal(packed(random_tokens(1, 9)), expected_BTV)


def test_half_precision_rounds_each_value_once(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), "Q4_K")
    packed = load_packed_decoder(path, torch.bfloat16)
    dense = load_decoder(path, torch.bfloat16)
    tokens_BT = random_tokens(1, 9)
    assert torch.equal(packed.get_submodule("embed")(tokens_BT), dense.embed(tokens_BT))
    with torch.no_grad():
        assert packed(tokens_BT).dtype == torch.bfloat16
        torch.testing.assert_close(packed(tokens_BT), dense(tokens_BT), rtol=0, atol=0.05)
    for _, weight_RE in head_of(packed).slices(101, torch.float32):
        assert torch.equal(weight_RE, weight_RE.bfloat16().float())


def test_a_file_without_blocks_is_refused_with_what_to_do(tmp_path: Path) -> None:
    save_decoder(lively(make_config()), tmp_path / "plain", torch.float32)
    convert(tmp_path / "plain", tmp_path / "m.gguf", "f32")
    for path in (tmp_path / "plain", tmp_path / "m.gguf"):
        with pytest.raises(BadInput, match="matrices in blocks, found floats alone") as caught:
            load_packed_decoder(path)
        assert "--quant q4_k_m" in str(caught.value.hint)
        assert "teacher.backend=dequantized" in str(caught.value.hint)


@pytest.mark.parametrize("blocks", ["Q4_K", "Q5_0", "Q6_K", "Q8_0"])
def test_nan_in_a_block_is_refused_by_name_with_its_share(tmp_path: Path, blocks: str) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), blocks)
    with open_weights(path) as weights:
        info = weights.tensors["blk.1.ffn_up.weight"]
    layout = LAYOUTS[blocks]
    with path.open("r+b") as file:
        file.seek(info.start + (layout.d if layout.second is None else layout.second))
        file.write(b"\x00\x7e")
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_up\.weight: \d+ of 131,072 values") as a:
        load_packed_decoder(path)
    with pytest.raises(WeightsError) as b:
        load_decoder(path)
    assert str(a.value) == str(b.value)


@torch.no_grad()
def test_the_seven_linears_of_a_layer_are_the_right_ones(tmp_path: Path) -> None:
    """Square matrices may be taken for one another without an error."""
    config = make_config(num_key_value_heads=8, intermediate_size=256)
    path = write(tmp_path / "m.gguf", lively(config), "Q8_0")
    packed, dense = load_packed_decoder(path), load_decoder(path)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    for name in layers_of(packed, PackedLinear):
        linear = dense.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        torch.testing.assert_close(
            packed.get_submodule(name)(x),
            F.linear(x, linear.weight, linear.bias),
            rtol=0,
            atol=ROUNDING,
        )
