"""Probe what NVML can report about a GPU: every query that a run makes once, with its cost.

The table also says, in one sentence per query, what its absence rules out, so that a user learns it before a run
and not from a gap in a chart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.machine.nvml import Nvml
from engine.machine.reading import Reading, absent, measured

EVERY_SECOND, EVERY_TEN_SECONDS, ONCE = "every second", "every ten seconds", "once"
# Arguments of NVML's functions, from the enumerations of nvml.h.
_SM_CLOCK, _DIE_SENSOR = 1, 0
WORKS = "works"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    what: str
    functions: tuple[str, ...]
    """Names in NVML, newest first; the first that works is used."""
    asked: str
    """Schedule of this query in the monitor of a run."""
    arguments: tuple[Any, ...] = ()
    rules_out: str = ""
    """Question that cannot be answered without it; empty if its absence does not matter."""
    check: Callable[[Any], str | None] | None = None
    """Function that returns why a result is not valid, or None; used for queries that always succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The result of one query on one GPU."""

    gpu: int
    capability: Capability
    answer: Reading
    """`works`, or why not."""
    cost_s: float
    """Wall time of all calls that were tried, first calls included."""


def _total_is_zero(info: Any) -> str | None:
    return None if info.total else "NVML reports a total of 0 bytes, which is no reading"


def _no_gpm(support: Any) -> str | None:
    return None if support.isSupportedDevice else "the GPU has no GPM counters"


_GET = "nvmlDeviceGet"
CAPABILITIES = (
    Capability(
        what="utilisation",
        functions=(f"{_GET}UtilizationRates",),
        asked=EVERY_SECOND,
        rules_out="how busy the GPU is: an alert about an idle GPU cannot fire",
    ),
    Capability(
        what="memory in use",
        functions=(f"{_GET}MemoryInfo",),
        asked=EVERY_SECOND,
        check=_total_is_zero,
        rules_out="how much GPU memory all processes hold: only the run's own count is known",
    ),
    Capability(
        what="power",
        functions=(f"{_GET}PowerUsage",),
        asked=EVERY_SECOND,
        rules_out="the power that a run draws, and the energy of a step",
    ),
    Capability(
        what="SM clock",
        functions=(f"{_GET}ClockInfo",),
        arguments=(_SM_CLOCK,),
        asked=EVERY_SECOND,
        rules_out="whether the GPU ran slower during a run",
    ),
    Capability(
        what="reasons for the clock",
        functions=(f"{_GET}CurrentClocksEventReasons", f"{_GET}CurrentClocksThrottleReasons"),
        asked=EVERY_SECOND,
        rules_out="why the GPU ran slower: power, heat or no work",
    ),
    Capability(
        what="temperature",
        functions=(f"{_GET}TemperatureV", f"{_GET}Temperature"),
        arguments=(_DIE_SENSOR,),
        asked=EVERY_TEN_SECONDS,
        rules_out="how hot the GPU is: an alert about heat cannot fire",
    ),
    Capability(
        what="power limit in force",
        functions=(f"{_GET}EnforcedPowerLimit", f"{_GET}PowerManagementLimit"),
        asked=EVERY_TEN_SECONDS,
        rules_out="whether two runs had the same power limit",
    ),
    Capability(
        what="uuid",
        functions=(f"{_GET}UUID",),
        asked=ONCE,
        rules_out="a proof that NVML and CUDA speak of the same GPU",
    ),
    Capability(what="addressing mode", functions=(f"{_GET}AddressingMode",), asked=ONCE),
    Capability(what="NUMA node", functions=(f"{_GET}NumaNodeId",), asked=ONCE),
    Capability(
        what="processes and their memory",
        functions=(f"{_GET}ComputeRunningProcesses",),
        asked=EVERY_TEN_SECONDS,
        rules_out="which process holds GPU memory",
    ),
    Capability(
        what="energy since the driver loaded",
        functions=(f"{_GET}TotalEnergyConsumption",),
        asked=EVERY_TEN_SECONDS,
        rules_out="energy by the GPU's own counter",
    ),
    Capability(
        what="GPM counters",
        functions=("nvmlGpmQueryDeviceSupport",),
        asked=EVERY_SECOND,
        check=_no_gpm,
        rules_out="how much of the GPU works: tensor cores, occupancy, memory bandwidth",
    ),
)


def probe_gpu(nvml: Nvml, gpu: int, clock: Callable[[], float] = time.perf_counter) -> list[Probe]:
    """Make every query of the table on one GPU."""
    return [_probe(nvml, gpu, capability, clock) for capability in CAPABILITIES]


def _probe(nvml: Nvml, gpu: int, capability: Capability, clock: Callable[[], float]) -> Probe:
    begun_s = clock()
    missing: Reading | None = None
    for function in capability.functions:
        answer = nvml.ask(gpu, function, *capability.arguments)
        if isinstance(answer, Reading):
            # Keep the reason of the newest function: an older name may only not exist.
            missing = missing or answer
            continue
        why = capability.check(answer) if capability.check else None
        reading = measured(WORKS, function) if why is None else absent(why, function)
        break
    else:
        reading = missing or absent("nothing was asked", capability.what)
    return Probe(gpu=gpu, capability=capability, answer=reading, cost_s=clock() - begun_s)
