"""A GGUF file that is written is the file that is read: metadata, tensors, bytes; and nothing is
overwritten or left behind."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.demo
from engine.errors import DiskFull, TokenizerError, WeightsError
from engine.formats.gguf import open_gguf
from engine.formats.gguf_write import write_gguf
from engine.quant.blocks import BLOCK_TYPES, row_bytes
from engine.quant.tensor import QuantTensor
from tests.support.kit import tiny_config

DEMO = Path(engine.demo.__file__).parent / "teacher" / "tokenizer.json"
CONFIG = tiny_config(head_dim=8, vocab_size=7)
EMBEDDING = ("token_embd.weight", torch.arange(14.0).view(7, 2))


def blocks(kind: str, rows: int, columns: int) -> QuantTensor:
    type_ = BLOCK_TYPES[kind]
    generator = torch.Generator().manual_seed(rows)
    raw = torch.randint(0, 256, (rows, row_bytes(type_, columns)), generator=generator)
    return QuantTensor(raw.to(torch.uint8), type_, (rows, columns))


def test_every_type_of_tensor_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    floats = {
        "f32": torch.randn(3, 5),
        "f16": torch.randn(7, 1).half(),
        "bf16": torch.randn(2, 3, 5).bfloat16(),
        "transposed": torch.randn(4, 3).t(),
        "one": torch.tensor([math.nan]),
    }
    quantized = {kind: blocks(kind, 3, 512) for kind, t in BLOCK_TYPES.items() if t.block_size > 1}
    every: dict[str, torch.Tensor | QuantTensor] = {**floats, **quantized}
    write_gguf(path, config=CONFIG, tensors=every.items())
    file = open_gguf(path)
    assert list(file.tensors) == list(every)
    for name, tensor in floats.items():
        found = file.get(name)
        assert isinstance(found, torch.Tensor)
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.contiguous().view(torch.uint8))
    for name, expected in quantized.items():
        got = file.get(name)
        assert isinstance(got, QuantTensor)
        assert (got.type, got.shape) == (expected.type, expected.shape)
        assert torch.equal(got.blocks, expected.blocks)
    assert path.read_bytes()[:8] == b"GGUF\3\0\0\0"
    assert path.stat().st_size % 32 == 0


def test_a_whole_model_says_the_same_after_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = tiny_config(head_dim=8, vocab_size=4100, eos_token_id=0)
    write_gguf(
        path,
        config=config,
        tensors=[("token_embd.weight", torch.zeros(4100, 32).half())],
        tokenizer_json=DEMO.read_bytes(),
        metadata={"general.name": "naïve", "tokenizer.chat_template": "{{ messages }}"},
    )
    file = open_gguf(path)
    found = file.config_dict()
    assert {key: found[key] for key in config} == config
    assert file.tokenizer_json() is not None
    assert file.warnings == ()
    assert file.metadata["general.architecture"] == "qwen2"
    assert file.metadata["general.file_type"] == 1
    assert file.metadata["general.quantization_version"] == 2
    assert file.metadata["general.name"] == "naïve"
    assert file.metadata["tokenizer.chat_template"] == "{{ messages }}"
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 4100


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.integers(0, 2**32 - 1) | TEXTS
KEYS = TEXTS.filter(bool).map("x.{}".format)


@settings(max_examples=60, deadline=None)
@given(
    metadata=st.dictionaries(KEYS, VALUES, max_size=6),
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=4),
)
def test_any_metadata_and_shapes_are_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any], shapes: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "m.gguf"
    tensors = {
        f"t{i}": torch.arange(math.prod(shape)).float().view(shape)
        for i, shape in enumerate(shapes)
    }
    write_gguf(path, config=CONFIG, tensors=tensors.items(), metadata=metadata)
    file = open_gguf(path)
    assert {key: file.metadata[key] for key in metadata} == metadata
    assert list(file.tensors) == list(tensors)
    for name, tensor in tensors.items():
        found = file.get(name)
        assert isinstance(found, torch.Tensor) and torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["F32"], 0),
        (["Q4_K", "Q4_K", "Q6_K", "F32"], 15),
        (["Q8_0", "F16"], 7),
        ([], 0),
    ],
)
def test_a_file_is_called_by_the_type_of_most_weights(
    kinds: list[str], expected: int, tmp_path: Path
) -> None:
    def tensor(kind: str) -> torch.Tensor | QuantTensor:
        if kind in ("F32", "F16"):
            return torch.zeros(2, 256, dtype=torch.float32 if kind == "F32" else torch.float16)
        return blocks(kind, 4, 256)

    path = tmp_path / "m.gguf"
    tensors = [(f"t{i}", tensor(kind)) for i, kind in enumerate(kinds)]
    write_gguf(path, config=CONFIG, tensors=tensors)
    assert open_gguf(path).metadata["general.file_type"] == expected
    other = tmp_path / "o.gguf"
    write_gguf(other, config=CONFIG, tensors=tensors, metadata={"general.file_type": 14})
    assert open_gguf(other).metadata["general.file_type"] == 14


def test_tensors_are_taken_one_at_a_time(tmp_path: Path) -> None:
    alive = 0
    most = 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive, most
        for number in range(5):
            alive += 1
            most = max(most, alive)
            yield f"t{number}", torch.zeros(4).as_subclass(Counted)

    write_gguf(tmp_path / "m.gguf", config=CONFIG, tensors=each())
    assert most <= 2  # the one in hand, and the last one until its name is given anew


def test_a_dtype_that_gguf_does_not_have_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    tensors = [("t", torch.zeros(2, dtype=torch.float64))]
    with pytest.raises(WeightsError, match=r"torch\.float64"):
        write_gguf(tmp_path / "m.gguf", config=CONFIG, tensors=tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_template_that_contradicts_the_configuration_is_refused(tmp_path: Path) -> None:
    import json

    record = json.loads(DEMO.read_bytes())
    text = "<|endoftext|>"
    record["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": text, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {text: {"id": text, "ids": [0], "tokens": [text]}},
    }
    config = tiny_config(head_dim=8, vocab_size=4096, bos_token_id=5)
    with pytest.raises((WeightsError, TokenizerError), match="bos_token_id"):
        write_gguf(
            tmp_path / "m.gguf",
            config=config,
            tensors=[],
            tokenizer_json=json.dumps(record).encode(),
        )


def test_an_existing_file_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("mine")
    with pytest.raises(WeightsError, match="nothing at that path"):
        write_gguf(path, config=CONFIG, tensors=[EMBEDDING])
    link = tmp_path / "l.gguf"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="nothing at that path"):
        write_gguf(link, config=CONFIG, tensors=[EMBEDDING])
    assert path.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["l.gguf", "m.gguf"]


def test_a_file_that_appears_while_writing_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield EMBEDDING
        path.write_text("mine")

    with pytest.raises(WeightsError, match="nothing at that path"):
        write_gguf(path, config=CONFIG, tensors=tensors())
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_of_the_tensors_leaves_nothing(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield EMBEDDING
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_gguf(tmp_path / "m.gguf", config=CONFIG, tensors=tensors())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_data: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("engine.formats.writing.TensorData.pieces", full)
    with pytest.raises(DiskFull, match="room for them"):
        write_gguf(tmp_path / "m.gguf", config=CONFIG, tensors=[EMBEDDING])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="a path that can be written"):
        write_gguf(tmp_path / "no" / "m.gguf", config=CONFIG, tensors=[EMBEDDING])
