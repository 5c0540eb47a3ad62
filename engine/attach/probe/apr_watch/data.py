"""Check which samples a data loader yields in each epoch, by the indices that its sampler drew.

A pass is one iteration over a data loader, complete or not. Only passes that feed the training are judged. Each is
compared with the previous pass of the same loader, or of a loader over the same data that is exhausted or freed.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

from .parameters import FACT, PASS, SUSPICION, Line

_ORDER, _MIN_INDICES = 1024, 8
"""Maximum and minimum number of indices that are compared between two passes; fewer may be equal by chance."""
_CUT = 3
"""Number of consecutive passes left after their first batch from which this is reported."""
_LOADERS = 16
_AHEAD = 4096
"""Maximum number of batches that a loader prefetches."""
_PARTS = 64
"""Number of indices that are read to distinguish subsets of a data set."""
_ROWS, _WIDTH, _BYTES = 8, 1024, 64
"""Limits of a batch's fingerprint: maximum rows of each tensor, maximum elements of a row, minimum size in bytes."""
_TENSORS, _DIGESTS = 8, 512
_PIECE, _PIECES, _FACTOR = 8, 8192, 6364136223846793005
"""Length of a hashed chunk, maximum number of chunks of a tensor, and factor of the hash."""
_MAX_COMPARED, _MIN_COMPARED = 64, 4
"""Maximum number of batches of a pass that are compared, and minimum for the verdict that they differ."""


class Pass:
    """One iteration over a data loader."""

    def __init__(self, iterator: Any, previous: Pass | None) -> None:
        sampler = iterator._index_sampler
        self.of = weakref.ref(iterator)
        self.began = id(iterator._sampler_iter)
        self.sampler_id, self.data = id(sampler), data_of(iterator._dataset)
        self.data_id = id(iterator._dataset)
        self.parent_id = id(getattr(iterator._dataset, "__dict__", {}).get("dataset"))
        """Id of the data set of which the pass reads a subset; that of None if it reads a whole one."""
        self.previous, self.is_again = previous, False
        """`previous`: previous pass over the data. `is_again`: this pass reuses the previous one's iterator with its
        workers."""
        self.length = length_of(iterator)
        self.feeds = self.has_ended = False
        self.batches = 0
        """Number of yielded batches."""
        self.cut = 0
        """Number of consecutive passes, including this one, that ended early."""
        self.has_indices = True
        """Whether all indices drawn so far are integers."""
        self.order: list[int] = []
        """First indices of the yielded batches."""
        self.queue: deque[Any] = deque(maxlen=_AHEAD)
        """Indices drawn for batches that have not been yielded yet."""
        self.index: Any = None
        """Indices of the newest batch."""
        self.rows: set[int] = set()
        """Hashes of rows whose batches no backward pass has followed yet (`held_out.HeldOut`)."""
        self.is_evaluated = False
        self._is_compared = False
        self._shuffles, self._sampler = _sampler_of(iterator)
        self._fingerprint: Any = None
        self._equal = self._compared = 0

    def next_index(self) -> Any:
        """Return the indices of the batch that is yielded next; None if unknown."""
        return self.queue.popleft() if self.queue else None

    def yielded(self) -> None:
        """Record a yielded batch."""
        self.batches += 1
        self.index = self.next_index()
        if self.has_indices and len(self.order) < _ORDER:
            indices = indices_of(self.index)
            self.has_indices = indices is not None
            self.order += (indices or [])[: _ORDER - len(self.order)]

    def may_judge(self) -> bool:
        """Return whether `take` may return a verdict. True so rarely that `take` costs nothing."""
        batches = self.batches
        return not self._is_compared and (batches == self.length or not batches & (batches - 1))

    def take(self) -> list[Line]:
        """Compare the order of the samples, once enough have been yielded."""
        is_last = self.batches == self.length
        if not self.may_judge():
            return []
        return self._order() if self.has_indices and (is_last or len(self.order) == _ORDER) else []

    def end(self) -> list[Line]:
        """End the pass, because it is exhausted or the next pass has begun."""
        return self._order() if self.feeds else []

    def _order(self) -> list[Line]:
        previous = self.previous
        if self._is_compared or previous is None or not (self.feeds and previous.feeds):
            return []
        count = min(len(self.order), len(previous.order))
        new, old = self.order[:count], previous.order[:count]
        if len({*new, *old}) < _MIN_INDICES:
            return []
        self._is_compared = True
        numbers = {"samples": count}
        if new != old:
            return [("data_order", PASS, "two epochs are in different orders", numbers)]
        if not self._shuffles:
            text = f"each epoch is in the same order, by {self._sampler}"
            return [("data_order", FACT, text, numbers)]
        text = f"{self._sampler} shuffles, but two epochs begin with the same {count} samples in the same order"
        return [("data_order", SUSPICION, text, numbers)]

    def leave(self) -> list[Line]:
        """End the pass because the next one begins."""
        lines = self.end()
        if self.has_ended or self.length is None or self.batches >= self.length or not self.feeds:
            return lines
        previous = self.previous
        self.cut = 1 + (previous.cut if previous is not None else 0)
        is_same_order = previous is not None and bool(self.order) and previous.order == self.order
        numbers = {"batches": self.batches, "of": self.length, "passes": self.cut}
        if self.batches == 1 and self.cut >= _CUT:
            addition = ", the same one each time" if is_same_order else ""
            text = f"{self.cut} consecutive passes over {self.length} batches ended after the first batch{addition}"
        elif self.batches > 1 and self.cut > 1 and is_same_order:
            text = f"passes over {self.length} batches end after the same first {self.batches}: the others are never "
            text += "read"
        else:
            return lines
        return [*lines, ("cut_passes", SUSPICION, text, numbers)]

    def compare(self, torch: Any, batch: Any) -> list[Line]:
        """Compare the fingerprint of a batch with that of the previous batch of this pass."""
        if self._compared >= _MAX_COMPARED:
            return []
        new, old = fingerprint_of(torch, batch), self._fingerprint
        self._fingerprint = new
        if new is None or old is None:
            return []
        self._compared += 1
        self._equal += new == old
        if not self.feeds:
            return []
        if not self._equal and self._compared >= _MIN_COMPARED:
            text = f"none of {self._compared} batches equals the batch before it"
            return [("repeated_batches", PASS, text, {})]
        if self._equal < 2:
            return []
        text = f"{self._equal} of {self._compared} batches equal the batch before them"
        workers = getattr(self.of(), "_num_workers", 0)
        if not self.has_indices and workers > 1:
            text += f": each of {workers} workers reads the whole stream"
        return [("repeated_batches", SUSPICION, text, {"equal": self._equal})]

    def pause(self) -> None:
        """Forget the last fingerprint: the next batches are not compared."""
        self._fingerprint = None


class Passes:
    """Passes over all data loaders of the process."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._passes: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
        self._newest: list[Pass] = []
        """Newest pass of each loader."""
        self.latest: Pass | None = None
        """Pass of the newest batch."""
        self._known: Pass | None = None
        """Pass that was found last."""

    def forget(self) -> None:
        """Forget all passes: another training, on the same data in the same order, may begin."""
        self._newest = []

    def asked(self, iterator: Any, index: Any) -> list[Line]:
        """Record the indices that the sampler gave for one more batch."""
        current = self.of(iterator)
        lines: list[Line] = []
        if current is None or current.began != id(iterator._sampler_iter):
            previous = self._find_previous(iterator)
            if previous is not None:
                lines = previous.leave()
                previous.previous = None
            is_again = current is not None
            current = self._known = self._passes[iterator] = Pass(iterator, previous)
            current.is_again = is_again
        current.queue.append(index)
        return lines

    def _find_previous(self, iterator: Any) -> Pass | None:
        data = data_of(iterator._dataset)
        for candidate in self._newest:
            is_same_data = candidate.data == data or candidate.sampler_id == id(
                iterator._index_sampler
            )
            # Two loaders read in turns do not follow each other.
            if is_same_data and (
                candidate.has_ended or candidate.of() is None or candidate.of() is iterator
            ):
                self._newest.remove(candidate)
                return candidate
        return None

    def of(self, iterator: Any) -> Pass | None:
        if self._known is None or self._known.of() is not iterator:
            self._known = self._passes.get(iterator)
        return self._known

    def yielded(self, iterator: Any) -> Pass:
        """Record a yielded batch; return its pass."""
        current = self.of(iterator)
        if current is None:
            self.asked(iterator, None)  # before the hooks
            current = self._passes[iterator]
        self.latest = current
        current.yielded()
        return current

    def fetched(self, current: Pass, batch: Any, is_sampled: bool) -> list[Line]:
        """Judge a yielded batch; compare it with the previous batch if `is_sampled`."""
        if not is_sampled:
            current.pause()
            return current.take()
        return [*current.take(), *current.compare(self._torch, batch)]

    def ended(self, iterator: Any) -> list[Line]:
        current = self._passes.get(iterator)
        if current is None or current.has_ended:
            return []
        current.has_ended = True
        return current.end()

    def trained_on(self) -> None:
        """Record that a backward pass begins."""
        if self.latest is not None and not self.latest.feeds:
            self.latest.feeds = True
            self._newest = [*self._newest[1 - _LOADERS :], self.latest]


def indices_of(index: Any) -> list[int] | None:
    """Return a batch's indices as a list; None if they are not integers."""
    indices = index if isinstance(index, (list, tuple)) else [index]
    return list(indices) if set(map(type, indices)) <= {int} else None


def data_of(dataset: Any) -> Any:
    """Return a key of the data that stays the same if the script recreates its dataset for each epoch."""
    inside = getattr(dataset, "__dict__", {})
    tensor = sys.modules["torch"].Tensor
    parts = [dataset, *inside.values(), *(inside.get("tensors") or ())]
    keys = [id(value) for value in (inside.get("dataset"),) if value is not None]
    keys += [id(value) for value in dataset[:1]] if type(dataset) in (list, tuple) else []
    keys += [
        hash(tuple(value[:_PARTS])) for value in (inside.get("indices"),) if type(value) is list
    ]
    memory = [
        value.data_ptr()
        for value in parts
        if type(value) is tensor and value.layout == sys.modules["torch"].strided
    ]
    try:
        return type(dataset), len(dataset), *keys, *memory
    except Exception:  # noqa: BLE001  a stream has no length, and the script may define __len__
        return id(dataset)


def length_of(iterator: Any) -> int | None:
    """Return the number of batches of a pass; None if the data has no length."""
    try:
        return len(iterator)
    except Exception:  # noqa: BLE001  a stream has no length, and the script may define __len__
        return None


def _sampler_of(iterator: Any) -> tuple[bool, str]:
    """Return whether the sampler shuffles, and its name."""
    samplers = sys.modules["torch.utils.data.sampler"]
    distributed = sys.modules.get("torch.utils.data.distributed")
    spread = getattr(distributed, "DistributedSampler", ())
    sampler = iterator._index_sampler
    for _ in range(4):
        inside = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
        if inside is None:
            break
        sampler = inside
    kind, name = type(sampler), type(sampler).__name__
    random = (samplers.RandomSampler, samplers.WeightedRandomSampler, samplers.SubsetRandomSampler)
    if spread and issubclass(kind, spread):
        return bool(getattr(sampler, "shuffle", False)), name
    return issubclass(kind, random), name


def items_of(torch: Any, batch: Any) -> list[Any]:
    """Return the batch if it is a tensor, else the items of a mapping, list or tuple."""
    if isinstance(batch, (list, tuple)):
        return list(batch)
    if isinstance(batch, torch.Tensor):
        return [batch]
    return list(batch.values()) if isinstance(batch, Mapping) else []


def fingerprint_of(torch: Any, batch: Any) -> Any:
    """Return bytes of some rows of a batch on the host as its fingerprint; None if there are too few bytes."""
    pieces = []
    for tensor in _on_host(torch, batch):
        rows = tensor.detach()
        if tensor.dim() > 1:
            rows = rows[:: -(-len(rows) // _ROWS)].flatten(1)
        pieces.append(_bytes_of(torch, rows[..., :_WIDTH]))
    return pieces if sum(map(len, pieces)) >= _BYTES else None


def digests_of(torch: Any, batch: Any) -> list[str]:
    """Return a digest of each row of a batch's tensors on the host, or of groups of rows if there are more than
    _DIGESTS."""
    tensors = [tensor.detach() for tensor in _on_host(torch, batch)]
    count = len(tensors[0]) if tensors else 0
    size = max(1, -(-count // _DIGESTS))
    digests = []
    for begin in range(0, count, size):
        digest = 0
        for tensor in tensors:
            digest = zlib.crc32(_bytes_of(torch, tensor[begin : begin + size]), digest)
        digests.append(f"{digest:08x}")
    return digests


def chunk_hashes(torch: Any, rows: Any) -> list[int]:
    """Return a hash of each chunk of _PIECE consecutive values in the rows of a tensor on the host. Overlapping crops
    of one document have chunks in common."""
    for tensor in _on_host(torch, rows):
        if tensor.dim() > 1:
            values = tensor.detach().flatten(1).double().contiguous().view(torch.int64)
            pieces = values.unfold(1, min(_PIECE, values.shape[1]), 1).flatten(0, 1)[:_PIECES]
            powers = [_FACTOR**n % (1 << 62) for n in range(1, 1 + pieces.shape[1])]
            factors = torch.tensor(powers, device="cpu")
            hashes: list[int] = (pieces * factors).sum(1).tolist()
            return hashes
    return []


def _on_host(torch: Any, batch: Any) -> list[Any]:
    return [
        value
        for value in items_of(torch, batch)[:_TENSORS]
        if type(value) is torch.Tensor and value.is_cpu and value.layout == torch.strided
        if value.dim() and value.numel() and not value.is_quantized and not value.is_complex()
    ]


def _bytes_of(torch: Any, tensor: Any) -> bytes:
    found: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found
