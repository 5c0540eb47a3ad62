"""One NVML query with its retry policy.

"Not supported", an invalid argument, a missing function and a missing permission are properties of the device, driver
or user and are queried once. Anything else (unknown error, GPU lost, timeout) is retried after 1, 2, 4, ... 64 ticks;
a tick is one sample of the monitor, so nothing here sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from engine.machine.reading import Reading, absent, measured

# Return codes of nvml.h: part of its ABI, so they are the same in every binding.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND = 2, 3, 4, 13
GPU_IS_LOST, _VERSION_MISMATCH, _DEPRECATED = 15, 25, 26
_FORM_MISSING = (_FUNCTION_NOT_FOUND, _VERSION_MISMATCH, _DEPRECATED)
LONGEST_WAIT_TICKS = 64
"""Maximum number of ticks between two tries of a query that fails."""
_PERMANENT = (_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, *_FORM_MISSING)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one query: an NVML value, or the reason why there is none."""

    value: Any
    source: str
    missing: str | None

    def reading(self, convert: Callable[[Any], float | int | str]) -> Reading:
        """Convert one number of the result to a Reading."""
        if self.missing is not None:
            return absent(self.missing, self.source)
        return measured(convert(self.value), self.source)


@dataclass(slots=True)
class Query:
    """One NVML query that remembers its failures.

    `forms` are function names with their arguments, newest first; a form that can never work is dropped.
    """

    module: ModuleType
    forms: list[tuple[str, tuple[Any, ...]]]
    lost_handle: str | None = None
    _last: Answer | None = None
    _permanent: bool = False
    _failures: int = 0
    _wait_ticks: int = 0
    not_supported: bool = field(default=False, init=False)
    """The device reported that it does not support this query."""
    gpu_lost: bool = False
    """The last result was that the GPU is lost: it is off the bus until a reboot."""

    def ask(self) -> Answer:
        if self.lost_handle is not None:
            return Answer(None, self.forms[0][0], self.lost_handle)
        if self._last is not None and self._permanent:
            return self._last
        if self._last is not None and self._wait_ticks > 0:
            self._wait_ticks -= 1
            return self._last
        self._last = self._ask_now()
        return self._last

    def _ask_now(self) -> Answer:
        best: tuple[int, Answer] | None = None
        while True:
            name, arguments = self.forms[0]
            function = getattr(self.module, name, None)
            code: int = _FUNCTION_NOT_FOUND
            words = "the installed nvidia-ml-py has no such function"
            if function is not None:
                try:
                    value = function(*arguments)
                except self.module.NVMLError as error:
                    code, words = error.value, str(error)
                else:
                    self._failures, self.gpu_lost = 0, False
                    return Answer(value, name, None)
            if code not in _PERMANENT:
                self.gpu_lost = code == GPU_IS_LOST
                self._wait_ticks = min(2**self._failures, LONGEST_WAIT_TICKS)
                self._failures += 1
                return Answer(None, name, f"NVML: {words}")
            # The device's own error is more informative than a missing older name.
            if best is None or best[0] in _FORM_MISSING:
                best = code, Answer(None, name, f"NVML: {words}")
            if len(self.forms) == 1:
                self._permanent, self.not_supported = True, best[0] == _NOT_SUPPORTED
                return best[1]
            del self.forms[0]
