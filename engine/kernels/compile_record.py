"""What the run log learns of a compilation, whoever compiled: Triton for us, or Inductor.

    CompileRecord   one compilation: what, how long, from disk or not, before or after warm-up
    KernelCounts    one kernel in a summary

A compilation after warm-up says what it was not warmed for:

    compiled after warm-up in 310 ms: small_m_product(...)[BLOCK_M=64, ...] 4 warps, 3 stages, sm_90
      differs from a warmed one in BLOCK_M (64, not 128)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRecord:
    """One miss in memory: something was compiled, or fetched from a cache on disk."""

    source: Literal["triton", "inductor"]
    kernel: str
    """Name of the kernel, or of the Python function that torch.compile took."""
    key: str
    """All that the body was compiled for, as text."""
    digest: str
    """The key in 16 hex digits; for torch.compile its own name of the compilation: `0/1`."""
    seconds: float
    disk_hit: bool | None
    """Whether the body came out of a cache on disk; None where its compiler did not say."""
    after_warm_up: bool
    differs: tuple[tuple[str, str, str], ...] = ()
    """Of a compilation after warm-up: how it differs from the most similar one that was warmed, each
    as (field, value, warmed value)."""
    reason: str | None = None
    """Why it was not there already, where that is no difference from a warmed one."""

    def lines(self) -> list[str]:
        """The record as every surface prints it."""
        when = " after warm-up" if self.after_warm_up else ""
        what = "loaded from disk" if self.disk_hit else "compiled"
        out = [f"{what}{when} in {self.seconds * 1e3:.0f} ms: {self.key}"]
        if self.differs:
            named = ", ".join(f"{name} ({value}, not {was})" for name, value, was in self.differs)
            out.append(f"  differs from a warmed one in {named}")
        if self.reason is not None:
            out.append(f"  {self.reason}")
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCounts:
    """One kernel in a process, all its variants on all devices together."""

    kernel: str
    hits: int
    """Launches of a body that was there."""
    misses: int
    """Bodies that were not, launched or warmed."""
    disk_hits: int
    """Misses that the cache on disk served."""
    after_warm_up: int
    """Misses after warm-up."""
    seconds: float
    """Spent on misses."""
