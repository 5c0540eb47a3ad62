"""Models whose matrices are of every block type, written by the `gguf` package, are read as the
weights that the package makes of them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.errors import WeightsError
from engine.export.describe import describe
from engine.formats.open import open_weights
from engine.models.load import load_decoder, load_packed_decoder
from engine.models.packed import PackedEmbedding, PackedLinear
from engine.quant.blocks import BLOCK_TYPES, LAYOUTS
from tests.support.gguf_types import written
from tests.support.packed_models import random_tokens

READ = tuple(name for name, type_ in BLOCK_TYPES.items() if type_.block_size > 1)


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
    expected = written(tmp_path / "m.gguf", (kind,))
    packed = load_packed_decoder(tmp_path / "m.gguf")
    layers = [m for m in packed.modules() if isinstance(m, PackedLinear | PackedEmbedding)]
    assert len(layers) == 16
    tokens_BT = random_tokens(2, 19)
    torch.testing.assert_close(packed(tokens_BT), expected(tokens_BT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_scale_that_is_not_finite_is_refused_with_its_tensor_and_share(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "m.gguf"
    written(path, [kind])
    with open_weights(path) as weights:
        info = weights.tensors["blk.1.ffn_up.weight"]
    start = LAYOUTS[kind].d
    size = BLOCK_TYPES[kind].block_size
    with path.open("r+b") as file:
        file.seek(info.start + start)
        file.write(b"\x00\x7e")
    share = f"{size} of 131,072 values .* are NaN"
    for load in (load_decoder, load_packed_decoder):
        with pytest.raises(WeightsError, match=rf"blk.1.ffn_up.weight: {share}"):
            load(path)


def test_a_description_counts_the_tensors_of_each_type(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", READ)
    found = describe(tmp_path / "m.gguf")
    assert found["dtypes"].keys() == {"F32", *READ}
    assert found["runs"] is True


@pytest.mark.parametrize("kind", ["IQ3_S", "TQ2_0", "NVFP4"])
def test_a_type_that_is_not_read_is_refused_by_its_name_with_what_to_do(
    tmp_path: Path, kind: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    type_ = gguf.GGMLQuantizationType[kind]
    size, count = gguf.GGML_QUANT_SIZES[type_]
    raw = np.zeros((4, 256 // size * count), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=rf"found type .* \({kind}\)") as caught:
        open_weights(tmp_path / "m.gguf")
    assert caught.value.exit_code == 65
    assert caught.value.hint is not None and "llama-quantize" in caught.value.hint
