"""The check that a checkpoint is usable: it is read back by code other than the writer's, and run.

    weights      every tensor, and the logits of held-out rows with the reloaded tensors, bit for bit
    moments      every AdamW moment, bit for bit: without them a resumed run is a different run
    step, row    where a resumed run would continue

Apart from these, the next step depends only on values that are computed anew. So a run resumed from these
bytes takes the same step as this run. Moments of a student that is sharded over several GPUs are not
compared.

This check exists because a run of 25 hours left a file of 200 bytes, which nobody opened before the run
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
from engine.checks.context import Context
from engine.errors import BadInput, EngineError
from engine.files import read_json
from engine.formats.open import open_weights
from engine.models.decoder import Decoder
from engine.models.load import empty_decoder
from engine.runtime.parts import read_parts
from engine.runtime.ranks import own_part
from engine.units import format_bytes

ROWS = 2
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
            differing = _read_into(copy, path, live)
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
            differing = _differing_moments(path, {name: held[p] for name, p in live.items()})
        except EngineError as error:
            return f"moments cannot be read: {error}"
        numbers["moments_differing"] = len(differing)
        if differing:
            return f"{len(differing)} moments are not the optimizer's, first {differing[0]}"
        return ""


def _read_into(copy: Decoder, path: Path, live: Mapping[str, Tensor]) -> list[str]:
    """Fill `copy` from the checkpoint; return the names of tensors that are missing or not bit-identical."""
    differing = []
    in_parts = "student/"
    with _stored(
        path, "student.safetensors", lambda name: name.startswith(in_parts), in_parts
    ) as stored_student:
        for name, target in copy.named_parameters():
            stored = stored_student(name)
            if stored is None:
                differing.append(name)
                continue
            if stored.shape != target.shape or stored.dtype != target.dtype:
                differing.append(name)
                continue
            target.copy_(stored)
            if not torch.equal(target, live[name]):
                differing.append(name)
    return differing


def _differing_moments(path: Path, held: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Return the names of moments that are missing from the checkpoint or differ."""
    differing = []
    with _stored(
        path, "optimizer.safetensors", lambda name: not name.startswith("student/")
    ) as stored_moment:
        for name, moments in held.items():
            for key, moment in moments.items():
                stored = stored_moment(f"{key}/{name}")
                if stored is None or not torch.equal(stored.to(moment.device), moment):
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
