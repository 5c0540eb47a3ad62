"""Compile, before the run, every kernel that a model with packed weights will launch (warm-up).

Without warm-up a run would compile its kernels one by one in the first step; here they are compiled
several at a time. A block-quantised matrix needs the dequantisation kernel of its type and of the
activations' dtype, for any number of rows; all other operations run in torch. The function that chooses
a kernel at launch also gives the variants to compile, so that no launched variant is missing. Tests
check this with real forward passes.

Most of a compilation runs in Triton's native code and ptxas, which release Python's interpreter
lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import nn

from engine.kernels import dequantize_triton
from engine.kernels.compiler import Variant
from engine.kernels.registry import REGISTRY, KernelRegistry
from engine.quant.blocks import BlockType
from engine.quant.planes import PackedMatrix

WORKERS = 8


def types_of(model: nn.Module) -> tuple[BlockType, ...]:
    """Return the block types of a model's packed layers, each once. A layer is packed if its `packed`
    is a `PackedMatrix`.
    """
    layers = (getattr(module, "packed", None) for module in model.modules())
    return tuple(
        dict.fromkeys(packed.type for packed in layers if isinstance(packed, PackedMatrix))
    )


# contract: kernel-keys-v1
def prewarm_variants(
    types: Iterable[BlockType], dtypes: Iterable[torch.dtype]
) -> tuple[Variant, ...]:
    """Return the kernel variants that matmuls, slices and embedding lookups launch for matrices of these
    types and inputs of `dtypes`, each once.
    """
    kinds = tuple(dtypes)
    types = [type_ for type_ in types if type_.name in dequantize_triton.TUNINGS]
    variants = (dequantize_triton.variant(type_, dtype) for type_ in types for dtype in kinds)
    return tuple(dict.fromkeys(variants))


def warm_up(
    variants: Iterable[Variant],
    *,
    registry: KernelRegistry = REGISTRY,
    workers: int = WORKERS,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Compile and load each variant for the current device; the registry keeps the records.

    `progress` is called with the number done and the total. The first error is raised, and no
    further compilation is started.
    """
    wanted = list(dict.fromkeys(variants))
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def warm(variant: Variant) -> None:
        # A new thread starts on device 0.
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
