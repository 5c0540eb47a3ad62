"""Models whose matrices are of every block type, written by the `gguf` package, are read as the
weights that the package makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from engine.errors import WeightsError
from engine.export.describe import describe
from engine.formats.open import open_weights
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, load_packed_decoder
from engine.models.names import names_for
from engine.models.packed import PackedEmbedding, PackedLinear
from engine.quant.blocks import BLOCK_TYPES, LAYOUTS
from tests.support.packed_models import lively, make_config, random_tokens
from tests.support.random_blocks import random_matrix

READ = tuple(LAYOUTS)


def written(path: Path, types: Sequence[str]) -> Decoder:
    """Write a Qwen2 with its matrices in `types`, in turn, and return the decoder that has the
    values which the package gives for them.
    """
    decoder = lively(make_config())
    config = decoder.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    names = names_for("gguf", config)
    state: dict[str, Tensor] = {}
    for place, (ours, tensor) in enumerate(decoder.state_dict().items()):
        state[ours] = tensor
        if tensor.dim() == 1:
            writer.add_tensor(names[ours], tensor.numpy())
            continue
        kind = types[place % len(types)]
        raw = random_matrix(kind, *tensor.shape, seed=place).blocks.numpy()
        type_ = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(names[ours], raw, raw_dtype=type_)
        state[ours] = torch.from_numpy(gguf.quants.dequantize(raw, type_))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    decoder.load_state_dict(state)
    return decoder


@torch.no_grad()
def test_a_file_of_every_type_has_the_logits_of_the_weights_of_the_gguf_package(
    tmp_path: Path,
) -> None:
    expected = written(tmp_path / "m.gguf", READ)
    found = load_decoder(tmp_path / "m.gguf")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    tokens_BT = random_tokens(2, 19)
    logits_BTV = expected(tokens_BT)
    assert logits_BTV.std() > 0.1
    assert torch.equal(found(tokens_BT), logits_BTV)


@torch.no_grad()
@pytest.mark.parametrize("kind", READ)
def test_a_packed_model_has_the_logits_of_the_weights_of_the_gguf_package(
    tmp_path: Path, kind: str
) -> None:
    """A type that is not packed is in every third matrix, which becomes floats."""
    packed_type = BLOCK_TYPES[kind].is_packed
    types = (kind,) if packed_type else (kind, "Q8_0", "Q8_0")
    expected = written(tmp_path / "m.gguf", types)
    packed = load_packed_decoder(tmp_path / "m.gguf")
    layers = [m for m in packed.modules() if isinstance(m, PackedLinear | PackedEmbedding)]
    assert (len(layers) == 16) == packed_type
    tokens_BT = random_tokens(2, 19)
    torch.testing.assert_close(packed(tokens_BT), expected(tokens_BT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", READ)
def test_a_scale_that_is_not_finite_is_refused_with_its_tensor_and_share(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "m.gguf"
    written(path, [kind])
    with open_weights(path) as weights:
        info = weights.tensors["blk.1.ffn_up.weight"]
    layout, size = LAYOUTS[kind], BLOCK_TYPES[kind].block_size
    # MXFP4 has no NaN, but 12 times its largest scale is infinite.
    scale, block = (b"\xff", b"\x77" * 16) if kind == "MXFP4" else (b"\x00\x7e", b"")
    with path.open("r+b") as file:
        file.seek(info.start + layout.d)
        file.write(scale + block)
    share = f"{size} of 131,072 values .* are {'infinite' if kind == 'MXFP4' else 'NaN'}"
    loads = [load_decoder, *([load_packed_decoder] if BLOCK_TYPES[kind].is_packed else [])]
    for load in loads:
        with pytest.raises(WeightsError, match=rf"blk.1.ffn_up.weight: {share}"):
            load(path)


def test_a_description_counts_the_tensors_of_each_type(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", READ)
    found = describe(tmp_path / "m.gguf")
    assert found["dtypes"].keys() == {"F32", *READ}
    assert found["runs"] is True


def test_a_file_of_types_that_become_floats_alone_is_no_quantized_teacher(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", ["IQ4_NL", "Q3_K"])
    with pytest.raises(WeightsError, match="found IQ4_NL and Q3_K, which become floats"):
        load_packed_decoder(tmp_path / "m.gguf")
