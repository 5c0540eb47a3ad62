"""Which teacher backend a run uses and in which arithmetic, and why. Pure: the numbers come from
whoever measured them.
"""

from __future__ import annotations

from engine.decision import SET_BY_USER, Decision
from engine.errors import BadInput
from engine.models.config import ModelConfig, count_parameters
from engine.models.packed_size import without_blocks
from engine.units import format_bytes, format_count, format_seconds

TF32_CAPABILITY = (8, 0)
"""The first compute capability with tf32 products."""
FP8_CAPABILITY = (8, 9)
"""The first with products of 8-bit floats."""
COMPILE_S = 10.0
"""Compiling one layer with nothing in a cache, 3 to 5 s on the machine of an H200, and the comparison."""
SAVED_S_PER_TOKEN_AND_COLUMN = 21.5e-3 / 8192 / (28 * (3584 + 18944))
"""What compiling saves, by tokens, layers and their columns (model and feed-forward width): of memory
traffic between products. Measured for a Qwen2.5-7B's shape, 8 x 1024 tokens in bf16 on an H200: 178.1 ms
as written, 156.6 ms compiled. A slower GPU saves more."""
PREFETCH_GAIN = "0.5 % of a step (7B teacher, 0.5B student, 8 x 1024 tokens on an H200)"


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
    stored: str | None = None,
) -> Decision:
    """`config` is the teacher's, None where there is none to use; `precision` its arithmetic. `stored`
    says in words what there is of its outputs, where they are to be read and not computed.

    `dense_bytes` and `packed_bytes` are what the whole run needs at its peak with either teacher,
    `packed_bytes` None where the file has no blocks or nobody knows. Dense weights are the faster,
    so `auto` takes them where they fit in `available_bytes`. Where neither fits, `auto` still names
    a backend: refusing a run for its memory is the budget's part.

    Weights in 8-bit floats are dense ones of a byte each: fp8 and `quantized` exclude each other.

    Raises BadInput for `quantized` of a file without blocks, and of one in fp8.
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
    if stored is not None:
        return Decision(
            knob="teacher.backend",
            choice="cached",
            reason=stored,
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
            overridden=wanted != "auto",
        )
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
    """tf32 and fp8, which teachers alone have; None for any other value, where `choose_precision`
    decides.

    `capability` is the GPU's, None on a CPU. Raises BadInput where there are no such products.
    """
    least = {"tf32": TF32_CAPABILITY, "fp8": FP8_CAPABILITY}.get(wanted)
    if least is None:
        return None
    if device != "cuda" or capability is None or capability < least:
        found = "a CPU" if capability is None else f"compute capability {_dotted(capability)}"
        raise BadInput.expected(
            "teacher.precision",
            wanted,
            f"a GPU of compute capability {_dotted(least)} or later",
            found,
            hint="teacher.precision=fp32 is exact and runs anywhere",
        )
    rejected = {
        "tf32": (("fp32", "exact products, slower"), ("bf16", "half of the memory, rounded more")),
        "fp8": (("bf16", "rounded less, 1.6 times the time and twice the memory of the layers"),),
    }
    reason = SET_BY_USER
    if wanted == "fp8":
        reason = "what it costs is measured on held-out rows (check teacher_fp8_within_noise_floor)"
    return Decision(
        knob="teacher.precision",
        choice=wanted,
        reason=reason,
        rejected=rejected[wanted],
        overridden=True,
    )


def choose_teacher_compile(
    wanted: str,
    *,
    config: ModelConfig,
    device: str,
    precision: str,
    has_compiler: bool,
    steps: int,
    tokens_per_step: int,
) -> Decision:
    """Whether the teacher's layers are compiled. `steps` are those of the whole run, so that a resumed
    run decides as it did; `has_compiler`: whether torch.compile can make code for the device here.

    Raises BadInput for `on` where it cannot.
    """
    knob = "teacher.compile"
    columns = config.num_hidden_layers * (config.hidden_size + config.intermediate_size)
    saved_s = steps * tokens_per_step * columns * SAVED_S_PER_TOKEN_AND_COLUMN
    sums = (
        f"{format_count(steps)} steps of {format_count(tokens_per_step)} tokens save about "
        f"{format_seconds(saved_s)}, compiling costs about {format_seconds(COMPILE_S)}"
    )
    why_not = None
    if not has_compiler:
        why_not = "torch.compile finds no compiler for this device (Triton on a GPU, g++ on a CPU)"
        if wanted == "on":
            raise BadInput.expected(
                knob, "on", "a compiler", why_not, hint="`--set teacher.compile=off` needs none"
            )
    elif device != "cuda":
        why_not = "on a CPU the products are most of the time, and they stay as they are"
    elif precision == "fp8":
        sums = "as written, rounding activations to 8 bits takes longer than it saves"
    elif saved_s < COMPILE_S:
        why_not = sums
    choice = wanted if wanted != "auto" else ("off" if why_not else "on")
    other = "off" if choice == "on" else "on"
    rejected = why_not or ("more kernels and more memory traffic" if choice == "on" else sums)
    return Decision(
        knob=knob,
        choice=choice,
        reason=(why_not or sums) if wanted == "auto" else SET_BY_USER,
        rejected=((other, rejected),),
        overridden=wanted != "auto",
    )


def choose_prefetch(wanted: str, *, device: str) -> Decision:
    """Whether the teacher begins with the next batch while the optimizer steps."""
    knob = "teacher.prefetch"
    if device != "cuda":
        why_not = "a CPU has one queue of work: nothing would run beside anything"
    else:
        why_not = f"measured gain: {PREFETCH_GAIN}; its temporaries serve nothing else"
    choice = "on" if wanted == "on" else "off"
    return Decision(
        knob=knob,
        choice=choice,
        reason=why_not if wanted == "auto" else SET_BY_USER,
        rejected=(("off" if choice == "on" else "on", why_not),),
        overridden=wanted != "auto",
    )


def _of(needed_bytes: int, available_bytes: int | None) -> str:
    if available_bytes is None:
        return format_bytes(needed_bytes)
    return f"{format_bytes(needed_bytes)} of {format_bytes(available_bytes)} available"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
