"""A checkpoint read back by code other than its writer's and its restorer's, and compared with the run, bit for bit:

    weights      every tensor
    moments      every AdamW moment and update counter: without them a resumed run is a different run
    step, row    where a resumed run continues
    generators   of random numbers, after a resume

`checkpoint_reloads` looks at some of a session, `resume_continues` at the one that a session was restored from. Apart
from these, the next step depends only on values that are computed anew, so the resumed run takes the step that the
other would have taken. A checkpoint of a sharded student is compared without its moments; after a resume each rank
compares the whole state, before its student is sharded.

The first check exists because a run of 25 hours left a file of 200 bytes, which nobody opened before the run was over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engine import limits
from engine.checks.check import Answer, Numbers
from engine.checks.context import Context
from engine.errors import EngineError
from engine.files import read_json
from engine.formats.open import open_weights
from engine.runtime.parts import read_parts

ADAMW_KEYS = ("exp_avg", "exp_avg_sq", "step")


@torch.no_grad()
def checkpoint_reloads(context: Context, path: Path, step: int) -> Answer:
    row = context.position + (step - context.step) * context.spec.rows_per_step
    numbers = Numbers(step=step, row=row)
    try:
        wrong = differences(context, path, numbers, step=step, row=row)
    except EngineError as error:
        return numbers.failed(f"{path.name} cannot be read: {error}")
    if wrong:
        return numbers.failed(f"{path.name} does not hold what the run has: {wrong}")
    return numbers.passed(
        f"{path.name}, read back: every tensor and moment, step {step} and row {row}, bit for bit"
    )


@torch.no_grad()
def resume_continues(context: Context) -> Answer:
    step, row, resumed = context.step, context.position, context.resumed
    numbers = Numbers(step=step, position=row, expected=step * context.spec.rows_per_step)
    if step == 0:
        return numbers.passed("the run begins at step 0: there is nothing to continue")
    if resumed is None:
        return numbers.unknown(f"step {step}, and nothing says which checkpoint it is from")
    path = resumed.checkpoint
    try:
        wrong = differences(
            context, path, numbers, step=step, row=row, random_states=resumed.random
        )
    except EngineError as error:
        return numbers.failed(f"{path.name} cannot be read again: {error}")
    if wrong:
        return numbers.failed(f"not as {path.name} has them: {wrong}")
    if row != numbers["expected"]:
        return numbers.failed(
            f"{step} steps are {numbers['expected']:.0f} rows, the data stands at {row}: rows are met twice or left out"
        )
    state = context.optimizer.state
    trained = [p for group in context.optimizer.param_groups for p in group["params"]]
    # A skipped update counts as a step of the run but not of AdamW.
    updates = [int(state[p]["step"]) if state.get(p) else 0 for p in trained]
    numbers |= dict(updates_min=min(updates), updates_max=max(updates))
    text = f"AdamW counts {min(updates)} to {max(updates)} updates of {len(trained)} tensors after {step} steps"
    if not 0 < min(updates) <= max(updates) <= step:
        cold = ": it starts cold" if min(updates) == 0 else ""
        return numbers.failed(f"{text}{cold}", cold=updates.count(0))
    if max(updates) < step:
        if context.spec.train.on_non_finite == "stop":
            return numbers.failed(f"{text}, and the spec lets no update be skipped")
        return numbers.unknown(f"{text}: updates were skipped, or moments are older")
    return numbers.passed(
        f"step {step}, row {row}, {max(updates)} updates, every tensor, moment and random generator are those of "
        f"{path.name}, bit for bit"
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
    random_states: Mapping[str, Tensor] | None = None,
) -> str:
    """Describe how the run differs from the files of a checkpoint, bit for bit; empty when it does not.

    `numbers` gets how much was compared and differs. Raises EngineError for files that cannot be read.
    """
    student, held = context.student, context.optimizer.state
    # A tied tensor is stored once, under its first name.
    tensors: dict[str, Tensor] = {}
    for name, tensor in student.state_dict(keep_vars=True).items():
        if not any(tensor is one for one in tensors.values()):
            tensors[name] = tensor
    state = read_json(path / "state.json", "checkpoint", limits.CHECKPOINT_STATE)
    try:
        stored = {"step": state["step"], "row": state["position"]["rows"]}
    except (LookupError, TypeError) as error:
        return f"state.json cannot be read: {error!r}"
    places = [
        f"{name} {found} in the run, {stored[name]} in the file"
        for name, found in (("step", step), ("row", row))
        if found != stored[name]
    ]
    found = {"tensors": (len(tensors), _differing_tensors(path, tensors))}
    parameters = dict(student.named_parameters())
    # The optimizer of a sharded student holds only parts.
    if any(parameter in held for parameter in parameters.values()):
        moments = _differing_moments(path, parameters, held)
        counters = [name for name in moments if name.startswith("step/")]
        found["moments"] = (2 * len(parameters), [one for one in moments if one not in counters])
        found["update counters"] = (len(parameters), counters)
    if random_states is not None:
        with open_weights(path / "rng.safetensors") as file:
            random = [
                name
                for name in sorted({*file.tensors, *random_states})
                if name not in file.tensors
                or name not in random_states
                or not same_bits(file.get(name), random_states[name])
            ]
        found["random generators"] = (len(random_states), random)
    for what, (count, differing) in found.items():
        numbers |= {what: count, f"{what} differing": len(differing)}
    wrong = [
        f"{len(differing)} of {count} {what}, first {differing[0]}"
        for what, (count, differing) in found.items()
        if differing
    ]
    return "; ".join([*wrong, *places])


def same_bits(found: object, wanted: Tensor) -> bool:
    """Return whether two tensors on one device are the same in type, shape and every bit."""
    if not isinstance(found, Tensor) or found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    first, second = (t.detach().reshape(-1).view(torch.uint8) for t in (found, wanted))
    return torch.equal(first, second)


def _differing_tensors(path: Path, live: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that the checkpoint does not have, or not bit for bit."""
    in_parts = "student/"
    with _stored(
        path, "student.safetensors", lambda name: name.startswith(in_parts), in_parts
    ) as stored:
        return [
            name
            for name, tensor in live.items()
            if (found := stored(name)) is None or not same_bits(found.to(tensor.device), tensor)
        ]


def _differing_moments(
    path: Path, live: Mapping[str, Tensor], held: Mapping[Tensor, Mapping[str, Tensor]]
) -> list[str]:
    """Return the names of AdamW's values, of the checkpoint or of `held`, that the other does not have bit for bit."""
    differing = []
    with _stored(
        path, "optimizer.safetensors", lambda name: not name.startswith("student/")
    ) as stored_moment:
        for name, parameter in live.items():
            moments = held.get(parameter, {})
            for key in dict.fromkeys((*ADAMW_KEYS, *moments)):
                stored, moment = stored_moment(f"{key}/{name}"), moments.get(key)
                if stored is None and moment is None:
                    continue  # not moved yet, or frozen
                if (
                    stored is None
                    or moment is None
                    or not same_bits(stored.to(moment.device), moment)
                ):
                    differing.append(f"{key}/{name}")
    return differing


@contextmanager
def _stored(
    path: Path, file: str, kept: Callable[[str], bool], prefix: str = ""
) -> Iterator[Callable[[str], Tensor | None]]:
    """Yield a function that returns a tensor of a checkpoint's `file` by name, or None.

    For a sharded checkpoint, only the names accepted by `kept` are read; they begin with `prefix` there.
    """
    if not (path / file).exists():
        parts = read_parts(path, kept)
        yield lambda name: parts.get(prefix + name)
        return
    with open_weights(path / file) as weights:

        def get(name: str) -> Tensor | None:
            found = weights.get(name) if name in weights.tensors else None
            assert found is None or isinstance(found, Tensor)
            return found

        yield get
