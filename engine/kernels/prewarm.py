"""Warm-up: determines every kernel that a model with packed weights will launch, and compiles it
before the run.

Otherwise a run would compile its kernels one by one in the first step; here they are compiled
several at a time. What is needed follows from the matrices, the dtype of the activations and their
numbers of rows, through the same functions that choose a kernel at launch. So the set contains at
least what is launched, which tests check against real forward passes.

    block-quantised matrix    any number of rows          the dequantisation kernel of its type and dtype
                              few rows M                  the fused kernels of each such M
    anything else             runs in torch               nothing

Most of a compilation runs in Triton's native code and ptxas, which release Python's interpreter
lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch
from torch import nn

from engine.kernels import dequantize_triton, small_m
from engine.kernels.compiler import Variant
from engine.kernels.registry import REGISTRY, KernelRegistry
from engine.quant.blocks import BlockType
from engine.quant.planes import PackedMatrix

WORKERS = 8


@dataclass(frozen=True, slots=True)
class Matrix:
    """The properties of a packed matrix that a launch depends on."""

    type: BlockType
    rows: int
    columns: int
    bias: torch.dtype | None = None


def matrices_of(model: nn.Module) -> tuple[Matrix, ...]:
    """Return the matrices of a model's packed layers, each kind once. A layer is packed if its
    `packed` is a `PackedMatrix`.
    """
    found = []
    for module in model.modules():
        packed = getattr(module, "packed", None)
        if isinstance(packed, PackedMatrix):
            bias = getattr(module, "bias", None)
            found.append(
                Matrix(
                    packed.type, packed.rows, packed.columns, None if bias is None else bias.dtype
                )
            )
    return tuple(dict.fromkeys(found))


# contract: kernel-keys-v1
def prewarm_variants(
    matrices: Iterable[Matrix],
    dtypes: Iterable[torch.dtype],
    *,
    arch: int,
    row_counts: Iterable[int],
) -> tuple[Variant, ...]:
    """Return what matmuls with these matrices launch on compute capability `arch` (90 is 9.0), for
    inputs of `row_counts` rows in any of `dtypes`, and what slices and lookups of them launch; each
    variant once.
    """
    counts, kinds = tuple(row_counts), tuple(dtypes)
    wanted = (
        variant
        for matrix in dict.fromkeys(matrices)
        for dtype in kinds
        for variant in _of(matrix, dtype, arch, counts)
    )
    return tuple(dict.fromkeys(wanted))


def _of(
    matrix: Matrix, dtype: torch.dtype, arch: int, row_counts: tuple[int, ...]
) -> Iterator[Variant]:
    yield dequantize_triton.variant(matrix.type, dtype)
    # Not only up to the crossover, because a setting may select the fused kernels explicitly.
    few = [m for m in row_counts if small_m.takes(matrix.type, m, torch.device("cuda"))]
    yield from small_m.variants(
        matrix.type, matrix.rows, matrix.columns, dtype, matrix.bias, arch=arch, m=few
    )


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
