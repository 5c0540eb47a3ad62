"""How a student's layers are run, and why. Pure: facts come in, Decisions go out.

    student.compile         one compilation against what it saves in all steps of the run
    student.graphs          only where it is asked for: it saves gaps between kernels, and costs memory
    student.attention       packed wherever there is a kernel for it; the same for teacher.attention
    student.checkpointing   only for a run that does not fit without it and fits with it

What compiling saves was measured for Qwen2.5-0.5B's shape, 8 x 1024 tokens, on one H200: forward and
backward take 47 ms compiled and 63 ms as written, both packed. Both are work of memory, which grows with tokens and
weights, so the saving is scaled by their product; a slower GPU saves more than that.
"""

from __future__ import annotations

from engine.decision import SET_BY_USER, Decision
from engine.errors import BadInput
from engine.models.attention import LEAST_CAPABILITY, MOST_HEAD_DIM
from engine.models.config import ModelConfig
from engine.units import format_bytes, format_count, format_seconds

COMPILE_S = 15.0
"""One layer, forward and backward, with nothing in a cache, and the comparison after it: 8 s on 16 cores."""
SAVED_S_PER_TOKEN_AND_WEIGHT = 15.3e-3 / 8192 / 358e6
SAVED_S_PER_LAYER = 2.2e-3 / 24
"""Of a step, whatever its tokens: the gaps between some 70 kernels, compiled, on one H200."""


def choose_compile(
    wanted: str,
    *,
    device: str,
    has_compiler: bool,
    steps: int,
    tokens_per_step: int,
    layer_weights: int,
) -> Decision:
    """Whether layers are compiled. `steps` are those of the whole run, so that a resumed run decides
    as it did; `has_compiler` says whether torch.compile can make code for the device here.

    Raises BadInput for `on` where it cannot run.
    """
    knob = "student.compile"
    saved_s = steps * tokens_per_step * layer_weights * SAVED_S_PER_TOKEN_AND_WEIGHT
    why_not = None
    if not has_compiler:
        why_not = "torch.compile finds no compiler for this device (Triton on a GPU, g++ on a CPU)"
    if wanted == "on" and why_not is not None:
        raise BadInput.expected(
            knob, "on", "a run that can be compiled", why_not, hint="--set student.compile=off"
        )
    sums = (
        f"{format_count(steps)} steps of {format_count(tokens_per_step)} tokens save about "
        f"{format_seconds(saved_s)}, compiling costs about {format_seconds(COMPILE_S)}"
    )
    if why_not is None and device != "cuda":
        why_not = "on a CPU the products are most of the time, and they stay as they are"
    elif why_not is None and saved_s < COMPILE_S:
        why_not = sums
    choice = wanted if wanted != "auto" else ("on" if why_not is None else "off")
    reason = why_not or sums
    if choice == "on":
        rejected = (("off", reason if why_not else "more kernels and more memory traffic"),)
    else:
        rejected = (("on", reason),)
    return Decision(
        knob=knob,
        choice=choice,
        reason=reason if wanted == "auto" else SET_BY_USER,
        rejected=rejected,
        overridden=wanted != "auto",
    )


def choose_graphs(
    wanted: str,
    *,
    device: str,
    packed: bool,
    checkpointing: bool,
    accumulation: int,
    ranks: int,
    allocator: str,
    layers: int,
    needed_bytes: int,
    given_bytes: int,
) -> Decision:
    """Whether the student's layers are launched as CUDA graphs (`engine.train.graphed`).
    `needed_bytes` is what the run needs then, `given_bytes` what it needs without. Raises BadInput for
    `on` where it cannot be.
    """
    knob, hindrance = "student.graphs", None
    if device != "cuda":
        hindrance = "a CPU has none"
    elif ranks > 1:
        hindrance = "layers of several GPUs wait for each other between kernels"
    elif accumulation > 1:
        hindrance = (
            "the gradients of a graph are overwritten by its next launch, so nothing accumulates"
        )
    elif not packed:
        hindrance = "only packed attention is captured"
    elif checkpointing:
        hindrance = "layers that make their activations again are not captured"
    elif allocator != "native":
        hindrance = f"a graph's memory is native, and this run's is {allocator}"
    if wanted == "on" and hindrance is not None:
        raise BadInput.expected(
            knob, "on", "a run whose layers can be captured", hindrance, hint=f"--set {knob}=off"
        )
    what = (
        f"a step is about {format_seconds(layers * SAVED_S_PER_LAYER)} shorter, and the run needs "
        f"{format_bytes(needed_bytes)} in the place of {format_bytes(given_bytes)}"
    )
    choice = "on" if wanted == "on" else "off"
    rejected = ("off", "a gap before each of some thousand kernels") if choice == "on" else None
    return Decision(
        knob=knob,
        choice=choice,
        reason=SET_BY_USER if wanted != "auto" else hindrance or f"with it {what}",
        rejected=(rejected or ("on", hindrance or what),),
        overridden=wanted != "auto",
    )


def give_up_graphs(step: int, why: str) -> Decision:
    """Layers launched one by one from `step` on, because they could not be captured."""
    return Decision(
        knob="student.graphs",
        choice="off",
        reason=f"from step {step} on, layers are launched one by one, which computes the same",
        rejected=(("on", f"they could not be captured: {why}"),),
    )


def choose_attention(
    knob: str,
    wanted: str,
    *,
    config: ModelConfig,
    device: str,
    precision: str,
    capability: tuple[int, int] | None,
) -> Decision:
    """Packed or masked, for `student.attention` or `teacher.attention`; `capability` is the GPU's.

    Raises BadInput for `packed` where no kernel is.
    """
    heads = config.head_dim
    why_not = None
    if device != "cuda" or capability is None:
        why_not = "a CPU has no kernel for packed documents"
    elif capability < LEAST_CAPABILITY:
        why_not = f"needs compute capability {_dotted(LEAST_CAPABILITY)}, this GPU has {_dotted(capability)}"
    elif precision != "bf16":
        why_not = f"its kernel takes bf16, and products are in {precision}"
    elif heads > MOST_HEAD_DIM or heads % 8:
        why_not = f"its kernel takes heads of up to {MOST_HEAD_DIM} in multiples of 8, here they have {heads}"
    if wanted == "packed" and why_not is not None:
        raise BadInput.expected(
            knob, "packed", "a GPU and a model that have it", why_not, hint=f"--set {knob}=masked"
        )
    choice = wanted if wanted != "auto" else ("masked" if why_not else "packed")
    if choice == "packed":
        reason = "each document attends by itself: no mask, and no work that is hidden afterwards"
        rejected = (("masked", "reads a mask in each layer and computes what it hides"),)
    else:
        reason = why_not or SET_BY_USER
        rejected = (("packed", why_not or "the same but for rounding, and faster"),)
    return Decision(
        knob=knob,
        choice=choice,
        reason=reason if wanted == "auto" else SET_BY_USER,
        rejected=rejected,
        overridden=wanted != "auto",
    )


def choose_checkpointing(
    wanted: str, *, without_bytes: int, with_bytes: int, available_bytes: int | None
) -> Decision:
    """Whether activations are made again in the backward pass, by what the whole run needs at its
    peak either way."""
    room = "" if available_bytes is None else f" of {format_bytes(available_bytes)} available"
    without = f"without it the run needs {format_bytes(without_bytes)}{room}"
    within = f"with it {format_bytes(with_bytes)}"
    fits = available_bytes is None or without_bytes <= available_bytes
    helps = not fits and available_bytes is not None and with_bytes <= available_bytes
    choice = wanted if wanted != "auto" else ("on" if helps else "off")
    if wanted == "auto" and not fits and not helps:
        without += f", and {within} it does not fit either"
    other = "off" if choice == "on" else "on"
    why_not = without if choice == "on" else f"{within}, and a third more of the forward pass"
    return Decision(
        knob="student.checkpointing",
        choice=choice,
        reason=f"{without}, {within}" if choice == "on" else without,
        rejected=((other, why_not),),
        overridden=wanted != "auto",
    )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
