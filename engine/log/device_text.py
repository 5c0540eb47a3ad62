"""Readings of a run in words: GPU, host, and what the trainer says of its own memory, each a value or the reason why
there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.log.events import GpuSample, HostSample
from engine.log.phrases import number_text, one_line
from engine.log.view import RunView
from engine.units import NOT_MEASURED, format_bytes


def device_lines(view: RunView) -> list[str]:
    """GPU and host readings, each a value or the reason why there is none."""
    lines = []
    for index, gpu in sorted(view.gpus.items()):
        cell = _cells(view, gpu, f"gpu{index}.")
        used, total = cell("gpu_mem_used_bytes"), cell("gpu_mem_total_bytes")
        # What the utilisation hides stands beside it: any kernel counts as use, however small.
        beside = "" if gpu.tensor_util_pct is None else f", tensor cores {cell('tensor_util_pct')}"
        limit = "" if gpu.gpu_power_limit_w is None else f" of {cell('gpu_power_limit_w')}"
        held = f", held by {gpu.clock_event_reasons}" if gpu.clock_event_reasons else ""
        lines += [
            f"GPU {index}  util {cell('gpu_util_pct')}{beside}",
            f"       power {cell('gpu_power_w')}{limit}  {cell('gpu_temperature_c')}"
            f"  sm clock {cell('sm_clock_mhz')}{one_line(held)}",
            f"       mem {used} / {total} (all processes, NVML)",
        ]
        counters = [
            f"{words} {cell(name)}"
            for words, name in _COUNTERS.items()
            if getattr(gpu, name) is not None
        ]
        lines += [f"       {'  '.join(counters)}"] if counters else []
    if view.memory_peak is not None and view.memory_peak.measured_bytes is not None:
        lines.append(
            f"       job {format_bytes(view.memory_peak.measured_bytes)} at its peak by step "
            f"{view.memory_peak.step} ({view.memory_peak.source})"
        )
    # Beside the memory that it is of: the GPU's, or without one the host's.
    of_trainer = _held_lines(view)
    lines += of_trainer if view.gpus else []
    if not view.gpus and view.facts is not None:
        reason = view.absent.get("gpu_count") or view.facts.get("nvml_absent") or NOT_MEASURED
        lines.append(f"GPU    {reason}")
    if view.host is not None:
        cell = _cells(view, view.host, "")
        free, total = cell("host_available_bytes"), cell("host_total_bytes")
        lines += [
            f"host   available {free} / {total}{_pool(view)}  load {cell('load1')}",
            f"       trainer rss {cell('trainer_rss_bytes')}  cpu {cell('trainer_cpu_pct')}",
        ]
    lines += [] if view.gpus else of_trainer
    return lines or ["no reading yet"]


def _held_lines(view: RunView) -> list[str]:
    """What the trainer says of its own memory, beside what others count; nothing where it has not."""
    host = view.host
    if host is None or host.memory_held_bytes is None:
        return []
    cell = _cells(view, host, "")
    kept = ""
    if host.memory_reserved_bytes is not None:
        kept = f", {cell('memory_reserved_bytes')} reserved"
    return [
        f"       job holds {cell('memory_held_bytes')}{kept}, {cell('memory_peak_bytes')} at its peak "
        f"({host.memory_source or NOT_MEASURED})"
    ]


def _pool(view: RunView) -> str:
    """That the host's memory is the GPU's, too, where it is."""
    unified = (view.facts or {}).get("cuda0_integrated") == "yes"
    return " (host pool, shared with the GPU)" if unified else ""


# What the utilisation hides; only some GPUs have these counters, and `engine doctor` says why others do not.
_COUNTERS = {
    "SM busy": "sm_util_pct",
    "occupancy": "sm_occupancy_pct",
    "DRAM": "dram_util_pct",
}


_UNITS: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "pct": lambda value: f"{number_text(value, '.0f')}%",
    "w": lambda value: f"{number_text(value, '.0f')} W",
    "mhz": lambda value: f"{number_text(value, '.0f')} MHz",
    "c": lambda value: f"{number_text(value, '.0f')} C",
    "load1": lambda value: number_text(value, ".1f"),
}


def _cells(view: RunView, sample: HostSample | GpuSample, prefix: str) -> Callable[[str], str]:
    """The text of one reading of `sample` by its name, whose last word is its unit."""

    def cell(name: str) -> str:
        value: Any = getattr(sample, name)
        if value is None:
            return one_line(view.absent.get(prefix + name, NOT_MEASURED))
        return _UNITS[name.rsplit("_", 1)[-1]](value)

    return cell
