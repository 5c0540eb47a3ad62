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
from engine.formats.gguf import open_gguf
from engine.formats.gguf_header import parse_header, read_gguf_header
from tests.support.gguf_files import (
    ARCH,
    ARRAY,
    BOOL,
    F32,
    FLOAT32,
    INT32,
    Q4_K,
    Q8_0,
    STRING,
    TOKENS,
    UINT8,
    UINT32,
    array,
    build,
    model,
    pair,
    tensor,
    text,
    u32,
    u64,
    vocabulary,
)

ONE = [tensor("t", [4])]


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught, open_gguf(path) as file:
        file.config_dict()
        file.tokenizer_json()
    assert str(path) in str(caught.value)
    return str(caught.value)


# code, what else the message says, the file
BAD = {
    "empty": ("GG01", "empty", b""),
    "part of the magic": ("GG01", "b'GGU'", b"GGU"),
    "html": ("GG01", "HTML page", b"<!doctype html><html>" + bytes(40)),
    "git-lfs": ("GG01", "1,234-byte", b"version https://git-lfs.github.com/spec/v1\nsize 1234\n"),
    "other magic": ("GG01", "b'GGUX", b"GGUX" + bytes(40)),
    "magic only": ("GG02", "4 of 24 bytes", b"GGUF"),
    "half a header": ("GG02", "@20", build()[:20]),
    "version 0": ("GG03", "version 0", build(version=0)),
    "version 1": ("GG03", "version 1", build(version=1)),
    "version 999": ("GG03", "@4", build(version=999)),
    "big-endian": ("GG04", "@4", b"GGUF" + struct.pack(">I", 3) + bytes(16)),
    "2^62 pairs": ("GG05", "@16", build([ARCH], n_pairs=2**62)),
    "-1 tensors": ("GG05", "@8", build([ARCH], n_tensors=2**64 - 1)),
    "one pair too many for the file": ("GG05", "at most 0 key/value", build(n_pairs=1)),
    "more tensors than the limit": (
        "GG05",
        "65,536",
        build(n_tensors=65_537) + bytes(65_537 * 33),
    ),
    "more pairs than the limit": ("GG05", "65,536", build(n_pairs=65_537) + bytes(65_537 * 14)),
    "key of 2^62 bytes": ("GG06", "@24", build([u64(2**62) + bytes(20)])),
    "key longer than the file": ("GG06", "@32", build([u64(60) + bytes(20)])),
    "empty key": ("GG06", "@24", build([pair("", UINT8, b"\1"), ARCH])),
    "key not UTF-8": ("GG06", "0xff", build([pair(b"a\xff", UINT8, b"\1")])),
    "key twice": ("GG06", "also at byte 24", build([ARCH, ARCH])),
    "text of 1 TiB": ("GG07", "general.name", build([pair("general.name", STRING, u64(2**40))])),
    "text of 2^64-1": ("GG07", '"k"', build([pair("k", STRING, u64(2**64 - 1) + b"x")])),
    "text not UTF-8": ("GG07", "0xfe", build([pair("k", STRING, text(b"ab\xfe"))])),
    "number cut short": ("GG07", '"key"', build([pair("key", UINT32, b"\1")])),
    "array of 2^61": ("GG08", '"k"', build([array("k", UINT32, [], count=2**61)])),
    "array of 2^64-1 bytes": ("GG08", '"k"', build([array("k", UINT8, [b"x"], count=2**64 - 1)])),
    "array of 2^61 texts": ("GG08", '"k"', build([array("k", STRING, [], count=2**61)])),
    "text in an array too long": (
        "GG08",
        '"k"[1]',
        build([array("k", STRING, [text("a"), u64(2**63)])]),
    ),
    "text in an array cut short": (
        "GG08",
        '"k"[1]',
        build([array("k", STRING, [text("abcdefgh"), b"\0"], count=2)]),
    ),
    "scores of UINT8": (
        "GG08",
        "tokenizer.ggml.scores as an array of FLOAT32, found an array of UINT8",
        build([array("tokenizer.ggml.scores", UINT8, [b"\0"])]),
    ),
    "tokens as a number": (
        "GG08",
        "tokenizer.ggml.tokens as an array of STRING, found UINT8",
        build([pair("tokenizer.ggml.tokens", UINT8, b"\0")]),
    ),
    "scores for fewer tokens": (
        "GG08",
        "for 2 tokens",
        build(
            [
                array("tokenizer.ggml.tokens", STRING, [text("a"), text("b")]),
                array("tokenizer.ggml.scores", FLOAT32, [bytes(4)]),
            ]
        ),
    ),
    "array of arrays": ("GG09", '"k"', build([array("k", ARRAY, [u32(UINT8) + u64(0)])])),
    "value type 99": ("GG10", "@33", build([pair("k", 99, bytes(8))])),
    "element type 13": ("GG10", "type 13", build([array("k", 13, [bytes(8)])])),
    "a bool of 2": ("GG10", "found 2", build([pair("k", BOOL, b"\2")])),
    "a bool of 7 in an array": ("GG10", "found 7", build([array("k", BOOL, [b"\0", b"\7"])])),
    "tensor type 99": ("GG10", '"t"', build([], [tensor("t", [4], 99)], bytes(16))),
    "tensor type Q2_K": ("GG10", "10 (Q2_K)", build([], [tensor("t", [256], 10)], bytes(84))),
    "alignment of 0": ("GG11", "found 0", build([pair("general.alignment", UINT32, u32(0))])),
    "alignment of 48": ("GG11", "found 48", build([pair("general.alignment", UINT32, u32(48))])),
    "alignment of 4": ("GG11", "found 4", build([pair("general.alignment", UINT32, u32(4))])),
    "alignment as INT32": ("GG11", "INT32", build([pair("general.alignment", INT32, u32(32))])),
    "no dimension": ("GG12", '"t"', build([], [tensor("t", [])], bytes(32))),
    "five dimensions": ("GG12", "found 5", build([], [tensor("t", [1] * 5)], bytes(32))),
    "2^32-1 dimensions": (
        "GG12",
        "4,294,967,295",
        build([], [tensor("t", [4], n_dims=2**32 - 1)], bytes(32)),
    ),
    "a dimension of zero": ("GG13", '"t"', build([], [tensor("t", [4, 0])], bytes(32))),
    "a name of 64 bytes": ("GG14", "64 bytes", build([], [tensor("n" * 64, [4])], bytes(32))),
    "a name of none": ("GG14", "0 bytes", build([], [tensor("", [4])], bytes(32))),
    "a name of 2^62 bytes": ("GG14", "@24", build([], [u64(2**62) + bytes(40)], bytes(32))),
    "a name not UTF-8": ("GG14", "0xff", build([], [tensor(b"\xff", [4])], bytes(32))),
    "a tensor twice": (
        "GG14",
        '"t" twice',
        build([], [*ONE, tensor("t", [4], F32, 32)], bytes(64)),
    ),
    "2^66 elements": ("GG15", '"t"', build([], [tensor("t", [2**33, 2**33])], bytes(32))),
    "2^64 elements": ("GG15", '"t"', build([], [tensor("t", [2**32, 2**32])], bytes(32))),
    "2^63 bytes": ("GG15", '"t"', build([], [tensor("t", [2**61])], bytes(32))),
    "a row of no whole blocks": (
        "GG15",
        "multiple of 256 for Q4_K, found rows of 128",
        build([], [tensor("t", [128, 2], Q4_K)], bytes(144)),
    ),
    "data cut short": ("GG16", '"t"', build([], ONE, bytes(15))),
    "no data": ("GG16", '"t"', build([], ONE)),
    "an offset past the end": ("GG16", '"t"', build([], [tensor("t", [4], F32, 2**40)], bytes(16))),
    "an offset not aligned": ("GG16", "of 32", build([], [tensor("t", [4], F32, 8)], bytes(64))),
    "an overlap": (
        "GG16",
        'overlapping tensor "a"',
        build([], [tensor("a", [16]), tensor("t", [4], F32, 32)], bytes(64)),
    ),
    "the same place": ("GG16", "overlapping", build([], [*ONE, tensor("u", [4])], bytes(64))),
    "data before the alignment": (
        "GG16",
        '"t"',
        build([pair("general.alignment", UINT32, u32(2**31))], ONE, bytes(64)),
    ),
    "no architecture": ("GG17", "general.architecture", build([pair("a", UINT8, b"\0")])),
    "another architecture": (
        "GG17",
        "qwen35",
        build([pair("general.architecture", STRING, text("qwen35"))]),
    ),
    "an architecture that is no text": (
        "GG17",
        "general.architecture",
        build([array("general.architecture", STRING, [])]),
    ),
    "an architecture without its numbers": ("GG17", "qwen2.block_count", build([ARCH])),
    "fewer rows than tokens": (
        "GG18",
        "5, found 4 rows",
        build(
            [ARCH, *vocabulary(TOKENS, [1, 1, 1, 3, 5], ["a b"])],
            [tensor("token_embd.weight", [32, 4], Q8_0)],
            bytes(136),
        ),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_its_code_and_place(case: str, tmp_path: Path) -> None:
    code, said, content = BAD[case]
    message = refusal(tmp_path / "m.gguf", content)
    assert message.startswith(f"{code} gguf: "), message
    assert said in message, message
    assert "@" in message or '"' in message, message


def test_every_code_of_the_table_is_tried() -> None:
    assert {code for code, _, _ in BAD.values()} == {f"GG{n:02}" for n in range(1, 19)}


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
    assert header.version == version
    assert header.tensors["t"].shape == (4,)


def test_alignment_moves_the_data() -> None:
    pairs = [pair("general.alignment", UINT32, u32(256))]
    header = parse_header(build(pairs, ONE, bytes(16), alignment=256), Path("m"))
    assert (header.alignment, header.data_start) == (256, 256)


def test_bytes_of_no_tensor_are_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build([ARCH], [tensor("t", [4], F32, 64)], bytes(64 + 32 + 5)))
    assert read_gguf_header(path).unclaimed_bytes == 64 + 5
    assert any("69 bytes" in warning for warning in open_gguf(path).warnings)
    path.write_bytes(build([ARCH], ONE, bytes(32)))
    assert read_gguf_header(path).unclaimed_bytes == 0


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
    "case", [case for case in BAD if BAD[case][0] in ("GG05", "GG06", "GG07", "GG08", "GG15")]
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
