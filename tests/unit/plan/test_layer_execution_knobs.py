"""Packed or masked, activations recomputed or kept: the choice, and the arithmetic in its reason."""

from __future__ import annotations

from typing import Any

import pytest

from engine.decision import Decision
from engine.errors import BadInput
from engine.plan.knobs import choose_attention, choose_checkpointing
from evidence.bench.shapes import config_named
from tests.support.budgets import config

SHAPE = config_named("qwen2.5-0.5b")


def attention(wanted: str = "auto", **changes: Any) -> Decision:
    facts: dict[str, Any] = dict(config=SHAPE, device="cuda", precision="bf16", capability=(9, 0))
    return choose_attention("student.attention", wanted, **(facts | changes))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(device="cpu", capability=None), "CPU"),
        (dict(capability=(7, 5)), "8.0"),
        (dict(precision="fp32"), "fp32"),
        (dict(config=config(head_dim=12)), "multiples of 8"),
        (dict(config=config(head_dim=264)), "up to 256"),
    ],
)
def test_documents_are_packed_wherever_a_kernel_is(changes: dict[str, Any], word: str) -> None:
    assert attention().choice == "packed"
    decision = attention(**changes)
    assert decision.choice == "masked" and word in decision.reason
    with pytest.raises(BadInput, match=r"student\.attention"):
        attention("packed", **changes)
    assert attention("masked", **changes).choice == "masked"


def test_the_oracle_can_be_asked_for() -> None:
    decision = attention("masked")
    assert decision.choice == "masked" and decision.overridden
    assert decision.override == "--set student.attention=packed"


@pytest.mark.parametrize(
    ("without", "within", "room", "choice"),
    [
        (10, 6, 12, "off"),
        (10, 6, 8, "on"),
        (10, 6, 5, "off"),
        (10, 6, None, "off"),
        (10, 6, 10, "off"),
    ],
)
def test_activations_are_recomputed_only_where_that_makes_the_run_fit(
    without: int, within: int, room: int | None, choice: str
) -> None:
    gib = 2**30
    decision = choose_checkpointing(
        "auto",
        without_bytes=without * gib,
        with_bytes=within * gib,
        available_bytes=None if room is None else room * gib,
    )
    assert decision.choice == choice and not decision.overridden
    assert f"{without}.0 GiB" in decision.reason
    if room == 5:
        assert "does not fit either" in decision.reason
    for wanted in ("on", "off"):
        asked = choose_checkpointing(
            wanted, without_bytes=without, with_bytes=within, available_bytes=room
        )
        assert asked.choice == wanted and asked.overridden
