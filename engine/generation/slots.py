"""Keep the state of all running sequences on the device, and run their steps. Each sequence has a slot.

    begin     runs prompts into some slots and chooses their first tokens
    step      runs one token of every slot and chooses the next; with the engine's kernels as a CUDA graph
    stop      makes slots idle

Tokens are chosen on the device and copied to the host, which may read them some steps later (`Chosen`). A
sequence that reaches its end or its limit becomes idle on the device at once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.generation.forward import (
    Forward,
    NativeForward,
    Start,
    TransformersForward,
    device_of,
)
from engine.generation.pages import PagedCache
from engine.generation.sampling import Sampling, choose, truncate, uniform
from engine.generation.size import PAGE, pages_for
from engine.models.decoder import Decoder
from engine.models.fused import has_kernels
from engine.models.transformers_decoder import TransformersDecoder

# Shapes: B slots, N slots that begin, V vocabulary, E ends of text

HISTORY = 8
"""Maximum number of launched steps and prompt passes whose tokens the host has not read yet."""


class Admitted(NamedTuple):
    """A sequence that gets a slot."""

    slot: int
    prompt: Sequence[int]
    key: int
    limit: int
    pages: list[int]
    like: int | None
    """Index in the list of an earlier sequence with the same prompt, whose pages hold it; None if there is none."""


class Chosen(NamedTuple):
    """The tokens of one step, which are being copied to the host."""

    both_2B: Tensor
    """int32 in host memory: tokens, and the bits of their log-probabilities."""
    arrived: torch.cuda.Event | None
    """Event of the copy; None if the tokens are already in host memory."""

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Wait, and return copies of the tokens and their log-probabilities. If n > 0 logits of a slot are not finite,
        its token is -n.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        both = self.both_2B.numpy().copy()
        return both[0], both[1].view(np.float32)


class Slots:
    """The slots of one generation. `capacity`: maximum number of tokens of a sequence; `pages`: number of pages of
    the cache.
    """

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        capacity: int,
        pages: int,
        sampling: Sampling,
        ends: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> None:
        device = device_of(decoder)
        self._sampling, self._device, self._slots = sampling, device, slots
        self.cache: PagedCache | None = None
        self._dtype = decoder.dtype if dtype is None else dtype
        self._casts = self._dtype != decoder.dtype
        self._forward = self._forward_of(decoder, slots, capacity, pages)
        self._on_gpu = device.type == "cuda"
        self._kernels = not isinstance(decoder, TransformersDecoder) and has_kernels(device)

        def full(dtype: torch.dtype, value: int = 0) -> Tensor:
            return torch.full((slots,), value, dtype=dtype, device=device)

        i32, i64 = torch.int32, torch.int64
        self._out_2B = torch.zeros(2, -(-slots // 4) * 4, dtype=i32, device=device)
        self._state = (
            *(full(i64), full(i32, -1), full(i32), full(i32), full(i64)),
            *(self._out_2B[0, :slots], self._out_2B[1, :slots].view(torch.float32)),
        )
        self._token, self._position, self._count, self._limit, self._key, *_ = self._state
        # Padded to a power of two by repetition; an empty set becomes -1, which is no token.
        end_ids = list(ends) or [-1]
        end_ids += end_ids[-1:] * ((1 << (len(end_ids) - 1).bit_length()) - len(end_ids))
        self._ends = torch.tensor(end_ids, dtype=i32, device=device)
        self._all_slots = torch.arange(slots, dtype=i32, device=device)
        self._pinned = deque(
            torch.empty(self._out_2B.shape, dtype=i32, pin_memory=self._on_gpu)
            for _ in range(HISTORY)
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        if self._kernels:
            from engine.kernels.prewarm import warm_up  # which needs triton
            from engine.kernels.registry import REGISTRY

            # Compiles all kernels of a step, several at a time.
            with REGISTRY.noting() as kernels:
                self._run()
            warm_up(kernels)
            self._capture()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Copy the model's weights again, where the forward pass has copies of them."""
        self._forward.refresh()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return an autocast context if the model computes in another dtype than its weights have. Autocast's cache of
        cast weights ends with the context, so that a step uses the weights of the last update.
        """
        if not self._casts:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def _forward_of(self, decoder: Decoder, slots: int, capacity: int, pages: int) -> Forward:
        if isinstance(decoder, TransformersDecoder):
            return TransformersForward(decoder, slots)
        self.cache = PagedCache(
            decoder.config,
            pages=pages,
            slots=slots,
            slot_pages=pages_for(capacity),
            dtype=self._dtype,
            device=self._device,
        )
        if has_kernels(self._device):
            from engine.generation.fused import FusedForward, coverage  # which needs triton

            if coverage(decoder, self._dtype) is None:
                return FusedForward(decoder, self.cache)
        return NativeForward(decoder, self.cache)

    @torch.inference_mode()
    def begin(self, admitted: Sequence[Admitted]) -> Chosen:
        """Run the prompts of sequences into their slots and choose their first tokens."""
        starts: list[Start] = []
        source: list[int] = []
        for sequence in admitted:
            if sequence.like is None or self.cache is None:
                source.append(len(starts))
                starts.append(Start(sequence.slot, sequence.prompt, sequence.pages))
            else:
                source.append(source[sequence.like])
        slots = [sequence.slot for sequence in admitted]
        if self.cache is not None:
            self.cache.set_tables(slots, [sequence.pages for sequence in admitted])
        with self._autocast():
            logits_NV = self._forward.start(starts)
        if self.cache is not None:
            self._copy_shared(admitted)
        state_5N = torch.tensor(
            [
                [0] * len(admitted),
                [len(sequence.prompt) - 1 for sequence in admitted],
                [0] * len(admitted),
                [sequence.limit for sequence in admitted],
                [sequence.key for sequence in admitted],
            ],
            device=self._device,
        )
        slot_N = torch.tensor(slots, dtype=torch.int32, device=self._device)
        for state_B, part_N in zip(self._state[:5], state_5N, strict=True):
            state_B[slot_N.long()] = part_N.to(state_B.dtype)
        source_N = torch.tensor(source, dtype=torch.int32, device=self._device)
        self._choose(logits_NV, source_N, slot_N)
        return self._copy_to_host()

    def _copy_shared(self, admitted: Sequence[Admitted]) -> None:
        """Copy the prompt's last, partly filled page to the sequences that share the prompt."""
        assert self.cache is not None
        pairs = [
            (
                admitted[sequence.like].pages[len(sequence.prompt) // PAGE],
                sequence.pages[len(sequence.prompt) // PAGE],
            )
            for sequence in admitted
            if sequence.like is not None and len(sequence.prompt) % PAGE
        ]
        self.cache.copy([first for first, _ in pairs], [second for _, second in pairs])

    @torch.inference_mode()
    def step(self) -> Chosen:
        """Run one token of every slot."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        return self._copy_to_host()

    @torch.inference_mode()
    def stop(self, slots: Sequence[int]) -> None:
        """Make slots idle."""
        self._position[torch.tensor(list(slots), device=self._device)] = -1

    def _run(self) -> None:
        with self._autocast():
            logits_BV = self._forward.step(self._token, self._position)
        self._choose(logits_BV, self._all_slots, self._all_slots)

    def _capture(self) -> None:
        """Run one step, so that all memory is allocated and all kernels are loaded, and capture the next as a CUDA
            graph. All
        slots must be idle."""
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._run()
            torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture, for example to hash a model.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._run()
        self._graph = graph

    def _choose(self, logits: Tensor, source_N: Tensor, slot_N: Tensor) -> None:
        if self._kernels:
            self._choose_by_kernel(logits, source_N, slot_N)
        else:
            self._choose_by_torch(logits, source_N.long(), slot_N.long())

    def _choose_by_kernel(self, logits: Tensor, source_N: Tensor, slot_N: Tensor) -> None:
        from engine.kernels.choose import SlotState  # which needs triton
        from engine.kernels.choose import choose as launch_choose

        sampling, state = self._sampling, SlotState(*self._state)
        if not sampling.truncates:
            launch_choose(logits, source_N, slot_N, self._ends, state, sampling.temperature)
            return
        scores = logits.float() / sampling.temperature
        log_sum = scores.logsumexp(-1)
        kept = truncate(scores, sampling)
        # The scores are already divided by the temperature.
        launch_choose(kept, source_N, slot_N, self._ends, state, 1.0)
        token_N = state.token_B[slot_N.long()]
        log_p_N = scores[source_N.long(), token_N] - log_sum[source_N.long()]
        state.log_p_B[slot_N.long()] = log_p_N

    def _choose_by_torch(self, logits: Tensor, source_N: Tensor, slot_N: Tensor) -> None:
        busy_N = (self._position[slot_N] >= 0).nonzero()[:, 0]
        source_N, slot_N = source_N[busy_N], slot_N[busy_N]
        keys, counts = self._key[slot_N].tolist(), self._count[slot_N].tolist()
        drawn = [uniform(key, count) for key, count in zip(keys, counts, strict=True)]
        uniform_N = torch.tensor(drawn, dtype=torch.float64, device=self._device)
        token_N, log_p_N, bad_N = choose(logits[source_N], self._sampling, uniform_N)
        count_N = self._count[slot_N] + 1
        ended_N = torch.isin(token_N, self._ends) | (count_N >= self._limit[slot_N]) | (bad_N > 0)
        self._token[slot_N] = token_N
        self._position[slot_N] = torch.where(ended_N, -1, self._position[slot_N] + 1)
        self._count[slot_N] = count_N
        self._state[5][slot_N] = torch.where(bad_N > 0, -bad_N, token_N).int()
        self._state[6][slot_N] = log_p_N

    def _copy_to_host(self) -> Chosen:
        # The oldest of HISTORY buffers, whose tokens the host has already read.
        pinned = self._pinned.popleft()
        self._pinned.append(pinned)
        pinned.copy_(self._out_2B, non_blocking=True)
        if not self._on_gpu:
            return Chosen(pinned, None)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return Chosen(pinned, arrived)
