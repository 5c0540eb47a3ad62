"""GPU readings through NVML, the driver's management library.

Its Python binding is the module `pynvml` of the distribution `nvidia-ml-py`; the distribution that is itself
called `pynvml` is deprecated.

What a monitor may query, and how often:

    once   names, driver, compute capability, memory total, addressing mode
    slow   temperature, power limit in force, energy, the process list    (every tenth tick)
    fast   utilisation, memory, power, SM clock, clock event reasons,
           performance counters (`gpm.py`)                                (every tick)
    never  PCIe throughput, fans: they hold the driver's global lock for up to milliseconds, against
           microseconds for the rest, and so disturb the run that is watched

The process list takes 0.14 ms on an H200. Read without a pause it makes a loop of short kernels 8 % slower, and one
that allocates 1 %; read every ten seconds it cannot be measured.

Every query is a `Query`, which remembers its failures (`engine.machine.nvml_query`).

Covered: total == 0 (no reading), memory not supported (GB10, Jetson: memory is the host's), memory
utilisation stuck at 0 there, utilisation not supported (Orin, MIG), GPU lost in mid-run, no library, no
driver, driver/library mismatch, an old driver or binding without a function. Not covered: which GPU a process
uses, and whether a device is integrated; NVML cannot tell, CUDA can.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Container
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.machine.family import program_name
from engine.machine.gpm import Gpm
from engine.machine.gpu_facts import (
    LOST,
    NOT_SUPPORTED,
    SUPPORTED,
    TOTAL_IS_ZERO,
    GpuFacts,
    clock_event_words,
)
from engine.machine.nvml_query import GPU_IS_LOST, Answer, Query
from engine.machine.reading import Reading, absent, measured
from engine.machine.versions import installed_version

# Constants of nvml.h, like the codes in `nvml_query.py`: the same in every binding.
_SM_CLOCK, _DIE_SENSOR = 1, 0
_INIT_REASONS = {
    9: "the NVIDIA driver is not loaded",
    12: "no NVIDIA driver library (libnvidia-ml.so.1) on this machine",
    18: "the NVIDIA driver in the kernel and its library differ in version: reboot after an update",
}
PROCESSES_KEPT = 32
"""Maximum number of processes of a GPU in a sample."""
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of linux/proc_ns.h."""
_ADDRESSING_MODES = {0: "none", 1: "hmm", 2: "ats"}


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


def _text(text: str | bytes) -> str:
    """Return a str; older bindings return bytes."""
    return text.decode("ascii", "replace") if isinstance(text, bytes) else text


class _Gpu:
    """The queries of one GPU. A GPU that cannot be opened stays absent until NVML is opened again."""

    def __init__(self, module: ModuleType, index: int) -> None:
        self.index = index
        handle, lost, gone = None, None, False
        try:
            handle = module.nvmlDeviceGetHandleByIndex(index)
        except module.NVMLError as error:
            lost = f"NVML cannot open GPU {index}: {error}"
            gone = error.value == GPU_IS_LOST

        def query(*forms: tuple[Any, ...]) -> Query:
            complete = [(f"nvmlDeviceGet{name}", (handle, *a)) for name, *a in forms]
            return Query(module, complete, lost, gpu_lost=gone)

        memory_v2 = getattr(module, "nvmlMemory_v2", None)
        # v2 counts memory reserved by the driver apart from `used`, as nvidia-smi does.
        newer = [("MemoryInfo", memory_v2)] if memory_v2 is not None else []
        self.memory = query(*newer, ("MemoryInfo",))
        self.utilisation = query(("UtilizationRates",))
        self.power = query(("PowerUsage",))
        self.sm_clock = query(("ClockInfo", _SM_CLOCK))
        self.events = query(("CurrentClocksEventReasons",), ("CurrentClocksThrottleReasons",))
        self.temperature = query(("TemperatureV", _DIE_SENSOR), ("Temperature", _DIE_SENSOR))
        # The enforced limit is the lowest of all limits; the other function returns the requested one.
        self.limit = query(("EnforcedPowerLimit",), ("PowerManagementLimit",))
        self.energy = query(("TotalEnergyConsumption",))
        self.gpm = Gpm(module, handle, lost)
        self.running = query(("ComputeRunningProcesses",))
        self._query = query

    def facts(self) -> GpuFacts:
        def once(*forms: tuple[Any, ...]) -> Answer:
            return self._query(*forms).ask()

        total, used, status = self._memory()
        return GpuFacts(
            index=self.index,
            name=once(("Name",)).reading(str),
            uuid=once(("UUID",)).reading(str),
            pci_address=once(("PciInfo",)).reading(lambda info: _text(info.busId)),
            compute_capability=once(("CudaComputeCapability",)).reading(lambda c: f"{c[0]}.{c[1]}"),
            memory_total_bytes=total,
            memory_used_bytes=used,
            memory_status=status,
            utilisation_status=self._utilisation_status(),
            addressing_mode=once(("AddressingMode",)).reading(
                lambda mode: _ADDRESSING_MODES.get(mode, f"mode {mode}")
            ),
            numa_node=once(("NumaNodeId",)).reading(int),
            sm_clock_max_mhz=once(("MaxClockInfo", _SM_CLOCK)).reading(int),
            power_set_limit_w=once(("PowerManagementLimit",)).reading(_watts),
            power_default_limit_w=once(("PowerManagementDefaultLimit",)).reading(_watts),
        )

    def _memory(self) -> tuple[Reading, Reading, Reading]:
        """Return (total, used, status) from one call."""
        answer = self.memory.ask()
        if answer.missing is not None:
            status = absent(answer.missing, answer.source)
            if self.memory.not_supported or self.memory.gpu_lost:
                word = LOST if self.memory.gpu_lost else NOT_SUPPORTED
                status = measured(word, answer.source)
            unread = absent(answer.missing, answer.source)
            return unread, unread, status
        if not answer.value.total:
            unread = absent("NVML reports a total of 0 bytes, which is no reading", answer.source)
            return unread, unread, measured(TOTAL_IS_ZERO, answer.source)
        return (
            measured(int(answer.value.total), answer.source),
            measured(int(answer.value.used), answer.source),
            measured(SUPPORTED, answer.source),
        )

    def _utilisation_status(self) -> Reading:
        answer = self.utilisation.ask()
        if answer.missing is None:
            return measured(SUPPORTED, answer.source)
        if self.utilisation.not_supported:
            return measured(NOT_SUPPORTED, answer.source)
        return absent(answer.missing, answer.source)

    def fast(self) -> dict[str, Reading]:
        utilisation = self.utilisation.ask()
        memory_util = utilisation.reading(lambda u: int(u.memory))
        total, used, status = self._memory()
        if memory_util.value == 0 and status.value in (NOT_SUPPORTED, TOTAL_IS_ZERO):
            memory_util = absent(
                "stuck at 0 on a GPU without memory of its own", memory_util.source
            )
        return {
            "gpu_util_pct": utilisation.reading(lambda u: int(u.gpu)),
            "gpu_mem_util_pct": memory_util,
            "gpu_mem_used_bytes": used,
            "gpu_mem_total_bytes": total,
            "gpu_power_w": self.power.ask().reading(_watts),
            "sm_clock_mhz": self.sm_clock.ask().reading(int),
            "clock_event_reasons": self.events.ask().reading(clock_event_words),
            **self.gpm.read(),
        }

    def slow(self) -> dict[str, Reading]:
        return {
            "gpu_temperature_c": self.temperature.ask().reading(int),
            "gpu_power_limit_w": self.limit.ask().reading(_watts),
            "gpu_energy_j": self.energy.ask().reading(lambda millijoules: millijoules / 1000),
        }


class Nvml:
    """An open session. GPUs have NVML's indices, in bus order; `CUDA_VISIBLE_DEVICES` has no effect."""

    def __init__(
        self, module: ModuleType, count: int, binding: Reading, warning: str | None
    ) -> None:
        self._module = module
        self._gpus = [_Gpu(module, index) for index in range(count)]
        self.binding = binding
        """The distribution that provides the module, with its version."""
        self.binding_warning = warning
        """Advice on the installation; None if nothing needs to change."""

    @property
    def count(self) -> int:
        return len(self._gpus)

    def driver_version(self) -> Reading:
        return Query(self._module, [("nvmlSystemGetDriverVersion", ())]).ask().reading(str)

    def cuda_driver_version(self) -> Reading:
        """Return the newest CUDA version that the driver supports, as `13.0`."""
        answer = Query(self._module, [("nvmlSystemGetCudaDriverVersion_v2", ())]).ask()
        return answer.reading(lambda v: f"{v // 1000}.{v % 1000 // 10}")

    def facts(self, index: int) -> GpuFacts:
        return self._gpus[index].facts()

    def fast(self, index: int) -> dict[str, Reading]:
        """Read what changes within a second; each call counts as one tick of the retry interval."""
        return self._gpus[index].fast()

    def slow(self, index: int) -> dict[str, Reading]:
        return self._gpus[index].slow()

    def processes(
        self, index: int, pids: Container[int], proc: Path = Path("/proc")
    ) -> tuple[Reading, Reading]:
        """Return how many bytes of a GPU the processes `pids` use for CUDA, and a text with id, bytes
        and name of each process that uses CUDA on it, PROCESSES_KEPT at most."""
        running = self._gpus[index].running.ask()
        source = running.source
        if running.missing is not None:
            return absent(running.missing, source), absent(running.missing, source)
        processes = running.value
        used = [process.usedGpuMemory for process in processes if process.pid in pids]
        if not used and not _is_in_host_namespace(proc):
            reason = (
                "NVML lists processes by the host's ids, which differ from those in this container"
            )
            return absent(reason, source), absent(reason, source)
        listed = measured(
            ";".join(
                f"{p.pid} {'-' if p.usedGpuMemory is None else p.usedGpuMemory} {program_name(p.pid, proc)}"
                for p in processes[:PROCESSES_KEPT]
            ),
            source,
        )
        if None in used:
            return absent("NVML does not say how much the process uses", source), listed
        return measured(sum(used), source), listed

    def close(self) -> None:
        for gpu in self._gpus:
            gpu.gpm.close()
        self._module.nvmlShutdown()


def _is_in_host_namespace(proc: Path) -> bool:
    try:
        return (proc / "self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def find_binding(
    version_of: Callable[[str], str | None] = installed_version,
) -> tuple[Reading, str | None]:
    """Return the installed binding, and a warning when the deprecated distribution `pynvml` is installed.

    Both provide a module of the same name, so only package metadata can distinguish them.
    """

    current, deprecated = version_of("nvidia-ml-py"), version_of("pynvml")
    warning = None
    if deprecated is not None:
        warning = (
            f"the deprecated distribution pynvml {deprecated} is installed: it makes every import "
            "of torch print a warning and can hide nvidia-ml-py; pip uninstall pynvml, then "
            "pip install --force-reinstall nvidia-ml-py"
        )
    if current is not None:
        return measured(f"nvidia-ml-py {current}", "package metadata"), warning
    return absent("the distribution nvidia-ml-py is not installed", "package metadata"), warning


def open_nvml(module: ModuleType | None = None) -> Nvml | Reading:
    """Open NVML, or return an absent Reading with the reason why there are no GPU readings.

    `module` replaces the module `pynvml`, which is otherwise imported here and nowhere else.
    """
    binding, warning = find_binding()
    if module is None:
        try:
            # The deprecated distribution warns at import; `binding_warning` is the better message.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                module = importlib.import_module("pynvml")
        except ImportError:
            return absent(binding.absent or f"{binding} cannot be imported", "python module pynvml")
    if not hasattr(module, "_nvmlGetFunctionPointer"):
        place = getattr(module, "__file__", None) or "an unknown place"
        return absent(f"the module pynvml at {place} is not NVIDIA's", "python module pynvml")
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        return absent(_INIT_REASONS.get(error.value, f"NVML: {error}"), "nvmlInit")
    try:
        count = module.nvmlDeviceGetCount()
    except module.NVMLError as error:
        module.nvmlShutdown()
        return absent(f"NVML: {error}", "nvmlDeviceGetCount")
    if count == 0:
        module.nvmlShutdown()
        return absent("NVML lists no GPU", "nvmlDeviceGetCount")
    return Nvml(module, count, binding, warning)
