"""Check the checkpoints that a run saves and the one that it resumes from.

    checkpoint_reloads   every file of a checkpoint has the hash with which it was written, the kernel has written every
                         page of it, and the reader of a resume accepts it
    resume_continues     weights, AdamW's moments and counters, random number generators, step and row of a resumed run
                         are those of its checkpoint, bit for bit; each rank compares its part of sharded tensors

The first exists because a run of 25 hours left a checkpoint of 200 bytes that was not opened until the run had ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engine import limits
from engine.checkpoint_folders import published, step_of
from engine.checks.context import Context
from engine.errors import EngineError
from engine.files import read_json
from engine.formats.open import open_weights
from engine.runtime.parts import read_parts
from engine.runtime.ranks import own_part, part_like
from engine.verdict import Answer, Numbers

ADAMW_KEYS = ("exp_avg", "exp_avg_sq", "step")
STUDENT_FILE = "student.safetensors"


def checkpoint_reloads(
    context: Context, path: Path, step: int, check_resumable: Callable[[Path], None]
) -> Answer:
    """Read the checkpoint in `path` back with `check_resumable`, which reads all of it and raises CheckpointError where
    a resume would refuse it."""
    numbers = Numbers(step=step)
    try:
        check_resumable(path)
    except EngineError as error:
        return numbers.failed(f"{path.name} cannot be resumed from: {error}")
    return numbers.passed(
        f"{path.name}, read back, has every byte as it was written, and a resume accepts it"
    )


@torch.no_grad()
def resume_continues(context: Context) -> Answer:
    step, row, resumed = context.step, context.position, context.resumed
    numbers = Numbers(step=step, position=row, expected=step * context.spec.rows_per_step)
    if step == 0:
        return numbers.passed("the run begins at step 0: there is nothing to continue")
    if resumed is None:
        return numbers.unknown(
            f"the session begins at step {step} and does not record its checkpoint"
        )
    path = resumed.checkpoint
    if (newest := max(map(step_of, published(path.parent)), default=step)) > step:
        return numbers.failed(
            f"the run resumes from step {step}, although it has a checkpoint of step {newest}"
        )
    try:
        wrong = differences(
            context, path, numbers, step=step, row=row, random_states=resumed.random
        )
    except EngineError as error:
        return numbers.failed(f"{path.name} cannot be read again: {error}")
    if wrong:
        return numbers.failed(f"the run differs from {path.name}: {wrong}")
    if row != numbers["expected"]:
        return numbers.failed(
            f"after {step} steps the data should be at row {numbers['expected']:.0f}, it is at row {row}: rows are "
            "repeated or skipped"
        )
    state = context.optimizer.state
    trained = [p for group in context.optimizer.param_groups for p in group["params"]]
    # A skipped update counts as a step of the run but not as one of AdamW.
    updates = [int(state[p]["step"]) if state.get(p) else 0 for p in trained]
    numbers |= dict(updates_min=min(updates), updates_max=max(updates))
    text = f"AdamW counts {min(updates)} to {max(updates)} updates of {len(trained)} tensors after {step} steps"
    if not 0 < min(updates) <= max(updates) <= step:
        cold = ": its state was reset" if min(updates) == 0 else ""
        return numbers.failed(f"{text}{cold}", cold=updates.count(0))
    if max(updates) < step:
        if context.spec.train.on_non_finite == "stop":
            return numbers.failed(f"{text}, and the spec allows no skipped updates")
        return numbers.unknown(f"{text}: updates were skipped, or moments are older")
    return numbers.passed(
        f"step {step}, row {row}, {max(updates)} updates, every tensor, moment and random number generator match "
        f"{path.name} bit for bit"
    )


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the random number generators of a trainer on `device`, by their names in a checkpoint."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda/0"] = torch.cuda.get_rng_state(device)
    return states


def differences(
    context: Context,
    path: Path,
    numbers: dict[str, float],
    *,
    step: int,
    row: int,
    random_states: Mapping[str, Tensor],
) -> str:
    """Describe how the run differs from the files of a checkpoint, bit for bit; empty when it does not. This rank's
    part of sharded tensors is compared.

    The counts of compared and differing items are added to `numbers`. Raises EngineError for files that cannot be read.
    """
    student, held = context.student, context.optimizer.state
    # A tied tensor is stored once, under its first name.
    tensors: dict[str, Tensor] = {}
    for name, tensor in student.state_dict(keep_vars=True).items():
        if not any(tensor is known for known in tensors.values()):
            tensors[name] = tensor
    state = read_json(path / "state.json", "checkpoint", limits.CHECKPOINT_STATE)
    try:
        stored = {"step": state["step"], "row": state["position"]["rows"]}
    except (LookupError, TypeError) as error:
        return f"state.json cannot be read: {error!r}"
    places = [
        f"{name} {count} in the run, {stored[name]} in the file"
        for name, count in (("step", step), ("row", row))
        if count != stored[name]
    ]
    parameters = dict(student.named_parameters())
    moments = _differing_moments(path, parameters, held)
    counters = [name for name in moments if name.startswith("step/")]
    with open_weights(path / "rng.safetensors") as file:
        random = [
            name
            for name in sorted({*file.tensors, *random_states})
            if name not in file.tensors
            or name not in random_states
            or not same_bits(file.get(name), random_states[name])
        ]
    by_kind = {
        "tensors": (len(tensors), _differing_tensors(path, tensors)),
        "moments": (2 * len(parameters), [name for name in moments if name not in counters]),
        "update counters": (len(parameters), counters),
        "random generators": (len(random_states), random),
    }
    for kind, (count, differing) in by_kind.items():
        numbers |= {kind: count, f"{kind} differing": len(differing)}
    wrong = [
        f"{len(differing)} of {count} {kind}, first {differing[0]}"
        for kind, (count, differing) in by_kind.items()
        if differing
    ]
    return "; ".join([*wrong, *places])


def same_bits(found: object, wanted: Tensor) -> bool:
    """Return whether two tensors on one device are the same in type, shape and every bit."""
    if not isinstance(found, Tensor) or found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    first, second = (t.detach().reshape(-1).view(torch.uint8) for t in (found, wanted))
    return torch.equal(first, second)


def same_part(stored: Tensor | None, live: Tensor) -> bool:
    """Return whether a whole tensor of a file has the same bits as this rank's part of `live`."""
    if stored is None or stored.shape != live.shape:
        return False
    wanted = own_part(live.detach())
    return same_bits(part_like(stored, live).to(wanted.device), wanted)


def _differing_tensors(path: Path, live: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that are missing from the checkpoint or differ in any bit."""
    with _stored(path, STUDENT_FILE, "student/") as stored:
        return [name for name, tensor in live.items() if not same_part(stored(name), tensor)]


def _differing_moments(
    path: Path, live: Mapping[str, Tensor], live_moments: Mapping[Tensor, Mapping[str, Tensor]]
) -> list[str]:
    """Return the names of AdamW's values that differ between the checkpoint and `live_moments`, or that one of them
    lacks."""
    differing = []
    with _stored(path, "optimizer.safetensors") as stored:
        for name, parameter in live.items():
            moments = live_moments.get(parameter, {})
            for key in dict.fromkeys((*ADAMW_KEYS, *moments)):
                stored_moment, moment = stored(f"{key}/{name}"), moments.get(key)
                if stored_moment is None and moment is None:
                    continue  # not updated yet, or frozen
                if moment is None or not same_part(stored_moment, moment):
                    differing.append(f"{key}/{name}")
    return differing


@contextmanager
def _stored(path: Path, file: str, prefix: str = "") -> Iterator[Callable[[str], Tensor | None]]:
    """Yield a function that returns a tensor of a checkpoint's `file` by name, or None. In a checkpoint with one part
    per rank, names begin with `prefix`, and one tensor at a time is assembled."""
    if not (path / file).exists():

        def part(name: str) -> Tensor | None:
            return read_parts(path, lambda stored: stored == prefix + name).get(prefix + name)

        yield part
        return
    with open_weights(path / file) as weights:

        def get(name: str) -> Tensor | None:
            tensor = weights.get(name) if name in weights.tensors else None
            assert tensor is None or isinstance(tensor, Tensor)
            return tensor

        yield get
