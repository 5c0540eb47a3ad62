"""What a run compiles: all of it before the first step. Every method yields what the log says of it.

A compilation in the middle of a run is a step that takes seconds; on a bad day it is the whole run.
So everything that the models will launch is compiled first (`kernels.prewarm`), the caches are then
sealed, and what is compiled after that is logged as such, with what sets it apart from what was warmed.

Counted are our Triton kernels and, where something used torch.compile, Inductor's caches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from engine.data.batches import Batch
from engine.kernels.compile_record import CompileRecord
from engine.kernels.inductor import CompileWatch
from engine.log.events import Compiled, Event, KernelCounts, Note, Phase
from engine.models.decoder import Decoder
from engine.plan.run_plan import Plan
from engine.runtime.device import torch_dtype
from engine.teachers.protocol import Teacher


class Compiles:
    """The compilations of one session, from its beginning."""

    def __init__(self) -> None:
        self.watch = CompileWatch()
        self.late: list[str] = []
        """What a step had to wait for."""

    def warm_up(
        self, decoder: Decoder, row_counts: Iterable[int], device: torch.device
    ) -> Iterator[Event]:
        """Compiles every kernel of ours that `decoder` launches for inputs of `row_counts` rows."""
        if device.type != "cuda":
            return
        from engine.kernels.dequantize import has_triton

        if not has_triton():
            return
        from engine.kernels.prewarm import matrices_of, prewarm_variants, warm_up
        from engine.kernels.registry import current_arch

        matrices = matrices_of(decoder)
        if not matrices:
            return
        floats = {b.dtype for b in decoder.buffers() if b.is_floating_point()}
        arch = current_arch(torch.cuda.current_device())
        variants = prewarm_variants(matrices, floats, arch=arch, row_counts=row_counts)
        yield Phase(name="compiling kernels", detail=f"{len(variants)} before the first step")
        warm_up(variants)
        yield from self.done()

    def warm_up_loss(self, plan: Plan) -> Iterator[Event]:
        """Compiles what the fused loss launches for the student."""
        from engine.kernels import kd_loss, sparse_loss
        from engine.kernels.prewarm import warm_up

        spec, vocabulary = plan.facts.spec, plan.facts.student.vocab_size
        teaching, temperature = spec.has_teacher and spec.loss.alpha < 1, spec.loss.temperature
        yield Phase(name="compiling the loss", detail=f"for {vocabulary} ids")
        # The checks of the loss ask in fp32, whatever the products are in.
        dtypes = (torch_dtype(plan.facts.student_precision), torch.float32)
        wanted = kd_loss.variants(
            vocabulary,
            dtypes,
            teacher=teaching,
            divergence=spec.loss.divergence,
            temperature=temperature,
        )
        if teaching and plan.sparse:
            wanted = sparse_loss.variants(dtypes, temperature=temperature)
        warm_up(wanted)
        yield from self.done()

    def warm_up_update(self) -> Iterator[Event]:
        """Compiles what an update launches."""
        from engine.kernels.adamw import VARIANTS
        from engine.kernels.prewarm import warm_up

        yield Phase(name="compiling the update", detail="norm, clipping and AdamW")
        warm_up(VARIANTS)
        yield from self.done()

    def compile_teacher(
        self, teacher: Teacher, decoder: Decoder, batch: Batch, rows: int, precision: str
    ) -> Iterator[Event]:
        """Has the layers of `decoder`, which `teacher` asks, compiled for batches of `rows` rows and
        for those of evaluations, of rows like those of `batch`. TrainingFailed where they then answer
        otherwise.
        """
        from engine.teachers.compiled import compile_layers, warm_up

        compile_layers(decoder, batch.tokens_BT.shape[1], single=rows == 1)
        for count in sorted({rows, max(rows, 2)}):
            found = warm_up(teacher, decoder, batch, count, precision)
            text = (
                f"the teacher's compiled layers answer {count} rows {found.relative_rms:.2g} (relative) from "
                f"the layers as written; rounding explains {found.allowed:.2g}"
            )
            yield Note(level="info", text=text)
        yield from self.done()

    def seal(self) -> Iterator[Event]:
        """Warm-up is over: what is compiled from now on kept a step waiting."""
        yield from self.done()
        self.watch.seal()
        if (registry := _registry()) is not None:
            registry.seal()

    def done(self) -> Iterator[Event]:
        """What was compiled since the last call."""
        records = list(self.watch.drain())
        if (registry := _registry()) is not None:
            records += registry.drain()
        for found in records:
            yield _event(found)
            if found.after_warm_up:
                self.late.append(found.key)

    def counts(self, step: int) -> Iterator[Event]:
        """The hits and misses so far; nothing where no kernel was ever asked for."""
        by_kernel: dict[str, tuple[int, int]] = {}
        disk_hits = 0
        if (registry := _registry()) is not None:
            for counts in registry.summary():
                by_kernel[counts.kernel] = (counts.hits, counts.misses)
                disk_hits += counts.disk_hits
        inductor = self.watch.counts()
        if inductor.graphs:
            # A graph that was there already is called without a count; on disk it is a hit of a cache.
            by_kernel["torch.compile graphs"] = (0, inductor.graphs)
            disk_hits += inductor.disk_hits or 0
        if not by_kernel:
            return
        yield KernelCounts(
            step=step,
            hits=sum(hits for hits, _ in by_kernel.values()),
            misses=sum(misses for _, misses in by_kernel.values()),
            disk_hits=disk_hits,
            by_kernel=by_kernel,
        )


def _registry() -> Any:
    """That of our Triton kernels, once something has used one: a run without them needs no triton."""
    module = sys.modules.get("engine.kernels.registry")
    return None if module is None else module.REGISTRY


def _event(found: CompileRecord) -> Compiled:
    differs = [f"{name} ({value}, not {warmed})" for name, value, warmed in found.differs]
    if found.after_warm_up and not differs and found.reason is not None:
        differs = [found.reason]
    return Compiled(
        compiler=found.source,
        kernel=found.kernel,
        key=found.key,
        digest=found.digest,
        compile_s=found.seconds,
        disk_hit=found.disk_hit,
        after_warm_up=found.after_warm_up,
        differs=differs,
    )
