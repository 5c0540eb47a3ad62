"""The memory of one forward pass of the decoder, computed from its shape. No torch.

Letters: N = B*T tokens in B rows of T tokens, D hidden size, F feed-forward width, H query heads, J key/value heads,
E head size, Q = H E, K = J E, L layers; p bytes per number in the dtype of the matmuls (2 under bf16 autocast or in a
bf16 model, else 4), r bytes per number in the residual stream (the dtype of the embedding: 4 in a student, p in a bf16
teacher).

Kept for the backward pass, in bytes per token and layer, in addition to the weights:

    norm inputs          2 (r D + 4)            the residual, and 1/rms
    matmul inputs        2 p D                  the inputs of the q, k, v and of the gate, up matmuls
    q, k, v              p (Q + 2 K)            after rotation; 3 p Q if the kernel cannot share heads
    attention output     p Q + 4 H              and the logsumexp of each query
    head norms (Qwen3)   p (Q + K) + 4 (H + J)  their inputs, and 1/rms
    post-norms           2 (p D + 4)            OLMo: instead of the norm inputs above; Gemma: in addition to them,
                                                and in fp32
    feed-forward         4 p F                  gate, silu(gate), up and silu(gate) * up

Kept once for all layers: the input of the last norm, r D + 4 per token; cosines and sines, p per token and per rotary
dimension; the mask, p B T T. Under autocast, a copy of each linear weight, p bytes per number.

A CPU has no fused norm: it also keeps the normalised values, 4 bytes each, and the fp32 inputs of the q and k norms. A
CUDA kernel that needs as many key/value heads as query heads stores its logsumexp in blocks of 32 tokens, and needs
mask rows in multiples of 8: if T is no multiple of 8, each layer keeps a padded copy of the mask.

Packed attention has no mask, and its kernel does not copy key/value heads. A layer in the engine's kernels keeps three
tensors of the feed-forward instead of four: gate, up and silu(gate) * up. With checkpointing, only the input of each
layer is kept, and during the backward pass also what one layer keeps without checkpointing.

Covered: `engine.models.decoder` for rows with several documents, on CUDA and CPU; a test compares the sum with the
tensors that autograd saves. Not covered: workspaces inside kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.model_families import LAST_NORM, layer_tensors
from engine.models.config import ModelConfig, shape_of
from engine.plan.cost import linear_weights, query_width, shared_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward pass of a decoder over `rows` rows of `seq_len` tokens."""

    config: ModelConfig
    rows: int
    seq_len: int
    matmul_bytes: int
    """Bytes of a number in the matmuls: 2 in bf16, 4 in fp32."""
    residual_bytes: int
    """Bytes of a number in the residual stream, which has the dtype of the embedding."""
    fused_norms: bool
    """Whether norms run in a fused kernel: true on CUDA, false on a CPU."""
    shares_heads: bool
    """Whether attention accepts fewer key/value heads than query heads without copying them."""
    packed: bool = False
    fused: bool = False
    """Whether the operations between the matmuls run in the engine's kernels, with gradients."""
    checkpointing: bool = False
    kept_layers: int = 0
    """Number of the last layers that keep all their activations despite `checkpointing`."""

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    def kept(self) -> dict[str, int]:
        """Return the bytes that autograd keeps until the backward pass, by kind of tensor."""
        if not self.checkpointing:
            return self._kept_without_checkpointing()
        c, r = self.config, self.residual_bytes
        inputs = (c.num_hidden_layers + 1) * self.tokens * r * c.hidden_size
        whole = sum(self._kept_without_checkpointing().values())
        return {
            "inputs of the layers": inputs + 4 * self.tokens,
            "all of the last layers": whole * self.kept_layers // c.num_hidden_layers,
            "positions": self.tokens * (self._kinds * self.matmul_bytes * c.rotary_dim + 8),
            "masks": self.mask(),
        }

    def recomputed(self) -> int:
        """Return the bytes of recomputed activations that the backward pass of one layer keeps; 0 without
        checkpointing."""
        if not self.checkpointing:
            return 0
        whole = sum(self._kept_without_checkpointing().values())
        return whole // self.config.num_hidden_layers

    def _kept_without_checkpointing(self) -> dict[str, int]:
        c, p, r = self.config, self.matmul_bytes, self.residual_bytes
        query, shared = query_width(c), shared_width(c)
        heads = c.num_attention_heads + c.num_key_value_heads
        norms = r * c.hidden_size + 4
        if not self.fused_norms:
            norms += 4 * c.hidden_size
        keys = 2 * shared if self._shares else 2 * query
        # Bytes per number of a norm's input in the matmuls' dtype; norms with an offset read fp32.
        norm_input = (4 if c.kind.norm_offset else p) if self.fused_norms else 8
        head_norms = 0
        if c.qk_norm:
            rows = 2 if c.kind.qk_norm_whole else heads
            head_norms = norm_input * (query + shared) + 4 * rows
        layers = c.num_hidden_layers * self.tokens
        norm_inputs = 2 * norms if c.kind.has_pre_norms else 0
        if c.kind.has_post_norms:
            norm_inputs += 2 * (norm_input * c.hidden_size + 4)
        return {
            "norm inputs": layers * norm_inputs + self.tokens * norms,
            "matmul inputs": layers * 2 * p * c.hidden_size,
            "q, k, v": layers * p * (query + keys),
            "attention output": layers * p * query + self._logsumexp(),
            "head norms": layers * head_norms,
            "feed-forward": layers * (3 if self.fused else 4) * p * c.intermediate_size,
            "positions": self.tokens * (self._kinds * p * c.rotary_dim + 8),
            "masks": self._masks(),
            "weights in the dtype of the matmuls": self.cast_weights(),
            "factors of norms": self._norm_factors(),
        }

    def _norm_factors(self) -> int:
        """Return the bytes of the factors 1 + w that norms compute from their weights."""
        c = self.config
        if not c.kind.norm_offset:
            return 0
        rows = [*layer_tensors(c.kind) * c.num_hidden_layers, LAST_NORM]
        return 4 * sum(
            math.prod(shape_of(row, c)) for row in rows if row.ours.endswith("norm.weight")
        )

    @property
    def _kinds(self) -> int:
        """Return the number of kinds of layers: 2 if only some have a sliding window. Each kind has its own mask and
        RoPE."""
        c = self.config
        return len({c.has_window(layer) for layer in range(c.num_hidden_layers)})

    def cast_weights(self) -> int:
        """Return the bytes of weight copies in the matmuls' dtype; 0 when the weights already have it."""
        if self.matmul_bytes == self.residual_bytes:
            return 0
        numbers = linear_weights(self.config)
        c = self.config
        if c.kind.norm_offset:
            return self.matmul_bytes * numbers
        if c.qk_norm:
            whole = query_width(c) + shared_width(c)
            numbers += c.num_hidden_layers * (whole if c.kind.qk_norm_whole else 2 * c.head_dim)
        if c.kind.has_post_norms:
            numbers += c.num_hidden_layers * 2 * c.hidden_size
        return self.matmul_bytes * numbers

    def mask(self) -> int:
        kind_bytes = self.matmul_bytes * self.rows * self.seq_len**2
        return 0 if self.packed else self._kinds * kind_bytes

    @property
    def _shares(self) -> bool:
        return self.shares_heads or self.packed

    @property
    def _pads(self) -> bool:
        """Return whether attention runs in torch's memory-efficient CUDA kernel, which pads the mask."""
        return self.fused_norms and not self._shares

    def _logsumexp(self) -> int:
        length = _rounded_up(self.seq_len, 32) if self._pads else self.seq_len
        c = self.config
        return 4 * c.num_hidden_layers * c.num_attention_heads * self.rows * length

    def _masks(self) -> int:
        padded = _rounded_up(self.seq_len, 8)
        if not self._pads or padded == self.seq_len:
            return self.mask()
        layer_bytes = self.matmul_bytes * self.rows * self.seq_len * padded
        return self.config.num_hidden_layers * layer_bytes

    def without_autograd(self) -> int:
        """Return the peak memory of a forward pass without autograd, in bytes.

        It consists of the masks, the layer's input, and the largest set of temporaries inside a layer.
        """
        c, p, r = self.config, self.matmul_bytes, self.residual_bytes
        query, shared = query_width(c), shared_width(c)
        keys = 0 if self._shares else 2 * query
        # The layer's input, its sum with the attention output, and the norm of the sum.
        stream = 2 * r * c.hidden_size + p * c.hidden_size
        feed_forward = stream + 3 * p * c.intermediate_size
        attention = stream + p * (2 * query + 2 * shared + keys) + 4 * c.num_attention_heads
        if c.kind.norm_offset:
            # A norm with an offset has its input and its output in fp32.
            attention = max(attention, stream + p * (query + 2 * shared) + 8 * query)
            feed_forward = max(feed_forward, stream + 8 * c.hidden_size)
        widest = self.tokens * max(feed_forward, attention)
        # Two boolean masks, one byte per entry, while the additive mask is computed.
        mask_temporaries = 0 if self.packed else 2 * self.rows * self.seq_len**2
        return (
            self.mask()
            + max(widest, mask_temporaries)
            + self.tokens * self._kinds * p * c.rotary_dim
        )


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
