"""Compiles what a run will launch before it runs, several kernels at a time.

Most of a compilation is Triton's and the assembler's own code, which lets other Python threads run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from engine.kernels.key import Variant
from engine.kernels.registry import REGISTRY, KernelRegistry

WORKERS = 8


def warm_up(
    variants: Iterable[Variant],
    *,
    registry: KernelRegistry = REGISTRY,
    workers: int = WORKERS,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Compiles and loads each variant for the current device; the registry keeps the records.

    `progress` is called with how many are done, of how many. The first error is raised, and no
    further compilation is begun.
    """
    wanted = list(dict.fromkeys(variants))
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def warm(variant: Variant) -> None:
        # A thread begins on device 0.
        if device is not None:
            torch.cuda.set_device(device)
        registry.warm(variant)

    with ThreadPoolExecutor(workers, thread_name_prefix="kernel") as pool:
        started = [pool.submit(warm, variant) for variant in wanted]
        try:
            for done, finished in enumerate(as_completed(started), start=1):
                finished.result()
                progress(done, len(wanted))
        finally:
            pool.shutdown(cancel_futures=True)
