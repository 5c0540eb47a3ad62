"""The block types: sizes and ids of GGUF, fallbacks, and what is said where rows are not blocks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from engine.errors import WeightsError
from engine.quant.blocks import BLOCK_TYPES, GGML_NAMES, QuantError, fallback, row_bytes
from tests.support.gguf_types import written


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_ids_and_sizes_are_those_of_the_gguf_package(name: str) -> None:
    known = gguf.GGMLQuantizationType[name]
    type_ = BLOCK_TYPES[name]
    assert type_.name == name
    assert type_.ggml_id == known.value
    assert (type_.block_size, type_.block_bytes) == gguf.GGML_QUANT_SIZES[known]


@pytest.mark.parametrize(
    ("name", "bits"), [("Q4_0", 4.5), ("Q8_0", 8.5), ("Q4_K", 4.5), ("Q6_K", 6.5625), ("F16", 16)]
)
def test_bits_per_weight_count_the_scales(name: str, bits: float) -> None:
    assert BLOCK_TYPES[name].bits_per_weight == bits


def test_every_type_that_a_message_may_name_has_its_id_in_the_gguf_package() -> None:
    theirs = {int(kind.value): kind.name for kind in gguf.GGMLQuantizationType}
    # What a type holds may stand after its name.
    ours = {i: name.partition(",")[0] for i, name in GGML_NAMES.items()}
    assert {i: theirs.get(i, name) for i, name in ours.items()} == ours
    assert len(set(GGML_NAMES.values())) == len(GGML_NAMES)


def test_bytes_of_a_row() -> None:
    # Qwen2.5-7B: a row of ffn_down, 18944 values = 74 blocks of 256.
    assert row_bytes(BLOCK_TYPES["Q4_K"], 18944) == 74 * 144
    assert row_bytes(BLOCK_TYPES["Q6_K"], 3584) == 2940
    assert row_bytes(BLOCK_TYPES["Q5_0"], 896) == 28 * 22
    assert row_bytes(BLOCK_TYPES["BF16"], 7) == 14
    assert row_bytes(BLOCK_TYPES["Q4_K"], 0) == 0


@pytest.mark.parametrize(
    ("name", "values", "fits"),
    [
        ("Q4_K", 896, "Q5_0"),
        ("Q6_K", 29568, "Q8_0"),
        ("Q4_K", 100, "F16"),
        ("Q8_0", 48, "F16"),
    ],
)
def test_a_row_that_blocks_do_not_fill_is_refused_with_the_fallback_named(
    name: str, values: int, fits: str
) -> None:
    type_ = BLOCK_TYPES[name]
    assert fallback(type_, values).name == fits
    with pytest.raises(QuantError) as caught:
        row_bytes(type_, values)
    text = str(caught.value)
    assert f"a multiple of {type_.block_size} values, found {values:,}" in text
    assert f"hint: {fits} fits this row" in text


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_row_of_whole_blocks_needs_no_fallback(name: str) -> None:
    assert fallback(BLOCK_TYPES[name], 512) is BLOCK_TYPES[name]


def test_a_negative_row_length_is_refused() -> None:
    with pytest.raises(QuantError, match="found -256"):
        row_bytes(BLOCK_TYPES["Q4_K"], -256)


def test_a_quant_error_is_bad_input_and_a_value_error() -> None:
    assert issubclass(QuantError, WeightsError)
    assert issubclass(QuantError, ValueError)
    assert QuantError.exit_code == 65


def test_nothing_loads_triton_on_a_cpu_or_the_gguf_package(
    tmp_path: Path,
) -> None:
    written(tmp_path / "m.gguf", ["Q4_K", "IQ4_XS"])
    code = (
        "import sys, torch, engine.cli.main\n"
        "from engine.export.describe import describe\n"
        "from engine.models.load import load_decoder, load_packed_decoder\n"
        "load_decoder('m.gguf'), load_packed_decoder('m.gguf'), describe('m.gguf')\n"
        "load_packed_decoder('m.gguf').hidden(torch.zeros(1, 4, dtype=torch.int64))\n"
        "assert 'gguf' not in sys.modules and 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_block_types_load_without_torch() -> None:
    code = "import sys, engine.quant.blocks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
