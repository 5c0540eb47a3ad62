"""Training state: everything that the next optimizer step depends on. It is captured from a live model and restored
into one.

It consists of the student, AdamW's moments, the random number generators, the step and the position in
the data. The learning rate and the other optimizer settings are not state: they follow from the spec and
the step. On the same machine, a restored run takes bit for bit the same steps as the saved run.

Restoring first compares every name, shape and dtype, and lists all differences; only then does it write
into the live model and optimizer. The files are safetensors and JSON, never pickle:

    student.safetensors     parameters and persistent buffers by name; a tied tensor once, under its
                            first name
    optimizer.safetensors   AdamW: "exp_avg/<parameter>", "exp_avg_sq/<parameter>", "step/<parameter>"
    rng.safetensors         "cpu" and "cuda/<i>" for the i-th CUDA device that the model lives on
    state.json              step, seed, data position, best held-out loss, spec hash, tied names,
                            parameters that AdamW has not moved

A student that is sharded over several GPUs is written unsharded: its tensors are gathered one at a time, by every
rank in the same order. With `checkpoint.sharded`, every rank writes its own part instead: `shard-*.safetensors`
replace the first two files, and the student's names are prefixed with "student/". Both forms are read back as full
tensors, by any number of processes.

safetensors layout (little-endian): u64 header length, JSON header padded with spaces to 8 bytes, tensor
bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engine import limits
from engine.errors import CheckpointError
from engine.files import read_json
from engine.formats.safetensors import dtype_code, header_bytes
from engine.formats.writing import tensor_chunks
from engine.runtime.parts import is_part, read_parts
from engine.runtime.ranks import put, whole
from engine.spec import RunSpec
from engine.train.checkpoint.manifest import VerifiedCheckpoint
from engine.train.checkpoint.write import Sink, Writer
from engine.train.trainer import Trainer

STUDENT_FILE = "student.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "rng.safetensors"
STATE_FILE = "state.json"
STUDENT_PREFIX = "student/"
SCHEMA = 1

assert sys.byteorder == "little", (
    "tensors are written in their memory layout, and safetensors is little-endian"
)


def pack(state: TrainingState, *, sharded: bool = False) -> dict[str, bytes | Writer]:
    """Return the files of a checkpoint, for `checkpoint.save`.

    With `sharded`, the student and the optimizer are left out, because each rank writes its part of them. Tensors
    are copied to the host one at a time while they are written.
    """
    scalars = {"schema": SCHEMA} | {name: getattr(state, name) for name in SCALARS}
    tensors = {STUDENT_FILE: state.student, OPTIMIZER_FILE: state.optimizer}
    return {
        **{name: TensorWriter(contents) for name, contents in tensors.items() if not sharded},
        RNG_FILE: TensorWriter(state.rng),
        STATE_FILE: json.dumps(scalars, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n",
    }


def sharded_tensors(state: TrainingState) -> dict[str, Tensor]:
    """Return the tensors that `pack` leaves out with `sharded`, by their names in the `shard-*` files."""
    return {STUDENT_PREFIX + name: tensor for name, tensor in state.student.items()} | dict(
        state.optimizer
    )


def join_gathering(files: Mapping[str, bytes | Writer]) -> None:
    """Join the collectives that gather the tensors for the first rank, and discard the gathered tensors.

    There is one collective for every sharded tensor, in the order of the files.
    """
    for content in files.values():
        if not isinstance(content, bytes):
            content.write_to(_DiscardingSink())


class _DiscardingSink:
    def write(self, data: bytes | memoryview, /) -> int:
        return len(data)


def unpack(checkpoint: VerifiedCheckpoint, *, numbers: bool = True) -> TrainingState:
    """Read a verified checkpoint back, with tensors on the CPU. Without `numbers`, the tensors of a sharded checkpoint
    are on the meta device: only their shapes and dtypes are read.

    Raises CheckpointError if the checkpoint is not a training state.
    """
    expected = {STUDENT_FILE, OPTIMIZER_FILE, RNG_FILE, STATE_FILE}
    names = {name for name in checkpoint.files if not is_part(name)}
    sharded = names != checkpoint.files.keys()
    if names != (expected - {STUDENT_FILE, OPTIMIZER_FILE} if sharded else expected):
        raise _mismatch(checkpoint.path, str(sorted(expected)), str(sorted(checkpoint.files)))
    where = checkpoint.path / STATE_FILE
    scalars = read_json(where, "checkpoint", limits.CHECKPOINT_STATE, error=CheckpointError)
    fields = {"schema", *SCALARS}
    if not isinstance(scalars, dict) or scalars.keys() != fields or scalars["schema"] != SCHEMA:
        raise _mismatch(where, f"schema {SCHEMA} with {sorted(fields)}", "other content")
    if scalars["step"] != checkpoint.step:
        raise _mismatch(
            where, f"step {checkpoint.step}, as in the folder's name", str(scalars["step"])
        )
    path = checkpoint.path
    student, optimizer = _read_sharded(path, numbers) if sharded else _read_whole(path)
    return TrainingState(
        **{name: scalars[name] for name in SCALARS} | {"unmoved": tuple(scalars["unmoved"])},
        student=student,
        optimizer=optimizer,
        rng=load_file(checkpoint.path / RNG_FILE),
    )


_Tensors: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]


def _read_whole(path: Path) -> _Tensors:
    # The files are memory-mapped: tensors that are not used are not read.
    return load_file(path / STUDENT_FILE), load_file(path / OPTIMIZER_FILE)


def _read_sharded(path: Path, numbers: bool) -> _Tensors:
    student = read_parts(path, lambda name: name.startswith(STUDENT_PREFIX), numbers=numbers)
    optimizer = read_parts(path, lambda name: name.partition("/")[0] in ADAMW_KEYS, numbers=numbers)
    return {name.removeprefix(STUDENT_PREFIX): t for name, t in student.items()}, optimizer


class TensorWriter:
    """Writes named tensors as one safetensors file, copying one tensor at a time to host memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Largest elements first, so that every tensor starts at a multiple of its element size.
        self._tensors = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        named = [(name, dtype_code(tensor.dtype), tensor.shape) for name, tensor in self._tensors]
        self._header = header_bytes(named, spaced=True)
        data = sum(tensor.numel() * tensor.element_size() for _, tensor in self._tensors)
        self.size_bytes = len(self._header) + data

    def write_to(self, sink: Sink) -> None:
        sink.write(self._header)
        for _, tensor in self._tensors:
            for part in tensor_chunks(whole(tensor.detach())):
                sink.write(part)


def _mismatch(where: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(f"checkpoint: {where} — expected {expected}, found {found}")


SCALARS = (
    "step", "seed", "spec_sha256", "position", "best_held_out_loss", "tied", "unmoved",
)  # fmt: skip
"""Fields of a `TrainingState` that state.json holds, in addition to its schema."""
ADAMW_KEYS = ("exp_avg", "exp_avg_sq", "step")
"""Names of AdamW's state tensors for each parameter that it has updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Everything that the next optimizer step depends on.

    `capture` copies no tensors, so write its result before the next step changes them.
    """

    step: int
    """Number of optimizer steps taken."""
    seed: int
    spec_sha256: str
    position: Mapping[str, int]
    """The position in the data: `rows`, the number of rows taken."""
    best_held_out_loss: float | None
    """Nats; None before the first evaluation."""
    student: Mapping[str, Tensor]
    tied: Mapping[str, str]
    """The second name of each tied tensor, mapped to its first name, which is its key in `student`."""
    optimizer: Mapping[str, Tensor]
    unmoved: tuple[str, ...]
    """Parameters for which the optimizer has no state, such as all parameters before the first step."""
    rng: Mapping[str, Tensor]


def capture(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    *,
    step: int,
    seed: int,
    spec_sha256: str,
    position: Mapping[str, int],
    best_held_out_loss: float | None,
) -> TrainingState:
    """Capture the current state without copying any tensor."""
    student, tied = _named_tensors(model)
    moments: dict[str, Tensor] = {}
    unmoved = []
    for name, parameter in _optimized(model, optimizer).items():
        state = optimizer.state.get(parameter, {})
        if not state:
            unmoved.append(name)
            continue
        moments |= {f"{key}/{name}": state[key] for key in ADAMW_KEYS}
    rng = {"cpu": torch.get_rng_state()}
    for index, device in enumerate(_cuda_devices(model)):
        rng[f"cuda/{index}"] = torch.cuda.get_rng_state(device)
    return TrainingState(
        step=step,
        seed=seed,
        spec_sha256=spec_sha256,
        position=dict(position),
        best_held_out_loss=best_held_out_loss,
        student=student,
        tied=tied,
        optimizer=moments,
        unmoved=tuple(unmoved),
        rng=rng,
    )


def capture_trainer(
    trainer: Trainer, spec: RunSpec, best_held_out_loss: float | None = None
) -> TrainingState:
    """Capture the current state of a run without copying any tensor."""
    return capture(
        trainer.student,
        trainer.optimizer,
        step=trainer.step,
        seed=spec.train.seed,
        spec_sha256=spec.sha256,
        position={"rows": trainer.position},
        best_held_out_loss=best_held_out_loss,
    )


def check_fits(state: TrainingState, trainer: Trainer) -> None:
    """Raise CheckpointError if `restore` would, without changing anything."""
    _check_state(state, trainer.student, trainer.optimizer)


def restore_trainer(state: TrainingState, trainer: Trainer) -> None:
    """Restore the state of a run into its trainer. Raises CheckpointError as `restore` does."""
    restore(state, trainer.student, trainer.optimizer)
    trainer.step, trainer.position = state.step, state.position["rows"]


# contract: checkpoint-protocol-v1
def restore(state: TrainingState, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Restore a state into a live model and its optimizer, and set the random number generators.

    Raises CheckpointError, before anything is changed, with a list of all missing and unexpected tensors and of
    those with another shape or dtype.
    """
    generators = _check_state(state, model, optimizer)
    student, _ = _named_tensors(model)
    parameters = _optimized(model, optimizer)
    with torch.no_grad():
        for name, tensor in student.items():
            put(tensor, state.student[name])
    on_device = {
        id(parameter): group.get("fused") or group.get("capturable")
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if name in state.unmoved:
            continue
        # AdamW keeps its step counter on the host unless it is fused or capturable.
        counter = parameter.device if on_device[id(parameter)] else torch.device("cpu")
        optimizer.state[parameter] = {
            "step": state.optimizer[f"step/{name}"].to(counter, copy=True),
            "exp_avg": _like(parameter, state.optimizer[f"exp_avg/{name}"]),
            "exp_avg_sq": _like(parameter, state.optimizer[f"exp_avg_sq/{name}"]),
        }
    for key, device in generators.items():
        if device.type == "cpu":
            torch.set_rng_state(state.rng[key])
        else:
            torch.cuda.set_rng_state(state.rng[key], device)


def _check_state(
    state: TrainingState, model: nn.Module, optimizer: torch.optim.AdamW
) -> dict[str, torch.device]:
    """Check that a state fits the run, and return the device of each random number generator by the generator's name.

    Raises CheckpointError if the state does not fit.
    """
    student, tied = _named_tensors(model)
    problems = _differences("student tensor", state.student, student)
    if dict(state.tied) != tied:
        problems.append(f"tied names: expected {tied}, found {dict(state.tied)}")
    parameters = _optimized(model, optimizer)
    problems += [
        f"optimizer parameter {name}: expected no state, because the optimizer does not hold it"
        for name in state.unmoved
        if name not in parameters
    ]
    moments = {
        f"{key}/{name}": parameter.new_empty(()).float() if key == "step" else parameter
        for name, parameter in parameters.items()
        if name not in state.unmoved
        for key in ADAMW_KEYS
    }
    problems += _differences("optimizer tensor", state.optimizer, moments)
    generators: dict[str, torch.device] = {"cpu": torch.device("cpu")}
    generators |= {f"cuda/{index}": device for index, device in enumerate(_cuda_devices(model))}
    if state.rng.keys() != generators.keys():
        problems.append(
            f"random generators: expected {sorted(generators)}, found {sorted(state.rng)}"
        )
    if problems:
        raise CheckpointError("checkpoint does not fit the run:\n" + "\n".join(problems))
    return generators


def _named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return parameters and persistent buffers by their first name, and a map from second to first names."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            tied[name] = first
    return tensors, tied


def _optimized(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters by name, in the model's order."""
    optimized_ids = {
        id(parameter) for group in optimizer.param_groups for parameter in group["params"]
    }
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in optimized_ids
    }


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    return sorted(devices, key=lambda device: device.index)


def _differences(what: str, saved: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> list[str]:
    problems = [
        f"{what} {name}: missing from the checkpoint" for name in live.keys() - saved.keys()
    ]
    problems += [f"{what} {name}: not in this run" for name in saved.keys() - live.keys()]
    for name in live.keys() & saved.keys():
        expected, tensor = live[name], saved[name]
        if expected.shape != tensor.shape or expected.dtype != tensor.dtype:
            problems.append(
                f"{what} {name}: expected {list(expected.shape)} {expected.dtype},"
                f" found {list(tensor.shape)} {tensor.dtype}"
            )
    return sorted(problems)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a copy of `value` with the parameter's device, memory layout and sharding, like the moments of AdamW."""
    like = torch.empty_like(parameter, memory_format=torch.preserve_format)
    put(like, value)
    return like
