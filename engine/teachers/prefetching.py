"""A teacher that reads the next batch while the current step is still being finished.

A step ends with work that leaves the matrix units idle: the gradient norm, the optimizer (memory
alone), and the host's wait for the step's numbers, after which the device is empty until the next
batch has been launched. The next batch's hidden states depend on none of it. So they are launched
before it, on a stream of their own:

    main stream    backward | norm | AdamW |               student ...
    side stream             | teacher of the next batch ...

Order. The side stream begins after all that the main stream was given before `prefetch`: the copies
of the tokens, and the last use of whatever the teacher's own temporaries are shared with (the scratch
of weights in blocks also serves the loss's head). Everything that asks this teacher for something
first makes the main stream wait for the side stream. Tensors that cross over are told so
(`record_stream`), or their memory would be given away too early.

Which batch a result belongs to is known from the tensors themselves: `hidden` has to be given the
ones that `prefetch` was, and unchanged. Nothing is compared on the device, and the host waits for
nothing. A batch that was not prefetched is computed at once; a prefetched one that is not asked for
is dropped when the next is. At most one is held: its hidden states, beside the teacher's temporaries,
which no other stream can use.

On a CPU there is nothing to overlap: a prefetch is computed at once, with the same bits.
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
    """Two tensors on the device, to be known again by what they are and not by what they hold."""

    def __init__(self, tokens_BT: Tensor, documents_BT: Tensor) -> None:
        self._tensors = tokens_BT, documents_BT
        self._versions = _versions(tokens_BT, documents_BT)

    def is_of(self, tokens_BT: Tensor, documents_BT: Tensor) -> bool:
        """Whether these are the very tensors, unchanged since."""
        same = tokens_BT is self._tensors[0] and documents_BT is self._tensors[1]
        return same and _versions(tokens_BT, documents_BT) == self._versions


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Hidden states under way."""

    batch: DeviceBatch
    hidden_BTE: Tensor
    done: Any
    """The event of the side stream; None on a CPU."""


class PrefetchingTeacher:
    """`inner`, able to begin before it is asked. Goes around every other teacher."""

    def __init__(self, inner: Teacher, device: torch.device) -> None:
        self.inner = inner
        self.device = device
        self.used = 0
        """Prefetched batches that were asked for."""
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
        """Begins with a batch, after what the current stream was given so far."""
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
        """What is under way, which the current stream waits for; it is no longer held."""
        self._wait()
        ahead, self._ahead = self._ahead, None
        return ahead

    def _wait(self) -> None:
        if self._ahead is not None and self._ahead.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ahead.done)


def _versions(tokens_BT: Tensor, documents_BT: Tensor) -> tuple[int, int]:
    """How often each was written to; what cannot be written to has no count."""
    found = [0 if t.is_inference() else t._version for t in (tokens_BT, documents_BT)]
    return found[0], found[1]
