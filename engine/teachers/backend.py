"""Choose what a teacher computes with: its backend, and the precision of its matmuls.

    dequantized   weights in the teacher's precision
    quantized     weights in their blocks, as the file has them: less memory, slower
    cached        no weights: outputs that were stored before are read (`engine.teachers.store`)
    none          no teacher: cross entropy alone

Each function is a chooser of `engine.plan.knobs`; `engine.teachers.build` makes what was chosen.
"""

from __future__ import annotations

from engine.decision import SET_BY_USER, Decision
from engine.errors import BadInput
from engine.models.config import ModelConfig, count_parameters
from engine.models.packed_size import without_blocks
from engine.runtime.device import Capability, choose_precision
from engine.units import format_capability, format_count, format_need

TF32_CAPABILITY = (8, 0)
"""The lowest compute capability with tf32 matmuls."""
FP8_CAPABILITY = (8, 9)
"""The lowest compute capability with fp8 matmuls."""


# contract: apr-distill-teacher-backend-selection-v1
def choose_backend(
    wanted: str,
    *,
    config: ModelConfig | None,
    quantised_blocks: bool,
    dense_bytes: int,
    packed_bytes: int | None,
    available_bytes: int | None,
    precision: str = "bf16",
    stored_words: str | None = None,
) -> Decision:
    """Choose the teacher's backend.

    `config` is the teacher's, None when none is used; `precision` is that of its matmuls. `stored_words`
    describes its stored outputs when they are to be read instead of computed.

    `dense_bytes` and `packed_bytes` are what the whole run needs at its peak with dequantised and with
    quantised weights; `packed_bytes` is None when the file has no quantised blocks. Dequantised weights are
    faster, so `auto` takes them if they fit in `available_bytes`. If neither fits, `auto` still names a backend:
    the memory budget refuses the run.

    fp8 weights are dequantised ones of a byte each: fp8 and `quantized` exclude each other.

    Raises BadInput for `quantized` with a file without quantised blocks, and, unless stored outputs are read, for
    `quantized` with precision fp8.
    """
    if config is None:
        why = "switched off by the user" if wanted == "none" else "no teacher.path is given"
        return Decision(
            knob="teacher.backend",
            choice="none",
            reason=f"{why}: the objective is cross entropy alone",
            rejected=(("dequantized", "needs teacher.path"), ("quantized", "needs teacher.path")),
            overridden=wanted == "none",
        )
    if wanted == "quantized" and not quantised_blocks:
        raise without_blocks("teacher.path")
    dense = f"with dense weights the run needs {format_need(dense_bytes, available_bytes)}"
    if stored_words is not None:
        return Decision(
            knob="teacher.backend",
            choice="cached",
            reason=stored_words,
            rejected=(
                ("dequantized", f"computes what is stored; {dense}"),
                ("none", "a teacher is given"),
            ),
            overridden=wanted == "cached",
        )
    if precision == "fp8":
        if wanted == "quantized":
            raise BadInput.expected(
                "teacher.backend",
                wanted,
                "dequantized, or auto: teacher.precision=fp8 makes 8-bit floats of all layers",
                "weights that would stay in their blocks",
                hint="`--set teacher.precision=bf16` keeps blocks",
            )
        return Decision(
            knob="teacher.backend",
            choice="dequantized",
            reason=f"layers in 8-bit floats, a byte a weight: {dense}",
            rejected=(
                ("quantized", "teacher.precision=fp8 makes 8-bit floats of blocks"),
                ("none", "a teacher is given"),
            ),
            impossible=("quantized",),
            overridden=wanted != "auto",
        )
    if packed_bytes is None:
        packed = "the file has no quantized blocks"
    else:
        packed = (
            f"with weights in blocks the run needs {format_need(packed_bytes, available_bytes)}"
        )
    fits = available_bytes is None or dense_bytes <= available_bytes
    choice = wanted if wanted != "auto" else "dequantized"
    if wanted == "auto" and not fits and quantised_blocks:
        choice = "quantized"
    weights = f"{format_count(count_parameters(config))} weights"
    if choice == "quantized":
        reason, rejected = f"{weights}: {packed}", "dequantized"
        why_not = dense if not fits else f"{dense}, and is faster"
    else:
        reason, rejected = f"{weights}: {dense}", "quantized"
        why_not = packed if not quantised_blocks else f"{packed}, and is slower"
        if not fits and not quantised_blocks:
            reason += f"; {packed}, so no smaller backend exists"
    if wanted == "auto" and available_bytes is None:
        reason += ", and the available memory is unknown"
    return Decision(
        knob="teacher.backend",
        choice=choice,
        reason=reason,
        rejected=((rejected, why_not), ("none", "a teacher is given")),
        impossible=() if quantised_blocks else ("quantized",),
        overridden=wanted != "auto",
    )


def choose_teacher_precision(wanted: str, *, device: str, capability: Capability) -> Decision:
    """Choose the teacher's precision: the student's options, and tf32 and fp8, which only teachers have.

    Raises BadInput when the device has no such matmuls.
    """
    knob = "teacher.precision"
    min_capability = {"tf32": TF32_CAPABILITY, "fp8": FP8_CAPABILITY}.get(wanted)
    if min_capability is None:
        return choose_precision(knob, wanted, device)
    if device != "cuda" or capability is None or capability < min_capability:
        found = (
            "a CPU" if capability is None else f"compute capability {format_capability(capability)}"
        )
        raise BadInput.expected(
            knob,
            wanted,
            f"a GPU of compute capability {format_capability(min_capability)} or later",
            found,
            hint="teacher.precision=fp32 is exact and runs anywhere",
        )
    rejected = {
        "tf32": (("fp32", "exact matmuls, slower"), ("bf16", "half of the memory, rounded more")),
        "fp8": (("bf16", "rounded less, 1.6 times the time and twice the memory of the layers"),),
    }
    fp8_reason = "what it costs is measured on held-out rows (check teacher_fp8_within_noise_floor)"
    return Decision(
        knob=knob,
        choice=wanted,
        reason=fp8_reason if wanted == "fp8" else SET_BY_USER,
        rejected=rejected[wanted],
        overridden=True,
    )
