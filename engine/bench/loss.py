"""The loss head alone: hidden states of student and teacher in, loss and gradients out.

    arm            what it does
    kd             engine.distill.loss, alpha between 0 and 1: our chunked forward and backward
    ce             the same with alpha = 1: no teacher
    plain          whole logits, log_softmax and autograd, as it is usually written
    products       the matrix products that no implementation can do without, and nothing else

Shapes default to a Qwen2.5-7B teacher and a 0.5B student: 8192 tokens, widths 3584 and 896, a
vocabulary of 151936 with 128 more columns in the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.bench.rows import BenchRow
from engine.bench.timing import Timing, time_arms
from engine.distill.loss import distillation_loss

# Shapes: N tokens, V student vocabulary, W teacher vocabulary, D student width, E teacher width


@dataclass(frozen=True, slots=True, kw_only=True)
class LossShape:
    tokens: int = 8192
    vocabulary: int = 151936
    teacher_vocabulary: int = 152064
    width: int = 896
    teacher_width: int = 3584

    @property
    def flop(self) -> float:
        """Teacher logits, student logits, dH and dW."""
        return 2.0 * self.tokens * self.vocabulary * (self.teacher_width + 3 * self.width)

    def bytes(self, element: int) -> float:
        """Both heads, both hidden states and both gradients once."""
        heads = self.vocabulary * (self.teacher_width + self.width)
        states = self.tokens * (self.teacher_width + 2 * self.width)
        return float((heads + states) * element + self.vocabulary * self.width * 4)


def loss_rows(
    device: torch.device, shape: LossShape, *, temperature: float = 2.0, rounds: int = 10
) -> list[BenchRow]:
    """Every arm, in turns. `ratio` is the speed relative to `plain`; that arm is left out where its
    logits do not fit in memory."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    hidden_ND = random(shape.tokens, shape.width).requires_grad_()
    head_VD = (random(shape.vocabulary, shape.width) * 0.05).requires_grad_()
    teacher_NE = random(shape.tokens, shape.teacher_width)
    teacher_WE = random(shape.teacher_vocabulary, shape.teacher_width) * 0.02
    labels_N = torch.randint(0, shape.vocabulary, (shape.tokens,))
    on_device_N = labels_N.to(device)

    def ours(alpha: float) -> None:
        hidden_ND.grad = head_VD.grad = None
        terms = distillation_loss(
            hidden_ND,
            head_VD,
            teacher_NE,
            teacher_WE,
            labels_N,
            alpha=alpha,
            temperature=temperature,
            denominator=float(shape.tokens),
        )
        torch.autograd.backward(terms.loss)

    def plain() -> None:
        hidden_ND.grad = head_VD.grad = None
        z_NV = (hidden_ND @ head_VD.t()).float()
        t_NV = (teacher_NE @ teacher_WE[: shape.vocabulary].t()).float()
        log_q_NV = F.log_softmax(z_NV / temperature, dim=1)
        log_p_NV = F.log_softmax(t_NV / temperature, dim=1)
        kd = F.kl_div(log_q_NV, log_p_NV, reduction="batchmean", log_target=True)
        loss = 0.5 * F.cross_entropy(z_NV, on_device_N) + 0.5 * temperature**2 * kd
        torch.autograd.backward(loss)

    def products() -> None:
        step = 1024
        with torch.no_grad():
            for start in range(0, shape.tokens, step):
                h_CD = hidden_ND[start : start + step]
                z_CV = h_CD @ head_VD.t()
                _ = teacher_NE[start : start + step] @ teacher_WE[: shape.vocabulary].t()
                _ = z_CV @ head_VD
                _ = z_CV.t() @ h_CD

    arms = {"products": products, "ce": lambda: ours(1.0), "kd": lambda: ours(0.5)}
    # Six whole logits in fp32 live at once in the plain form.
    if _free_bytes(device) > 8 * 4 * shape.tokens * shape.vocabulary:
        arms["plain"] = plain
    times = time_arms(arms, device, rounds=rounds)
    base = times.get("plain")
    return [_row(name, timing, base, shape, dtype) for name, timing in times.items()]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    from engine.device.host import Host

    available = Host().memory().available_bytes.number
    return int(available or 0)


def _row(
    arm: str, timing: Timing, base: Timing | None, shape: LossShape, dtype: torch.dtype
) -> BenchRow:
    flop = shape.flop
    if arm == "ce":
        flop = 2.0 * shape.tokens * shape.vocabulary * 3 * shape.width
    return BenchRow(
        arm=arm,
        shape=f"loss V={shape.vocabulary} D={shape.width} E={shape.teacher_width}",
        rows=shape.tokens,
        seconds=timing.seconds,
        spread=timing.spread,
        flop=flop,
        bytes=shape.bytes(dtype.itemsize),
        ratio=base.seconds / timing.seconds
        if base is not None and arm in ("kd", "plain")
        else None,
    )
