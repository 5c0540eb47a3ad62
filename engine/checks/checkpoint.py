"""A checkpoint read back by code other than its writer's and its restorer's.

`CheckpointReloads` checks that the first one of a session is usable, and runs it:

    weights      every tensor, and the logits of held-out rows with the reloaded tensors, bit for bit
    moments      every AdamW moment, bit for bit: without them a resumed run is a different run
    step, row    where a resumed run would continue

Apart from these, the next step depends only on values that are computed anew. So a run resumed from these
bytes takes the same step as this run. Moments of a student that is sharded over several GPUs are not
compared.

`differences` compares a trainer that was restored with the files that it was restored from, and the random
number generators too. With several GPUs, each rank compares the whole state, before its student is sharded.

The first check exists because a run of 25 hours left a file of 200 bytes, which nobody opened before the run
was over.
"""

# Shapes: B rows, T tokens

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engine import limits
from engine.checks.check import Answer, Numbers
from engine.checks.context import Context, Resumed
from engine.errors import BadInput, EngineError
from engine.files import read_json
from engine.formats.open import open_weights
from engine.models.load import empty_decoder
from engine.runtime.parts import read_parts
from engine.runtime.ranks import own_part
from engine.units import format_bytes

ROWS = 2
ADAMW_KEYS = ("exp_avg", "exp_avg_sq", "step")
SAMPLED = 1024


class Sample:
    """Some numbers of a tensor (of this rank's part of a sharded one), evenly spread, as they were."""

    def __init__(self, tensor: Tensor) -> None:
        self._every = max(1, own_part(tensor).numel() // SAMPLED)
        self.before = self.of(tensor).clone()

    def of(self, tensor: Tensor) -> Tensor:
        return own_part(tensor.detach()).reshape(-1)[:: self._every]


class CheckpointReloads:
    def __init__(self, context: Context) -> None:
        self.begun_step, self.begun_row = context.step, context.position
        self.start = {n: Sample(p) for n, p in context.student.named_parameters()}

    @torch.no_grad()
    def at_checkpoint(self, context: Context, path: Path) -> Answer:
        student = context.student
        live = dict(student.named_parameters())
        size = sum(file.stat().st_size for file in path.iterdir())
        least = sum(p.numel() * p.element_size() for p in live.values())
        numbers = Numbers(size_bytes=size, least_bytes=least)
        if size < least:
            return numbers.failed(
                f"{path.name} has {format_bytes(size)}, the student's weights alone take "
                f"{format_bytes(least)}"
            )
        copy = empty_decoder(student.config, device=context.device)
        copy.run_like(student)
        try:
            differing = _differing_tensors(path, live, dict(copy.named_parameters()))
        except EngineError as error:
            return numbers.failed(f"{path.name} cannot be read: {error}")
        numbers["differing"] = len(differing)
        if differing:
            return numbers.failed(
                f"{path.name}: {len(differing)} of {len(live)} tensors are not the student's, first "
                f"{differing[0]}"
            )
        batch = context.heldout[0]
        tokens_BT = torch.from_numpy(batch.tokens_BT[:ROWS]).to(context.device)
        documents_BT = torch.from_numpy(batch.documents_BT[:ROWS]).to(context.device)
        with context.autocast():
            same = torch.equal(
                student.logits(tokens_BT, documents_BT), copy.logits(tokens_BT, documents_BT)
            )
        if not same:
            return numbers.failed(f"{path.name}: the reloaded student gives other logits")
        unchanged = [n for n, s in self.start.items() if torch.equal(s.of(live[n]), s.before)]
        numbers["unchanged"] = len(unchanged)
        if context.step > self.begun_step and len(unchanged) == len(live):
            return numbers.failed(f"{path.name} holds the weights that the run began with")
        wrong = self._would_go_on_elsewhere(context, path, live, numbers)
        if wrong:
            return numbers.failed(f"{path.name}: {wrong}")
        moments = ", moments" if "moments_differing" in numbers else ""
        return numbers.passed(
            f"{path.name}, {format_bytes(size)}: the same {len(live)} tensors{moments} and logits, bit "
            "for bit"
        )

    def _would_go_on_elsewhere(
        self, context: Context, path: Path, live: Mapping[str, Tensor], numbers: dict[str, float]
    ) -> str:
        """Describe how a run resumed from `path` would differ; empty when it would not."""
        train = context.spec.train
        rows_of_a_step = train.rows * train.accumulation * context.spec.compute.gpus
        rows = self.begun_row + (context.step - self.begun_step) * rows_of_a_step
        try:
            state = read_json(path / "state.json", "checkpoint", limits.CHECKPOINT_STATE)
            step, row = state["step"], state["position"]["rows"]
        except (BadInput, LookupError, TypeError) as error:
            return f"state.json cannot be read: {error!r}"
        numbers |= dict(step=step, row=row)
        if step != context.step:
            return f"it would go on after step {step}, expected {context.step}"
        if row != rows:
            return f"it would go on at row {row} of the data, expected {rows}"
        held = context.optimizer.state
        if not all(parameter in held for parameter in live.values()):
            return ""  # the student is sharded, so the optimizer holds only parts
        try:
            differing = _differing_moments(path, live, held)
        except EngineError as error:
            return f"moments cannot be read: {error}"
        numbers["moments_differing"] = len(differing)
        if differing:
            return f"{len(differing)} moments are not the optimizer's, first {differing[0]}"
        return ""


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the random number generators of a trainer on `device`, by their names in a checkpoint."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda/0"] = torch.cuda.get_rng_state(device)
    return states


@torch.no_grad()
def differences(context: Context, resumed: Resumed, numbers: dict[str, float]) -> str:
    """Describe how the trainer differs from the files of its checkpoint, bit for bit; empty when it does not.

    `numbers` gets how much was compared and differs. Raises EngineError for files that cannot be read.
    """
    path, student = resumed.checkpoint, context.student
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
        f"{name} {found}, expected {stored[name]}"
        for name, found in (("step", context.step), ("row", context.position))
        if found != stored[name]
    ]
    with open_weights(path / "rng.safetensors") as file:
        random = [
            name
            for name in sorted({*file.tensors, *resumed.random})
            if name not in file.tensors
            or name not in resumed.random
            or not same_bits(file.get(name), resumed.random[name])
        ]
    parameters = dict(student.named_parameters())
    moments = _differing_moments(path, parameters, context.optimizer.state)
    counters = [name for name in moments if name.startswith("step/")]
    found = {
        "tensors": (len(tensors), _differing_tensors(path, tensors)),
        "moments": (2 * len(parameters), [name for name in moments if name not in counters]),
        "update counters": (len(parameters), counters),
        "random generators": (len(resumed.random), random),
    }
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


def _differing_tensors(
    path: Path, live: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
) -> list[str]:
    """Return the names of tensors that the checkpoint does not have, or not bit for bit; those it has are copied
    `into` tensors of the same names."""
    differing = []
    in_parts = "student/"
    with _stored(
        path, "student.safetensors", lambda name: name.startswith(in_parts), in_parts
    ) as stored_student:
        for name, tensor in live.items():
            stored = stored_student(name)
            stored = None if stored is None else stored.to(tensor.device)
            if not same_bits(stored, tensor):
                differing.append(name)
            if into is not None and stored is not None and stored.shape == tensor.shape:
                into[name].copy_(stored)
    return differing


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
