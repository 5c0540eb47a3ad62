"""What `engine inspect` says of a weight file, from its headers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cli.main import main
from engine.export.convert import convert
from engine.export.describe import describe
from engine.formats.tokenizer import open_tokenizer
from engine.models.config import count_parameters
from engine.models.read_config import read_config
from tests.support.kit import Kit


@pytest.fixture(scope="module")
def files(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same small teacher in every format."""
    folder = tmp_path_factory.mktemp("formats")
    gguf = convert(kit.teacher, folder / "teacher.gguf", "q8_0").target
    apr = convert(kit.teacher, folder / "teacher.apr", "bf16").target
    return {"safetensors": kit.teacher, "gguf": gguf, "apr": apr}


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("format_", ["safetensors", "gguf", "apr"])
def test_the_same_model_is_described_the_same_in_every_format(
    format_: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = json.loads(printed([str(files[format_]), "--json"], capsys))
    assert found["format"] == format_
    assert found["architecture"] == "qwen2" and found["runs"] is True
    assert found["tensors"] == 26 and found["weights"] == count_parameters(
        read_config(files["safetensors"])
    )
    assert found["config"]["hidden_size"] == 48 and found["config"]["rope_theta"] == 10000.0
    # The tokenizer has fewer tokens than the embedding rows; GGUF fills them up.
    assert found["vocabulary"]["rows"] == 300
    assert found["vocabulary"]["tokens"] == open_tokenizer(files["safetensors"]).vocab_size < 300
    assert found["warnings"] == [] and "table" not in found


def test_bits_per_weight_count_every_byte(files: dict[str, Path]) -> None:
    assert describe(files["safetensors"])["bits_per_weight"] == 32
    found = describe(files["gguf"], tensors=True)
    # 48 values in a row are no multiple of 32: those rows are F16.
    assert {dtype: share["tensors"] for dtype, share in found["dtypes"].items()} == {
        "F16": 15,
        "F32": 11,
    }
    assert found["bytes"] == sum(one["bytes"] for one in found["table"])
    assert found["bits_per_weight"] == 8 * found["bytes"] / describe(files["apr"])["weights"]


def test_the_table_has_every_tensor_in_the_order_of_the_file(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads(printed([str(files["gguf"]), "--json", "--tensors"], capsys))
    first = record["table"][0]
    assert first["name"] == "token_embd.weight" and first["shape"] == [300, 48]
    assert first["bytes"] == 300 * 48 * 2 and first["file"] == "teacher.gguf"
    text = printed([str(files["gguf"]), "--tensors"], capsys)
    assert sum("blk.1." in line for line in text.splitlines()) == 12
    assert "teacher.gguf: gguf, qwen2\n" in text
    assert "vocabulary: 300 rows, 273 tokens, bos None, eos none" in text


def test_a_model_without_a_decoder_here_is_described_with_the_reason(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = json.loads((kit.teacher / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "gpt_neox"}))
    (tmp_path / "model.safetensors").write_bytes((kit.teacher / "model.safetensors").read_bytes())
    text = printed([str(tmp_path)], capsys)
    assert "safetensors, gpt_neox (cannot be run here: see the warnings)" in text
    assert "those of a GPTNeoXForCausalLM, found" in text
    assert "26 tensors" in text and "no tokenizer" in text


def test_weights_that_do_not_fit_are_described_with_what_is_missing(
    kit: Kit, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((kit.teacher / "config.json").read_bytes())
    tensors = load_file(kit.teacher / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file({**tensors, "mine": torch.zeros(2)}, tmp_path / "model.safetensors")
    found = describe(tmp_path)
    assert not found["runs"]
    assert "missing model.norm.weight [48]" in found["warnings"][0]
    assert "unexpected mine [2]" in found["warnings"][0]


def test_a_file_without_a_configuration_is_a_table_of_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(0)}, tmp_path / "some.safetensors")
    found = describe(tmp_path / "some.safetensors")
    assert found["config"] is None and found["architecture"] is None and not found["runs"]
    assert (found["tensors"], found["weights"]) == (2, 12)
    assert found["vocabulary"]["rows"] is None and found["vocabulary"]["tokens"] is None


def test_a_tokenizer_that_cannot_be_read_is_a_warning(kit: Kit, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((kit.teacher / name).read_bytes())
    for text, words in (("{", "expected JSON"), ('{"model": []}', "TypeError")):
        (tmp_path / "tokenizer.json").write_text(text)
        found = describe(tmp_path)
        assert found["runs"] and found["vocabulary"]["tokens"] is None
        assert words in found["warnings"][0]


def test_what_is_no_weight_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"\x80\x02}q\x00.")
    for name in ("x.gguf", "none"):
        assert main(["inspect", str(tmp_path / name)]) == 65
        out, err = capsys.readouterr()
        assert out == "" and name in err


@pytest.mark.parametrize("format_", ["safetensors", "gguf", "apr"])
def test_headers_are_read_without_torch(format_: str, files: dict[str, Path]) -> None:
    code = (
        "import sys; from engine.cli.main import main\n"
        f"main(['inspect', {str(files[format_])!r}])\n"
        "print([m for m in ('torch', 'numpy', 'safetensors', 'tokenizers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
