"""Define the run log's record of a compilation.

    CompileRecord   one compilation: kernel, duration, disk cache hit, before or after warm-up
    KernelCounts    one kernel in a summary

For a compilation after warm-up, the record names the difference from what was warmed:

    compiled after warm-up in 310 ms: attend(...)[PIECE=4, ...] 4 warps, 3 stages, sm_90
      differs from a warmed one in BLOCK_M (64, not 128)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRecord:
    """One miss in the in-memory cache: a kernel was compiled, or loaded from a cache on disk."""

    kernel: str
    key: str
    """The variant that was compiled: types, constants and target, as a string."""
    digest: str
    """Digest of the kernel's key, 16 hex digits."""
    seconds: float
    disk_hit: bool
    """Whether the kernel was loaded from Triton's cache on disk."""
    after_warm_up: bool
    differs: tuple[tuple[str, str, str], ...] = ()
    """For a compilation after warm-up, the differences from the most similar warmed one, each as
    (field, value, warmed value).
    """
    reason: str | None = None
    """Reason why it was not warmed, if it is not one of the differences."""

    def lines(self) -> list[str]:
        """Return the record as text, as every user interface prints it."""
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
    """One kernel in a process, summed over all its variants and devices."""

    kernel: str
    hits: int
    """Launches of a kernel that was already compiled."""
    misses: int
    """Variants that were compiled or loaded, by a launch or by warm-up."""
    disk_hits: int
    """Misses served from the cache on disk."""
    after_warm_up: int
    """Misses after warm-up."""
    seconds: float
    """Time spent on misses."""
