"""A training state to and from the files of a checkpoint. No pickle: safetensors and JSON only.

    student.safetensors     parameters and persistent buffers by name; a tied tensor once, under its
                            first name
    optimizer.safetensors   AdamW: "exp_avg/<parameter>", "exp_avg_sq/<parameter>", "step/<parameter>"
    rng.safetensors         "cpu" and "cuda/<i>" for the i-th CUDA device that the model lives on
    state.json              step, seed, data position, best held-out loss, spec hash, tied names,
                            parameters that AdamW has not moved

A student that is sharded over several GPUs is written whole, as any other: its tensors are gathered
one at a time, by every rank in the same order. Or every rank writes what it has (`checkpoint.sharded`);
`shard-*.safetensors` then stand in the place of the first two files, with the student's names behind
"student/". Either is read as whole tensors, by any number of processes.

safetensors layout (little-endian): u64 header length, JSON header padded with spaces to 8 bytes, tensor
bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine import limits
from engine.errors import CheckpointError
from engine.files import read_json
from engine.runtime.parts import is_part, read_parts
from engine.runtime.ranks import whole
from engine.train.checkpoint.manifest import VerifiedCheckpoint
from engine.train.checkpoint.state import ADAMW_KEYS, TrainingState
from engine.train.checkpoint.write import Sink, Writer

STUDENT_FILE = "student.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "rng.safetensors"
STATE_FILE = "state.json"
STUDENT_PREFIX = "student/"
SCHEMA = 1
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

assert sys.byteorder == "little", (
    "tensors are written as they lie in memory, and the format is little-endian"
)


def pack(state: TrainingState, *, sharded: bool = False) -> dict[str, bytes | Writer]:
    """The files of a checkpoint, for `checkpoint.save`; without those tensors that are `sharded` over
    ranks, which write them themselves. Tensors are copied to the host one at a time while they are
    written.
    """
    scalars = {
        "schema": SCHEMA,
        "step": state.step,
        "seed": state.seed,
        "spec_sha256": state.spec_sha256,
        "position": dict(state.position),
        "best_held_out_loss": state.best_held_out_loss,
        "tied": dict(state.tied),
        "unmoved": list(state.unmoved),
    }
    tensors = {STUDENT_FILE: state.student, OPTIMIZER_FILE: state.optimizer}
    return {
        **{name: TensorWriter(held) for name, held in tensors.items() if not sharded},
        RNG_FILE: TensorWriter(state.rng),
        STATE_FILE: json.dumps(scalars, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n",
    }


def sharded_tensors(state: TrainingState) -> dict[str, Tensor]:
    """What `pack` leaves to the ranks, by the names in their files."""
    return {STUDENT_PREFIX + name: tensor for name, tensor in state.student.items()} | dict(
        state.optimizer
    )


def take_part(files: Mapping[str, bytes | Writer]) -> None:
    """Give the first rank this one's parts of what it writes: a collective for every sharded tensor,
    in the order of the files. Nothing is kept.
    """
    for content in files.values():
        if not isinstance(content, bytes):
            content.write_to(_Nowhere())


class _Nowhere:
    def write(self, data: bytes | memoryview, /) -> int:
        return len(data)


def unpack(checkpoint: VerifiedCheckpoint) -> TrainingState:
    """Read a verified checkpoint back, tensors on the CPU. Raises CheckpointError when it is not a
    training state.
    """
    wanted = {STUDENT_FILE, OPTIMIZER_FILE, RNG_FILE, STATE_FILE}
    names = {name for name in checkpoint.files if not is_part(name)}
    sharded = names != checkpoint.files.keys()
    if names != (wanted - {STUDENT_FILE, OPTIMIZER_FILE} if sharded else wanted):
        raise _mismatch(checkpoint.path, str(sorted(wanted)), str(sorted(checkpoint.files)))
    where = checkpoint.path / STATE_FILE
    scalars = read_json(where, "checkpoint", limits.CHECKPOINT_STATE, error=CheckpointError)
    fields = {
        "schema",
        "step",
        "seed",
        "spec_sha256",
        "position",
        "best_held_out_loss",
        "tied",
        "unmoved",
    }
    if not isinstance(scalars, dict) or scalars.keys() != fields or scalars["schema"] != SCHEMA:
        raise _mismatch(where, f"schema {SCHEMA} with {sorted(fields)}", "other content")
    if scalars["step"] != checkpoint.step:
        raise _mismatch(where, f"step {checkpoint.step}, as the checkpoint", str(scalars["step"]))
    student, optimizer = _read_sharded(checkpoint) if sharded else _read_whole(checkpoint)
    return TrainingState(
        step=scalars["step"],
        seed=scalars["seed"],
        spec_sha256=scalars["spec_sha256"],
        position=scalars["position"],
        best_held_out_loss=scalars["best_held_out_loss"],
        student=student,
        tied=scalars["tied"],
        optimizer=optimizer,
        unmoved=tuple(scalars["unmoved"]),
        rng=load_file(checkpoint.path / RNG_FILE),
    )


_Tensors: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]


def _read_whole(checkpoint: VerifiedCheckpoint) -> _Tensors:
    return load_file(checkpoint.path / STUDENT_FILE), load_file(checkpoint.path / OPTIMIZER_FILE)


def _read_sharded(checkpoint: VerifiedCheckpoint) -> _Tensors:
    student = read_parts(checkpoint.path, lambda name: name.startswith(STUDENT_PREFIX))
    optimizer = read_parts(checkpoint.path, lambda name: name.partition("/")[0] in ADAMW_KEYS)
    return {name.removeprefix(STUDENT_PREFIX): t for name, t in student.items()}, optimizer


class TensorWriter:
    """Named tensors as one safetensors file, in host memory one tensor at a time."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Wide elements first, so that every tensor starts at a multiple of its own element size.
        self._tensors = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        header: dict[str, object] = {}
        end = 0
        for name, tensor in self._tensors:
            if tensor.dtype not in _DTYPE_NAMES:
                raise ValueError(
                    f"tensor {name}: expected one of {list(_DTYPE_NAMES)}, found {tensor.dtype}"
                )
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.size_bytes = len(self._header) + end

    def write_to(self, sink: Sink) -> None:
        sink.write(self._header)
        for _, tensor in self._tensors:
            host = whole(tensor.detach()).to("cpu").contiguous().reshape(-1)
            if host.numel():
                sink.write(memoryview(host.view(torch.uint8).numpy().data))


def _mismatch(where: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(f"checkpoint: {where} — expected {expected}, found {found}")
