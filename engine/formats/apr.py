"""Weights in an .apr file (APR v2), opened, checked and read.

Opening reads header, metadata and index (`engine.formats.apr_header` draws the layout) and no data.
`get` reads one tensor into memory of its own. Before the first one is handed out the footer's CRC is compared
with the whole file, so that a damaged file is refused and not half-used. A file without a footer has a
warning instead.

What `get` answers, by the dtype in the index:

    F32 F16 BF16 F64 I32 I64 I8 U8   a tensor
    Q4_K Q6_K                        a QuantTensor: the blocks are GGUF's, byte for byte. Where rows
                                     are no multiple of 256 the last block of each is filled up;
                                     such a tensor comes dequantized, as float32 of its own shape
    APR_Q4 APR_Q8                    the format's own: dequantized, as float32

    APR_Q4: 32 values in 18 bytes: d as f16, then 16 bytes q; value 2i is d (low nibble of q[i]
            - 8), value 2i + 1 is d (high nibble - 8). Q4_0 has the same parts, but low nibbles are
            its values 0 to 15 and high nibbles 16 to 31.
    APR_Q8: d as f32, then one i8 for each value: d q

Tensors under `__training__.` are optimizer state: checked like the others, and left out of
`tensors`. A file that was replaced or written to since it was opened is refused by the next `get`.
"""

# Shapes: N blocks, B bytes of a block, E values of all blocks

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn, Self

from engine.errors import WeightsError
from engine.formats.apr_header import CUT_SHORT, FOOTER_BYTES, check_extent, check_header, refuse
from engine.formats.apr_index import APR_Q4_BLOCK, ROW_BLOCKS, index_limit_bytes, read_index
from engine.formats.apr_metadata import read_config, read_metadata
from engine.formats.apr_tokenizer import extract, unsupported
from engine.formats.kinds import START_BYTES
from engine.formats.open_file import OpenFile, Scratch
from engine.formats.safetensors_header import TensorInfo, identity_of, open_regular
from engine.quant.blocks import BLOCK_TYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.quant.tensor import QuantTensor

TRAINING_PREFIX = "__training__."
_TORCH_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U8": "uint8",
}
_ZERO_NIBBLE = 8
_DENSITY_VALUES = 1024
_READ_BYTES = 1 << 22


class AprFile:
    """A `WeightFile` of one .apr file.

    `dtypes` settles the two dtype numbers that have two meanings (AP06): {8: "APR_Q4"} or
    {8: "Q8_0"}, {9: "APR_Q8"}.
    """

    format: Literal["apr"] = "apr"
    convention: Literal["apr"] = "apr"

    def __init__(self, path: str | Path, *, dtypes: Mapping[int, str] | None = None) -> None:
        self.path = path = Path(path)
        with open_regular(path, "apr") as file:
            self._open = OpenFile(path, "apr", "AP08", identity_of(file.fileno()), Scratch())
            self._file_bytes = os.fstat(file.fileno()).st_size
            header = check_header(path, file.read(START_BYTES), self._file_bytes)
            file.seek(header.metadata_start)
            raw_metadata = file.read(header.metadata_bytes)
            file.seek(header.index_start)
            raw_index = file.read(index_limit_bytes(header))
        self.metadata: Mapping[str, Any]
        self.metadata, odd = read_metadata(path, raw_metadata, header.metadata_start)
        every = read_index(path, header, raw_index, dtypes or {})
        self._data_end, unclaimed = check_extent(path, header, every)
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in every.items() if not name.startswith(TRAINING_PREFIX)
        }
        self._warnings = [*header.warnings, *odd, *unsupported(self.metadata, path)]
        if unclaimed:
            self._warnings.append(f"{path}: {unclaimed:,} bytes of the data belong to no tensor")
        if len(every) > len(self.tensors):
            left_out = len(every) - len(self.tensors)
            self._warnings.append(f"{path}: {left_out} tensors of optimizer state left out")
        for name, info in self.tensors.items():
            if not info.bytes:
                self._warnings.append(f"{path}, tensor {json.dumps(name)}: no values")
        if self._data_end == self._file_bytes:
            self._warnings.append(f"{path}: no footer, so damaged data would not be seen")
        self._verified = False

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)

    def get(self, name: str) -> Tensor | QuantTensor:
        """The tensor on the CPU; in memory of its own. `WeightsError`."""
        import torch

        info = self.tensors.get(name)
        if info is None:
            found = f"{len(self.tensors)} tensors without it"
            raise WeightsError.expected("apr", self.path, f"tensor {json.dumps(name)}", found)
        dtype = getattr(torch, _TORCH_DTYPES.get(info.dtype, "uint8"))
        flat = self._flat(info, dtype)
        if info.dtype in _TORCH_DTYPES:
            return flat.view(info.shape)
        if info.dtype in ROW_BLOCKS:
            return _blocks(flat, info)
        values_E = self._apr_q4(flat, info) if info.dtype == "APR_Q4" else self._apr_q8(flat, info)
        return values_E[: math.prod(info.shape)].view(info.shape)

    def config_dict(self) -> dict[str, Any]:
        """What a Hugging Face `config.json` of this model says. Raises `WeightsError` AP09."""
        return read_config(self.path, self.metadata, self.tensors)

    def tokenizer_json(self) -> bytes | None:
        """The `tokenizer.json` in the metadata; None, with the reason in `warnings`."""
        return extract(self.metadata, self.path)

    def verify(self) -> None:
        """Compares the footer's CRC, where there is one, with the whole file (AP04)."""
        if self._data_end == self._file_bytes:
            return
        crc, left = 0, self._data_end
        with self._reopened() as file:
            try:
                while left and (piece := file.read(min(_READ_BYTES, left))):
                    crc, left = zlib.crc32(piece, crc), left - len(piece)
                footer = file.read(FOOTER_BYTES)
            except OSError as error:
                # A disk that fails under a file that could be opened.
                refuse("AP08", self.path, "readable data", error.strerror or str(error))
        if left or len(footer) != FOOTER_BYTES:
            self._refuse_length(self._data_end - left + len(footer))
        stored = int.from_bytes(footer, "little")
        if stored != crc:
            where = f"{self.path} @{self._data_end}"
            expected = f"the CRC-32 of all before it to be 0x{crc:08x}"
            hint = "the file is damaged: compare its digest with the source, fetch it again"
            refuse("AP04", where, expected, f"0x{stored:08x} in the footer", hint)

    def close(self) -> None:
        """Lets go of the file; tensors of `get` live on."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _flat(self, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        """The bytes of a tensor as one row of `dtype`."""
        if not self._verified:
            self.verify()
            self._verified = True
        return self._open.read(info.start, info.bytes, dtype)

    def _reopened(self) -> BinaryIO:
        file = open_regular(self.path, "apr")
        if identity_of(file.fileno()) != self._open.identity:
            file.close()
            found = "another, or one that was written to since"
            refuse("AP08", self.path, "the file that was opened", found, "open it again")
        return file

    def _refuse_length(self, found: int) -> NoReturn:
        expected = f"{self._file_bytes:,} bytes, as when it was opened"
        refuse("AP08", self.path, expected, f"{found:,} bytes", CUT_SHORT)

    def _apr_q4(self, flat: Tensor, info: TensorInfo) -> Tensor:
        import torch

        blocks_NB = flat.view(-1, APR_Q4_BLOCK[1])
        scale_N1 = blocks_NB[:, :2].clone().view(torch.float16).float()
        pairs_NH = blocks_NB[:, 2:]
        codes = torch.stack((pairs_NH & 15, pairs_NH >> 4), dim=-1).flatten(1)
        count = math.prod(info.shape)
        zeros = int((codes.flatten()[:count] == _ZERO_NIBBLE).sum())
        if count >= _DENSITY_VALUES and zeros > 0.99 * count:
            where = f"{self.path}, tensor {json.dumps(info.name)}"
            refuse("ST14", where, "at most 99% zeros in APR_Q4", f"{zeros / count:.2%}")
        return ((codes.float() - _ZERO_NIBBLE) * scale_N1).flatten()

    def _apr_q8(self, flat: Tensor, info: TensorInfo) -> Tensor:
        import torch

        if not info.bytes:
            return torch.empty(0)
        scale, codes_E = flat[:4].clone().view(torch.float32), flat[4:].view(torch.int8)
        zeros = 1 - int(codes_E.count_nonzero()) / len(codes_E)
        if len(codes_E) >= _DENSITY_VALUES and zeros > 0.995:
            where = f"{self.path}, tensor {json.dumps(info.name)}"
            said = f"ST14 {where}: {zeros:.2%} of APR_Q8 are zero"
            if said not in self._warnings:
                self._warnings.append(said)
        return codes_E.float() * scale


def _blocks(flat: Tensor, info: TensorInfo) -> Tensor | QuantTensor:
    """A tensor in blocks; dequantized where the last block of a row is filled up."""
    from engine.quant.tensor import QuantTensor

    kind = BLOCK_TYPES[info.dtype]
    *lead, row_values = info.shape
    row_blocks = -(-row_values // kind.block_size)
    found = QuantTensor(
        blocks=flat.view(*lead, row_blocks * kind.block_bytes),
        type=kind,
        shape=(*lead, row_blocks * kind.block_size),
    )
    if found.shape == info.shape:
        return found
    return found.dequantize()[..., :row_values].contiguous()
