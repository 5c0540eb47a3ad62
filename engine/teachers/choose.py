"""Which teacher backend a run uses and in which arithmetic, and why. Pure: the numbers come from
whoever measured them.
"""

from __future__ import annotations

from engine.decision import SET_BY_USER, Decision
from engine.errors import BadInput
from engine.models.config import ModelConfig, count_parameters
from engine.models.packed_size import without_blocks
from engine.units import format_bytes, format_count

TF32_CAPABILITY = (8, 0)
"""The first compute capability with tf32 products."""


def choose_backend(
    wanted: str,
    *,
    config: ModelConfig | None,
    quantised_blocks: bool,
    dense_bytes: int,
    packed_bytes: int | None,
    available_bytes: int | None,
) -> Decision:
    """`config` is the teacher's, None where there is none to use.

    `dense_bytes` and `packed_bytes` are what the whole run needs at its peak with either teacher,
    `packed_bytes` None where the file has no blocks or nobody knows. Dense weights are the faster,
    so `auto` takes them where they fit in `available_bytes`. Where neither fits, `auto` still names
    a backend: refusing a run for its memory is the budget's part.

    Raises BadInput for `quantized` of a file without blocks.
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
    dense = f"with dense weights the run needs {_of(dense_bytes, available_bytes)}"
    if not quantised_blocks:
        packed = "the file has no quantized blocks"
    elif packed_bytes is None:
        packed = "with weights in blocks the run needs less"
    else:
        packed = f"with weights in blocks the run needs {_of(packed_bytes, available_bytes)}"
    fits = available_bytes is None or dense_bytes <= available_bytes
    choice = wanted if wanted != "auto" else "dequantized"
    if wanted == "auto" and not fits and quantised_blocks:
        choice = "quantized"
    weights = f"{format_count(count_parameters(config))} weights"
    if choice == "quantized":
        reason, other = f"{weights}: {packed}", "dequantized"
        why_not = dense if not fits else f"{dense}, and is faster"
    else:
        reason, other = f"{weights}: {dense}", "quantized"
        why_not = packed if not quantised_blocks else f"{packed}, and is slower"
        if not fits and not quantised_blocks:
            reason += f"; {packed}, so that there is no smaller way"
    if wanted == "auto" and available_bytes is None:
        reason += ", and how much there is is unknown"
    return Decision(
        knob="teacher.backend",
        choice=choice,
        reason=reason,
        rejected=((other, why_not), ("none", "a teacher is given")),
        overridden=wanted != "auto",
    )


def choose_kernel(
    wanted: str, *, device: str, tokens: int, fused_up_to: int, most: int
) -> Decision:
    """How a quantized teacher multiplies `tokens` rows.

    `fused_up_to` is the measured number of rows up to which multiplying out of the blocks is faster
    than making them dense first; `most` is what the fused kernels can take at all. Each product goes
    by its own shape; this is said of the largest. Raises BadInput for `fused` where it cannot run.
    """
    knob = "teacher.kernel"
    if device != "cuda":
        if wanted == "fused":
            raise BadInput.expected(
                knob, "fused", "a GPU", "a CPU", hint="`--set teacher.kernel=auto` runs anywhere"
            )
        why = "on a CPU blocks are made dense before a product"
    elif wanted == "fused" and tokens > most:
        raise BadInput.expected(
            knob,
            "fused",
            f"at most {most} rows in a forward pass",
            f"{tokens}: train.rows x data.seq_len",
            hint="`--set teacher.kernel=auto` makes blocks dense where there are more",
        )
    else:
        why = f"{tokens} rows in a forward pass, and fused products are faster up to {fused_up_to}"
    choice = wanted
    if wanted == "auto":
        choice = "fused" if device == "cuda" and tokens <= fused_up_to else "dequantize"
    other = "dequantize" if choice == "fused" else "fused"
    rejected = why if other == "fused" or device != "cuda" else "reads more for so few rows"
    return Decision(
        knob=knob,
        choice=choice,
        reason=why,
        rejected=((other, rejected),),
        overridden=wanted != "auto",
    )


def choose_teacher_precision(
    wanted: str, *, device: str, capability: tuple[int, int] | None
) -> Decision | None:
    """tf32, which teachers alone have; None for any other value, where `choose_precision` decides.

    `capability` is the GPU's, None on a CPU. Raises BadInput where there are no tf32 products.
    """
    if wanted != "tf32":
        return None
    if device != "cuda" or capability is None or capability < TF32_CAPABILITY:
        found = "a CPU" if capability is None else f"compute capability {_dotted(capability)}"
        raise BadInput.expected(
            "teacher.precision",
            "tf32",
            f"a GPU of compute capability {_dotted(TF32_CAPABILITY)} or later",
            found,
            hint="teacher.precision=fp32 is exact and runs anywhere",
        )
    return Decision(
        knob="teacher.precision",
        choice="tf32",
        reason=SET_BY_USER,
        rejected=(("fp32", "exact products, slower"), ("bf16", "half of the memory, rounded more")),
        overridden=True,
    )


def _of(needed_bytes: int, available_bytes: int | None) -> str:
    if available_bytes is None:
        return format_bytes(needed_bytes)
    return f"{format_bytes(needed_bytes)} of {format_bytes(available_bytes)} available"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
