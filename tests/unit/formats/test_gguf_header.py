"""Every way in which the header of a GGUF file can be wrong, built by hand, and what is said of
it: a code, and the byte or the tensor."""

from __future__ import annotations

import contextlib
import itertools
import struct
import tracemalloc
from pathlib import Path

import pytest

from engine.errors import WeightsError
from engine.formats.gguf import open_gguf, parse_header
from tests.support.bad_gguf import BAD, ONE
from tests.support.gguf_files import (
    ARCH,
    F32,
    Q8_0,
    STRING,
    UINT32,
    array,
    build,
    model,
    pair,
    tensor,
    text,
    u32,
)


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught, open_gguf(path) as file:
        file.config_dict()
        file.tokenizer_json()
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_its_code_and_place(case: str, tmp_path: Path) -> None:
    code, said, content = BAD[case]
    message = refusal(tmp_path / "m.gguf", content)
    assert message.startswith(f"{code} gguf: "), message
    assert said in message, message
    assert "@" in message or '"' in message, message


def test_every_code_of_the_table_is_tried() -> None:
    assert {code for code, _, _ in BAD.values()} == {f"GG{n:02}" for n in range(1, 19) if n != 4}


def test_a_file_cut_short_anywhere_is_refused_unless_only_padding_is_gone() -> None:
    content = model()
    padding = 20
    for cut in range(len(content) - padding):
        with pytest.raises(WeightsError, match=r"^GG\d\d gguf: m.gguf"):
            parse_header(content[:cut], Path("m.gguf"))
    for cut in range(len(content) - padding, len(content)):
        assert len(parse_header(content[:cut], Path("m.gguf")).tensors) == 3


NEAR = sorted(
    number
    for number in {0, 1, 31, 32, 96, 128}
    | {2**p + d for p in (31, 32, 61, 62, 63, 64) for d in (-64, -32, -1, 0, 1, 32)}
    if number < 2**64
)


@pytest.mark.parametrize("kind", [F32, Q8_0])
def test_sizes_and_offsets_near_powers_of_two_are_judged_as_exact_arithmetic_does(
    kind: int,
) -> None:
    block, size = (1, 4) if kind == F32 else (32, 34)
    for ne, rows, offset in itertools.product(NEAR, (1, 2, 2**31, 2**63), NEAR):
        content = build([], [tensor("t", [ne, rows], kind, offset)], bytes(256))
        fits = (
            ne > 0
            and ne % block == 0
            and offset % 32 == 0
            and offset + ne // block * size * rows <= 256
        )
        if fits:
            header = parse_header(content, Path("m"))
            assert header.tensors["t"].start == header.data_start + offset
            continue
        with pytest.raises(WeightsError, match=r"^GG1[356] gguf: m"):
            parse_header(content, Path("m"))


def test_a_file_of_no_tensors_needs_no_data() -> None:
    header = parse_header(build([ARCH]), Path("m"))
    assert dict(header.metadata) == {"general.architecture": "qwen2"}
    assert header.tensors == {}


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read_alike(version: int) -> None:
    header = parse_header(build([ARCH], ONE, bytes(16), version=version), Path("m"))
    assert header.tensors["t"].shape == (4,)


def test_alignment_moves_the_data() -> None:
    pairs = [pair("general.alignment", UINT32, u32(256))]
    header = parse_header(build(pairs, ONE, bytes(16), alignment=256), Path("m"))
    assert header.data_start == 256


def test_a_text_in_an_array_that_is_not_utf8_is_refused_when_it_is_read() -> None:
    header = parse_header(build([array("k", STRING, [text("a"), text(b"\xff")])]), Path("m"))
    with pytest.raises(WeightsError, match=r'GG08 gguf: m @\d+ — expected UTF-8 in "k"\[1\]'):
        header.metadata["k"]


def test_every_value_type_is_read() -> None:
    values = {
        "u8": (0, "B", 200),
        "i8": (1, "b", -100),
        "u16": (2, "H", 60_000),
        "i16": (3, "h", -30_000),
        "u32": (4, "I", 2**32 - 1),
        "i32": (5, "i", -(2**31)),
        "f32": (6, "f", 0.5),
        "bool": (7, "?", True),
        "u64": (10, "Q", 2**64 - 1),
        "i64": (11, "q", -(2**63)),
        "f64": (12, "d", 0.1),
    }
    pairs = [pair(key, kind, struct.pack(f"<{code}", v)) for key, (kind, code, v) in values.items()]
    pairs += [
        array(f"{key}s", kind, [struct.pack(f"<{code}", v)] * 3)
        for key, (kind, code, v) in values.items()
    ]
    pairs += [pair("text", STRING, text("naïve")), array("texts", STRING, [text(""), text("é")])]
    found = dict(parse_header(build(pairs), Path("m")).metadata)
    expected: dict[str, object] = {key: v for key, (_, _, v) in values.items()}
    expected |= {f"{key}s": [v] * 3 for key, (_, _, v) in values.items()}
    assert found == expected | {"text": "naïve", "texts": ["", "é"]}
    assert [type(found[key]) for key in ("bool", "u8", "f32")] == [bool, int, float]


@pytest.mark.parametrize(
    "case", [case for case in BAD if BAD[case][0] in ("GG05", "GG06", "GG07", "GG08", "GG16")]
)
def test_nothing_is_allocated_from_an_unchecked_length(case: str) -> None:
    content = BAD[case][2]
    tracemalloc.start()
    try:
        # "scores" and "tokens" are refused one layer up.
        with contextlib.suppress(WeightsError):
            parse_header(content, Path("m"))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 256 * 1024


def test_a_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="a folder"):
        open_gguf(tmp_path)
    with pytest.raises(WeightsError, match="nothing"):
        open_gguf(tmp_path / "none.gguf")
