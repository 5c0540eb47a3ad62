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
    ("AP02", b"", "found an empty file"),
    ("AP02", b"X" + GOOD[1:], "found a file that begins with b'XPR"),
    ("AP02", b"GGUF" + bytes(64), "found a GGUF file"),
    ("AP02", b"<html>" + bytes(64), "found an HTML page"),
    ("AP02", b"version https://git-lfs.github.com/spec/v1\nsize 12\n", "a 12-byte object"),
    ("AP02", b"\x80\x04" + bytes(64), "a pickle can run code"),
    ("AP02", b"APRN" + bytes(60), "found an .apr file of version 1\nhint: convert it"),
    ("AP02", b"APR1" + bytes(60), "hint: convert it with `apr convert"),
    ("AP02", SAFETENSORS + bytes(64), "found a safetensors file"),
    ("AP03", build_apr(magic=b"APR2"), "found b'APR2' and version 2.0"),
    ("AP03", build_apr(version=(1, 0)), "version 2, found b'APR\\x00' and version 1.0"),
    ("AP03", build_apr(version=(3, 0)), "@0 — expected"),
    ("AP04", flipped(GOOD, 40), "@40 — expected the header's CRC-32 to be 0x"),
    ("AP04", flipped(GOOD, 8), "in the header"),
    ("AP05", one(dtype=77), 'tensor 0, "w" — expected one of the dtypes 0 F32, 1 F16'),
    ("AP05", one(dtype=13), "found dtype byte 13, which is Q5_K in GGUF"),
    ("AP05", one(dtype=8), "found dtype byte 8, which is Q8_0 in GGUF"),
    ("AP05", one(dtype=129), "found dtype byte 129\nhint: write the file again"),
    ("AP08", GOOD[:63], "found a file of 63 bytes"),
    ("AP08", one(shape=[2**62, 2**62]), "at a multiple of 64"),
    ("AP08", one(shape=[2**63, 0], data=b""), "expected 0 bytes for F32[9223372036854775808, 0]"),
    ("AP08", one(shape=[2, 4]), "expected 32 bytes for F32[2, 4], at a multiple of 64, in data of"),
    ("AP08", one(dtype=12, shape=[], data=bytes(144)), "bytes for Q4_K[]"),
    ("AP08", one(dtype=12, shape=[896, 256], data=bytes(256 * 4 * 144)), "AP08 "),
    ("AP08", one(dtype=12, shape=[32, 8], data=bytes(144)), "AP08 "),
    ("AP08", build_apr(header={"metadata_offset": 0}), "@12 — expected metadata, index and data"),
    ("AP08", build_apr(header={"tensor_index_offset": 64}), "in this order"),
    ("AP08", build_apr(header={"tensor_index_offset": INDEX + 1}), "at multiples of 64"),
    ("AP08", build_apr(header={"data_offset": 64}), "and 64"),
    ("AP08", build_apr(header={"data_offset": 2**63}), "and 9,223,372,"),
    ("AP08", build_apr(header={"metadata_size": 10**6}), "in this order"),
    ("AP08", build_apr([Entry("w", 0, [2**20], b"", size=2**22)]), "found 4,194,304 at 0"),
    ("AP08", one(offset=2**64 - 64), "found 24 at 18,446,744,073,709,551,552"),
    ("AP08", build_apr([HALVES, FLOATS._replace(offset=16)]), "found 24 at 16"),
    ("AP08", GOOD[:-5], "the file may be cut short"),
    ("AP08", build_apr(tail=b"polyglot"), "with a footer, found"),
    ("AP09", build_apr(metadata=b""), "apr metadata: "),
    ("AP09", build_apr(metadata=b'{"a": }'), "expected JSON, found Expecting value"),
    ("AP09", build_apr(metadata=b'{"\xff": 1}'), "expected JSON, found"),
    ("AP09", build_apr(metadata=b"[1]"), "expected a JSON object as metadata, found [1]"),
    ("AP09", build_apr(metadata=b"[" * 50_000), "expected JSON nested"),
    ("AP09", build_apr(header={"metadata_size": 2**25}), "at most 16,777,216 bytes of metadata"),
    # An index of exactly 64 bytes, after which the second tensor would have to come.
    ("AP10", build_apr([entry("n" * 28)], header={"tensor_count": 2}), "tensor 1 — expected an"),
    ("AP10", build_apr([FLOATS, FLOATS]), "found it a second time"),
    ("AP08", build_apr(header={"tensor_count": 2**32 - 1}), "found 0 at 0"),
    ("AP10", one(ndim=255), "expected an entry of the index"),
    ("AP10", one(name=b"w\xff"), "can't decode byte 0xff"),
    ("AP11", build_apr(flags=ROW_MAJOR | 0x1), "compression, encryption"),
    ("AP11", build_apr(flags=0x800), "found 0x0800"),
    ("AP11", build_apr(flags=ROW_MAJOR | 0x9000), "found 0x9000"),
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
    assert {case[0] for case in CASES} == {f"AP{n:02}" for n in (2, 3, 4, 5, 8, 9, 10, 11)}


def test_an_entry_that_ends_with_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    for end in range(64, len(GOOD), 7):
        path.write_bytes(GOOD[:end])
        with pytest.raises(WeightsError, match=r"AP(08|09|10)"):
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
        "no footer": build_apr(footer=False),
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
