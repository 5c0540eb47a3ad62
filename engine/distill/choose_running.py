"""How layers, loss and update of a run are computed: compiled or not, packed or masked, by which kernels.

Each is decided from the spec, the shapes of the models and the device, before a weight is loaded, and
logged as it is decided. The reasons are those of the choosers (`engine.distill.choices`, `choose_loss`,
`engine.teachers.choose`); here they are asked with the facts of one run.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from engine.decision import Decision
from engine.distill.activations import linear_weights
from engine.distill.arithmetic import Arithmetic
from engine.distill.choices import choose_attention, choose_compile
from engine.distill.choose_loss import choose_loss_kernel
from engine.distill.inputs import Inputs
from engine.distill.optimizer import choose_update
from engine.kernels.dequantize import has_triton
from engine.kernels.small_m_table import MAX_ROWS, crossover_rows
from engine.models.config import ModelConfig
from engine.models.running import has_compiler
from engine.quant.blocks import BLOCK_TYPES
from engine.spec import RunSpec
from engine.teachers.choose import choose_kernel, choose_prefetch, choose_teacher_compile


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """How layers are run (`engine.models.running`)."""

    compiled: bool
    packed: bool
    teacher_packed: bool = False
    teacher_compiled: bool = False
    prefetches: bool = False


def choose_running(
    spec: RunSpec,
    inputs: Inputs,
    arithmetic: Arithmetic,
    precision: str,
    *,
    asks_teacher: bool = True,
) -> Generator[Decision, None, Running]:
    """Compiled or not, packed or masked. `precision` is the teacher's; where its outputs are stored
    (not `asks_teacher`), nothing of it is compiled or begun ahead.
    """
    device, capability = arithmetic.device.type, arithmetic.capability
    tokens_per_step = spec.train.rows * spec.train.accumulation * spec.data.seq_len

    def packed(knob: str, wanted: str, config: ModelConfig, products: str) -> Decision:
        return choose_attention(
            knob, wanted, config=config, device=device, precision=products, capability=capability
        )

    compiled = choose_compile(
        spec.student.compile,
        device=device,
        has_compiler=has_compiler(device),
        steps=spec.train.steps,
        tokens_per_step=tokens_per_step,
        layer_weights=linear_weights(inputs.student),
    )
    yield compiled
    attention = packed(
        "student.attention", spec.student.attention, inputs.student, arithmetic.precision
    )
    yield attention
    running = Running(compiled=compiled.choice == "on", packed=attention.choice == "packed")
    teacher = inputs.teacher if spec.has_teacher else None
    if teacher is None:
        return running
    products = "bf16" if precision == "fp8" else precision
    attention = packed("teacher.attention", spec.teacher.attention, teacher, products)
    yield attention
    running = replace(running, teacher_packed=attention.choice == "packed")
    if not asks_teacher:
        return running
    compiled = choose_teacher_compile(
        spec.teacher.compile,
        config=teacher,
        device=device,
        precision=precision,
        has_compiler=has_compiler(device),
        steps=spec.train.steps,
        tokens_per_step=tokens_per_step,
    )
    yield compiled
    prefetches = choose_prefetch(spec.teacher.prefetch, device=device)
    yield prefetches
    return replace(
        running,
        teacher_compiled=compiled.choice == "on",
        prefetches=prefetches.choice == "on",
    )


def loss_kernel(spec: RunSpec, arithmetic: Arithmetic) -> Decision:
    """How the loss is computed between its products."""
    return choose_loss_kernel(
        spec.loss.kernel,
        device=arithmetic.device.type,
        capability=arithmetic.capability,
        has_triton=has_triton(),
        divergence=spec.loss.divergence,
    )


def updating(spec: RunSpec, arithmetic: Arithmetic) -> Decision:
    """What makes an update of gradients."""
    return choose_update(
        spec.train.update,
        device=arithmetic.device.type,
        capability=arithmetic.capability,
        has_triton=has_triton(),
        ranks=spec.compute.gpus,
    )


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
