"""Find the lines of the script that create and call its optimizer and model, and the names of these objects.

`engine.flips.fixes` uses them to propose a change of one line that fixes a mistake. They are read once, at the first
step of a training.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from .parameters import held_by

_OPTIMIZERS = 8
"""Maximum number of optimizers whose creation line is kept."""
_CO_OPTIMIZED = 1
"""Flag of a code object with fast locals: `f_locals` of its frames is a copy."""
_ELSEWHERE = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class Places:
    """Call sites as `FILE:LINE`, and names, of one process."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        try:
            self._folder = os.path.realpath(os.getcwd()) + os.sep
        except OSError:
            self._folder = ""
        self._backward = ""
        self.model: Callable[[], Any] = lambda: None
        """Weak reference to the model that was last found next to an optimizer."""
        self._creations: weakref.WeakKeyDictionary[Any, tuple[str, str]] = (
            weakref.WeakKeyDictionary()
        )
        """Line that created each optimizer, and the model's variable name at that line."""

    def backward_begins(self) -> None:
        self._backward, _ = self._site()

    def optimizer_created(self, optimizer: Any) -> None:
        if len(self._creations) < _OPTIMIZERS:
            site, frame = self._site()
            model = self._names(frame, optimizer).get("model", "") if frame is not None else ""
            self._creations[optimizer] = site, model

    def of_step(self, optimizer: Any) -> dict[str, dict[str, str]]:
        """Return the log fields `places` and `names` of the training whose optimizer has just stepped."""
        step, frame = self._site()
        creation, model = self._creations.get(optimizer, ("", ""))
        places = {"backward": self._backward, "step": step, "optimizer": creation}
        names = self._names(frame, optimizer) if frame is not None else {}
        names["optimizer_model"] = model
        return {
            "places": {key: value for key, value in places.items() if value},
            "names": {key: value for key, value in names.items() if value},
        }

    def _site(self) -> tuple[str, FrameType | None]:
        """Return the innermost line on the stack that is in a file of the script."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self.is_of_script(frame.f_code):
                return self.line_of(frame.f_code, frame.f_lineno), frame
            frame = frame.f_back
        return "", None

    def line_of(self, code: CodeType, number: int) -> str:
        """Return `FILE:LINE` of a line of the script's own code."""
        return f"{os.path.realpath(code.co_filename)[len(self._folder) :]}:{number}"

    def is_of_script(self, code: CodeType) -> bool:
        """Return whether code is in a file below the folder where the script was started."""
        file = os.path.realpath(code.co_filename) if self._folder else ""
        return (
            bool(file)
            and file.startswith(self._folder)
            and not any(part in file for part in _ELSEWHERE)
        )

    def _names(self, frame: FrameType, optimizer: Any) -> dict[str, str]:
        """Return the script's variable names of its model, of a model that is not trained, and of its schedule."""
        trained_ids = set(map(id, held_by(optimizer)))
        groups = optimizer.param_groups
        module_type = self._torch.nn.Module
        schedules = sys.modules.get("torch.optim.lr_scheduler")
        schedule_type = getattr(schedules, "LRScheduler", Places)
        largest = 0
        names: dict[str, str] = {}
        others: dict[int, str] = {}
        for name, value in visible(frame):
            kind = type(value)
            if issubclass(kind, module_type):
                parameters = {id(attribute) for attribute in value.parameters()}
                if parameters and trained_ids.isdisjoint(parameters):
                    others.setdefault(id(value), name)
                elif len(parameters) > largest:
                    largest, names["model"] = len(parameters), name
                    self.model = weakref.ref(value)
            elif issubclass(kind, schedule_type):
                stepped = getattr(vars(value).get("optimizer"), "param_groups", None)
                if stepped is groups:
                    names.setdefault("schedule", name)
        if len(others) == 1:
            (names["teacher"],) = others.values()
        return names


def visible(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield names and values that are visible in a frame: its variables, its module's, and attributes of `self`."""
    variables, outer = frame.f_locals, frame.f_globals
    local_variables = list(variables.items())
    if frame.f_code.co_flags & _CO_OPTIMIZED and isinstance(variables, dict):
        # Before Python 3.13 the frame keeps this copy, so that it would keep the tensors of a step alive.
        variables.clear()
    yield from local_variables
    for name, value in local_variables:
        if name == "self" and hasattr(value, "__dict__"):
            yield from [(f"self.{key}", attribute) for key, attribute in vars(value).items()]
    if variables is not outer:
        yield from list(outer.items())
