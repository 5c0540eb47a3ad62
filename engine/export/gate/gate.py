"""Define the subject of the gates: a spec, or a finished run with its spec. It loads once what several gates need:
the rows, the teacher as the run uses it, and their device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from engine.data.batches import Batch, Batches, heldout_rows
from engine.export.outcome import Outcome
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.plan.inputs import Inputs, check_inputs
from engine.runtime.device import choose_device, choose_precision
from engine.spec import RunSpec
from engine.teachers.backend import choose_teacher_precision
from engine.teachers.build import BuiltTeacher, build_teacher
from engine.verdict import Verdict, lowest

Say = Callable[[str], None]


def does_not_apply(id_: str, reason: str) -> Outcome:
    return Outcome(id=id_, verdict=None, reason=reason)


# contract: phase-gates-v1
def verdict_of(gates: Iterable[Outcome]) -> Verdict:
    """The lowest verdict of the gates that apply; unknown when none does."""
    return lowest(gate.verdict for gate in gates if gate.verdict is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    batches: Batches
    heldout: Batch


@dataclass(frozen=True, kw_only=True)
class Subject:
    spec: RunSpec
    run: RunFolder | None
    view: RunView | None
    evaluations: tuple[Path, ...] = ()
    say: Say = lambda text: None

    @cached_property
    def inputs(self) -> Inputs:
        return check_inputs(self.spec)

    @cached_property
    def device(self) -> torch.device:
        return torch.device(choose_device(self.spec.compute.device).choice)

    @cached_property
    def precision(self) -> str:
        """The precision of the student's matmuls."""
        return choose_precision(
            "student.precision", self.spec.student.precision, self.device.type
        ).choice

    @cached_property
    def teacher_precision(self) -> str:
        setting, is_cuda = self.spec.teacher.precision, self.device.type == "cuda"
        capability = torch.cuda.get_device_capability(self.device) if is_cuda else None
        return choose_teacher_precision(
            setting, device=self.device.type, capability=capability
        ).choice

    @cached_property
    def teacher_backend(self) -> str:
        """The backend that the run chose; for a spec, the one that it names, else `dequantized`."""
        for decision in () if self.view is None else self.view.decisions:
            if decision.knob == "teacher.backend" and decision.choice != "cached":
                return decision.choice
        return "quantized" if self.spec.teacher.backend == "quantized" else "dequantized"

    @cached_property
    def rows(self) -> Rows:
        """The rows that the run trains on, in its order, and those that it is evaluated on."""
        data = self.spec.data
        self.say("reading and tokenizing the corpus")
        tokens = self.inputs.load_tokens(data)
        batches = Batches(
            tokens.train,
            seq_len=data.seq_len,
            rows_per_batch=self.spec.train.rows,
            seed=self.spec.train.seed,
        )
        heldout = tokens.heldout
        return Rows(
            batches=batches, heldout=heldout_rows(heldout, data.seq_len, self.spec.eval.rows)
        )

    @cached_property
    def teacher(self) -> BuiltTeacher:
        """The teacher as the run uses it, cut to the student's vocabulary."""
        backend, precision = self.teacher_backend, self.teacher_precision
        self.say(f"loading the teacher: {self.spec.teacher.path} ({backend}, {precision})")
        return build_teacher(
            self.spec.teacher.path,
            backend=backend,
            precision=precision,
            device=self.device,
            student_vocab=self.inputs.student.vocab_size,
            probe=self.rows.heldout,
        )
