"""What a teacher in 8-bit floats needs: predicted as torch holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.machine.reading import measured
from engine.models.fp8 import round_head, round_layer
from engine.models.frozen import freeze
from engine.plan.memory import BudgetItem, MemoryBudget
from engine.spec import spec_from_dict
from tests.support.budgets import planned
from tests.support.packed_models import lively, make_config

PLENTY = measured(1 << 60, "a test")


SPEC: dict[str, dict[str, Any]] = {
    "teacher": {"path": "teacher"},
    "student": {"config": "student.json"},
    "train": {"rows": 4},
    "data": {"seq_len": 64},
}


def budget(available: Any = PLENTY, **changes: Any) -> MemoryBudget:
    values: dict[str, Any] = dict(
        teacher=make_config(),
        teacher__precision="fp8",
        student=make_config(hidden_size=64, intermediate_size=96, head_dim=16),
        available=available,
    )
    return planned(spec_from_dict(SPEC), **(values | changes)).budget()


def item(budget: MemoryBudget, name: str) -> BudgetItem:
    (found,) = [each for each in budget.items if each.name == name]
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "ids"), [("qwen2", 96), ("qwen3", 101), ("llama", 112)])
def test_the_weights_of_a_teacher_in_fp8_are_the_bytes_that_it_holds(
    family: str, ids: int, tied: bool
) -> None:
    config = make_config(family, tied, vocab_size=ids)
    decoder = freeze(lively(config).to(torch.bfloat16))
    for layer in decoder.layers:
        round_layer(layer)
    round_head(decoder)
    held = {b.data_ptr(): b.numel() * b.element_size() for b in decoder.buffers()}
    found = item(budget(teacher=config), "teacher weights")
    assert found.bytes == sum(held.values()) and found.lasting
    assert "x 1 byte in layers and head" in found.how


def test_fp8_needs_half_of_bf16_in_its_layers_and_the_same_activations() -> None:
    narrow, wide = budget(), budget(teacher__precision="bf16")
    for name in ("teacher temporaries", "teacher hidden states"):
        assert item(narrow, name).bytes == item(wide, name).bytes
    assert item(narrow, "teacher weights").bytes < item(wide, "teacher weights").bytes


def test_a_teacher_that_does_not_fit_in_fp8_is_not_told_to_keep_its_blocks() -> None:
    found = budget(measured(1, "a test"), teacher_packed_bytes=1000)
    settings = [setting for knob in found.savings for setting in knob.settings]
    assert settings and not any(setting.startswith("teacher.") for setting in settings)
