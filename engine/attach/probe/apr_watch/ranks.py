"""Check that the ranks of a training hold the same weights, read different data and weigh labelled tokens equally.

At sampled steps each rank appends a record to its own file in the training's folder: a hash of some elements of each
parameter, and a hash of each batch trained on so far. Rank 0 reads the records of the ranks on its host and compares.
No rank waits for another, and no collective is called. If a record never arrives, the verdict is unknown.

Weights are read before a step, not after it, since a script may average them between two steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .data import fingerprint_of, indices_of
from .folders import Position, rank_and_world
from .modes import Verdicts
from .parameters import (
    FACT,
    FAIL,
    PASS,
    SUSPICION,
    UNKNOWN,
    Line,
    Modules,
    Search,
    children_of,
    held_by,
    labelled,
    listed,
    parameters_of,
)
from .sampled import is_plain
from .token_weights import across_ranks
from .values import EXIT_WAIT_S, HostCopies, is_capturing

DRIFT, DATA = "rank_drift", "rank_data"
_MAX_PARAMETERS, _ELEMENTS = 512, 64
"""Maximum number of parameters in a record, and of sampled elements of each parameter."""
_MAX_BATCHES, _MIN_BATCHES = 16, 2
"""Maximum and minimum number of a training's first batches that are compared."""
_MAX_PENDING = 64
"""Maximum number of snapshots that wait for a GPU or for other ranks."""
_MAX_BYTES = 1 << 22
"""Maximum size of a rank's file, in bytes."""
_READ_EVERY_S = 0.2


class Record(NamedTuple):
    """Hashes of the weights of one optimizer on one rank before one of its steps."""

    optimizer: int
    """Index of the optimizer in the process, in the order in which optimizers were first sampled."""
    step: int
    layout: str
    """Hash of the names, shapes and dtypes of its parameters."""
    digests: list[str]
    """Hash of the sampled elements of each parameter."""
    batches: list[list[str]]
    """For each training batch a hash of its sampler indices and a hash of its content; "" if unknown."""
    tokens: list[list[float]]
    """Weights and counts of labelled tokens for each backward pass; empty if unknown."""


_HEX = 8


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_HEX // 2).hexdigest()


def write(folder: str, rank: int, records: Iterable[Record]) -> None:
    """Append records to the file of a rank, each by one write call."""
    path = _path(folder, rank)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        for record in records:
            if file.tell() < _MAX_BYTES:
                file.write(json.dumps(record).encode() + b"\n")


def _path(folder: str, rank: int) -> str:
    return os.path.join(folder, "ranks", f"{rank}.compared")


class Records:
    """Records of rank 0, and those of other ranks that have arrived."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._read: dict[int, int] = {}
        self.records: dict[int, dict[tuple[int, int], Record]] = {}

    def read(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            begin = self._read.get(rank, 0)
            try:
                with open(_path(self._folder, rank), "rb") as file:
                    file.seek(begin)
                    data = file.read(_MAX_BYTES)
            except OSError:
                continue
            # The last line may be incomplete: it is read by the next call.
            complete = data[: data.rfind(b"\n") + 1]
            self._read[rank] = begin + len(complete)
            for line in complete.splitlines():
                self.add(rank, Record(*json.loads(line)))

    def add(self, rank: int, record: Record) -> None:
        self.records.setdefault(rank, {})[record.optimizer, record.step] = record

    def of(self, rank: int, optimizer: int, step: int) -> Record | None:
        return self.records.get(rank, {}).get((optimizer, step))


# What is compared.


class Wrapper:
    """State of one DistributedDataParallel module of this process."""

    def __init__(self, torch: Any, module: Any) -> None:
        self.of = weakref.ref(module)
        self.ranks = _ranks_of(torch, module)
        self.is_synced: bool | None = None
        """Whether any backward pass since the last step ran outside of no_sync(); None if none ran."""
        self.is_local = False
        """Whether in some step all backward passes ran inside no_sync(), so that ranks diverge as in Local SGD."""
        self.has_hook = False
        """Whether the script registered a communication hook."""

    def backward_begins(self) -> None:
        module = self.of()
        if module is not None:
            synced = bool(vars(module).get("require_backward_grad_sync", True))
            self.is_synced = synced or bool(self.is_synced)

    def step_begins(self) -> None:
        self.is_local = self.is_local or self.is_synced is False
        self.is_synced = None

    def update(self) -> None:
        """Read the module's state now, at a sampled step: the module may be freed when the step is judged."""
        module = self.of()
        if module is not None:
            self.has_hook = bool(vars(module).get("_comm_hooks"))


def _ranks_of(torch: Any, module: Any) -> list[int]:
    """Return the ranks between which a DistributedDataParallel averages gradients, without communication."""
    ranks = getattr(torch.distributed, "get_process_group_ranks", None)
    group = vars(module).get("process_group")
    if ranks is None or group is None:
        return list(range(rank_and_world(torch)[1]))
    return sorted(ranks(group))


class _Place(NamedTuple):
    """Name of a parameter, and the DistributedDataParallel that holds it, if any."""

    name: str
    wrapper: Wrapper | None
    is_ignored: bool = False
    """Whether the script excludes the parameter from averaging by name (`parameters_to_ignore`)."""


def _places(
    torch: Any, modules: Modules, wrappers: weakref.WeakKeyDictionary[Any, Wrapper]
) -> tuple[dict[int, _Place], set[int]]:
    """Return the parameters inside each DistributedDataParallel by id, and the ids of those inside FSDP modules."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    sharding = getattr(fsdp, "FullyShardedDataParallel", ())
    places: dict[int, _Place] = {}
    sharded: set[int] = set()
    for holder in modules.every:
        inside = vars(holder)
        if sharding and issubclass(type(holder), sharding):
            sharded |= {id(parameter) for _, parameter in _parameters(holder)}
        elif issubclass(type(holder), torch.nn.parallel.DistributedDataParallel):
            if holder not in wrappers:
                wrappers[holder] = Wrapper(torch, holder)
            ignored = inside.get("parameters_to_ignore") or ()
            module = inside["_modules"].get("module")
            for name, parameter in _parameters(module) if module is not None else ():
                is_ignored = name in ignored or f".{name}" in ignored
                places.setdefault(id(parameter), _Place(name, wrappers[holder], is_ignored))
    return places, sharded


def _parameters(module: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return names and parameters of a module and its children, without calling code of the script."""
    parameters: list[tuple[str, Any]] = []
    pending, passed = [(path, module)], set()
    while pending:
        path, module = pending.pop()
        if id(module) in passed:
            continue
        passed.add(id(module))
        parameters += [(path + name, parameter) for name, parameter in parameters_of(module)]
        pending += [(f"{path}{name}.", child) for name, child in children_of(module)]
    return parameters


class Layout:
    """The parameters of an optimizer that are compared between ranks."""

    def __init__(
        self,
        torch: Any,
        optimizer: Any,
        modules: Modules,
        wrappers: weakref.WeakKeyDictionary[Any, Wrapper],
    ) -> None:
        """`wrappers`: the DistributedDataParallel modules found so far; new ones are added to it."""
        places, sharded = _places(torch, modules, wrappers)
        everything = labelled(optimizer)
        self.ids = [id(parameter) for parameter, _ in everything]
        self.name = type(optimizer).__name__
        self.why = ""
        """Reason why the parameters are not compared; empty if they are."""
        plain = (torch.nn.Parameter, torch.Tensor)
        kinds = {
            type(parameter).__name__ for parameter, _ in everything if type(parameter) not in plain
        }
        if not sharded.isdisjoint(self.ids):
            kinds.add("FullyShardedDataParallel")
        if kinds:
            self.why = f"parameters of {self.name} are sharded, or not plain tensors ({', '.join(sorted(kinds))})"
        count, count_chosen = len(everything), min(len(everything), _MAX_PARAMETERS)
        # Choose by rounded indices: with a fixed stride of 2 all chosen ones may be weights and none biases.
        chosen = [everything[index * count // count_chosen] for index in range(count_chosen)]
        compared = [
            (parameter, places.get(id(parameter)) or _Place(modules.name(parameter) or label, None))
            for parameter, label in chosen
        ]
        compared = [
            (parameter, place)
            for parameter, place in compared
            if is_plain(torch, parameter) and not place.is_ignored
        ] * (not self.why)
        if not compared and not self.why:
            self.why = f"{self.name} holds no parameter that can be compared on this rank"
        self.parameters = [weakref.ref(parameter) for parameter, _ in compared]
        self.names = [place.name for _, place in compared]
        self.wrappers = [place.wrapper for _, place in compared]
        about = [
            f"{name} {tuple(parameter.shape)} {parameter.dtype}"
            for name, (parameter, _) in zip(self.names, compared, strict=True)
        ]
        self.hash = _digest("\n".join(about).encode())

    def each_wrapper(self) -> list[Wrapper]:
        return list(
            {id(wrapper): wrapper for wrapper in self.wrappers if wrapper is not None}.values()
        )

    def is_of(self, optimizer: Any) -> bool:
        if any(reference() is None for reference in self.parameters):
            return False
        return self.ids == list(map(id, held_by(optimizer)))


class Snapshot:
    """Sampled weights of one optimizer on this rank, copied before one of its steps."""

    def __init__(
        self,
        torch: Any,
        optimizer: int,
        step: int,
        layout: Layout,
        batches: list[list[str]],
        tokens: Any,
    ) -> None:
        self._torch, self._optimizer, self._step = torch, optimizer, step
        self.layout, self._batches = layout, list(batches)
        by_kind: dict[Any, list[tuple[int, Any]]] = {}
        for place, reference in enumerate(layout.parameters):
            parameter = reference()
            if parameter is not None:
                key = parameter.device, parameter.dtype
                by_kind.setdefault(key, []).append((place, _sampled(parameter)))
        self._sizes = {
            kind: [(place, elements.numel()) for place, elements in pairs]
            for kind, pairs in by_kind.items()
        }
        """Indices and element counts of the parameters of each device and dtype."""
        self._tensors = {
            kind: torch.cat([elements for _, elements in pairs]) for kind, pairs in by_kind.items()
        }
        if tokens is not None:
            self._tensors["tokens"] = tokens
        self.are_complete = HostCopies(torch, [self._tensors]).are_complete

    def record(self) -> Record:
        """Return the record. Call only after `are_complete` has returned True."""
        count = len(self.layout.parameters)
        digests = ["0" * _HEX] * count
        tokens = self._tensors.pop("tokens", None)
        for kind, numbers in self._tensors.items():
            data = bytes(numbers.view(self._torch.uint8).tolist())
            begin = 0
            for place, size in self._sizes[kind]:
                end = begin + size * numbers.element_size()
                digests[place] = _digest(data[begin:end])
                begin = end
        token_rows = [] if tokens is None else tokens.tolist()
        hashes = self.layout.hash, digests
        return Record(self._optimizer, self._step, *hashes, self._batches, token_rows)


def _sampled(parameter: Any) -> Any:
    """Return elements spread over a parameter, without copying the whole parameter."""
    values = parameter.detach()
    if not values.is_contiguous():
        rows = values[:: max(1, -(-values.shape[0] // _ELEMENTS))]
        return rows[(slice(None), *[0] * (values.dim() - 1))][:_ELEMENTS]
    # An odd stride, so that the elements are not all in one column.
    return values.reshape(-1)[:: max(1, values.numel() // _ELEMENTS) | 1][:_ELEMENTS]


# Verdicts.


def judge(
    layout: Layout, records: dict[int, Record], began: Mapping[int, Record | None]
) -> list[Line]:
    """Return the verdicts on weights, data and token weights. `records`: the ranks' records before one step, rank 0
    first; `began`: their records before the first step."""
    own = records[0]
    if layout.why or len(records) < 2:
        return []
    if any(record.layout != own.layout for record in records.values()):
        text = f"names or shapes of the parameters of {layout.name} differ between {_named_ranks(records)}"
        return [(DRIFT, UNKNOWN, text, {"parameters": len(layout.names)})]
    lines: list[Line] = []
    wrapped = [index for index, one in enumerate(layout.wrappers) if one is not None]
    unwrapped = [index for index, one in enumerate(layout.wrappers) if one is None]
    if wrapped:
        lines += _judge_weights(layout, records, began, wrapped, True)
    if unwrapped and own.step > 1:
        lines += _judge_weights(layout, records, began, unwrapped, False)
    return lines + _judge_data(layout, records, began) + _judge_tokens(layout, records)


def _judge_weights(
    layout: Layout,
    records: dict[int, Record],
    began: Mapping[int, Record | None],
    places: list[int],
    is_wrapped: bool,
) -> list[Line]:
    """Return the verdict on the parameters `places`. `is_wrapped`: all are inside a DistributedDataParallel; else none
    is."""
    own, everyone = records[0], _named_ranks(records)
    apart = [p for p in places if len({record.digests[p] for record in records.values()}) > 1]
    numbers: dict[str, Any] = {"parameters": len(places), "different": len(apart)}
    if not apart:
        text = f"{everyone} begin step {own.step} with the same weights: {len(places)} parameters of {layout.name}"
        return [(DRIFT, PASS, text, numbers)] if own.step > 1 else []
    equal = None if is_wrapped else _were_equal_at_start(records, began, places)
    if not is_wrapped and equal is None:
        return []
    differing_ranks = _named_ranks(
        [
            rank
            for rank, record in records.items()
            if not rank or any(record.digests[p] != own.digests[p] for p in apart)
        ]
    )
    text = f"{listed([layout.names[index] for index in apart])}: {len(apart)} of {len(places)} parameters "
    if is_wrapped:
        text += (
            f"under DistributedDataParallel differ between {differing_ranks} before step {own.step}"
        )
    elif equal:
        text += f"of {layout.name} were equal on {everyone} before the first step, and differ before step {own.step}"
    else:
        text += f"of {layout.name} differ between {differing_ranks}, and some did before the first step: "
        return [(DRIFT, FACT, f"{text}different models, or parts of one", numbers)]
    level, why = _reason_of_drift(layout, apart)
    return [(DRIFT, level, text + why, numbers)]


def _reason_of_drift(layout: Layout, apart: list[int]) -> tuple[str, str]:
    """Return the level of the verdict on parameters that differ, and the reason as the end of its message."""
    wrappers = {
        id(wrapper): wrapper for index in apart if (wrapper := layout.wrappers[index]) is not None
    }.values()
    if not wrappers:
        why = ": no DistributedDataParallel wraps them, and nothing else averages their gradients"
        return SUSPICION, why
    if any(wrapper.has_hook for wrapper in wrappers):
        return (
            UNKNOWN,
            ": a communication hook of the script decides how gradients are averaged",
        )
    if any(wrapper.is_local for wrapper in wrappers):
        return (
            SUSPICION,
            ": all backward passes of a step ran inside no_sync(), as in Local SGD",
        )
    return FAIL, ""


def _were_equal_at_start(
    records: dict[int, Record], began: Mapping[int, Record | None], places: Iterable[int]
) -> bool | None:
    """Return whether all ranks began with the same weights; None if unknown."""
    first, *others = (began.get(rank) for rank in records)
    if first is None:
        return None
    known = [other for other in others if other is not None and other.layout == first.layout]
    if len(known) < len(others):
        return None
    return all(other.digests[p] == first.digests[p] for other in known for p in places)


def _judge_data(
    layout: Layout, records: dict[int, Record], began: Mapping[int, Record | None]
) -> list[Line]:
    """Return the verdict on whether the ranks have trained on the same batches so far."""
    (own, *others), everyone = [one.batches for one in records.values()], _named_ranks(records)
    count = min(map(len, (own, *others)))
    if count < _MIN_BATCHES:
        return []
    are_same = [_are_same(own[:count], batches[:count]) for batches in others]
    if None in are_same:
        return []
    numbers = {"batches": count, "ranks": len(records)}
    if not any(are_same):
        text = f"{everyone} trained on different data in their first {count} batches"
        return [(DATA, PASS, text, numbers)]
    every = range(len(layout.names))
    if not all(are_same) or len({content for _, content in own[:count]}) < _MIN_BATCHES:
        return []
    # With tensor or pipeline parallelism the ranks hold different weights and must read the same data.
    if not _were_equal_at_start(records, began, every):
        return []
    text = f"{everyone} trained on the same data in their first {count} batches: each rank reads the whole data set"
    return [(DATA, SUSPICION, text, numbers)]


def _judge_tokens(layout: Layout, records: dict[int, Record]) -> list[Line]:
    """Return the verdict on whether a token weighs the same on all ranks, if one DistributedDataParallel averages all
    gradients."""
    wrappers = layout.wrappers
    ranks = {rank: record.tokens for rank, record in records.items()}
    if not all(
        wrapper is not None and not wrapper.has_hook and not wrapper.is_local
        for wrapper in wrappers
    ):
        return []
    if not all(ranks.values()) or wrappers[0] is None:
        return []
    return across_ranks(layout.name, records[0].step, ranks, len(wrappers[0].ranks))


def _are_same(own: list[list[str]], other: list[list[str]]) -> bool | None:
    """Return whether two ranks read the same batches; None if undecidable."""
    pairs = list(zip(own, other, strict=True))
    if all(a[1] and a[1] == b[1] for a, b in pairs):
        return True
    if any(a[0] and b[0] and a[0] != b[0] for a, b in pairs):
        return False
    # Equal indices may mean different samples if each rank has its own shard. Different contents with equal indices may
    # come from random augmentation.
    has_indices = all(a[0] for a, _ in pairs)
    return None if has_indices or not all(a[1] and b[1] for a, b in pairs) else False


def _named_ranks(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    if len(ranks) > 4:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


# Events of this rank.


class Ranks:
    """Comparison of this rank with the other ranks. Its methods are called at batches, backward passes and steps; with
    one rank they do nothing."""

    def __init__(self, torch: Any, position: Position, search: Search) -> None:
        self._torch, self._position, self._search = torch, position, search
        self._wrappers: weakref.WeakKeyDictionary[Any, Wrapper] = weakref.WeakKeyDictionary()
        self._layouts: weakref.WeakKeyDictionary[Any, tuple[int, Layout]] = (
            weakref.WeakKeyDictionary()
        )
        self._count = 0
        self._latest_batch: list[str] | None = None
        self._batches: list[list[str]] = []
        self._new_snapshots: deque[Snapshot] = deque(maxlen=_MAX_PENDING)
        """Snapshots of the step in progress: the step may begin another training."""
        self._snapshots: deque[Snapshot] = deque(maxlen=_MAX_PENDING)
        self._forget_training()

    def _forget_training(self) -> None:
        self._records: Records | None = None
        self._open: dict[tuple[int, int], Layout] = {}
        """Layouts of rank 0's records that are not compared yet, by optimizer and step."""
        self._has_reported = False
        self._read_s = 0.0

    def optimizer_created(self) -> None:
        """Forget the batches: another training may begin."""
        self._latest_batch, self._batches = None, []

    # Data.

    def batch_fetched(self, index: Any, batch: Any) -> None:
        """Record a batch and the indices that its sampler drew."""
        if self._position.world < 2 or len(self._batches) >= _MAX_BATCHES:
            return
        indices, content = indices_of(index), fingerprint_of(self._torch, batch)
        self._latest_batch = [
            "" if indices is None else _digest(repr(indices).encode()),
            "" if content is None else _digest(b"".join(content)),
        ]

    def backward_begins(self) -> None:
        if self._position.world < 2 or is_capturing(self._torch):
            return
        if self._latest_batch is not None and len(self._batches) < _MAX_BATCHES:
            self._batches.append(self._latest_batch)
        self._latest_batch = None
        for wrapper in self._wrappers.values():
            wrapper.backward_begins()

    # Weights.

    def step_begins(self, optimizer: Any, step: int, is_sampled: bool, tokens: Any) -> None:
        if self._position.world < 2 or is_capturing(self._torch):
            return
        number, layout = self._layouts.get(optimizer, (self._count, None))
        if layout is not None:
            for wrapper in layout.each_wrapper():
                wrapper.step_begins()
        if not is_sampled:
            return
        if layout is None or not layout.is_of(optimizer):
            self._count += layout is None
            layout = Layout(self._torch, optimizer, self._search.modules, self._wrappers)
            self._layouts[optimizer] = number, layout
            for wrapper in layout.each_wrapper():
                wrapper.step_begins()
        for wrapper in layout.each_wrapper():
            wrapper.update()
        with self._torch.no_grad():
            self._new_snapshots.append(
                Snapshot(self._torch, number, step, layout, self._batches, tokens)
            )

    # Between ranks.

    def step_ends(self, folder: str | None, rank: int, world: int) -> list[Verdicts]:
        """Assign the step's snapshots to the training in this folder; return the verdicts that are complete."""
        self._snapshots += self._new_snapshots
        self._new_snapshots.clear()
        if folder is None or world < 2 or not (self._snapshots or self._open):
            return []
        return self._exchange(folder, rank, world, is_last=False)

    def training_ends(
        self, folder: str | None, rank: int, world: int, at_exit: bool
    ) -> list[Verdicts]:
        """Return the verdicts on the records that have arrived. At exit, wait up to EXIT_WAIT_S for a GPU's copies."""
        verdicts: list[Verdicts] = []
        if folder is not None and world > 1:
            deadline = time.monotonic() + EXIT_WAIT_S * at_exit
            while time.monotonic() < deadline and not all(
                snapshot.are_complete() for snapshot in self._snapshots
            ):
                time.sleep(0.001)
            verdicts = self._exchange(folder, rank, world, is_last=True)
        self._snapshots.clear()
        self._forget_training()
        return verdicts

    def _exchange(self, folder: str, rank: int, world: int, is_last: bool) -> list[Verdicts]:
        ready: list[tuple[Layout, Record]] = []
        with self._torch.no_grad():
            while self._snapshots and self._snapshots[0].are_complete():
                snapshot = self._snapshots.popleft()
                ready.append((snapshot.layout, snapshot.record()))
        if rank:
            write(folder, rank, [record for layout, record in ready if not layout.why])
            return []
        verdicts: list[Verdicts] = []
        if self._records is None:
            self._records = Records(folder)
        for layout, record in ready:
            if layout.why:
                verdicts += self._report_unknown(layout.why)
                continue
            self._records.add(0, record)
            self._open[record.optimizer, record.step] = layout
            if len(self._open) > _MAX_PENDING:
                del self._open[next(iter(self._open))]
        now_s = time.monotonic()
        if not self._open or not (is_last or now_s - self._read_s > _READ_EVERY_S):
            return verdicts
        self._read_s = now_s
        local_ranks = _local_ranks(world)
        self._records.read(other for other in local_ranks if other)
        for key, layout in list(self._open.items()):
            verdicts += self._compare(self._records, key, layout, local_ranks, is_last)
        if is_last and self._open:
            verdicts += self._report_unknown(_why_nothing_arrived(len(local_ranks), world))
        return verdicts

    def _report_unknown(self, why: str) -> list[Verdicts]:
        if self._has_reported:
            return []
        self._has_reported = True
        return [Verdicts([(DRIFT, UNKNOWN, why, {})])]

    def _compare(
        self,
        every: Records,
        key: tuple[int, int],
        layout: Layout,
        local_ranks: list[int],
        is_last: bool,
    ) -> list[Verdicts]:
        groups = [wrapper.ranks for wrapper in layout.each_wrapper()]
        expected = [rank for rank in local_ranks if all(rank in group for group in groups)]
        found = {rank: every.of(rank, *key) for rank in expected}
        records = {rank: record for rank, record in found.items() if record is not None}
        if len(expected) > 1 and (
            len(records) < 2 or (len(records) < len(expected) and not is_last)
        ):
            return []
        del self._open[key]
        optimizer, step = key
        lines = judge(layout, records, {rank: every.of(rank, optimizer, 1) for rank in records})
        self._has_reported = self._has_reported or bool(lines)
        return [Verdicts(lines, step)] if lines else []


def _local_ranks(world: int) -> list[int]:
    """Return the ranks of rank 0's host."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return list(range(min(world, int(count)) if count.isdecimal() and int(count) else world))


def _why_nothing_arrived(local_count: int, world: int) -> str:
    if local_count < world:
        others = f"{world - local_count} of {world} ranks are on other hosts"
        return f"{others}, and no other rank of this host wrote its weights"
    return "no other rank wrote its weights: they are on other hosts, step other optimizers, or ended before"
