"""Shard a teacher's layers over the ranks: each rank holds 1/world of every layer and all-gathers
a layer before it computes it.

    part of layer i    this rank's share of the layer's bytes, all that it keeps of the layer
    buffer i % 2       one of two buffers, each the size of the largest layer, for gathered layers

    compute     | layer 0        | layer 1        | layer 2 ...
    gather      | 1 -> buffer 1  | 2 -> buffer 0  | 3 -> buffer 1

A layer is gathered on a stream of its own while the layer before it computes, once the previous
layer in its buffer is no longer in use. The first layer follows the last: if the number of layers
is even, it is already gathered when the next batch begins.

The gather moves raw bytes, so it works alike for floats, quantised blocks and fp8 codes, and
block-quantised weights cost a third of the traffic of floats. A layer's modules hold views into its
buffer at fixed addresses, so joined matrices and block planes work as in an unsharded teacher, and the
output is bit-identical. FSDP2 shards parameters, of which
a frozen teacher has none.

Every gather is a collective of the run's single process group, issued in program order, which is
the same on every rank. Code that reads a layer's weights must call `Decoder.gather_for` first, on every
rank.

The embedding, the last norm and the head are replicated on every rank. Not covered: one rank
running the teacher alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.models.decoder import Decoder
from engine.models.packed import PackedLinear
from engine.runtime.ranks import Ranks

BUFFERS = 2
"""Number of buffers for gathered layers."""
ALIGNMENT_BYTES = 512
"""Alignment of each tensor in a buffer and of each rank's share. It equals that of torch's
allocator, so that the same kernels are chosen.
"""


class _Place(NamedTuple):
    """The position of a layer's tensor in its buffer."""

    module: nn.Module
    name: str
    dtype: torch.dtype
    first: int
    """Offset in elements of `dtype`."""
    shape: torch.Size
    stride: tuple[int, ...]


class ShardedLayers:
    """Call `take` with each layer of a frozen decoder as it is loaded, and `install` once all are
    loaded. `entering` is called before each gather.
    """

    def __init__(
        self, ranks: Ranks, device: torch.device, entering: Callable[[], None] = lambda: None
    ) -> None:
        self._ranks, self._device, self._entering = ranks, device, entering
        self._parts: list[Tensor] = []
        self._places: list[list[_Place]] = []
        self._buffers: list[Tensor] = []
        self._layer_in_buffer: list[int | None] = [None] * BUFFERS
        """Index of the layer that each buffer holds or is receiving."""
        self._gathered_events: list[Any] = [None] * BUFFERS
        self._stream: Any = None
        self.gathered = 0
        """Number of layer gathers so far."""

    @property
    def parts(self) -> list[Tensor]:
        return self._parts

    def take(self, layer: nn.Module) -> None:
        """Keep this rank's part of a layer. The layer's own tensors are gone until `install`."""
        starts: dict[int, int] = {}
        storages: list[tuple[int, torch.UntypedStorage]] = []
        places: list[_Place] = []
        size = 0
        for module in layer.modules():
            # Not all tensors are buffers: joined layers also hold the joined matrix as a plain
            # attribute.
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
                # Drops the cached matrix, which would keep the loaded blocks in memory.
                _ = place.module.packed

    def _own_part(self, storages: list[tuple[int, torch.UntypedStorage]], size: int) -> Tensor:
        part_bytes = _aligned(-(-size // self._ranks.world))
        begin = self._ranks.rank * part_bytes
        part = torch.zeros(part_bytes, dtype=torch.uint8, device=self._device)
        for start, storage in storages:
            low, high = max(start, begin), min(start + storage.nbytes(), begin + part_bytes)
            if low < high:
                source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                part[low - begin : high - begin] = source[low - start : high - start]
        return part

    def install(self, decoder: Decoder) -> None:
        """Allocate the buffers and make the layers' tensors views into them."""
        largest = max(len(part) for part in self._parts)
        self._buffers = [
            torch.empty(self._ranks.world * largest, dtype=torch.uint8, device=self._device)
            for _ in range(min(BUFFERS, len(self._parts)))
        ]
        if self._device.type == "cuda":
            # High priority, because layers wait for the gathered weights.
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            self._gathered_events = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        for index, places in enumerate(self._places):
            storage = self._buffers[index % BUFFERS].untyped_storage()
            for place in places:
                empty = torch.empty(0, dtype=place.dtype, device=self._device)
                tensor = empty.set_(storage, place.first, place.shape, place.stride)
                setattr(place.module, place.name, tensor)
        decoder.shards = self

    def gather_layer(self, index: int) -> None:
        """See `engine.models.decoder.Shards`. This also starts gathering the next layer."""
        self._gather(index)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(
                self._gathered_events[index % BUFFERS]
            )
        following = (index + 1) % len(self._parts)
        if following % BUFFERS != index % BUFFERS:
            self._gather(following)

    def _gather(self, index: int) -> None:
        if self._layer_in_buffer[index % BUFFERS] == index:
            return
        self._layer_in_buffer[index % BUFFERS] = index
        self.gathered += 1
        self._entering()
        part = self._parts[index]
        buffer = self._buffers[index % BUFFERS][: self._ranks.world * len(part)]
        if self._stream is None:
            dist.all_gather_into_tensor(buffer, part)
            return
        # The work launched so far is the last to read what the buffer holds.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            dist.all_gather_into_tensor(buffer, part)
            self._gathered_events[index % BUFFERS].record(self._stream)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
