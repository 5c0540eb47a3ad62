"""How much a step does, counted as it is done, by part of the step: the arithmetic of matmuls and in how many of them;
the calls of torch, the numbers that they read and write, how many are sorted, and how many are wide.

Counted are the operations that torch dispatches; kernels of our own and those of compiled layers are not among them. So
a part may do less than is counted to be needed, and never more. More matmuls than are needed, of no more operations in
all, are the same work in smaller pieces: rows one at a time, smaller chunks of the loss. What is no matmul needs a few
calls for each layer, and reads and writes the layer's numbers a few times: a loop over tokens makes many more calls;
attention that writes its scores, or a copy of all logits, takes many more numbers. No part needs an order.

Counting changes no number and depends on no clock: a part that does its work twice is seen on a busy machine too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.checks.check import Answer, Numbers, unknown

MORE = 1.15
"""Times its arithmetic that a part may do."""
UNNOTICED = 0.02
"""Of a step's arithmetic: less does not matter where it is done."""
MORE_PIECES, FEW_PIECES = 1.5, 4
"""Times the matmuls that a part may take for it, and as many more."""
MORE_CALLS, FEW_CALLS = 3.0, 200
"""Times the calls of a few for each layer, and as many more."""
MORE_NUMBERS, FEW_NUMBERS = 4.0, 1 << 20
"""Times the numbers that a part may read and write outside its matmuls, and as many more."""
REST = "rest"
"""Of a step: what is done beside its parts."""
SORTS = frozenset({"sort", "kthvalue", "median", "nanmedian", "mode", "_unique2", "unique_dim"})
SORTED_SHARE = 0.01
"""Of the numbers that a part reads and writes: experts and their tokens are sorted."""
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
    calls: float = math.inf
    """Of torch, without views."""
    numbers: float = math.inf
    """That are read and written outside matmuls."""
    wide_share: float = WIDE_SHARE
    """Of the numbers made, those that may be float64."""

    def __add__(self, other: Needed) -> Needed:
        return Needed(
            flops=self.flops + other.flops,
            matmuls=self.matmuls + other.matmuls,
            calls=self.calls + other.calls,
            numbers=self.numbers + other.numbers,
            wide_share=max(self.wide_share, other.wide_share),
        )


NOTHING = Needed(flops=0.0, matmuls=0.0, calls=0.0, numbers=0.0)


@dataclass(slots=True)
class Done:
    """What a part has done."""

    flops: int = 0
    matmuls: int = 0
    calls: int = 0
    numbers: int = 0
    sorted: int = 0
    made: int = 0
    """Numbers of tensors that calls return."""
    wide: int = 0
    """Of these, in float64."""


class CountedWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; `part` says in which part of the step the work is done."""

    def __init__(self, part: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._part = part
        self.done: defaultdict[str, Done] = defaultdict(Done)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Asked by torch: what is to be skipped is wrapped by the compiler, which takes seconds to load.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        found, done = func(*args, **kwargs), self.done[self._part()]
        if isinstance(found, Tensor) and found.is_floating_point() and found.numel() > 1:
            done.made += found.numel()
            done.wide += found.numel() * (found.dtype == torch.float64)
        if func.is_view:
            return found
        name = func._overloadpacket.__name__
        done.calls += 1
        if formula := FORMULAS.get(name):
            done.flops += formula(found, *args)
            done.matmuls += 1
        else:
            read = [x.numel() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            done.numbers += sum(read)
            done.numbers += sum(x.numel() for x in tree_leaves(found) if isinstance(x, Tensor))
            done.sorted += max(read, default=0) if name in SORTS else 0
        return found

    def beyond(self, most: Mapping[str, Needed]) -> str:
        """Say which part does more than it needs, in more pieces, or in float64; empty when none does."""
        unnoticed = UNNOTICED * sum(need.flops for need in most.values())
        for part, need in most.items():
            done = self.done[part]
            if done.flops > MORE * need.flops + unnoticed:
                times = f", {done.flops / need.flops:.2f} times as many" if need.flops else ""
                return (
                    f"{part} does {done.flops:.4g} operations in matmuls, its models need at most {need.flops:.4g}"
                    f"{times}: work is done twice, for rows that are none, or in the time of another part"
                )
            if done.matmuls > MORE_PIECES * need.matmuls + FEW_PIECES:
                return (
                    f"{part} takes {done.matmuls:,} matmuls, {need.matmuls:,.0f} are enough for its arithmetic: it is "
                    "done in smaller pieces than were decided, which takes longer for the same result"
                )
            if done.calls > MORE_CALLS * need.calls + FEW_CALLS:
                return (
                    f"{part} makes {done.calls:,} calls of torch, about {need.calls:,.0f} are enough: something is "
                    "done for each row or token by itself"
                )
            if done.numbers > MORE_NUMBERS * need.numbers + FEW_NUMBERS:
                return (
                    f"{part} reads and writes {done.numbers:.4g} numbers outside its matmuls, about {need.numbers:.4g} "
                    "are enough: something is copied, or attention writes its scores"
                )
        for part, done in self.done.items():
            if done.sorted > SORTED_SHARE * done.numbers + 1:
                return (
                    f"{part} sorts {done.sorted:,} numbers, which takes many times as long as reading them, and no "
                    "part needs an order"
                )
            if done.wide > most.get(part, NOTHING).wide_share * done.made:
                return (
                    f"{part} makes {done.wide / done.made:.0%} of its numbers in float64, which takes many times as "
                    "long on a GPU"
                )
        return ""

    def judge(self, most: Mapping[str, Needed]) -> Answer:
        """Compare with what each part may need, of the parts of which that is known."""
        numbers = Numbers({f"{part}_needed": need.flops for part, need in most.items()})
        for part, done in self.done.items():
            counts = ("flops", "matmuls", "calls", "numbers")
            numbers |= {f"{part or REST}_{what}": getattr(done, what) for what in counts}
        if not most:
            return unknown("how much its models need is not known of their architecture")
        if not any(done.flops for done in self.done.values()):
            return unknown("the step's matmuls are not torch's own: they cannot be counted")
        if text := self.beyond(most):
            return numbers.failed(f"of the step, {text}")
        times = ", ".join(
            f"{part} {self.done[part].flops / need.flops:.2f}"
            for part, need in most.items()
            if need.flops
        )
        return numbers.passed(f"times the arithmetic of its model that each part does: {times}")
