"""Classify the memory of a GPU, and compute how much of it may be used.

No single source suffices. CUDA reports whether the GPU is integrated; NVML reports the memory in use, on GPUs where it
reports memory at all. One table joins them (a blank means that the column does not matter):

    CUDA integrated   NVML memory      NVML utilisation   class
    no                supported                           discrete
    no or not known   a NUMA node                         framebuffer_is_numa_node   GH200, GB200
    no                not supported    supported          unknown
    yes               not supported    supported          unified_no_framebuffer     GB10, Thor
    yes               < half MemTotal                     unified_under_reports      N1X
    yes               supported                           unified_host_total
                      not supported    not supported      nvml_partial               Orin
    not known         supported                           unknown
                      lost                                lost
                      no NVML                             no_nvml
    no GPU            no NVML                             none

"Not supported" alone proves nothing: only with `integrated` does it mean that the GPU has no memory of its
own. A total near the host's proves nothing either: a large card in a small host has one too.

The usable amount is one formula per memory pool, and is never given without both of its inputs:

    the host's         `engine.machine.host.usable_host_bytes`
    the GPU's own      min(total - used, 95 % of total); total is the smaller of CUDA's and NVML's;
                       NVML's includes memory that the driver reserves

Swap is never counted: a GPU that waits for a disk is useless to the run, and a machine that swaps because of
its GPU may not recover. MemFree is never used, because it counts the page cache as used; CUDA's own free
number is MemFree on an integrated GPU. Where the GPU's memory is a NUMA node, "used" is the kernel's count
and includes pages of ended processes, so the result is a lower bound. For a MIG instance NVML's numbers are
those of the whole GPU, so there is no result. The shares are judgement, not measurement.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.machine.cuda_driver import normal_pci_address
from engine.machine.cuda_facts import NO, YES, CudaDevice
from engine.machine.gpu_facts import LOST, NOT_SUPPORTED, SUPPORTED, TOTAL_IS_ZERO, GpuFacts
from engine.machine.host import CgroupMemory, HostMemory, usable_host_bytes
from engine.machine.reading import Reading, absent, measured

OWN_MEMORY_SHARE = 0.95
"""Maximum share of a GPU's own memory that a run may use, 0 to 1."""
_UNDER_REPORT_SHARE = 0.5
"""Share of the host's memory below which NVML's total of an integrated GPU is too low, 0 to 1."""
_NO_CONTEXT = "no source without a CUDA context says how much is free"


class MemoryClass(StrEnum):
    DISCRETE = "discrete"
    UNIFIED_NO_FRAMEBUFFER = "unified_no_framebuffer"
    UNIFIED_UNDER_REPORTS = "unified_under_reports"
    UNIFIED_HOST_TOTAL = "unified_host_total"
    FRAMEBUFFER_IS_NUMA_NODE = "framebuffer_is_numa_node"
    NVML_PARTIAL = "nvml_partial"
    NO_NVML = "no_nvml"
    LOST = "lost"
    UNKNOWN = "unknown"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """The memory of one GPU, or of the host where there is no GPU."""

    nvml_index: Reading
    """The GPU's index in NVML, or why it has none; the source names what it was matched by."""
    cuda_index: Reading
    kind: MemoryClass
    reason: str
    usable_bytes: Reading
    """Bytes that a run may use now."""

    @property
    def label(self) -> str:
        """Return the label for people: `cuda:0`, `GPU 1` for one that only NVML sees, or `host`."""
        if self.cuda_index.value is not None:
            return f"cuda:{self.cuda_index}"
        return "host" if self.nvml_index.value is None else f"GPU {self.nvml_index}"

    @property
    def subject(self) -> str:
        """Return the prefix for log fields: `cuda0`, `gpu1`, `host`."""
        if self.cuda_index.value is not None:
            return f"cuda{self.cuda_index}"
        return "host" if self.nvml_index.value is None else f"gpu{self.nvml_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One GPU as NVML and CUDA see it; either may be missing."""

    gpu: GpuFacts | None
    cuda: CudaDevice | None
    by: str
    """Evidence that the two are the same GPU (`uuid`, ...), or the reason why one of them is missing."""


def match_gpus(gpus: Sequence[GpuFacts], devices: Sequence[CudaDevice]) -> list[Match]:
    """Match the GPUs, each listed once: in CUDA's order, then those that CUDA does not show.

    They are matched by uuid, then by PCI address, which a MIG instance shares with the whole GPU. If one of
    each is left with nothing to compare, the two are matched, because no other pair is possible.
    """
    matches: list[Match] = []
    matched: set[int] = set()
    for device in devices:
        gpu, by = _partner(device, gpus)
        if gpu is None and len(gpus) == len(devices) == 1 and not _comparable(gpus[0], device):
            gpu, by = gpus[0], "the only GPU of both, neither uuid nor PCI address to compare"
        if gpu is not None:
            matched.add(gpu.index)
        matches.append(Match(gpu=gpu, cuda=device, by=by if gpu else "NVML does not list it"))
    rest = (gpu for gpu in gpus if gpu.index not in matched)
    return matches + [Match(gpu=gpu, cuda=None, by="CUDA does not show it") for gpu in rest]


def _partner(device: CudaDevice, gpus: Sequence[GpuFacts]) -> tuple[GpuFacts | None, str]:
    for by, key_of in (("uuid", _uuid), ("PCI address", _address)):
        key = key_of(device)
        for gpu in gpus:
            if key is not None and key_of(gpu) == key:
                return gpu, by
    return None, ""


def _uuid(gpu: GpuFacts | CudaDevice) -> str | None:
    value = gpu.uuid.value
    return None if value is None else str(value).lower().removeprefix("gpu-").removeprefix("mig-")


def _address(gpu: GpuFacts | CudaDevice) -> str | None:
    value = gpu.pci_address.value
    return None if value is None else normal_pci_address(str(value))


def _comparable(gpu: GpuFacts, device: CudaDevice) -> bool:
    return any(None not in (key(gpu), key(device)) for key in (_uuid, _address))


def usable_own_bytes(gpu: GpuFacts, cuda: CudaDevice) -> Reading:
    """Return how many bytes a process may take of the GPU's own memory."""
    used, totals = gpu.memory_used_bytes, (gpu.memory_total_bytes, cuda.total_bytes)
    for part in (used, *totals):
        if part.number is None:
            return part
    total = min(totals, key=lambda reading: reading.number or 0)
    total_bytes, used_bytes = int(total.number or 0), int(used.number or 0)
    limit_bytes = int(OWN_MEMORY_SHARE * total_bytes)
    if total_bytes - used_bytes <= limit_bytes:
        return measured(max(0, total_bytes - used_bytes), f"{total.source} - used by {used.source}")
    return measured(limit_bytes, f"{OWN_MEMORY_SHARE:.0%} of {total.source}")


# contract: cuda-unified-memory-allocator-v1
def classify(
    gpu: GpuFacts | None,
    cuda: CudaDevice | None,
    memory: HostMemory,
    cgroup: CgroupMemory,
    *,
    by: str,
) -> GpuMemory:
    """Classify one GPU and compute what may be used. `by` is the evidence of its `Match`."""
    kind, reason = _kind(gpu, cuda, memory)
    integrated = cuda is not None and cuda.integrated.value == YES
    has_own_memory = kind in (MemoryClass.DISCRETE, MemoryClass.FRAMEBUFFER_IS_NUMA_NODE)
    if kind is MemoryClass.LOST:
        usable = absent("the GPU is lost", "NVML")
    elif kind is MemoryClass.NONE or (integrated and kind is not MemoryClass.UNKNOWN):
        usable = usable_host_bytes(memory, cgroup)
    elif has_own_memory and gpu is not None and cuda is not None:
        usable = usable_own_bytes(gpu, cuda)
        if _uuid(gpu) != _uuid(cuda) and _comparable(gpu, cuda):
            why = f"this is a part of a divided GPU (MIG): NVML's numbers are of the whole; {_NO_CONTEXT}"
            usable = absent(why, "NVML and CUDA")
    elif cuda is None:
        usable = absent("CUDA does not show this GPU", "CUDA driver")
    else:
        usable = absent(_NO_CONTEXT, "NVML and CUDA")
    return GpuMemory(
        nvml_index=_index_reading(gpu, cuda, by, "NVML"),
        cuda_index=_index_reading(cuda, gpu, by, "CUDA driver"),
        kind=kind,
        reason=reason,
        usable_bytes=usable,
    )


def _index_reading(
    gpu: GpuFacts | CudaDevice | None,
    counterpart: GpuFacts | CudaDevice | None,
    by: str,
    source: str,
) -> Reading:
    if gpu is None:
        return absent(by, source)
    return measured(gpu.index, source if counterpart is None else by)


def _kind(
    gpu: GpuFacts | None, cuda: CudaDevice | None, memory: HostMemory
) -> tuple[MemoryClass, str]:
    if gpu is None and cuda is None:
        return MemoryClass.NONE, "no GPU is seen: a run computes in the host's memory"
    if gpu is not None and gpu.memory_status.value == LOST:
        return MemoryClass.LOST, "NVML says that the GPU is lost"
    if gpu is None:
        shared = (
            "the GPU shares the host's memory"
            if _has_integrated(cuda, YES)
            else "memory of its own"
        )
        known = (
            shared
            if _has_integrated(cuda, YES) or _has_integrated(cuda, NO)
            else "not known whether integrated"
        )
        return MemoryClass.NO_NVML, f"CUDA alone sees it: {known}"
    status = gpu.memory_status.value
    if status != SUPPORTED and gpu.utilisation_status.value == NOT_SUPPORTED:
        return (
            MemoryClass.NVML_PARTIAL,
            "NVML lists the GPU but gives neither its memory nor its utilisation",
        )
    if gpu.numa_node.value is not None and not _has_integrated(cuda, YES):
        node = f"its memory is NUMA node {gpu.numa_node.value} of the host"
        return MemoryClass.FRAMEBUFFER_IS_NUMA_NODE, node
    if _has_integrated(cuda, YES):
        return _unified(gpu, memory)
    if _has_integrated(cuda, NO) and status == SUPPORTED:
        return MemoryClass.DISCRETE, "CUDA says not integrated, NVML gives its memory"
    if _has_integrated(cuda, NO):
        why = gpu.memory_total_bytes.absent or str(status)
        return MemoryClass.UNKNOWN, f"CUDA says not integrated, but NVML gives no memory: {why}"
    why = "CUDA does not show it" if cuda is None else str(cuda.integrated.absent)
    return MemoryClass.UNKNOWN, f"whether it is integrated is not known: {why}"


def _has_integrated(cuda: CudaDevice | None, answer: str) -> bool:
    return cuda is not None and cuda.integrated.value == answer


def _unified(gpu: GpuFacts, memory: HostMemory) -> tuple[MemoryClass, str]:
    status, total = gpu.memory_status.value, gpu.memory_total_bytes.number
    if status in (NOT_SUPPORTED, TOTAL_IS_ZERO):
        return (
            MemoryClass.UNIFIED_NO_FRAMEBUFFER,
            f"CUDA says integrated, NVML's memory query: {status}",
        )
    if status != SUPPORTED:
        why = gpu.memory_status.absent
        return MemoryClass.NVML_PARTIAL, f"CUDA says integrated, NVML's memory query failed: {why}"
    assert total is not None, "NVML gives a total with this status"
    host = memory.total_bytes.number
    if host is None:
        why = f"MemTotal is {memory.total_bytes}"
        return MemoryClass.UNKNOWN, f"CUDA says integrated, NVML's total cannot be judged: {why}"
    if total < _UNDER_REPORT_SHARE * host:
        return (
            MemoryClass.UNIFIED_UNDER_REPORTS,
            "CUDA says integrated, NVML's total is less than half of MemTotal",
        )
    return (
        MemoryClass.UNIFIED_HOST_TOTAL,
        "CUDA says integrated, NVML's total is about the host's",
    )
