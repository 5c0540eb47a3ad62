"""Sample a step of an optimizer, and elements of its tensors.

Elements are copied on their device before and after a step. They are copied to the host once the device has finished
the step, so that nothing synchronises; then the checks are called.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from .parameters import FAIL, Line
from .values import HostCopies


class Rates:
    """Learning rates of an optimizer at the sampled steps."""

    def __init__(self) -> None:
        self._highest = 0.0
        self._newest: float | None = None

    def add(self, rate: float) -> bool:
        """Add a learning rate; return whether the warm-up is over and it has not decayed by half."""
        has_risen = self._newest is None or rate > self._newest
        self._newest, self._highest = rate, max(self._highest, rate)
        return not has_risen and rate >= self._highest / 2


class Rows:
    """A parameter and its sampled rows."""

    def __init__(
        self, parameter: Any, local: Any, group: int, place: int, max_elements: int
    ) -> None:
        """Choose evenly spaced rows with at most `max_elements` elements in all of the `local` part of a parameter."""
        self.of = weakref.ref(parameter)
        self.group, self.label = group, f"group {group}, parameter {place}"
        self.is_matrix = parameter.dim() > 1
        rows = local.shape[0] if local.dim() else 1
        self._rows = slice(None, None, -(-rows // max(1, max_elements * rows // local.numel())))
        self._max_elements = max_elements
        self.count = self.of_tensor(local).numel()

    def of_tensor(self, tensor: Any) -> Any:
        tensor = tensor.detach()
        if not tensor.dim():
            return tensor.reshape(1)
        # One row of a large matrix may exceed the limit.
        return tensor[self._rows].reshape(-1)[: self._max_elements]


class Sample:
    """Sampled elements of parameters that have the same device and dtype."""

    def __init__(self, torch: Any, rows: list[Rows], like: Any) -> None:
        """`like`: a tensor with this device and dtype."""
        self._torch, self.rows, self._like = torch, rows, like.detach().new_zeros(0)
        self.counts = [item.count for item in rows]
        self.has_gradients = False
        """Whether any parameter had a gradient at the last `read`."""

    def read(self, attribute: str = "data") -> Any:
        """Return a copy of the elements, (N,), or of their gradients if `attribute` is `grad`, with zeros for missing
        gradients; None if one cannot be read. Only the local shard of a sharded tensor is read."""
        pieces = []
        pairs = [(rows, getattr(rows.of(), attribute, rows)) for rows in self.rows]
        self.has_gradients = any(tensor is not None for _, tensor in pairs)
        for rows, tensor in pairs:
            local = local_of(
                self._torch, self._like.new_zeros(rows.count) if tensor is None else tensor
            )
            pieces.append(local if tensor is None or local is None else rows.of_tensor(local))
            if pieces[-1] is None or pieces[-1].numel() != rows.count:
                return None
        return self._torch.cat([piece.to(self._like) for piece in pieces])


def sample_of(torch: Any, parameters: list[Any], numbers: int) -> Sample | None:
    """Sample about `numbers` elements of the ordinary parameters that have the most common device and dtype."""
    plain = [p for p in parameters if is_plain(torch, p) and p.requires_grad]
    if not plain:
        return None
    counts = Counter((p.device, p.dtype) for p in plain)
    commonest = counts.most_common(1)[0][0]
    plain = [p for p in plain if (p.device, p.dtype) == commonest]
    elements_each = max(1, numbers // len(plain))
    return Sample(
        torch, [Rows(p, p, 0, index, elements_each) for index, p in enumerate(plain)], plain[0]
    )


def local_of(torch: Any, tensor: Any) -> Any:
    """Return the local shard of a tensor; None if it cannot be read as an ordinary tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.detach() if is_readable(torch, local) else None


def is_plain(torch: Any, parameter: Any) -> bool:
    """Return whether a parameter is an ordinary local tensor: not a shard, and not shared with another process."""
    return is_readable(torch, parameter) and not (parameter.is_cpu and parameter.is_shared())


def is_readable(torch: Any, tensor: Any) -> bool:
    return (
        type(tensor) in (torch.nn.Parameter, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        and tensor.device.type in ("cpu", "cuda")
        and tensor.numel() > 0
    )


class SampledStep:
    """One sampled step of an optimizer. Its verdicts are known once the device has finished it."""

    def __init__(
        self,
        torch: Any,
        optimizer: Any,
        number: int,
        rates: Rates,
        threads: set[int],
        has_closure: bool,
    ) -> None:
        """Begin the step. `number` counts the optimizer's steps; `threads` is the live set of stepping threads."""
        self._torch, self.name = torch, type(optimizer).__name__
        self.number, self._threads = number, threads
        self.has_closure, self.is_extra = has_closure, False
        """`is_extra`: the step is sampled only to search the weights for NaN, after a loss that was not finite."""
        self.extra_lines: list[Line] = []
        """Verdicts on this step that need no copies from the device."""
        self._later: list[tuple[Callable[[dict[Any, Any]], list[Line]], dict[Any, Any]]] = []
        self.has_failed = False
        """Whether a verdict on this step has the level FAIL."""
        self._host_copies: HostCopies | None = None
        self._lines: list[Line] | None = None
        self.rates = [
            rate if type(rate := group.get("lr")) in (int, float) else None
            for group in optimizer.param_groups
        ]
        """Learning rate of each group; None for a tensor: reading it from a GPU would synchronise."""
        self.is_settled = rates.add(max(filter(None, self.rates), default=0.0))
        # A closure, a hook of the script or a fused scaler sets gradients during the step: read them at its end.
        self.is_late = (
            has_closure
            or bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))
            or getattr(optimizer, "grad_scale", None) is not None
        )
        self.runs_script = has_closure or bool(
            getattr(optimizer, "_optimizer_step_post_hooks", None)
        )
        """Whether code of the script runs inside the step."""

    def end(self) -> None:
        """Begin to copy the tensors of `judge_later` to the host."""
        self._host_copies = HostCopies(self._torch, [table for _, table in self._later])

    def judge_later(
        self, judge: Callable[[dict[Any, Any]], list[Line]], tensors: dict[Any, Any]
    ) -> None:
        """Call `judge` with these tensors once they are on the host, unless several threads step optimizers."""
        self._later.append((judge, tensors))

    # Once the device has finished the step.

    def has_passed(self) -> bool:
        """Return whether the verdicts are known."""
        return self._host_copies is not None and self._host_copies.are_complete()

    def lines(self) -> list[Line]:
        """Return the verdicts; call only after `has_passed`."""
        if self._lines is None:
            self._lines = [*self.extra_lines]
            with self._torch.no_grad():
                for judge, tensors in self._later if len(self._threads) == 1 else ():
                    self.has_failed = any(level == FAIL for _, level, _, _ in self._lines)
                    self._lines += judge(tensors)
            self._later, self._host_copies = [], None
        return self._lines
