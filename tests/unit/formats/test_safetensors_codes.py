"""Each case of a broken safetensors file trips exactly its code; what is only odd is a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import WeightsError
from engine.formats.open import open_weights
from engine.formats.safetensors import read_header


def build(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def pair(a: list[int], b: list[int]) -> dict[str, Any]:
    shapes = {"dtype": "U8", "shape": [4]}
    return {"a": shapes | {"data_offsets": a}, "b": shapes | {"data_offsets": b}}


CASES: list[tuple[str, bytes]] = [
    ("ST02", b""),
    ("ST02", b"\0" * 7),
    ("ST02", b"version https://git-lfs.github.com/spec/v1\nsize 12\n"),
    ("ST02", b"<!DOCTYPE html>"),
    ("ST02", b"GGUF\x03\0\0\0"),
    ("ST02", b"APR\0\x02\0\0\0"),
    ("ST02", b"PK\x03\x04\x14\0\0\0"),
    ("ST02", b"\x80\x02}q\x00."),
    ("ST02", b'{"weight_map": {}}'),
    ("ST08", (10**6).to_bytes(8, "little") + b"{}"),
    ("ST02", (10**8 + 1).to_bytes(8, "little") + b"{}"),
    ("ST05", build(b'{"a": }')),
    ("ST05", build(b'{"\xff": 1}')),
    ("ST02", build(b"[1]")),
    ("ST10", build(b'{"a": NaN}')),
    ("ST05", build(b'{"a":' + b"[" * 50_000)),
    ("ST10", build(b'{"a": 1, "a": 2}')),
    ("ST08", build({"a": tensor()}, bytes(4))),
    ("ST10", build({"a": tensor()}, bytes(12))),
    ("ST10", build(pair([0, 4], [2, 6]), bytes(6))),
    ("ST10", build(pair([0, 4], [8, 12]), bytes(12))),
    ("ST10", build(pair([4, 0], [4, 8]), bytes(8))),
    ("ST10", build({"a": tensor(data_offsets=[0, 4])}, bytes(4))),
    ("ST10", build({"a": tensor(shape=[-2])}, bytes(8))),
    ("ST10", build({"a": tensor(shape=[2**62, 2**62])}, bytes(8))),
    ("ST10", build({"a": tensor(dtype="Q4_K")}, bytes(8))),
    ("ST10", build({"a": tensor(dtype="F99")}, bytes(8))),
]


@pytest.mark.parametrize(("code", "raw"), CASES)
def test_a_broken_file_is_refused_by_its_code(tmp_path: Path, code: str, raw: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    text = str(caught.value)
    assert text.startswith(f"{code} ") and str(path) in text


INDEX = "model.safetensors.index.json"
SHARD_CASES: list[tuple[str, object]] = [
    ("ST13", {"a": "gone.safetensors"}),
    ("ST13", {"a": "one.safetensors", "b": "one.safetensors"}),
    ("ST13", {"a": "one.safetensors", "c": "two.safetensors"}),
    ("ST13", {"b": "two.safetensors", "a": "two.safetensors"}),
    ("ST13", [1]),
    ("ST13", {"a": "../one.safetensors"}),
    ("ST13", {"a": "/one.safetensors"}),
    ("ST13", {"a": "x\\..\\one.safetensors"}),
    ("ST13", {"a": "one\n.safetensors"}),
]


@pytest.mark.parametrize(("code", "weight_map"), SHARD_CASES)
def test_shards_that_do_not_fit_their_index_are_refused_by_their_code(
    tmp_path: Path, code: str, weight_map: object
) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError) as caught:
        open_weights(tmp_path)
    assert str(caught.value).startswith(f"{code} weights")
    str(caught.value).encode()


@pytest.mark.parametrize("length", [0x010280, 0x020480, 0x7B, 0x7B7B, 0x0A0A, 0x4B50])
def test_a_header_length_that_spells_another_format_is_still_a_length(
    tmp_path: Path, length: int
) -> None:
    """0x010280 begins as a pickle does, 0x7b as JSON, 0x4b50 as half of a zip archive."""
    path = tmp_path / "m.safetensors"
    header = json.dumps({"a": tensor()}).encode().ljust(length)
    path.write_bytes(build(header, bytes(8)))
    assert set(read_header(path).tensors) == {"a"}
