"""The loss head alone: from the hidden states of student and teacher to the loss and its gradients.

    arm            what it does
    products       the four matmuls that every form needs, in bf16, and nothing else
    fp32 products  the same with fp32 results, which a loss needs to keep its precision
    ce, kd         engine.loss.kd_loss with alpha 1 and 0.5: cross entropy, and with a teacher
                   eager and fused: the two implementations of what is between the matmuls
    reverse_kl,    kd with another divergence; jsd with the teacher's weight at 0.3
    jsd
    kd packed      kd with a block-quantised teacher head (Q6_K), dequantised slice by slice
    plain          full logits, log_softmax and autograd, as it is usually written

Times are of the device alone, as within a step, where the host runs ahead of it. Also measured are the error
of the gradients against float64 on the same tensors, |g - g64| / |g64| over all elements, and the peak memory
of a call beyond its arguments.

Shapes default to a Qwen2.5-7B teacher and a 0.5B student: 8192 tokens, widths 3584 and 896, a vocabulary of
151936 with 128 more columns in the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.divergences import DIVERGENCES, fused_divergences
from engine.kernels.dequantize import has_triton
from engine.kernels.linear import Scratch
from engine.loss.chunks import FUSED_HELD, LossKernel, default_chunk_rows
from engine.loss.kd_loss import distillation_loss
from engine.models.head import Head, PackedHead, multiply
from engine.models.packed import reserve
from engine.plan.knobs import choose_loss_kernel
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.planes import pack
from evidence.bench.random_weights import random_blocks
from evidence.bench.rows import BenchRow, Measured, Timing
from evidence.bench.timing import time_arms

# Shapes: N tokens, C tokens of a chunk, G of a group of chunks, V student vocabulary, W teacher vocabulary,
# D student width, E teacher width

TEMPERATURE = 2.0
BETA = 0.3
SHORT = {"forward_kl": "kd"}
"""Names of arms that are not those of their divergence."""
ORACLE_ROWS = 512
"""Tokens whose float64 logits are held at a time."""

Forms = dict[str, Callable[[], None]]
"""Calls that compute the same loss and leave its gradients, by the name of their arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossShape:
    tokens: int = 8192
    vocabulary: int = 151936
    teacher_vocabulary: int = 152064
    width: int = 896
    teacher_width: int = 3584

    @property
    def flop(self) -> float:
        """FLOPs of teacher logits, student logits, dH and dW."""
        return 2.0 * self.tokens * self.vocabulary * (self.teacher_width + 3 * self.width)

    def bytes(self, element: int) -> float:
        """Bytes of both heads, both hidden states and both gradients, once each."""
        heads = self.vocabulary * (self.teacher_width + self.width)
        states = self.tokens * (self.teacher_width + 2 * self.width)
        return float((heads + states) * element + self.vocabulary * self.width * 4)


class LossWork:
    """Random tensors of one shape, and calls over them."""

    def __init__(self, device: torch.device, shape: LossShape, temperature: float) -> None:
        self.shape, self.temperature, self.device = shape, temperature, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device=device).manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device, dtype=self.dtype)

        self.hidden_ND = random(shape.tokens, shape.width).requires_grad_()
        self.head_VD = (random(shape.vocabulary, shape.width) * 0.05).requires_grad_()
        self.teacher_NE = random(shape.tokens, shape.teacher_width)
        self.teacher_WE = random(shape.teacher_vocabulary, shape.teacher_width) * 0.02
        labels = torch.Generator().manual_seed(0)
        self.labels_N = torch.randint(0, shape.vocabulary, (shape.tokens,), generator=labels)
        self.on_device_N = self.labels_N.to(device)

    def packed_head(self) -> Head:
        size = (self.shape.teacher_vocabulary, self.shape.teacher_width)
        generator = torch.Generator(device=self.device).manual_seed(0)
        weight = pack(random_blocks(BLOCK_TYPES["Q6_K"], size, generator))
        scratch = Scratch(self.device, self.dtype)
        # As large as the teacher's layers, which share the scratch, may have made it.
        reserve(scratch, weight, whole=True)
        return PackedHead(weight, scratch)

    def ours(
        self,
        alpha: float,
        kernel: LossKernel,
        head: Head | None = None,
        divergence: str = "forward_kl",
    ) -> None:
        self.hidden_ND.grad = self.head_VD.grad = None
        terms = distillation_loss(
            self.hidden_ND,
            self.head_VD,
            self.teacher_NE if alpha != 1 else None,
            (self.teacher_WE if head is None else head) if alpha != 1 else None,
            self.labels_N,
            alpha=alpha,
            temperature=self.temperature,
            denominator=float(self.shape.tokens),
            divergence=divergence,
            beta=BETA,
            kernel=kernel,
            backward_from_loss=True,
        )
        torch.autograd.backward(terms.loss)

    def plain(self) -> None:
        self.hidden_ND.grad = self.head_VD.grad = None
        z_NV = (self.hidden_ND @ self.head_VD.t()).float()
        t_NV = (self.teacher_NE @ self.teacher_WE[: self.shape.vocabulary].t()).float()
        log_q_NV = F.log_softmax(z_NV / self.temperature, dim=1)
        log_p_NV = F.log_softmax(t_NV / self.temperature, dim=1)
        kd = F.kl_div(log_q_NV, log_p_NV, reduction="batchmean", log_target=True)
        loss = 0.5 * F.cross_entropy(z_NV, self.on_device_N) + 0.5 * self.temperature**2 * kd
        torch.autograd.backward(loss)

    def products(self, out: torch.dtype) -> Callable[[], None]:
        """The matmuls of the fused form, by its chunks and groups of chunks, into preallocated memory."""
        shape, h_ND, w_VD = self.shape, self.hidden_ND.detach(), self.head_VD.detach()
        most = default_chunk_rows(self.device.type, shape.vocabulary, fused=True)
        step = -(-shape.tokens // -(-shape.tokens // most))

        def empty(*size: int, dtype: torch.dtype = out) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=self.device)

        held = min(step * FUSED_HELD, shape.tokens)
        z_CV, t_CV = empty(step, shape.vocabulary), empty(step, shape.vocabulary)
        dz_GV = torch.randn(held, shape.vocabulary, device=self.device, dtype=self.dtype)
        dh_ND, dw_VD = empty(shape.tokens, shape.width), empty(shape.vocabulary, shape.width)

        def run() -> None:
            for begun in range(0, shape.tokens, held):
                group = slice(begun, min(begun + held, shape.tokens))
                for start in range(begun, group.stop, step):
                    rows = slice(start, min(start + step, group.stop))
                    count = rows.stop - start
                    multiply(z_CV[:count], h_ND[rows], w_VD.t())
                    multiply(
                        t_CV[:count], self.teacher_NE[rows], self.teacher_WE[: shape.vocabulary].t()
                    )
                count = group.stop - begun
                multiply(dh_ND[group], dz_GV[:count], w_VD)
                multiply(dw_VD, dz_GV[:count].t(), h_ND[group], add=begun > 0)

        return run

    def oracle(self, divergence: str) -> tuple[Tensor, Tensor]:
        """The gradients in float64."""
        hidden_ND = self.hidden_ND.detach().double().requires_grad_()
        head_VD = self.head_VD.detach().double().requires_grad_()
        terms = distillation_loss(
            hidden_ND,
            head_VD,
            self.teacher_NE.double(),
            self.teacher_WE.double(),
            self.labels_N,
            alpha=0.5,
            temperature=self.temperature,
            denominator=float(self.shape.tokens),
            divergence=divergence,
            beta=BETA,
            chunk_rows=ORACLE_ROWS,
        )
        dh_ND, dw_VD = torch.autograd.grad(terms.loss, (hidden_ND, head_VD))
        return dh_ND, dw_VD

    def gradients(self) -> tuple[Tensor, Tensor]:
        assert self.hidden_ND.grad is not None and self.head_VD.grad is not None
        return self.hidden_ND.grad, self.head_VD.grad


def arm_of(divergence: str, form: str) -> str:
    return f"{SHORT.get(divergence, divergence)}, {form}"


def bench_loss(
    device: torch.device,
    shape: LossShape,
    *,
    rounds: int,
    others: Callable[[LossWork], Mapping[str, Forms]] | None = None,
) -> Measured:
    """Measure every arm, in turns, with `others` of the same losses by divergence.

    `ratio` is the speed relative to `plain`. That arm is left out when its logits do not fit in memory, and
    the fused arms when there is no GPU for them. Also returned are `gradient_errors`, of the hidden states
    and the head, by arm, and `extra_bytes`, the peak allocation of a call beyond its arguments, empty on a
    CPU.
    """
    work = LossWork(device, shape, TEMPERATURE)
    calls: Forms = {"ce, eager": lambda: work.ours(1.0, "eager")}
    compared: dict[str, Forms] = {
        name: {arm_of(name, "eager"): partial(work.ours, 0.5, "eager", None, name)}
        for name in DIVERGENCES
    }
    if _runs_fused(device):
        calls["ce, fused"] = lambda: work.ours(1.0, "fused")
        for name in fused_divergences():
            compared[name][arm_of(name, "fused")] = partial(work.ours, 0.5, "fused", None, name)
        if shape.teacher_width % 256 == 0:
            packed = work.packed_head()
            calls["kd packed, fused"] = lambda: work.ours(0.5, "fused", packed)
    for name, forms in (others(work) if others else {}).items():
        compared[name] |= forms
    # Six full fp32 logits are alive at once in the plain form.
    if _free_bytes(device) > 8 * 4 * shape.tokens * shape.vocabulary:
        compared["forward_kl"]["plain"] = work.plain
    errors: dict[str, tuple[float, float]] = {}
    extra: dict[str, int] = {}

    def call_once(name: str, call: Callable[[], None]) -> None:
        most = _extra_bytes(call, work, device)
        if most is not None:
            extra[name] = most

    for name, call in calls.items():
        call_once(name, call)
    for divergence, forms in compared.items():
        wanted = work.oracle(divergence)
        for name, call in forms.items():
            call_once(name, call)
            dh, dw = (_error(*pair) for pair in zip(work.gradients(), wanted, strict=True))
            errors[name] = (dh, dw)
        del wanted
        calls |= forms
    work.hidden_ND.grad = work.head_VD.grad = None
    arms = {
        "products": work.products(work.dtype),
        "fp32 products": work.products(torch.float32),
        **calls,
    }
    times = time_arms(arms, device, rounds=rounds, queue_first=True)
    base = times.get("plain")
    rows = [_row(name, timing, base, shape, work.dtype) for name, timing in times.items()]
    return rows, {"gradient_errors": errors, "extra_bytes": extra}


def _runs_fused(device: torch.device) -> bool:
    decision = choose_loss_kernel(
        "auto",
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        has_triton=has_triton(),
        divergence="forward_kl",
    )
    return decision.choice == "fused"


def _extra_bytes(call: Callable[[], None], work: LossWork, device: torch.device) -> int | None:
    """Call once and return its peak allocation, including the gradients that it leaves."""
    work.hidden_ND.grad = work.head_VD.grad = None
    if device.type != "cuda":
        call()
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return int(torch.cuda.max_memory_allocated(device) - before)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    from engine.machine.host import Host

    available = Host().memory().available_bytes.number
    return int(available or 0)


def _row(
    arm: str, timing: Timing, base: Timing | None, shape: LossShape, dtype: torch.dtype
) -> BenchRow:
    flop = shape.flop
    if arm.startswith("ce"):
        flop = 2.0 * shape.tokens * shape.vocabulary * 3 * shape.width
    return BenchRow.of(
        arm,
        timing,
        shape=f"loss V={shape.vocabulary} D={shape.width} E={shape.teacher_width}",
        rows=shape.tokens,
        flop=flop,
        bytes=shape.bytes(dtype.itemsize),
        base=None if arm.startswith(("ce", "products", "fp32")) else base,
    )
