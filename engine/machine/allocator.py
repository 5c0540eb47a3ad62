"""Choose the allocator for the weights of a run, before torch loads and from machine facts alone.

`native` is device memory. `managed` is CUDA managed memory: one address on host and device, with pages that
migrate between them. On an integrated GPU both are host memory and nothing migrates, but only managed memory
is limited by what the host has free and can be read by the host without a copy. On a discrete GPU pages would
cross the bus.

On a machine with several GPUs the choice is made for the first one that CUDA shows, because the run computes on it.
"""

from __future__ import annotations

from engine.decision import Decision
from engine.errors import BadInput
from engine.machine.cuda_facts import NO, YES, CudaDevice
from engine.machine.facts import DeviceFacts

KNOB = "memory.allocator"
ALLOWED = ("auto", "native", "managed")


# contract: cuda-unified-memory-allocator-v1
def choose_allocator(wanted: str, facts: DeviceFacts, compute_device: str = "cuda") -> Decision:
    """Choose `managed` on an integrated GPU with managed memory, `native` otherwise, or what the user set.

    `compute_device` is where the run computes, `cuda` or `cpu`. Raises BadInput if `wanted` is none of ALLOWED, or
    if it is managed memory and the run computes on the CPU or the first GPU is not known to have it.
    """
    if wanted not in ALLOWED:
        raise BadInput.expected(KNOB, "the setting", f"one of {', '.join(ALLOWED)}", repr(wanted))
    device = facts.cuda.devices[0] if facts.cuda.devices else None
    if compute_device == "cpu" or device is None:
        return _without_gpu(wanted, facts, compute_device)
    if wanted == "managed":
        return _managed_by_request(device)
    integrated, name = device.integrated, f"{device.name.value or 'the GPU'}"
    impossible = () if device.managed_memory.value == YES else ("managed",)
    if wanted == "native":
        note = f"{name} is integrated, auto is managed" if integrated.value == YES else ""
        return Decision(
            knob=KNOB,
            choice="native",
            reason=note,
            rejected=_managed_as_rejected(device),
            impossible=impossible,
            overridden=True,
        )
    if integrated.value is None:
        reason = f"it is not known whether {name} shares the host's memory: {integrated.absent}"
    elif integrated.value == NO:
        reason = f"{name} has memory of its own"
    elif device.managed_memory.value != YES:
        reason = f"{name} shares the host's memory, but {_no_managed(device)}"
    else:
        return Decision(
            knob=KNOB,
            choice="managed",
            reason=f"{name} shares the host's memory{_caution(device)}",
            rejected=(("native", "not bounded by what the host has free (MemAvailable)"),),
        )
    return Decision(
        knob=KNOB,
        choice="native",
        reason=reason,
        rejected=_managed_as_rejected(device),
        impossible=impossible,
    )


def _without_gpu(wanted: str, facts: DeviceFacts, compute_device: str) -> Decision:
    why = "the run computes on the CPU"
    if compute_device != "cpu":
        why = f"there is no GPU to manage memory for: {facts.cuda.count.absent}"
    if wanted == "managed":
        raise BadInput.expected(
            KNOB, "managed", "a GPU that CUDA shows", why, hint=f"use --set {KNOB}=auto"
        )
    return Decision(
        knob=KNOB,
        choice="native",
        reason="" if wanted == "native" else why,
        rejected=(("managed", f"managed memory needs a GPU, and {why}"),),
        impossible=("managed",),
        overridden=wanted == "native",
    )


def _managed_by_request(device: CudaDevice) -> Decision:
    if device.managed_memory.value != YES:
        raise BadInput.expected(
            KNOB,
            f"managed on {device.name}",
            "a GPU with managed memory",
            _no_managed(device),
            hint=f"use --set {KNOB}=auto",
        )
    note = (
        "" if device.integrated.value == YES else "its pages cross the bus when both sides use it"
    )
    return Decision(
        knob=KNOB,
        choice="managed",
        reason=(note + _caution(device)).removeprefix("; "),
        rejected=(("native", "not asked for"),),
        overridden=True,
    )


def _managed_as_rejected(device: CudaDevice) -> tuple[tuple[str, str], ...]:
    """Return managed memory as a rejected choice, with the reason."""
    if device.managed_memory.value != YES:
        return (("managed", _no_managed(device)),)
    if device.integrated.value == YES:
        return (("managed", "not asked for"),)
    return (("managed", "its pages would move over the bus between two memories"),)


def _no_managed(device: CudaDevice) -> str:
    answer = device.managed_memory
    if answer.value is None:
        return f"whether it has managed memory is not known: {answer.absent}"
    return "it has no managed memory"


def _caution(device: CudaDevice) -> str:
    """Return a caution when the GPU lacks concurrent managed access: the CPU must then not access managed memory while
    a kernel runs."""
    if device.concurrent_managed_access.value == NO:
        return "; the CPU must not touch managed memory while a kernel runs there"
    return ""
