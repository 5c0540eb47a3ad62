"""Record rows and loop counters of each step of a script in a run of an experiment.

Both runs of a pair log them, and `engine.log.work` finds steps that one of the runs leaves out. Other runs do not log
them. Each row on the host is recorded by a digest: rows of the loader, rows that the model is trained on, and rows of
calls without gradients.
"""

from __future__ import annotations

import contextlib
import math
import opcode
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from .data import chunk_hashes, digests_of, indices_of, items_of
from .places import Places, visible
from .settings import SEED_BY

_COUNTERS, _FRAMES = 256, 64
_LARGEST = 1 << 53
"""Bound of a counter: larger integers are likely hashes."""
_ASKS = f"{__package__}.questions"
_LISTED = 4096
"""Maximum number of rows of a step that are logged."""
_PIECES = 1 << 18
"""Maximum number of different chunks that are counted."""
_LOGGED = 1e100
"""Bound of a number in a log."""
_RAISE = opcode.opmap["RAISE_VARARGS"]


class Batch(NamedTuple):
    """A batch of a loader; empty outside of experiments."""

    asked: tuple[int, ...] = ()
    """Indices that the sampler drew, if they are integers."""
    rows: tuple[str, ...] = ()
    """Digests of its rows."""


class Work:
    """Batches and counters of one process, until the next step."""

    def __init__(self, places: Places) -> None:
        self.is_on = SEED_BY in os.environ
        """Whether this is a run of an experiment."""
        self._places = places
        self._is_script: dict[CodeType, bool] = {}
        self._rows = 0
        """Number of rows on the host in training calls of the model since the last step."""
        self._latest: list[str] = []
        """Digests of the rows of the newest such call."""
        self._names: set[str] = set()
        """Names of the script's variables that held these rows."""
        self._called: list[str] = []
        self._evaluated: list[str] = []
        """Digests of the rows of calls since the last step: `_called` with gradients, `_evaluated` without. A call
        whose rows are not on the host adds an empty digest."""
        self._answers: list[float] = []
        """Mean magnitude of the model's output of each call without gradients since the last step; 0 if not finite."""
        self._pieces: set[int] = set()
        """Hashes of the chunks of all rows that the model was trained on."""
        self.judged: Counter[str] = Counter()
        """Number of verdicts on each identity so far."""

    def batch(self, index: Any, batch: Any = None) -> Batch:
        """Return the record of a batch. `index`: the indices that the sampler drew; `batch`: None if the loader
        raised."""
        rows = tuple(digests_of(sys.modules["torch"], batch))
        return Batch(tuple(indices_of(index) or ()), rows)

    def follow(self) -> None:
        """Record the rows of all further calls of the script's model."""
        model = self._places.model()
        if model is not None and model not in _FOLLOWED:
            _FOLLOWED[model] = self
            model.register_forward_pre_hook(_called, with_kwargs=True)
            model.register_forward_hook(_answered)

    def evaluated(self, rows: Any, frame: FrameType | None) -> None:
        # Leave out calls that the probe repeats (`questions.py`).
        if not any(frame_.f_globals.get("__name__") == _ASKS for frame_ in _below(frame)):
            self._evaluated += digests_of(sys.modules["torch"], rows) or [""]

    def answered(self, answer: Any, frame: FrameType | None) -> None:
        if not any(frame_.f_globals.get("__name__") == _ASKS for frame_ in _below(frame)):
            size = float(answer.detach().float().abs().mean())
            # JSON cannot represent NaN or infinity.
            self._answers.append(size if math.isfinite(size) else 0.0)

    def called(self, rows: Any, frame: FrameType | None) -> None:
        if self._call(rows):
            for frame_ in self._of_script(_below(frame)):
                self._names |= {name for name, value in visible(frame_) if value is rows}

    def _call(self, rows: Any) -> bool:
        digests = digests_of(sys.modules["torch"], rows)
        self._called += digests or [""]
        if len(self._pieces) < _PIECES:
            self._pieces.update(chunk_hashes(sys.modules["torch"], rows))
        if digests:
            self._latest = digests
            self._rows += int(rows.shape[0])
        return bool(digests)

    def rows(self) -> int | None:
        """Return the number of rows in training calls since the last step; None if no model is followed."""
        count, self._rows = self._rows, 0
        return count or None

    def done(self, batches: Iterable[Batch]) -> dict[str, Any]:
        """Return the fields of the `worked` line of the step that has just ended."""
        return self._fields(batches, self._of_script(_below(sys._getframe(1))))

    def failed(
        self, batches: Iterable[Batch], error: BaseException | None
    ) -> dict[str, Any] | None:
        """Return the fields of the `worked` line of the step in which the script failed; None outside an experiment."""
        if not self.is_on:
            return None
        frames: list[FrameType] = []
        lines: list[int] = []
        at, trace = -1, getattr(error, "__traceback__", None)
        while trace is not None and len(frames) < _FRAMES:
            frames.append(trace.tb_frame)
            lines.append(trace.tb_lineno)
            at, trace = trace.tb_lasti, trace.tb_next
        own = self._of_script(frames)
        # The script may hold rows with which it has not called the model yet.
        held = [one for frame in own for name, one in visible(frame) if name in self._names]
        for rows in held[: not self._called]:
            if digests_of(sys.modules["torch"], rows) != self._latest:
                self._call(rows)
        called = [
            f"{self._places.line_of(one.f_code, line)} {below.f_code.co_name}"
            for one, line, below in zip(frames, lines, frames[1:], strict=False)
            if one in own and below in own
        ]
        raises = bool(own) and own[-1] is frames[-1] and own[-1].f_code.co_code[at] == _RAISE
        # An exception raised while another one was handled is not a check by the script.
        raises = raises and getattr(error, "__context__", None) is None
        return {
            **self._fields(batches, own),
            "failed": True,
            "calls": called,
            "raised": raises or isinstance(error, (AssertionError, Warning)),
            "held": [*_numbers(one for frame in own for _, one in visible(frame))][:_COUNTERS],
        }

    def _of_script(self, frames: Iterable[FrameType]) -> list[FrameType]:
        own = []
        for frame in frames:
            code = frame.f_code
            if code not in self._is_script:
                self._is_script[code] = self._places.is_of_script(code)
            if self._is_script[code]:
                own.append(frame)
        return own

    def _fields(self, batches: Iterable[Batch], frames: list[FrameType]) -> dict[str, Any]:
        variables = [
            (f"{frame.f_code.co_name}.{name}", value)
            for frame in frames
            for name, value in visible(frame)
        ]
        counters: dict[str, int] = {}
        # Include attributes of objects down to two levels, such as `self.state.step`.
        for _ in range(3):
            for name, value in variables:
                if len(counters) < _COUNTERS and type(value) is int and abs(value) < _LARGEST:
                    counters[name] = value
            variables = [
                (f"{name}.{attribute}", inner)
                for name, value in variables
                for attribute, inner in _attributes_of(value)
            ]
        called, self._called = self._called, []
        evaluated, self._evaluated = self._evaluated, []
        answers, self._answers = self._answers, []
        known = [*batches]
        return {
            "counters": counters,
            "asked": [number for batch in known for number in batch.asked][:_LISTED],
            "rows": [row for batch in known for row in batch.rows][:_LISTED],
            "called": called[:_LISTED],
            "evaluated": evaluated[:_LISTED],
            "judged": dict(self.judged),
            "answers": answers[:_LISTED],
            "pieces": len(self._pieces),
        }


def _attributes_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the attributes of an object or the items of a dict; nothing for a Python module, a class, or an object
    with more than _FRAMES attributes."""
    attributes = value if type(value) is dict else getattr(value, "__dict__", None)
    if (
        type(attributes) is not dict
        or len(attributes) > _FRAMES
        or isinstance(value, ModuleType | type)
    ):
        return []
    return [*attributes.items()]


def _numbers(values: Iterable[Any]) -> Iterator[float]:
    """Yield the floats among some objects, and the values of tensors of one element."""
    torch = sys.modules["torch"]
    for value in values:
        if type(value) is float or (isinstance(value, torch.Tensor) and not value.dim()):
            # A device may have failed.
            with contextlib.suppress(Exception):
                if abs(number := float(value)) < _LOGGED:
                    yield number


def _below(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    for _ in range(_FRAMES):
        if frame is not None:
            yield frame
            frame = frame.f_back


_FOLLOWED: weakref.WeakKeyDictionary[Any, Work] = weakref.WeakKeyDictionary()


def _called(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record the first tensor argument of a call of a model. A copy of the model has this hook too, but is not in
    _FOLLOWED: its calls are left out."""
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling() or model not in _FOLLOWED:
        return
    rows = [tensor for tensor in (*args, *kwargs.values()) if type(tensor) is torch.Tensor]
    try:
        for tensor in rows[:1]:
            if not torch.is_grad_enabled():
                _FOLLOWED[model].evaluated(tensor, sys._getframe(1))
            elif not tensor.requires_grad:
                _FOLLOWED[model].called(tensor, sys._getframe(1))
    except Exception:  # noqa: BLE001  the script goes on without
        _FOLLOWED.pop(model, None)


def _answered(model: Any, _: Any, answer: Any) -> None:
    """Record the output of a model that is called without gradients."""
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or model not in _FOLLOWED:
        return
    try:
        known = [
            tensor
            for tensor in items_of(torch, answer)
            if tensor.is_cpu and tensor.is_floating_point()
        ]
        for tensor in known[:1]:
            _FOLLOWED[model].answered(tensor, sys._getframe(1))
    except Exception:  # noqa: BLE001  the script goes on without
        _FOLLOWED.pop(model, None)
