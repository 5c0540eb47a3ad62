"""Whole distillation steps, ours beside those of other libraries: `engine bench kd --against ...`.

Every arm runs in its own process (`engine.bench.kd_arm`), one after another on the same device, with the same
weights, rows, optimizer and number of steps (`engine.bench.kd_shape`); the table names each arm's objective.
A rival that is not installed is `absent`, and one that broke or timed out is `failed`, each with its reason:
a table has a row for every requested arm.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.models.config import ModelConfig
from engine.terminal import aligned
from engine.train.roofline import flops_per_token
from engine.units import format_bytes, format_count

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
"""Environment of the rivals' processes: no network access, and no output except errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KdRow:
    """The result of one arm, as printed and stored."""

    arm: str
    state: str
    """measured, absent or failed."""
    why: str | None = None
    objective: str | None = None
    versions: str | None = None
    step_s: float | None = None
    """Median of the measured steps."""
    spread: float | None = None
    """(largest - smallest) / median of the measured steps."""
    tokens_per_s: float | None = None
    share_of_bound: float | None = None
    """Throughput relative to a bound: the run's own FLOPs at the rate of the largest matmul measured here."""
    peak_bytes: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    ready_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_arm(arm: str, device: str, shape: str, *, timeout_s: float) -> dict[str, Any]:
    """Run the arm's process and return its result, or how it failed."""
    command = [sys.executable, "-m", "engine.bench.kd_arm", arm, device, shape]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **QUIET}
        )
    except subprocess.TimeoutExpired:
        return {"arm": arm, "state": "failed", "why": f"no answer in {timeout_s:g} s"}
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()]
        words = last[-1].strip() if last else "nothing was said"
        return {"arm": arm, "state": "failed", "why": f"exit code {done.returncode}: {words}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(
    found: Mapping[str, Any],
    *,
    tokens: int,
    seq_len: int,
    teacher: ModelConfig,
    student: ModelConfig,
    flop_per_s: float,
) -> KdRow:
    """Turn an arm's result into a row with its rates."""
    if found["state"] != "measured":
        return KdRow(arm=found["arm"], state=found["state"], why=found["why"])
    times = found["step_s"]
    middle = statistics.median(times)
    bound = flop_per_s / flops_per_token(student, teacher, seq_len)
    names = ("arm", "state", "objective", "versions", "peak_bytes", "ready_s")
    return KdRow(
        **{name: found[name] for name in (*names, "first_loss", "last_loss")},
        step_s=middle,
        spread=(max(times) - min(times)) / middle,
        tokens_per_s=tokens / middle,
        share_of_bound=tokens / middle / bound,
    )


def bench_kd(
    arms: Mapping[str, str | None],
    measure: Callable[[str], KdRow],
    say: Callable[[str], None],
) -> list[KdRow]:
    """Return a row for each arm, in order. `arms` maps each to the reason why it cannot run, or None."""
    rows = []
    for arm, why in arms.items():
        if why is not None:
            rows.append(KdRow(arm=arm, state="absent", why=why))
            continue
        say(f"  {arm}")
        rows.append(measure(arm))
    return rows


HEADER = ("arm", "tokens/s", "of bound", "ms/step", "+-", "peak", "first loss", "objective")


def table(rows: list[KdRow]) -> list[str]:
    """Aligned lines for people, followed by the arms that were not measured and why."""
    cells: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        if row.state != "measured":
            cells.append((row.arm, *[""] * 6, row.state))
            continue
        assert row.tokens_per_s and row.step_s and row.first_loss is not None
        cells.append(
            (
                row.arm,
                format_count(row.tokens_per_s),
                f"{row.share_of_bound or 0:.0%}",
                f"{row.step_s * 1e3:.1f}",
                f"{row.spread or 0:.0%}",
                "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
                f"{row.first_loss:.4f}",
                row.objective or "",
            )
        )
    lines = aligned(cells, right=range(1, 7))
    return lines + [f"{row.arm}: {row.state}: {row.why}" for row in rows if row.state != "measured"]
