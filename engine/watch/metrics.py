"""Write the metrics of runs as text that is valid in OpenMetrics 1.0 and in Prometheus's older format. An unknown
value has no sample.

apr_run_step{run="kd-1",host="node7"} 120
apr_run_verdict{run="kd-1",host="node7",level="suspect"} 1
apr_gpu_utilization_ratio{run="kd-1",host="node7",gpu="0"} 0.97
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping

from engine.log.events import GpuSample
from engine.terminal import printable
from engine.watch.runs_feed import RunRow
from engine.watch.verdict_line import SIGNS

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_RUN_METRICS: dict[str, tuple[str, Callable[[RunRow], float | None]]] = {
    "alive": ("Whether a process of the run exists.", lambda row: row.alive),
    "step": ("Optimizer steps done.", lambda row: row.last_step),
    "planned_steps": ("Optimizer steps of the whole run.", lambda row: row.total_steps),
    "loss": ("Loss of the newest step.", lambda row: row.loss),
    "heldout_loss": ("Newest held-out loss, in nats per token.", lambda row: row.heldout),
    "tokens_per_second": ("Pace of the newest steps.", lambda row: row.tokens_per_second),
    "active_alerts": ("Active alerts.", lambda row: len(row.alerts)),
}
"""Help text of each metric of a run, and its value."""
_GPU_METRICS: dict[str, tuple[str, str, float]] = {
    "utilization_ratio": (
        "Share of the time in which at least one kernel ran.",
        "gpu_util_pct",
        0.01,
    ),
    "memory_used_bytes": ("GPU memory used by all processes.", "gpu_mem_used_bytes", 1.0),
    "memory_bytes": ("Total memory of the GPU.", "gpu_mem_total_bytes", 1.0),
    "power_watts": ("Power draw.", "gpu_power_w", 1.0),
    "power_limit_watts": ("Power limit.", "gpu_power_limit_w", 1.0),
    "temperature_celsius": ("Temperature.", "gpu_temperature_c", 1.0),
    "sm_clock_hertz": ("Clock of the multiprocessors.", "sm_clock_mhz", 1e6),
}
"""Help text of each metric of a GPU, its reading and the factor of its unit."""
_Samples = Iterable[tuple[Mapping[str, str], float | None]]


def metrics_text(rows: Iterable[RunRow]) -> str:
    """Return the metrics of runs, with the name of this machine as the host."""
    host = socket.gethostname()
    named = [({"run": row.name, "host": host}, row) for row in rows]
    states = [({**labels, "state": row.state}, 1.0) for labels, row in named]
    levels = [
        ({**labels, "level": level.lower()}, float(level == row.level))
        for labels, row in named
        if row.level
        for level in SIGNS
    ]
    lines = [
        *_family("apr_run_state", "State of the run.", states),
        *_family("apr_run_verdict", "Level of the verdict.", levels),
    ]
    for name, (about, value) in _RUN_METRICS.items():
        lines += _family(f"apr_run_{name}", about, ((labels, value(row)) for labels, row in named))
    gpus = [({**labels, "gpu": f"{gpu.index}"}, gpu) for labels, row in named for gpu in row.gpus]
    for name, (about, reading, factor) in _GPU_METRICS.items():
        samples = ((labels, _scaled(gpu, reading, factor)) for labels, gpu in gpus)
        lines += _family(f"apr_gpu_{name}", about, samples)
    return "".join(f"{line}\n" for line in [*lines, "# EOF"])


def _scaled(gpu: GpuSample, reading: str, factor: float) -> float | None:
    value: float | None = getattr(gpu, reading)
    return None if value is None else value * factor


def _family(name: str, about: str, samples: _Samples) -> Iterator[str]:
    yield f"# TYPE {name} gauge"
    yield f"# HELP {name} {about}"
    for labels, value in samples:
        if value is not None:
            pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            yield f"{name}{{{pairs}}} {_number(value)}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{float(value):.17g}"
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(text: str) -> str:
    return printable(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
