"""Defects of the loader and the sampler that begin late, between two audits: the rows of a step are other ones than the
spec prescribes, and every number that is logged of them is right.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from engine.data import batches
from engine.data.batches import Batch, Batches
from engine.drills.planting import replaced
from engine.train import run
from engine.train.data import Data
from engine.train.loop import TrainingLoop

LATE = 23
"""Steps before it."""


def _taken(
    spoil: Callable[[Batches, int, int, Callable[..., Batch]], Batch],
) -> AbstractContextManager[None]:
    """Replace what the loader hands out from LATE on; of one rank without accumulation."""

    def make(take: Callable[..., Batch]) -> Callable[..., Batch]:
        def spoilt(self: Batches, position: int, rows: int) -> Batch:
            if position < LATE * rows:
                return take(self, position, rows)
            return spoil(self, position, rows, take)

        return spoilt

    return replaced(Batches, "take", make)


def batch_met_again() -> AbstractContextManager[None]:
    """As from a buffer that was not filled again."""
    return _taken(lambda self, position, rows, take: take(self, position - 3 * rows, rows))


def row_left_out() -> AbstractContextManager[None]:
    return _taken(lambda self, position, rows, take: take(self, position + 1, rows))


def row_altered() -> AbstractContextManager[None]:
    def spoil(self: Batches, position: int, rows: int, take: Callable[..., Batch]) -> Batch:
        batch = take(self, position, rows)
        batch.tokens_BT[-1, -1] = batch.tokens_BT[-1, 0]
        return batch

    return _taken(spoil)


def labels_swapped() -> AbstractContextManager[None]:
    def spoil(self: Batches, position: int, rows: int, take: Callable[..., Batch]) -> Batch:
        batch = take(self, position, rows)
        batch.labels_BT[-1] = batch.labels_BT[-1][::-1].copy()
        return batch

    return _taken(spoil)


@contextlib.contextmanager
def heldout_row_trained() -> Iterator[None]:
    held: list[Batch] = []

    def see(train: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: TrainingLoop, *given: Any) -> Any:
            held.extend(self.data.heldout)
            return train(self, *given)

        return spoilt

    def spoil(self: Batches, position: int, rows: int, take: Callable[..., Batch]) -> Batch:
        batch = take(self, position, rows)
        for name in ("tokens_BT", "documents_BT", "labels_BT"):
            getattr(batch, name)[-1] = getattr(held[0], name)[0]
        return batch

    with replaced(TrainingLoop, "train", see), _taken(spoil):
        yield


def epochs_alike() -> AbstractContextManager[None]:
    """Each epoch has the order of the first one."""

    def make(order: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        return lambda rows, seed, epoch: order(rows, seed, 0)

    return replaced(batches, "epoch_order", make)


def training_rows_evaluated() -> AbstractContextManager[None]:
    """The held-out rows are taken from the training text."""

    def make(prepare: Callable[..., Data]) -> Callable[..., Data]:
        def spoilt(*given: Any) -> Data:
            data = prepare(*given)
            length = data.heldout[0].tokens_BT.shape[1]
            heldout = [batches.gather_rows(data.stream, length, b.row_ids) for b in data.heldout]
            return dataclasses.replace(data, heldout=heldout)

        return spoilt

    return replaced(run, "prepare_data", make)
