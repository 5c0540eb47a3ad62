"""Compare the update that an optimizer made with the textbook's (`engine/audit/reference.py`).

The reference is loaded from its file under a private name, so that `engine` is not imported into the script. It imports
only torch and the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any, NamedTuple

_REFERENCE = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "audit", "reference.py"
)
_NAME = f"{__package__}._reference"
_WEIGHT, _STATE, _STEP = 2.0, 4.0, 16.0
"""Rounding tolerance of a weight, of a state and of the step, in units of the last place: generous, since torch's
implementations (loop, foreach, fused) round at different points."""
_IN_FLOAT = 1e-3
"""Relative error of the step where a GPU computes `1 - beta^t` in fp32: 1 - 0.999 has four digits left."""
_FP16_ROOT = 1e-3
"""Root of the second moment below which an fp16 update is not compared: Adam's eps of 1e-8 matters there, and is 0 in
fp16."""


def load_reference() -> Any:
    """Return the module of the reference. Raises OSError, ImportError."""
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(_NAME, _REFERENCE)
        if spec is None or spec.loader is None:
            raise ImportError(_REFERENCE)
        module = importlib.util.module_from_spec(spec)
        # Register it before executing it: dataclasses look up their module.
        sys.modules[_NAME] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[_NAME]
            raise
    return sys.modules[_NAME]


class Rule(NamedTuple):
    """Update rule of a parameter group."""

    kind: str
    """`adam` or `sgd`."""
    decoupled: bool
    """Whether weight decay shrinks the weight, as in AdamW, instead of adding to the gradient."""
    rate: float
    decay: float
    settings: tuple[float, ...]
    """Adam: beta1, beta2, eps; SGD: momentum, dampening, nesterov."""
    in_float: bool
    """Whether the bias corrections may be computed in fp32."""


def rule_of(torch: Any, optimizer: Any, group: Any) -> Rule | str:
    """Return the rule of a group, or the reason why there is none."""
    optim, kind = torch.optim, type(optimizer)
    if kind not in (optim.AdamW, optim.Adam, optim.SGD):
        return f"{kind.__name__} has no textbook update to compare with"
    for name in ("amsgrad", "maximize", "differentiable"):
        if group.get(name):
            return f"{kind.__name__} with {name} has no textbook update to compare with"
    is_sgd = kind is optim.SGD
    names = ("momentum", "dampening", "nesterov") if is_sgd else ("eps",)
    settings = [group[name] for name in names]
    if not is_sgd:
        settings = [*group["betas"], *settings]
    numbers = [group["lr"], group["weight_decay"], *settings]
    if not all(isinstance(number, (int, float)) for number in numbers):
        # A tensor may be on a GPU, and be read and written there.
        return "a setting of the optimizer is a tensor"
    return Rule(
        kind="sgd" if is_sgd else "adam",
        decoupled=not is_sgd and bool(group.get("decoupled_weight_decay", kind is optim.AdamW)),
        rate=float(group["lr"]),
        decay=float(group["weight_decay"]),
        settings=tuple(map(float, settings)),
        in_float=bool(group.get("capturable") or group.get("fused")),
    )


class Judged(NamedTuple):
    """Comparison of the elements of some parameters, each (N,) in float64 on the host."""

    expected: Any
    """New weights by the textbook."""
    off: Any
    """Difference of the new weights and states from the textbook's, in rounding tolerances: equal up to 1."""
    step: Any
    """Change of the weights by the textbook."""


def judge(
    torch: Any, rule: Rule, count: int, old: dict[str, Any], new: dict[str, Any], gradient: Any
) -> Judged:
    """Judge the `count`-th update of elements, (N,) on the host in the optimizer's dtypes. `old` and `new` have
    `weight` and, where the optimizer has them, `exp_avg`, `exp_avg_sq` or `momentum_buffer`."""
    book = load_reference()
    weight, new_weight, g = old["weight"].double(), new["weight"].double(), gradient.double()
    # Magnitude of the terms of the gradient, which bounds its rounding.
    size = g.abs()
    if rule.decay and not rule.decoupled:
        g = g + rule.decay * weight
        size = size + (rule.decay * weight).abs()
    if rule.kind == "adam":
        names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        beta1, beta2, eps = rule.settings
        adam = book.AdamW(beta1=beta1, beta2=beta2, eps=eps)
        mean, square = (_or_zero(old.get(name), g) for name in names)
        expected = book.moments(adam, g, mean, square)
        scales = [mean.abs() + size, square + size * size]
        states = [new[name].double() for name in names]
        decay = rule.decay if rule.decoupled else 0.0
        step = book.step_of_adamw(adam, weight, *states, rate=rule.rate, decay=decay, count=count)
        if torch.float16 in (new["exp_avg_sq"].dtype, new["weight"].dtype):
            step = torch.where(states[1].sqrt() < _FP16_ROOT, torch.nan, step)
    else:
        momentum, dampening, nesterov = rule.settings
        names = ("momentum_buffer",) if momentum else ()
        sgd = book.SGD(momentum=momentum, dampening=dampening, nesterov=bool(nesterov))
        buffers = [old.get(name) for name in names]
        expected = [book.buffer_of_sgd(sgd, g, state) for state in buffers]
        scales = [size + _or_zero(state, g).abs() for state in buffers]
        states = [new[name].double() for name in names]
        step = book.step_of_sgd(sgd, g, *(states or [None]), rate=rule.rate)
    offs = [
        (state - wanted).abs() / _rounding(torch, new[name], _STATE, scale)
        for name, state, wanted, scale in zip(names, states, expected, scales, strict=True)
    ]
    bound = _rounding(torch, new["weight"], _WEIGHT, weight.abs() + new_weight.abs())
    bound = bound + _rounding(torch, new["weight"], _STEP, step.abs())
    if rule.kind == "sgd":
        # Gradient, decay and buffer may cancel in the step while their rounding errors do not.
        magnitude = sum((state.abs() for state in states), size)
        bound = bound + _rounding(torch, new["weight"], _STEP, rule.rate * magnitude)
    if rule.in_float:
        bound = bound + _IN_FLOAT * step.abs()
    offs.append((new_weight - weight - step).abs() / bound)
    return Judged(weight + step, torch.stack(offs).amax(0), step)


def _or_zero(state: Any, like: Any) -> Any:
    return like.new_zeros(like.shape) if state is None else state.double()


def _rounding(torch: Any, tensor: Any, places: float, scale: Any) -> Any:
    """Return the rounding tolerance for this dtype and magnitude; it covers flushing to zero."""
    about = torch.finfo(tensor.dtype)
    return places * (about.eps * scale + about.tiny)
