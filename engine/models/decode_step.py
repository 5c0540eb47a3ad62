"""What one token of each row launches: a decoder's products, and the kernels between them.

Between the products of a layer are 5 launches: norm, attention and its join, norm, gate
(`engine.kernels.decode`). The RMS norm's divisor is left to whoever reads the product of what is in
blocks (`Undivided`).

Tensors are made before the first launch, and stay: a launch is the same work at the same addresses
every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.kernels import decode_launch, small_m
from engine.kernels.decode_launch import (
    Heads,
    Out,
    Parts,
    Undivided,
    empty_scratch,
    empty_squares,
    parts_of,
)
from engine.kernels.small_m_inputs import empty_inputs
from engine.models.decode import ROWS
from engine.models.decoder import Attention, Decoder, FeedForward, Layer, RMSNorm, frequencies
from engine.models.packed import PackedLinear

# Shapes: M rows of a step, V vocabulary, S slots, K key/value heads, E a head's width, R half of it


class Step:
    """The launches of a step, and the caches of its rows.

    `arch` is the compute capability (90 is 9.0) that products are launched for; with `early` kernels begin
    before the one ahead has ended (`engine.kernels.dependent_launch`).
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
        """(M, V), of a token of each row at its position, int64 and int32; its keys and values are
        put there."""
        decoder = self._decoder
        config = decoder.config
        kept = decoder.embed(token_M)
        parts: Parts | None = None
        for layer, cache in zip(decoder.layers, self.caches, strict=True):
            assert isinstance(layer, Layer)
            attention, mlp = layer.attention, layer.mlp
            x = self._out(kept.shape[1], attention.q)
            undivided = self._norm(parts, kept, layer.attention_norm, x)
            q, k, v = self._products(x, (attention.q, attention.k, attention.v))
            x = self._out(config.num_attention_heads * config.head_dim, attention.o)
            heads = Heads(_biases(attention), _norms(attention), _eps(attention), self._turns)
            decode_launch.attend(
                *(q, k, v, heads, undivided, *cache, position_M, self._scratch, x),
                early=self._early,
            )
            (parts,) = self._products(x, (attention.o,))
            x = self._out(kept.shape[1], mlp.gate)
            undivided = self._norm(parts, kept, layer.mlp_norm, x)
            gate, up = self._products(x, (mlp.gate, mlp.up))
            x = self._out(_columns(mlp), mlp.down)
            decode_launch.gate(gate, up, undivided, x, self._rows, early=self._early)
            (parts,) = self._products(x, (mlp.down,))
        x = self._out(kept.shape[1], decoder.head)
        self._norm(parts, kept, decoder.norm, x, last=True)
        return self._head(x, decoder.head)

    def _norm(
        self, parts: Parts | None, kept: Tensor, norm: RMSNorm, out: Out, *, last: bool = False
    ) -> Undivided | None:
        """What readers of the product of `out` have to divide by; None where `out` is divided, as
        floats are, and what the `last` norm gives to the head."""
        late = out.codes is not None and not last
        return decode_launch.norm(
            *(parts, kept, norm.weight, norm.eps, out, self._squares), late=late, early=self._early
        )

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
