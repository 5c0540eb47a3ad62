"""Read the compilations of `torch.compile` from torch's own list (`torch._dynamo.utils`).

The compiler is never imported here: if it is not imported, the script compiles nothing. torch keeps a list of the last
64 compilations, which is read at the end of each step.
"""

from __future__ import annotations

import sys
from typing import Any

WARM_UP_STEPS = 5
"""Number of first steps in which compilation is expected: step 1 compiles, later ones recompile for dynamic shapes."""


class Compiles:
    """Compilations of this process."""

    def __init__(self) -> None:
        self._newest: Any = None
        self._names: dict[str, str] = {}

    def since_last(self, step: int) -> list[dict[str, Any]]:
        """Return the fields of a `compile` line for each compilation since the last call, at the end of step `step`."""
        utils = sys.modules.get("torch._dynamo.utils")
        compiled: list[Any] = getattr(utils, "get_compilation_metrics", list)()
        if not compiled or compiled[-1] is self._newest:
            return []
        places = [at for at, metrics in enumerate(compiled) if metrics is self._newest]
        new = compiled[places[-1] + 1 :] if places else compiled
        self._newest = compiled[-1]
        return [self._line(metrics, step) for metrics in new]

    def _line(self, metrics: Any, step: int) -> dict[str, Any]:
        def metric(name: str) -> Any:
            return getattr(metrics, name, None)

        number = str(metric("compile_id"))
        name = metric("co_name")
        if name is not None:
            place = f"{metric('co_filename')}:{metric('co_firstlineno')}"
            self._names[number] = f"{name} ({place})"
        # A frame's backward pass is compiled later; its record has the frame's number, but not the name.
        kernel = self._names.get(number, "a frame")
        if metric("is_forward") is False:
            kernel += ", backward"
        if metric("is_runtime"):
            kernel += ", at run time"
        seconds = metric("entire_frame_compile_time_s")
        if seconds is None and metric("duration_us") is not None:
            seconds = metric("duration_us") / 1e6
        guard = metric("recompile_reason")
        return {
            "compiler": "torch.compile",
            "kernel": kernel,
            "key": f"{kernel} [{number}]",
            "digest": number,
            "compile_s": seconds,
            "disk_hit": None,
            "after_warm_up": step > WARM_UP_STEPS,
            "differs": [f"the guard {guard}"] if guard else [],
        }
