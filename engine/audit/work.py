"""How much arithmetic a step does, counted as it is done: by part of the step, in how many matmuls, and by the width of
its numbers.

Counted are the operations that torch dispatches; kernels of our own and those of compiled layers are not among them. So
a part may do less than is counted to be needed, and never more. More matmuls than are needed, of no more operations in
all, are the same work in smaller pieces: rows one at a time, smaller chunks of the loss.
Counting changes no number and depends on no clock: a part that does its work twice is seen on a busy machine too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.checks.check import Answer, Numbers, unknown

MORE = 1.15
"""Times its arithmetic that a part may do."""
UNNOTICED = 0.02
"""Of a step's arithmetic: less does not matter where it is done."""
MORE_PIECES, FEW_PIECES = 1.5, 4
"""Times the matmuls that a part may take for it, and as many more."""
WIDE_SHARE = 0.05
"""Of a part's numbers that may be made in float64: rotary frequencies, norms and sums are."""


def _product(out: Tensor, x: Tensor, *other: Any) -> int:
    return 2 * out.numel() * x.shape[-1]


def _attention(
    out: Tensor | tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, *other: Any
) -> int:
    return 2 * q.numel() // q.shape[-1] * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(
    out: tuple[Tensor, ...], gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *other: Any
) -> int:
    # Scores once more, the gradients of values and weights, those of queries and keys.
    return 2 * q.numel() // q.shape[-1] * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


FORMULAS: Mapping[str, Callable[..., int]] = {
    "mm": _product,
    "bmm": _product,
    "addmm": lambda out, bias, x, *other: _product(out, x),
    "baddbmm": lambda out, bias, x, *other: _product(out, x),
    # These two come in parts but in inference mode. To take them apart there would change their rounding.
    "linear": _product,
    "matmul": _product,
    "scaled_dot_product_attention": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
}
"""Operations of what torch dispatches, by its result and operands. `torch.utils.flop_counter` knows them too, and loads
a compiler for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """What a part may need at most."""

    flops: float
    """Of its matmuls."""
    matmuls: float
    """How many; attention counts as two."""


NOTHING = Needed(flops=0.0, matmuls=0.0)


class CountedWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; `part` says in which part of the step the work is done."""

    def __init__(self, part: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._part = part
        self.flops: Counter[str] = Counter()
        self.matmuls: Counter[str] = Counter()
        self._made: Counter[str] = Counter()
        self._wide: Counter[str] = Counter()
        """Of the numbers made, those in float64."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Asked by torch: what is to be skipped is wrapped by the compiler, which takes seconds to load.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        found, part = func(*args, **kwargs), self._part()
        if formula := FORMULAS.get(func._overloadpacket.__name__):
            self.flops[part] += formula(found, *args)
            self.matmuls[part] += 1
        if isinstance(found, Tensor) and found.is_floating_point() and found.numel() > 1:
            self._made[part] += found.numel()
            self._wide[part] += found.numel() * (found.dtype == torch.float64)
        return found

    def beyond(self, most: Mapping[str, Needed]) -> str:
        """Say which part does more than it needs, in more pieces, or in float64; empty when none does."""
        unnoticed = UNNOTICED * sum(need.flops for need in most.values())
        for part, need in most.items():
            flops, matmuls = self.flops[part], self.matmuls[part]
            if flops > MORE * need.flops + unnoticed:
                times = f", {flops / need.flops:.2f} times as many" if need.flops else ""
                return (
                    f"{part} does {flops:.4g} operations in matmuls, its models need at most {need.flops:.4g}{times}: "
                    "work is done twice, for rows that are none, or in the time of another part"
                )
            if matmuls > MORE_PIECES * need.matmuls + FEW_PIECES:
                return (
                    f"{part} takes {matmuls:,} matmuls, {need.matmuls:,.0f} are enough for its arithmetic: it is done "
                    "in smaller pieces than were decided, which takes longer for the same result"
                )
        for part, wide in self._wide.items():
            if wide > WIDE_SHARE * self._made[part]:
                return (
                    f"{part} makes {wide / self._made[part]:.0%} of its numbers in float64, which takes many times as "
                    "long on a GPU"
                )
        return ""

    def judge(self, most: Mapping[str, Needed]) -> Answer:
        """Compare with what each part may need, of the parts of which that is known."""
        numbers = Numbers({f"{part}_flops": count for part, count in self.flops.items()})
        numbers |= {f"{part}_needed": need.flops for part, need in most.items()}
        numbers |= {f"{part}_matmuls": count for part, count in self.matmuls.items()}
        if not most:
            return unknown("how much its models need is not known of their architecture")
        if not sum(self.flops.values()):
            return unknown("the step's matmuls are not torch's own: they cannot be counted")
        if text := self.beyond(most):
            return numbers.failed(f"of the step, {text}")
        done = ", ".join(
            f"{part} {self.flops[part] / need.flops:.2f}"
            for part, need in most.items()
            if need.flops
        )
        return numbers.passed(f"times the arithmetic of its model that each part does: {done}")
