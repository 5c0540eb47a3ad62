"""An open GGUF file: views without copies, blocks, parts of a split model."""

from __future__ import annotations

import gc
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import WeightsError
from engine.formats.gguf import open_gguf
from engine.formats.weights import WeightFile
from engine.quant.tensor import QuantTensor
from tests.support.gguf_files import (
    ARCH,
    BF16,
    F16,
    INT32,
    Q4_K,
    QWEN2,
    UINT16,
    build,
    model,
    pair,
    tensor,
)


def as_protocol(file: WeightFile) -> WeightFile:
    return file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(model())
    return path


def test_an_open_file_is_a_weight_file(path: Path) -> None:
    file = as_protocol(open_gguf(path))
    assert (file.path, file.format, file.convention) == (path, "gguf", "gguf")
    assert [(i.name, i.dtype, i.shape, i.bytes) for i in file.tensors.values()] == [
        ("token_embd.weight", "F16", (5, 64), 640),
        ("blk.0.attn_q.weight", "Q8_0", (2, 64), 136),
        ("output_norm.weight", "F32", (3,), 12),
    ]
    assert file.warnings == ()
    assert file.metadata["tokenizer.ggml.tokens"][2] == "ab"


def test_floats_come_as_stored_with_the_contiguous_dimension_last(path: Path) -> None:
    file = open_gguf(path)
    norm = file.get("output_norm.weight")
    assert isinstance(norm, torch.Tensor)
    assert torch.equal(norm, torch.tensor([1.0, 2.0, 3.0]))
    embedding = file.get("token_embd.weight")
    assert isinstance(embedding, torch.Tensor)
    assert (embedding.dtype, tuple(embedding.shape)) == (torch.float16, (5, 64))
    stored = file.tensors["token_embd.weight"]
    row = path.read_bytes()[stored.start + 128 : stored.start + 256]
    assert torch.equal(
        embedding[1].view(torch.int16),
        torch.tensor(struct.unpack("<64h", row), dtype=torch.int16),
    )


def test_blocks_stay_blocks(path: Path) -> None:
    file = open_gguf(path)
    found = file.get("blk.0.attn_q.weight")
    assert isinstance(found, QuantTensor)
    assert (found.type.name, found.shape, tuple(found.blocks.shape)) == ("Q8_0", (2, 64), (2, 68))
    stored = file.tensors["blk.0.attn_q.weight"]
    assert bytes(found.blocks.flatten().tolist()) == path.read_bytes()[stored.start :][:136]


def test_bfloat16_and_three_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    values = torch.arange(24, dtype=torch.float32).bfloat16()
    raw = bytes(values.view(torch.uint8).tolist())
    blocks = bytes(range(144)) * 6
    tensors = [tensor("b", [4, 3, 2], BF16), tensor("q", [512, 3, 1], Q4_K, 64)]
    path.write_bytes(build([ARCH], tensors, raw + bytes(16) + blocks))
    file = open_gguf(path)
    found = file.get("b")
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, values.view(2, 3, 4))
    quantized = file.get("q")
    assert isinstance(quantized, QuantTensor)
    assert (quantized.shape, tuple(quantized.blocks.shape)) == ((1, 3, 512), (1, 3, 288))


def test_a_write_to_a_tensor_never_reaches_the_file(path: Path) -> None:
    before = path.read_bytes()
    tensor_ = open_gguf(path).get("output_norm.weight")
    assert isinstance(tensor_, torch.Tensor)
    tensor_.fill_(7.0)
    assert path.read_bytes() == before
    again = open_gguf(path).get("output_norm.weight")
    assert isinstance(again, torch.Tensor)
    assert again[0] == 1.0


def test_a_tensor_outlives_its_file(path: Path) -> None:
    with open_gguf(path) as file:
        norm = file.get("output_norm.weight")
    del file
    gc.collect()
    assert isinstance(norm, torch.Tensor)
    assert norm.tolist() == [1.0, 2.0, 3.0]


def test_a_name_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(WeightsError, match=r'GG14 gguf: .*tensor "nope"'):
        open_gguf(path).get("nope")


def test_a_file_that_changed_size_is_refused(path: Path) -> None:
    file = open_gguf(path)
    path.write_bytes(model()[:-40])
    with pytest.raises(WeightsError, match=r"GG16"):
        file.get("output_norm.weight")


def test_opening_loads_no_torch(path: Path) -> None:
    code = (
        "import sys; from engine.formats.gguf import open_gguf; file = open_gguf(sys.argv[1]); "
        "file.config_dict(); file.tokenizer_json(); "
        "assert not {'torch', 'numpy', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def part(number: int, count: int, total: int, *names: str, first: bool | None = None) -> bytes:
    pairs = list(QWEN2) if (number == 0 if first is None else first) else []
    pairs += [
        pair("split.no", UINT16, struct.pack("<H", number)),
        pair("split.count", UINT16, struct.pack("<H", count)),
        pair("split.tensors.count", INT32, struct.pack("<i", total)),
    ]
    tensors = [tensor(name, [2], F16, 32 * i) for i, name in enumerate(names)]
    data = b"".join(struct.pack("<2e", number, i) + bytes(28) for i in range(len(names)))
    return build(pairs, tensors, data)


def split(folder: Path) -> list[Path]:
    paths = [folder / f"m-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    paths[0].write_bytes(part(0, 3, 3))
    paths[1].write_bytes(part(1, 3, 3, "a", "b"))
    paths[2].write_bytes(part(2, 3, 3, "c"))
    return paths


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_the_whole_model(opened: int, tmp_path: Path) -> None:
    file = open_gguf(split(tmp_path)[opened])
    assert list(file.tensors) == ["a", "b", "c"]
    values = {name: file.get(name) for name in file.tensors}
    assert {n: t.tolist() for n, t in values.items() if isinstance(t, torch.Tensor)} == {
        "a": [1, 0],
        "b": [1, 1],
        "c": [2, 0],
    }
    assert file.metadata["qwen2.block_count"] == 2
    assert file.tensors["c"].file.name == "m-00003-of-00003.gguf"


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(WeightsError, match=r"^GG19 gguf: .* 1 missing: m-00002-of-00003\.gguf"):
        open_gguf(paths[2])


def test_a_part_under_the_name_of_another_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(WeightsError, match=r"^GG19 gguf: .*m-00003-of.*split.no 2.*found 1 and 3"):
        open_gguf(paths[0])


def test_a_part_that_lost_its_name_is_refused(tmp_path: Path) -> None:
    path = split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(WeightsError, match=r"^GG19 gguf: .*-00001-of-00003.gguf"):
        open_gguf(path)


def test_a_damaged_part_is_refused_with_its_own_name(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:100])
    with pytest.raises(WeightsError, match=r"^GG\d\d gguf: .*m-00002-of-00003"):
        open_gguf(paths[0])
