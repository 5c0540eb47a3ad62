"""Decodes one token of every row on a GPU, without synchronising with the host.

A step applies the decoder's own weights in few kernels: the matmuls (`engine.kernels.small_m`, or
the library's for dense weights) and the operations between them. `engine.models.decoder` is the
reference, and runs the prompts. Lengths, positions and tokens are on the device, so every step does
the same work at the same addresses: the launches are captured once as a CUDA graph and replayed.
The host then makes one launch per token instead of 230, which would take longer than the kernels
themselves.

    start    runs one prompt by itself into a row, so its result depends on nothing else
    step     decodes one token of every row, idle rows included
    chosen   the tokens of a step, available once the device has finished; the host may lag by some steps

The bits of a row do not depend on the number of rows: the kernels for block-quantised weights
guarantee this, and dense matmuls always have 8 rows, which takes as long as one.

`Step` holds the launches of one decode step. Between the matmuls of a layer there are 5 launches:
norm, attention and its reduction, norm, gate (`engine.kernels.decode`). With block-quantised
weights the division by the RMS is deferred to the consumer of the matmul's output (`Undivided`).

All tensors are allocated before the first launch and kept, because a replay needs fixed addresses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.kernels import decode_launch, small_m
from engine.kernels.decode_choose import Best, empty_best
from engine.kernels.decode_choose import choose as launch_choose
from engine.kernels.decode_launch import (
    Heads,
    Out,
    Parts,
    Undivided,
    empty_scratch,
    empty_squares,
    parts_of,
)
from engine.kernels.dependent_launch import can_be_early
from engine.kernels.prewarm import warm_up
from engine.kernels.registry import REGISTRY
from engine.kernels.small_m_inputs import empty_inputs
from engine.models.decode import HISTORY, LEAST_CAPABILITY, ROWS, Chosen, Sampling, draw
from engine.models.decoder import Attention, Decoder, Layer, Past, RMSNorm, frequencies
from engine.models.packed import PackedLinear

# Shapes: M rows of a step, V vocabulary, S slots, K key/value heads, E a head's width, R half of it


class DecodeSteps:
    """The rows of one generation: their KV caches and the launches of their steps.

    `capacity` is the maximum number of tokens per row. With `graph`, steps are CUDA graph replays.
    With `early`, kernels start before the previous one has ended, on GPUs that support it; the bits
    are the same. The decoder must be covered (`coverage`). Without a graph this also runs on a CPU,
    in Triton's interpreter.
    """

    def __init__(
        self,
        decoder: Decoder,
        rows: int,
        capacity: int,
        *,
        graph: bool = True,
        early: bool = True,
        sampling: Sampling | None = None,
    ) -> None:
        config = decoder.config
        device = decoder.norm.weight.device
        self._decoder, self._rows, self._device = decoder, rows, device
        self._capacity = capacity
        self._sampling = sampling
        on_gpu = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if on_gpu else LEAST_CAPABILITY
        arch = capability[0] * 10 + capability[1]
        early = early and on_gpu and can_be_early(arch)
        self._step = Step(decoder, rows, capacity, arch=arch, early=early)
        self._token = torch.zeros(rows, dtype=torch.int64, device=device)
        self._position = torch.zeros(rows, dtype=torch.int32, device=device)
        self._chosen = torch.zeros(rows, dtype=torch.int32, device=device)
        self._best = empty_best(rows, config.vocab_size, device)
        self._uniform: Tensor | None = None
        """Uniform numbers for the draws of each row, of which `_count` are used up."""
        self._count = torch.zeros(rows, dtype=torch.int64, device=device)
        if sampling is not None and sampling.temperature > 0:
            self._uniform = torch.zeros(rows, capacity, dtype=torch.float64, device=device)
        self._pinned = deque(
            torch.empty(rows, dtype=torch.int32, pin_memory=on_gpu) for _ in range(HISTORY)
        )
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if on_gpu:
            # Compiles all kernels of a step, several in parallel.
            with REGISTRY.noting() as wanted:
                self._run()
            warm_up(wanted)
        if graph:
            self._capture()

    @property
    def vocab_size(self) -> int:
        return self._decoder.config.vocab_size

    def uniform(self, random: torch.Generator, count: int) -> Tensor | None:
        """Return the uniform numbers of `count` draws, the same as when drawn one by one; None if
        tokens are not sampled.
        """
        if self._uniform is None:
            return None
        drawn = [torch.rand((), generator=random, dtype=torch.float64) for _ in range(count)]
        return torch.stack(drawn)

    def start(self, row: int, prompt: Sequence[int], uniform: Tensor | None = None) -> Chosen:
        """Run a prompt into a row and choose the next token. `uniform` are the numbers of the row's
        draws, float64 on the host, if tokens are sampled.
        """
        config, decoder = self._decoder.config, self._decoder
        tokens_BT = torch.tensor([list(prompt)], device=self._device)
        position_BT = torch.arange(len(prompt), device=self._device)[None]
        # Sized by the prompt and not by the rows' capacity: the length is part of a matmul's shape.
        shape = (1, len(prompt), config.num_key_value_heads, config.head_dim)
        pasts = [
            Past(keys.new_empty(shape), keys.new_empty(shape), position_BT)
            for keys, _ in self._step.caches
        ]
        hidden_BTD = decoder.hidden_with_past(tokens_BT, pasts)
        logits_BV = decoder.logits_of(hidden_BTD[:, -1:])[:, 0]
        for (keys, values), past in zip(self._step.caches, pasts, strict=True):
            keys[row, : len(prompt)] = past.keys_BSKE[0]
            values[row, : len(prompt)] = past.values_BSKE[0]
        self._position[row] = len(prompt) - 1
        if self._uniform is not None:
            assert uniform is not None
            self._uniform[row, : len(uniform)] = uniform.to(self._device)
            self._count[row] = 0
        one = slice(row, row + 1)
        # Through separate, aligned buffers, as the kernels need them, and then copied into the row.
        token, position, chosen = (
            each[one].clone() for each in (self._token, self._position, self._chosen)
        )
        best = type(self._best)(*(each[:1].clone() for each in self._best))
        self._choose(logits_BV.contiguous(), best, token, position, chosen, row)
        for whole, part in (
            (self._token, token),
            (self._position, position),
            (self._chosen, chosen),
        ):
            whole[one] = part
        return self._sent()

    def step(self) -> Chosen:
        """Decode one token of every row."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        return self._sent()

    def logits(self) -> Tensor:
        """Return the logits of the last step, (M, V)."""
        assert self._logits is not None
        return self._logits

    def _sent(self) -> Chosen:
        # The oldest of HISTORY buffers, whose tokens have been read long ago.
        pinned_M = self._pinned.popleft()
        self._pinned.append(pinned_M)
        pinned_M.copy_(self._chosen, non_blocking=True)
        if self._device.type != "cuda":
            return Chosen(pinned_M, None)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return Chosen(pinned_M, arrived)

    def _capture(self) -> None:
        """Run one step, so that everything is allocated and loaded, and capture the next."""
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._run()
            torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._run()
        for each in (self._token, self._position, self._chosen, self._count):
            each.zero_()
        self._graph = graph

    def _run(self) -> None:
        self._logits = self._step.logits(self._token, self._position)
        self._choose(self._logits, self._best, self._token, self._position, self._chosen, None)

    def _choose(
        self,
        logits: Tensor,
        best: tuple[Tensor, Tensor, Tensor],
        token: Tensor,
        position: Tensor,
        chosen: Tensor,
        row: int | None,
    ) -> None:
        """Write token, position and chosen of all rows, or of one row."""
        launch_choose(logits, Best(*best), token, position, chosen, self._capacity - 1)
        if self._uniform is None or self._sampling is None:
            return
        # Row by row, because a reduction over one of several rows may add in another order.
        for at in range(len(logits)):
            where = at if row is None else row
            uniform = self._uniform[where].gather(0, self._count[where : where + 1])
            drawn = draw(logits[at], self._sampling, uniform)
            drawn = torch.where(chosen[at] < 0, chosen[at].long(), drawn)
            chosen[at] = drawn.int()
            token[at] = drawn.clamp(min=0)
            self._count[where].add_(1).clamp_(max=self._capacity - 1)


class Step:
    """The launches of a step, and the KV caches of its rows.

    `arch` is the compute capability (90 is 9.0) that matmuls are tuned for. With `early`, kernels
    start before the previous one has ended (`engine.kernels.dependent_launch`).
    """

    def __init__(
        self, decoder: Decoder, rows: int, capacity: int, *, arch: int, early: bool
    ) -> None:
        config, like = decoder.config, decoder.norm.weight
        self._decoder, self._rows, self._arch = decoder, rows, arch
        self._early = early
        self._device, self._dtype = like.device, like.dtype
        shape = (rows, capacity, config.num_key_value_heads, config.head_dim)
        self.caches = [
            (like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.num_hidden_layers)
        ]
        """Keys and values of each layer, (M, S, K, E)."""
        frequency_R = frequencies(config, self._device)
        angle_SR = torch.arange(capacity, device=self._device)[:, None].float() * frequency_R
        self._turns = torch.stack([angle_SR.cos(), angle_SR.sin()], dim=1).to(self._dtype)
        self._squares = empty_squares(rows, config.hidden_size, self._device)
        self._scratch = empty_scratch(
            rows,
            capacity,
            config.num_key_value_heads,
            config.num_attention_heads,
            config.head_dim,
            self._device,
        )
        self._outs: dict[int, Out] = {}

    def logits(self, token_M: Tensor, position_M: Tensor) -> Tensor:
        """Return the logits (M, V) of one token of each row (int64) at its position (int32), and
        store its keys and values there.
        """
        decoder = self._decoder
        config = decoder.config
        kept = decoder.embed(token_M)
        parts: Parts | None = None
        for layer, cache in zip(decoder.layers, self.caches, strict=True):
            assert isinstance(layer, Layer)
            attention, mlp = layer.attention, layer.mlp
            x = self._out(kept.shape[1], attention.q)
            undivided = self._norm(parts, kept, _in_front(layer.attention_norm), x)
            q, k, v = self._products(x, (attention.q, attention.k, attention.v))
            x = self._out(config.num_attention_heads * config.head_dim, attention.o)
            norms, eps = None, 0.0
            if attention.q_norm is not None and attention.k_norm is not None:
                norms = attention.q_norm.weight, attention.k_norm.weight
                eps = attention.q_norm.eps
            heads = Heads(_biases(attention), norms, eps, self._turns)
            decode_launch.attend(
                *(q, k, v, heads, undivided, *cache, position_M, self._scratch, x),
                early=self._early,
            )
            (parts,) = self._products(x, (attention.o,))
            x = self._out(kept.shape[1], mlp.gate)
            undivided = self._norm(parts, kept, _in_front(layer.mlp_norm), x)
            gate, up = self._products(x, (mlp.gate, mlp.up))
            x = self._out(config.intermediate_size, mlp.down)
            decode_launch.gate(gate, up, undivided, x, self._rows, early=self._early)
            (parts,) = self._products(x, (mlp.down,))
        x = self._out(kept.shape[1], decoder.head)
        self._norm(parts, kept, decoder.norm, x, last=True)
        return self._head(x, decoder.head)

    def _norm(
        self, parts: Parts | None, kept: Tensor, norm: RMSNorm, out: Out, *, last: bool = False
    ) -> Undivided | None:
        """Launch the norm into `out`, and return what consumers of its matmul must divide by. None
        if `out` is already normalised, as for dense weights and for the `last` norm before the
        head.
        """
        late = out.codes is not None and not last
        return decode_launch.norm(
            *(parts, kept, norm.weight, norm.eps, out, self._squares), late=late, early=self._early
        )

    def _out(self, columns: int, reader: nn.Module | None) -> Out:
        """Return the buffer for the inputs of `reader`, whose type decides their format."""
        packed = isinstance(reader, PackedLinear)
        key = columns if packed else -columns
        if key not in self._outs:
            codes = empty_inputs(self._rows, columns, self._device) if packed else None
            floats = torch.zeros(ROWS, columns, dtype=self._dtype, device=self._device)
            self._outs[key] = Out(floats, codes)
        return self._outs[key]

    def _products(self, x: Out, layers: Sequence[nn.Module]) -> list[Parts]:
        """Return the output of each layer. Biases of packed layers are left to the consumer."""
        if x.codes is None:
            return [Parts(layer(x.floats_MK)[None]) for layer in layers]
        weights = [layer.packed for layer in layers if isinstance(layer, PackedLinear)]
        rows = sum(weight.rows for weight in weights)
        config = small_m.config_for(
            weights[0].type, rows, weights[0].columns, self._rows, self._arch
        )
        splits = parts_of(weights[0].row_blocks, config)
        y = torch.empty(splits, self._rows, rows, dtype=torch.float32, device=self._device)
        small_m.products(x.codes, weights, y, config, early=self._early)
        firsts = [sum(weight.rows for weight in weights[:index]) for index in range(len(weights))]
        return [Parts(y, first) for first in firsts]

    def _head(self, x: Out, head: nn.Module | None) -> Tensor:
        if not isinstance(head, PackedLinear):
            return self._decoder.logits_of(x.floats_MK)[: self._rows]
        assert x.codes is not None
        weight = head.packed
        logits = torch.empty(self._rows, weight.rows, dtype=self._dtype, device=self._device)
        config = small_m.config_for(
            weight.type, weight.rows, weight.columns, self._rows, self._arch
        )
        if config.splits > 1:
            splits = parts_of(weight.row_blocks, config)
            y = torch.empty(splits, *logits.shape, dtype=torch.float32, device=self._device)
            small_m.products(x.codes, [weight], y, config, early=self._early)
            total = y[0]
            for part in y[1:]:
                total = total + part
            return total.to(self._dtype)
        small_m.products(x.codes, [weight], logits, config, early=self._early)
        return logits


def _in_front(norm: RMSNorm | None) -> RMSNorm:
    assert norm is not None  # `coverage` sends other decoders elsewhere
    return norm


def _biases(attention: Attention) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the biases of packed q, k and v, which their matmul does not add."""
    found = [
        each.bias
        for each in (attention.q, attention.k, attention.v)
        if isinstance(each, PackedLinear) and each.bias is not None
    ]
    return (found[0], found[1], found[2]) if found else None
