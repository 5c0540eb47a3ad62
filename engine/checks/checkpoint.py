"""The check that a checkpoint is one: read back by another way than it was written, and run.

A run of 25 hours left a file of 200 bytes. Nobody had opened it before the run was over.
"""

# Shapes: B rows, T tokens

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.checks.check import Answer, failed, passed
from engine.checks.context import Context
from engine.checks.updates import Sample
from engine.errors import EngineError
from engine.formats.open import open_weights
from engine.models.decoder import Decoder
from engine.runtime.parts import read_parts
from engine.units import format_bytes

ROWS = 2


class CheckpointReloads:
    def __init__(self, context: Context) -> None:
        self.begun_step = context.step
        self.start = {n: Sample(p) for n, p in context.student.named_parameters()}

    @torch.no_grad()
    def at_checkpoint(self, context: Context, path: Path) -> Answer:
        student = context.student
        live = dict(student.named_parameters())
        size = sum(file.stat().st_size for file in path.iterdir())
        least = sum(p.numel() * p.element_size() for p in live.values())
        numbers: dict[str, float] = dict(size_bytes=size, least_bytes=least)
        if size < least:
            return failed(
                f"{path.name} has {format_bytes(size)}, the student's weights alone take "
                f"{format_bytes(least)}",
                **numbers,
            )
        with torch.device("meta"):
            copy = Decoder(student.config)
        copy.to_empty(device=context.device)
        # Attention over packed documents and over a mask round differently.
        copy.packed = student.packed
        try:
            differing = _read_into(copy, path, live)
        except EngineError as error:
            return failed(f"{path.name} cannot be read: {error}", **numbers)
        numbers["differing"] = len(differing)
        if differing:
            return failed(
                f"{path.name}: {len(differing)} of {len(live)} tensors are not the student's, first "
                f"{differing[0]}",
                **numbers,
            )
        batch = context.heldout[0]
        tokens_BT = torch.from_numpy(batch.tokens_BT[:ROWS]).to(context.device)
        documents_BT = torch.from_numpy(batch.documents_BT[:ROWS]).to(context.device)
        with context.autocast():
            same = torch.equal(
                student.logits(tokens_BT, documents_BT), copy.logits(tokens_BT, documents_BT)
            )
        if not same:
            return failed(f"{path.name}: the reloaded student gives other logits", **numbers)
        unchanged = [n for n, s in self.start.items() if torch.equal(s.of(live[n]), s.before)]
        numbers["unchanged"] = len(unchanged)
        if context.step > self.begun_step and len(unchanged) == len(live):
            return failed(f"{path.name} holds the weights that the run began with", **numbers)
        return passed(
            f"{path.name}, {format_bytes(size)}: the same {len(live)} tensors and logits, bit for bit",
            **numbers,
        )


def _read_into(copy: Decoder, path: Path, live: Mapping[str, torch.Tensor]) -> list[str]:
    """Fills `copy` from the checkpoint; the names of tensors that are missing or differ in a bit from
    the live ones."""
    differing = []
    with _stored_student(path) as stored_student:
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


@contextmanager
def _stored_student(path: Path) -> Iterator[Callable[[str], torch.Tensor | None]]:
    """Gives the student's tensors in a checkpoint by name; None for one that is not there."""
    if not (path / "student.safetensors").exists():
        parts = read_parts(path, lambda name: name.startswith("student/"))
        yield lambda name: parts.get(f"student/{name}")
        return
    with open_weights(path / "student.safetensors") as weights:

        def get(name: str) -> torch.Tensor | None:
            found = weights.get(name) if name in weights.tensors else None
            assert found is None or isinstance(found, torch.Tensor)
            return found

        yield get
