"""Table of the settings that a run can choose automatically, with the function that chooses each.

    KNOBS["train.update"].decide(facts)      a Decision: the choice, its reason, and the rejected choices with theirs

A chooser is a pure function, `choose(wanted, *, fact, fact, ...)`. The names of its keyword arguments are
the facts it depends on; they are looked up as attributes of an object that describes the run
(`engine.plan.run_plan.RunFacts`). A fact that must be computed for one decision, such as the bytes that a
run needs with each choice, is passed explicitly. The allowed values of a setting and their meaning are in
`engine.spec.sections`. Some choosers are in lower layers: device, precision and threads in
`engine.runtime.device`, the allocator in `engine.machine.allocator`, the teacher's backend and precision in
`engine.teachers.backend`.

To add an automatic choice, add the setting to its section, a chooser and a row to this module, and the code that
acts on the choice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from engine.decision import SET_BY_USER, Decision, decide
from engine.divergences import DIVERGENCES, fused_divergences
from engine.kernels import cudnn_attention
from engine.machine.allocator import choose_allocator
from engine.machine.threads import choose_thread_wait
from engine.models.attention import MAX_HEAD_DIM, MIN_CAPABILITY
from engine.models.config import ModelConfig
from engine.models.transformers_config import TransformersConfig
from engine.runtime.device import Capability, choose_device, choose_precision, choose_threads
from engine.spec import Option, options
from engine.teachers.backend import choose_backend, choose_teacher_precision
from engine.units import (
    format_bytes,
    format_capability,
    format_need,
    format_seconds,
)

KERNEL_CAPABILITY = (8, 0)
"""Lowest compute capability for which the engine's kernels compile."""
SAVED_S_PER_LAYER = 2.2e-3 / 24
"""Time that CUDA graphs save per step and layer, in seconds: the gaps between kernels, measured on one H200."""
FEW_TOKENS = 4096
"""Largest number of tokens of a step for which an H200 runs a layer with adapters faster than the host launches its
kernels."""
RUN_BY_TRANSFORMERS = "transformers runs the layers"
ONLY_NATIVE = "packed attention, captured layers, weights in blocks or 8 bits, and several GPUs"
SHARDED_FROM_BYTES = 16 * 2**30
"""Smallest size of a checkpoint that is sharded, in bytes; a smaller one is gathered on the first rank in seconds."""


SETTINGS = {
    "device": "compute.device",
    "ranks": "compute.gpus",
    "steps": "train.steps",
    "accumulation": "train.accumulation",
    "divergence": "loss.divergence",
    "allocator": "memory.allocator",
    "deterministic": "compute.deterministic",
}
"""Settings that other choices depend on, by the name of the fact."""


@dataclass(frozen=True)
class Knob:
    key: str
    """Section and name of the setting in a spec."""
    choose: Callable[..., Decision]
    """Chooser, called with the value that the user set (`auto` or 0 for an automatic choice) and with the facts as
    keyword arguments."""
    known_as: tuple[tuple[str, str], ...] = ()
    """Pairs of a fact's name and of the attribute of the run, or the setting, that provides the fact."""

    @property
    def facts(self) -> set[str]:
        """The names of the facts that the choice depends on."""
        return set(inspect.getfullargspec(self.choose).kwonlyargs)

    @cached_property
    def option(self) -> Option:
        """The setting's allowed values, default and meaning."""
        return next(option for option in options() if option.key == self.key)

    def decide(self, run_facts: Any, **computed: Any) -> Decision:
        """Return the decision for a run.

        `run_facts` has a `spec` and the other facts as attributes; a fact in `computed` takes precedence.
        """
        names = SETTINGS | dict(self.known_as)

        for fact in self.facts - computed.keys():
            name = names.get(fact, fact)
            computed[fact] = run_facts.spec.value(name) if "." in name else getattr(run_facts, name)
        return self.choose(run_facts.spec.value(self.key), **computed)


# The engine that runs the models


def choose_engine(wanted: str, *, student: ModelConfig, teacher: ModelConfig | None) -> Decision:
    """Choose whether the native decoder or transformers runs teacher and student, by their configurations."""
    models = {"teacher": teacher, "student": student}
    by_transformers = {
        whose: config for whose, config in models.items() if isinstance(config, TransformersConfig)
    }
    if not by_transformers:
        return Decision(
            knob="model.engine",
            choice="native",
            reason="the native decoder supports the family of every model",
            rejected=(("transformers", f"without {ONLY_NATIVE}"),),
            overridden=wanted != "auto",
        )
    reasons = "; ".join(
        f"the {whose} is a {config.title}: {config.why}"
        for whose, config in by_transformers.items()
    )
    return Decision(
        knob="model.engine",
        choice="transformers" if teacher is None or len(by_transformers) == 2 else "by_family",
        reason=f"{reasons}. Runs without {ONLY_NATIVE}",
        rejected=(("native", reasons),),
        impossible=("native",),
        overridden=wanted != "auto",
    )


# How layers run


def choose_graphs(
    wanted: str,
    *,
    config: ModelConfig,
    device: str,
    packed: bool,
    checkpointing: bool,
    adapted: bool,
    tokens: int,
    accumulation: int,
    ranks: int,
    allocator: str,
    layers: int,
    needed_bytes: int,
    given_bytes: int,
    available_bytes: int | None,
) -> Decision:
    """Decide whether the student's layers run as CUDA graphs (`engine.train.cuda_graphs`).

    `needed_bytes` is the memory that the run needs with graphs, `given_bytes` without graphs. Raises BadInput
    for `on` when they cannot be captured.
    """
    knob = "student.graphs"
    hindrances = {
        "a CPU has no CUDA graphs": device != "cuda",
        "the layers of several GPUs wait for each other between kernels": ranks > 1,
        "each launch of a graph overwrites its gradients, so they cannot accumulate": (
            accumulation > 1
        ),
        "only packed attention is captured": not packed,
        "layers with a window and layers without one are not captured together": (
            len({config.has_window(layer) for layer in range(config.num_hidden_layers)}) > 1
        ),
        "layers that recompute their activations are not captured": checkpointing,
        f"graphs need the native allocator, and this run uses {allocator}": allocator != "native",
    }
    hindrance = next((text for text, holds in hindrances.items() if holds), None)
    refused = {}
    if hindrance is not None:
        refused = {"on": ("a run whose layers can be captured", hindrance, f"--set {knob}=off")}
    host_bound = adapted and tokens <= FEW_TOKENS
    gain = (
        "a step of few tokens does not wait until the host has launched two thousand kernels"
        if host_bound
        else f"a step is about {format_seconds(layers * SAVED_S_PER_LAYER)} shorter"
    )
    memory = f"needs {format_bytes(needed_bytes)} instead of {format_bytes(given_bytes)}"
    fits = available_bytes is not None and needed_bytes <= available_bytes
    chosen = "on" if host_bound and fits and hindrance is None else "off"
    effect = f"{gain}, and the run {memory}"
    return decide(
        knob,
        wanted,
        chosen,
        hindrance or f"with it {effect}",
        against={
            "off": "a gap before each of several thousand kernels",
            "on": hindrance or effect,
        },
        refused=refused,
    )


def give_up_graphs(step: int, why: str) -> Decision:
    """Return the decision to launch layers eagerly from `step` on, because capturing them failed."""
    return Decision(
        knob="student.graphs",
        choice="off",
        reason=f"from step {step} on, the kernels of the layers are launched one by one, which computes the same",
        rejected=(("on", f"they could not be captured: {why}"),),
        impossible=("on",),
    )


def choose_attention(
    knob: str,
    wanted: str,
    *,
    config: ModelConfig,
    device: str,
    precision: str,
    capability: Capability,
) -> Decision:
    """Decide between packed and masked attention, for `student.attention` or `teacher.attention`.

    Raises BadInput for `packed` when no kernel supports it.
    """
    heads = config.head_dim
    why_not = None
    if not config.native:
        why_not = f"{RUN_BY_TRANSFORMERS}, with its own attention"
    elif device != "cuda" or capability is None:
        why_not = "there is no CPU kernel for packed documents"
    elif capability < MIN_CAPABILITY:
        needed, found = format_capability(MIN_CAPABILITY), format_capability(capability)
        why_not = f"needs compute capability {needed}, this GPU has {found}"
    elif precision not in ("bf16", "fp8"):
        why_not = f"its kernel supports bf16, and matmuls are in {precision}"
    elif heads > MAX_HEAD_DIM or heads % 8:
        why_not = f"its kernel supports head sizes that are multiples of 8, up to {MAX_HEAD_DIM}; here it is {heads}"
    refused = {}
    if why_not is not None:
        refused = {"packed": ("a GPU and a model that support it", why_not, f"--set {knob}=masked")}
    return decide(
        knob,
        wanted,
        "masked" if why_not else "packed",
        why_not
        or "attention runs for each document: no mask, and no scores that a mask would discard",
        against={
            "masked": "reads a mask in each layer and computes scores that the mask discards",
            "packed": why_not or "equal up to rounding, and faster",
        },
        refused=refused,
    )


# Which kernels


def choose_loss_kernel(
    wanted: str, *, device: str, capability: Capability, has_triton: bool, divergence: str
) -> Decision:
    """Choose the implementation of the loss. Raises BadInput for `fused` if it cannot run."""
    lacking = _lacking_for_kernels(device, capability, has_triton)
    if lacking is None and not DIVERGENCES[divergence].fused:
        lacking = f"loss.divergence {' or '.join(fused_divergences())}", divergence
    fused = "everything between the matmuls in one kernel, which reads each logit once from memory"
    eager = "the same result in plain torch, with about ten passes over the logits"
    anywhere = "plain torch runs anywhere"
    return _choose_fused("loss.kernel", wanted, lacking, fused, {"eager": eager}, anywhere, fused)


def choose_update(
    wanted: str, *, device: str, capability: Capability, has_triton: bool, ranks: int
) -> Decision:
    """Choose the implementation of the optimizer update. Raises BadInput for `fused` if it cannot run."""
    lacking = _lacking_for_kernels(device, capability, has_triton)
    if lacking is None and ranks > 1:
        lacking = "all weights on one GPU", f"weights sharded over {ranks} ranks"
    fused = "norm, clipping and AdamW read and write each number once"
    by_torch = "torch's passes over gradients and weights"
    anywhere = "torch's implementation runs anywhere"
    return _choose_fused(
        "train.update",
        wanted,
        lacking,
        fused,
        {"torch": by_torch},
        anywhere,
        "the user chose otherwise",
    )


def choose_layer_kernels(
    wanted: str, *, device: str, capability: Capability, has_triton: bool
) -> Decision:
    """Choose the kernels of the operations between a layer's matmuls. Raises BadInput for `fused` if they cannot
    run."""
    return _choose_fused(
        "kernels.layers",
        wanted,
        _lacking_for_kernels(device, capability, has_triton),
        "each value between two matmuls is read and written once",
        {"torch": "torch's passes over each value"},
        "torch's implementation runs anywhere",
        "the user chose otherwise",
    )


def choose_attention_kernel(
    wanted: str, *, device: str, capability: Capability, deterministic: bool
) -> Decision:
    """Choose the kernel of packed attention. Raises BadInput for `cudnn` if it cannot run."""
    lacking = None
    if device != "cuda" or capability is None:
        lacking = "a GPU", "a CPU"
    elif capability < cudnn_attention.LEAST_CAPABILITY:
        min_capability = format_capability(cudnn_attention.LEAST_CAPABILITY)
        lacking = (
            f"a GPU of compute capability {min_capability} or later",
            format_capability(capability),
        )
    elif not cudnn_attention.is_installed():
        lacking = "the package nvidia-cudnn-frontend", "none installed"
    elif deterministic:
        lacking = (
            "gradients that may differ in their last bits between runs",
            "compute.deterministic",
        )
    cudnn = "about half the time of torch's kernel"
    anywhere = "torch's kernel runs on every GPU that packs documents"
    return _choose_fused(
        *("kernels.attention", wanted, lacking, cudnn, {"flash": "torch's flash attention"}),
        *(anywhere, "the user chose otherwise"),
        ours="cudnn",
    )


def give_up_cudnn(whose: str, why: str) -> Decision:
    """Return the decision to compute the attention of one model with torch's kernel, because cuDNN does not support
    it."""
    return Decision(
        knob="kernels.attention",
        choice="flash",
        reason=f"for the {whose}: torch's kernel computes the same",
        rejected=(("cudnn", f"cuDNN does not support it: {why}"),),
        impossible=("cudnn",),
    )


def _lacking_for_kernels(
    device: str, capability: Capability, has_triton: bool
) -> tuple[str, str] | None:
    """Return what the engine's kernels require and what this machine has instead; None if they can run."""
    if device != "cuda" or capability is None:
        return "a GPU", "a CPU"
    if capability < KERNEL_CAPABILITY:
        needed = f"a GPU of compute capability {format_capability(KERNEL_CAPABILITY)} or later"
        return needed, f"compute capability {format_capability(capability)}"
    return None if has_triton else ("triton", "none installed")


def _choose_fused(
    knob: str,
    wanted: str,
    lacking: tuple[str, str] | None,
    fused: str,
    plain: dict[str, str],
    anywhere: str,
    unwanted: str,
    ours: str = "fused",
) -> Decision:
    """Choose between the faster kernel, named `ours`, and the implementation `plain`, which runs `anywhere`.

    `fused` describes the faster kernel; `plain` maps the other implementation's name to its description. `lacking`
    is what the faster kernel needs and what is present instead; None if it can run. `unwanted` is the reason against
    the faster kernel if it can run and the user set the other implementation.
    """
    (name,) = plain
    reasons, against, refused = {ours: fused, **plain}, {ours: unwanted, **plain}, {}
    if lacking is not None:
        reasons[name] = anywhere
        against[ours] = "needs {}; found {}".format(*lacking)
        refused[ours] = (*lacking, f"`--set {knob}=auto` runs on any device")
    best = ours if lacking is None else name
    return decide(knob, wanted, best, reasons, against=against, refused=refused, explained=True)


# Decided by memory: `..._bytes` is the peak memory of the whole run on each GPU


def choose_checkpointing(
    wanted: str, *, without_bytes: int, with_bytes: int, available_bytes: int | None
) -> Decision:
    """Decide whether activations are recomputed in the backward pass, by the peak memory with and without it."""
    without = f"without it the run needs {format_need(without_bytes, available_bytes)}"
    within = f"with it {format_bytes(with_bytes)}"
    fits_only_with, neither = _fits_only_smaller(without_bytes, with_bytes, available_bytes)
    if wanted == "auto" and neither:
        without += f", and {within} it does not fit either"
    return decide(
        "student.checkpointing",
        wanted,
        "on" if fits_only_with else "off",
        {"on": f"{without}, {within}", "off": without},
        against={"off": without, "on": f"{within}, and a third more of the forward pass"},
        explained=True,
    )


def choose_chunk_rows(
    wanted: int,
    *,
    taken_rows: int,
    usual_rows: int,
    fewer_rows: list[int],
    usual_bytes: int,
    available_bytes: int | None,
) -> Decision:
    """Decide for how many tokens logits are computed at a time.

    These are `usual_rows`, with which the run needs `usual_bytes`, or else the largest of `fewer_rows` with which the
    run fits. `taken_rows` is the number in the plan.
    """
    needs = f"with chunks of {usual_rows} tokens the run needs {format_need(usual_bytes, available_bytes)}"
    if wanted:
        rejected, reason = {}, SET_BY_USER
    elif taken_rows == usual_rows:
        rejected, reason = {str(fewer_rows[0]): "smaller matmuls, which are slower"}, needs
    else:
        rejected = {str(usual_rows): needs}
        reason = f"{needs}; smaller matmuls are a little slower and need less memory"
    return Decision(
        knob="loss.chunk_rows",
        choice=str(taken_rows),
        reason=reason,
        rejected=tuple(rejected.items()),
        overridden=wanted != 0,
    )


def choose_teacher_shard(
    wanted: str,
    *,
    ranks: int,
    whole_bytes: int,
    shared_bytes: int,
    available_bytes: int | None,
    stored_words: str | None = None,
) -> Decision:
    """Decide whether the teacher's layers are sharded over the ranks.

    `whole_bytes` is the memory that the run needs with all layers on each GPU, `shared_bytes` that with the layers
    sharded, both after all other savings that `auto` may make. `stored_words` describes the stored teacher outputs.

    Raises BadInput for `on` with stored outputs: a rank whose row is not stored runs the teacher alone.
    """
    knob = "teacher.shard"
    if stored_words is not None:
        why = "its outputs are stored: a rank whose row is not stored runs the teacher alone"
        hint = "without teacher.cache every rank runs the teacher in every step"
        refused = {"on": ("a teacher that every rank runs", "a teacher with stored outputs", hint)}
        return decide(
            knob, wanted, "off", why, against={"on": why}, refused=refused, explained=True
        )
    needs = format_need(whole_bytes, available_bytes)
    whole = f"with the teacher whole on each GPU the run needs {needs}"
    shared = f"with its layers sharded over {ranks} GPUs {format_bytes(shared_bytes)}"
    fits_only_shared, neither = _fits_only_smaller(whole_bytes, shared_bytes, available_bytes)
    if wanted == "auto" and neither:
        whole += f", and {shared} it does not fit either"
    return decide(
        knob,
        wanted,
        "on" if fits_only_shared else "off",
        {"on": f"{whole}, {shared}", "off": whole},
        against={"off": whole, "on": f"{shared}: gathers every layer"},
    )


def choose_reshard(
    wanted: str, *, kept_bytes: int, given_bytes: int, available_bytes: int | None
) -> Decision:
    """Decide whether layers free their gathered weights between forward and backward.

    `kept_bytes` is the memory that the run needs if layers keep their gathered weights, `given_bytes` the memory if
    they free them.
    """
    kept = f"with gathered weights kept, the run needs {format_need(kept_bytes, available_bytes)}"
    twice = f"gathers every layer twice a step, to need {format_bytes(given_bytes)}"
    return decide(
        "student.reshard",
        wanted,
        "off" if available_bytes is None or kept_bytes <= available_bytes else "on",
        {"on": kept, "off": f"{kept}, and each layer is gathered once a step"},
        against={"off": kept, "on": twice},
    )


def choose_sharded(wanted: str, *, whole_bytes: int) -> Decision:
    """Decide whether each rank writes its own part of a checkpoint of `whole_bytes`."""
    size = f"a checkpoint is {format_bytes(whole_bytes)}"
    return decide(
        "checkpoint.sharded",
        wanted,
        "on" if whole_bytes >= SHARDED_FROM_BYTES else "off",
        {
            "on": f"{size}: every rank writes its own part, and no rank gathers all of it",
            "off": f"{size}: the first rank writes all of it, as in a run on one GPU",
        },
        against={
            "off": f"{size}: one rank would write all of it while the others wait",
            "on": f"{size}, and parts can only be read with torch",
        },
    )


def _fits_only_smaller(
    plain_bytes: int, less_bytes: int, available_bytes: int | None
) -> tuple[bool, bool]:
    """Return whether a run fits with `less_bytes` but not with `plain_bytes`, and whether it fits with neither."""
    if available_bytes is None or plain_bytes <= available_bytes:
        return False, False
    return less_bytes <= available_bytes, less_bytes > available_bytes


_STUDENT_FACTS = (("config", "student"), ("precision", "student.precision"))
_TEACHER_FACTS = (("config", "teacher"), ("precision", "teacher.precision"))

_KNOBS = (
    Knob("model.engine", choose_engine),
    Knob("compute.device", choose_device),
    Knob("memory.allocator", choose_allocator),
    Knob("student.precision", partial(choose_precision, "student.precision")),
    Knob("compute.threads", choose_threads),
    Knob("compute.thread_wait", choose_thread_wait),
    Knob("teacher.precision", choose_teacher_precision),
    Knob("loss.kernel", choose_loss_kernel),
    Knob("kernels.layers", choose_layer_kernels),
    Knob("kernels.attention", choose_attention_kernel),
    Knob("student.attention", partial(choose_attention, "student.attention"), _STUDENT_FACTS),
    Knob("teacher.attention", partial(choose_attention, "teacher.attention"), _TEACHER_FACTS),
    Knob("teacher.shard", choose_teacher_shard),
    Knob("teacher.backend", choose_backend, _TEACHER_FACTS),
    Knob("student.checkpointing", choose_checkpointing),
    Knob("loss.chunk_rows", choose_chunk_rows),
    Knob("student.reshard", choose_reshard),
    Knob("student.graphs", choose_graphs, _STUDENT_FACTS),
    Knob("train.update", choose_update),
    Knob("checkpoint.sharded", choose_sharded),
)
KNOBS = {knob.key: knob for knob in _KNOBS}
"""All knobs, in the order in which a run decides them. `engine.plan.fit_in_memory` has the order of the changes that
make a run fit in memory.
"""
