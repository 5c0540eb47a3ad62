"""Check whether evaluations read samples that were trained on, by a hash of some elements of each row of a batch.

A pass over a loader is an evaluation if no backward pass follows its batches, gradients are off or the model is in eval
mode at one of them, and it is more than a look at the first batch of data that is trained on. A sample with random
augmentation looks like a different sample each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .data import Pass, parts_of
from .parameters import FACT, PASS, SUSPICION, Line

_MAX_ROWS = 1 << 15
"""Maximum number of rows that are kept of the training, and of an evaluation: some megabytes."""
_ELEMENTS = 64
"""Maximum number of elements that are hashed of a row."""
_MIN_BYTES = 16
"""Minimum size of a hashed row in bytes; smaller rows may be equal by chance."""
_MIN_SHARED, _MIN_SHARE = 8, 0.05
"""Minimum number and share of an evaluation's samples that were trained on, to be reported."""
_MAX_SECONDS = 1.0
"""Time limit for hashing all rows of a process, in seconds."""


class HeldOut:
    """Rows of all data loaders of the process, split by whether a backward pass followed."""

    def __init__(self, torch: Any, is_evaluating: Callable[[], bool]) -> None:
        self._torch, self._is_evaluating = torch, is_evaluating
        self._left_s = _MAX_SECONDS
        self.batches = self._hashed = 0
        """Number of batches of the training, and of those whose rows were hashed."""
        self._trained: set[int] = set()
        self._trained_data: Any = None
        """Key of the data that was trained on last."""
        self._latest: Pass | None = None
        self._evaluations: list[Pass] = []
        """Passes without a backward pass since the last one."""

    def forget(self) -> list[Line]:
        """Forget the training rows: another training may begin, of another fold as in cross validation."""
        self._leave()
        lines = self.judge()
        self._trained = set()
        self.batches = self._hashed = 0
        return lines

    def fetched(self, one: Pass, batch: Any) -> None:
        """Record a yielded batch."""
        if self._latest is not one:
            self._leave()
            self._latest = one
        self._check_evaluation()
        self.batches += one.feeds
        begin_s = time.monotonic()
        rows = self._trained if one.feeds else one.rows
        if len(rows) < _MAX_ROWS and self._left_s > 0:
            rows.update(_hashes(self._torch, batch))
            self._left_s -= time.monotonic() - begin_s
            self._hashed += one.feeds

    def trained_on(self) -> list[Line]:
        """Record the begin of a backward pass; return the verdict on the evaluations before it."""
        one = self._latest
        if one is not None:
            self._trained_data = one.data
            if one.rows:
                self._trained |= one.rows
                one.rows = set()
        return self.judge() if self._evaluations else []

    def asked_for(self, iterator: Any) -> None:
        """Record a request for a batch: the batch before it was processed."""
        if self._latest is not None and self._latest.of() is iterator:
            self._check_evaluation()

    def no_batch(self, iterator: Any) -> None:
        if self._latest is not None and self._latest.of() is iterator:
            self._leave()

    def _check_evaluation(self) -> None:
        one = self._latest
        if one is not None and not one.feeds and not one.is_evaluated:
            one.is_evaluated = self._is_evaluating()

    def _leave(self) -> None:
        one, self._latest = self._latest, None
        if one is None or one.feeds or not one.is_evaluated or not one.rows:
            return
        if one.has_ended or one.batches > 1 or one.data != self._trained_data:
            self._evaluations.append(one)

    def judge(self) -> list[Line]:
        """Return the verdict on the complete evaluations since the last call."""
        found = [(len(one.rows & self._trained), len(one.rows)) for one in self._evaluations]
        self._evaluations = []
        if not found or not self._trained:
            return []
        hashed = self._hashed / self.batches if self.batches else 1.0
        is_shared = [both >= max(_MIN_SHARED, _MIN_SHARE * hashed * of) for both, of in found]
        both, of = max(found, key=lambda one: one[0] / one[1])
        numbers = {"shared": both, "of": of}
        if not any(is_shared):
            if max(both for both, _ in found):
                return []
            text = f"none of {sum(of for _, of in found)} samples that evaluations read had been trained on"
            return [("held_out", PASS, text, numbers)]
        text = f"{both} of {of} samples that an evaluation read had been trained on"
        if hashed < 1:
            text = f"at least {text}"
        if not all(is_shared):
            # Many scripts also evaluate on training data on purpose.
            return [("held_out", FACT, f"{text}, and those of another evaluation had not", numbers)]
        return [("held_out", SUSPICION, text, numbers)]


def _hashes(torch: Any, batch: Any) -> list[int]:
    """Return hashes of the rows of a batch on the host, without rows of one repeated number."""
    found = [one for one in parts_of(torch, batch) if type(one) is torch.Tensor and one.dim() > 1]
    rows = max(found, key=lambda one: one.numel(), default=None)
    if rows is None or not rows.is_cpu or rows.layout != torch.strided or not rows.numel():
        return []
    if rows.requires_grad or rows.is_quantized or rows.is_complex():
        return []
    if rows.dtype.is_floating_point and rows.dtype not in (torch.float32, torch.float64):
        # numpy lacks some dtypes of torch.
        rows = rows.view(torch.int16 if rows.element_size() == 2 else torch.uint8)
    array = rows.numpy().reshape(len(rows), -1)
    array = array[:, :: -(-array.shape[1] // _ELEMENTS)]
    size, count = array.itemsize, array.shape[1]
    if count * size < _MIN_BYTES:
        return []
    # One copy: a call to numpy takes as long as several rows.
    data, width = array.tobytes(), count * size
    texts = [data[at : at + width] for at in range(0, len(data), width)]
    return [hash(text) for text in texts if text != text[:size] * count]
