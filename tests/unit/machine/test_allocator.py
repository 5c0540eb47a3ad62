"""Which allocator each machine gets, and what happens when the user asks for another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import BadInput
from engine.machine.allocator import ALLOWED, choose_allocator
from engine.machine.cuda_facts import NO, YES
from engine.machine.facts import DeviceFacts
from engine.machine.reading import absent, measured
from tests.support.machines import MACHINES, Machine, cuda_facts

ATTRIBUTE = "cuDeviceGetAttribute"


def with_attribute(machine: Machine, name: str, value: str | None) -> DeviceFacts:
    """The machine with one attribute of its first GPU changed; None: not known."""
    reading = absent("CUDA_ERROR_INVALID_VALUE", ATTRIBUTE) if value is None else None
    device = replace(machine.cuda.devices[0], **{name: reading or measured(str(value), ATTRIBUTE)})
    return replace(machine, cuda=cuda_facts(device)).facts


@pytest.mark.parametrize("name", MACHINES)
def test_auto_is_managed_on_integrated_gpus_and_native_elsewhere(name: str) -> None:
    decision = choose_allocator("auto", MACHINES[name].facts)
    assert decision.choice == MACHINES[name].auto
    assert decision.knob == "memory.allocator"
    assert decision.reason and not decision.overridden
    assert decision.rejected[0][0] != decision.choice


@pytest.mark.parametrize("compute_device", ["cuda", "cpu"])
@pytest.mark.parametrize("wanted", ALLOWED)
@pytest.mark.parametrize("name", MACHINES)
def test_a_wish_is_granted_or_refused_and_never_replaced(
    name: str, wanted: str, compute_device: str
) -> None:
    facts = MACHINES[name].facts
    usable = bool(facts.cuda.devices) and compute_device == "cuda"
    if wanted == "managed" and not usable:
        with pytest.raises(BadInput, match=r"memory\.allocator: managed — expected a GPU"):
            choose_allocator(wanted, facts, compute_device)
        return
    decision = choose_allocator(wanted, facts, compute_device)
    assert decision.overridden == (wanted != "auto")
    if wanted != "auto":
        assert decision.choice == wanted
    elif not usable:
        assert decision.choice == "native"
    assert decision.choice == "native" or facts.cuda.devices[0].managed_memory.value == YES
    assert all(decision.lines())


@pytest.mark.parametrize("name", ["gb10", "orin", "h200"])
def test_managed_memory_that_the_gpu_has_not_is_never_chosen_and_refused_when_asked(
    name: str,
) -> None:
    facts = with_attribute(MACHINES[name], "managed_memory", NO)
    decision = choose_allocator("auto", facts)
    assert decision.choice == "native"
    assert "no managed memory" in " ".join(decision.lines())
    with pytest.raises(BadInput, match="it has no managed memory"):
        choose_allocator("managed", facts)


def test_what_the_driver_does_not_say_is_not_guessed() -> None:
    facts = with_attribute(MACHINES["gb10"], "integrated", None)
    decision = choose_allocator("auto", facts)
    assert decision.choice == "native" and "not known" in decision.reason
    facts = with_attribute(MACHINES["gb10"], "managed_memory", None)
    with pytest.raises(BadInput, match="not known: CUDA_ERROR_INVALID_VALUE"):
        choose_allocator("managed", facts)


def test_the_cost_of_managed_memory_is_said_where_there_is_one() -> None:
    on_h200 = choose_allocator("managed", MACHINES["h200"].facts)
    assert on_h200.reason == "its pages cross the bus when both sides use it"
    assert choose_allocator("managed", MACHINES["gb10"].facts).reason == ""
    assert "while a kernel runs" in choose_allocator("auto", MACHINES["orin"].facts).reason
    assert "auto is managed" in choose_allocator("native", MACHINES["gb10"].facts).reason


def test_the_reason_without_a_gpu_is_cudas_own() -> None:
    decision = choose_allocator("auto", MACHINES["driver_mismatch"].facts)
    assert "differ in version" in decision.reason
    assert "on the CPU" in choose_allocator("auto", MACHINES["h200"].facts, "cpu").reason


def test_the_first_gpu_that_cuda_shows_decides() -> None:
    gb10, h200 = (MACHINES[name].cuda.devices[0] for name in ("gb10", "h200"))
    for devices, choice in (((gb10, h200), "managed"), ((h200, gb10), "native")):
        facts = replace(MACHINES["h200"], cuda=cuda_facts(*devices)).facts
        assert choose_allocator("auto", facts).choice == choice


def test_an_unknown_wish_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(BadInput, match="one of auto, native, managed, found 'mangaed'"):
        choose_allocator("mangaed", MACHINES["h200"].facts)
