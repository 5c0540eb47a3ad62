"""Machines as NVML shows them: the recorded result of each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.machine.nvml import Nvml, open_nvml

pynvml = pytest.importorskip("pynvml", reason="the distribution nvidia-ml-py is not installed")

GIB = 1024**3


class Code(int):
    """A return code of nvml.h, with its own type to distinguish it from a returned number."""


NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND = Code(3), Code(4), Code(13)


def memory(total: int, used: int) -> SimpleNamespace:
    return SimpleNamespace(total=total, used=used, free=total - used)


H200: dict[str, Any] = {
    "nvmlSystemGetDriverVersion": "580.159.03",
    "nvmlSystemGetCudaDriverVersion_v2": 13000,
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetUUID": "GPU-0c5b1a3e-7f0d-4d6b-9d0a-000000000001",
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:3B:00.0"),
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetAddressingMode": 1,
    "nvmlDeviceGetNumaNodeId": NOT_SUPPORTED,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetPowerManagementLimit": 650_000,
    "nvmlDeviceGetEnforcedPowerLimit": 600_000,
    "nvmlDeviceGetTemperatureV": 41,
    "nvmlDeviceGetTemperature": 42,
    "nvmlDeviceGetMemoryInfo": memory(141 * GIB, 3 * GIB),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=96, memory=31),
    "nvmlDeviceGetPowerUsage": 345_678,
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetCurrentClocksEventReasons": 4,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_500,
    "nvmlDeviceGetComputeRunningProcesses": [
        SimpleNamespace(pid=41, usedGpuMemory=2 * GIB),
        SimpleNamespace(pid=42, usedGpuMemory=GIB),
        SimpleNamespace(pid=43, usedGpuMemory=None),
    ],
    "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=1),
    "nvmlGpmSampleGet": 1,
}

GPM = {2: 61.5, 3: 40.0, 5: 22.25, 10: 35.0}
"""Values of a recorded GPU's performance counters, by NVML's metric id."""

NO_GPM = SimpleNamespace(isSupportedDevice=0)

GB10 = H200 | {
    "nvmlDeviceGetName": "NVIDIA GB10",
    "nvmlDeviceGetCudaComputeCapability": (12, 1),
    "nvmlDeviceGetAddressingMode": 2,
    "nvmlDeviceGetMemoryInfo": NOT_SUPPORTED,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=13, memory=0),
    "nvmlDeviceGetPowerUsage": 11_170,
    "nvmlDeviceGetEnforcedPowerLimit": NOT_SUPPORTED,
    "nvmlDeviceGetPowerManagementLimit": NOT_SUPPORTED,
    "nvmlDeviceGetPowerManagementDefaultLimit": NOT_SUPPORTED,
    "nvmlGpmQueryDeviceSupport": NO_GPM,
}

ORIN = dict.fromkeys(H200, NOT_SUPPORTED) | {
    "nvmlSystemGetDriverVersion": "540.4.0",
    "nvmlSystemGetCudaDriverVersion_v2": 12060,
    "nvmlDeviceGetName": "Orin (nvgpu)",
    "nvmlDeviceGetCudaComputeCapability": (8, 7),
}

TOTAL_ZERO = H200 | {
    "nvmlDeviceGetMemoryInfo": memory(0, 0),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50, memory=0),
}

CALLS = frozenset(H200)


class Machine:
    """Replaces the module `pynvml`, on a machine with one GPU per recording."""

    def __init__(
        self, *gpus: dict[str, Any], init: int = 0, count: int | Code | None = None
    ) -> None:
        self.gpus = list(gpus)
        self.asked: Counter[str] = Counter()
        self.open = False
        self.buffers: list[SimpleNamespace] = []
        self.gpm: dict[int, float | Code] = dict(GPM)
        module = ModuleType("pynvml")
        module.NVMLError = pynvml.NVMLError  # type: ignore[attr-defined]
        module._nvmlGetFunctionPointer = None  # type: ignore[attr-defined]
        module.nvmlInit = lambda: self.start(init)  # type: ignore[attr-defined]
        module.nvmlShutdown = lambda: setattr(self, "open", False)  # type: ignore[attr-defined]
        module.nvmlDeviceGetCount = lambda: self.answer(  # type: ignore[attr-defined]
            len(gpus) if count is None else count
        )
        module.nvmlDeviceGetHandleByIndex = self.handle  # type: ignore[attr-defined]
        module.nvmlMemory_v2 = pynvml.nvmlMemory_v2  # type: ignore[attr-defined]
        module.c_nvmlGpmMetricsGet_t = gpm_question  # type: ignore[attr-defined]
        module.nvmlGpmSampleAlloc = self.allocate  # type: ignore[attr-defined]
        module.nvmlGpmSampleFree = self.buffers.remove  # type: ignore[attr-defined]
        module.nvmlGpmMetricsGet = self.compare  # type: ignore[attr-defined]
        for name in CALLS:
            assert hasattr(pynvml, name), f"{name} is not in the real binding"
            setattr(module, name, self.call(name))
        self.module = module

    def start(self, code: int) -> None:
        self.answer(Code(code) if code else 1)
        self.open = True

    def handle(self, index: int) -> int:
        self.answer(self.gpus[index].get("nvmlDeviceGetHandleByIndex", 1))
        return index

    def call(self, name: str) -> Callable[..., Any]:
        def play(handle: int = 0, *_: object) -> Any:
            self.asked[name] += 1
            assert self.open
            return self.answer(self.gpus[handle][name])

        return play

    def allocate(self) -> SimpleNamespace:
        self.buffers.append(SimpleNamespace(number=len(self.buffers)))
        return self.buffers[-1]

    def compare(self, question: SimpleNamespace) -> SimpleNamespace:
        """nvmlGpmMetricsGet: takes two different buffers, in the order in which they were filled."""
        self.asked["nvmlGpmMetricsGet"] += 1
        assert question.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        assert question.sample1 is not question.sample2
        for metric in question.metrics[: question.numMetrics]:
            found = self.gpm[metric.metricId]
            metric.nvmlReturn = int(found) if isinstance(found, Code) else 0
            metric.value = 0.0 if isinstance(found, Code) else found
        return question

    def answer(self, value: Any) -> Any:
        if isinstance(value, Code):
            raise pynvml.NVMLError(int(value))
        return value


def gpm_question() -> SimpleNamespace:
    return SimpleNamespace(metrics=[SimpleNamespace() for _ in range(8)])


def opened(machine: Machine) -> Nvml:
    nvml = open_nvml(machine.module)
    assert isinstance(nvml, Nvml)
    return nvml
