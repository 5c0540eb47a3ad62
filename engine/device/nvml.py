"""GPU readings through NVML, the driver's management library.

Its Python binding is the module `pynvml` of the distribution `nvidia-ml-py`; the distribution that
is itself called `pynvml` is deprecated.

What a monitor may ask, and how often:

    once   names, driver, compute capability, memory total, addressing mode
    slow   temperature, power limit in force, energy                      (every tenth tick)
    fast   utilisation, memory, power, SM clock, clock event reasons,
           performance counters (`gpm.py`)                                (every tick)
    never  process list, PCIe throughput, fans: they hold the driver's global lock for up to
           milliseconds, against microseconds for the rest, and so disturb the run that is watched

Every question is a `_Query` that remembers its failures. "Not supported", a missing function and a
missing permission are properties of the device, driver or user and are asked once. Anything else
(unknown error, GPU lost, timeout) is asked again after 1, 2, 4, ... 64 ticks; a tick is one call of
`fast` or `slow`, so nothing here sleeps or reads a clock.

What is covered: total == 0 (no reading), memory not supported (GB10, Jetson: memory is the host's),
memory utilisation stuck at 0 there, utilisation not supported (Orin, MIG), GPU lost in mid-run, no
library, no driver, driver/library mismatch, an old driver or binding without a function. What is
not: which GPU a process uses, and whether a device is integrated; NVML cannot say, CUDA can.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from engine.device.gpm import LONGEST_WAIT_TICKS, Gpm
from engine.device.reading import Reading, absent, measured

# Return codes and enumerations of nvml.h: part of its ABI, so they are the same in every binding.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND = 2, 3, 4, 13
_GPU_IS_LOST, _VERSION_MISMATCH, _DEPRECATED = 15, 25, 26
_FORM_MISSING = (_FUNCTION_NOT_FOUND, _VERSION_MISMATCH, _DEPRECATED)
_PERMANENT = (_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, *_FORM_MISSING)
_SM_CLOCK, _DIE_SENSOR = 1, 0
_INIT_REASONS = {
    9: "the NVIDIA driver is not loaded",
    12: "no NVIDIA driver library (libnvidia-ml.so.1) on this machine",
    18: "the NVIDIA driver in the kernel and its library differ in version: reboot after an update",
}

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
_ADDRESSING_MODES = {0: "none", 1: "hmm", 2: "ats"}


def clock_event_words(mask: int) -> str:
    """Why the clocks are where they are: 0 -> 'none', 36 -> 'sw_power_cap,sw_thermal_slowdown'."""
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    words = [_CLOCK_EVENTS[b] if b < len(_CLOCK_EVENTS) else f"bit_{b}" for b in bits]
    return ",".join(words) or "none"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one query gave: any NVML value, or why none."""

    value: Any
    source: str
    missing: str | None

    def reading(self, convert: Callable[[Any], float | int | str]) -> Reading:
        """One number of the answer."""
        if self.missing is not None:
            return absent(self.missing, self.source)
        return measured(convert(self.value), self.source)


@dataclass(slots=True)
class _Query:
    """One question to NVML with its memory.

    `forms` are names with their arguments, the newest first; one that can never work is dropped.
    """

    module: ModuleType
    forms: list[tuple[str, tuple[Any, ...]]]
    lost_handle: str | None = None
    _last: _Answer | None = None
    _permanent: bool = False
    _failures: int = 0
    _wait_ticks: int = 0
    not_supported: bool = field(default=False, init=False)
    """The device has said that it does not support this."""
    gpu_lost: bool = False
    """The last answer was that the GPU is lost: off the bus until the machine starts again."""

    def ask(self) -> _Answer:
        if self.lost_handle is not None:
            return _Answer(None, self.forms[0][0], self.lost_handle)
        if self._last is not None and self._permanent:
            return self._last
        if self._last is not None and self._wait_ticks > 0:
            self._wait_ticks -= 1
            return self._last
        self._last = self._ask_now()
        return self._last

    def _ask_now(self) -> _Answer:
        best: tuple[int, _Answer] | None = None
        while True:
            name, arguments = self.forms[0]
            function = getattr(self.module, name, None)
            code: int = _FUNCTION_NOT_FOUND
            words = "the installed nvidia-ml-py has no such function"
            if function is not None:
                try:
                    value = function(*arguments)
                except self.module.NVMLError as error:
                    code, words = error.value, str(error)
                else:
                    self._failures, self.gpu_lost = 0, False
                    return _Answer(value, name, None)
            if code not in _PERMANENT:
                self.gpu_lost = code == _GPU_IS_LOST
                self._wait_ticks = min(2**self._failures, LONGEST_WAIT_TICKS)
                self._failures += 1
                return _Answer(None, name, f"NVML: {words}")
            # What the device says of itself tells more than that an older name does not exist.
            if best is None or best[0] in _FORM_MISSING:
                best = code, _Answer(None, name, f"NVML: {words}")
            if len(self.forms) == 1:
                self._permanent, self.not_supported = True, best[0] == _NOT_SUPPORTED
                return best[1]
            del self.forms[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What does not change while a process runs, and the memory in use now."""

    index: int
    name: Reading
    uuid: Reading
    """`GPU-` and hexadecimal with dashes: of the whole GPU, also when it is divided (MIG)."""
    pci_address: Reading
    """As the driver writes it: `00000000:3B:00.0`."""
    compute_capability: Reading
    """As `9.0`."""
    memory_total_bytes: Reading
    """Memory of a discrete card. An integrated device has none of its own."""
    memory_used_bytes: Reading
    """When this was read, by all processes."""
    memory_status: Reading
    """One of the four words above: to be compared with CUDA's `integrated`."""
    utilisation_status: Reading
    """`supported` or `not supported`."""
    addressing_mode: Reading
    """`none`, `hmm` or `ats`; ats: the GPU uses the page tables of the CPU."""
    numa_node: Reading
    """Given where GPU memory is a NUMA node of the host: then its numbers are the kernel's."""
    sm_clock_max_mhz: Reading
    power_set_limit_w: Reading
    """The limit that was asked for; the one in force is read with `slow`."""
    power_default_limit_w: Reading


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


def _text(text: str | bytes) -> str:
    """Older bindings give bytes."""
    return text.decode("ascii", "replace") if isinstance(text, bytes) else text


class _Gpu:
    """The queries of one GPU. One that cannot be opened stays absent until NVML is opened again."""

    def __init__(self, module: ModuleType, index: int) -> None:
        self.index = index
        handle, lost, gone = None, None, False
        try:
            handle = module.nvmlDeviceGetHandleByIndex(index)
        except module.NVMLError as error:
            lost = f"NVML cannot open GPU {index}: {error}"
            gone = error.value == _GPU_IS_LOST

        def named(*forms: tuple[str, tuple[Any, ...]]) -> _Query:
            complete = [(name, (handle, *arguments)) for name, arguments in forms]
            return _Query(module, complete, lost, gpu_lost=gone)

        def query(*forms: tuple[Any, ...]) -> _Query:
            return named(*((f"nvmlDeviceGet{name}", tuple(a)) for name, *a in forms))

        memory_v2 = getattr(module, "nvmlMemory_v2", None)
        # v2 counts memory reserved by the driver apart from `used`, as nvidia-smi does.
        newer = [("MemoryInfo", memory_v2)] if memory_v2 is not None else []
        self.memory = query(*newer, ("MemoryInfo",))
        self.utilisation = query(("UtilizationRates",))
        self.power = query(("PowerUsage",))
        self.sm_clock = query(("ClockInfo", _SM_CLOCK))
        self.events = query(("CurrentClocksEventReasons",), ("CurrentClocksThrottleReasons",))
        self.temperature = query(("TemperatureV", _DIE_SENSOR), ("Temperature", _DIE_SENSOR))
        # The limit in force is the lowest of all; the other form is the one that was asked for.
        self.limit = query(("EnforcedPowerLimit",), ("PowerManagementLimit",))
        self.energy = query(("TotalEnergyConsumption",))
        self.gpm = Gpm(module, handle, lost)
        self._query, self._named = query, named

    def ask(self, function: str, arguments: tuple[Any, ...]) -> _Answer:
        return self._named((function, arguments)).ask()

    def facts(self) -> GpuFacts:
        def once(*forms: tuple[Any, ...]) -> _Answer:
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
        """(total, used, status) of one call."""
        answer = self.memory.ask()
        if answer.missing is not None:
            status = absent(answer.missing, answer.source)
            if self.memory.not_supported or self.memory.gpu_lost:
                word = LOST if self.memory.gpu_lost else NOT_SUPPORTED
                status = measured(word, answer.source)
            none = absent(answer.missing, answer.source)
            return none, none, status
        if not answer.value.total:
            none = absent("NVML reports a total of 0 bytes, which is no reading", answer.source)
            return none, none, measured(TOTAL_IS_ZERO, answer.source)
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
    """An open session. GPUs have NVML's numbers, by bus: `CUDA_VISIBLE_DEVICES` changes nothing."""

    def __init__(
        self, module: ModuleType, count: int, binding: Reading, warning: str | None
    ) -> None:
        self._module = module
        self._gpus = [_Gpu(module, index) for index in range(count)]
        self.binding = binding
        """The distribution that provides the module, with its version."""
        self.binding_warning = warning
        """What to change in the installation, or None."""

    @property
    def count(self) -> int:
        return len(self._gpus)

    def driver_version(self) -> Reading:
        return _Query(self._module, [("nvmlSystemGetDriverVersion", ())]).ask().reading(str)

    def cuda_driver_version(self) -> Reading:
        """The newest CUDA that the driver can run, as `13.0`."""
        answer = _Query(self._module, [("nvmlSystemGetCudaDriverVersion_v2", ())]).ask()
        return answer.reading(lambda v: f"{v // 1000}.{v % 1000 // 10}")

    def facts(self, index: int) -> GpuFacts:
        return self._gpus[index].facts()

    def fast(self, index: int) -> dict[str, Reading]:
        """What changes within a second; one call is one tick of the back-off."""
        return self._gpus[index].fast()

    def slow(self, index: int) -> dict[str, Reading]:
        return self._gpus[index].slow()

    def ask(self, index: int, function: str, *arguments: Any) -> Any | Reading:
        """What one function of NVML answers for a GPU now, or an absent Reading. For a look at what
        a machine can do, not for the monitor: it remembers nothing and may be slow.
        """
        answer = self._gpus[index].ask(function, arguments)
        if answer.missing is not None:
            return absent(answer.missing, answer.source)
        return answer.value

    def close(self) -> None:
        for gpu in self._gpus:
            gpu.gpm.close()
        self._module.nvmlShutdown()


def find_binding(
    version_of: Callable[[str], str] = importlib.metadata.version,
) -> tuple[Reading, str | None]:
    """The installed binding, and a warning when the deprecated distribution `pynvml` is there.

    Both provide a module of the same name: only the metadata of the packages tells them apart.
    """

    def version(distribution: str) -> str | None:
        try:
            return version_of(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    ours, deprecated = version("nvidia-ml-py"), version("pynvml")
    warning = None
    if deprecated is not None:
        warning = (
            f"the deprecated distribution pynvml {deprecated} is installed: it makes every import "
            "of torch print a warning and can hide nvidia-ml-py; pip uninstall pynvml, then "
            "pip install --force-reinstall nvidia-ml-py"
        )
    if ours is not None:
        return measured(f"nvidia-ml-py {ours}", "package metadata"), warning
    return absent("the distribution nvidia-ml-py is not installed", "package metadata"), warning


def open_nvml(module: ModuleType | None = None) -> Nvml | Reading:
    """Open NVML, or an absent Reading that says why there are no GPU readings.

    `module` stands in for the module `pynvml`, which is otherwise imported here and nowhere else.
    """
    binding, warning = find_binding()
    if module is None:
        try:
            # The deprecated distribution warns at import; `binding_warning` says it better.
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
