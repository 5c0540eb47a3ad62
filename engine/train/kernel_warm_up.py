"""Compile the engine's kernels that a run needs before its first step, and log each of their compilations.

A compilation in the middle of a run delays a step by several seconds or more. So every Triton kernel of the engine
that the models will launch is compiled during a warm-up (`engine.kernels.prewarm`). A compilation after the warm-up
is logged as late, together with how it differs from the warmed-up ones.

Every method logs what it compiles.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from engine.kernels import cudnn_attention
from engine.kernels.compile_record import CompileRecord
from engine.log.events import Compiled, KernelCounts, Phase
from engine.models import fp8
from engine.models.decoder import Decoder
from engine.models.fused import kernels_of
from engine.plan.knobs import give_up_cudnn
from engine.plan.run_plan import Plan
from engine.runtime.device import torch_dtype
from engine.spec import RunSpec
from engine.train.to_events import Log


def build_cudnn_attention(
    decoder: Decoder, whose: str, spec: RunSpec, device: torch.device, log: Log, *, trained: bool
) -> bool:
    """Build the cuDNN graphs of a decoder's packed attention, if cuDNN was chosen, and return whether cuDNN is used.
    Logs a decision if cuDNN does not support this attention.
    """
    if spec.kernels.attention != "cudnn" or not decoder.packed:
        return False
    log(Phase(name=f"building the {whose}'s attention", detail="cuDNN"))
    dtype = torch_dtype(spec.student.precision) if trained else decoder.dtype
    config, batch = decoder.config, (spec.train.rows, spec.data.seq_len)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    why = cudnn_attention.why_not(heads, batch, dtype, device, trained=trained)
    if why is not None:
        log(give_up_cudnn(whose, why))
    return why is None


class Compiles:
    """Compiles the kernels of one session and logs its compilations."""

    def __init__(self) -> None:
        self.late: list[str] = []
        """Keys of the compilations after warm-up, each of which delayed a step."""

    def warm_up(self, decoder: Decoder, device: torch.device, log: Log) -> None:
        """Compile every Triton kernel of the engine that a frozen `decoder` launches; none without a GPU or Triton."""
        if device.type != "cuda":
            return
        from engine.kernels.dequantize import has_triton

        if not has_triton():
            return
        from engine.kernels.prewarm import prewarm_variants, types_of, warm_up

        floats = {b.dtype for b in decoder.buffers() if b.is_floating_point()}
        variants = [
            *prewarm_variants(types_of(decoder), floats),
            *kernels_of(decoder, decoder.dtype, frozen=True),
        ]
        variants += fp8.kernels_of(decoder)
        if not variants:
            return
        log(Phase(name="compiling kernels", detail=f"{len(variants)} before the first step"))
        warm_up(variants)
        self.log_new(log)

    def warm_up_student(self, decoder: Decoder, dtype: torch.dtype, log: Log) -> None:
        """Compile the kernels that the layers of a student launch for activations in `dtype`."""
        from engine.kernels.prewarm import prewarm_variants, types_of, warm_up

        log(Phase(name="compiling the kernels of the student's layers"))
        # The frozen base of adapters may be in quantised blocks or in fp8.
        base = [*prewarm_variants(types_of(decoder), [dtype]), *fp8.kernels_of(decoder)]
        warm_up([*kernels_of(decoder, dtype, frozen=False), *base])
        self.log_new(log)

    def warm_up_loss(self, plan: Plan, log: Log) -> None:
        """Compile the kernels that the fused loss launches for the student."""
        from engine.kernels import dense_loss, sparse_loss
        from engine.kernels.prewarm import warm_up

        spec, vocabulary = plan.spec, plan.inputs.student.vocab_size
        has_teacher, temperature = spec.taught, spec.loss.temperature
        log(Phase(name="compiling the loss", detail=f"for a vocabulary of {vocabulary}"))
        # The checks of the loss use fp32, whatever the dtype of the matmuls.
        dtypes = (torch_dtype(spec.student.precision), torch.float32)
        variants = dense_loss.variants(
            vocabulary,
            dtypes,
            teacher=has_teacher,
            divergence=spec.loss.divergence,
            temperature=temperature,
        )
        if spec.rollout.share and spec.rollout.divergence != spec.loss.divergence:
            variants += dense_loss.variants(
                vocabulary,
                dtypes,
                teacher=True,
                divergence=spec.rollout.divergence,
                temperature=temperature,
            )
        if has_teacher and plan.sparse:
            variants = sparse_loss.variants(dtypes, temperature=temperature)
        warm_up(variants)
        self.log_new(log)

    def warm_up_update(self, log: Log) -> None:
        """Compile the kernels that an update launches."""
        from engine.kernels.adamw import VARIANTS
        from engine.kernels.prewarm import warm_up

        log(Phase(name="compiling the update", detail="norm, clipping and AdamW"))
        warm_up(VARIANTS)
        self.log_new(log)

    def end_warm_up(self, log: Log) -> None:
        """End the warm-up: a later compilation is logged as one that delayed a step."""
        self.log_new(log)
        if (registry := _registry()) is not None:
            registry.seal()

    def log_new(self, log: Log) -> None:
        """Log what was compiled since the last call."""
        registry = _registry()
        for record in () if registry is None else registry.drain():
            log(_event(record))
            if record.after_warm_up:
                self.late.append(record.key)

    def counts(self, step: int, log: Log) -> None:
        """Log the cache hits and misses so far, unless no kernel was requested."""
        by_kernel: dict[str, tuple[int, int]] = {}
        disk_hits = 0
        if (registry := _registry()) is not None:
            for counts in registry.summary():
                by_kernel[counts.kernel] = (counts.hits, counts.misses)
                disk_hits += counts.disk_hits
        if not by_kernel:
            return
        counts = KernelCounts(
            step=step,
            hits=sum(hits for hits, _ in by_kernel.values()),
            misses=sum(misses for _, misses in by_kernel.values()),
            disk_hits=disk_hits,
            by_kernel=by_kernel,
        )
        log(counts)


def _registry() -> Any:
    """Return the registry of the engine's Triton kernels; None if none was imported, so that Triton is not imported."""
    module = sys.modules.get("engine.kernels.registry")
    return None if module is None else module.REGISTRY


def _event(record: CompileRecord) -> Compiled:
    differs = [f"{name} ({value}, not {warmed})" for name, value, warmed in record.differs]
    if record.after_warm_up and not differs and record.reason is not None:
        differs = [record.reason]
    return Compiled(
        compiler="triton",
        kernel=record.kernel,
        key=record.key,
        digest=record.digest,
        compile_s=record.seconds,
        disk_hit=record.disk_hit,
        after_warm_up=record.after_warm_up,
        differs=differs,
    )
