"""Whether a run does what its log says was decided: the newest decision on each setting against the objects that train.

What a decision says is what a reader goes by, and what a flip changes; one that never reached the model, the optimizer
or the checkpoint would have the wrong thing suspected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.log.events import DecisionMade
from engine.models.decoder import Decoder
from engine.models.packed import PackedLinear
from engine.models.transformers_decoder import TransformersDecoder
from engine.runtime.ranks import is_fsdp
from engine.teachers.fp8 import Fp8Teacher
from engine.teachers.frozen import FrozenDecoder
from engine.teachers.prefetching import PrefetchingTeacher
from engine.teachers.store.teacher import CachedTeacher
from engine.teachers.truncating import TruncatingTeacher
from engine.train.optimizer import FusedAdamW
from engine.train.trainer import Trainer

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Applied:
    """The objects of a run that decisions are about."""

    trainer: Trainer
    teacher: Decoder | None
    """None where its outputs are stored."""
    chunk_rows: int
    """Of the loss, as it was decided or is usual."""
    sharded: bool
    """Whether every rank writes its own part of a checkpoint."""


def _frozen(applied: Applied) -> Any:
    """Return the innermost teacher."""
    teacher: Any = applied.trainer.teacher
    while isinstance(teacher, PrefetchingTeacher | TruncatingTeacher):
        teacher = teacher.inner
    return teacher


def _backend(applied: Applied) -> str | None:
    frozen = _frozen(applied)
    if frozen is None:
        return "none"
    if isinstance(frozen, CachedTeacher):
        return "cached"
    return "quantized" if _packed_kernels(applied) else "dequantized"


def _packed_kernels(applied: Applied) -> set[str]:
    modules = () if applied.teacher is None else applied.teacher.modules()
    return {one.kernel for one in modules if isinstance(one, PackedLinear)}


def _teacher_precision(applied: Applied) -> str | None:
    frozen = _frozen(applied)
    if isinstance(frozen, Fp8Teacher):
        return "fp8"
    if not isinstance(frozen, FrozenDecoder) or applied.teacher is None:
        return None
    return _precision_of(frozen.precision, applied.teacher.dtype)


def _precision_of(said: str, dtype: torch.dtype) -> str:
    """Return the precision that is said where the dtype is its own, else the dtype."""
    return said if DTYPES.get(said) == dtype else _name(dtype)


def _name(dtype: torch.dtype) -> str:
    return next((name for name, one in DTYPES.items() if one == dtype), str(dtype))


def _reshard(applied: Applied) -> str | None:
    """Return whether torch frees a layer's weights after its forward pass; None where it does not tell."""
    layer = next((one for one in applied.trainer.student.layers if is_fsdp(one)), None)
    group = getattr(getattr(layer, "_get_fsdp_state", lambda: None)(), "_fsdp_param_group", None)
    if group is None or not hasattr(group, "post_forward_mesh_info"):
        return None
    return _on(group.post_forward_mesh_info is not None)


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"


def _attention(decoder: Decoder | None) -> str | None:
    return None if decoder is None else "packed" if decoder.packed else "masked"


READ: Mapping[str, Callable[[Applied], str | None]] = {
    "model.engine": lambda one: (
        "transformers"
        if any(
            isinstance(model, TransformersDecoder) for model in (one.trainer.student, one.teacher)
        )
        # Stored outputs may be of either.
        else None
        if isinstance(_frozen(one), CachedTeacher)
        else "native"
    ),
    "compute.device": lambda one: next(one.trainer.student.parameters()).device.type,
    "student.precision": lambda one: _name(one.trainer.dtype),
    "student.compile": lambda one: _on(one.trainer.student.compiled),
    "student.attention": lambda one: _attention(one.trainer.student),
    "student.graphs": lambda one: _on(one.trainer.graphs is not None),
    "student.reshard": _reshard,
    "teacher.precision": _teacher_precision,
    "teacher.compile": lambda one: None if one.teacher is None else _on(one.teacher.compiled),
    "teacher.attention": lambda one: _attention(one.teacher),
    "teacher.prefetch": lambda one: _on(isinstance(one.trainer.teacher, PrefetchingTeacher)),
    "teacher.shard": lambda one: (
        None if one.teacher is None else _on(one.teacher.shards is not None)
    ),
    "teacher.backend": _backend,
    "loss.kernel": lambda one: "fused" if one.trainer.loss.kernel == "fused" else "eager",
    "loss.chunk_rows": lambda one: str(one.chunk_rows),
    "train.update": lambda one: (
        "fused" if isinstance(one.trainer.optimizer, FusedAdamW) else "torch"
    ),
    "checkpoint.sharded": lambda one: _on(one.sharded),
}
"""What can be read back, by setting; None where it does not tell."""


def not_as_decided(decisions: Iterable[DecisionMade], applied: Applied) -> list[str]:
    """Return each setting whose newest decision is not what trains, with both."""
    newest = {one.knob: one.choice for one in decisions}
    found = []
    for knob, choice in newest.items():
        is_ = READ[knob](applied) if knob in READ else None
        if is_ not in (None, choice):
            found.append(f"{knob} was decided to be {choice}, and is {is_}")
    return found
