"""Everything that is decided about a run before a weight of it is loaded, in the order in which one decision
needs another.

    teacher's outputs stored?  ->  its precision  ->  kernel of the loss  ->  how layers run  ->  memory
                                                                              ->  its kernel

All of it comes out of the spec, the headers of files and the device, so a run that cannot be is refused in
the first second; each decision is logged as it is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.data.tokens import TokenStream
from engine.log.write import LogWriter
from engine.loss.types import LossKernel
from engine.plan.choose_running import Running, choose_running, kernel_for, loss_kernel
from engine.plan.device import Arithmetic
from engine.plan.fitting import Fitted
from engine.plan.inputs import Inputs
from engine.plan.memory_decisions import plan_memory
from engine.runtime.device import choose_precision
from engine.spec import RunSpec
from engine.teachers.choose import choose_teacher_precision
from engine.teachers.store.manifest import HIDDEN
from engine.train import record
from engine.train.prepared import Stored, find_stored


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
    log: LogWriter, spec: RunSpec, inputs: Inputs, arithmetic: Arithmetic, stream: TokenStream
) -> Plan:
    """`stream` are the tokens of training, whose rows a store must have. Raises CacheError for a store that
    is not this run's, BadInput for a run that does not fit into memory.
    """
    stored = find_stored(spec, inputs, stream)
    precision = _precision(log, spec, arithmetic, stored)
    kernel = loss_kernel(log, spec, arithmetic)
    running = choose_running(log, spec, inputs, arithmetic, precision, asks_teacher=stored is None)
    fitted = plan_memory(
        log,
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
        record.decide(
            log, kernel_for(spec.teacher.kernel, inputs.teacher, tokens, arithmetic.capability)
        )
    return Plan(
        stored=stored, precision=precision, loss_kernel=kernel, running=running, fitted=fitted
    )


def _precision(log: LogWriter, spec: RunSpec, arithmetic: Arithmetic, stored: Stored | None) -> str:
    """Of the teacher: where its outputs are stored, the one that they were made in."""
    if stored is not None:
        return record.decide(log, stored.precision)
    if not spec.has_teacher:
        return "fp32"
    device = arithmetic.device.type
    choice = choose_teacher_precision(
        spec.teacher.precision, device=device, capability=arithmetic.capability
    ) or choose_precision("teacher.precision", spec.teacher.precision, device)
    return record.decide(log, choice)
