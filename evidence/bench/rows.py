"""One measured line of a benchmark, and the printed table.

A time alone says little. So each row records its work, from which the table derives the rate, the fraction of
what the machine can reach, and the ratio to the arm it is compared with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from engine.machine.rates import Rates
from engine.terminal import aligned


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float
    """Median of the repetitions."""
    spread: float
    """(90th percentile - 10th percentile) / median."""

    def each(self, count: int) -> Timing:
        """Return the timing of one of `count` equal parts."""
        return Timing(self.seconds / count, self.spread)


Measured = tuple[list["BenchRow"], dict[str, object]]
"""The result of a benchmark: its rows, and the other entries of its JSON value by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    arm: str
    """Measured operation: `bf16 F.linear`, `fused`, `dequantize`."""
    shape: str
    """Weight that it was measured on: `gate_up 37888 x 3584 Q4_K`."""
    rows: int
    """Rows of activations, M."""
    seconds: float
    """Median of one repetition."""
    spread: float
    """(90th percentile - 10th percentile) / median of the repetitions."""
    flop: float
    bytes: float
    """Fewest bytes that must cross device memory."""
    ratio: float | None = None
    """Speed relative to the arm it is compared with; above 1 is faster."""

    @staticmethod
    def of(
        arm: str,
        timing: Timing,
        *,
        shape: str,
        rows: int,
        flop: float = 0.0,
        bytes: float,
        base: Timing | None = None,
    ) -> BenchRow:
        """Make the row of an arm; `base` is the timing of the arm it is compared with."""
        return BenchRow(
            arm=arm,
            shape=shape,
            rows=rows,
            seconds=timing.seconds,
            spread=timing.spread,
            flop=flop,
            bytes=float(bytes),
            ratio=None if base is None else base.seconds / timing.seconds,
        )

    def bound_s(self, roof: Rates) -> float:
        """Return the minimum time in seconds: that of the bytes or of the arithmetic, whichever is larger."""
        return max(self.bytes / roof.bytes, self.flop / roof.flops)

    def share(self, roof: Rates) -> float:
        """Return the fraction of the roofline that was reached, 0 to 1."""
        return self.bound_s(roof) / self.seconds

    def as_dict(self, roof: Rates) -> dict[str, float | int | str | None]:
        return {
            **dataclasses.asdict(self),
            "flop_per_s": self.flop / self.seconds,
            "bytes_per_s": self.bytes / self.seconds,
            "bound_s": self.bound_s(roof),
            "share_of_bound": self.share(roof),
        }


HEADER = ("arm", "shape", "M", "us", "+-", "TFLOP/s", "GB/s", "of bound", "ratio")


def table(rows: list[BenchRow], roof: Rates) -> list[str]:
    """Format the rows as aligned lines."""
    cells = [HEADER] + [
        (
            row.arm,
            row.shape,
            str(row.rows),
            f"{row.seconds * 1e6:.1f}",
            f"{row.spread:.1%}",
            f"{row.flop / row.seconds / 1e12:.1f}",
            f"{row.bytes / row.seconds / 1e9:.0f}",
            f"{row.share(roof):.0%}",
            "" if row.ratio is None else f"{row.ratio:.2f}x",
        )
        for row in rows
    ]
    return aligned(cells, right=range(2, len(HEADER)))
