"""GGUF files of other makers: types by name, other versions, faults that only a tokenizer shows."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.errors import WeightsError
from engine.formats.gguf import open_gguf
from tests.support.gguf_files import QWEN2, build, tensor, vocabulary


def refusal(path: Path) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        open_gguf(path)
    return caught.value


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (41, "type 41 (Q1_0, 128 weights in 18 bytes)"),
        (42, "type 42 (Q2_0, 64 weights in a block)"),
        (9, "type 9 (Q8_1)"),
        (15, "type 15 (Q8_K)"),
        (24, "type 24 (I8)"),
        (28, "type 28 (F64)"),
        (4, "type 4 (Q4_2, of 2023)"),
        (36, "type 36 (IQ4_NL_4_4"),
        (43, "type 43"),
        (1000, "type 1,000"),
    ],
)
def test_a_type_that_cannot_be_read_is_named_with_what_to_do(
    number: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build([], [tensor("t", [256], number)], bytes(1024)))
    error = refusal(path)
    assert said in error.message and "GG10" in error.message
    assert error.hint is not None and "llama-quantize" in error.hint


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (struct.pack("<I", 1), "version 1"),
        (struct.pack("<I", 4), "version 4"),
        (struct.pack("<I", 0), "version 0"),
        (struct.pack(">I", 1), "another byte order"),
        (struct.pack(">I", 3), "another byte order"),
        (b"\xff\xff\xff\xff", "version 4294967295"),
    ],
)
def test_another_version_or_byte_order_is_refused_with_what_to_do(
    start: bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + start + bytes(16))
    error = refusal(path)
    assert "GG03" in error.message and said in error.message
    assert error.hint is not None and "current llama.cpp" in error.hint


VOCABULARY = ["a", "b", "c", "ab", "abc", "<|end|>"]
KINDS = [1, 1, 1, 1, 1, 3]
MERGES = ["a b", "ab c"]


@pytest.mark.parametrize(
    ("tokens", "kinds", "merges"),
    [
        (["a", "a", "c", "ab", "abc", "<|end|>"], KINDS, MERGES),
        (["a", "b", "c", "ab", "ab", "<|end|>"], KINDS, ["a b"]),
        (["a", "b", "c", "ab", "abc", "abc"], KINDS, MERGES),
        (["a", "b", "c", "ab", "", "<|end|>"], KINDS, ["a b"]),
        (VOCABULARY, KINDS, ["ab"]),
        (VOCABULARY, KINDS, ["a b", "abc"]),
        (VOCABULARY, KINDS, [""]),
        (VOCABULARY, KINDS, ["a b", "b c"]),
        (VOCABULARY, KINDS, ["a x"]),
        (VOCABULARY, KINDS, ["a  b"]),
    ],
)
def test_inspect_refuses_what_no_tokenizer_can_be_made_of(
    tokens: list[str],
    kinds: list[int],
    merges: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "m.gguf"
    pairs = [*QWEN2, *vocabulary(tokens, kinds, merges)]
    path.write_bytes(build(pairs, [tensor("token_embd.weight", [64, 6], 1)], bytes(768)))
    assert main(["inspect", str(path)]) == 65
    assert "GG08 gguf: " in capsys.readouterr().err


def test_inspect_describes_a_file_with_a_sound_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    pairs = [*QWEN2, *vocabulary(VOCABULARY, KINDS, MERGES)]
    path.write_bytes(build(pairs, [tensor("token_embd.weight", [64, 6], 1)], bytes(768)))
    assert main(["inspect", str(path)]) == 0
    assert "6 tokens" in capsys.readouterr().out
