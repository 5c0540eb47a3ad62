"""Models whose matrices are of every block type, written by the `gguf` package, are read as the
weights that the package makes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from engine.errors import WeightsError
from engine.export.describe import describe
from engine.formats.open import open_weights
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, load_packed_decoder
from engine.models.packed import PackedEmbedding, PackedLinear
from engine.quant.blocks import BLOCK_TYPES, LAYOUTS, QuantError
from tests.support.gguf_types import written
from tests.support.packed_models import random_tokens
from tests.support.random_blocks import PACKAGE_SCALES, random_matrix

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
    """A type that is not packed is in every third matrix, which becomes floats."""
    packed_type = BLOCK_TYPES[kind].is_packed
    types = (kind,) if packed_type else (kind, "Q8_0", "Q8_0")
    expected = written(tmp_path / "m.gguf", types)
    packed = load_packed_decoder(tmp_path / "m.gguf")
    layers = [m for m in packed.modules() if isinstance(m, PackedLinear | PackedEmbedding)]
    assert (len(layers) == 16) == packed_type
    tokens_BT = random_tokens(2, 19)
    torch.testing.assert_close(packed(tokens_BT), expected(tokens_BT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [*LAYOUTS, "IQ2_XXS"])
def test_a_scale_that_is_not_finite_is_refused_with_its_tensor_and_share(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "m.gguf"
    written(path, [kind])
    with open_weights(path) as weights:
        info = weights.tensors["blk.1.ffn_up.weight"]
    start = LAYOUTS[kind].d if kind in LAYOUTS else PACKAGE_SCALES[kind]
    size = BLOCK_TYPES[kind].block_size
    # MXFP4 has no NaN, but 12 times its largest scale is infinite.
    scale, block = (b"\xff", b"\x77" * 16) if kind == "MXFP4" else (b"\x00\x7e", b"")
    with path.open("r+b") as file:
        file.seek(info.start + start)
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
    written(tmp_path / "m.gguf", ["IQ1_S", "TQ2_0"])
    with pytest.raises(WeightsError, match="found IQ1_S and TQ2_0, which become floats"):
        load_packed_decoder(tmp_path / "m.gguf")


@pytest.mark.parametrize("load", [load_decoder, load_packed_decoder])
def test_without_the_gguf_package_its_types_are_refused_by_name_before_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], Decoder]
) -> None:
    written(tmp_path / "m.gguf", ["Q4_K", "TQ2_0", "IQ3_S"])
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WeightsError, match=r"^IQ3_S and TQ2_0 blocks: .*m\.gguf — ") as caught:
        load(tmp_path / "m.gguf")
    assert caught.value.exit_code == 65
    assert caught.value.hint == "`pip install gguf`"
    described = describe(tmp_path / "m.gguf")
    assert described["dtypes"].keys() == {"F32", "Q4_K", "TQ2_0", "IQ3_S"}
    assert described["runs"] is False


def test_without_the_gguf_package_or_in_one_that_is_too_old_blocks_are_not_dequantised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = random_matrix("NVFP4", 2, 64)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        with pytest.raises(QuantError, match="found none") as caught:
            weight.dequantize()
        assert caught.value.hint == "`pip install gguf`"
    kinds = {name: kind for name, kind in gguf.GGMLQuantizationType.__members__.items()}
    del kinds["NVFP4"]
    monkeypatch.setattr(gguf, "GGMLQuantizationType", kinds)
    with pytest.raises(QuantError, match="found a version without NVFP4"):
        weight.dequantize()
