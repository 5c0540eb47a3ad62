"""The facts of the machine: each number with its source, or the reason why there is none.

They are read once at the start of a run, without torch and without a CUDA context, because the memory
allocator has to be chosen before the first CUDA call. `lines()` is for people; the run log takes
`as_event_fields()`, which is flat:

    host_memory_total_bytes, host_memory_total_bytes_source, ..., gpu0_name, gpu0_name_source, ...

A field without a value is None and has the reason in `<field>_absent`.

NVML lists every GPU, in bus order (`gpu0_...`); CUDA lists those it is configured to show, in its own order
(`cuda0_...`). `memories` joins the two and says what kind of memory each GPU has and how much may be used; a
machine without a GPU has one entry, for the host.

CUDA is queried in a short-lived child process (`cuda_driver`), so reading the facts takes up to some seconds
on a machine with many GPUs, and keeps no state in this process.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, fields

from engine.machine.cuda_driver import ask_in_child
from engine.machine.cuda_facts import YES, CudaDevice, CudaFacts
from engine.machine.gpu_facts import GpuFacts
from engine.machine.host import CgroupMemory, Host, HostMemory
from engine.machine.memory_class import GpuMemory, classify, match_gpus
from engine.machine.nvml import Nvml, find_binding, open_nvml
from engine.machine.reading import Reading, event_fields, measured
from engine.units import format_bytes, format_value


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    machine: str
    """Instruction set of the CPU: `x86_64`, `aarch64`."""
    kernel: str
    boot_id: Reading
    cpu_count: Reading
    cpu_effective: Reading
    memory: HostMemory
    cgroup_memory: CgroupMemory
    nvml: Reading
    """The NVML binding in use, or the reason why there are no GPU readings."""
    nvml_warning: str | None
    driver: Reading
    cuda_driver: Reading
    gpus: tuple[GpuFacts, ...]
    """GPUs in NVML's order."""
    cuda: CudaFacts
    memories: tuple[GpuMemory, ...]
    """One entry per GPU: those that CUDA shows, in its order, then the others; never empty."""

    @property
    def has_integrated_gpu(self) -> bool | None:
        """Whether CUDA memory may be host memory, which no cgroup counter sees; None when CUDA does not report it, or
        lists no GPU."""
        known = [device.integrated.value for device in self.cuda.devices]
        if YES in known:
            return True
        return None if None in known or not known else False

    def lines(self) -> list[str]:
        """Return the facts for people, one per line; each number is followed by its source."""
        out = [
            f"host: {self.machine}, kernel {self.kernel}",
            _line("CPUs", self.cpu_count),
            _line("CPUs this process may use", self.cpu_effective),
            _line("memory", self.memory.total_bytes, "bytes"),
            _line("memory available", self.memory.available_bytes, "bytes"),
            _line("swap free", self.memory.swap_free_bytes, "bytes"),
            _line("control group limit", self.cgroup_memory.limit_bytes, "bytes"),
            _line("control group headroom", self.cgroup_memory.headroom_bytes, "bytes"),
            _line("GPU readings", self.nvml),
        ]
        if self.nvml_warning is not None:
            out.append(f"warning: {self.nvml_warning}")
        if self.gpus:
            out += [
                _line("NVIDIA driver", self.driver),
                _line("CUDA of the driver", self.cuda_driver),
            ]
        for gpu in self.gpus:
            head = f"GPU {gpu.index}"
            out += [
                _line(head, gpu.name),
                _line(f"{head} uuid", gpu.uuid),
                _line(f"{head} compute capability", gpu.compute_capability),
                _line(f"{head} memory", gpu.memory_total_bytes, "bytes"),
                _line(f"{head} memory in use", gpu.memory_used_bytes, "bytes"),
                _line(f"{head} memory query", gpu.memory_status),
                _line(f"{head} addressing mode", gpu.addressing_mode),
                _line(f"{head} NUMA node", gpu.numa_node),
                _line(f"{head} maximum SM clock", gpu.sm_clock_max_mhz, "MHz"),
                _line(f"{head} requested power limit", gpu.power_set_limit_w, "W"),
                _line(f"{head} default power limit", gpu.power_default_limit_w, "W"),
            ]
        out.append(_line("GPUs of CUDA", self.cuda.count))
        for device in self.cuda.devices:
            out += _cuda_lines(device)
        for memory in self.memories:
            out.append(f"{memory.label} memory class: {memory.kind} ({memory.reason})")
            out.append(_line(f"{memory.label} usable memory", memory.usable_bytes, "bytes"))
        return out

    def as_event_fields(self) -> dict[str, float | int | str | None]:
        """Return the facts as flat fields of one log line."""
        out: dict[str, float | int | str | None] = {
            "machine": self.machine,
            "kernel": self.kernel,
            "nvml_warning": self.nvml_warning,
            "gpu_count": len(self.gpus) if self.nvml.absent is None else None,
        }
        for name in ("boot_id", "cpu_count", "cpu_effective", "nvml", "driver", "cuda_driver"):
            out |= event_fields(name, getattr(self, name))
        out |= _flat("host_memory", self.memory) | _flat("cgroup_memory", self.cgroup_memory)
        for gpu in self.gpus:
            out |= _flat(f"gpu{gpu.index}", gpu)
        out |= {"cuda_state": self.cuda.state.value, "cuda_visible_devices": self.cuda.visible}
        out |= event_fields("cuda_count", self.cuda.count)
        for device in self.cuda.devices:
            out |= _flat(f"cuda{device.index}", device)
        for memory in self.memories:
            out |= {
                f"{memory.subject}_memory_class": memory.kind.value,
                f"{memory.subject}_memory_class_reason": memory.reason,
            }
            out |= event_fields(f"{memory.subject}_usable_bytes", memory.usable_bytes)
            if memory.subject.startswith("cuda"):
                out |= event_fields(f"{memory.subject}_nvml_index", memory.nvml_index)
        return out


def read_facts(
    host: Host | None = None,
    nvml: Nvml | Reading | None = None,
    cuda: CudaFacts | None = None,
) -> DeviceFacts:
    """Read the machine now. Without `nvml` a session is opened and closed here; without `cuda` the driver is
    queried in a child process."""
    host = host or Host()
    cuda = ask_in_child() if cuda is None else cuda
    session = open_nvml() if nvml is None else nvml
    no_gpus: tuple[GpuFacts, ...] = ()
    if isinstance(session, Reading):
        binding, driver, cuda_driver = session, session, session
        warning, gpus = find_binding()[1], no_gpus
    else:
        # The binding in use is known to work, whether or not package metadata names it.
        binding = session.binding
        if binding.absent is not None:
            binding = measured("a pynvml module without package metadata", binding.source)
        warning = session.binding_warning
        driver, cuda_driver = session.driver_version(), session.cuda_driver_version()
        gpus = tuple(session.facts(index) for index in range(session.count))
        if nvml is None:
            session.close()
    memory = host.memory()
    cgroup = host.cgroup_memory(host.find_cgroup("memory"))
    return DeviceFacts(
        machine=platform.machine(),
        kernel=platform.release(),
        boot_id=host.boot_id(),
        cpu_count=host.cpu_count(),
        cpu_effective=host.cpu_effective(),
        memory=memory,
        cgroup_memory=cgroup,
        nvml=binding,
        nvml_warning=warning,
        driver=driver,
        cuda_driver=cuda_driver,
        gpus=gpus,
        cuda=cuda,
        memories=_memories(gpus, cuda, memory, cgroup),
    )


def _memories(
    gpus: tuple[GpuFacts, ...], cuda: CudaFacts, memory: HostMemory, cgroup: CgroupMemory
) -> tuple[GpuMemory, ...]:
    memories = tuple(
        classify(match.gpu, match.cuda, memory, cgroup, by=match.by)
        for match in match_gpus(gpus, cuda.devices)
    )
    return memories or (classify(None, None, memory, cgroup, by="there is no GPU"),)


def _cuda_lines(device: CudaDevice) -> list[str]:
    head = f"cuda:{device.index}"
    return [
        _line(head, device.name),
        _line(f"{head} uuid", device.uuid),
        _line(f"{head} compute capability", device.compute_capability),
        _line(f"{head} memory", device.total_bytes, "bytes"),
        _line(f"{head} multiprocessors", device.multiprocessors),
        _line(f"{head} L2 cache", device.l2_bytes, "bytes"),
        _line(f"{head} integrated", device.integrated),
        _line(f"{head} managed memory", device.managed_memory),
        _line(f"{head} CPU may touch managed memory at any time", device.concurrent_managed_access),
        _line(f"{head} kernels may read pageable memory", device.pageable_memory_access),
        _line(f"{head} uses the page tables of the host", device.uses_host_page_tables),
    ]


def _flat(
    prefix: str, record: HostMemory | CgroupMemory | GpuFacts | CudaDevice
) -> dict[str, float | int | str | None]:
    out: dict[str, float | int | str | None] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Reading):
            out |= event_fields(f"{prefix}_{field.name}", value)
    return out


def _line(what: str, reading: Reading, unit: str = "") -> str:
    if reading.value is None:
        return f"{what}: {reading}"
    if unit == "bytes":
        text = format_bytes(reading.number)
    elif isinstance(reading.value, float):
        text = format_value(reading.value, 1)
    else:
        text = str(reading.value)
    return f"{what}: {text}{f' {unit}' if unit and unit != 'bytes' else ''} ({reading.source})"
