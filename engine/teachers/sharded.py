"""A teacher's layers shared out over the ranks: each holds 1/world of every layer, and gathers a layer when
it computes.

    part of layer i    this rank's share of the layer's bytes, all that it keeps of it
    buffer i % 2       two of the largest layer's size, where layers are put together

    compute     | layer 0        | layer 1        | layer 2 ...
    gathering   | 1 -> buffer 1  | 2 -> buffer 0  | 3 -> buffer 1

A layer is gathered while the one before it computes, on a stream of its own, once the last layer to lie
in its buffer is done with it. After the last layer comes the first: where layers are an even number it is
there already when the next batch begins.

Bytes are gathered, not numbers: floats, blocks and 8-bit codes alike, and of weights in blocks a third of
what they are as floats. A layer's modules hold views of its buffer at places that never change, so a
compiled layer, a joined matrix and planes of blocks are what they are in a teacher that is whole, and so
is every bit of what it answers. FSDP2 shards parameters, of which a frozen teacher has none.

Every gathering is a collective of the run's one group: in the order of the program, which is the same on
every rank. Whoever reads a layer's weights says so first (`Decoder.reach`), and so on every rank.

Embedding, last norm and head are whole on every rank. Not covered: a rank that would ask the teacher alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.errors import InternalError
from engine.models.decoder import Decoder
from engine.models.packed import PackedLinear
from engine.runtime.ranks import Ranks

BUFFERS = 2
ALIGNMENT_BYTES = 512
"""Of each tensor in a buffer, and of each rank's share: that of torch's allocator, for the same kernels."""


class _Place(NamedTuple):
    """Where a tensor of a layer lies in its buffer."""

    module: nn.Module
    name: str
    dtype: torch.dtype
    first: int
    """In numbers of `dtype`."""
    shape: torch.Size
    stride: tuple[int, ...]


class ShardedLayers:
    """`take` is called with each layer of a frozen decoder as it is loaded, `install` once they all are.
    `entering` is called before each gathering.
    """

    def __init__(
        self, ranks: Ranks, device: torch.device, entering: Callable[[], None] = lambda: None
    ) -> None:
        self._ranks, self._device, self._entering = ranks, device, entering
        self._parts: list[Tensor] = []
        self._places: list[list[_Place]] = []
        self._buffers: list[Tensor] = []
        self._lies: list[int | None] = [None] * BUFFERS
        """Which layer's bytes each buffer has, or is being given."""
        self._arrived: list[Any] = [None] * BUFFERS
        self._stream: Any = None
        self.gathered = 0
        """Layers put together so far."""

    @property
    def parts(self) -> list[Tensor]:
        return self._parts

    def take(self, layer: nn.Module) -> None:
        """Keep this rank's part of a layer, whose tensors are gone then until `install`."""
        if any(True for _ in layer.parameters()):
            raise InternalError("sharded teacher: expected a frozen layer, found parameters")
        starts: dict[int, int] = {}
        storages: list[tuple[int, torch.UntypedStorage]] = []
        places: list[_Place] = []
        size = 0
        for module in layer.modules():
            # Some are no buffers: what joined layers multiply by, of which each holds its rows.
            own = {n: t for n, t in vars(module).items() if isinstance(t, Tensor)}
            own |= dict(module.named_buffers(recurse=False))
            for name, tensor in own.items():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in starts:
                    starts[storage.data_ptr()] = size
                    storages.append((size, storage))
                    size = _aligned(size + storage.nbytes())
                first = starts[storage.data_ptr()] // tensor.itemsize + tensor.storage_offset()
                places.append(
                    _Place(module, name, tensor.dtype, int(first), tensor.shape, tensor.stride())
                )
        self._parts.append(self._own_part(storages, size))
        self._places.append(places)
        for place in places:
            like = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")
            setattr(place.module, place.name, like)
            if isinstance(place.module, PackedLinear):
                _ = place.module.packed  # which would hold the blocks as they were loaded

    def _own_part(self, storages: list[tuple[int, torch.UntypedStorage]], size: int) -> Tensor:
        each = _aligned(-(-size // self._ranks.world))
        begin = self._ranks.rank * each
        part = torch.zeros(each, dtype=torch.uint8, device=self._device)
        for start, storage in storages:
            low, high = max(start, begin), min(start + storage.nbytes(), begin + each)
            if low < high:
                held = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                part[low - begin : high - begin] = held[low - start : high - start]
        return part

    def install(self, decoder: Decoder) -> None:
        """Allocate the buffers, and put the layers' tensors into them."""
        largest = max(len(part) for part in self._parts)
        self._buffers = [
            torch.empty(self._ranks.world * largest, dtype=torch.uint8, device=self._device)
            for _ in range(min(BUFFERS, len(self._parts)))
        ]
        if self._device.type == "cuda":
            # First in line: layers wait for what is gathered.
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            self._arrived = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        for index, places in enumerate(self._places):
            storage = self._buffers[index % BUFFERS].untyped_storage()
            for place in places:
                empty = torch.empty(0, dtype=place.dtype, device=self._device)
                tensor = empty.set_(storage, place.first, place.shape, place.stride)
                setattr(place.module, place.name, tensor)
        decoder.shards = self

    def arrive(self, index: int) -> None:
        """See `engine.models.decoder.Shards`; begins with the layer after it too."""
        self._gather(index)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived[index % BUFFERS])
        following = (index + 1) % len(self._parts)
        if following % BUFFERS != index % BUFFERS:
            self._gather(following)

    def _gather(self, index: int) -> None:
        if self._lies[index % BUFFERS] == index:
            return
        self._lies[index % BUFFERS] = index
        self.gathered += 1
        self._entering()
        part = self._parts[index]
        buffer = self._buffers[index % BUFFERS][: self._ranks.world * len(part)]
        if self._stream is None:
            dist.all_gather_into_tensor(buffer, part)
            return
        # What was launched so far is the last to read what lies there.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            dist.all_gather_into_tensor(buffer, part)
            self._arrived[index % BUFFERS].record(self._stream)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
