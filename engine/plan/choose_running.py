"""How layers, loss and update of a run are computed: compiled or not, packed or masked, by which kernels.

Each is decided from the spec, the shapes of the models and the device, before a weight is loaded, and
logged as it is decided. The reasons are those of the choosers (`engine.plan.choices`, `choose_loss`,
`engine.teachers.choose`); here they are asked with the facts of one run.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.decision import Decision
from engine.kernels.dequantize import has_triton
from engine.kernels.small_m_table import MAX_ROWS, crossover_rows
from engine.log.write import LogWriter
from engine.loss.types import LossKernel
from engine.models.config import ModelConfig
from engine.models.running import has_compiler
from engine.plan.activations import linear_weights
from engine.plan.choices import choose_attention, choose_compile
from engine.plan.choose_loss import choose_loss_kernel
from engine.plan.device import Arithmetic
from engine.plan.inputs import Inputs
from engine.quant.blocks import BLOCK_TYPES
from engine.spec import RunSpec
from engine.teachers.choose import choose_kernel, choose_prefetch, choose_teacher_compile
from engine.train import record
from engine.train.optimizer import choose_update


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """How layers are run (`engine.models.running`)."""

    compiled: bool
    packed: bool
    teacher_packed: bool
    teacher_compiled: bool
    prefetches: bool


def choose_running(
    log: LogWriter,
    spec: RunSpec,
    inputs: Inputs,
    arithmetic: Arithmetic,
    precision: str,
    *,
    asks_teacher: bool = True,
) -> Running:
    """Compiled or not, packed or masked. `precision` is the teacher's; where its outputs are stored
    (not `asks_teacher`), nothing of it is compiled or begun ahead.
    """
    device, capability = arithmetic.device.type, arithmetic.capability
    compiled = choose_compile(
        spec.student.compile,
        device=device,
        has_compiler=has_compiler(device),
        steps=spec.train.steps,
        tokens_per_step=spec.train.rows * spec.train.accumulation * spec.data.seq_len,
        layer_weights=linear_weights(inputs.student),
    )

    def packed(knob: str, wanted: str, config: ModelConfig, products: str) -> bool:
        decision = choose_attention(
            knob, wanted, config=config, device=device, precision=products, capability=capability
        )
        return record.decide(log, decision) == "packed"

    teacher = inputs.teacher if spec.has_teacher else None
    return Running(
        compiled=record.decide(log, compiled) == "on",
        packed=packed(
            "student.attention", spec.student.attention, inputs.student, arithmetic.precision
        ),
        teacher_packed=teacher is not None
        and packed(
            "teacher.attention",
            spec.teacher.attention,
            teacher,
            "bf16" if precision == "fp8" else precision,
        ),
        teacher_compiled=teacher is not None
        and asks_teacher
        and record.decide(
            log,
            choose_teacher_compile(
                spec.teacher.compile,
                config=teacher,
                device=device,
                precision=precision,
                has_compiler=has_compiler(device),
                steps=spec.train.steps,
                tokens_per_step=spec.train.rows * spec.train.accumulation * spec.data.seq_len,
            ),
        )
        == "on",
        prefetches=teacher is not None
        and asks_teacher
        and record.decide(log, choose_prefetch(spec.teacher.prefetch, device=device)) == "on",
    )


def loss_kernel(log: LogWriter, spec: RunSpec, arithmetic: Arithmetic) -> LossKernel:
    """How the loss is computed between its products."""
    decision = choose_loss_kernel(
        spec.loss.kernel,
        device=arithmetic.device.type,
        capability=arithmetic.capability,
        has_triton=has_triton(),
        divergence=spec.loss.divergence,
    )
    return "fused" if record.decide(log, decision) == "fused" else "eager"


def updating(log: LogWriter, spec: RunSpec, arithmetic: Arithmetic) -> str:
    """What makes an update of gradients."""
    decision = choose_update(
        spec.train.update,
        device=arithmetic.device.type,
        capability=arithmetic.capability,
        has_triton=has_triton(),
        ranks=spec.compute.gpus,
    )
    return record.decide(log, decision)


def kernel_for(
    wanted: str, teacher: ModelConfig, tokens: int, capability: tuple[int, int] | None
) -> Decision:
    """How a quantized teacher multiplies, said of its largest matrix in Q4_K."""
    major, minor = capability or (0, 0)
    shape = (teacher.intermediate_size, teacher.hidden_size)
    return choose_kernel(
        wanted,
        device="cpu" if capability is None else "cuda",
        tokens=tokens,
        fused_up_to=crossover_rows(BLOCK_TYPES["Q4_K"], *shape, arch=10 * major + minor),
        most=MAX_ROWS,
    )
