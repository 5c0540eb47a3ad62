"""Stored rows into host memory, some threads at once, ahead of who asks for them.

At 100k tokens a second, hidden states of 7 KB a token are 0.7 GB/s to read, compare and copy. So the
rows of a batch are read by threads of their own from the moment the batch is known, each row straight
into its place in one buffer, pinned where a GPU will take it: the copy to the device is then
asynchronous, and nobody copies on the host. The threads spend their time in `pread` and in SHA-256,
both outside of the interpreter's lock.

A buffer is used again once the device has finished copying it. There are as many as batches are under
way: with one batch ahead of the one that trains, two.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from engine.teachers.store.folder import ShardDamaged, Store
from engine.teachers.store.outputs import TORCH_DTYPES

# Shapes: N tokens, B rows

THREADS = 4


class Reading:
    """A batch of rows that is being read."""

    def __init__(
        self, buffer: Tensor, fields: tuple[Tensor, ...], rows: list[Future[None]]
    ) -> None:
        self.buffer = buffer
        self._fields = fields
        self._rows = rows

    def wait(self) -> tuple[Tensor, ...] | None:
        """One tensor of N tokens for each field, on the host; None where a row was not what had been
        written. Every row has ended then.
        """
        problems = [row.exception() for row in self._rows]
        for problem in problems:
            if problem is not None and not isinstance(problem, ShardDamaged | KeyError):
                raise problem
        return None if any(problems) else self._fields


class Reader:
    """Reads rows of `store`; buffers are pinned where `device` is a GPU."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._pool = ThreadPoolExecutor(
            min(THREADS, os.cpu_count() or 1), thread_name_prefix="teacher-outputs"
        )
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def begin(self, keys: Sequence[bytes]) -> Reading:
        """Starts to read one batch; a key that is not there is found by `Reading.wait`."""
        fields = self._store.identity.fields
        buffer = self._buffer(len(keys) * self._store.identity.row_bytes)
        raw, start = buffer.numpy().data, 0
        views: list[memoryview] = []
        tensors: list[Tensor] = []
        for field in fields:
            end = start + len(keys) * field.bytes
            views.append(raw[start:end])
            part = buffer[start:end].view(TORCH_DTYPES[field.dtype])
            tensors.append(part.view(len(keys) * field.shape[0], *field.shape[1:]))
            start = end
        rows = [
            self._pool.submit(
                self._store.read,
                key,
                [
                    view[row * field.bytes : (row + 1) * field.bytes]
                    for field, view in zip(fields, views, strict=True)
                ],
            )
            for row, key in enumerate(keys)
        ]
        return Reading(buffer, tuple(tensors), rows)

    def take_back(self, reading: Reading) -> None:
        """Says that a reading's tensors are no longer looked at by the host, and that the current
        stream was given the last copy of them. On a CPU they may still be in use: nothing is reused.
        """
        if self._device.type == "cuda":
            event = torch.cuda.current_stream(self._device).record_event()
            self._free.append((reading.buffer, event))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _buffer(self, size: int) -> Tensor:
        for index, (buffer, event) in enumerate(self._free):
            if buffer.numel() == size and (event is None or event.query()):  # type: ignore[no-untyped-call]
                del self._free[index]
                return buffer
        # What has another size is of an evaluation, or of the last batch of an epoch.
        self._free = [free for free in self._free if free[0].numel() == size]
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
