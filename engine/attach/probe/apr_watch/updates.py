"""Check that a step of an optimizer makes its textbook update of the weights.

Some rows of each weight, gradient and state are copied before and after the step. On a GPU they are copied on the
device, and to the host on another stream once the GPU has passed the step, so nothing waits.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from typing import Any

from .distillation import Divergence
from .losses import Loss, combined
from .parameters import FACT, FAIL, PASS, SUSPICION, UNKNOWN, Line, Modules, named
from .textbook import Rule, judge, rule_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .gradients import Chain
    from .movement import Moved, Movement
    from .outside import Between
    from .pitfalls import Classes, Pitfalls
    from .token_weights import Judged

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
_EXIT_WAIT_S = 2.0


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

    def share(self, label: str, old: Any, step: Any) -> float | None:
        """Return the size of a step relative to the first size of the matrix; None if that is zero."""
        begun = self._sizes.setdefault(label, _size(old))
        share = _size(step) / begun if begun else math.inf
        return share if math.isfinite(share) else None


class Rows:
    """A parameter and its sampled rows."""

    def __init__(self, parameter: Any, group: int, place: int, most: int, number: int) -> None:
        """Choose evenly spaced rows with at most `most` elements in all; they differ with each `number`."""
        self.of = weakref.ref(parameter)
        self.label = f"group {group}, parameter {place}"
        rows = parameter.shape[0] if parameter.dim() else 1
        stride = -(-rows // max(1, most * rows // parameter.numel()))
        self._rows = slice(number * _ROW_OFFSET % stride, None, stride)
        self._most = most
        self.has_gradient = False
        self.count = self.of_tensor(parameter).numel()

    def of_tensor(self, tensor: Any) -> Any:
        tensor = tensor.detach()
        if not tensor.dim():
            return tensor.reshape(1)
        # One row of a large matrix may exceed the limit.
        return tensor[self._rows].reshape(-1)[: self._most]


def is_plain(torch: Any, parameter: Any) -> bool:
    """Return whether a parameter is an ordinary local tensor: neither a shard nor shared with another process."""
    return (
        type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.layout == torch.strided
        and parameter.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        and parameter.device.type in ("cpu", "cuda")
        and parameter.numel() > 0
        and not (parameter.is_cpu and parameter.is_shared())
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


class Seen:
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
        self._torch, self._optimizer = torch, type(optimizer).__name__
        self._number, self._rates, self._threads = number, rates, threads
        self.has_closure, self.is_extra = has_closure, False
        """Extra: sampled only because a loss was not finite, to look for NaN in the weights."""
        self.extra_lines: list[Line] = []
        """Further verdicts on this step."""
        self.chain: Chain | None = None
        self.between: Between | None = None
        self._movement: tuple[Movement, Moved] | None = None
        self._classes: Classes | None = None
        self._token_weights: tuple[Judged, bool] | None = None
        self._losses: list[Loss | Divergence] = []
        self.tensors: dict[str, Any] = {}
        """Results on the device: `chain`, whether this step's gradients still contain those of the previous one;
        `loss i` and `cover i j`, the counts of each loss; `labels`; `token weights` of each backward pass; `between`,
        which weights changed between steps."""
        self._why = ""
        """Reason why the update cannot be judged; empty if it can."""
        self._batches: list[_Batch] = []
        self._left_out = 0
        self._events: list[Any] = []
        self._copied: list[Any] | None = None
        self._lines: list[Line] | None = None
        # A closure, a hook of the script or a fused scaler sets gradients during the step: copy them at its end.
        self.is_late = (
            has_closure
            or bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))
            or getattr(optimizer, "grad_scale", None) is not None
        )
        self._is_hooked = bool(getattr(optimizer, "_optimizer_step_post_hooks", None))
        """Whether hooks of the script run between the step and the copy of its results."""
        self._rules: list[Any] = [
            rule_of(torch, optimizer, group) for group in optimizer.param_groups
        ]
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
        most = max(_MIN_ELEMENTS, _ELEMENTS // max(1, sum(map(len, groups))))
        places: dict[int, int] = {}
        for group in groups:
            for parameter in group:
                if is_plain(self._torch, parameter):
                    places[parameter.data_ptr()] = places.get(parameter.data_ptr(), 0) + 1
        batches: dict[Any, _Batch] = {}
        for at, (group, rule) in enumerate(zip(groups, self._rules, strict=True)):
            for place, parameter in enumerate(group):
                # Parameters that share memory are updated twice.
                if not is_plain(self._torch, parameter) or places[parameter.data_ptr()] > 1:
                    self._left_out += 1
                    continue
                state = _state_of(optimizer, parameter)
                count, key = 0, [at, parameter.device, parameter.dtype]
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
                batch.parts.append(Rows(parameter, at, place, most, self._number))
        self._batches = list(batches.values())

    def _copy(self, optimizer: Any, when: str) -> None:
        """Copy the sampled weights and states."""
        for batch in self._batches:
            found = [(part, part.of()) for part in batch.parts]
            states = [_state_of(optimizer, parameter) for _, parameter in found]
            names = {name for state in states for name in _names(state)}
            batch.tensors[when + "weight"] = self._cat(found)
            for name in names:
                batch.tensors[when + name] = self._cat(
                    [
                        (part, state.get(name))
                        for (part, _), state in zip(found, states, strict=True)
                    ]
                )
            if when == "new " and batch.count is None:
                steps = [state["step"].reshape(1) for state in states if "step" in state]
                batch.tensors["count"] = self._torch.cat(steps)

    def _cat(self, found: list[tuple[Rows, Any]]) -> Any:
        """Return a concatenated copy of each tensor's rows; zeros for a missing tensor."""
        first = next(tensor for _, tensor in found if tensor is not None)
        pieces = [
            first.new_zeros(part.count) if tensor is None else part.of_tensor(tensor)
            for part, tensor in found
        ]
        return pieces[0].clone() if len(pieces) == 1 else self._torch.cat(pieces)

    def _copy_gradients(self) -> None:
        for batch in list(self._batches):
            found = []
            for part in batch.parts:
                parameter: Any = part.of()
                gradient = parameter.grad
                if gradient is not None and not fits(self._torch, gradient, parameter):
                    self._left_out += 1
                    gradient = None
                part.has_gradient = gradient is not None
                found.append((part, gradient))
            if any(part.has_gradient for part in batch.parts):
                batch.tensors["gradient"] = self._cat(found)
            else:
                self._batches.remove(batch)

    def end(self, optimizer: Any) -> None:
        """Copy the new values after the step."""
        if not self._why:
            self._end(optimizer)
        torch = self._torch
        for device in self._devices():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def _devices(self) -> set[Any]:
        """Return the GPUs that hold results."""
        held = [self.tensors, *(batch.tensors for batch in self._batches)]
        return {one.device for tensors in held for one in tensors.values() if not one.is_cpu}

    def _end(self, optimizer: Any) -> None:
        rules = [rule_of(self._torch, optimizer, group) for group in optimizer.param_groups]
        if rules != self._rules or any(
            part.of() is None for b in self._batches for part in b.parts
        ):
            self._why = "the optimizer's groups changed during the step"
            self._batches = []
            return
        if self.is_late:
            self._copy_gradients()
        self._copy(optimizer, "new ")

    # Once the device has passed the step.

    def has_passed(self) -> bool:
        """Return whether the verdicts are known. Never waits for the training's stream."""
        if not all(event.query() for event in self._events):
            return False
        if self._copied is None:
            self._copied = [self._copy_to_host(device) for device in self._devices()]
        return all(event.query() for event, _ in self._copied)

    def _copy_to_host(self, device: Any) -> tuple[Any, list[Any]]:
        torch = self._torch
        stream, event = torch.cuda.Stream(device), torch.cuda.Event()
        held = []
        with torch.no_grad(), torch.cuda.stream(stream):
            for tensors in (self.tensors, *(batch.tensors for batch in self._batches)):
                for name, tensor in tensors.items():
                    if tensor.device == device:
                        # Not pinned: the first pinned allocation synchronises.
                        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        tensors[name] = host.copy_(tensor, non_blocking=True)
                        held.append(tensor)
            event.record(stream)
        # Keep the source tensors alive until the copy is done: their memory belongs to the training's stream.
        return event, held

    def lines(self) -> list[Line]:
        """Return the verdicts; call only after `has_passed`."""
        if self._lines is None and self.is_extra:
            self._lines = self._judge_movement([])
        elif self._lines is None:
            with self._torch.no_grad():
                self._lines = [
                    *self._judge_update(),
                    *self._judge_gradients(),
                    *self._judge_losses(),
                    *self._judge_labels(),
                    *self._judge_token_weights(),
                    *self.extra_lines,
                ]
                changed = self.tensors.get("between")
                if self.between is not None and changed is not None and len(self._threads) == 1:
                    self._lines += self.between.lines(self._optimizer, self._number, changed)
                self._lines += self._judge_movement(self._lines)
            self._batches, self._events, self._copied, self._losses = [], [], None, []
        return self._lines

    def add_losses(self, losses: list[Loss | Divergence]) -> None:
        self._losses = losses
        for at, loss in enumerate(losses):
            if loss.counts is not None:
                self.tensors[f"loss {at}"] = loss.counts
                loss.counts = None
            for of, cover in enumerate(loss.covers if isinstance(loss, Loss) else ()):
                if cover is not None:
                    self.tensors[f"cover {at} {of}"] = cover.numbers
                    cover.numbers = None

    def add_pitfalls(self, pitfalls: list[Pitfalls], classes: Classes) -> None:
        self._classes = classes
        found: dict[tuple[str, str], Line] = {}
        for one in pitfalls:
            for line in one.lines:
                found.setdefault(line[:2], line)
        self.extra_lines += found.values()
        labels = [one.labels for one in pitfalls if one.labels is not None]
        if labels:
            self.tensors["labels"] = labels[0]

    def add_token_weights(self, found: tuple[Any, bool] | None, judged: Judged) -> None:
        if found is not None:
            self.tensors["token weights"], is_own = found
            self._token_weights = judged, is_own

    def add_movement(self, movement: Movement, optimizer: Any, is_asked: bool) -> None:
        is_hooked = self.has_closure or self._is_hooked
        moved = movement.step_ends(optimizer, self._number, self.tensors, is_hooked, is_asked)
        if moved is not None:
            self._movement = movement, moved

    def _judge_movement(self, lines: list[Line]) -> list[Line]:
        if self._movement is None or len(self._threads) > 1:
            return []
        movement, moved = self._movement
        # Another verdict says why weights stay.
        movement.is_settled |= any(level == FAIL for _, level, _, _ in lines)
        return movement.lines(self._optimizer, moved, self.tensors)

    def _judge_labels(self) -> list[Line]:
        labels = self.tensors.get("labels")
        if labels is None or self._classes is None or len(self._threads) > 1:
            return []
        return self._classes.add(*labels.tolist())

    def _judge_token_weights(self) -> list[Line]:
        if self._token_weights is None or len(self._threads) > 1:
            return []
        judged, is_own = self._token_weights
        passes = self.tensors["token weights"].tolist()
        return judged.lines(self._optimizer, self._number, passes, is_own)

    def _judge_losses(self) -> list[Line]:
        if not self._losses or len(self._threads) > 1:
            return []
        weights = [loss.weight for loss in self._losses if isinstance(loss, Loss)]
        found = []
        for at, loss in enumerate(self._losses):
            counts = self.tensors.get(f"loss {at}")
            numbers = [] if counts is None else counts.tolist()
            if isinstance(loss, Loss):
                covers = [self.tensors.get(f"cover {at} {of}") for of in range(len(loss.covers))]
                texts = [None if one is None else one.tolist() for one in covers]
                found.append(loss.lines(numbers, texts))
            elif numbers:
                found.append(loss.lines(numbers, weights, self._number))
        return combined(found)

    def _judge_gradients(self) -> list[Line]:
        if self.chain is None or len(self._threads) > 1:
            return []
        holds = bool(self.tensors.get("chain", False))
        return self.chain.lines(self._optimizer, self._number, holds)

    def wait(self, deadline: float) -> bool:
        """Wait for the GPU until `deadline`; return whether the verdicts are known. Called at exit only."""
        while not self.has_passed():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _judge_update(self) -> list[Line]:
        if len(self._threads) > 1:
            self._why = "several threads step optimizers"
        if self._why:
            return [("update", UNKNOWN, self._why, {})]
        found = _Found()
        for batch in self._batches:
            self._compare(batch, found)
        about: dict[str, Any] = {
            "parameters": found.parameters,
            "numbers": found.numbers,
            "left_out": self._left_out,
        }
        if not found.numbers:
            return [("update", UNKNOWN, "no element of the update could be checked", about)]
        about["largest"] = found.largest
        if not found.wrong:
            text = (
                f"{found.numbers} elements of {found.parameters} parameters match the textbook update of "
                f"{self._optimizer}"
            )
            if self._left_out:
                text += f"; {self._left_out} other parameters could not be compared"
            return [("update", PASS, text, about), *self._vanishing(found), *self._large(found)]
        if self.has_closure:
            text = "the closure may have changed weights during the step"
            return [("update", UNKNOWN, text, about)]
        about["wrong"] = len(found.wrong)
        parameters = [parameter for parameter, _, _ in found.wrong]
        labels = {id(parameter): label for parameter, label, _ in found.wrong}
        modules = Modules(self._torch, parameters)
        text = f"{named(modules, parameters[:1], labels)}: {found.wrong[0][2]}"
        if self._is_hooked:
            why = "a hook of the script writes the weights at the end of the step"
            return [
                ("update", UNKNOWN, why, about),
                ("outside_writes", SUSPICION, f"{why}; {text}", about),
            ]
        if len(parameters) > 1:
            text += f"; also {named(modules, parameters[1:], labels)}"
        return [("update", FAIL, text, about)]

    def _compare(self, batch: _Batch, into: _Found) -> None:
        torch, count = self._torch, batch.count
        if count is None:
            counts = batch.tensors["count"].tolist()
            if min(counts) != max(counts):
                return
            count = int(counts[0])
        pick = _of_parts(torch, batch)
        found = {name: tensor[pick] for name, tensor in batch.tensors.items() if name != "count"}
        old, new, gradient = found["old weight"], found["new weight"], found["gradient"]
        one = judge(
            torch,
            batch.rule,
            count,
            {name[4:]: tensor for name, tensor in found.items() if name.startswith("old ")},
            {name[4:]: tensor for name, tensor in found.items() if name.startswith("new ")},
            gradient,
        )
        known = torch.isfinite(one.off)
        off = torch.where(known, one.off, 0.0)
        into.numbers += int(known.sum())
        into.largest = max(into.largest, float(off.max()))
        if old.dtype in (torch.bfloat16, torch.float16):
            moves = known & (gradient != 0) & (one.step != 0)
            into.moving += int(moves.sum())
            into.still += int((moves & (old == new)).sum())
        begin = 0
        for part in batch.parts:
            if not part.has_gradient:
                continue
            into.parameters += 1
            here = slice(begin, begin + part.count)
            begin = here.stop
            parameter: Any = part.of()
            if parameter is not None and parameter.dim() > 1:
                share = self._rates.share(part.label, old[here], one.step[here])
                if share is not None:
                    into.shares.append(share)
            worst = int(off[here].argmax())
            if off[here][worst] > 1:
                numbers = (old, new, one.expected, gradient)
                before, after, expected, slope = (float(t[here][worst]) for t in numbers)
                wrong = int((off[here] > 1).sum())
                text = (
                    f"{self._optimizer} changed {before:.9g} to {after:.9g} with the gradient {slope:.4g}, where its "
                    f"textbook update gives {expected:.9g}; {wrong} of {part.count} elements differ"
                )
                into.wrong.append((part.of(), part.label, text))

    def _vanishing(self, found: _Found) -> list[Line]:
        """Judge whether most 16-bit weights with a gradient stay unchanged because the update is below their precision.
        Not judged during a warm-up or once the learning rate has fallen by half, where that is normal."""
        rate = max(rule.rate for rule in self._rules)
        is_at_work = self._rates.add(rate)
        if not found.moving or not is_at_work:
            return []
        share = found.still / found.moving
        about = {"numbers": found.moving, "still": found.still, "lr": rate}
        text = (
            f"{found.still} of {found.moving} 16-bit weights with a gradient did not change at a learning rate of "
            f"{rate:.3g}"
        )
        if share <= _MAX_UNCHANGED:
            return [("vanishing_updates", FACT if found.still else PASS, text, about)]
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

    def _large(self, found: _Found) -> list[Line]:
        """Report a step that is large relative to the first size of the matrices. That alone is no mistake: a small
        problem may be learnt so. The rule `update_too_large` checks whether the loss falls."""
        share = statistics.median(found.shares) if found.shares else 0.0
        if share < _LARGE_STEP:
            return []
        rate = max(rule.rate for rule in self._rules)
        text = (
            f"a step at a learning rate of {rate:.3g} changes half of the matrices by "
            f"{100 * share:.0f} % of their size"
        )
        return [("update_size", FACT, text, {"share": share, "lr": rate})]


class _Found:
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


def wait_for(seen: list[Any]) -> None:
    """Wait for sampled steps at the end of the process, up to _EXIT_WAIT_S in all."""
    deadline = time.monotonic() + _EXIT_WAIT_S
    for one in seen:
        one.wait(deadline)


def _of_parts(torch: Any, batch: _Batch) -> Any:
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
