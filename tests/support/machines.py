"""Machines as data: what NVML, the CUDA driver and the kernel say on each.

Sources: `measured`, on an H200; `reported`, by owners of the hardware in public issues
(XuehaiPan/nvitop#208, unslothai/unsloth#10283 and #10486, rbonghi/jetson_stats#849,
crystian/ComfyUI-Crystools#141, and NVML's documentation on NUMA memory); `datasheet`. Sizes of the
hosts are chosen unless a report gives them. Two machines are claims that nobody has seen; they are
here because a reader must survive them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from engine.machine.cuda_driver import ATTRIBUTES
from engine.machine.cuda_facts import NO, YES, CudaDevice, CudaFacts, CudaState
from engine.machine.facts import DeviceFacts
from engine.machine.gpu_facts import LOST, NOT_SUPPORTED, SUPPORTED, TOTAL_IS_ZERO, GpuFacts
from engine.machine.host import CgroupMemory, HostMemory
from engine.machine.memory_class import MemoryClass, classify, match_gpus
from engine.machine.reading import Reading, absent, measured

MIB, GIB = 1024**2, 1024**3
UNSUPPORTED = "NVML: Not Supported"
NO_NVML = "no NVIDIA driver library (libnvidia-ml.so.1) on this machine"
MISMATCH = (
    "the NVIDIA driver in the kernel and its library differ in version: reboot after an update"
)
NO_LIBRARY = "no CUDA driver library on this machine: libcuda.so.1: cannot open shared object file"


def uuid_of(number: int) -> str:
    return f"0c5b1a3e-7f0d-4d6b-9d0a-{number:012x}"


def _or_absent(value: Any, source: str) -> Reading:
    return absent(UNSUPPORTED, source) if value is None else measured(value, source)


def gpu(
    name: str,
    *,
    index: int = 0,
    uuid: str | None = uuid_of(0),
    pci: str | None = "00000000:3B:00.0",
    total_mib: int | None = None,
    used_mib: int | None = 500,
    memory: str = SUPPORTED,
    utilisation: str = SUPPORTED,
    numa_node: int | None = None,
    mode: str | None = "hmm",
    capability: str = "9.0",
) -> GpuFacts:
    """Return NVML's facts of one GPU; None is "not supported"."""
    given = memory == SUPPORTED
    info = "nvmlDeviceGetMemoryInfo"
    return GpuFacts(
        index=index,
        name=measured(name, "nvmlDeviceGetName"),
        uuid=_or_absent(uuid and f"GPU-{uuid}", "nvmlDeviceGetUUID"),
        pci_address=_or_absent(pci, "nvmlDeviceGetPciInfo"),
        compute_capability=measured(capability, "nvmlDeviceGetCudaComputeCapability"),
        memory_total_bytes=_or_absent(total_mib * MIB if given and total_mib else None, info),
        memory_used_bytes=_or_absent(used_mib * MIB if given and used_mib else None, info),
        memory_status=measured(memory, info),
        utilisation_status=measured(utilisation, "nvmlDeviceGetUtilizationRates"),
        addressing_mode=_or_absent(mode, "nvmlDeviceGetAddressingMode"),
        numa_node=_or_absent(numa_node, "nvmlDeviceGetNumaNodeId"),
        sm_clock_max_mhz=measured(1980, "nvmlDeviceGetMaxClockInfo"),
        power_set_limit_w=_or_absent(None, "nvmlDeviceGetPowerManagementLimit"),
        power_default_limit_w=_or_absent(None, "nvmlDeviceGetPowerManagementDefaultLimit"),
    )


def cuda(
    name: str,
    *,
    index: int = 0,
    uuid: str = uuid_of(0),
    pci: str = "00000000:3b:00.0",
    total_bytes: int = 24 * GIB,
    capability: str = "9.0",
    integrated: str = NO,
    managed: str = YES,
    concurrent: str = YES,
    pageable: str = NO,
    host_tables: str = NO,
    multiprocessors: int = 132,
    l2_mib: int = 50,
) -> CudaDevice:
    """Return the CUDA driver's facts of one GPU."""

    def said(value: int | str, call: str) -> Reading:
        return measured(value, call)

    answers: dict[str, int | str] = {
        "multiprocessors": multiprocessors,
        "integrated": integrated,
        "l2_bytes": l2_mib * MIB,
        "unified_addressing": YES,
        "managed_memory": managed,
        "host_native_atomics": host_tables,
        "pageable_memory_access": pageable,
        "concurrent_managed_access": concurrent,
        "uses_host_page_tables": host_tables,
    }
    assert answers.keys() == ATTRIBUTES.keys()
    return CudaDevice(
        index=index,
        name=said(name, "cuDeviceGetName"),
        uuid=said(uuid, "cuDeviceGetUuid"),
        pci_address=said(pci, "cuDeviceGetPCIBusId"),
        total_bytes=said(total_bytes, "cuDeviceTotalMem"),
        compute_capability=said(capability, "cuDeviceGetAttribute compute_capability"),
        **{n: said(v, f"cuDeviceGetAttribute {n}") for n, v in answers.items()},
    )


def host_memory(total: int, available: int, swap_free: int = 0) -> HostMemory:
    def row(key: str, value: int) -> Reading:
        return measured(value, f"/proc/meminfo {key}")

    return HostMemory(
        total_bytes=row("MemTotal", total),
        available_bytes=row("MemAvailable", available),
        free_bytes=row("MemFree", available // 3),
        swap_total_bytes=row("SwapTotal", swap_free),
        swap_free_bytes=row("SwapFree", swap_free),
    )


def cgroup_memory(headroom: int | None = None) -> CgroupMemory:
    place = "/sys/fs/cgroup/memory.max"
    none = absent("no limit is set", place)
    room = none if headroom is None else measured(headroom, f"{place} - memory.current")
    limit = none if headroom is None else measured(headroom + GIB, place)
    return CgroupMemory(
        limit_bytes=limit,
        current_bytes=measured(GIB, "/sys/fs/cgroup/memory.current"),
        peak_bytes=measured(GIB, "/sys/fs/cgroup/memory.peak"),
        headroom_bytes=room,
    )


def cuda_facts(
    *devices: CudaDevice,
    state: CudaState = CudaState.WORKS,
    reason: str = "",
    visible: str | None = None,
) -> CudaFacts:
    count = absent(reason, "cuInit") if reason else measured(len(devices), "cuDeviceGetCount")
    driver = count if state is CudaState.NO_LIBRARY else measured("13.0", "cuDriverGetVersion")
    return CudaFacts(state=state, count=count, driver=driver, visible=visible, devices=devices)


def device_facts(
    gpus: tuple[GpuFacts, ...],
    cuda: CudaFacts,
    memory: HostMemory,
    cgroup: CgroupMemory,
    nvml: str | None = None,
) -> DeviceFacts:
    """Return the facts of a machine. `nvml` is the reason why NVML is missing."""
    session = absent(nvml, "nvmlInit") if nvml else measured("nvidia-ml-py 13.615.71", "metadata")
    driver = session if nvml else measured("580.159.04", "nvmlSystemGetDriverVersion")
    memories = tuple(
        classify(m.gpu, m.cuda, memory, cgroup, by=m.by) for m in match_gpus(gpus, cuda.devices)
    )
    return DeviceFacts(
        machine="x86_64",
        kernel="6.11.0",
        boot_id=measured("00000000-0000-4000-8000-000000000000", "boot_id"),
        cpu_count=measured(16, "/proc/stat"),
        cpu_effective=measured(16, "/proc/self/status"),
        memory=memory,
        cgroup_memory=cgroup,
        nvml=session,
        nvml_warning=None,
        driver=driver,
        cuda_driver=session if nvml else measured("13.0", "nvmlSystemGetCudaDriverVersion_v2"),
        gpus=gpus,
        cuda=cuda,
        memories=memories or (classify(None, None, memory, cgroup, by="there is no GPU"),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine and what must follow from its facts."""

    gpus: tuple[GpuFacts, ...] = ()
    cuda: CudaFacts
    kinds: tuple[MemoryClass, ...]
    """One for each of `facts.memories`."""
    auto: str
    """What memory.allocator=auto must choose."""
    usable_gib: float | None
    """Of the first entry; None where there must be no number."""
    memory: HostMemory = field(default_factory=lambda: host_memory(256 * GIB, 240 * GIB))
    cgroup: CgroupMemory = field(default_factory=cgroup_memory)
    nvml: str | None = None

    @property
    def facts(self) -> DeviceFacts:
        return device_facts(self.gpus, self.cuda, self.memory, self.cgroup, self.nvml)


# Measured on an H200: NVML's total minus CUDA's, which the driver keeps for itself.
_KEPT_MIB = 615


def _discrete(name: str, total_mib: int, capability: str, sms: int, l2_mib: int) -> Machine:
    return Machine(
        gpus=(gpu(name, total_mib=total_mib, capability=capability),),
        cuda=cuda_facts(
            cuda(
                name,
                total_bytes=(total_mib - _KEPT_MIB) * MIB,
                capability=capability,
                multiprocessors=sms,
                l2_mib=l2_mib,
            )
        ),
        kinds=(MemoryClass.DISCRETE,),
        auto="native",
        usable_gib=0.95 * (total_mib - _KEPT_MIB) / 1024,
    )


# Reported: NVML not supported for memory, all else works; CUDA's total is MemTotal byte for byte;
# addressing mode ATS. 119.7 GiB is what its owners' machines show.
_GB10_TOTAL = int(119.7 * GIB)
_GB10_HOST = host_memory(_GB10_TOTAL, 115 * GIB, swap_free=16 * GIB)
_GB10_RESERVE_GIB = 0.08 * 119.7
_GB10_GPU = gpu("NVIDIA GB10", memory=NOT_SUPPORTED, mode="ats", capability="12.1")
_GB10_CUDA = cuda(
    "NVIDIA GB10",
    total_bytes=_GB10_TOTAL,
    capability="12.1",
    integrated=YES,
    pageable=YES,
    host_tables=YES,
    multiprocessors=48,
    l2_mib=24,
)
_GB10 = Machine(
    gpus=(_GB10_GPU,),
    cuda=cuda_facts(_GB10_CUDA),
    kinds=(MemoryClass.UNIFIED_NO_FRAMEBUFFER,),
    auto="managed",
    usable_gib=115 - _GB10_RESERVE_GIB,
    memory=_GB10_HOST,
)
# Measured: 143771 MiB, 132 multiprocessors, 60 MiB of L2, driver 580.159.04.
_H200 = _discrete("NVIDIA H200", 143771, "9.0", 132, 60)
_H200_GPU, _H200_CUDA = _H200.gpus[0], _H200.cuda.devices[0]

MACHINES: dict[str, Machine] = {
    "h200": _H200,
    # Datasheets and nvidia-smi listings.
    "rtx_4090": _discrete("NVIDIA GeForce RTX 4090", 24564, "8.9", 128, 72),
    "rtx_5090": _discrete("NVIDIA GeForce RTX 5090", 32607, "12.0", 170, 96),
    "b200": _discrete("NVIDIA B200", 183359, "10.0", 148, 126),
    "gb10": _GB10,
    "gb10_in_a_container_with_a_limit": replace(
        _GB10, cgroup=cgroup_memory(20 * GIB), usable_gib=20
    ),
    # Reported as GB10: per-process memory is the only GPU-wide number.
    "thor": replace(
        _GB10,
        gpus=(replace(_GB10_GPU, name=measured("NVIDIA Thor", "nvmlDeviceGetName")),),
    ),
    # The older form of "not supported": success with a total of 0.
    "gb10_total_zero": replace(
        _GB10, gpus=(gpu("NVIDIA GB10", memory=TOTAL_IS_ZERO, capability="12.1"),)
    ),
    # A claim of people without the hardware: success with the host's total.
    "gb10_host_total": replace(
        _GB10,
        gpus=(gpu("NVIDIA GB10", total_mib=_GB10_TOTAL // MIB, used_mib=9000, capability="12.1"),),
        kinds=(MemoryClass.UNIFIED_HOST_TOTAL,),
    ),
    # Reported: 8128 MiB, of which 7929 free.
    "n1x": replace(
        _GB10,
        gpus=(gpu("NVIDIA N1X", total_mib=8128, used_mib=199, capability="12.1"),),
        kinds=(MemoryClass.UNIFIED_UNDER_REPORTS,),
    ),
    # NVML's documentation: GPU memory is a NUMA node of the host, so its numbers are the kernel's.
    "gh200": Machine(
        gpus=(gpu("NVIDIA GH200 480GB", total_mib=97871, used_mib=2871, numa_node=1, mode="ats"),),
        cuda=cuda_facts(
            cuda(
                "NVIDIA GH200 480GB",
                total_bytes=97871 * MIB,
                pageable=YES,
                host_tables=YES,
                l2_mib=60,
            )
        ),
        kinds=(MemoryClass.FRAMEBUFFER_IS_NUMA_NODE,),
        auto="native",
        usable_gib=0.95 * 97871 / 1024,
        memory=host_memory(480 * GIB, 460 * GIB),
    ),
    # Reported: NVML lists it, even utilisation is not supported; no uuid to compare. CUDA on Tegra
    # has managed memory without concurrent access.
    "orin": Machine(
        gpus=(
            gpu(
                "Orin (nvgpu)",
                uuid=None,
                pci=None,
                memory=NOT_SUPPORTED,
                utilisation=NOT_SUPPORTED,
                mode=None,
                capability="8.7",
            ),
        ),
        cuda=cuda_facts(
            cuda(
                "Orin",
                total_bytes=61 * GIB,
                capability="8.7",
                integrated=YES,
                concurrent=NO,
                multiprocessors=16,
                l2_mib=4,
            )
        ),
        kinds=(MemoryClass.NVML_PARTIAL,),
        auto="managed",
        usable_gib=50 - 8,
        memory=host_memory(61 * GIB, 50 * GIB),
    ),
    # Older JetPack: no NVML at all.
    "orin_without_nvml": Machine(
        cuda=cuda_facts(cuda("Orin", capability="8.7", integrated=YES, concurrent=NO)),
        kinds=(MemoryClass.NO_NVML,),
        auto="managed",
        usable_gib=50 - 8,
        memory=host_memory(61 * GIB, 50 * GIB),
        nvml=NO_NVML,
    ),
    "no_gpu": Machine(
        cuda=cuda_facts(state=CudaState.NO_LIBRARY, reason=NO_LIBRARY),
        kinds=(MemoryClass.NONE,),
        auto="native",
        usable_gib=240 - 0.08 * 256,
        nvml=NO_NVML,
    ),
    "discrete_without_nvml": replace(
        _H200, gpus=(), kinds=(MemoryClass.NO_NVML,), usable_gib=None, nvml=NO_NVML
    ),
    # A virtual GPU may refuse: that alone does not make it unified.
    "discrete_not_supported": replace(
        _H200,
        gpus=(gpu("NVIDIA H200", memory=NOT_SUPPORTED),),
        kinds=(MemoryClass.UNKNOWN,),
        usable_gib=None,
    ),
    "lost": replace(
        _H200, gpus=(gpu("NVIDIA H200", memory=LOST),), kinds=(MemoryClass.LOST,), usable_gib=None
    ),
    "driver_mismatch": Machine(
        cuda=cuda_facts(
            state=CudaState.BROKEN, reason=f"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: {MISMATCH}"
        ),
        kinds=(MemoryClass.NONE,),
        auto="native",
        usable_gib=240 - 0.08 * 256,
        nvml=MISMATCH,
    ),
    "hidden": replace(
        _H200,
        cuda=cuda_facts(
            state=CudaState.NONE_VISIBLE,
            reason="CUDA_ERROR_NO_DEVICE: CUDA_VISIBLE_DEVICES is '-1'",
            visible="-1",
        ),
        kinds=(MemoryClass.UNKNOWN,),
        usable_gib=None,
    ),
    # One seventh of an H200: a MIG instance with its own uuid and the PCI address of the whole GPU.
    "mig": replace(
        _H200,
        cuda=cuda_facts(
            cuda("NVIDIA H200 MIG 1g.18gb", uuid=uuid_of(77), total_bytes=16 * GIB),
            visible=f"MIG-{uuid_of(77)}",
        ),
        usable_gib=None,
    ),
    # Two GPUs, with CUDA told to show the second one first: the indices are crossed.
    "two_gpus_crossed": Machine(
        gpus=(
            gpu("NVIDIA H200", index=0, uuid=uuid_of(1), pci="00000000:3B:00.0", total_mib=143771),
            gpu(
                "NVIDIA GeForce RTX 4090",
                index=1,
                uuid=uuid_of(2),
                pci="00000000:5E:00.0",
                total_mib=24564,
            ),
        ),
        cuda=cuda_facts(
            cuda("NVIDIA GeForce RTX 4090", index=0, uuid=uuid_of(2), pci="00000000:5e:00.0"),
            cuda("NVIDIA H200", index=1, uuid=uuid_of(1)),
            visible="1,0",
        ),
        kinds=(MemoryClass.DISCRETE, MemoryClass.DISCRETE),
        auto="native",
        usable_gib=0.95 * 24564 / 1024,
    ),
}
