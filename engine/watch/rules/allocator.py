"""Whose memory grows: tensors, what the allocator keeps around them, or somebody else's.

    held       what tensors take, by torch's own count
    reserved   what the allocator keeps of the device for them; reserved - held is fragments and caches
    used       what is taken of the device, by all processes

Of three numbers that grow together the innermost is the cause: a tensor that is kept makes all three grow,
fragments the last two, another process the last alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.watch.rules.rule import CannotJudge, Case, Number, median

SHARE = 0.5
"""Of a growth, that has to be inside for it to be the inner one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who takes the memory that goes, in words."""

    meaning: str
    no_flip: str
    numbers: tuple[Number, ...] = ()


LEAK = Owner(
    meaning="something is kept from step to step: a graph, a list of tensors, a cache without a bound",
    no_flip="a leak is in the code: compare the allocator's snapshots of two steps",
)
_FRAGMENTS = Owner(
    meaning="no more is held by tensors: the allocator's blocks fit ever fewer requests, as rows or chunks of "
    "changing sizes make them",
    no_flip="no setting has it: start the run with PYTORCH_ALLOC_CONF=expandable_segments:True in its environment",
)
_OTHERS = Owner(
    meaning="it is not in torch's allocator: a library's workspace, or another process on this GPU",
    no_flip="nothing in the run takes it: see which processes are on the GPU",
)


def growth(values: list[float]) -> float:
    """Of the median, from the first third to the last."""
    third = len(values) // 3
    return median(values[2 * third :]) - median(values[:third])


def owner(case: Case, used: list[float], seconds: float, at_least: int) -> Owner:
    """Whose the growth of `used` in the last seconds is; a leak where the allocator says nothing."""
    try:
        held, reserved = (
            case.host_readings(name, seconds, at_least=at_least)
            for name in ("memory_held_bytes", "memory_reserved_bytes")
        )
    except CannotJudge:
        return LEAK
    inner, outer, all_of_it = growth(held), growth(reserved), growth(used)
    if inner >= SHARE * all_of_it:
        found = LEAK
    elif outer >= SHARE * all_of_it:
        found = _FRAGMENTS
    else:
        found = _OTHERS
    numbers = (
        ("held by tensors, GiB more", inner / 2**30, "from the first third to the last"),
        ("reserved by the allocator, GiB more", outer / 2**30, "from the first third to the last"),
    )
    return Owner(meaning=found.meaning, no_flip=found.no_flip, numbers=numbers)
