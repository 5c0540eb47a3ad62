"""A checkpoint read back by code other than its writer's and its restorer's, and compared with the run, bit for bit:

    weights      every tensor
    moments      every AdamW moment and update counter: without them a resumed run is a different run
    step, row    where a resumed run continues
    generators   of random numbers, after a resume
    kept         the checkpoints that are there, and which is the best, by the log alone
    on disk      whether the kernel has written every page of its files, and they are those of the log
    resumable    whether a resume would take it: its own reader is asked too, for everything but the numbers

`checkpoint_reloads` looks at each one, at some numbers of every tensor or at all (`Checks.at_checkpoint`);
`resume_continues` at the one that a session was restored from, as the last thing before its first step. Apart from
these, the next step depends only on values that are computed anew, so the resumed run takes the step that the other
would have taken. Of what is sharded each rank compares its own part.

The first check exists because a run of 25 hours left a file of 200 bytes, which nobody opened before the run was over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine import limits
from engine.checkpoint_folders import published, step_of
from engine.checks.check import Answer, Numbers
from engine.checks.context import Context
from engine.errors import EngineError
from engine.files import read_bytes, read_json, unwritten_pages
from engine.formats.open import open_weights
from engine.log.view import RunView
from engine.runtime.parts import read_parts
from engine.runtime.ranks import own_part, part_like
from engine.spec import RunSpec

ADAMW_KEYS = ("exp_avg", "exp_avg_sq", "step")
STUDENT_FILE, MANIFEST = "student.safetensors", "MANIFEST.json"
SAMPLED = 1024
"""Numbers of a tensor, evenly spread."""


@torch.no_grad()
def checkpoint_reloads(
    context: Context, path: Path, step: int, kept: Kept | None = None, *, sampled: bool = False
) -> Answer:
    """Compare the newest checkpoint with the run after `step`. `kept` is for the rank that keeps checkpoints; `sampled`
    compares some numbers of each tensor."""
    row = context.position + (step - context.step) * context.spec.rows_per_step
    numbers = Numbers(step=step, row=row)
    try:
        wrong = differences(context, path, numbers, step=step, row=row, sampled=sampled)
        if wrong:
            # No resume goes on from it.
            numbers["differs"] = 1
            return numbers.failed(f"{path.name} does not hold what the run has: {wrong}")
        if kept is not None:
            on_disk = [step_of(one) for one in published(path.parent)]
            state = read_json(path / "state.json", "checkpoint", limits.CHECKPOINT_STATE)
            best = state.get("best_held_out_loss")
            if wrong := (
                kept_wrongly(kept, on_disk, context.spec, best)
                or not_on_disk(path)
                or not_as_logged(path, kept.log)
            ):
                return numbers.failed(wrong)
            kept.check_resumable(path, digests=not sampled)
            if wrong := _of_another(state, context.spec):
                return numbers.failed(wrong)
    except EngineError as error:
        return numbers.failed(f"{path.name} cannot be read: {error}")
    return numbers.passed(
        f"{path.name}, read back: every tensor and moment, step {step} and row {row}, bit for bit"
    )


class Resumable(Protocol):
    """Raises CheckpointError where a resume would refuse the checkpoint in `path`; `digests`: every byte is read."""

    def __call__(self, path: Path, *, digests: bool) -> None: ...


class Kept(NamedTuple):
    """What says which checkpoints are to be there, and whether a resume would take one."""

    log: RunView
    before: Sequence[int]
    """The steps of those that were there before the newest was saved: others are gone for another reason."""
    check_resumable: Resumable


def not_on_disk(folder: Path) -> str:
    """Say which file of a folder would be lost with the power; empty where none would, or where nobody can tell."""
    for path in sorted(folder.iterdir()):
        if unwritten := unwritten_pages(path):
            return (
                f"{folder.name}/{path.name} is said to be saved, and {unwritten} pages of it are in memory alone: it "
                "was not synced"
            )
    return ""


def _of_another(state: Mapping[str, Any], spec: RunSpec) -> str:
    """Say that a state names another seed or other settings than the run has; empty when it does not."""
    for name, wanted in (("seed", spec.train.seed), ("spec_sha256", spec.sha256)):
        if state.get(name) != wanted:
            return f"state.json has {name} {state.get(name)}, the run {wanted}"
    return ""


def not_as_logged(folder: Path, log: RunView) -> str:
    """Say that the log has another size or manifest of a checkpoint than there is; empty when it has these, or none."""
    size = sum(one.stat().st_size for one in folder.iterdir())
    raw = read_bytes(folder / MANIFEST, "checkpoint", limits.MANIFEST)
    sha256 = hashlib.sha256(raw).hexdigest()
    for one in log.checkpoints[-1:]:
        if Path(one.path).name != folder.name:
            return ""
        if one.size_bytes != size:
            return f"{folder.name} has {size:,} bytes, the log says {one.size_bytes:,.0f}"
        if one.manifest_sha256 != sha256:
            return f"{folder.name}/{MANIFEST} has the hash {sha256}, the log says {one.manifest_sha256}"
    return ""


def kept_wrongly(kept: Kept, on_disk: Sequence[int], spec: RunSpec, best_loss: float | None) -> str:
    """Say what is wrong with the checkpoints of a run by its log; empty when nothing is. `best_loss` is what the newest
    one has as the lowest held-out loss so far.

    The best one has the lowest held-out loss of those that were evaluated and saved at the same step, the first of
    equals. It and the newest `checkpoint.keep_last` are kept. Those of earlier sessions are taken as they are said.
    """
    log = kept.log
    loss_at = {e.step: e.loss for e in log.evals if e.subject == "student" and not e.saved}
    began_at = (log.started.resumed_from if log.started else None) or 0
    best: int | None = None
    for one in log.checkpoints:
        loss = loss_at.get(one.step)
        lowest = None if best is None else loss_at.get(best)
        better = loss is not None and (lowest is None or loss < lowest)
        every = spec.checkpoint.every
        if loss is None and one.step > began_at and every and one.step % every == 0:
            return f"the log has no held-out loss of step {one.step}, which is saved to be one of the best"
        if one.step <= began_at:
            better = one.best
        elif one.best != better:
            said = "is kept as the best" if one.best else "is not kept as the best"
            other = "" if best is None else f", that of step {best} {lowest}"
            return f"step {one.step} {said}, and its held-out loss in the log is {loss}{other}"
        best = one.step if better else best
    if best in loss_at and best_loss != loss_at[best]:
        return (
            f"the newest has {best_loss} as the lowest held-out loss so far, the log {loss_at[best]} of step {best}: a "
            "resume would take another for the best"
        )
    steps = list(dict.fromkeys(one.step for one in log.checkpoints))
    due = {*steps[-spec.checkpoint.keep_last :], *([] if best is None else [best])}
    if gone := sorted((due & {*kept.before, *steps[-1:]}) - {*on_disk}):
        return f"step {gone[0]} is gone; the newest (checkpoint.keep_last) and the best are {sorted(due)}"
    if extra := sorted({*steps} & {*on_disk} - due):
        return f"{len(extra)} checkpoints are not deleted (checkpoint.keep_last), first that of step {extra[0]}"
    return ""


@torch.no_grad()
def resume_continues(context: Context) -> Answer:
    step, row, resumed = context.step, context.position, context.resumed
    numbers = Numbers(step=step, position=row, expected=step * context.spec.rows_per_step)
    if step == 0:
        return numbers.passed("the run begins at step 0: there is nothing to continue")
    if resumed is None:
        return numbers.unknown(f"step {step}, and nothing says which checkpoint it is from")
    path = resumed.checkpoint
    if (newest := max(map(step_of, published(path.parent)), default=step)) > step:
        return numbers.failed(
            f"the run goes on from step {step}, and has a checkpoint of step {newest}"
        )
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
    sampled: bool = False,
) -> str:
    """Describe how the run differs from the files of a checkpoint, bit for bit (`sampled`: in some numbers of each
    tensor); empty when it does not. Of what is sharded this rank's part is compared.

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
    found: dict[str, tuple[int, list[str]]] = {}
    # Parts of several files are put together whole, which takes their whole size once more.
    if not sampled or (path / STUDENT_FILE).exists():
        found["tensors"] = (len(tensors), _differing_tensors(path, tensors, sampled))
        parameters = dict(student.named_parameters())
        moments = _differing_moments(path, parameters, held, sampled)
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


def same_part(stored: Tensor | None, live: Tensor, sampled: bool) -> bool:
    """Return whether a whole tensor of a file has the bits that this rank has of `live`."""
    if stored is None or stored.shape != live.shape:
        return False
    found, wanted = part_like(stored, live).reshape(-1), own_part(live.detach()).reshape(-1)
    if sampled:
        every = max(1, wanted.numel() // SAMPLED)
        found, wanted = found[::every].contiguous(), wanted[::every].contiguous()
    return same_bits(found.to(wanted.device), wanted)


def _differing_tensors(path: Path, live: Mapping[str, Tensor], sampled: bool) -> list[str]:
    """Return the names of tensors that the checkpoint does not have, or not bit for bit."""
    with _stored(path, STUDENT_FILE, "student/") as stored:
        return [
            name for name, tensor in live.items() if not same_part(stored(name), tensor, sampled)
        ]


def _differing_moments(
    path: Path,
    live: Mapping[str, Tensor],
    held: Mapping[Tensor, Mapping[str, Tensor]],
    sampled: bool,
) -> list[str]:
    """Return the names of AdamW's values, of the checkpoint or of `held`, that the other does not have bit for bit."""
    differing = []
    with _stored(path, "optimizer.safetensors") as stored:
        for name, parameter in live.items():
            moments = held.get(parameter, {})
            for key in dict.fromkeys((*ADAMW_KEYS, *moments)):
                found, moment = stored(f"{key}/{name}"), moments.get(key)
                if found is None and moment is None:
                    continue  # not moved yet, or frozen
                if moment is None or not same_part(found, moment, sampled):
                    differing.append(f"{key}/{name}")
    return differing


@contextmanager
def _stored(path: Path, file: str, prefix: str = "") -> Iterator[Callable[[str], Tensor | None]]:
    """Yield a function that returns a tensor of a checkpoint's `file` by name, or None. In a checkpoint that every rank
    wrote a part of, names begin with `prefix`, and one tensor at a time is put together."""
    if not (path / file).exists():

        def part(name: str) -> Tensor | None:
            return read_parts(path, lambda one: one == prefix + name).get(prefix + name)

        yield part
        return
    with open_weights(path / file) as weights:

        def get(name: str) -> Tensor | None:
            found = weights.get(name) if name in weights.tensors else None
            assert found is None or isinstance(found, Tensor)
            return found

        yield get
