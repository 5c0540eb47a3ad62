"""Check whether evaluations read training samples, by a hash of some elements of each row of a batch.

A pass over a data loader is an evaluation if no backward pass follows its batches, and for one of its batches gradients
are disabled or the model is in eval mode. Left out are passes before the training, passes over the training loader
itself in training mode (as in `update_bn`), and those that end after the first batch of the training data. With random
augmentation, a sample counts as a different one each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .data import Pass, items_of
from .parameters import FACT, PASS, SUSPICION, Line

_MAX_ROWS = 1 << 15
"""Maximum number of row hashes kept for the training, and for each evaluation: some megabytes."""
_ELEMENTS = 64
"""Maximum number of elements of a row that are hashed."""
_MIN_BYTES = 16
"""Minimum size of a hashed row in bytes; smaller rows may be equal by chance."""
_MIN_SHARED, _MIN_SHARE = 8, 0.05
"""Minimum number and minimum share of an evaluation's samples that must be training samples to be reported."""
_MAX_SECONDS = 1.0
"""Time limit for hashing all rows of a process, in seconds."""


class HeldOut:
    """Hashes of training rows and of evaluated rows, from all data loaders of the process."""

    def __init__(self, torch: Any, is_evaluating: Callable[[bool], bool]) -> None:
        self._torch, self._is_evaluating = torch, is_evaluating
        self._left_s = _MAX_SECONDS
        self.batches = self._hashed = 0
        """`batches`: number of training batches; `_hashed`: number of those whose rows were hashed."""
        self._trained: set[int] = set()
        self._training: Pass | None = None
        """Most recent pass that was trained on."""
        self._latest: Pass | None = None
        self._evaluations: list[Pass] = []
        """Evaluations since the last backward pass."""

    def forget(self) -> list[Line]:
        """Forget the training rows and return the last verdict: another training may begin, as in cross validation."""
        self._leave()
        lines = self.judge()
        self._trained, self._training = set(), None
        self.batches = self._hashed = 0
        return lines

    def fetched(self, loader_pass: Pass, batch: Any) -> None:
        """Record a yielded batch."""
        if self._latest is not loader_pass:
            self._leave()
            self._latest = loader_pass
        self._check_evaluation()
        self.batches += loader_pass.feeds
        begin_s = time.monotonic()
        rows = self._trained if loader_pass.feeds else loader_pass.rows
        if len(rows) < _MAX_ROWS and self._left_s > 0:
            rows.update(_hashes(self._torch, batch))
            self._left_s -= time.monotonic() - begin_s
            self._hashed += loader_pass.feeds

    def trained_on(self) -> list[Line]:
        """Record that a backward pass begins; return the verdict on the evaluations before it."""
        loader_pass = self._latest
        if loader_pass is not None:
            self._training = loader_pass
            if loader_pass.rows:
                self._trained |= loader_pass.rows
                loader_pass.rows = set()
        return self.judge() if self._evaluations else []

    def asked_for(self, iterator: Any) -> None:
        """Record that a batch is requested: the previous batch has been processed."""
        if self._latest is not None and self._latest.of() is iterator:
            self._check_evaluation()

    def no_batch(self, iterator: Any) -> None:
        if self._latest is not None and self._latest.of() is iterator:
            self._leave()

    def _check_evaluation(self) -> None:
        loader_pass = self._latest
        if loader_pass is not None and not loader_pass.feeds and not loader_pass.is_evaluated:
            # `update_bn` goes over the training loader without gradients, in training mode.
            loader_pass.is_evaluated = self._is_evaluating(self._is_training_loader(loader_pass))

    def _leave(self) -> None:
        loader_pass, self._latest = self._latest, None
        if (
            loader_pass is None
            or loader_pass.feeds
            or not loader_pass.is_evaluated
            or not loader_pass.rows
        ):
            return
        is_short = loader_pass.batches == 1 and not loader_pass.has_ended
        if self._training is not None and not (
            is_short and loader_pass.data == self._training.data
        ):
            self._evaluations.append(loader_pass)

    def _is_training_loader(self, loader_pass: Pass) -> bool:
        return self._training is not None and loader_pass.sampler_id == self._training.sampler_id

    def judge(self) -> list[Line]:
        """Return the verdict on the evaluations that have ended since the last call."""
        counts = [
            (len(loader_pass.rows & self._trained), len(loader_pass.rows))
            for loader_pass in self._evaluations
        ]
        are_parents = [
            self._training is not None and loader_pass.data_id == self._training.parent_id
            for loader_pass in self._evaluations
        ]
        self._evaluations = []
        if not counts or not self._trained:
            return []
        hashed = self._hashed / self.batches if self.batches else 1.0
        is_shared = [
            shared >= max(_MIN_SHARED, _MIN_SHARE * hashed * rows) for shared, rows in counts
        ]
        shared, rows = max(counts, key=lambda pair: pair[0] / pair[1])
        numbers = {"shared": shared, "of": rows}
        if not any(is_shared):
            if max(shared for shared, _ in counts):
                return []
            text = f"none of {sum(rows for _, rows in counts)} samples that evaluations read had been trained on"
            return [("held_out", PASS, text, numbers)]
        text = f"{shared} of {rows} samples that an evaluation read had been trained on"
        if hashed < 1:
            text = f"at least {text}"
        if not all(is_shared):
            # Many scripts evaluate on training data too, on purpose.
            return [("held_out", FACT, f"{text}, and those of another evaluation had not", numbers)]
        if all(are_parents):
            # A script may score all samples to choose those that it trains on.
            text += ": it read the data set of which a subset is trained on"
            return [("held_out", FACT, text, numbers)]
        return [("held_out", SUSPICION, text, numbers)]


def _hashes(torch: Any, batch: Any) -> list[int]:
    """Return hashes of the rows of a batch on the host, without rows whose elements are all equal."""
    tables = [
        tensor
        for tensor in items_of(torch, batch)
        if type(tensor) is torch.Tensor and tensor.dim() > 1
    ]
    rows = max(tables, key=lambda tensor: tensor.numel(), default=None)
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
