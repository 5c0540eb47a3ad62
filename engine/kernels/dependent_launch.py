"""Kernels that begin before the one ahead of them has ended: programmatic dependent launch, capability 9.0.

A kernel takes 1 to 2 us before it has read anything: it is launched, computes addresses, and waits for its
first loads. Between two matmuls of one row that takes as long as the work between them. So a kernel
may be on the device while the one ahead still runs, do all that needs nothing of it, and wait then:

    addresses, weights, what older kernels wrote    before
    `wait_for_inputs`                               the kernel ahead has ended, and what it wrote can be read
    everything else, and everything that is written after

Only then the next kernel may begin. So when a kernel is there at all, the one before the one ahead of it has
ended, and all before that: whatever these wrote may be read before the wait.

If it began at once, its programs would occupy the device, with their registers, for the time of two kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

EARLY_ARCH = 90
"""The first compute capability that can."""
EARLY_CUDA = (12, 4)
"""The first CUDA whose graphs can."""


def can_be_early(arch: int) -> bool:
    """Whether kernels on compute capability `arch` (90 is 9.0) may begin early here."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return arch >= EARLY_ARCH and version >= EARLY_CUDA and not knobs.runtime.interpret


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Until the kernel ahead has ended; from then on the next one may begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
