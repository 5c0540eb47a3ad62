"""What one token of each row launches: a decoder's products, and the small kernels between them.

    small kernels    between the products of a layer
    separate         5 launches: norm, attention, its join, norm, gate (`engine.kernels.decode`)
    fused            4 launches, each one round of loads (`engine.kernels.decode_fused`): the join is
                     in attention, and RMS norm's divisor is left to whoever reads the product

Tensors are made before the first launch, and stay: a launch is the same work at the same addresses
every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.errors import InternalError
from engine.kernels import decode_fused_launch as fused
from engine.kernels import decode_launch as separate
from engine.kernels import small_m
from engine.kernels.decode_fused_launch import Undivided
from engine.kernels.decode_launch import Heads, Out, Parts
from engine.kernels.small_m_inputs import empty_inputs
from engine.models.decode import ROWS, SmallKernels
from engine.models.decoder import Attention, Decoder, FeedForward, Layer, RMSNorm, frequencies
from engine.models.packed import PackedLinear

# Shapes: M rows of a step, V vocabulary, S slots, K key/value heads, R half a head's width


class _Between(Protocol):
    """The kernels between products."""

    def norm(
        self, parts: Parts | None, kept: Tensor, norm: RMSNorm, out: Out, *, last: bool
    ) -> Undivided | None:
        """What readers of the product of `out` have to divide by; None where `out` is divided, as
        that of the `last` norm is."""

    def attend(
        self,
        qkv: Sequence[Parts],
        undivided: Undivided | None,
        attention: Attention,
        cache: tuple[Tensor, Tensor],
        position: Tensor,
        out: Out,
    ) -> None: ...

    def gate(self, gate: Parts, up: Parts, undivided: Undivided | None, out: Out) -> None: ...


class _Separate:
    def __init__(self, decoder: Decoder, rows: int, capacity: int, early: bool) -> None:
        config, device = decoder.config, decoder.norm.weight.device
        self._early, self._rows = early, rows
        chunks = -(-capacity // separate.CHUNK)
        partial = (chunks, rows, config.num_attention_heads, config.head_dim)
        self._sums = torch.empty(partial, dtype=torch.float32, device=device)
        self._softmax = torch.empty((*partial[:3], 2), dtype=torch.float32, device=device)
        self._frequency = frequencies(config, device)

    def norm(
        self, parts: Parts | None, kept: Tensor, norm: RMSNorm, out: Out, *, last: bool
    ) -> None:
        separate.norm(parts, kept, norm.weight, norm.eps, out, early=self._early)

    def attend(
        self,
        qkv: Sequence[Parts],
        undivided: Undivided | None,
        attention: Attention,
        cache: tuple[Tensor, Tensor],
        position: Tensor,
        out: Out,
    ) -> None:
        q, k, v = qkv
        heads = _heads(attention, self._frequency)
        separate.attend(
            *(q, k, v, heads, *cache, position, self._sums, self._softmax), early=self._early
        )
        separate.join(self._sums, self._softmax, position, out, early=self._early)

    def gate(self, gate: Parts, up: Parts, undivided: Undivided | None, out: Out) -> None:
        separate.gate(gate, up, out, self._rows, early=self._early)


class _Fused:
    def __init__(self, decoder: Decoder, rows: int, capacity: int, early: bool) -> None:
        config, weight = decoder.config, decoder.norm.weight
        if config.head_dim > fused.MAX_WIDTH:
            raise InternalError(
                f"fused small kernels: expected heads up to {fused.MAX_WIDTH} wide, "
                f"found {config.head_dim}"
            )
        self._early, self._rows = early, rows
        self._frequency = frequencies(config, weight.device)
        angle_SR = torch.arange(capacity, device=weight.device)[:, None].float() * self._frequency
        self._turns = torch.stack([angle_SR.cos(), angle_SR.sin()], dim=1).to(weight.dtype)
        self._squares = fused.empty_squares(rows, config.hidden_size, weight.device)
        self._scratch = fused.empty_scratch(
            rows,
            capacity,
            config.num_key_value_heads,
            config.num_attention_heads,
            config.head_dim,
            weight.device,
        )

    def norm(
        self, parts: Parts | None, kept: Tensor, norm: RMSNorm, out: Out, *, last: bool
    ) -> Undivided | None:
        late = out.codes is not None and not last
        return fused.norm(
            *(parts, kept, norm.weight, norm.eps, out, self._squares), late=late, early=self._early
        )

    def attend(
        self,
        qkv: Sequence[Parts],
        undivided: Undivided | None,
        attention: Attention,
        cache: tuple[Tensor, Tensor],
        position: Tensor,
        out: Out,
    ) -> None:
        q, k, v = qkv
        heads = _heads(attention, self._frequency)
        fused.attend(
            *(q, k, v, heads, self._turns, undivided, *cache, position, self._scratch, out),
            early=self._early,
        )

    def gate(self, gate: Parts, up: Parts, undivided: Undivided | None, out: Out) -> None:
        fused.gate(gate, up, undivided, out, self._rows, early=self._early)


class Step:
    """The launches of a step, and the caches of its rows.

    `ahead` is how many blocks of weights a product asks for while it waits, `arch` the compute
    capability (90 is 9.0) that products are launched for.
    """

    def __init__(
        self,
        decoder: Decoder,
        rows: int,
        capacity: int,
        *,
        small_kernels: SmallKernels,
        early: bool,
        ahead: int,
        arch: int,
    ) -> None:
        config, like = decoder.config, decoder.norm.weight
        self._decoder, self._rows = decoder, rows
        self._device, self._dtype = like.device, like.dtype
        self._ahead, self._arch = ahead, arch
        shape = (rows, capacity, config.num_key_value_heads, config.head_dim)
        self.caches = [
            (like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.num_hidden_layers)
        ]
        """Keys and values of each layer, (M, S, K, E)."""
        between = _Fused if small_kernels == "fused" else _Separate
        self._between: _Between = between(decoder, rows, capacity, early)
        self._outs: dict[int, Out] = {}

    def logits(self, token_M: Tensor, position_M: Tensor) -> Tensor:
        """(M, V), of a token of each row at its position, int64 and int32; its keys and values are
        put there."""
        decoder, between = self._decoder, self._between
        config = decoder.config
        kept = decoder.embed(token_M)
        parts: Parts | None = None
        for layer, cache in zip(decoder.layers, self.caches, strict=True):
            assert isinstance(layer, Layer)
            attention, mlp = layer.attention, layer.mlp
            x = self._out(kept.shape[1], attention.q)
            undivided = between.norm(parts, kept, layer.attention_norm, x, last=False)
            qkv = self._products(x, (attention.q, attention.k, attention.v))
            x = self._out(config.num_attention_heads * config.head_dim, attention.o)
            between.attend(qkv, undivided, attention, cache, position_M, x)
            (parts,) = self._products(x, (attention.o,))
            x = self._out(kept.shape[1], mlp.gate)
            undivided = between.norm(parts, kept, layer.mlp_norm, x, last=False)
            gate, up = self._products(x, (mlp.gate, mlp.up))
            x = self._out(_columns(mlp), mlp.down)
            between.gate(gate, up, undivided, x)
            (parts,) = self._products(x, (mlp.down,))
        x = self._out(kept.shape[1], decoder.head)
        between.norm(parts, kept, decoder.norm, x, last=True)
        return self._head(x, decoder.head)

    def _out(self, columns: int, reader: nn.Module | None) -> Out:
        """Where the inputs of `reader` go; its kind decides what they are."""
        packed = isinstance(reader, PackedLinear)
        key = columns if packed else -columns
        if key not in self._outs:
            codes = empty_inputs(self._rows, columns, self._device) if packed else None
            floats = torch.zeros(ROWS, columns, dtype=self._dtype, device=self._device)
            self._outs[key] = Out(floats, codes)
        return self._outs[key]

    def _products(self, x: Out, layers: Sequence[nn.Module]) -> list[Parts]:
        """What each layer gives; biases of packed ones are left to whoever reads it."""
        if x.codes is None:
            return [Parts(layer(x.floats_MK)[None]) for layer in layers]
        weights = [layer.packed for layer in layers if isinstance(layer, PackedLinear)]
        rows = sum(weight.rows for weight in weights)
        config = small_m.config_for(
            weights[0].type, rows, weights[0].columns, self._rows, self._arch
        )
        splits = -(-weights[0].row_blocks // -(-weights[0].row_blocks // config.splits))
        y = torch.empty(splits, self._rows, rows, dtype=torch.float32, device=self._device)
        small_m.products(x.codes, weights, y, config, ahead=self._ahead)
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
            y = torch.empty(config.splits, *logits.shape, dtype=torch.float32, device=self._device)
            splits = -(-weight.row_blocks // -(-weight.row_blocks // config.splits))
            small_m.products(x.codes, [weight], y[:splits], config, ahead=self._ahead)
            total = y[0]
            for part in y[1:splits]:
                total = total + part
            return total.to(self._dtype)
        small_m.products(x.codes, [weight], logits, config, ahead=self._ahead)
        return logits


def _heads(attention: Attention, frequency_R: Tensor) -> Heads:
    return Heads(_biases(attention), _norms(attention), frequency_R, _eps(attention))


def _biases(attention: Attention) -> tuple[Tensor, Tensor, Tensor] | None:
    """Those that a product with blocks leaves out."""
    found = [
        each.bias
        for each in (attention.q, attention.k, attention.v)
        if isinstance(each, PackedLinear) and each.bias is not None
    ]
    return (found[0], found[1], found[2]) if found else None


def _norms(attention: Attention) -> tuple[Tensor, Tensor] | None:
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return attention.q_norm.weight, attention.k_norm.weight


def _eps(attention: Attention) -> float:
    return 0.0 if attention.q_norm is None else attention.q_norm.eps


def _columns(mlp: FeedForward) -> int:
    down = mlp.down
    if isinstance(down, PackedLinear):
        return down.packed.columns
    assert isinstance(down, nn.Linear)
    return down.in_features
