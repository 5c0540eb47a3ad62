"""Change settings of an unmodified script for an experiment, as requested by `engine watch --set`.

    loader.*                       the arguments of each DataLoader that is created
    attention.*                    which kernels torch's scaled_dot_product_attention may use
    matmul.*, cudnn.*, torch.*     switches of torch

Each change is logged as a decision, with the previous value. Changes stay if the probe removes itself, so that a run of
an experiment has the same settings from beginning to end.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "APR_WATCH_SET"
"""Environment variable: `NAME=VALUE` of each setting, separated by `;`. `engine watch` has validated them."""
SEED_BY = "APR_WATCH_SEED_BY"
"""Environment variable: integer that is added to each seed that the script sets."""
LOADER = {
    "loader.workers": "num_workers",
    "loader.pin_memory": "pin_memory",
    "loader.persistent_workers": "persistent_workers",
}
"""Argument of DataLoader for each setting."""
_NEEDS_WORKERS = {
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
    "timeout": 0,
}
"""Arguments that DataLoader rejects without workers, with the values to use then."""
ATTENTION = ("flash", "mem_efficient", "cudnn", "math")
_KERNELS = {"efficient": "mem_efficient"}
LogEvent = Callable[[str, dict[str, Any]], object]
"""Writer of a log line: kind and fields."""


def requested() -> dict[str, str]:
    """Return the requested settings, by name."""
    pairs = (part.partition("=") for part in os.environ.get(VARIABLE, "").split(";") if part)
    return {name: value for name, _, value in pairs}


def change_seeds(torch: Any, by: int) -> None:
    """Add `by` to torch's initial seed, and to each seed that the script sets for torch, random and numpy. The pairs of
    an experiment get different seeds, both runs of a pair the same."""
    torch.manual_seed(torch.initial_seed() + by)
    numpy = sys.modules.get("numpy.random")
    for owner, name in (
        (torch, "manual_seed"),
        (torch.random, "manual_seed"),
        (random, "seed"),
        (numpy, "seed"),
        (numpy, "default_rng"),
    ):
        if hasattr(owner, name):
            setattr(owner, name, _shifted(getattr(owner, name), by))


def _shifted(original: Any, by: int) -> Any:
    @functools.wraps(original)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int):
            args = (args[0] + by, *args[1:])
        elif isinstance(kwargs.get("seed"), int):
            kwargs["seed"] += by
        return original(*args, **kwargs)

    return seeded


def apply(torch: Any, log_event: LogEvent) -> None:
    """Apply the requested settings to this process. Passes on torch's exceptions."""
    if by := int(os.environ.get(SEED_BY) or 0):
        change_seeds(torch, by)
    changes = Changes(log_event)
    requested_values = requested()
    of_loader = {
        LOADER[name]: _value(text) for name, text in requested_values.items() if name in LOADER
    }
    loaders = sys.modules.get("torch.utils.data.dataloader")
    if of_loader and loaders is not None:
        _change_loaders(loaders.DataLoader, of_loader, changes)
    for name, (description, read, change) in _SWITCHES.items():
        if name in requested_values:
            previous = read(torch)
            change(torch, requested_values[name])
            changes.made(name, requested_values[name], description, previous, read(torch))


class Changes:
    """Log of the changes. Repeated changes are logged once."""

    def __init__(self, log_event: LogEvent) -> None:
        self._log_event = log_event
        self._logged: set[tuple[str, str]] = set()

    def made(self, knob: str, choice: str, description: str, previous: Any, current: Any) -> None:
        if previous == current:
            text = (
                f"{knob}={choice} changes nothing: {description} is {current} in the script already"
            )
            self.once("note", text, {"level": "warning", "text": text})
            return
        text = f"--set changed {description} from {previous} to {current}"
        fields = {"knob": knob, "choice": choice, "reason": text, "overridden": True}
        self.once("decision", text, fields)

    def once(self, kind: str, text: str, fields: dict[str, Any]) -> None:
        if (kind, text) not in self._logged:
            self._logged.add((kind, text))
            self._log_event(kind, fields)


def _value(text: str) -> Any:
    return {"on": True, "off": False}.get(text, int(text) if text.isdecimal() else text)


def _change_loaders(loader: Any, requested_values: dict[str, Any], changes: Changes) -> None:
    original = loader.__init__
    signature = inspect.signature(original)
    names = {argument: name for name, argument in LOADER.items()}
    streams = sys.modules["torch.utils.data"].IterableDataset

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            original(self, *args, **kwargs)  # wrong arguments raise as without the probe
            return
        bound.apply_defaults()
        arguments = bound.arguments
        for argument, value in requested_values.items():
            previous = arguments.get(argument)
            if (
                argument == "num_workers"
                and value > 1
                and isinstance(arguments["dataset"], streams)
            ):
                text = "loader.workers was not applied to a stream: each worker might read the whole stream"
                changes.once("note", text, {"level": "warning", "text": text})
                continue
            arguments[argument] = value
            changes.made(
                names[argument], _text(value), f"{argument} of DataLoader", previous, value
            )
        if not arguments["num_workers"]:
            arguments.update(
                {name: default for name, default in _NEEDS_WORKERS.items() if name in arguments}
            )
        original(*bound.args, **bound.kwargs)

    loader.__init__ = __init__


def _text(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _kernels(torch: Any) -> list[str]:
    return [name for name in ATTENTION if hasattr(torch.backends.cuda, f"enable_{name}_sdp")]


def _enabled_kernels(torch: Any) -> str:
    cuda = torch.backends.cuda
    return "+".join(name for name in _kernels(torch) if getattr(cuda, f"{name}_sdp_enabled")())


def _enable_kernel(torch: Any, kernel: str) -> None:
    """Enable one kernel, and `math` as the fallback."""
    for name in _kernels(torch):
        is_enabled = name in (_KERNELS.get(kernel, kernel), "math")
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_enabled)


def _set_deterministic(torch: Any, value: str) -> None:
    # cuBLAS reads this when it creates its first handle. Without it some matmuls are not deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(value == "on", warn_only=True)


_SWITCHES: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any, str], None]]] = {
    "attention.backend": (
        "the kernels of scaled_dot_product_attention",
        _enabled_kernels,
        _enable_kernel,
    ),
    "matmul.precision": (
        "torch's float32 matmul precision",
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, value: torch.set_float32_matmul_precision(value),
    ),
    "cudnn.benchmark": (
        "torch.backends.cudnn.benchmark",
        lambda torch: torch.backends.cudnn.benchmark,
        lambda torch, value: setattr(torch.backends.cudnn, "benchmark", value == "on"),
    ),
    "torch.deterministic": (
        "torch's deterministic algorithms",
        lambda torch: torch.are_deterministic_algorithms_enabled(),
        _set_deterministic,
    ),
}
"""Description, getter and setter of each switch of torch."""
