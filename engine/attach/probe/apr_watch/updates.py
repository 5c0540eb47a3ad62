"""Check that a step of an optimizer makes its textbook update of the weights.

Some rows of each weight, gradient and state are copied before and after the step. On a GPU they are copied on the
device, and to the host on another stream once the GPU has passed the step, so nothing waits.
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from .parameters import FACT, FAIL, PASS, SUSPICION, UNKNOWN, Line, Modules, named
from .textbook import Rule, judge, rule_of
from .values import HostCopies

_ELEMENTS = 1 << 15
"""Approximate number of elements copied per step: some milliseconds in float64, in which a GPU may idle."""
_MIN_ELEMENTS = 64
"""Minimum number of elements copied of each parameter."""
_ROW_OFFSET = 7919
"""Offset between the rows of two sampled steps: prime, so that no stride meets the same rows again."""
_MAX_UNCHANGED = 0.5
"""Share of 16-bit weights left unchanged by an update, from which it is reported as a mistake."""
_LARGE_STEP = 0.1
"""Size of a step relative to the weights, from which it is reported; in healthy training about 0.001."""


class Rates:
    """Learning rates of an optimizer at the sampled steps, and sizes of its matrices at the first one."""

    def __init__(self) -> None:
        self._highest = 0.0
        self._newest: float | None = None
        self._sizes: dict[str, float] = {}

    def add(self, rate: float) -> bool:
        """Add a learning rate; return whether it is neither in a warm-up nor decayed by half."""
        has_risen = self._newest is None or rate > self._newest
        self._newest, self._highest = rate, max(self._highest, rate)
        return not has_risen and rate >= self._highest / 2

    def share(self, label: str, weights: Any, step: Any) -> float | None:
        """Return the size of a step relative to the first size of the matrix; None if that is zero."""
        first_size = self._sizes.setdefault(label, _size(weights))
        share = _size(step) / first_size if first_size else math.inf
        return share if math.isfinite(share) else None


class Rows:
    """A parameter and its sampled rows."""

    def __init__(
        self, parameter: Any, group: int, place: int, max_elements: int, number: int
    ) -> None:
        """Choose evenly spaced rows with at most `most` elements in all; they differ with each `number`."""
        self.of = weakref.ref(parameter)
        self.group, self.label = group, f"group {group}, parameter {place}"
        rows = parameter.shape[0] if parameter.dim() else 1
        stride = -(-rows // max(1, max_elements * rows // parameter.numel()))
        self._rows = slice(number * _ROW_OFFSET % stride, None, stride)
        self._max_elements = max_elements
        self.has_gradient = False
        self.count = self.of_tensor(parameter).numel()

    def of_tensor(self, tensor: Any) -> Any:
        tensor = tensor.detach()
        if not tensor.dim():
            return tensor.reshape(1)
        # One row of a large matrix may exceed the limit.
        return tensor[self._rows].reshape(-1)[: self._max_elements]


class Sample:
    """Sampled elements of parameters of one device and dtype."""

    def __init__(self, torch: Any, rows: list[Rows], like: Any) -> None:
        """`like`: a tensor of the device and dtype."""
        self._torch, self.rows, self._like = torch, rows, like.detach().new_zeros(0)
        self.counts = [item.count for item in rows]
        self.has_gradients = False
        """Whether there was a gradient when they were read last."""

    def read(self, attribute: str = "data") -> Any:
        """Return a copy of the elements, (N,), or of their gradients (`attribute` is `grad`), with zeros where there
        is none; None where one cannot be read. Of a sharded tensor only the local part is read."""
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
    """Sample about `numbers` elements of the plain parameters with the most common device and dtype."""
    plain = [p for p in parameters if is_plain(torch, p) and p.requires_grad]
    if not plain:
        return None
    counts = Counter((p.device, p.dtype) for p in plain)
    commonest = counts.most_common(1)[0][0]
    plain = [p for p in plain if (p.device, p.dtype) == commonest]
    elements_each = max(1, numbers // len(plain))
    return Sample(
        torch, [Rows(p, 0, index, elements_each, 0) for index, p in enumerate(plain)], plain[0]
    )


def local_of(torch: Any, tensor: Any) -> Any:
    """Return the local part of a tensor; None where it cannot be read as a plain one."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.detach() if is_readable(torch, local) else None


def is_plain(torch: Any, parameter: Any) -> bool:
    """Return whether a parameter is an ordinary local tensor: neither a shard nor shared with another process."""
    return is_readable(torch, parameter) and not (parameter.is_cpu and parameter.is_shared())


def is_readable(torch: Any, tensor: Any) -> bool:
    return (
        type(tensor) in (torch.nn.Parameter, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        and tensor.device.type in ("cpu", "cuda")
        and tensor.numel() > 0
    )


def fits(torch: Any, gradient: Any, parameter: Any) -> bool:
    """Return whether the gradient has the type and the device of its parameter."""
    return (
        type(gradient) in (torch.Tensor, torch.nn.Parameter)
        and gradient.layout == torch.strided
        and gradient.dtype == parameter.dtype
        and gradient.device == parameter.device
    )


class _Batch:
    """Parameters updated by one rule with states of the same dtypes; their sampled elements are concatenated."""

    def __init__(self, rule: Rule, count: int | None) -> None:
        self.rule, self.count = rule, count
        """Number of this update, from 1; None where it is on the GPU."""
        self.parts: list[Rows] = []
        self.tensors: dict[str, Any] = {}


class SampledStep:
    """One sampled step of an optimizer. Its verdicts are known once the device has passed it."""

    def __init__(
        self,
        torch: Any,
        optimizer: Any,
        number: int,
        rates: Rates,
        threads: set[int],
        has_closure: bool,
    ) -> None:
        """Copy the old values. `number` counts the optimizer's steps; `threads` is the live set of stepping threads."""
        self._torch, self.name = torch, type(optimizer).__name__
        self.number, self._rates, self._threads = number, rates, threads
        self.has_closure, self.is_extra = has_closure, False
        """`is_extra`: the step is sampled only because a loss was not finite, to search the weights for NaN."""
        self.extra_lines: list[Line] = []
        """Further verdicts on this step."""
        self._later: list[tuple[Callable[[dict[Any, Any]], list[Line]], dict[Any, Any]]] = []
        self.has_failed = False
        """Whether a verdict so far is a contradiction."""
        self._why = ""
        """Reason why the update cannot be judged; empty if it can."""
        self._batches: list[_Batch] = []
        self._left_out = 0
        self._host_copies: HostCopies | None = None
        self._lines: list[Line] | None = None
        groups = optimizer.param_groups
        self.rates = [
            rate if type(rate := group.get("lr")) in (int, float) else None for group in groups
        ]
        """Learning rate of each group; None for a tensor, which may be on a GPU."""
        self.is_settled = rates.add(max(filter(None, self.rates), default=0.0))
        # A closure, a hook of the script or a fused scaler sets gradients during the step: copy them at its end.
        self.is_late = (
            has_closure
            or bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))
            or getattr(optimizer, "grad_scale", None) is not None
        )
        self._is_hooked = bool(getattr(optimizer, "_optimizer_step_post_hooks", None))
        """Whether hooks of the script run between the step and the copy of its results."""
        self.runs_script = has_closure or self._is_hooked
        self._rules: list[Any] = [rule_of(torch, optimizer, group) for group in groups]
        if any(isinstance(rule, str) for rule in self._rules):
            self._why = next(rule for rule in self._rules if isinstance(rule, str))
            return
        self._choose(optimizer)
        self._copy(optimizer, "old ")
        if not self.is_late:
            self._copy_gradients()

    def _choose(self, optimizer: Any) -> None:
        """Choose the parameters and their rows."""
        groups = [group["params"] for group in optimizer.param_groups]
        max_elements = max(_MIN_ELEMENTS, _ELEMENTS // max(1, sum(map(len, groups))))
        places: dict[int, int] = {}
        for group in groups:
            for parameter in group:
                if is_plain(self._torch, parameter):
                    places[parameter.data_ptr()] = places.get(parameter.data_ptr(), 0) + 1
        batches: dict[Any, _Batch] = {}
        for group_index, (group, rule) in enumerate(zip(groups, self._rules, strict=True)):
            for place, parameter in enumerate(group):
                # Parameters that share memory are updated twice.
                if not is_plain(self._torch, parameter) or places[parameter.data_ptr()] > 1:
                    self._left_out += 1
                    continue
                state = _state_of(optimizer, parameter)
                count, key = 0, [group_index, parameter.device, parameter.dtype]
                if "step" in state:
                    step = state["step"]
                    on_gpu = isinstance(step, self._torch.Tensor) and not step.is_cpu
                    count = None if on_gpu else int(step)  # type: ignore[assignment]
                key += [count, *((name, state[name].dtype) for name in _names(state))]
                if any(
                    type(state[name]) is not self._torch.Tensor
                    or state[name].shape != parameter.shape
                    for name in _names(state)
                ):
                    self._left_out += 1
                    continue
                batch = batches.setdefault(
                    tuple(key), _Batch(rule, None if count is None else count + 1)
                )
                batch.parts.append(Rows(parameter, group_index, place, max_elements, self.number))
        self._batches = list(batches.values())

    def _copy(self, optimizer: Any, prefix: str) -> None:
        """Copy the sampled weights and states."""
        for batch in self._batches:
            parameters = [(part, part.of()) for part in batch.parts]
            states = [_state_of(optimizer, parameter) for _, parameter in parameters]
            names = {name for state in states for name in _names(state)}
            batch.tensors[prefix + "weight"] = self._concatenate(parameters)
            for name in names:
                batch.tensors[prefix + name] = self._concatenate(
                    [
                        (part, state.get(name))
                        for (part, _), state in zip(parameters, states, strict=True)
                    ]
                )
            if prefix == "new " and batch.count is None:
                steps = [state["step"].reshape(1) for state in states if "step" in state]
                batch.tensors["count"] = self._torch.cat(steps)

    def _concatenate(self, tensors: list[tuple[Rows, Any]]) -> Any:
        """Return a concatenated copy of each tensor's rows; zeros for a missing tensor."""
        first = next(tensor for _, tensor in tensors if tensor is not None)
        pieces = [
            first.new_zeros(part.count) if tensor is None else part.of_tensor(tensor)
            for part, tensor in tensors
        ]
        return pieces[0].clone() if len(pieces) == 1 else self._torch.cat(pieces)

    def _copy_gradients(self) -> None:
        for batch in list(self._batches):
            gradients = []
            for part in batch.parts:
                parameter: Any = part.of()
                gradient = parameter.grad
                if gradient is not None and not fits(self._torch, gradient, parameter):
                    self._left_out += 1
                    gradient = None
                part.has_gradient = gradient is not None
                gradients.append((part, gradient))
            if any(part.has_gradient for part in batch.parts):
                batch.tensors["gradient"] = self._concatenate(gradients)
            else:
                self._batches.remove(batch)

    def end(self, optimizer: Any) -> None:
        """Copy the new values after the step."""
        if not self._why:
            self._end(optimizer)
        tables = [table for _, table in self._later]
        self._host_copies = HostCopies(
            self._torch, [*tables, *(batch.tensors for batch in self._batches)]
        )

    def _end(self, optimizer: Any) -> None:
        rules = [rule_of(self._torch, optimizer, group) for group in optimizer.param_groups]
        if rules != self._rules or any(
            part.of() is None for batch in self._batches for part in batch.parts
        ):
            self._why = "the optimizer's groups changed during the step"
            self._batches = []
            return
        if self.is_late:
            self._copy_gradients()
        self._copy(optimizer, "new ")

    def judge_later(
        self, judge: Callable[[dict[Any, Any]], list[Line]], tensors: dict[Any, Any]
    ) -> None:
        """Call `judge` with these tensors once they are on the host, unless several threads step optimizers."""
        self._later.append((judge, tensors))

    # Once the device has passed the step.

    def has_passed(self) -> bool:
        """Return whether the verdicts are known."""
        return self._host_copies is not None and self._host_copies.are_complete()

    def lines(self) -> list[Line]:
        """Return the verdicts; call only after `has_passed`."""
        if self._lines is None:
            self._lines = []
            with self._torch.no_grad():
                if not self.is_extra:
                    self._lines += [*self._judge_update(), *self.extra_lines]
                for judge, tensors in self._later if len(self._threads) == 1 else ():
                    self.has_failed = any(level == FAIL for _, level, _, _ in self._lines)
                    self._lines += judge(tensors)
            self._batches, self._later, self._host_copies = [], [], None
        return self._lines

    def _judge_update(self) -> list[Line]:
        if len(self._threads) > 1:
            self._why = "several threads step optimizers"
        if self._why:
            return [("update", UNKNOWN, self._why, {})]
        results = _Results()
        for batch in self._batches:
            self._compare(batch, results)
        about: dict[str, Any] = {
            "parameters": results.parameters,
            "numbers": results.numbers,
            "left_out": self._left_out,
        }
        if not results.numbers:
            return [("update", UNKNOWN, "no element of the update could be checked", about)]
        about["largest"] = results.largest
        if not results.wrong:
            text = (
                f"{results.numbers} elements of {results.parameters} parameters match the textbook update of "
                f"{self.name}"
            )
            if self._left_out:
                text += f"; {self._left_out} other parameters could not be compared"
            return [("update", PASS, text, about), *self._vanishing(results), *self._large(results)]
        if self.has_closure:
            text = "the closure may have changed weights during the step"
            return [("update", UNKNOWN, text, about)]
        about["wrong"] = len(results.wrong)
        modules = Modules(self._torch)
        pairs = [(parameter, label) for parameter, label, _ in results.wrong]
        text = f"{named(modules, pairs[:1])}: {results.wrong[0][2]}"
        if self._is_hooked:
            why = "a hook of the script writes the weights at the end of the step"
            return [
                ("update", UNKNOWN, why, about),
                ("outside_writes", SUSPICION, f"{why}; {text}", about),
            ]
        if len(pairs) > 1:
            text += f"; also {named(modules, pairs[1:])}"
        return [("update", FAIL, text, about)]

    def _compare(self, batch: _Batch, results: _Results) -> None:
        torch, count = self._torch, batch.count
        if count is None:
            counts = batch.tensors["count"].tolist()
            if min(counts) != max(counts):
                return
            count = int(counts[0])
        pick = _mask_of_gradients(torch, batch)
        elements = {name: tensor[pick] for name, tensor in batch.tensors.items() if name != "count"}
        old, new, gradient = elements["old weight"], elements["new weight"], elements["gradient"]
        judged = judge(
            torch,
            batch.rule,
            count,
            {name[4:]: tensor for name, tensor in elements.items() if name.startswith("old ")},
            {name[4:]: tensor for name, tensor in elements.items() if name.startswith("new ")},
            gradient,
        )
        known = torch.isfinite(judged.off)
        off = torch.where(known, judged.off, 0.0)
        results.numbers += int(known.sum())
        results.largest = max(results.largest, float(off.max()))
        if old.dtype in (torch.bfloat16, torch.float16):
            moves = known & (gradient != 0) & (judged.step != 0)
            results.moving += int(moves.sum())
            results.still += int((moves & (old == new)).sum())
        begin = 0
        for part in batch.parts:
            if not part.has_gradient:
                continue
            results.parameters += 1
            span = slice(begin, begin + part.count)
            begin = span.stop
            parameter: Any = part.of()
            if parameter is not None and parameter.dim() > 1:
                share = self._rates.share(part.label, old[span], judged.step[span])
                if share is not None:
                    results.shares.append(share)
            worst = int(off[span].argmax())
            if off[span][worst] > 1:
                numbers = (old, new, judged.expected, gradient)
                before, after, expected, slope = (float(t[span][worst]) for t in numbers)
                wrong = int((off[span] > 1).sum())
                text = (
                    f"{self.name} changed {before:.9g} to {after:.9g} with the gradient {slope:.4g}, where its "
                    f"textbook update gives {expected:.9g}; {wrong} of {part.count} elements differ"
                )
                results.wrong.append((part.of(), part.label, text))

    def _vanishing(self, results: _Results) -> list[Line]:
        """Judge whether most 16-bit weights with a gradient stay unchanged because the update is below their precision.
        Not judged during a warm-up or once the learning rate has fallen by half, where that is normal."""
        rate = max(rule.rate for rule in self._rules)
        if not results.moving or not self.is_settled:
            return []
        share = results.still / results.moving
        about = {"numbers": results.moving, "still": results.still, "lr": rate}
        text = (
            f"{results.still} of {results.moving} 16-bit weights with a gradient did not change at a learning rate of "
            f"{rate:.3g}"
        )
        if share <= _MAX_UNCHANGED:
            return [("vanishing_updates", FACT if results.still else PASS, text, about)]
        # Gradients shrink as a training converges, and the updates of SGD with them; those of Adam do not.
        level = SUSPICION if self._rules[0].kind == "sgd" else FAIL
        return [
            (
                "vanishing_updates",
                level,
                f"{text}: the update is below half a unit in their last place",
                about,
            )
        ]

    def _large(self, results: _Results) -> list[Line]:
        """Report a step that is large relative to the first size of the matrices. That alone is no mistake: a small
        problem may be learnt so. The rule `update_too_large` checks whether the loss falls."""
        share = statistics.median(results.shares) if results.shares else 0.0
        if share < _LARGE_STEP:
            return []
        rate = max(rule.rate for rule in self._rules)
        text = (
            f"a step at a learning rate of {rate:.3g} changes half of the matrices by "
            f"{100 * share:.0f} % of their size"
        )
        return [("update_size", FACT, text, {"share": share, "lr": rate})]


class _Results:
    """Results of all batches of a step."""

    def __init__(self) -> None:
        self.parameters = self.numbers = 0
        self.largest = 0.0
        self.wrong: list[tuple[Any, str, str]] = []
        """Parameters that differ from the textbook update, their labels and messages."""
        self.moving = self.still = 0
        """Number of 16-bit weights with a gradient and an update, and of those that did not change."""
        self.shares: list[float] = []
        """Size of the step of each matrix relative to the matrix."""


def _size(values: Any) -> float:
    return float(values.double().square().mean().sqrt())


def _mask_of_gradients(torch: Any, batch: _Batch) -> Any:
    """Return an index of the elements whose parameters had a gradient."""
    if all(part.has_gradient for part in batch.parts):
        return slice(None)
    return torch.cat(
        [torch.full((part.count,), part.has_gradient, device="cpu") for part in batch.parts]
    )


_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def _state_of(optimizer: Any, parameter: Any) -> Any:
    """Return a parameter's state without creating one."""
    return optimizer.state.get(parameter, {})


def _names(state: Any) -> list[str]:
    return [name for name in _STATES if state.get(name) is not None]
