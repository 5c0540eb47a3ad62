"""Compiled or not, packed or masked, activations recomputed or kept: the choice, and the arithmetic in its reason."""

from __future__ import annotations

from typing import Any

import pytest

from engine.bench.teacher import config_named
from engine.decision import Decision
from engine.errors import BadInput
from engine.plan.cost import linear_weights
from engine.plan.knobs import choose_attention, choose_checkpointing, choose_compile
from tests.support.budgets import config

SHAPE = config_named("qwen2.5-0.5b")


def compiled(wanted: str = "auto", **changes: Any) -> Decision:
    facts: dict[str, Any] = dict(
        config=SHAPE,
        device="cuda",
        has_compiler=True,
        steps=5000,
        tokens_per_step=8192,
        layer_weights=linear_weights(SHAPE),
    )
    return choose_compile(wanted, **(facts | changes))


def test_compiling_is_chosen_where_it_pays_and_the_sums_are_shown() -> None:
    long, short = compiled(), compiled(steps=300)
    assert long.choice == "on" and short.choice == "off"
    assert long.reason == (
        "5.0k steps of 8.2k tokens save about 1m16s, compiling costs about 15.0 s"
    )
    assert short.rejected[0] == ("on", short.reason)
    assert compiled(steps=982).choice == "on" and compiled(steps=979).choice == "off"


def test_compiling_is_not_chosen_where_it_cannot_be_or_gains_nothing() -> None:
    for changes, word in (
        (dict(device="cpu"), "CPU"),
        (dict(has_compiler=False), "compiler"),
    ):
        decision = compiled(**changes)
        assert decision.choice == "off" and word in decision.reason
    assert compiled("on", device="cpu").choice == "on"
    assert compiled("on", steps=1).overridden and compiled("off").choice == "off"
    with pytest.raises(BadInput, match=r"student\.compile"):
        compiled("on", has_compiler=False)


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
