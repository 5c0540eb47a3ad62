"""Every way in which an .apr file can be wrong, built by hand, and the code it is refused by."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from engine.errors import WeightsError
from engine.formats.apr import AprFile
from tests.support.apr_bytes import (
    FLOATS,
    HALVES,
    METADATA,
    ROW_MAJOR,
    Entry,
    build_apr,
    seal_header,
)

SAFETENSORS = (2).to_bytes(8, "little") + b"{}"
GOOD = build_apr()
INDEX = 64 + -(-len(json.dumps(METADATA)) // 64) * 64
Q4_K = Entry("q", 12, [2, 256], bytes(288))


def entry(name: str | bytes = "w", dtype: int = 0, **changes: Any) -> Entry:
    return Entry(name, dtype, [2, 3], bytes(24))._replace(**changes)


def one(**changes: Any) -> bytes:
    return build_apr([entry(**changes)])


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


CASES: list[tuple[str, bytes, str]] = [
    ("AP01", b"", "expected a header of 64 bytes, found a file of 0 bytes"),
    ("AP01", GOOD[:63], "found a file of 63 bytes"),
    ("AP02", b"X" + GOOD[1:], "found a file that begins with b'XPR"),
    ("AP02", b"GGUF" + bytes(64), "found a GGUF file"),
    ("AP02", b"<html>" + bytes(64), "found an HTML page"),
    ("AP02", b"version https://git-lfs.github.com/spec/v1\nsize 12\n", "a 12-byte object"),
    ("AP02", b"\x80\x04" + bytes(64), "a pickle can run code"),
    ("AP03", b"APRN" + bytes(60), "version 2, found an .apr file of version 1\nhint: convert it"),
    ("AP03", b"APR1" + bytes(60), "hint: convert it with `apr convert"),
    ("AP03", build_apr(magic=b"APR2"), "found b'APR2' and version 2.0"),
    ("AP03", build_apr(version=(1, 0)), "version 2, found b'APR\\x00' and version 1.0"),
    ("AP03", build_apr(version=(3, 0)), "@0 — expected"),
    ("AP04", flipped(GOOD, 40), "@40 — expected the header's CRC-32 to be 0x"),
    ("AP04", flipped(GOOD, 8), "in the header"),
    ("AP05", one(dtype=77), 'tensor 0, "w" — expected one of the dtypes 0 F32, 1 F16'),
    ("AP05", one(dtype=13), "found unknown dtype byte 13, which is Q5_K in GGUF"),
    ("AP05", one(dtype=255), "found unknown dtype byte 255"),
    (
        "AP06",
        one(dtype=8),
        "expected 18 bytes for APR_Q4 or 68 bytes for Q8_0, which dtype 8 may be",
    ),
    ("AP06", one(dtype=9, data=bytes(11)), "10 bytes for APR_Q8, which dtype 9 may be, found 11"),
    ("AP07", one(ndim=255), "expected at most 8 dimensions, found 255"),
    ("AP07", one(shape=[2**62, 2**62]), "expected a shape below 2^63, found"),
    ("AP07", one(shape=[2**63, 0], data=b""), "expected a shape below 2^63"),
    ("AP07", one(shape=[2, 4]), "expected 32 bytes for F32[2, 4], found 24 bytes"),
    ("AP07", one(dtype=12, shape=[], data=bytes(144)), "at least one dimension of Q4_K"),
    ("AP07", one(dtype=12, shape=[896, 256], data=bytes(256 * 4 * 144)), "AP07 "),
    ("AP07", one(dtype=12, shape=[32, 8], data=bytes(144)), "AP07 "),
    ("AP07", one(dtype=6, shape=[2, 32], data=bytes(44)), "AP07 "),
    ("AP08", build_apr(header={"metadata_offset": 0}), "@12 — expected metadata to start"),
    ("AP08", build_apr(header={"tensor_index_offset": 64}), "@24 — expected the index to start"),
    ("AP08", build_apr(header={"tensor_index_offset": INDEX + 1}), "at a multiple of 64"),
    ("AP08", build_apr(header={"data_offset": 64}), "@32 — expected the data to start"),
    ("AP08", build_apr(header={"data_offset": 2**63}), "the end of the file, found 9,223,372,"),
    ("AP08", build_apr(header={"metadata_size": 10**6}), "@24 — expected the index to start"),
    # An index of exactly 64 bytes, after which the second tensor would have to come.
    (
        "AP08",
        build_apr([entry("n" * 28)], header={"tensor_count": 2}),
        "tensor 1 — expected 2 more",
    ),
    ("AP08", build_apr([Entry("w", 0, [2**20], b"", size=2**22)]), "found bytes 512 to 4,194,816"),
    ("AP08", one(offset=2**64 - 64), "expected data within"),
    (
        "AP08",
        build_apr([HALVES, FLOATS._replace(offset=16)]),
        "an offset that 64 divides, found 16",
    ),
    ("AP08", build_apr([HALVES, FLOATS._replace(offset=0)]), "found it overlaps at byte"),
    ("AP08", GOOD[:-5], "bytes of padded data, found a file of"),
    ("AP08", build_apr(tail=b"polyglot"), "hint: another file may be hidden"),
    ("AP09", build_apr(metadata=b""), "apr metadata: "),
    ("AP09", build_apr(metadata=b'{"a": }'), "expected JSON, found Expecting value"),
    ("AP09", build_apr(metadata=b'{"\xff": 1}'), "expected JSON, found"),
    ("AP09", build_apr(metadata=b"[1]"), "expected a JSON object as metadata, found [1]"),
    ("AP09", build_apr(metadata=b"[" * 50_000), "expected JSON nested"),
    ("AP09", build_apr(header={"metadata_size": 2**25}), "at most 16,777,216 bytes of metadata"),
    ("AP10", build_apr([FLOATS, HALVES]), '"a.weight" in sorted order, found it after "b.weight"'),
    ("AP10", build_apr([FLOATS, FLOATS]), "found it a second time"),
    ("AP10", build_apr(header={"tensor_count": 3}), "tensor 2 — expected a name of 1 to 256"),
    ("AP10", one(name=b""), "expected a name of 1 to 256 bytes, found 0 bytes"),
    ("AP10", one(name="n" * 257), "expected a name of 1 to 256 bytes, found 257 bytes"),
    ("AP10", build_apr(header={"tensor_count": 1}), "1 tensors in the index, found more"),
    ("AP10", build_apr(header={"tensor_count": 2**32 - 1}), "expected at most 65,536 tensors"),
    ("AP11", build_apr(flags=ROW_MAJOR | 0x1), "found LZ4"),
    ("AP11", build_apr(flags=ROW_MAJOR | 0x2), "found ZSTD"),
    ("AP11", build_apr(flags=ROW_MAJOR | 0x4), "found ENCRYPTED"),
    ("AP11", build_apr(flags=ROW_MAJOR | 0x8), "found SIGNED"),
    ("AP11", build_apr(flags=ROW_MAJOR | 0x10), "found SHARDED"),
    ("AP11", build_apr(flags=0x800), "found LAYOUT_COLUMN_MAJOR"),
    ("AP11", build_apr(flags=ROW_MAJOR | 0x9000), "found unknown bits 0x9000"),
    ("AP12", SAFETENSORS + bytes(64), "a safetensors file named m.apr"),
    ("AP13", one(name=b"w\xff"), 'a name in UTF-8, found "w\\\\xff", with another byte at 1'),
]


@pytest.mark.parametrize(("code", "raw", "words"), CASES)
def test_one_thing_wrong_is_refused_by_its_code_and_place(
    tmp_path: Path, code: str, raw: bytes, words: str
) -> None:
    path = tmp_path / "m.apr"
    path.write_bytes(raw)
    with pytest.raises(WeightsError) as caught:
        AprFile(path)
    text = str(caught.value)
    assert text.startswith(f"{code} apr") and words in text and str(path) in text
    assert caught.value.exit_code == 65 and "\n" not in caught.value.message


def test_every_code_has_a_case() -> None:
    assert {case[0] for case in CASES} == {f"AP{number:02}" for number in range(1, 14)}


def test_an_entry_that_ends_with_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    for end in range(64, len(GOOD), 7):
        path.write_bytes(GOOD[:end])
        with pytest.raises(WeightsError, match=r"AP0[89]"):
            AprFile(path)


@pytest.mark.parametrize(
    "header",
    [
        {"tensor_count": 2**32 - 1},
        {"tensor_count": 60_000},
        {"metadata_size": 2**32 - 1},
        {"metadata_size": 2**24},
        {"data_offset": 2**62},
    ],
)
def test_nothing_is_allocated_for_what_a_header_only_claims(
    tmp_path: Path, header: dict[str, int]
) -> None:
    path = tmp_path / "m.apr"
    path.write_bytes(build_apr(header=header))
    tracemalloc.start()
    with pytest.raises(WeightsError):
        AprFile(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 300_000


def test_a_damaged_byte_anywhere_is_refused_before_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    for at in range(len(GOOD)):
        path.write_bytes(flipped(GOOD, at))
        with pytest.raises(WeightsError), AprFile(path) as weights:
            weights.get("b.weight")


def test_what_is_odd_and_harmless_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    cases = {
        "no layout flag": build_apr(flags=0),
        "version 2.7": build_apr(version=(2, 7)),
        "reserved bytes": seal_header(GOOD[:60] + b"\1" + GOOD[61:]),
        "no footer": build_apr(footer=False),
        "belong to no tensor": build_apr([HALVES._replace(data=bytes(136), size=8), FLOATS]),
        "no values": build_apr([Entry("lm_head.weight", 0, [0, 32], b"")]),
        "no tokenizer": GOOD,
    }
    for words, raw in cases.items():
        path.write_bytes(raw)
        assert any(words in line and str(path) in line for line in AprFile(path).warnings), words


def test_metadata_and_index_may_stand_further_back(tmp_path: Path) -> None:
    """Writers put the sections end to end; the header says where they are."""
    path = tmp_path / "m.apr"
    raw = GOOD[:64] + bytes(128) + GOOD[64:-4]
    moved = {12: 64 + 128, 24: INDEX + 128}
    for at, start in moved.items():
        raw = raw[:at] + start.to_bytes(8, "little") + raw[at + 8 :]
    data = int.from_bytes(GOOD[32:40], "little") + 128
    path.write_bytes(seal_header(raw[:32] + data.to_bytes(8, "little") + raw[40:]))
    assert set(AprFile(path).tensors) == {"a.weight", "b.weight"}
