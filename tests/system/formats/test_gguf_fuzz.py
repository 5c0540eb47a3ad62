"""Whatever bytes a GGUF file has, it is read or refused with a `WeightsError`: no other error, no
hang, and no more memory than the file's own size explains.

The seeds are valid files and the hand-made bad ones; a mutation overwrites, inserts, removes or
doubles bytes, with numbers around which arithmetic goes wrong. What is read must agree with the
`gguf` package, the second reader.
"""

from __future__ import annotations

import random
import resource
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import WeightsError
from engine.formats.gguf import GgufHeader, open_gguf, parse_header
from engine.formats.gguf_metadata import check_vocabulary, read_config
from engine.formats.gguf_tokenizer import build_tokenizer_json
from tests.support.bad_gguf import BAD
from tests.support.gguf_files import ARCH, F32, UINT32, build, model, pair, tensor, u32
from tests.support.perf import within

pytestmark = pytest.mark.perf
EXAMPLES = 800
MANY = 100_000
MOST_SECONDS = 5.0
SPARE_BYTES = 2 << 30

VALID = [
    model(),
    build([ARCH], [tensor("t", [4], F32), tensor("u", [3, 2], F32, 32)], bytes(64), version=2),
    build(
        [pair("general.alignment", UINT32, u32(64)), ARCH],
        [tensor("t", [32, 2], 8)],
        bytes(68),
        alignment=64,
    ),
]
SEEDS = VALID + [content for _, _, content in BAD.values() if len(content) < 10_000]

TELLING = sorted(
    {2**p + d for p in (0, 3, 5, 8, 16, 31, 32, 61, 62, 63) for d in (-1, 0, 1)} | {2**64 - 1, 99}
)
NUMBERS = [struct.pack("<Q", number) for number in TELLING]
NUMBERS += [struct.pack("<I", number) for number in TELLING if number < 2**32]
NUMBERS += [bytes([number]) for number in range(256)]


@contextmanager
def spare_memory(count: int) -> Iterator[None]:
    """Allows `count` bytes of address space beyond what the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read_all(content: bytes) -> GgufHeader | None:
    """Everything that can be asked of a header; None when the file is refused."""
    if not content.startswith(b"GGUF"):
        return None
    started_s = time.monotonic()
    try:
        header = parse_header(content, Path("m"))
        check_vocabulary(header.metadata, header.tensors)
        values = dict(header.metadata)
        assert values.keys() == header.metadata.keys()
    except WeightsError as error:
        assert str(error).startswith("GG"), str(error)
        header = None
    if header is not None:
        for part in (read_config, build_tokenizer_json):
            try:
                if part is read_config:
                    read_config(header.metadata, header.tensors)
                else:
                    build_tokenizer_json(header.metadata)
            except WeightsError as error:
                assert str(error).startswith(("GG08", "GG17")), str(error)
    within(time.monotonic() - started_s, MOST_SECONDS)
    return header


def mutated(draw: random.Random) -> bytes:
    content = bytearray(draw.choice(VALID if draw.random() < 0.7 else SEEDS))
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(content) + 1)
        # Most of a file is data; most of what can be wrong is before it.
        at = min(at, draw.randrange(1, 400)) if draw.random() < 0.5 else at
        number = draw.choice(NUMBERS)
        match draw.randrange(6):
            case 0 | 1 | 2:
                content[at : at + len(number)] = number
            case 3:
                content[at:at] = number
            case 4:
                del content[at : at + draw.choice((1, 4, 8, 33))]
            case 5:
                content[at:at] = content[at : at + draw.choice((1, 8, 37))]
    return bytes(content)


def agrees_with_the_package(header: GgufHeader, path: Path) -> None:
    reader = gguf.GGUFReader(path)
    theirs = {one.name: one for one in reader.tensors}
    assert theirs.keys() == header.tensors.keys()
    for name, info in header.tensors.items():
        one = theirs[name]
        assert (one.tensor_type.name, one.data_offset, one.n_bytes) == (
            info.dtype,
            info.start,
            info.bytes,
        )
        assert tuple(reversed(one.shape.tolist())) == info.shape
    with open_gguf(path) as file:
        for name, info in file.tensors.items():
            assert tuple(file.get(name).shape) == info.shape
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert keys == list(header.metadata)


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
@given(draw=st.randoms(use_true_random=False))
def test_no_mutation_of_a_file_does_harm(draw: random.Random) -> None:
    with spare_memory(SPARE_BYTES):
        read_all(mutated(draw))


@settings(max_examples=500, deadline=None, database=None)
@given(content=st.binary(max_size=300))
def test_no_bytes_after_the_magic_do_harm(content: bytes) -> None:
    read_all(b"GGUF\x03\0\0\0" + content)


def test_what_is_read_is_what_the_package_reads(tmp_path: Path) -> None:
    draw = random.Random(11)
    path = tmp_path / "m.gguf"
    agreed = 0
    for _ in range(1_500):
        content = bytearray(draw.choice(VALID))
        for _ in range(draw.choice((1, 2))):
            number = draw.choice(NUMBERS)
            at = draw.randrange(len(content))
            content[at : at + len(number)] = number
        header = read_all(bytes(content))
        if header is not None:
            path.write_bytes(content)
            agrees_with_the_package(header, path)
            agreed += 1
    assert agreed > 200


@pytest.mark.fuzz
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_mutation_of_many_does_harm() -> None:
    draw = random.Random(0x6767)
    refused = 0
    with spare_memory(SPARE_BYTES):
        for _ in range(MANY):
            refused += read_all(mutated(draw)) is None
    # Both verdicts are met often, or the mutations have lost their point.
    assert 0.3 < refused / MANY < 0.95, refused
