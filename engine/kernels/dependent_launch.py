"""Starts kernels before the previous one has ended: programmatic dependent launch, compute
capability 9.0.

A kernel spends 1 to 2 us on its launch, on computing addresses and on waiting for its first loads
before it does any work. Between two matmuls of one row this takes as long as the work itself. So a
kernel may start while the previous one still runs, do everything that does not depend on it, and
then wait:

    addresses, weights, data from older kernels     before the wait
    `wait_for_inputs`                               the previous kernel has ended; its output is readable
    everything else, and all writes                 after the wait

The next kernel may start only after this wait. So when a kernel starts, only its direct predecessor
can still be running; all earlier kernels have ended, and their output may be read before the wait.

If the next kernel could start at once, its programs would occupy the device, with their registers,
for the time of two kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

EARLY_ARCH = 90
"""The first compute capability that supports it."""
EARLY_CUDA = (12, 4)
"""The first CUDA version whose graphs support it."""


def can_be_early(arch: int) -> bool:
    """Whether kernels on compute capability `arch` (90 is 9.0) may start early here."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return arch >= EARLY_ARCH and version >= EARLY_CUDA and not knobs.runtime.interpret


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait until the previous kernel has ended, and then allow the next one to start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
