"""Every way in which a safetensors header can be wrong, built by hand, and what is said of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from engine.errors import WeightsError
from engine.formats.safetensors import read_header


def entry(dtype: object, shape: object, begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def build(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [], 24, 26)}


def refusal(path: Path, content: bytes | None) -> str:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_good_header_says_where_each_tensor_is(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    raw = build({"__metadata__": {"format": "pt"}, **GOOD}, bytes(26))
    path.write_bytes(raw)
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == len(raw)
    a, b = header.tensors["a"], header.tensors["b"]
    assert (a.name, a.dtype, a.shape, a.file, a.bytes) == ("a", "F32", (2, 3), path, 24)
    assert (b.dtype, b.shape, b.start, b.bytes) == ("BF16", (), len(raw) - 2, 2)


def test_a_padded_header_and_an_empty_tensor_are_good(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(build(json.dumps({"a": entry("F32", [0, 4], 0, 0)}).encode() + b"   "))
    assert read_header(path).tensors["a"].bytes == 0


LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:fdf756fa7fcbe7404d5c60e26bff1a0c8b8aa1f72ced49e7dd0210fe288fb7fe\n"
    b"size 988097824\n"
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "found an empty file"),
        (b"\x08\0\0\0\0\0\0", "found a file that begins with"),
        (LFS, "found a Git-LFS pointer to a 988,097,824-byte object\nhint: run `git lfs pull`"),
        (b"<!DOCTYPE html><html>404", "found an HTML page"),
        (b"\n  <html lang=en>", "found an HTML page"),
        (b"GGUF\x03\0\0\0", "found a GGUF file"),
        (b"APR\0\x02\0", "found an .apr file"),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0}", "found a pickle file"),
        (b"PK\x03\x04\x14\0\x08\x08", "found a zip archive, as torch.save writes"),
        (
            (10**6).to_bytes(8, "little") + b"{}",
            "header of 1,000,000 bytes, found a truncated file",
        ),
        ((2 * 10**8).to_bytes(8, "little") + b"{}", "found a file that begins with"),
        (b"plain text, no header", "found a file that begins with b'plain te'"),
        (build(b'{"a": }'), "expected JSON, found Expecting value"),
        (build(b'{"\xff": 1}'), "expected JSON"),
        (build(b'{"a":' + b"[" * 50_000), "expected JSON nested"),
        (build(b'{"a": ' + b"9" * 5000 + b"}"), "expected JSON"),
        (build({"a": 3}), 'tensor "a"'),
        (build({"a": entry("Q4_K", [2], 0, 2)}, bytes(2)), "found {'dtype': 'Q4_K'"),
        (build({"a": entry(["F32"], [2], 0, 2)}, bytes(2)), "expected a dtype of F64, F32"),
        (build({"a": entry("U8", [-1], 0, 1)}, bytes(1)), "'shape': [-1]"),
        (build({"a": entry("U8", [True], 0, 1)}, bytes(1)), "'shape': [True]"),
        (build({"a": entry("U8", [2**62, 2**62], 0, 1)}, bytes(1)), "'data_offsets': [0, 1]"),
        (build({"a": entry("U8", [4], 4, 0)}, bytes(4)), "'data_offsets': [4, 0]"),
        (build({"a": entry("F32", [3], 0, 8)}, bytes(8)), "data_offsets as far apart as its shape"),
        (build(GOOD, bytes(20)), "6 bytes are missing\nhint: the file may be cut short"),
        (build(GOOD, bytes(30)), "found 4 bytes of no tensor at its end"),
        (
            build({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, bytes(6)),
            'tensor "b" — expected its data at byte',
        ),
        (
            build({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 6, 10)}, bytes(10)),
            'tensor "b" — expected its data at byte',
        ),
    ],
)
def test_a_broken_file_is_refused_by_what_it_is(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refusal(tmp_path / "m.safetensors", content)


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    assert "expected a file, found nothing" in refusal(tmp_path / "absent", None)
    assert "expected a regular file, found a folder" in refusal(tmp_path, None)
    os.mkfifo(tmp_path / "pipe")
    assert "a regular file, found a FIFO" in refusal(tmp_path / "pipe", None)
    (tmp_path / "link").symlink_to("blobs/abc")
    assert "a link to blobs/abc, which is not there" in refusal(tmp_path / "link", None)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_mutated_files_are_refused_or_good_for_the_library_too(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """One bad byte never escapes as another kind of error, and never passes here alone."""
    raw = bytearray(build({"__metadata__": {"format": "pt"}, **GOOD}, bytes(26)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    content = bytes(raw[: data.draw(st.integers(0, len(raw)))]) if data.draw(st.booleans()) else raw
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except WeightsError:
        return
    try:
        theirs = dict(deserialize(bytes(content)))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        pytest.fail(f"accepted what the library refuses: {error}: {bytes(content)!r}")
    assert {n: tuple(t["shape"]) for n, t in theirs.items()} == {
        n: t.shape for n, t in header.tensors.items()
    }
