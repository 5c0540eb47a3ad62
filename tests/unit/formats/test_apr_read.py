"""What an .apr file's bytes are worth, decoded by hand from the format's formulas, and how they are
mapped.
"""

# Shapes: O rows (out), I values of a row (in)

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.errors import WeightsError
from engine.formats.apr import AprFile
from engine.quant.tensor import QuantTensor
from tests.support.apr_bytes import FLOATS, HALVES, METADATA, Entry, build_apr


def opened(path: Path, *tensors: Entry) -> AprFile:
    path.write_bytes(build_apr(sorted(tensors, key=lambda one: one.name)))
    return AprFile(path)


def plain(found: torch.Tensor | QuantTensor) -> torch.Tensor:
    assert isinstance(found, torch.Tensor)
    return found


def half(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def decode_q4_k(block: bytes) -> list[float]:
    """The formula of the format, one value at a time."""
    d, dmin, s, nibbles = half(block[:2]), half(block[2:4]), block[4:16], block[16:]
    values = []
    for index in range(256):
        chunk, place = divmod(index, 64)
        j = 2 * chunk + place // 32
        byte = nibbles[32 * chunk + place % 32]
        q = byte & 15 if place < 32 else byte >> 4
        if j < 4:
            sc, m = s[j] & 63, s[j + 4] & 63
        else:
            sc = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4)
            m = (s[j + 4] >> 4) | ((s[j] >> 6) << 4)
        values.append(d * sc * q - dmin * m)
    return values


def decode_q6_k(block: bytes) -> list[float]:
    d, values = half(block[208:210]), [0.0] * 256
    for part in range(2):
        ql, qh = block[64 * part : 64 * part + 64], block[128 + 32 * part : 160 + 32 * part]
        scale = struct.unpack("<8b", block[192 + 8 * part : 200 + 8 * part])
        for l_ in range(32):
            step = l_ // 16
            codes = (
                (ql[l_] & 15) | ((qh[l_] & 3) << 4),
                (ql[l_ + 32] & 15) | (((qh[l_] >> 2) & 3) << 4),
                (ql[l_] >> 4) | (((qh[l_] >> 4) & 3) << 4),
                (ql[l_ + 32] >> 4) | (((qh[l_] >> 6) & 3) << 4),
            )
            for quarter, q in enumerate(codes):
                at = 128 * part + 32 * quarter + l_
                values[at] = d * scale[step + 2 * quarter] * (q - 32)
    return values


def blocks(count: int, kind: str) -> bytes:
    """Random blocks with scales of a size that weights have."""
    chance = random.Random(5)
    found = b""
    for _ in range(count):
        d = struct.pack("<e", chance.uniform(0.001, 0.01))
        if kind == "Q4_K":
            found += d + struct.pack("<e", chance.uniform(0.001, 0.01)) + chance.randbytes(140)
        else:
            found += chance.randbytes(208) + d
    return found


@pytest.mark.parametrize(
    ("dtype", "form", "torch_dtype"),
    [
        (0, "f", torch.float32),
        (1, "e", torch.float16),
        (3, "d", torch.float64),
        (4, "i", torch.int32),
        (5, "q", torch.int64),
        (6, "b", torch.int8),
        (7, "B", torch.uint8),
    ],
)
def test_a_plain_dtype_reads_as_torchs(
    tmp_path: Path, dtype: int, form: str, torch_dtype: torch.dtype
) -> None:
    values = [3, 1, 4, 1, 5, 9]
    data = struct.pack(f"<6{form}", *values)
    with opened(tmp_path / "m.apr", Entry("w", dtype, [2, 3], data)) as weights:
        found = plain(weights.get("w"))
    assert found.dtype == torch_dtype
    assert found.tolist() == [values[:3], values[3:]]


def test_bfloat16_scalars_and_tensors_without_values_read(tmp_path: Path) -> None:
    scalar, none = Entry("s", 0, [], struct.pack("<f", 2.5)), Entry("n", 1, [0, 7], b"")
    weights = opened(tmp_path / "m.apr", HALVES, scalar, none)
    assert plain(weights.get("a.weight")).tolist() == [1.0, -2.0, 0.0, 3.0]
    assert plain(weights.get("a.weight")).dtype == torch.bfloat16
    assert plain(weights.get("s")).shape == () and plain(weights.get("s")).item() == 2.5
    assert plain(weights.get("n")).shape == (0, 7) and plain(weights.get("n")).dtype == torch.half


@pytest.mark.parametrize(
    ("kind", "dtype", "decode"),
    [
        ("Q4_K", 12, decode_q4_k),
        ("Q6_K", 14, decode_q6_k),
    ],
)
def test_k_blocks_stay_blocks_and_decode_by_the_formula(
    tmp_path: Path, kind: str, dtype: int, decode: Callable[[bytes], list[float]]
) -> None:
    data = blocks(6, kind)
    block_bytes = len(data) // 6
    found = opened(tmp_path / "m.apr", Entry("w", dtype, [3, 512], data)).get("w")
    assert isinstance(found, QuantTensor)
    assert (found.type.name, found.shape) == (kind, (3, 512))
    assert found.blocks.numpy().tobytes() == data
    values_OI = found.dequantize()
    expected = [
        value
        for at in range(0, len(data), block_bytes)
        for value in decode(data[at : at + block_bytes])
    ]
    wrong = (values_OI.flatten().double() - torch.tensor(expected).double()).abs()
    # fp32 rounds each of three products; the values reach a few hundred.
    assert wrong.max() < 1e-4, (wrong.max(), wrong.mean())


def test_rows_that_blocks_do_not_fill_come_dequantized_in_their_own_shape(tmp_path: Path) -> None:
    """896 values a row are three and a half blocks: the format fills up the fourth."""
    data = blocks(8, "Q6_K")
    found = opened(tmp_path / "m.apr", Entry("w", 14, [2, 896], data)).get("w")
    assert isinstance(found, torch.Tensor)
    assert found.shape == (2, 896) and found.dtype == torch.float32 and found.is_contiguous()
    second = [v for at in range(4, 8) for v in decode_q6_k(data[210 * at : 210 * at + 210])]
    assert torch.allclose(found[1], torch.tensor(second[:896]), atol=1e-4)


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    path.write_bytes(build_apr([Entry("w", 0, [1000, 1000], bytes(4_000_000))]))
    before = path.read_bytes()
    with AprFile(path) as weights:
        tensor = plain(weights.get("w"))
        assert str(path) not in Path("/proc/self/maps").read_text()
        tensor.fill_(1.0)
    assert path.read_bytes() == before
    assert float(tensor.sum()) == 1e6
    del tensor
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_every_tensor_lies_where_any_dtype_can_be_read(tmp_path: Path) -> None:
    weights = opened(tmp_path / "m.apr", HALVES, FLOATS, Entry("q", 12, [1, 256], bytes(144)))
    assert all(info.start % 64 == 0 for info in weights.tensors.values())
    assert mmap.PAGESIZE % 64 == 0


def test_optimizer_state_is_left_out(tmp_path: Path) -> None:
    state = Entry("__training__.adam.m", 0, [2], bytes(8))
    weights = opened(tmp_path / "m.apr", state, FLOATS)
    assert set(weights.tensors) == {"b.weight"}
    assert any("1 tensors of optimizer state left out" in line for line in weights.warnings)
    with pytest.raises(
        WeightsError, match=r'expected tensor "__training__.adam.m", found 1 tensors'
    ):
        weights.get("__training__.adam.m")


def test_tensors_may_lie_in_another_order_than_their_names(tmp_path: Path) -> None:
    """A streaming writer keeps the order tensors come in and sorts only the index."""
    first = Entry("b", 0, [1], struct.pack("<f", 1.0), offset=0)
    second = Entry("a", 0, [1], struct.pack("<f", 2.0), offset=64)
    path = tmp_path / "m.apr"
    raw = build_apr([second._replace(data=first.data), first._replace(data=second.data)])
    path.write_bytes(raw)
    weights = AprFile(path)
    assert plain(weights.get("a")).item() == 2.0 and plain(weights.get("b")).item() == 1.0


def test_a_footer_that_does_not_fit_is_refused_before_the_first_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    raw = bytearray(build_apr())
    raw[-100] ^= 4
    path.write_bytes(raw)
    weights = AprFile(path)
    assert set(weights.tensors) == {"a.weight", "b.weight"}
    with pytest.raises(
        WeightsError, match=r"AP04 apr: .* in the footer\nhint: the file is damaged"
    ):
        weights.get("a.weight")
    with pytest.raises(WeightsError, match=r"AP04"):
        weights.verify()


def test_a_file_without_a_footer_reads_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    path.write_bytes(build_apr(footer=False))
    weights = AprFile(path)
    assert plain(weights.get("b.weight")).sum() == 15
    assert any("no footer" in line for line in weights.warnings)


def test_a_file_that_changed_since_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    path.write_bytes(build_apr())
    weights = AprFile(path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(
        WeightsError, match=r"AP08 .*found another, or one that was written to since"
    ):
        weights.get("b.weight")
    weights = AprFile(path)
    (tmp_path / "new").write_bytes(build_apr())
    os.replace(tmp_path / "new", path)
    with pytest.raises(WeightsError, match=r"AP08 .*the file that was opened"):
        weights.get("b.weight")


def test_a_file_cut_while_it_is_open_is_refused_by_the_next_get(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    path.write_bytes(build_apr())
    weights = AprFile(path)
    weights.get("b.weight")
    os.truncate(path, 600)
    with pytest.raises(WeightsError, match=r"AP08 .*the file that was opened"):
        weights.get("b.weight")


def test_a_tensor_that_is_not_there_is_refused(tmp_path: Path) -> None:
    weights = opened(tmp_path / "m.apr", FLOATS)
    with pytest.raises(WeightsError, match=r'expected tensor "c", found 1 tensors without it'):
        weights.get("c")
    assert (weights.format, weights.convention) == ("apr", "apr")
    assert weights.metadata["architecture"] == METADATA["architecture"]
