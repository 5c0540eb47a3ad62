"""Defects of the loader and the sampler that begin late, between two audits, and of what makes rows of documents: the
rows of a step are other ones than spec and corpus prescribe, and every number that is logged of them is right.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from engine.data import batches, token_cache
from engine.data.batches import Batch, Batches
from engine.drills.planting import own_folder, replaced
from engine.formats.tokenizer import Tokenizer
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


@contextlib.contextmanager
def _in_places(
    spoil: Callable[[list[tuple[int, int]]], list[tuple[int, int]]],
) -> Iterator[None]:
    """Replace the order in which documents are put into rows."""

    def make(places: Callable[..., Iterator[tuple[int, int]]]) -> Callable[..., Any]:
        return lambda *given: iter(spoil(list(places(*given))))

    with own_folder("XDG_CACHE_HOME"), replaced(token_cache, "places", make):
        yield


def document_in_place_of_another() -> AbstractContextManager[None]:
    """Every second document stands there twice, and its neighbour is left out: the count is right."""
    return _in_places(lambda placed: [placed[2 * (i // 2)] for i in range(len(placed))])


@contextlib.contextmanager
def documents_cut() -> Iterator[None]:
    """As by the truncation that a tokenizer.json may hold."""

    def make(encode: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, texts: [ids[:256] for ids in encode(self, texts)]

    with own_folder("XDG_CACHE_HOME"), replaced(Tokenizer, "encode_documents", make):
        yield
