"""GPU performance counters through NVML (GPM): how much of a GPU works, not only whether it does.

`gpu_util_pct` is the share of the time in which any kernel ran: one thread in an endless loop gives 100.
These counters measure the work:

    sm_util_pct        share of the time in which an SM had a warp to run, mean over all SMs
    sm_occupancy_pct   resident warps, as a share of the maximum
    tensor_util_pct    tensor pipe activity
    dram_util_pct      share of the device's memory bandwidth in use

A number is the mean between two samples, which NVML takes into buffers of its own: one call fills the newer
buffer, another compares it with the older one. So the first tick has no number, and the numbers of a later
tick cover exactly the time since the tick before.

Hopper and newer data-centre GPUs have them. On other GPUs, old drivers, virtual GPUs and MIG instances the
counters are absent with a reason, and are queried only once; a sample that fails is retried at the next tick.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from engine.machine.reading import Reading, absent, measured

# Ids of nvml.h, like the codes in `nvml_query.py`: the same in every binding.
METRICS = {
    "sm_util_pct": 2,
    "sm_occupancy_pct": 3,
    "tensor_util_pct": 5,
    "dram_util_pct": 10,
}
_VERSION = 1
_CALL = "nvmlGpmMetricsGet"
_FIRST_TICK = "needs two samples, some time apart"


class Gpm:
    """The counters of one GPU. `handle` is NVML's; None when the GPU could not be opened."""

    def __init__(self, module: ModuleType, handle: Any, lost: str | None) -> None:
        self._module, self._handle = module, handle
        self._why_not = lost
        self._buffers: list[Any] = []
        self._older_is_valid = False
        if lost is None:
            self._open()

    def _open(self) -> None:
        module = self._module
        try:
            if not module.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                self._why_not = "NVML: this GPU has no GPM counters"
                return
            self._buffers = [module.nvmlGpmSampleAlloc(), module.nvmlGpmSampleAlloc()]
        except AttributeError:
            self._why_not = "the installed nvidia-ml-py has no GPM functions"
        except module.NVMLError as error:
            self._why_not = f"NVML: {error}"

    def read(self) -> dict[str, Reading]:
        """Return the means since the last call, each a value or the reason why there is none."""
        if self._why_not is not None:
            return self._all_absent(self._why_not)
        module, (older, newer) = self._module, self._buffers
        try:
            module.nvmlGpmSampleGet(self._handle, newer)
        except module.NVMLError as error:
            # An unfilled buffer must not be used for a comparison: start again.
            self._older_is_valid = False
            return self._all_absent(f"NVML: {error}")
        self._buffers = [newer, older]
        if not self._older_is_valid:
            self._older_is_valid = True
            return self._all_absent(_FIRST_TICK)
        question = module.c_nvmlGpmMetricsGet_t()
        question.version, question.numMetrics = _VERSION, len(METRICS)
        question.sample1, question.sample2 = older, newer
        for slot, number in enumerate(METRICS.values()):
            question.metrics[slot].metricId = number
        try:
            answer = module.nvmlGpmMetricsGet(question)
        except module.NVMLError as error:
            return self._all_absent(f"NVML: {error}")
        return {name: self._metric(answer.metrics[slot]) for slot, name in enumerate(METRICS)}

    def _metric(self, metric: Any) -> Reading:
        if metric.nvmlReturn:
            return absent(f"NVML: {self._module.NVMLError(metric.nvmlReturn)}", _CALL)
        if not math.isfinite(metric.value):
            return absent("NVML gave no number", _CALL)
        return measured(float(metric.value), _CALL)

    def _all_absent(self, reason: str) -> dict[str, Reading]:
        return dict.fromkeys(METRICS, absent(reason, _CALL))

    def close(self) -> None:
        """Release the buffers; call it before NVML is shut down."""
        for buffer in self._buffers:
            self._module.nvmlGpmSampleFree(buffer)
        self._buffers, self._why_not = [], "NVML was closed"
