"""Diagnose, before a run starts, what this machine can compute and measure: its facts, and the conclusions from them.

    pass      a usable machine, and everything that a run reads can be read
    unknown   it can be used, but something a run would read is missing; each such reading is named
              with the questions that cannot be answered without it
    fail      something is broken: a driver that does not answer, a lost GPU, a torch that cannot
              use the GPU that is there

A machine without a GPU is a normal state: a run computes on its CPU, no GPU is queried, and the verdict is not
lowered. It is not normal when the PCI bus has an NVIDIA GPU or `CUDA_VISIBLE_DEVICES` hides one.

`diagnose` is pure; `engine doctor` reads the machine and prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.decision import Decision
from engine.errors import BadInput
from engine.machine.allocator import choose_allocator
from engine.machine.cuda_facts import YES, CudaState
from engine.machine.facts import DeviceFacts
from engine.machine.memory_class import MemoryClass
from engine.machine.reading import Reading, event_fields
from engine.machine.surroundings import Surroundings
from engine.verdict import Level, Verdict

RULES_OUT = {
    "gpu_util_pct": "how busy the GPU is: an alert about an idle GPU cannot fire",
    "gpu_mem_used_bytes": "how much GPU memory all processes hold: only the run's own count is known",
    "gpu_power_w": "the power that a run draws",
    "sm_clock_mhz": "whether the GPU ran slower during a run",
    "clock_event_reasons": "why the GPU ran slower: power, heat or no work",
    "gpu_temperature_c": "how hot the GPU is: an alert about heat cannot fire",
    "gpu_power_limit_w": "whether two runs had the same power limit",
    "gpu_energy_j": "energy by the GPU's own counter",
    "sm_util_pct": "how much of the GPU works: tensor cores, occupancy, memory bandwidth",
}
"""Questions that cannot be answered without a GPU reading, by the name of the reading in the run log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Something that cannot be measured here."""

    what: str
    reason: str
    rules_out: str
    counts: bool
    """Whether a run reads it, so that its absence lowers the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    facts: DeviceFacts
    surroundings: Surroundings
    allocator: Decision
    gpu_readings: tuple[Mapping[str, Reading], ...]
    """Readings that a run would log for each GPU, by name."""
    broken: tuple[str, ...]
    missing: tuple[Missing, ...]

    @property
    def verdict(self) -> Verdict:
        if self.broken:
            return Verdict(Level.FAIL, "; ".join(self.broken))
        counting = [m.what for m in self.missing if m.counts]
        if counting:
            return Verdict(Level.UNKNOWN, f"cannot be measured here: {', '.join(counting)}")
        gpus = len(self.facts.cuda.devices)
        what = f"{gpus} GPU(s)" if gpus else "no GPU, a run computes on the CPU"
        return Verdict(Level.PASS, f"{what}; everything that a run reads can be read")

    def as_json(self) -> dict[str, Any]:
        """Return one JSON value; readings as in the run log, flat, with `_source` and `_absent`."""
        surroundings: dict[str, Any] = {}
        for item in fields(self.surroundings):
            value = getattr(self.surroundings, item.name)
            if isinstance(value, Reading):
                surroundings |= event_fields(item.name, value)
        return {
            "verdict": self.verdict.level.name.lower(),
            "reason": self.verdict.reason,
            "broken": list(self.broken),
            "missing": [
                {"what": m.what, "reason": m.reason, "rules_out": m.rules_out, "counts": m.counts}
                for m in self.missing
            ],
            "versions": {name: r.value for name, r in self.surroundings.versions.items()},
            "surroundings": surroundings,
            "allocator": {
                "knob": self.allocator.knob,
                "choice": self.allocator.choice,
                "reason": self.allocator.reason,
                "rejected": [list(pair) for pair in self.allocator.rejected],
                "override": self.allocator.override,
            },
            "facts": self.facts.as_event_fields(),
            "gpu_readings": [
                {
                    key: value
                    for item in readings.items()
                    for key, value in event_fields(*item).items()
                }
                for readings in self.gpu_readings
            ],
        }


def diagnose(
    facts: DeviceFacts,
    gpu_readings: Sequence[Mapping[str, Reading]],
    surroundings: Surroundings,
    wanted_allocator: str = "auto",
) -> Diagnosis:
    """Draw the conclusions from the facts of a machine.

    `wanted_allocator` is the allocator that the environment requests. If the machine does not have it the
    verdict is fail, because a run would be refused.
    """
    refused = None
    try:
        allocator = choose_allocator(wanted_allocator, facts)
    except BadInput as error:
        refused = f"a run would be refused: {error.message}"
        allocator = choose_allocator("auto", facts)
    return Diagnosis(
        facts=facts,
        surroundings=surroundings,
        allocator=allocator,
        gpu_readings=tuple(gpu_readings),
        broken=(*_broken(facts, surroundings, allocator), *([refused] if refused else [])),
        missing=(
            *_missing_gpu(facts, surroundings),
            *_missing_readings(gpu_readings),
            *_missing_memory(facts),
            *_missing_evidence(facts, surroundings),
        ),
    )


def _broken(facts: DeviceFacts, surroundings: Surroundings, allocator: Decision) -> Iterator[str]:
    cuda, listed = facts.cuda, len(facts.gpus)
    if cuda.state is CudaState.BROKEN:
        yield f"CUDA does not work: {cuda.count.absent}"
    elif listed and cuda.state is CudaState.NO_LIBRARY:
        yield (
            f"NVML lists {listed} GPU(s) but {cuda.count.absent}; a container needs the driver's "
            "compute capability (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        )
    elif listed and cuda.state is CudaState.NO_DEVICE:
        yield f"NVML lists {listed} GPU(s) but CUDA finds none: {cuda.count.absent}"
    for memory in facts.memories:
        if memory.kind is MemoryClass.LOST:
            yield f"{memory.label}: {memory.reason}; the machine has to start again"
    torch = surroundings.versions["torch"]
    if torch.value is None:
        yield f"torch: {torch.absent}"
    elif cuda.devices and str(torch.value).endswith("+cpu"):
        yield f"torch {torch.value} is built without CUDA and cannot use the GPU that is here"
    if allocator.choice == "managed" and surroundings.c_compiler.value is None:
        yield (
            f"the managed allocator cannot be built: {surroundings.c_compiler.absent}; install one, "
            "or set memory.allocator=native"
        )


def _missing_gpu(facts: DeviceFacts, surroundings: Surroundings) -> Iterator[Missing]:
    cuda = facts.cuda
    any_gpu = bool(facts.gpus or cuda.devices)
    if cuda.state is CudaState.NONE_VISIBLE:
        yield Missing(
            what="CUDA's facts",
            reason=str(cuda.count.absent),
            rules_out="a run on a GPU, and which kind of memory it has",
            counts=True,
        )
    elif not any_gpu and cuda.state is not CudaState.BROKEN and surroundings.pci_gpus.number:
        yield Missing(
            what="the GPU on the PCI bus",
            reason=f"{cuda.count.absent}; the driver is not installed, or this container was not given the GPU",
            rules_out="a run on a GPU",
            counts=True,
        )
    if cuda.devices and not facts.gpus:
        yield Missing(
            what="NVML",
            reason=str(facts.nvml.absent),
            rules_out="utilisation, memory, power, clocks and temperature: a run's log has none of them",
            counts=True,
        )


def _missing_readings(gpu_readings: Sequence[Mapping[str, Reading]]) -> Iterator[Missing]:
    for gpu, readings in enumerate(gpu_readings):
        for name, reading in readings.items():
            if reading.absent is not None and name in RULES_OUT:
                yield Missing(
                    what=f"GPU {gpu} {name}",
                    reason=reading.absent,
                    rules_out=RULES_OUT[name],
                    counts=True,
                )


def _missing_memory(facts: DeviceFacts) -> Iterator[Missing]:
    for memory in facts.memories:
        if memory.usable_bytes.absent is not None and memory.cuda_index.value is not None:
            yield Missing(
                what=f"usable memory of {memory.label}",
                reason=memory.usable_bytes.absent,
                rules_out="whether a run fits, before it is loaded",
                counts=True,
            )
    for device in facts.cuda.devices:
        if device.integrated.absent is not None:
            yield Missing(
                what=f"whether cuda:{device.index} is integrated",
                reason=device.integrated.absent,
                rules_out="whether its memory is the host's",
                counts=True,
            )
        elif device.integrated.value == YES:
            yield Missing(
                what=f"CUDA memory of cuda:{device.index} in control groups and process sizes",
                reason="the GPU is integrated: the kernel books CUDA memory to no process and no group",
                rules_out="a proof from the counters of a control group that a run was killed for memory; "
                "the size of a run from its RSS",
                counts=True,
            )


def _missing_evidence(facts: DeviceFacts, surroundings: Surroundings) -> Iterator[Missing]:
    evidence = (
        (
            "memory pressure (PSI)",
            surroundings.memory_pressure_pct,
            "that the host is about to stall for lack of memory, before it does",
            True,
        ),
        (
            "OOM kills of the kernel",
            surroundings.vmstat_oom_kill,
            "whether a SIGKILL came from the kernel's OOM killer or from outside",
            True,
        ),
        (
            "OOM kills of the control group",
            surroundings.memcg_oom_kill,
            "whether a container's limit or the whole machine ran out of memory",
            True,
        ),
        (
            "the kernel's log",
            surroundings.kernel_log,
            "the kernel's own line on a kill, and the driver's Xid errors",
            True,
        ),
        (
            "attaching to a trainer",
            surroundings.attach,
            "the stack of a hanging trainer, from outside",
            False,
        ),
        (
            "py-spy",
            surroundings.py_spy,
            "the Python stack of a hanging trainer, from outside",
            False,
        ),
        (
            "a C compiler",
            surroundings.c_compiler,
            "Triton kernels and the managed allocator, which compile a small C file",
            bool(facts.cuda.devices),
        ),
    )
    for what, reading, rules_out, counts in evidence:
        if reading.absent is not None:
            yield Missing(what=what, reason=reading.absent, rules_out=rules_out, counts=counts)
