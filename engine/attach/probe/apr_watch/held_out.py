"""Whether evaluations read samples that were trained on: some numbers of each row of a batch, as they are handed out.

What is drawn anew each time that a sample is read (augmentation) looks like another sample.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any

from .parameters import FACT, PASS, SUSPICION, Line

_ROWS = 1 << 15
"""Of the training, and of an evaluation, so many are kept: some megabytes."""
_NUMBERS = 64
"""Of a row."""
_BYTES = 16
"""Rows of fewer may be equal by chance."""
_LEAST, _SHARE = 8, 0.05
"""Samples of an evaluation that were trained on, and their share, from which on that is no chance."""
_SECONDS = 1.0
"""For all rows of a process."""


class _Pass:
    """One pass over a loader."""

    def __init__(self, iterator: Any) -> None:
        self.of = weakref.ref(iterator)
        self.rows: set[int] = set()
        self.feeds = self.is_over = False


class HeldOut:
    """Told of what the loaders of the process hand out, and of backward passes."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._left_s = _SECONDS
        self._trained: set[int] = set()
        self._latest: _Pass | None = None
        self._evaluations: list[_Pass] = []
        """Since the training went on the last time."""

    def forget(self) -> list[Line]:
        """What follows may be another training: of another part, as in cross validation."""
        self._leave()
        lines = self.judge()
        self._trained = set()
        return lines

    def fetched(self, iterator: Any, batch: Any) -> None:
        """A batch was handed out."""
        first = getattr(iterator, "_num_yielded", None) == 1
        if self._latest is None or self._latest.of() is not iterator or first:
            self._leave()
            self._latest = _Pass(iterator)
        begin_s = time.monotonic()
        rows = self._latest.rows if not self._latest.feeds else self._trained
        if len(rows) < _ROWS and self._left_s > 0:
            rows.update(_prints(self._torch, batch))
            self._left_s -= time.monotonic() - begin_s

    def trained_on(self) -> list[Line]:
        """A backward pass begins."""
        one = self._latest
        if one is not None and not one.feeds:
            one.feeds = True
            self._trained |= one.rows
            one.rows = set()
        return self.judge() if self._evaluations else []

    def no_batch(self, iterator: Any) -> None:
        if self._latest is not None and self._latest.of() is iterator:
            self._leave()

    def _leave(self) -> None:
        one, self._latest = self._latest, None
        if one is not None and not one.feeds and one.rows:
            self._evaluations.append(one)

    def judge(self) -> list[Line]:
        """The training goes on, or has ended: the evaluations since then are whole."""
        found = [(len(one.rows & self._trained), len(one.rows)) for one in self._evaluations]
        self._evaluations = []
        if not found or not self._trained:
            return []
        is_shared = [both >= max(_LEAST, _SHARE * of) for both, of in found]
        both, of = max(found, key=lambda one: one[0] / one[1])
        numbers = {"shared": both, "of": of}
        if not any(is_shared):
            if max(both for both, _ in found):
                return []
            text = f"none of {sum(of for _, of in found)} samples that evaluations read had been trained on"
            return [("held_out", PASS, text, numbers)]
        text = f"{both} of {of} samples that an evaluation read had been trained on"
        if not all(is_shared):
            # How well the training data itself is learnt is often looked at beside.
            return [("held_out", FACT, f"{text}, and those of another one had not", numbers)]
        return [("held_out", SUSPICION, text, numbers)]


def _prints(torch: Any, batch: Any) -> list[int]:
    """What tells the rows of a batch on the host apart; none of rows that are one number again and again."""
    if isinstance(batch, torch.Tensor):
        parts = [batch]
    elif isinstance(batch, Mapping):
        parts = list(batch.values())
    else:
        parts = list(batch) if isinstance(batch, (list, tuple)) else []
    found = [
        one
        for one in parts
        if type(one) is torch.Tensor
        and one.is_cpu
        and one.layout == torch.strided
        and one.dim() > 1
        and one.numel()
        and not one.is_quantized
        and not one.is_complex()
    ]
    if not found:
        return []
    rows = max(found, key=lambda one: one.numel()).detach().flatten(1)
    rows = rows[:, :: -(-rows.shape[1] // _NUMBERS)].contiguous()
    if rows.shape[1] * rows.element_size() < _BYTES:
        return []
    varied = (rows != rows[:, :1]).any(1).tolist()
    texts = rows.view(torch.uint8).numpy()
    return [
        hash(text.tobytes()) for text, is_varied in zip(texts, varied, strict=True) if is_varied
    ]
