"""The NVML facts of a GPU that do not change while a process runs, and the words used for them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.machine.reading import Reading

SUPPORTED, NOT_SUPPORTED, TOTAL_IS_ZERO = "supported", "not supported", "total is zero"
LOST = "lost"
"""Values of `GpuFacts.memory_status`; `utilisation_status` is one of the first two."""

_CLOCK_EVENTS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake",
    "display_clock_setting",
)


def clock_event_words(mask: int) -> str:
    """Return the reasons for the current clocks: 0 -> 'none', 36 -> 'sw_power_cap,sw_thermal_slowdown'."""
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    words = [_CLOCK_EVENTS[b] if b < len(_CLOCK_EVENTS) else f"bit_{b}" for b in bits]
    return ",".join(words) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Facts that do not change while a process runs, and the memory in use now."""

    index: int
    name: Reading
    uuid: Reading
    """`GPU-` and hexadecimal with dashes, of the whole GPU even when it is divided by MIG."""
    pci_address: Reading
    """PCI address as the driver writes it: `00000000:3B:00.0`."""
    compute_capability: Reading
    """Compute capability, such as `9.0`."""
    memory_total_bytes: Reading
    """Memory of a discrete card in bytes; absent for an integrated device."""
    memory_used_bytes: Reading
    """Used by all processes at the time of the reading."""
    memory_status: Reading
    """One of the four words above; to be compared with CUDA's `integrated`."""
    utilisation_status: Reading
    """`supported` or `not supported`."""
    addressing_mode: Reading
    """`none`, `hmm` or `ats`; ats: the GPU uses the page tables of the CPU."""
    numa_node: Reading
    """NUMA node of the host that is the memory of this GPU; absent if there is none. The kernel then counts that
    memory."""
    sm_clock_max_mhz: Reading
    power_set_limit_w: Reading
    """The requested limit; the limit in force is read with `slow`."""
    power_default_limit_w: Reading
