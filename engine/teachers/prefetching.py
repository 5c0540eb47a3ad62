"""Wraps a teacher so that it computes the next batch while the current step is still finishing.

A step ends with work that leaves the tensor cores idle: the gradient norm, the optimizer
(memory-bound), and the host's wait for the step's numbers, after which the device is idle until the
next batch is launched. The next batch's teacher hidden states depend on none of this. So they are
launched before it, on a stream of their own:

    main stream    backward | norm | AdamW |               student ...
    side stream             | teacher of the next batch ...

Ordering. The side stream waits for all work launched on the main stream before `prefetch`: the
copies of the tokens, and the last use of any memory shared with the teacher's temporaries (the
scratch buffer of block-quantised weights also serves the loss's head). Every call to this teacher
first makes the main stream wait for the side stream. Tensors used on both streams are marked with
`record_stream`, or the allocator would reuse their memory too early.

A result is matched to its batch by the identity of the tensors: `hidden` must get the same tensor
objects as `prefetch`, unmodified. Nothing is compared on the device and the host never waits. A
batch that was not prefetched is computed when it is requested; a prefetched batch that was never
requested is dropped at the next prefetch. At most one result is held: its hidden states, in addition to the
teacher's temporaries, which no other stream can use.

On a CPU there is nothing to overlap: `prefetch` computes at once, with bit-identical results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.models.head import Head
from engine.teachers.protocol import Teacher

# Shapes: B rows, T tokens, E teacher width


class DeviceBatch:
    """Two tensors on the device, recognised later by object identity, not by content."""

    def __init__(self, tokens_BT: Tensor, documents_BT: Tensor) -> None:
        self._tensors = tokens_BT, documents_BT
        self._versions = _versions(tokens_BT, documents_BT)

    def is_of(self, tokens_BT: Tensor, documents_BT: Tensor) -> bool:
        """Whether these are the same tensor objects, unmodified since."""
        same = tokens_BT is self._tensors[0] and documents_BT is self._tensors[1]
        return same and _versions(tokens_BT, documents_BT) == self._versions


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Hidden states that are being computed."""

    batch: DeviceBatch
    hidden_BTE: Tensor
    done: Any
    """Event on the side stream; None on a CPU."""


class PrefetchingTeacher:
    """Wraps `inner` and can compute a batch before it is requested. It must be the outermost
    wrapper.
    """

    def __init__(self, inner: Teacher, device: torch.device) -> None:
        self.inner = inner
        self.device = device
        self.used = 0
        """Prefetched batches that were then requested."""
        self.unused = 0
        """Prefetched batches that were dropped."""
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ahead: _Ahead | None = None

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def prefetch(self, tokens_BT: Tensor, documents_BT: Tensor) -> None:
        """Start computing a batch, after all work launched on the current stream so far."""
        self.unused += self._take() is not None
        done = None
        if self._stream is None:
            hidden_BTE = self.inner.hidden(tokens_BT, documents_BT)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                hidden_BTE = self.inner.hidden(tokens_BT, documents_BT)
            done = self._stream.record_event()
            for tensor in (tokens_BT, documents_BT):
                tensor.record_stream(self._stream)
        self._ahead = _Ahead(DeviceBatch(tokens_BT, documents_BT), hidden_BTE, done)

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        ahead = self._take()
        if ahead is None or not ahead.batch.is_of(tokens_BT, documents_BT):
            self.unused += ahead is not None
            return self.inner.hidden(tokens_BT, documents_BT)
        self.used += 1
        if ahead.done is not None:
            ahead.hidden_BTE.record_stream(torch.cuda.current_stream(self.device))
        return ahead.hidden_BTE

    def head(self) -> Head:
        self._wait()
        return self.inner.head()

    def _take(self) -> _Ahead | None:
        """Return and forget the prefetched result, after making the current stream wait for it."""
        self._wait()
        ahead, self._ahead = self._ahead, None
        return ahead

    def _wait(self) -> None:
        if self._ahead is not None and self._ahead.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ahead.done)


def _versions(tokens_BT: Tensor, documents_BT: Tensor) -> tuple[int, int]:
    """Return the write count (version) of each tensor; inference tensors have none and count as 0."""
    found = [0 if t.is_inference() else t._version for t in (tokens_BT, documents_BT)]
    return found[0], found[1]
