"""What one forward pass of the decoder holds in memory, as arithmetic on its shape. No torch here.

Letters: N = B*T tokens in B rows of T, D width, F feed-forward width, Q all query heads together,
K all key/value heads together, H query heads, J key/value heads, E one head, L layers; p bytes of
a number in the products' dtype (2 under bf16 autocast or in a bf16 model, else 4), r bytes of the
residual stream (that of the embedding: 4 in a student, p in a bf16 teacher).

Kept for the backward pass, for each token and layer, beside the weights themselves:

    norm inputs          2 (r D + 4)            the residual, and 1/rms
    product inputs       2 p D                  what q, k, v and gate, up multiply
    q, k, v              p (Q + 2 K)            after rotation; 3 p Q where no kernel shares heads
    attention output     p Q + 4 H              and the logsumexp of each query
    head norms (Qwen3)   p (Q + K) + 4 (H + J)  their inputs, and 1/rms
    feed-forward         4 p F                  gate, silu(gate), up and the product

and once: the last norm's input r D + 4, cosines and sines p E a token, the mask p B T T, and under
autocast a copy of each linear weight, p bytes a number.

A CPU has no fused norm: it also keeps the normed values, 4 bytes each, and q and k in fp32 before
theirs. The CUDA kernel that does not share heads counts its logsumexp in blocks of 32 tokens, and
wants the rows of the mask in multiples of 8: otherwise each layer keeps a padded mask of its own.

Packed attention has no mask, and its kernel shares heads. A compiled layer recomputes what is cheap:
it keeps its input in the residual's dtype, the output of o in that of the products, in place of
a second residual, and three parts of the feed-forward, gate, up and the product. With checkpointing only
each layer's input is kept, and in the backward pass what one layer keeps is added.

Covered: what `engine.models.decoder` does with documents given, on CUDA and CPU; a test compares
the sum with what autograd holds. Not covered: workspaces inside kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward pass of a decoder over `rows` rows of `seq_len` tokens."""

    config: ModelConfig
    rows: int
    seq_len: int
    product_bytes: int
    """Of one number in the products: 2 in bf16, 4 in fp32."""
    residual_bytes: int
    """Of one number in the residual stream: that of the embedding."""
    fused_norms: bool
    """CUDA has a kernel for the norms, a CPU has not."""
    shares_heads: bool
    """Whether attention takes fewer key/value heads than query heads without copying them."""
    packed: bool = False
    compiled: bool = False
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    def kept(self) -> dict[str, int]:
        """Bytes that autograd keeps until the backward pass, by what they are."""
        if not self.checkpointing:
            return self._kept_whole()
        c, r = self.config, self.residual_bytes
        inputs = (c.num_hidden_layers + 1) * self.tokens * r * c.hidden_size
        return {
            "inputs of the layers": inputs + 4 * self.tokens,
            "positions": self.tokens * (self.product_bytes * c.head_dim + 8),
            "masks": self.mask(),
        }

    def again(self) -> int:
        """What the backward pass recomputes of one layer and keeps while it is in it."""
        if not self.checkpointing:
            return 0
        whole = sum(self._kept_whole().values())
        return whole // self.config.num_hidden_layers

    def _kept_whole(self) -> dict[str, int]:
        c, p, r = self.config, self.product_bytes, self.residual_bytes
        query, shared = query_width(c), shared_width(c)
        heads = c.num_attention_heads + c.num_key_value_heads
        norms = r * c.hidden_size + 4
        if not self.fused_norms:
            norms += 4 * c.hidden_size
        keys = 2 * shared if self._shares else 2 * query
        head_norms = 0
        if c.qk_norm:
            each = p if self.fused_norms else 8
            head_norms = each * (query + shared) + 4 * heads
        layers = c.num_hidden_layers * self.tokens
        second = p * c.hidden_size + 4 if self.compiled else norms
        return {
            "norm inputs": layers * (norms + second) + self.tokens * norms,
            "product inputs": layers * 2 * p * c.hidden_size,
            "q, k, v": layers * p * (query + keys),
            "attention output": layers * p * query + self._logsumexp(),
            "head norms": layers * head_norms,
            "feed-forward": layers * (3 if self.compiled else 4) * p * c.intermediate_size,
            "positions": self.tokens * (p * c.head_dim + 8),
            "masks": self._masks(),
            "weights as the products read them": self.cast_weights(),
        }

    def cast_weights(self) -> int:
        """Copies of the weights in the products' dtype; none when they have it already."""
        if self.product_bytes == self.residual_bytes:
            return 0
        numbers = linear_weights(self.config)
        if self.config.qk_norm:
            numbers += self.config.num_hidden_layers * 2 * self.config.head_dim
        return self.product_bytes * numbers

    def mask(self) -> int:
        return 0 if self.packed else self.product_bytes * self.rows * self.seq_len**2

    @property
    def _shares(self) -> bool:
        return self.shares_heads or self.packed

    @property
    def _pads(self) -> bool:
        """Whether attention runs in CUDA's memory-efficient kernel."""
        return self.fused_norms and not self._shares

    def _logsumexp(self) -> int:
        length = _rounded_up(self.seq_len, 32) if self._pads else self.seq_len
        c = self.config
        return 4 * c.num_hidden_layers * c.num_attention_heads * self.rows * length

    def _masks(self) -> int:
        padded = _rounded_up(self.seq_len, 8)
        if not self._pads or padded == self.seq_len:
            return self.mask()
        each = self.product_bytes * self.rows * self.seq_len * padded
        return self.config.num_hidden_layers * each

    def passing(self) -> int:
        """The most bytes alive at once when nothing is kept: the masks, and the layer's input and
        the widest moment inside it.
        """
        c, p, r = self.config, self.product_bytes, self.residual_bytes
        query, shared = query_width(c), shared_width(c)
        keys = 0 if self._shares else 2 * query
        # The input of the layer, the sum with the attention's answer, and its norm.
        stream = 2 * r * c.hidden_size + p * c.hidden_size
        feed_forward = stream + 3 * p * c.intermediate_size
        attention = stream + p * (2 * query + 2 * shared + keys) + 4 * c.num_attention_heads
        widest = self.tokens * max(feed_forward, attention)
        # Two masks of one byte while the one of numbers is made.
        making = 0 if self.packed else 2 * self.rows * self.seq_len**2
        return self.mask() + max(widest, making) + self.tokens * p * c.head_dim


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def query_width(config: ModelConfig) -> int:
    return config.num_attention_heads * config.head_dim


def shared_width(config: ModelConfig) -> int:
    return config.num_key_value_heads * config.head_dim


def linear_sizes(config: ModelConfig) -> dict[str, int]:
    """Numbers in each linear weight of one layer."""
    width = config.hidden_size
    return {
        "q": width * query_width(config),
        "k": width * shared_width(config),
        "v": width * shared_width(config),
        "o": width * query_width(config),
        "gate": width * config.intermediate_size,
        "up": width * config.intermediate_size,
        "down": width * config.intermediate_size,
    }


def linear_weights(config: ModelConfig) -> int:
    """Numbers in the linear weights of all layers; the head is not one of them."""
    return config.num_hidden_layers * sum(linear_sizes(config).values())
