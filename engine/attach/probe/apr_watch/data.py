"""Which samples the passes over a data loader hand out: the indices of its sampler, as they are asked for.

Only passes that feed the training count. Of two passes of one loader, or of two loaders over the same data of which
the first is gone, the second follows the first.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from .parameters import FACT, PASS, SUSPICION, Line

_INDICES = 1 << 16
"""Of a pass, so many are kept: some megabytes."""
_ORDER, _LEAST = 1024, 8
"""Of two passes so many are compared; fewer may be in the same order by chance."""
_TWICE = 0.01
"""Share of samples that a sampler may give twice so that all ranks have as many."""
_CUT = 3
"""Passes in a row that end after their first batch."""
_LOADERS = 16
_PARTS = 64
"""Indices of a part of some data that tell it apart from another one."""
_ROWS, _WIDTH, _BYTES = 8, 1024, 64
"""Of each tensor of a batch so much is compared, and batches of fewer bytes are not."""
_TENSORS = 8
_LOOKS = 64
"""Batches of a pass that are compared: an optimizer that never steps is looked at in vain."""


class Pass:
    """One pass over a loader."""

    def __init__(self, iterator: Any, before: Pass | None) -> None:
        sampler = iterator._index_sampler
        self.of = weakref.ref(iterator)
        self.began = id(iterator._sampler_iter)
        self.sampler_id, self.data = id(sampler), _data_of(iterator._dataset)
        self.before = before
        self.length = _length(iterator)
        self.feeds = self.has_ended = False
        self.batches = self.taken = self.repeated = 0
        """Batches and indices that were handed out, and indices that were so twice."""
        self.cut = 0
        """Passes in a row, this one the last, that were left before their end."""
        self.has_indices = True
        self._asked: list[int] = []
        self._sizes: deque[int] = deque()
        self._seen: Counter[int] = Counter()
        self._is_compared = self._is_counted = False
        self._shuffles, self._repeats, self._sampler = _promise(iterator)
        self._print: Any = None
        self._equal = self._looked_at = 0

    def ask(self, index: Any) -> None:
        indices = index if isinstance(index, (list, tuple)) else [index]
        if not all(type(one) is int for one in indices):
            self.has_indices = False
        if self.has_indices and len(self._asked) < _INDICES:
            self._asked += indices
            self._sizes.append(len(indices))

    def take(self) -> list[Line]:
        """A batch was handed out."""
        self.batches += 1
        if not self.has_indices or not self._sizes:
            return []
        begin, self.taken = self.taken, self.taken + self._sizes.popleft()
        new = self._asked[begin : self.taken]
        self._seen.update(new)
        self.repeated = self.taken - len(self._seen)
        is_last = self.batches == self.length
        return self._order() if is_last or self.taken >= _ORDER else []

    def end(self) -> list[Line]:
        """There is no further batch, or the next pass has begun."""
        lines = [*self._order(), *self._count()] if self.feeds else []
        # The next pass is held against the first of them.
        self._asked, self._seen = self.order(), Counter()
        return lines

    def order(self) -> list[int]:
        return self._asked[: min(self.taken, _ORDER)]

    def _order(self) -> list[Line]:
        before = self.before
        if self._is_compared or before is None or not (self.feeds and before.feeds):
            return []
        most = min(len(self.order()), len(before.order()))
        new, old = self.order()[:most], before.order()[:most]
        if len({*new, *old}) < _LEAST:
            return []
        self._is_compared = True
        numbers = {"samples": most}
        if new != old:
            return [("data_order", PASS, "two passes over the data are in another order", numbers)]
        if not self._shuffles:
            text = f"each pass over the data is in the same order, by {self._sampler}"
            return [("data_order", FACT, text, numbers)]
        text = f"{self._sampler} shuffles, but two passes begin with the same {most} samples in the same order"
        return [("data_order", SUSPICION, text, numbers)]

    def _count(self) -> list[Line]:
        if self._is_counted or self.taken < _LEAST:
            return []
        self._is_counted = True
        numbers = {"samples": self.taken, "repeated": self.repeated}
        if self.repeated <= max(1, _TWICE * self.taken):
            text = f"a pass over the data handed out {self.taken} samples, {self.repeated or 'none'} twice"
            return [("repeated_samples", PASS, text, numbers)]
        text = f"of {self.taken} samples of a pass over the data {self.repeated} were handed out before in that pass"
        if self._repeats:
            return [("repeated_samples", FACT, f"{text}, as {self._sampler} is to do", numbers)]
        (times, most), *_ = Counter(self._seen.values()).most_common(1)
        if len(self._seen) - most <= max(1, _TWICE * len(self._seen)):
            # For several answers to each prompt.
            text = f"{text}: each {times} times, by {self._sampler}"
            return [("repeated_samples", FACT, text, numbers)]
        return [("repeated_samples", SUSPICION, f"{text}, by {self._sampler}", numbers)]

    def leave(self) -> list[Line]:
        """The next pass begins."""
        lines = self.end()
        if self.has_ended or self.length is None or self.batches >= self.length or not self.feeds:
            return lines
        before = self.before
        self.cut = 1 + (before.cut if before is not None else 0)
        same = before is not None and bool(self.order()) and before.order() == self.order()
        numbers = {"batches": self.batches, "of": self.length, "passes": self.cut}
        if self.batches == 1 and self.cut >= _CUT:
            what = ", which is the same one each time" if same else ""
            text = f"{self.cut} passes in a row over {self.length} batches were left after the first batch{what}"
        elif self.batches > 1 and self.cut > 1 and same:
            text = f"passes over {self.length} batches are left after the same first {self.batches}: the others are "
            text += "never read"
        else:
            return lines
        return [*lines, ("cut_passes", SUSPICION, text, numbers)]

    def compare(self, torch: Any, batch: Any) -> list[Line]:
        """Hold some rows of a batch against those of the batch before in this pass."""
        if self._looked_at >= _LOOKS:
            return []
        new, old = print_of(torch, batch), self._print
        self._print = new
        if new is None or old is None:
            return []
        self._looked_at += 1
        self._equal += new == old
        if self._equal < 2 or not self.feeds:
            return []
        text = f"{self._equal} of {self._looked_at} batches hold what the batch before them held"
        workers = getattr(self.of(), "_num_workers", 0)
        if not self.has_indices and workers > 1:
            text += f": each of {workers} workers reads all of the stream"
        return [("repeated_batches", SUSPICION, text, {"equal": self._equal})]

    def pause(self) -> None:
        """The batches that follow are not looked at."""
        self._print = None


class Passes:
    """Told of what each loader of the process hands out."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._passes: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
        self._newest: list[Pass] = []
        """Of each loader."""
        self._latest: Pass | None = None

    def forget(self) -> None:
        """What follows may be another training, on the same data in the same order."""
        self._newest = []

    def asked(self, iterator: Any, index: Any) -> list[Line]:
        """The sampler was asked for the samples of one more batch."""
        found = self._passes.get(iterator)
        lines: list[Line] = []
        if found is None or found.began != id(iterator._sampler_iter):
            before = self._before(iterator)
            if before is not None:
                lines = before.leave()
                before.before = None
            found = self._passes[iterator] = Pass(iterator, before)
        found.ask(index)
        return lines

    def _before(self, iterator: Any) -> Pass | None:
        data = _data_of(iterator._dataset)
        for one in self._newest:
            same = one.data == data or one.sampler_id == id(iterator._index_sampler)
            # Of two that are read in turns neither follows the other.
            if same and (one.has_ended or one.of() is None or one.of() is iterator):
                self._newest.remove(one)
                return one
        return None

    def fetched(self, iterator: Any, batch: Any, is_due: bool) -> list[Line]:
        """A batch was handed out; `is_due` where it is looked at."""
        found = self._latest = self._passes.get(iterator)
        if found is None:
            return []
        if not is_due:
            found.pause()
            return found.take()
        return [*found.take(), *found.compare(self._torch, batch)]

    def ended(self, iterator: Any) -> list[Line]:
        found = self._passes.get(iterator)
        if found is None or found.has_ended:
            return []
        found.has_ended = True
        return found.end()

    def trained_on(self) -> None:
        """A backward pass begins."""
        if self._latest is not None and not self._latest.feeds:
            self._latest.feeds = True
            self._newest = [*self._newest[1 - _LOADERS :], self._latest]


def _data_of(dataset: Any) -> Any:
    """What tells data apart from other data, also where its dataset is made anew for each pass."""
    inside = getattr(dataset, "__dict__", {})
    tensor = sys.modules["torch"].Tensor
    parts = [dataset, *inside.values(), *(inside.get("tensors") or ())]
    held = [id(one) for one in (inside.get("dataset"),) if one is not None]
    held += [id(one) for one in dataset[:1]] if type(dataset) in (list, tuple) else []
    held += [hash(tuple(one[:_PARTS])) for one in (inside.get("indices"),) if type(one) is list]
    memory = [
        one.data_ptr()
        for one in parts
        if type(one) is tensor and one.layout == sys.modules["torch"].strided
    ]
    try:
        return type(dataset), len(dataset), *held, *memory
    except Exception:  # noqa: BLE001  a stream has no length, and a length may be a function of the script's
        return id(dataset)


def _length(iterator: Any) -> int | None:
    """Batches of a pass; None where the data does not know its length."""
    try:
        return len(iterator)
    except Exception:  # noqa: BLE001  a stream has no length, and a length may be a function of the script's
        return None


def _promise(iterator: Any) -> tuple[bool, bool, str]:
    """Whether the sampler shuffles, whether it may give a sample twice, and its name."""
    samplers = sys.modules["torch.utils.data.sampler"]
    distributed = sys.modules.get("torch.utils.data.distributed")
    spread = getattr(distributed, "DistributedSampler", ())
    one = iterator._index_sampler
    for _ in range(4):
        inside = getattr(one, "sampler", getattr(one, "batch_sampler", None))
        if inside is None:
            break
        one = inside
    kind, name = type(one), type(one).__name__
    if issubclass(kind, samplers.RandomSampler):
        return True, _may_repeat(one), name
    if issubclass(kind, samplers.WeightedRandomSampler):
        return True, bool(getattr(one, "replacement", True)), name
    if issubclass(kind, samplers.SubsetRandomSampler):
        return True, False, name
    if spread and issubclass(kind, spread):
        return bool(getattr(one, "shuffle", False)), False, name
    return False, False, name


def _may_repeat(sampler: Any) -> bool:
    # A number of samples of its own may be more than there are.
    return (
        bool(getattr(sampler, "replacement", False))
        or vars(sampler).get("_num_samples") is not None
    )


def print_of(torch: Any, batch: Any) -> Any:
    """The bytes of some rows of a batch that is on the host; None where there are too few."""
    if isinstance(batch, torch.Tensor):
        parts = [batch]
    elif isinstance(batch, Mapping):
        parts = list(batch.values())
    else:
        parts = list(batch) if isinstance(batch, (list, tuple)) else []
    found = []
    for one in parts[:_TENSORS]:
        if type(one) is not torch.Tensor or not one.is_cpu or one.layout != torch.strided:
            continue
        if not one.dim() or not one.numel() or one.is_quantized or one.is_complex():
            continue
        rows = one.detach()
        if one.dim() > 1:
            rows = rows[:: -(-len(rows) // _ROWS)].flatten(1)
        rows = rows[..., :_WIDTH]
        found.append(rows.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found if sum(map(len, found)) >= _BYTES else None
