"""Compiles every kernel for every supported GPU ahead of time, without needing a GPU.

    python -m evidence.kernels.aot            refreshes evidence/kernels/aot.json
    python -m evidence.kernels.aot --check    compares with it instead; exit code 1 if worse

The file keeps, for each compiled kernel, the figures that a change of source or compiler could
worsen unnoticed: registers per thread, stack bytes per thread (registers spilled to memory) and
shared memory per program. A regression here is a slow kernel on a GPU that nobody has at hand.

Figures are compared only with figures of the same Triton version.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton import knobs

from engine.errors import InternalError
from engine.kernels import (
    adamw,
    choose,
    dense_loss,
    dequantize_triton,
    fp8_quantise,
    layer_parts,
    paged_attention,
    sparse_loss,
)
from engine.kernels.compiler import ARCHITECTURES, Variant, compile_for
from engine.kernels.registry import REGISTRY
from engine.terminal import put

KEPT = Path(__file__).with_name("aot.json")
COMMAND = "python -m evidence.kernels.aot"
LOSS_IDS = 151936
MARGIN_REGISTERS = 8
"""An increase up to this many registers is no regression, because a GPU allocates them in units of
eight.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AotFigure:
    variant: str
    arch: int
    registers: int
    """Per thread; at most 255."""
    stack_bytes: int
    """Per thread, in memory: spilled registers and variables that need an address."""
    shared_bytes: int
    """Per program."""
    seconds: float
    """Compile time."""

    @property
    def kept(self) -> list[int]:
        return [self.registers, self.stack_bytes, self.shared_bytes]


def all_variants(arch: int) -> tuple[Variant, ...]:
    """Return what runs and text generation launch on `arch`."""
    found = (
        dequantize_triton.variants()
        + fp8_quantise.variants(arch)
        + _loss_variants()
        + adamw.VARIANTS
        + _generation_variants()
    )
    return tuple(dict.fromkeys(found))


def _generation_variants() -> tuple[Variant, ...]:
    """Return what a decode step and the layers of Qwen2.5-0.5B and of Qwen3-8B launch, recorded from meta tensors."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    i32, i64, f32 = torch.int32, torch.int64, torch.float32
    with REGISTRY.noting() as noted:
        for rows in (8, 512):
            position = empty(rows, dtype=i32)
            for heads, shared, width, norms in ((14, 2, 64, False), (32, 8, 128, True)):
                qkv = empty(rows, (heads + 2 * shared) * width)
                pages = empty(9, shared, 64, width)
                here = (pages, pages, empty(rows, 12, dtype=i32), position)
                queries = qkv[:, : heads * width].unflatten(1, (heads, width))
                layer_parts.rotate_into(
                    queries, empty(4, width // 2), empty(4, width // 2), queries
                )
                layer_parts.rotate_into(
                    queries, empty(4, width // 2), empty(4, width // 2), queries, back=True
                )
                both = (empty(width), empty(width)) if norms else None
                paged_attention.place(qkv, both, 1e-6, empty(768, 2, width // 2), *here)
                paged_attention.attend(qkv, *here, empty(rows, heads, width))
            for width, inner in ((896, 4864), (4096, 12288)):
                kept = empty(rows, width)
                layer_parts.add_norm(None, kept, empty(width), 1e-6, kept, kept)
                layer_parts.add_norm(empty(rows, width), kept, empty(width), 1e-6, kept, kept)
                gate, up = empty(rows, 2 * inner).chunk(2, dim=1)
                layer_parts.gate(gate, up, "silu", empty(rows, inner))
                layer_parts.gate(gate, up, "silu", gate)
                layer_parts.gate_backward(empty(rows, inner), empty(rows, inner), gate, "silu")
                over, wide = empty(rows, dtype=f32), empty(rows, width, dtype=f32)
                weight = empty(width, dtype=f32)
                layer_parts.add_norm(kept, wide, weight, 1e-6, wide, kept, over)
                parts = empty(layer_parts.PARTS, width, dtype=f32)
                layer_parts.add_norm_backward(kept, wide, wide, weight, over, wide, kept, parts)
            state = choose.SlotState(
                *(empty(rows, dtype=i64), position, position, position),
                *(empty(rows, dtype=i64), position, empty(rows, dtype=f32)),
            )
            for temperature in (0.0, 1.0):
                logits = empty(rows, LOSS_IDS, dtype=f32)
                ends = empty(1, dtype=i32)
                choose.choose(logits, position, position, ends, state, temperature)
    return tuple(noted)


def _loss_variants() -> tuple[Variant, ...]:
    """Return the fused loss kernels for Qwen2.5's vocabulary of 151936, with and without a teacher."""
    bf16 = [torch.bfloat16]
    return (
        *dense_loss.variants(LOSS_IDS, bf16, teacher=False),
        *dense_loss.variants(LOSS_IDS, bf16, teacher=True, temperature=1.5),
        *dense_loss.variants(LOSS_IDS, bf16, teacher=True, temperature=2, divergence="reverse_kl"),
        *dense_loss.variants(LOSS_IDS, bf16, teacher=True, temperature=2, divergence="jsd"),
        *dense_loss.variants(LOSS_IDS, teacher=True, temperature=2),
        *sparse_loss.variants(bf16, temperature=1.5),
        *sparse_loss.variants(temperature=2),
    )


def compile_all() -> list[AotFigure]:
    """Return the figures of every variant for every architecture, in order."""
    tasks = [(variant, arch) for arch in ARCHITECTURES for variant in all_variants(arch)]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda task: figure(*task), tasks))


def figure(variant: Variant, arch: int) -> AotFigure:
    """Compile a variant and read its figures. Raises InternalError if it does not compile."""
    begun = time.perf_counter()
    try:
        body, _ = compile_for(variant, arch)
    except triton.CompilationError as error:
        raise InternalError(f"kernel {variant}: sm_{arch} — does not compile: {error}") from error
    seconds = time.perf_counter() - begun
    (cubin,) = (path for name, path in body.metadata_group.items() if name.endswith(".cubin"))
    usage_text = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", usage_text)
    if usage is None:
        raise InternalError(f"cuobjdump: {cubin} — expected REG and STACK, found {usage_text!r}")
    return AotFigure(
        variant=str(variant),
        arch=arch,
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        shared_bytes=body.metadata.shared,
        seconds=seconds,
    )


def regressions(figures: Iterable[AotFigure], kept: dict[str, dict[str, list[int]]]) -> list[str]:
    """Return one line for each figure that is worse than in `kept`, or missing there."""
    out = []
    for now in figures:
        before = kept.get(now.variant, {}).get(f"sm_{now.arch}")
        where = f"{now.variant}, sm_{now.arch}"
        if before is None:
            out.append(f"{where}: no figures kept; `{COMMAND}` keeps them")
            continue
        registers, stack_bytes, shared_bytes = before
        if now.stack_bytes > stack_bytes:
            out.append(f"{where}: {now.stack_bytes} bytes of stack, were {stack_bytes}")
        if now.registers > registers + MARGIN_REGISTERS:
            out.append(f"{where}: {now.registers} registers, were {registers}")
        if now.shared_bytes > shared_bytes:
            out.append(f"{where}: {now.shared_bytes} bytes of shared memory, were {shared_bytes}")
    return out


def read_kept() -> tuple[str, dict[str, dict[str, list[int]]]]:
    """Return the Triton version of the kept figures, and the figures."""
    document = json.loads(KEPT.read_text())
    return document["triton"], document["figures"]


def write_kept(figures: list[AotFigure]) -> None:
    by_variant: dict[str, dict[str, list[int]]] = {}
    for now in figures:
        by_variant.setdefault(now.variant, {})[f"sm_{now.arch}"] = now.kept
    # One line per variant, so that a diff shows which kernels changed.
    lines = ",\n".join(
        f"  {json.dumps(variant)}: {json.dumps(rows)}" for variant, rows in by_variant.items()
    )
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(
        f'{{\n "command": {json.dumps(COMMAND)},\n "triton": {json.dumps(triton.__version__)},\n'
        f' "columns": ["registers", "stack_bytes", "shared_bytes"],\n "figures": {{\n{lines}\n }}\n}}\n'
    )


def main(arguments: list[str]) -> int:
    begun = time.perf_counter()
    figures = compile_all()
    put(f"{len(figures)} bodies in {time.perf_counter() - begun:.0f} s")
    for now in figures:
        if now.stack_bytes:
            put(f"spills: {now.variant}, sm_{now.arch}: {now.stack_bytes} bytes of stack")
    if arguments != ["--check"]:
        write_kept(figures)
        put(f"wrote {KEPT}")
        return 0
    version, kept = read_kept()
    if version != triton.__version__:
        put(f"kept figures are of triton {version}, this is {triton.__version__}: not compared")
        return 2
    worse = regressions(figures, kept)
    put("\n".join(worse) or "no worse than what is kept")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
