"""What the next optimizer step of a run depends on, taken out of a live model and put back into one.

Student, AdamW's moments, random number generators, the step, and where the data continues. The learning
rate and the other settings of the optimizer are not state: they follow from the spec and the step. So on
the same machine a restored run takes bit for bit the steps that the saved one would.

Restoring compares every name, shape and dtype first and lists all that differ; only then is anything
written into the live model and optimizer. `engine.train.checkpoint.state_files` says how a state lies on disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.runtime.ranks import put

ADAMW_KEYS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps for each parameter it has moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What the next optimizer step depends on. From `capture` the tensors are the live ones: write
    them before the next step.
    """

    step: int
    """Optimizer steps taken."""
    seed: int
    spec_sha256: str
    position: Mapping[str, int]
    """Where the data source continues, in its own words."""
    best_held_out_loss: float | None
    """Nats; None before the first evaluation."""
    student: Mapping[str, Tensor]
    tied: Mapping[str, str]
    """Second name of a tied tensor -> the name under which `student` holds it."""
    optimizer: Mapping[str, Tensor]
    unmoved: tuple[str, ...]
    """Parameters the optimizer holds without state: frozen ones, and all of them before the first
    step.
    """
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
    """The state as it is now, without copying any tensor.

    Raises ValueError for an optimizer whose state is not exp_avg, exp_avg_sq and step (amsgrad),
    for one that holds a parameter the model does not name, and for a best loss that is not finite.
    """
    if best_held_out_loss is not None and not math.isfinite(best_held_out_loss):
        raise ValueError(
            f"best held-out loss: expected a finite number, found {best_held_out_loss}"
        )
    student, tied = _named_tensors(model)
    moments: dict[str, Tensor] = {}
    unmoved = []
    for name, parameter in _optimized(model, optimizer).items():
        state = optimizer.state.get(parameter, {})
        if not state:
            unmoved.append(name)
            continue
        if set(state) != set(ADAMW_KEYS):
            raise ValueError(f"optimizer: {name} — expected {ADAMW_KEYS}, found {sorted(state)}")
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


# contract: checkpoint-protocol-v1
def restore(state: TrainingState, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Put a state into a live model and its optimizer, and set the random number generators.

    Raises CheckpointError that lists every missing, unexpected or misshapen name, with nothing
    changed yet.
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
        # AdamW counts steps on the host unless the whole update runs on the device
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


def _named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by their first name, and second names -> first name."""
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
    """The optimizer's parameters by name, in the model's order."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {
        name: parameter for name, parameter in model.named_parameters() if id(parameter) in held
    }
    if len(named) != len(held):
        raise ValueError(
            "optimizer: expected only parameters of the model,"
            f" found {len(held) - len(named)} others"
        )
    return named


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    return sorted(devices, key=lambda device: device.index)


def _differences(what: str, found: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> list[str]:
    problems = [
        f"{what} {name}: missing from the checkpoint" for name in live.keys() - found.keys()
    ]
    problems += [f"{what} {name}: not in this run" for name in found.keys() - live.keys()]
    for name in live.keys() & found.keys():
        expected, there = live[name], found[name]
        if expected.shape != there.shape or expected.dtype != there.dtype:
            problems.append(
                f"{what} {name}: expected {list(expected.shape)} {expected.dtype},"
                f" found {list(there.shape)} {there.dtype}"
            )
    return sorted(problems)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy with the parameter's device, memory layout and sharding, as AdamW allocates its moments."""
    like = torch.empty_like(parameter, memory_format=torch.preserve_format)
    put(like, value)
    return like
