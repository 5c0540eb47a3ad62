"""Damaged .apr and safetensors files: refused with the one error there is, or good for a second
reader too; never a hang, and no more memory than the file is worth.
"""

from __future__ import annotations

import json
import resource
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import torch  # noqa: F401  # here, and not within the deadline of the first example
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from engine.errors import WeightsError
from engine.formats.apr_metadata import embed
from engine.formats.open import open_weights
from tests.support.apr_bytes import METADATA, Entry, build_apr, seal, seal_header, take_apart

TOKENIZER = json.dumps(
    {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
        "added_tokens": [
            {
                "id": 3,
                "content": "<|end|>",
                "special": True,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
    }
).encode()
APR_SEEDS = [
    build_apr(),
    build_apr(footer=False),
    build_apr(
        [
            Entry("model.embed", 12, [2, 256], bytes(range(144)) * 2),
            Entry("q6", 14, [1, 300], bytes(420)),
            Entry("s", 30, [], bytes(2)),
        ],
        METADATA | embed(TOKENIZER) | {"hf_config": {"hidden_size": 32, "model_type": "qwen2"}},
        flags=0x620,
    ),
    build_apr([Entry("w", 0, [0, 4], b"")], {"model_type": "x", "n_embd": 3, "n_layer": None}),
]


def safetensors_file(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


SAFETENSORS_SEEDS = [
    safetensors_file(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
        },
        bytes(26),
    ),
    safetensors_file({"x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, b""),
]
# Numbers at which arithmetic goes wrong, in the widths that the header has.
NASTY = [
    struct.pack(form, number)
    for form, numbers in {
        "<Q": (0, 1, 63, 64, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1),
        "<I": (0, 1, 2**16, 2**24, 2**31, 2**32 - 1),
        "<H": (0, 256, 257, 2**15, 2**16 - 1),
        "<B": (0, 1, 8, 9, 12, 14, 30, 77, 128, 129, 255),
    }.items()
    for number in numbers
]


LETTERS = b'0123456789-,:"[]{} .eNFUBQ\\'


def places(raw: bytes) -> list[tuple[int, int]]:
    """Where to strike: the tables most, the first bytes and the data least."""
    if raw.startswith(b"APR"):
        index, data = struct.unpack("<QQ", raw[24:40])
        return [(0, 5), (6, 40), (6, 40), (64, index), *[(index, data)] * 5, (data, len(raw))]
    text = 8 + int.from_bytes(raw[:8], "little")
    return [(0, 8), *[(8, text)] * 8, (text - 1, len(raw))]


@st.composite
def damaged(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A seed with bytes changed, numbers planted, and pieces cut out, doubled or added."""
    seed = draw(st.sampled_from(seeds))
    raw = bytearray(seed)
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        first, end = draw(st.sampled_from(places(seed)))
        # Integers would favour the ends of the range.
        at = min(draw(st.sampled_from(range(first, max(end, first + 1)))), max(len(raw) - 1, 0))
        how = draw(st.sampled_from(range(10)))
        if how < 3:
            raw[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif how < 6:
            raw[at : at + 1] = bytes([draw(st.sampled_from(LETTERS))])
        elif how < 8:
            planted = draw(st.sampled_from(NASTY))
            raw[at : at + len(planted)] = planted
        elif how == 8:
            del raw[at : at + draw(st.integers(1, 128))]
        else:
            raw[at:at] = raw[at : at + draw(st.integers(1, 128))] or b"\0"
    return bytes(raw)


@st.composite
def damaged_apr(draw: st.DrawFn) -> bytes:
    """Damaged, and usually with the CRCs made right again: they would hide every other check."""
    raw = draw(damaged(APR_SEEDS))
    if len(raw) < 68:
        return raw
    return draw(st.sampled_from([raw, seal(raw), seal(raw), seal_header(raw)]))


def read_all(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Everything that can be asked of a file; None when it was refused."""
    try:
        with open_weights(path) as weights:
            for ask in (weights.config_dict, weights.tokenizer_json):
                try:
                    ask()
                except WeightsError as error:
                    assert "\n" not in error.message
            shapes = {name: tuple(weights.get(name).shape) for name in weights.tensors}
            "\n".join(weights.warnings).encode()
            return shapes
    except WeightsError as error:
        str(error).encode()
        assert "\n" not in error.message
        return None


def check_apr(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    found = read_all(path)
    if found is None or raw[:3] != b"APR":
        return
    with open_weights(path) as weights:
        other = take_apart(raw)
        left_out = {name for name in other if name.startswith("__training__.")}
        assert found.keys() == other.keys() - left_out
        for name, info in weights.tensors.items():
            assert info.shape == other[name][1]
            assert raw[info.start : info.start + info.bytes] == other[name][2]


def check_safetensors(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    found = read_all(path)
    if found is None or raw[:3] == b"APR":
        return
    try:
        theirs = dict(deserialize(raw))  # type: ignore[no-untyped-call]
    except SafetensorError:
        return  # it also refuses metadata that is no text, and numbers spelt in another way
    assert {name: tuple(one["shape"]) for name, one in theirs.items()} == found


# `make fuzz` goes through a hundred thousand.
@settings(max_examples=400, deadline=2000, derandomize=True)
@given(raw=damaged_apr())
def test_a_damaged_apr_is_refused_or_good_for_a_second_reader(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    check_apr(tmp_path_factory.getbasetemp() / "damaged.apr", raw)


@settings(max_examples=400, deadline=2000, derandomize=True)
@given(raw=damaged(SAFETENSORS_SEEDS))
def test_a_damaged_safetensors_is_refused_or_good_for_the_library(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    check_safetensors(tmp_path_factory.getbasetemp() / "damaged.safetensors", raw)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(raw=damaged_apr() | damaged(SAFETENSORS_SEEDS))
def test_memory_stays_within_what_the_file_is_worth(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.weights"
    path.write_bytes(raw)
    read_all(path)  # whatever is imported and cached on first use
    tracemalloc.start()
    read_all(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 200_000 + 20 * len(raw)


def test_a_seed_is_good_before_it_is_damaged(tmp_path: Path) -> None:
    for raw in (*APR_SEEDS, *SAFETENSORS_SEEDS):
        (tmp_path / "m").write_bytes(raw)
        assert read_all(tmp_path / "m") is not None


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_damaged_files(tmp_path: Path) -> None:
    """Another 100,000 files at each run; the address space of this process is bounded meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, hard))
    slowest_s = 0.0

    @settings(max_examples=50_000, deadline=None, database=None)
    @given(apr=damaged_apr(), safetensors=damaged(SAFETENSORS_SEEDS))
    def both(apr: bytes, safetensors: bytes) -> None:
        nonlocal slowest_s
        begin_s = time.monotonic()
        check_apr(tmp_path / "m.apr", apr)
        check_safetensors(tmp_path / "m.safetensors", safetensors)
        slowest_s = max(slowest_s, time.monotonic() - begin_s)

    try:
        both()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert slowest_s < 5
