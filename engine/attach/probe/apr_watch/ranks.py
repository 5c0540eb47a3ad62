"""Whether the ranks of a training have the same weights, and read different data.

On a few steps each rank writes what it begins the step with to a file of its own beside its beat: of each parameter a
hash of some numbers, and of the batches that it trained on so far a hash each. Rank 0 reads what has come and compares.
No rank waits for another, none asks another through torch.distributed, and what never comes is unknown. The files are
on one host.

The weights are those in front of a step, not behind it: a script may average them in between.
"""

from __future__ import annotations

import binascii
import gc
import hashlib
import json
import os
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from .data import print_of
from .folders import rank_and_world
from .modes import Noticed
from .parameters import FACT, FAIL, NAMED, PASS, SUSPICION, UNKNOWN, Line, Modules
from .updates import is_plain
from .values import is_capturing

DRIFT, DATA = "rank_drift", "rank_data"
_PARAMETERS, _NUMBERS = 512, 64
"""Of an optimizer so many parameters are compared, and of each so many numbers."""
_BATCHES, _LEAST = 16, 2
"""The first batches of a training are compared, if there are so many."""
_LOOKS = 64
"""That wait for a GPU, or for other ranks."""
_SEARCHES = 32
"""Among all objects of a process, of a tenth of a second each."""
_MOST_BYTES = 1 << 22
"""Of the file of a rank."""
_READ_EVERY_S = 0.2
_ROUNDING = 1e-3
"""Of the way that weights have come: what is less may be sums in another order."""
_EXIT_WAIT_S = 2.0


class Record(NamedTuple):
    """What a rank says of one optimizer in front of one of its steps."""

    optimizer: int
    """The place of the optimizer among those of the process, in the order of their first steps."""
    step: int
    layout: str
    """A hash of names, shapes and types of its parameters."""
    digests: list[str]
    """Of each parameter a hash of the bytes of some numbers."""
    sums: list[float]
    """Of each parameter their sum with signs that alternate: it tells how far apart two of them are."""
    batches: list[list[str]]
    """Of each batch that was trained on a hash of the sampler's indices and one of what was read; empty where that
    cannot be seen."""


def to_line(record: Record) -> bytes:
    packed = binascii.b2a_base64(struct.pack(f"<{len(record.sums)}d", *record.sums), newline=False)
    fields = {**record._asdict(), "digests": "".join(record.digests), "sums": packed.decode()}
    return json.dumps(fields).encode() + b"\n"


def from_line(line: bytes) -> Record:
    fields = json.loads(line)
    digests, packed = fields["digests"], binascii.a2b_base64(fields["sums"])
    fields["digests"] = [digests[at : at + _HEX] for at in range(0, len(digests), _HEX)]
    fields["sums"] = list(struct.unpack(f"<{len(packed) // 8}d", packed))
    return Record(**fields)


_HEX = 8


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_HEX // 2).hexdigest()


def write(folder: str, rank: int, records: Iterable[Record]) -> None:
    """Append them to the file of a rank, each with one system call."""
    os.makedirs(os.path.join(folder, "ranks"), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(_path(folder, rank), flags, 0o644)
    try:
        for record in records:
            if os.fstat(fd).st_size < _MOST_BYTES:
                os.write(fd, to_line(record))
    finally:
        os.close(fd)


def _path(folder: str, rank: int) -> str:
    return os.path.join(folder, "ranks", f"{rank}.compared")


class Others:
    """The records of other ranks, as far as they have come."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._read: dict[int, int] = {}
        self._records: dict[int, dict[tuple[int, int], Record]] = {}

    def look(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            try:
                fd = os.open(_path(self._folder, rank), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                begin = self._read.get(rank, 0)
                found = os.pread(fd, _MOST_BYTES, begin)
            finally:
                os.close(fd)
            # A line that is being written is read later.
            whole = found[: found.rfind(b"\n") + 1]
            self._read[rank] = begin + len(whole)
            for line in whole.splitlines():
                record = from_line(line)
                self._records.setdefault(rank, {})[record.optimizer, record.step] = record

    def has_come(self, rank: int) -> bool:
        return rank in self._records

    def of(self, rank: int, optimizer: int, step: int) -> Record | None:
        return self._records.get(rank, {}).get((optimizer, step))


# What is compared.


class Wrapper:
    """A DistributedDataParallel of this process."""

    def __init__(self, torch: Any, module: Any) -> None:
        self.of = weakref.ref(module)
        self.ranks = _ranks_of(torch, module)
        self.is_synced: bool | None = None
        """Whether a backward pass since the last step was outside of no_sync; None before the first one."""
        self.is_local = False
        """Whether all backward passes of a step were inside: then the ranks train apart for a while."""
        self.has_hook = False
        """Whether the script says itself how gradients are averaged."""
        self.was_called = True
        """Whether its forward ever ran in training, as far as torch counts that; not known before the second step."""

    def backward_begins(self) -> None:
        module = self.of()
        if module is not None:
            synced = bool(vars(module).get("require_backward_grad_sync", True))
            self.is_synced = synced or bool(self.is_synced)

    def step_begins(self) -> None:
        self.is_local = self.is_local or self.is_synced is False
        self.is_synced = None

    def look(self) -> None:
        """At a step that is looked at; the module may be gone when it is judged."""
        module = self.of()
        if module is None:
            return
        self.has_hook = bool(vars(module).get("_comm_hooks"))
        try:
            counts = module.logger._get_ddp_logging_data().ints_map
            self.was_called = bool(counts["iteration"])
        except Exception:  # noqa: BLE001  it is torch's own, and may be another one
            self.was_called = True


def _ranks_of(torch: Any, module: Any) -> list[int]:
    """Those whose gradients it averages; asks no other rank."""
    ranks = getattr(torch.distributed, "get_process_group_ranks", None)
    group = vars(module).get("process_group")
    if ranks is None or group is None:
        return list(range(rank_and_world(torch)[1]))
    return sorted(ranks(group))


class _Place(NamedTuple):
    """Where a parameter is inside a DistributedDataParallel."""

    name: str
    wrapper: Wrapper
    is_known: bool
    """Whether the wrapper averages its gradients."""


class Wrappers:
    """What wraps modules of this process for several ranks; a look at all its objects."""

    def __init__(self, torch: Any) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
        sharding = getattr(fsdp, "FullyShardedDataParallel", ())
        replicating = torch.nn.parallel.DistributedDataParallel
        module_type = torch.nn.Module
        self.replicated: list[Wrapper] = []
        self._inside: dict[int, tuple[weakref.ref[Any], _Place]] = {}
        self._ignored: dict[int, weakref.ref[Any]] = {}
        """Those that a DistributedDataParallel was told to leave alone."""
        self.sharded: set[int] = set()
        for one in gc.get_objects():
            kind = type(one)
            if not issubclass(kind, module_type):
                continue
            if sharding and issubclass(kind, sharding):
                self.sharded |= {id(parameter) for _, parameter in _parameters(one)}
            elif issubclass(kind, replicating):
                self._add(Wrapper(torch, one), vars(one))

    def _add(self, wrapper: Wrapper, inside: dict[str, Any]) -> None:
        self.replicated.append(wrapper)
        module = (inside.get("_modules") or {}).get("module")
        known = {id(one) for one in inside.get("_module_parameters") or ()}
        ignored = inside.get("parameters_to_ignore") or ()
        for name, parameter in _parameters(module) if module is not None else ():
            if name in ignored or f".{name}" in ignored:
                self._ignored[id(parameter)] = weakref.ref(parameter)
                continue
            place = _Place(name, wrapper, id(parameter) in known or not known)
            self._inside.setdefault(id(parameter), (weakref.ref(parameter), place))

    def place_of(self, parameter: Any) -> _Place | None:
        """Where it is inside a DistributedDataParallel."""
        found = self._inside.get(id(parameter))
        return found[1] if found is not None and found[0]() is parameter else None

    def leaves_alone(self, parameter: Any) -> bool:
        found = self._ignored.get(id(parameter))
        return found is not None and found() is parameter


def _parameters(module: Any, path: str = "") -> list[tuple[str, Any]]:
    """The parameters of a module and those inside it, with their names; asks no property of the script's."""
    found: list[tuple[str, Any]] = []
    left, passed = [(path, module)], set()
    while left:
        path, module = left.pop()
        if id(module) in passed:
            continue
        passed.add(id(module))
        for name, one in (vars(module).get("_parameters") or {}).items():
            if one is not None:
                found.append((path + name, one))
        for name, child in (vars(module).get("_modules") or {}).items():
            if child is not None:
                left.append((f"{path}{name}.", child))
    return found


class Layout:
    """The parameters of an optimizer that are compared."""

    def __init__(self, torch: Any, optimizer: Any, wrappers: Wrappers) -> None:
        everything = [
            (f"group {at}, parameter {place}", one)
            for at, group in enumerate(optimizer.param_groups)
            for place, one in enumerate(group["params"])
        ]
        self.ids = [id(one) for _, one in everything]
        self.name = type(optimizer).__name__
        self.why = ""
        """Why they are not compared."""
        kinds = {type(one).__name__ for _, one in everything if _is_of_another_type(torch, one)}
        if any(at in wrappers.sharded for at in self.ids):
            kinds.add("FullyShardedDataParallel")
        if kinds:
            self.why = f"parameters of {self.name} are sharded, or not plain tensors ({', '.join(sorted(kinds))})"
        count, most = len(everything), min(len(everything), _PARAMETERS)
        # Not each second one: those may be all weights, and no bias.
        chosen = [everything[at * count // most] for at in range(most)]
        chosen = [
            (label, one)
            for label, one in chosen
            if not self.why and is_plain(torch, one) and not wrappers.leaves_alone(one)
        ]
        if not chosen and not self.why:
            self.why = f"{self.name} holds no numbers of its own here"
        loose = [one for _, one in chosen if wrappers.place_of(one) is None]
        modules = Modules(torch, loose) if loose else None
        self.parameters = [weakref.ref(one) for _, one in chosen]
        self.names: list[str] = []
        self.wrappers: list[Wrapper | None] = []
        self.unknown: set[int] = set()
        """Places of parameters that are inside a wrapper and that it does not know."""
        for place, (label, one) in enumerate(chosen):
            inside = wrappers.place_of(one)
            self.wrappers.append(None if inside is None else inside.wrapper)
            if inside is not None:
                self.names.append(inside.name)
                self.unknown |= set() if inside.is_known else {place}
            else:
                self.names.append((modules and modules.name(one)) or label)
        about = [
            f"{name} {tuple(one.shape)} {one.dtype}"
            for name, (_, one) in zip(self.names, chosen, strict=True)
        ]
        self.hash = _digest("\n".join(about).encode())

    def each_wrapper(self) -> list[Wrapper]:
        return list({id(one): one for one in self.wrappers if one is not None}.values())

    def is_of(self, optimizer: Any) -> bool:
        if any(one() is None for one in self.parameters):
            return False
        return self.ids == [id(one) for group in optimizer.param_groups for one in group["params"]]


def _is_of_another_type(torch: Any, parameter: Any) -> bool:
    return type(parameter) not in (torch.nn.Parameter, torch.Tensor)


class Look:
    """The weights of one optimizer in front of one of its steps, on this rank."""

    def __init__(
        self, torch: Any, optimizer: int, step: int, layout: Layout, batches: list[list[str]]
    ) -> None:
        self._torch, self._optimizer, self._step = torch, optimizer, step
        self.layout, self._batches = layout, list(batches)
        self._sizes: list[tuple[Any, list[int], list[int]]] = []
        """Of each device and type the tensor with the numbers, and the places and counts of its parameters."""
        self._copied: list[Any] | None = None
        found: dict[Any, list[tuple[int, Any]]] = {}
        for place, reference in enumerate(layout.parameters):
            parameter = reference()
            if parameter is not None:
                key = parameter.device, parameter.dtype
                found.setdefault(key, []).append((place, _some(parameter)))
        for parts in found.values():
            numbers = torch.cat([part for _, part in parts])
            counts = [part.numel() for _, part in parts]
            self._sizes.append((numbers, [place for place, _ in parts], counts))
        self._events = []
        for device in self._devices():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def _devices(self) -> set[Any]:
        return {numbers.device for numbers, _, _ in self._sizes if not numbers.is_cpu}

    def has_passed(self) -> bool:
        """Whether its numbers are on the host. Never waits for the stream of the training."""
        if not all(event.query() for event in self._events):
            return False
        if self._copied is None:
            self._copied = [self._copy_to_host(device) for device in self._devices()]
        return all(event.query() for event, _ in self._copied)

    def _copy_to_host(self, device: Any) -> tuple[Any, list[Any]]:
        torch = self._torch
        stream, event = torch.cuda.Stream(device), torch.cuda.Event()
        held = []
        with torch.cuda.stream(stream):
            for at, (numbers, *about) in enumerate(self._sizes):
                if numbers.device == device:
                    # Not pinned: the first pinned allocation synchronises.
                    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu")
                    self._sizes[at] = host.copy_(numbers, non_blocking=True), *about
                    held.append(numbers)
            event.record(stream)
        # The memory belongs to the stream of the training until it was copied.
        return event, held

    def record(self) -> Record:
        """What is said of it, once it has passed."""
        count = len(self.layout.parameters)
        digests, sums = ["0" * _HEX] * count, [0.0] * count
        for numbers, places, counts in self._sizes:
            data = bytes(numbers.view(self._torch.uint8).tolist())
            values, width = numbers.double().tolist(), numbers.element_size()
            begin = 0
            for place, size in zip(places, counts, strict=True):
                end = begin + size
                digests[place] = _digest(data[begin * width : end * width])
                sums[place] = sum(values[begin:end:2]) - sum(values[begin + 1 : end : 2])
                begin = end
        self._sizes, self._events, self._copied = [], [], None
        return Record(self._optimizer, self._step, self.layout.hash, digests, sums, self._batches)


def _some(parameter: Any) -> Any:
    """Some of its numbers, spread over all of it, without a copy of the rest."""
    one = parameter.detach()
    if not one.is_contiguous():
        rows = one[:: max(1, -(-one.shape[0] // _NUMBERS))]
        return rows[(slice(None), *[0] * (one.dim() - 1))][:_NUMBERS]
    # An odd stride, so that not all of them are in one column.
    return one.reshape(-1)[:: max(1, one.numel() // _NUMBERS) | 1][:_NUMBERS]


# What it means.


class Compared(NamedTuple):
    """The records of rank 0 and of the others, of one optimizer in front of one step."""

    layout: Layout
    mine: Record
    others: dict[int, Record]
    began: dict[int, Record | None]
    """Of each rank, rank 0 among them, its record in front of the first step."""


def judge(found: Compared) -> list[Line]:
    """What is seen of the weights, and of the data."""
    layout, mine = found.layout, found.mine
    if layout.why or not found.others:
        return []
    ranks = _named_ranks([0, *found.others])
    if any(one.layout != mine.layout for one in found.others.values()):
        text = f"{ranks} hold parameters of other names or shapes in {layout.name}"
        return [(DRIFT, UNKNOWN, text, {"parameters": len(layout.names)})]
    lines: list[Line] = []
    wrapped = [at for at, one in enumerate(layout.wrappers) if one is not None]
    alone = [at for at, one in enumerate(layout.wrappers) if one is None]
    if wrapped:
        lines += _of_wrapped(found, wrapped)
    if alone and mine.step > 1:
        lines += _of_alone(found, alone)
    return lines + _of_data(found)


def _apart(found: Compared, places: list[int]) -> tuple[list[int], list[int]]:
    """The places at which weights differ, and the ranks with which they do."""
    mine = found.mine.digests
    at = [p for p in places if any(one.digests[p] != mine[p] for one in found.others.values())]
    ranks = [r for r, one in found.others.items() if any(one.digests[p] != mine[p] for p in at)]
    return at, ranks


def _share(found: Compared, places: list[int]) -> float | None:
    """How far apart they are, as a share of the way that they have come; None where that is not known."""
    mine, began = found.mine, found.began.get(0)
    if began is None or began.layout != mine.layout:
        return None
    way = sum((mine.sums[at] - began.sums[at]) ** 2 for at in places)
    apart = max(
        sum((mine.sums[at] - one.sums[at]) ** 2 for at in places) for one in found.others.values()
    )
    share = (apart / way) ** 0.5 if way else None
    return share if share is not None and share == share else None


def _of_wrapped(found: Compared, places: list[int]) -> list[Line]:
    layout, step = found.layout, found.mine.step
    apart, ranks = _apart(found, places)
    numbers: dict[str, Any] = {"parameters": len(places), "different": len(apart)}
    everyone = _named_ranks([0, *found.others])
    if not apart:
        if step == 1:
            return []
        text = f"{everyone} begin step {step} with the same weights: {len(places)} parameters of {layout.name}"
        return [(DRIFT, PASS, text, numbers)]
    share = numbers["apart"] = _share(found, apart)
    text = (
        f"{_named(layout, apart)}: {_these(apart, places)} under DistributedDataParallel differ between "
        f"{_named_ranks([0, *ranks])} in front of step {step}"
    )
    if share is not None and share < _ROUNDING:
        return [
            (DRIFT, FACT, f"{text}, by {share:.1g} of what they moved, as by rounding", numbers)
        ]
    wrappers = {id(one): one for at in apart if (one := layout.wrappers[at]) is not None}.values()
    if any(one.has_hook for one in wrappers):
        text += ": a communication hook of the script's decides how gradients are averaged"
        return [(DRIFT, UNKNOWN, text, numbers)]
    if any(one.is_local for one in wrappers):
        text += ": all backward passes of a step ran inside no_sync(), as in Local SGD"
        return [(DRIFT, SUSPICION, text, numbers)]
    if layout.unknown.issuperset(apart):
        text += ": they were put into the module after it was wrapped"
    elif step == 1:
        text += ": they were changed after the module was wrapped"
    elif not any(one.was_called for one in wrappers):
        text += ": no training step calls its forward, so that no gradient is averaged"
    return [(DRIFT, FAIL, text, numbers)]


def _of_alone(found: Compared, places: list[int]) -> list[Line]:
    """Of parameters that nothing of torch's keeps the same."""
    layout, mine = found.layout, found.mine
    apart, ranks = _apart(found, places)
    numbers: dict[str, Any] = {"parameters": len(places), "different": len(apart)}
    everyone = _named_ranks([0, *found.others])
    if not apart:
        text = f"{everyone} begin step {mine.step} with the same weights: {len(places)} parameters of {layout.name}"
        return [(DRIFT, PASS, text, numbers)]
    equal = _began_equal(found, places)
    if equal is None:
        return []
    which = f"{_named(layout, apart)}: {_these(apart, places)} of {layout.name}"
    if not equal:
        text = f"{which} differ between {_named_ranks([0, *ranks])}, and some did in front of the first step: models "
        return [(DRIFT, FACT, text + "of their own, or parts of one", numbers)]
    share = numbers["apart"] = _share(found, apart)
    text = f"{which} were the same on {everyone} at first, and differ in front of step {mine.step}"
    if share is not None and share < _ROUNDING:
        return [
            (DRIFT, FACT, f"{text}, by {share:.1g} of what they moved, as by rounding", numbers)
        ]
    text += ": no DistributedDataParallel is around them, and nothing else averages their gradients"
    return [(DRIFT, SUSPICION, text, numbers)]


def _began_equal(found: Compared, places: Iterable[int]) -> bool | None:
    """Whether all ranks began with the same weights; None where that was not seen."""
    mine = found.began.get(0)
    others = [found.began.get(rank) for rank in found.others]
    if mine is None or any(one is None or one.layout != mine.layout for one in others):
        return None
    return all(
        one is not None and one.digests[at] == mine.digests[at] for one in others for at in places
    )


def _of_data(found: Compared) -> list[Line]:
    """Whether ranks that train one model trained on the same batches so far."""
    mine, everyone = found.mine.batches, _named_ranks([0, *found.others])
    most = min([len(mine), *(len(one.batches) for one in found.others.values())])
    if most < _LEAST:
        return []
    same = [_are_same(mine[:most], one.batches[:most]) for one in found.others.values()]
    if None in same:
        return []
    numbers = {"batches": most, "ranks": len(found.others) + 1}
    if not any(same):
        text = f"{everyone} trained on other data in their first {most} batches"
        return [(DATA, PASS, text, numbers)]
    every = range(len(found.layout.names))
    if not all(same) or len({content for _, content in mine[:most]}) < _LEAST:
        return []
    # Parts of one model are to read the same.
    if not _began_equal(found, every):
        return []
    text = (
        f"{everyone} trained on the same data in their first {most} batches: each reads all of it"
    )
    return [(DATA, SUSPICION, text, numbers)]


def _are_same(mine: list[list[str]], other: list[list[str]]) -> bool | None:
    """Whether two ranks read the same batches; None where that cannot be told."""
    pairs = list(zip(mine, other, strict=True))
    if all(a[1] and a[1] == b[1] for a, b in pairs):
        return True
    if any(a[0] and b[0] and a[0] != b[0] for a, b in pairs):
        return False
    # Indices of data that each rank cut for itself are the same, and samples may be altered at random.
    has_indices = all(a[0] for a, _ in pairs)
    return None if has_indices or not all(a[1] and b[1] for a, b in pairs) else False


def _named(layout: Layout, places: list[int]) -> str:
    names = [layout.names[at] for at in places[:NAMED]]
    return ", ".join(names) + ", ..." * (len(places) > NAMED)


def _these(apart: list[int], places: list[int]) -> str:
    return f"{len(apart)} of {len(places)} parameters"


def _named_ranks(ranks: list[int]) -> str:
    ranks = sorted(ranks)
    if len(ranks) > 4:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


# What happens on this rank.


class Ranks:
    """Told of the batches, backward passes and steps of this process; nothing is done where there is one rank."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._wrappers: Wrappers | None = None
        self._searches = _SEARCHES
        self._layouts: weakref.WeakKeyDictionary[Any, tuple[int, Layout]] = (
            weakref.WeakKeyDictionary()
        )
        self._count = 0
        self._asked: weakref.WeakKeyDictionary[Any, tuple[int, deque[str]]] = (
            weakref.WeakKeyDictionary()
        )
        self._latest: list[str] | None = None
        self._batches: list[list[str]] = []
        self._new: deque[Look] = deque(maxlen=_LOOKS)
        """Of the step in progress, whose training is not known yet."""
        self._looks: deque[Look] = deque(maxlen=_LOOKS)
        self._forget_training()

    def _forget_training(self) -> None:
        self._others: Others | None = None
        self._open: dict[tuple[int, int], tuple[Layout, Record]] = {}
        """What rank 0 has to compare."""
        self._began: dict[int, Record] = {}
        self._has_said = False
        self._read_s = 0.0

    def optimizer_made(self) -> None:
        """What follows may be another training."""
        self._wrappers, self._latest, self._batches = None, None, []
        self._asked.clear()

    # Data.

    def samples_asked_for(self, iterator: Any, index: Any) -> None:
        if len(self._batches) >= _BATCHES or rank_and_world(self._torch)[1] < 2:
            return
        began, asked = self._asked.get(iterator, (0, deque()))
        # The iterator of workers that stay is that of the pass before.
        if began != id(iterator._sampler_iter):
            asked = deque()
        self._asked[iterator] = id(iterator._sampler_iter), asked
        indices = index if isinstance(index, (list, tuple)) else [index]
        seen = all(type(one) is int for one in indices)
        asked.append(_digest(repr(list(indices)).encode()) if seen else "")

    def batch_fetched(self, iterator: Any, batch: Any) -> None:
        asked = self._asked.get(iterator)
        if asked is None or len(self._batches) >= _BATCHES:
            return
        index = asked[1].popleft() if asked[1] else ""
        content = print_of(self._torch, batch)
        self._latest = [index, "" if content is None else _digest(b"".join(content))]

    def backward_begins(self) -> None:
        if rank_and_world(self._torch)[1] < 2 or is_capturing(self._torch):
            return
        if self._latest is not None and len(self._batches) < _BATCHES:
            self._batches.append(self._latest)
        self._latest = None
        if self._wrappers is None:
            self._search()
        for wrapper in self._wrappers.replicated if self._wrappers is not None else ():
            wrapper.backward_begins()

    def _search(self) -> None:
        self._searches -= 1
        self._wrappers = Wrappers(self._torch) if self._searches >= 0 else None

    # Weights.

    def step_begins(self, optimizer: Any, step: int, is_sampled: bool) -> None:
        if rank_and_world(self._torch)[1] < 2 or is_capturing(self._torch):
            return
        number, layout = self._layouts.get(optimizer, (self._count, None))
        if layout is not None:
            for wrapper in layout.each_wrapper():
                wrapper.step_begins()
        if not is_sampled:
            return
        if layout is None or not layout.is_of(optimizer):
            self._count += layout is None
            if self._wrappers is None or layout is not None:
                self._search()
            self._searches -= 1
            if self._wrappers is None or self._searches < 0:
                return
            layout = Layout(self._torch, optimizer, self._wrappers)
            self._layouts[optimizer] = number, layout
            for wrapper in layout.each_wrapper():
                wrapper.step_begins()
        for wrapper in layout.each_wrapper():
            wrapper.look()
        with self._torch.no_grad():
            self._new.append(Look(self._torch, number, step, layout, self._batches))

    # Between ranks.

    def step_ends(self, folder: str | None, rank: int, world: int) -> list[Noticed]:
        """The step in progress belongs to the training of this folder: what is known by now."""
        self._looks += self._new
        self._new.clear()
        if folder is None or world < 2 or not (self._looks or self._open):
            return []
        return self._exchange(folder, rank, world, is_last=False)

    def training_ends(
        self, folder: str | None, rank: int, world: int, at_exit: bool
    ) -> list[Noticed]:
        """What the others have said by now is all that is compared; at the exit a GPU gets a moment."""
        found: list[Noticed] = []
        if folder is not None and world > 1:
            deadline = time.monotonic() + _EXIT_WAIT_S * at_exit
            while time.monotonic() < deadline and not all(one.has_passed() for one in self._looks):
                time.sleep(0.001)
            found = self._exchange(folder, rank, world, is_last=True)
        self._looks.clear()
        self._forget_training()
        return found

    def _exchange(self, folder: str, rank: int, world: int, is_last: bool) -> list[Noticed]:
        ready: list[tuple[Layout, Record]] = []
        with self._torch.no_grad():
            while self._looks and self._looks[0].has_passed():
                look = self._looks.popleft()
                ready.append((look.layout, look.record()))
        if rank:
            write(folder, rank, [record for layout, record in ready if not layout.why])
            return []
        found: list[Noticed] = []
        for layout, record in ready:
            if layout.why:
                found += self._say_why(layout.why)
                continue
            if record.step == 1:
                self._began[record.optimizer] = record
            self._open[record.optimizer, record.step] = layout, record
            if len(self._open) > _LOOKS:
                del self._open[next(iter(self._open))]
        now = time.monotonic()
        if not self._open or not (is_last or now - self._read_s > _READ_EVERY_S):
            return found
        self._read_s = now
        if self._others is None:
            self._others = Others(folder)
        here = _ranks_here(world)
        self._others.look(one for one in here if one)
        for key, (layout, record) in list(self._open.items()):
            found += self._compare(key, layout, record, here, is_last)
        if is_last and self._open:
            found += self._say_why(_nothing_came(len(here), world))
        return found

    def _say_why(self, why: str) -> list[Noticed]:
        if self._has_said:
            return []
        self._has_said = True
        return [Noticed([(DRIFT, UNKNOWN, why, {})])]

    def _compare(
        self,
        key: tuple[int, int],
        layout: Layout,
        record: Record,
        here: list[int],
        is_last: bool,
    ) -> list[Noticed]:
        assert self._others is not None
        groups = [one.ranks for one in layout.each_wrapper()]
        expected = [r for r in here if r and all(r in group for group in groups)]
        found = {rank: self._others.of(rank, *key) for rank in expected}
        come = {rank: one for rank, one in found.items() if one is not None}
        if not expected:
            del self._open[key]
            return []
        # A rank that has never said anything is not waited for longer than until the next look.
        is_old = any(optimizer == key[0] and step > key[1] for optimizer, step in self._open)
        missing = [
            r
            for r, one in found.items()
            if one is None and (not is_old or self._others.has_come(r))
        ]
        if not come or (missing and not is_last):
            return []
        del self._open[key]
        optimizer = record.optimizer
        began = {rank: self._others.of(rank, optimizer, 1) for rank in come}
        lines = judge(Compared(layout, record, come, {0: self._began.get(optimizer), **began}))
        self._has_said = self._has_said or bool(lines)
        return [Noticed(lines, record.step)] if lines else []


def _ranks_here(world: int) -> list[int]:
    """The ranks of this host, of which rank 0 is one."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return list(range(min(world, int(count)) if count.isdecimal() and int(count) else world))


def _nothing_came(here: int, world: int) -> str:
    if here < world:
        return f"{world - here} of {world} ranks are on other hosts, and no other rank of this one has said its weights"
    return "no other rank has said its weights: they are on other hosts, step other optimizers, or ended before"
