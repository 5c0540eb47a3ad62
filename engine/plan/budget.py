"""`MemoryBudget`: the bytes a run will need on its device, item by item, known before anything is there.

A run passes through phases, and not everything is alive in each: the teacher's temporaries are gone
before the student's activations grow, and those are gone when the optimizer steps. So each item
says in which phases it is alive, a phase needs the sum of its items, and the run needs the largest
of these sums. The table marks what is alive in that phase.

    memory on cuda: 24.1 GiB at its peak (loss), of 138.2 GiB that are there (cuMemGetInfo free)

      item                        GiB  at peak  how
      teacher weights         14.190     *      7.62G numbers of 2 bytes
      ...

A budget that does not fit is refused, with every setting that would make it fit or bring it nearer.
What is there and not measured is not 0: nothing is refused then, and the table says why.

`engine.plan.memory_model` predicts one. Nothing here loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import BadInput
from engine.machine.reading import Reading, event_fields
from engine.units import format_bytes

PHASES = (
    "teacher evaluation",
    "teacher forward",
    "loss",
    "backward",
    "last gradients",
    "evaluation",
)
"""In the order of a run. The first is before the first step, the last after any step; a student's
forward pass needs least and is not one; the optimizer's step is less than the evaluation after it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetItem:
    name: str
    bytes: int
    how: str
    """The arithmetic in words."""
    phases: tuple[str, ...] = PHASES
    """Those in which it is alive."""
    lasting: bool = False
    """Whether it stays once it is there. What passes is made anew in each step or evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A change of settings and what the run would need with it."""

    settings: tuple[str, ...]
    """As on the command line: `train.rows=2`."""
    total_bytes: int
    saved_bytes: int
    fits: bool

    @property
    def text(self) -> str:
        settings = " ".join(f"--set {setting}" for setting in self.settings)
        end = "fits" if self.fits else "not enough alone"
        return (
            f"{settings}: {format_bytes(self.saved_bytes)} less, "
            f"{format_bytes(self.total_bytes)} in all: {end}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    device: str
    items: tuple[BudgetItem, ...]
    available: Reading
    """Bytes that this run may take, read when nothing of it was on the device yet."""
    knobs: tuple[Knob, ...] = ()
    """What would need less; only where the budget does not fit."""

    def bytes_in(self, phase: str) -> int:
        return sum(item.bytes for item in self.items if phase in item.phases)

    @property
    def peak_phase(self) -> str:
        """The phase that needs most; the earliest of equals."""
        return max(PHASES, key=self.bytes_in)

    @property
    def total_bytes(self) -> int:
        return self.bytes_in(self.peak_phase)

    @property
    def fits(self) -> bool | None:
        """None when nobody knows what is there."""
        available = self.available.number
        return None if available is None else self.total_bytes <= available

    def lines(self) -> list[str]:
        """The table for people."""
        peak = self.peak_phase
        there = (
            f"of what is there: {self.available}"
            if self.available.value is None
            else f"of {format_bytes(self.available.number)} that are there"
        )
        out = [
            f"memory on {self.device}: {format_bytes(self.total_bytes)} at its peak ({peak}), "
            f"{there} ({self.available.source})",
            "",
        ]
        width = max(len(item.name) for item in self.items)
        out.append(f"  {'item':{width}}  {'size':>10}  at peak  how")
        for item in sorted(self.items, key=lambda item: (not item.lasting, -item.bytes)):
            mark = "*" if peak in item.phases else " "
            size = format_bytes(item.bytes)
            out.append(f"  {item.name:{width}}  {size:>10}     {mark}     {item.how}")
        out += ["", f"  {'phase':{width}}  {'size':>10}"]
        out += [f"  {p:{width}}  {format_bytes(self.bytes_in(p)):>10}" for p in PHASES]
        return out

    def as_fields(self) -> dict[str, float | int | str | None]:
        """Flat fields for one log line."""
        fields: dict[str, float | int | str | None] = {
            "device": self.device,
            "total_bytes": self.total_bytes,
            "peak_phase": self.peak_phase,
        }
        fields |= event_fields("available_bytes", self.available)
        for item in self.items:
            fields[f"{_key(item.name)}_bytes"] = item.bytes
        for phase in PHASES:
            fields[f"phase_{_key(phase)}_bytes"] = self.bytes_in(phase)
        return fields

    def refuse_if_too_big(self) -> None:
        """Raises BadInput, with the table and the knobs, when the run needs more than is there."""
        if self.fits is not False:
            return
        lines = [*self.lines(), "", "  what would need less:"]
        lines += [f"    {knob.text}" for knob in self.knobs] or ["    a smaller model"]
        raise BadInput(
            f"memory: {self.device} — expected a run that fits in "
            f"{format_bytes(self.available.number)}, found one of "
            f"{format_bytes(self.total_bytes)}\n" + "\n".join(lines),
            hint=_hint(self.knobs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """The prediction beside what was measured."""

    predicted_bytes: int
    measured_bytes: int | None
    measured_source: str
    ratio: float | None
    """Predicted over measured: above 1 when the budget asked for too much."""
    absent: str | None
    """Why nothing was measured."""

    @property
    def text(self) -> str:
        found = format_bytes(self.measured_bytes) if self.absent is None else self.absent
        ratio = "" if self.ratio is None else f", {100 * (self.ratio - 1):+.1f} %"
        return f"memory: {format_bytes(self.predicted_bytes)} predicted, {found} measured{ratio}"


def compare(budget: MemoryBudget, measured: Reading) -> MeasuredMemory:
    """The budget beside the peak that `measured` found."""
    found = measured.number
    return MeasuredMemory(
        predicted_bytes=budget.total_bytes,
        measured_bytes=None if found is None else int(found),
        measured_source=measured.source,
        ratio=budget.total_bytes / found if found else None,
        absent=measured.absent,
    )


def _hint(knobs: tuple[Knob, ...]) -> str:
    fitting = [knob for knob in knobs if knob.fits]
    if fitting:
        best = " ".join(f"--set {setting}" for setting in fitting[0].settings)
        return f"`{best}` makes it fit"
    return "no setting makes it fit; a smaller teacher or student, or a smaller data.seq_len, needs less"


def _key(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
