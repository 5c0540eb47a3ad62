"""Files written as .apr: the layout that the format asks for, and all of it read back."""

from __future__ import annotations

import errno
import json
import os
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import DiskFull, WeightsError
from engine.formats.apr import TRAINING_PREFIX, AprFile
from engine.formats.apr_write import write_apr
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.tensor import QuantTensor
from tests.support.apr_bytes import take_apart
from tests.support.kit import tiny_config
from tests.support.paths import DEMO

CONFIG = tiny_config(
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, eos_token_id=[2, 3]
)
TOKENIZER = DEMO / "teacher" / "tokenizer.json"


def quantized(kind: str, *shape: int) -> QuantTensor:
    block = BLOCK_TYPES[kind]
    bytes_ = (*shape[:-1], shape[-1] // block.block_size * block.block_bytes)
    return QuantTensor(torch.randint(0, 256, bytes_, dtype=torch.uint8), block, shape)


TENSORS: list[tuple[str, torch.Tensor | QuantTensor]] = [
    ("model.norm.weight", torch.arange(6.0)),
    ("z", torch.arange(6.0).reshape(2, 3).bfloat16()),
    ("half", torch.tensor([[1.5, -2.0]], dtype=torch.float16)),
    ("double", torch.tensor(2.5, dtype=torch.float64)),
    ("q4", quantized("Q4_K", 3, 512)),
    ("q6", quantized("Q6_K", 2, 2, 256)),
    ("none", torch.empty(0, 4)),
    ("i", torch.tensor([-1, 2**40])),
    ("ids", torch.tensor([7], dtype=torch.int32)),
    ("bytes", torch.tensor([1, 255], dtype=torch.uint8)),
    ("signed", torch.tensor([-128, 127], dtype=torch.int8)),
    ("größe", torch.ones(17)),
]


def written(path: Path, tensors: Any = TENSORS, **changes: Any) -> AprFile:
    settled = {"config": CONFIG, "tokenizer_json": None, "metadata": {}} | changes
    write_apr(path, tensors=tensors, **settled)
    return AprFile(path)


def same(found: torch.Tensor | QuantTensor, expected: torch.Tensor | QuantTensor) -> bool:
    if isinstance(found, QuantTensor) and isinstance(expected, QuantTensor):
        kinds = found.type == expected.type and found.shape == expected.shape
        return kinds and torch.equal(found.blocks, expected.blocks)
    assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    return found.dtype == expected.dtype and torch.equal(found, expected)


def test_everything_reads_back_as_it_was(tmp_path: Path) -> None:
    raw = TOKENIZER.read_bytes()
    with written(tmp_path / "m.apr", iter(TENSORS), tokenizer_json=raw) as weights:
        assert set(weights.tensors) == {name for name, _ in TENSORS}
        for name, tensor in TENSORS:
            assert same(weights.get(name), tensor), name
        assert weights.config_dict() == CONFIG
        assert weights.tokenizer_json() == raw
        assert [line for line in weights.warnings if "no values" not in line] == []


def test_the_bytes_are_the_layout_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    written(path, metadata={"license": "apache-2.0", "name": "tiny"})
    raw = path.read_bytes()
    assert raw[:6] == b"APR\0\2\0" and raw[44:64] == bytes(20)
    flags, count, metadata_at, metadata_size, index_at, data_at, crc = struct.unpack(
        "<HIQIQQI", raw[6:44]
    )
    assert flags == 0x400 | 0x020
    assert (count, metadata_at) == (len(TENSORS), 64)
    assert crc == zlib.crc32(raw[:40] + raw[44:64])
    assert zlib.crc32(raw[:-4]) == struct.unpack("<I", raw[-4:])[0]
    assert index_at == 64 + -(-metadata_size // 64) * 64
    assert data_at % 64 == 0 and (len(raw) - 4) % 64 == 0
    found = take_apart(raw)
    assert list(found) == sorted(found, key=str.encode)
    codes = {"z": 30, "half": 1, "double": 3, "q4": 12, "q6": 14, "i": 5, "ids": 4, "none": 0}
    assert {name: found[name][0] for name in codes} == codes
    for name, tensor in TENSORS:
        _, shape, data = found[name]
        assert shape == tuple(tensor.shape)
        flat = tensor.blocks if isinstance(tensor, QuantTensor) else tensor
        assert data == flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    metadata = json.loads(raw[64 : 64 + metadata_size])
    assert metadata["total_size"] == sum(len(data) for _, _, data in found.values())
    assert metadata["param_count"] == 1536 + 1024 + 6 + 6 + 2 + 1 + 2 + 1 + 2 + 2 + 17
    assert metadata["license"] == "apache-2.0" and metadata["name"] == "tiny"
    assert metadata["data_source"] is metadata["data_license"] is None
    assert metadata["rope_type"] == 2
    assert metadata["quantization"] == {
        "quant_type": "q4_k",
        "bits": 4,
        "block_size": 256,
        "symmetric": False,
    }
    # Aliases beside canonical keys make other readers drop all metadata.
    assert not {"num_hidden_layers", "num_attention_heads", "n_ctx"} & set(metadata)
    assert metadata["num_layers"] == CONFIG["num_hidden_layers"]


def test_a_tokenizer_sets_its_flag_and_the_tables_that_other_readers_know(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    metadata = written(path, tokenizer_json=TOKENIZER.read_bytes()).metadata
    assert struct.unpack("<H", path.read_bytes()[6:8])[0] & 0x200
    record = json.loads(TOKENIZER.read_bytes())
    vocab = record["model"]["vocab"]
    assert all(metadata["tokenizer.vocabulary"][i] == text for text, i in vocab.items())
    assert len(metadata["tokenizer.merges"]) == len(record["model"]["merges"])
    assert metadata["tokenizer.eos_token_id"] == 2
    assert metadata["tokenizer.pre_type"] == "qwen2"
    special = {token["id"] for token in record["added_tokens"] if token["special"]}
    kinds = metadata["tokenizer.token_type"]
    assert {i for i, kind in enumerate(kinds) if kind == 3} == special


def test_a_file_survives_being_read_and_written_again(tmp_path: Path) -> None:
    first = written(
        tmp_path / "a.apr",
        tokenizer_json=TOKENIZER.read_bytes(),
        metadata={"experiment": 7, "rope_type": 0},
    )
    second = written(
        tmp_path / "b.apr",
        [(name, first.get(name)) for name, _ in TENSORS],
        config=first.config_dict(),
        tokenizer_json=first.tokenizer_json(),
        metadata=first.metadata,
    )
    assert second.metadata == first.metadata
    assert second.metadata["rope_type"] == 0 and second.metadata["experiment"] == 7
    assert (tmp_path / "a.apr").read_bytes() == (tmp_path / "b.apr").read_bytes()


def test_what_the_file_computes_is_not_taken_from_the_caller(tmp_path: Path) -> None:
    stale = {"param_count": 1, "hidden_size": 9, "n_embd": 9, "quantization": {}, "hf_config": {}}
    weights = written(tmp_path / "m.apr", [("w", torch.ones(3))], metadata=stale)
    assert weights.metadata["param_count"] == 3 and weights.metadata["hidden_size"] == 32
    assert "quantization" not in weights.metadata
    assert weights.config_dict() == CONFIG


def test_strided_tensors_and_blocks_are_written_as_what_they_show(tmp_path: Path) -> None:
    table, blocks = torch.randn(5, 3), quantized("Q4_K", 4, 256)
    part = QuantTensor(blocks.blocks[::2], blocks.type, (2, 256))
    weights = written(tmp_path / "m.apr", [("t", table.T), ("q", part)])
    assert same(weights.get("t"), table.T.contiguous())
    assert same(weights.get("q"), part)


def test_host_memory_peaks_at_one_tensor(tmp_path: Path) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(12):
            yield f"w{number:02}", torch.from_numpy(bytes_of(number)).view(torch.float32)

    def bytes_of(number: int) -> Any:
        import numpy

        return numpy.full(1_000_000, number, dtype=numpy.uint8)

    tracemalloc.start()
    weights = written(tmp_path / "m.apr", stream())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(weights.tensors) == 12
    # One tensor that is yielded, one still held by the loop, and the 4 MiB that are copied at once.
    assert peak_bytes < 2_000_000 + 2 * 2**22 + 500_000


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("w", torch.zeros(2, dtype=torch.bool), "expected one of F32, F16, BF16, F64"),
        ("w", torch.zeros(2, dtype=torch.complex64), "found complex64"),
        ("w", quantized("Q8_0", 2, 32), "found Q8_0\nhint: a .gguf file has it"),
        ("w", quantized("Q8_0", 1, 256), "expected blocks of Q4_K, Q6_K"),
    ],
)
def test_a_tensor_that_the_format_cannot_hold_is_refused_and_nothing_is_left(
    tmp_path: Path, name: str, tensor: torch.Tensor, words: str
) -> None:
    with pytest.raises(WeightsError) as caught:
        written(tmp_path / "m.apr", [("first", torch.ones(3)), (name, tensor)])
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metadata", [{"x": float("nan")}, {"x": "\ud800"}, {"x": object()}])
def test_metadata_that_json_cannot_hold_is_refused(
    tmp_path: Path, metadata: dict[str, object]
) -> None:
    with pytest.raises(WeightsError, match=r"apr metadata: to write — expected JSON"):
        written(tmp_path / "m.apr", metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_more_metadata_than_the_format_allows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"expected at most 16,777,216 bytes, found 16,77"):
        written(tmp_path / "m.apr", metadata={"x": "y" * 2**24})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    path.write_bytes(b"keep me")
    with pytest.raises(WeightsError, match=r"expected nothing at that path, found something"):
        written(path)
    assert path.read_bytes() == b"keep me"

    def appearing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(2)
        (tmp_path / "late.apr").write_bytes(b"keep me too")

    with pytest.raises(WeightsError, match=r"expected nothing at that path"):
        written(tmp_path / "late.apr", appearing())
    assert (tmp_path / "late.apr").read_bytes() == b"keep me too"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_is_not_there_or_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("no", "file"):
        with pytest.raises(WeightsError, match=r"expected a path that can be written, found N"):
            written(tmp_path / folder / "m.apr")


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match=r"expected room for them, found No space left on device"):
        written(tmp_path / "m.apr")
    assert list(tmp_path.iterdir()) == []


def test_an_iterable_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(2)
        raise WeightsError("the source broke")

    with pytest.raises(WeightsError, match=r"the source broke"):
        written(tmp_path / "m.apr", failing())
    assert list(tmp_path.iterdir()) == []


DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "int8", "uint8"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tensors=st.dictionaries(
        # A reader leaves optimizer state out.
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
            lambda name: not name.startswith(TRAINING_PREFIX)
        ),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4)),
        max_size=5,
    )
)
def test_any_set_of_tensors_survives(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "m.apr"
    made = {
        name: torch.randint(0, 100, shape).to(getattr(torch, dtype))
        for name, (dtype, shape) in tensors.items()
    }
    weights = written(path, made.items())
    assert weights.tensors.keys() == made.keys()
    assert all(same(weights.get(name), tensor) for name, tensor in made.items())
