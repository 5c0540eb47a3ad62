"""Specs, shapes and rows of small and of real size, and the memory budgets of runs with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.data.tokens import TokenStream
from engine.machine.reading import Reading, measured
from engine.models.config import ModelConfig
from engine.plan.memory import MemoryBudget, MemoryPlan
from engine.spec import RunSpec, spec_from_dict

PLENTY = measured(1 << 60, "a test")


def config(
    width: int = 64,
    feed_forward: int = 176,
    layers: int = 2,
    heads: int = 4,
    shared: int = 2,
    vocabulary: int = 97,
    family: str = "qwen2",
    head_dim: int = 0,
    tied: bool = True,
    sliding_window: int | None = None,
    **more: Any,
) -> ModelConfig:
    return ModelConfig(
        family=family,
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        sliding_window=sliding_window,
        **more,
        tie_word_embeddings=tied,
    )


DEMO_STUDENT = config(128, 384, 3, 4, 2, 4096)

DEMO_TEACHER = config(256, 768, 6, 8, 2, 4096)

SMALL = config(896, 4864, 24, 14, 2, 151936)

SEVEN_B = config(3584, 18944, 28, 28, 4, 152064, tied=False)


def spec_of(teacher: bool = True, **changes: object) -> RunSpec:
    """Make a spec; `changes` are settings with `__` for the dot."""
    tree: dict[str, dict[str, object]] = {
        "teacher": {"path": "teacher"} if teacher else {},
        "student": {"config": "student.json"},
        "loss": {} if teacher else {"alpha": 1.0},
        # The trainer alone: no step of it is audited.
        "checks": {"enabled": False},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return spec_from_dict(tree)


def budget_of(
    spec: RunSpec,
    student: ModelConfig = DEMO_STUDENT,
    teacher: ModelConfig | None = DEMO_TEACHER,
    available: Reading = PLENTY,
    **changes: Any,
) -> MemoryBudget:
    """`changes` are settings, with `__` for the dot, and other fields of a MemoryPlan."""
    teaching = {"teacher__backend": "dequantized" if teacher else "none"}
    return planned(
        spec, teacher=teacher, student=student, available=available, **(teaching | changes)
    ).budget()


def planned(spec: RunSpec, **changes: Any) -> MemoryPlan:
    """As `budget_of`, of a run on a GPU in bf16 with a dense teacher where nothing else is said."""
    settings: dict[str, Any] = {
        "teacher.backend": "dequantized",
        "teacher.precision": "bf16",
        "student.precision": "bf16",
        "student.reshard": "on",
        "compute.device": "cuda",
    }
    settings |= {k.replace("__", "."): v for k, v in changes.items() if "__" in k}
    fields = {k: v for k, v in changes.items() if "__" not in k}
    return MemoryPlan(spec=spec.with_values(settings), **fields)


def item(budget: MemoryBudget, name: str) -> int:
    return next(item.bytes for item in budget.items if item.name == name)


def stream_of(vocabulary: int, tokens: int) -> TokenStream:
    rng = np.random.default_rng(0)
    starts = np.array([*range(0, tokens, 97), tokens])
    ids = rng.integers(1, vocabulary, size=tokens).astype(np.uint32)
    return TokenStream(tokens=ids, starts=starts, sha256="0" * 64)
