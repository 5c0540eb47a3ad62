"""Keep one row of one tensor of the student through every step, another one at each, with its gradient and moments.

An audited step is looked at as a whole, but there are few of them. What goes wrong in between and is right again where
an audit looks (moments that something clears, another clipping of large gradients, an update that is left out) is in
most or all tensors, so a row shows it at the steps where it happens. It costs five small kernels and one copy to the
host, which nobody waits for: the row is judged when the step's numbers are read. Of the first steps
of a session all are looked at, then one in each second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.audit.observed import ObservedParameter
from engine.runtime.ranks import own_part
from engine.train.step import StepObserver
from engine.train.trainer import Trainer

MOST_NUMBERS = 1024
"""Of a row."""
ALL_UNTIL = 32
"""Steps of a session that are all looked at."""
LEAST_S = 1.0
"""Between two steps that are looked at after that: one takes a millisecond of the device and some of the host."""
STRIDE = 7919
"""Rows between that of one step and of the next, a prime: all are met in the course of a run."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A row on its way to the host."""

    name: str
    place: int
    numbers: int
    decays: bool
    parts: list[int]
    """How many numbers there are of what was left, found and made of it; of a part without moments one row."""
    on_host: Tensor
    copied: torch.cuda.Event | None


class SampledUpdates(StepObserver):
    """Observes every step of a trainer, from the next one on."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        parameters = trainer.student.named_parameters()
        self._parameters = [(name, p) for name, p in parameters if p.requires_grad]
        self._rows: dict[int, _Row] = {}
        self._all_until, self._every = trainer.step + ALL_UNTIL, 1
        self._left: Tensor | None = self._taken(trainer.step + 1)
        """As the step before left it."""
        self._found: Tensor | None = None
        """As the update finds it, with its gradient."""
        trainer.observers = (*trainer.observers, self)

    @torch.no_grad()
    def gradients(self, step: int) -> None:
        gradient = self._of(step)[1].grad if self._left is not None else None
        self._found = None if gradient is None else self._taken(step, gradient)

    @torch.no_grad()
    def updated(self, step: int) -> None:
        name, p = self._of(step)
        left, found = self._left, self._found
        follows = step < self._all_until or (step + 1) % self._every == 0
        self._left = self._taken(step + 1) if follows else None
        if left is None or found is None or not len(found):
            return
        held = [left, found, self._taken(step)]
        on_host = torch.cat(held).to("cpu", non_blocking=True)
        copied = None
        if on_host.device != p.device:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._rows[step] = _Row(
            name=name,
            place=self._row_of(p, step),
            numbers=p.numel(),
            decays=p.ndim >= 2,
            parts=[len(part) for part in held],
            on_host=on_host,
            copied=copied,
        )

    def _of(self, step: int) -> tuple[str, Tensor]:
        return self._parameters[step % len(self._parameters)]

    @staticmethod
    def _row_of(p: Tensor, step: int) -> int:
        own = own_part(p)
        return step * STRIDE % len(own) if own.ndim >= 2 and len(own) else 0

    def _taken(self, step: int, gradient: Tensor | None = None) -> Tensor:
        """Return a copy of the step's row: of its gradient, of the weight and of what the optimizer has of it, one
        after the other, and the optimizer's count of updates where it has one."""
        _, p = self._of(step)
        if not own_part(p).numel():  # a rank may have no part of a small tensor
            return torch.empty(0, device=p.device)
        state = self._trainer.optimizer.state.get(p)
        tensors = [] if gradient is None else [gradient]
        tensors += [p, state["exp_avg"], state["exp_avg_sq"]] if state else [p]
        rows = [own_part(one) for one in tensors]
        if p.ndim >= 2:
            place = self._row_of(p, step)
            rows = [one[place].reshape(-1) for one in rows]
        rows = [one[:MOST_NUMBERS].float() for one in rows]
        if state:
            rows.append(own_part(state["step"]).reshape(1).to(p.device))
        return torch.cat(rows)

    def pace(self, step_s: float) -> None:
        """Say how long a step takes."""
        self._every = max(1, round(LEAST_S / max(step_s, 1e-3)))

    def take(self, step: int) -> tuple[ObservedParameter, Sequence[str]] | None:
        """Return the row of a step that is done, and the names of what changed of it between the step before and this
        one; None where the tensor had no gradient. Waits until it is on the host, as the step's numbers are."""
        one = self._rows.pop(step, None)
        if one is None:
            return None
        if one.copied is not None:
            one.copied.synchronize()
        left, found, made = one.on_host.split(one.parts)  # type: ignore[no-untyped-call]
        width = (len(made) - 1) // 3
        gradient, found = found[:width], found[width:]
        has_moments = len(found) > width
        names = ["", "exp_avg of ", "exp_avg_sq of ", "step of "]
        pairs = zip(names, left.split(width), found.split(width), strict=False)
        changed = [f"{prefix}{one.name}" for prefix, a, b in pairs if not torch.equal(a, b)]

        def part(of: Tensor, number: int) -> Tensor:
            row = of[number * width : (number + 1) * width]
            return row[None] if one.decays else row

        row = ObservedParameter(
            name=one.name,
            rows_R=torch.tensor([one.place]) if one.decays else torch.arange(width),
            before=part(found, 0),
            after=part(made, 0),
            gradient=part(gradient, 0),
            moments_before=(part(found, 1), part(found, 2)) if has_moments else None,
            moments_after=(part(made, 1), part(made, 2)),
            updates=(int(found[-1]) if has_moments else 0, int(made[-1])),
            numbers=one.numbers,
            decays=one.decays,
        )
        return row, changed
