"""Identities that hold in every healthy training, looked at on a few steps: the first three of an optimizer, then
those whose number is a power of two. What each is called, and what to do: `engine/attach/identities.py`.

    update    the new weights are the optimizer's textbook update of the old, from gradient, state, rate and decay

On such a step some rows of each weight, gradient and state are copied in front of the optimizer's step and behind it.
On a GPU they are copied there, and to the host on another stream once the GPU has passed the step: nothing is waited
for. Every other step costs a comparison.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from threading import get_ident
from typing import Any

from .folders import rank_and_world
from .textbook import Rule, judge, rule_of
from .values import is_capturing

PASS, UNKNOWN, FACT, SUSPICION, CONTRADICTION = (
    "pass",
    "unknown",
    "fact",
    "suspicion",
    "contradiction",
)
_NUMBERS = 1 << 18
"""Of the weights of an optimizer that are copied: 20 ms of float64 on one core."""
_OPTIMIZERS = 64
"""So many of a process are looked at."""
_NAMED = 3
"""So many parameters of a finding are named."""
_EXIT_WAIT_S = 2.0

Line = tuple[str, str, str, dict[str, Any]]
"""The id of an identity, its degree, what was seen, and the numbers behind it."""


class Identities:
    """Told of each optimizer step of the process, by the thread that does it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._watched: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._threads: set[int] = set()
        """Those that step optimizers: of several, one may move weights while another's step is looked at."""
        self.seen: list[Seen] = []
        """The steps that were looked at and not taken yet."""

    def step_begins(self, optimizer: Any, arguments: tuple[Any, ...]) -> None:
        """`arguments` of its `step`, a closure among them."""
        watched = self._watched.get(optimizer)
        if watched is None:
            if len(self._watched) >= _OPTIMIZERS:
                return
            watched = self._watched[optimizer] = _Watched()
        watched.steps += 1
        self._threads.add(get_ident())
        watched.seen = None
        if not _is_sampled(watched.steps) or rank_and_world(self._torch)[0]:
            return
        if is_capturing(self._torch):
            return
        with self._torch.no_grad():
            has_closure = any(callable(one) for one in arguments)
            watched.seen = Seen(self._torch, optimizer, watched, self._threads, has_closure)

    def step_ends(self, optimizer: Any) -> None:
        watched = self._watched.get(optimizer)
        if watched is None or watched.seen is None:
            return
        seen, watched.seen = watched.seen, None
        with self._torch.no_grad():
            seen.end(optimizer)
        self.seen.append(seen)

    def take(self) -> list[Seen]:
        """The steps that were looked at since the last call, in order of their ends."""
        seen, self.seen = self.seen, []
        return seen


def _is_sampled(step: int) -> bool:
    return step <= 3 or not step & (step - 1)


class _Watched:
    """What is known of an optimizer."""

    def __init__(self) -> None:
        self.steps = 0
        self.seen: Seen | None = None
        """The step in progress, where it is looked at."""


class _Part:
    """A parameter, and which of its rows are looked at."""

    def __init__(self, parameter: Any, group: int, place: int, stride: int, number: int) -> None:
        self.of = weakref.ref(parameter)
        self.label = f"group {group}, parameter {place}"
        rows = parameter.shape[0] if parameter.dim() else 1
        stride = min(stride, rows)
        # Other rows each time.
        self._rows = slice(number % stride, None, stride)
        self.has_gradient = False
        self.count = self.rows_of(parameter).numel()

    def rows_of(self, tensor: Any) -> Any:
        tensor = tensor.detach()
        return tensor[self._rows].reshape(-1) if tensor.dim() else tensor.reshape(1)


class _Batch:
    """Parameters that are updated by one rule, with states of the same types: their numbers lie behind each other."""

    def __init__(self, rule: Rule, count: int | None) -> None:
        self.rule, self.count = rule, count
        """The number of this update; None where it is on the GPU."""
        self.parts: list[_Part] = []
        self.tensors: dict[str, Any] = {}


class Seen:
    """One step of an optimizer. Its lines are known once the device has passed it."""

    def __init__(
        self,
        torch: Any,
        optimizer: Any,
        watched: _Watched,
        threads: set[int],
        has_closure: bool,
    ) -> None:
        self._torch, self._optimizer = torch, type(optimizer).__name__
        self._watched, self._threads = watched, threads
        self._has_closure = has_closure
        self._why = ""
        """Why nothing is known."""
        self._batches: list[_Batch] = []
        self._left_out = 0
        self._events: list[Any] = []
        self._copied: list[Any] | None = None
        self._lines: list[Line] | None = None
        # Gradients that a closure, a hook of the script or a fused scaler sets are there at the end of the step.
        self._is_late = (
            has_closure
            or bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))
            or getattr(optimizer, "grad_scale", None) is not None
        )
        if getattr(optimizer, "_optimizer_step_post_hooks", None):
            self._why = "a hook of the script's runs at the end of the step"
            return
        self._rules: list[Any] = [
            rule_of(torch, optimizer, group) for group in optimizer.param_groups
        ]
        if any(isinstance(rule, str) for rule in self._rules):
            self._why = next(rule for rule in self._rules if isinstance(rule, str))
            return
        self._choose(optimizer)
        self._copy(optimizer, "old ")
        if not self._is_late:
            self._copy_gradients()

    def _choose(self, optimizer: Any) -> None:
        """Which rows of which parameters."""
        groups = [group["params"] for group in optimizer.param_groups]
        total = sum(parameter.numel() for group in groups for parameter in group)
        stride = max(1, -(-total // _NUMBERS))
        places: dict[int, int] = {}
        for group in groups:
            for parameter in group:
                if self._is_plain(parameter):
                    places[parameter.data_ptr()] = places.get(parameter.data_ptr(), 0) + 1
        batches: dict[Any, _Batch] = {}
        for at, (group, rule) in enumerate(zip(groups, self._rules, strict=True)):
            for place, parameter in enumerate(group):
                # Two parameters in the same memory are updated twice.
                if not self._is_plain(parameter) or places[parameter.data_ptr()] > 1:
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
                batch.parts.append(_Part(parameter, at, place, stride, self._watched.steps))
        self._batches = list(batches.values())

    def _is_plain(self, parameter: Any) -> bool:
        """Whether its numbers are its own, and here: not a shard, nor shared with another process."""
        torch = self._torch
        return (
            type(parameter) in (torch.nn.Parameter, torch.Tensor)
            and parameter.layout == torch.strided
            and parameter.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
            and parameter.device.type in ("cpu", "cuda")
            and parameter.numel() > 0
            and not (parameter.is_cpu and parameter.is_shared())
        )

    def _copy(self, optimizer: Any, when: str) -> None:
        """Weights and states."""
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

    def _cat(self, found: list[tuple[_Part, Any]]) -> Any:
        """The rows of each tensor behind each other, copied; zeros where there is none."""
        first = next(tensor for _, tensor in found if tensor is not None)
        pieces = [
            first.new_zeros(part.count) if tensor is None else part.rows_of(tensor)
            for part, tensor in found
        ]
        return pieces[0].clone() if len(pieces) == 1 else self._torch.cat(pieces)

    def _copy_gradients(self) -> None:
        for batch in list(self._batches):
            found = []
            for part in batch.parts:
                parameter: Any = part.of()
                gradient = parameter.grad
                if gradient is not None and not self._fits(gradient, parameter):
                    self._left_out += 1
                    gradient = None
                part.has_gradient = gradient is not None
                found.append((part, gradient))
            if any(part.has_gradient for part in batch.parts):
                batch.tensors["gradient"] = self._cat(found)
            else:
                self._batches.remove(batch)

    def _fits(self, gradient: Any, parameter: Any) -> bool:
        torch = self._torch
        return (
            type(gradient) in (torch.Tensor, torch.nn.Parameter)
            and gradient.layout == torch.strided
            and gradient.dtype == parameter.dtype
            and gradient.device == parameter.device
        )

    def end(self, optimizer: Any) -> None:
        """The step is done."""
        if self._why:
            return
        rules = [rule_of(self._torch, optimizer, group) for group in optimizer.param_groups]
        if rules != self._rules or any(
            part.of() is None for b in self._batches for part in b.parts
        ):
            self._why = "the optimizer's groups changed during the step"
            self._batches = []
            return
        if self._is_late:
            self._copy_gradients()
        self._copy(optimizer, "new ")
        torch = self._torch
        for device in {tensor.device for b in self._batches for tensor in b.tensors.values()}:
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)

    # Once the device has passed the step.

    def has_passed(self) -> bool:
        """Whether its lines are known. Never waits for the stream of the training."""
        if not all(event.query() for event in self._events):
            return False
        if self._copied is None:
            self._copied = []
            for device in {t.device for b in self._batches for t in b.tensors.values()}:
                if device.type == "cuda":
                    self._copied.append(self._copy_to_host(device))
        return all(event.query() for event, _ in self._copied)

    def _copy_to_host(self, device: Any) -> tuple[Any, list[Any]]:
        torch = self._torch
        stream, event = torch.cuda.Stream(device), torch.cuda.Event()
        held = []
        with torch.no_grad(), torch.cuda.stream(stream):
            for batch in self._batches:
                for name, tensor in batch.tensors.items():
                    if tensor.device == device:
                        # Not pinned: the first pinned allocation synchronises.
                        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        batch.tensors[name] = host.copy_(tensor, non_blocking=True)
                        held.append(tensor)
            event.record(stream)
        # The memory belongs to the stream of the training until it was copied.
        return event, held

    def lines(self) -> list[Line]:
        """What was seen, once `has_passed`."""
        if self._lines is None:
            with self._torch.no_grad():
                self._lines = [self._update()]
            self._batches, self._events, self._copied = [], [], None
        return self._lines

    def wait(self, deadline: float) -> bool:
        """At the end of the process: give a GPU that still works a moment; whether the lines are known."""
        while not self.has_passed():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _update(self) -> Line:
        if len(self._threads) > 1:
            self._why = "several threads step optimizers"
        if self._why:
            return "update", UNKNOWN, self._why, {}
        torch = self._torch
        judged = parameters = 0
        largest = 0.0
        wrong: list[tuple[Any, str, str]] = []
        for batch in self._batches:
            count = batch.count
            if count is None:
                counts = batch.tensors["count"].tolist()
                if min(counts) != max(counts):
                    continue
                count = int(counts[0])
            pick = _of_parts(torch, batch)
            found = {
                name: tensor[pick] for name, tensor in batch.tensors.items() if name != "count"
            }
            one = judge(
                torch,
                batch.rule,
                count,
                {name[4:]: tensor for name, tensor in found.items() if name.startswith("old ")},
                {name[4:]: tensor for name, tensor in found.items() if name.startswith("new ")},
                found["gradient"],
            )
            known = torch.isfinite(one.off)
            judged += int(known.sum())
            parts = [part for part in batch.parts if part.has_gradient]
            parameters += len(parts)
            off = torch.where(known, one.off, 0.0)
            largest = max(largest, float(off.max()))
            begin = 0
            for part in parts:
                here = slice(begin, begin + part.count)
                begin = here.stop
                worst = int(off[here].argmax())
                if off[here][worst] > 1:
                    numbers = [
                        found["old weight"],
                        found["new weight"],
                        one.expected,
                        found["gradient"],
                    ]
                    old, new, expected, gradient = (float(t[here][worst]) for t in numbers)
                    beyond = int((off[here] > 1).sum())
                    text = (
                        f"{self._optimizer} made {new:.9g} of {old:.9g} with the gradient {gradient:.4g}, where its "
                        f"textbook makes {expected:.9g}; so {beyond} of {part.count} numbers"
                    )
                    wrong.append((part.of(), part.label, text))
        about: dict[str, Any] = {
            "parameters": parameters,
            "numbers": judged,
            "left_out": self._left_out,
        }
        if not judged:
            return "update", UNKNOWN, "no number of the update could be looked at", about
        about["largest"] = largest
        if not wrong:
            text = f"{judged} numbers of {parameters} parameters are the textbook's update of {self._optimizer}"
            return "update", PASS, text, about
        if self._has_closure:
            text = "what the closure did between the two looks at the weights was not seen"
            return "update", UNKNOWN, text, about
        about["wrong"] = len(wrong)
        names = names_of(torch, [parameter for parameter, _, _ in wrong[:_NAMED]])
        parameter, label, text = wrong[0]
        text = f"{names.get(id(parameter), label)}: {text}"
        more = [names.get(id(one), label) for one, label, _ in wrong[1:_NAMED]]
        if more:
            text += f"; also {', '.join(more)}{', ...' * (len(wrong) > _NAMED)}"
        return "update", CONTRADICTION, text, about


def wait_for(seen: list[Seen]) -> None:
    """At the end of the process."""
    deadline = time.monotonic() + _EXIT_WAIT_S
    for one in seen:
        one.wait(deadline)


def _of_parts(torch: Any, batch: _Batch) -> Any:
    """Which numbers are of parameters that had a gradient."""
    if all(part.has_gradient for part in batch.parts):
        return slice(None)
    return torch.cat(
        [torch.full((part.count,), part.has_gradient, device="cpu") for part in batch.parts]
    )


_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def _state_of(optimizer: Any, parameter: Any) -> Any:
    """Its state; a look that makes none."""
    return optimizer.state.get(parameter, {})


def _names(state: Any) -> list[str]:
    return [name for name in _STATES if state.get(name) is not None]


def names_of(torch: Any, parameters: list[Any]) -> dict[int, str]:
    """The names of parameters, by id, in the outermost module that holds them. It looks through all objects of the
    process once, which takes as long as a collection of garbage: for a finding, and not in a healthy run."""
    wanted = {id(parameter) for parameter in parameters}
    module_type = torch.nn.Module
    holders: dict[int, tuple[Any, str]] = {}
    parents: dict[int, tuple[Any, str]] = {}
    for one in gc.get_objects():
        # Not isinstance, which asks proxies of the script's what they are.
        if not issubclass(type(one), module_type):
            continue
        inside = vars(one)
        for name, parameter in (inside.get("_parameters") or {}).items():
            if id(parameter) in wanted:
                holders.setdefault(id(parameter), (one, name))
        for name, child in (inside.get("_modules") or {}).items():
            parents.setdefault(id(child), (one, name))
    found = {}
    for at, (module, name) in holders.items():
        path, passed = [name], {id(module)}
        while id(module) in parents:
            module, name = parents[id(module)]
            if id(module) in passed:
                break
            passed.add(id(module))
            path.append(name)
        found[at] = ".".join(reversed(path))
    return found


def framework() -> str:
    """Whose loop the script runs in, as far as it has imported one."""
    for module, name in (
        ("transformers.trainer", "transformers"),
        ("lightning.pytorch", "lightning"),
        ("pytorch_lightning", "lightning"),
    ):
        if module in sys.modules:
            return name
    return ""
