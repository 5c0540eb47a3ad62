"""What one rank of several needs: shares of the whole, what is gathered, and the checks before the first step."""

from __future__ import annotations

import pytest

from engine.models.config import count_parameters
from engine.plan.memory import MEMORY_PHASES, MemoryBudget
from tests.support.budgets import SEVEN_B, SMALL, budget_of, spec_of

BODY = dict(student=SMALL, teacher=SEVEN_B, compute__device="cuda", teacher__precision="bf16")
RUN = dict(train__rows=8, data__seq_len=1024, eval__rows=4)


def budget(gpus: int, **changes: object) -> MemoryBudget:
    found: MemoryBudget = budget_of(
        spec_of(compute__gpus=gpus, **RUN),
        **(
            BODY
            | dict(student__precision="bf16", student__attention="packed", kernels__layers="fused")
            | changes
        ),
    )
    return found


def sizes(found: MemoryBudget) -> dict[str, int]:
    return {item.name: item.bytes for item in found.items}


def phase(found: MemoryBudget, name: str) -> int:
    return sum(item.bytes for item in found.items if name in item.phases)


def test_each_rank_keeps_its_share_of_weights_moments_and_gradients() -> None:
    one, eight = sizes(budget(1)), sizes(budget(8))
    for name in ("student weights", "AdamW moments", "gradients"):
        assert eight[name] == pytest.approx(one[name] / 8, abs=1), name
    for name in ("student activations", "loss workspace", "teacher weights"):
        assert eight[name] == one[name], name


def test_one_process_has_nothing_of_what_ranks_add() -> None:
    added = sizes(budget(2)).keys() - sizes(budget(1)).keys()
    assert {"gathered weights", "gathered layers", "whole student"} <= added
    assert "gathered" not in " ".join(sizes(budget(1)))


def test_keeping_gathered_layers_costs_all_of_them_and_giving_them_back_a_few() -> None:
    kept, given = (
        sizes(budget(2, student__reshard=again))["gathered layers"] for again in ("off", "on")
    )
    layers = 4 * (count_parameters(SMALL) - SMALL.vocab_size * SMALL.hidden_size)
    assert kept == layers and given == pytest.approx(layers / 6, rel=1e-4)
    assert budget(2, student__reshard="off").total_bytes > budget(2).total_bytes


def test_many_ranks_need_no_less_than_the_checks_of_the_whole_student_do() -> None:
    parameters = count_parameters(SMALL)
    most, alone = budget(1024), budget(1)
    for name in MEMORY_PHASES[2:5]:
        # The whole student, and nothing of its optimizer; in the last phase its gradients too.
        assert phase(most, name) >= phase(alone, name) - 8 * parameters, name
