"""Everything that is decided about a run before a weight of it is loaded, in the order in which one decision
needs another.

    teacher's outputs stored?  ->  its precision  ->  kernel of the loss  ->  how layers run  ->  memory
                                                                              ->  its kernel

All of it comes out of the spec, the headers of files and the device, so a run that cannot be is refused in
the first second; each decision is yielded as it is made.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from engine.data.tokens import TokenStream
from engine.decision import Decision
from engine.distill.arithmetic import Arithmetic
from engine.distill.budget import MemoryBudget
from engine.distill.choose_running import Running, choose_running, kernel_for, loss_kernel
from engine.distill.fitting import Fitted
from engine.distill.inputs import Inputs
from engine.distill.loss_job import LossKernel
from engine.distill.memory_decisions import plan_memory
from engine.distill.prepared import Stored, find_stored
from engine.runtime.device import choose_precision
from engine.spec import RunSpec
from engine.teachers.cache_rows import HIDDEN
from engine.teachers.choose import choose_teacher_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    stored: Stored | None
    """The store that stands in for the teacher, where the run reads one."""
    precision: str
    """Of the teacher's products."""
    loss_kernel: LossKernel
    running: Running
    fitted: Fitted

    @property
    def sparse(self) -> bool:
        """Whether the teacher gives some ids of each token, and no hidden states."""
        return self.stored is not None and self.stored.identity.form != HIDDEN


def plan_run(
    spec: RunSpec, inputs: Inputs, arithmetic: Arithmetic, stream: TokenStream
) -> Generator[Decision | MemoryBudget, None, Plan]:
    """`stream` are the tokens of training, whose rows a store must have. Raises CacheError for a store that
    is not this run's, BadInput for a run that does not fit into memory.
    """
    stored = find_stored(spec, inputs, stream)
    precision = "fp32"
    if (decided := _precision(spec, arithmetic, stored)) is not None:
        yield decided
        precision = decided.choice
    loss = loss_kernel(spec, arithmetic)
    yield loss
    kernel: LossKernel = "fused" if loss.choice == "fused" else "eager"
    running = yield from choose_running(
        spec, inputs, arithmetic, precision, asks_teacher=stored is None
    )
    fitted = yield from plan_memory(
        spec,
        inputs,
        arithmetic,
        precision,
        running,
        stored,
        fused_loss=kernel == "fused",
    )
    if stored is None and fitted.backend == "quantized" and inputs.teacher is not None:
        tokens = spec.train.rows * spec.data.seq_len
        yield kernel_for(spec.teacher.kernel, inputs.teacher, tokens, arithmetic.capability)
    return Plan(
        stored=stored, precision=precision, loss_kernel=kernel, running=running, fitted=fitted
    )


def _precision(spec: RunSpec, arithmetic: Arithmetic, stored: Stored | None) -> Decision | None:
    """Of the teacher: where its outputs are stored, the one that they were made in. None without one."""
    if stored is not None:
        return stored.precision
    if not spec.has_teacher:
        return None
    device = arithmetic.device.type
    return choose_teacher_precision(
        spec.teacher.precision, device=device, capability=arithmetic.capability
    ) or choose_precision("teacher.precision", spec.teacher.precision, device)
