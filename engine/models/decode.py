"""How generation samples the next token (`Sampling`), and which implementation runs the decode
steps.

On a GPU a decode step is a few kernels (`engine.models.decode_step`); elsewhere it is the decoder
itself.

Covered by the kernels: CUDA with bf16, up to 8 rows, heads 32, 64 or 128 wide, matrices all in
K-quants or all dense. `coverage` gives the reason if a model is not covered; then, and on a CPU,
the decoder itself runs the steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from engine.decision import SET_BY_USER, Decision
from engine.errors import BadInput
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, Layer
from engine.models.packed import PackedLinear

# Shapes: M rows of a step, T tokens of a prompt, D model width, V vocabulary, K key/value heads,
# E width of a head

ROWS = 8
"""Maximum number of rows of a step. Dense matmuls always run with this many."""
LEAST_CAPABILITY = (8, 0)
WIDTHS = (32, 64, 128)
"""Supported head widths. The keys and values of a chunk of wider heads do not fit into the shared
memory of every GPU.
"""
HISTORY = 32
"""Maximum number of steps and prompt starts whose tokens the host has not read yet."""
TYPES = ("Q4_K", "Q5_K", "Q6_K")

GraphSetting = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The default is greedy."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not holds:
                raise BadInput.expected("sampling", name, wanted, str(getattr(self, name)))


GREEDY = Sampling()


def draw(logits_V: Tensor, sampling: Sampling, uniform_1: Tensor) -> Tensor:
    """Return the token id drawn by a uniform number, without synchronising: int64, 0-dimensional."""
    scores_V, ids_V = (logits_V.double() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        scores_V = scores_V[: sampling.top_k]
    p_V = scores_V.softmax(0)
    before_V = p_V.cumsum(0) - p_V
    if sampling.top_p < 1:
        p_V = torch.where(before_V < sampling.top_p, p_V, 0.0)
    at_1 = torch.searchsorted(p_V.cumsum(0), uniform_1 * p_V.sum(), right=True)
    # A draw at the very end can point past the last token with probability > 0; with NaN logits no
    # token has any.
    at_1 = torch.minimum(at_1, (p_V > 0).sum() - 1).clamp(min=0)
    return ids_V.gather(0, at_1)[0]


class Chosen(NamedTuple):
    """The tokens of one step, being copied to the host."""

    pinned_M: Tensor
    arrived: torch.cuda.Event | None
    """None if they are already on the host."""

    def wait(self) -> list[int]:
        """Wait, and return each row's token, or minus the number of its non-finite logits if there
        are any.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        return [int(one) for one in self.pinned_M.tolist()]


def coverage(decoder: Decoder, rows: int) -> str | None:
    """Return why the kernels cannot run this decoder's steps, or None if they can."""
    from engine.kernels.dequantize import has_triton

    config = decoder.config
    if not config.native:
        return "transformers runs the layers"
    like = decoder.norm.weight
    if like.device.type != "cuda":
        return "the model is on the CPU"
    if not has_triton():
        return "there is no triton"
    if torch.cuda.get_device_capability(like.device) < LEAST_CAPABILITY:
        return "the GPU's capability is below 8.0"
    if like.dtype != torch.bfloat16:
        return f"the model computes in {str(like.dtype).removeprefix('torch.')}, not bfloat16"
    if rows > ROWS:
        return f"{rows} sequences are run at once, more than {ROWS}"
    return (
        _why_not_heads(config)
        or next(filter(None, map(_why_not, decoder.layers)), None)
        or _why_not_head(decoder)
    )


def _why_not_heads(config: ModelConfig) -> str | None:
    if config.sliding_window is not None:
        return f"its attention slides a window of {config.sliding_window:,} tokens"
    if config.kind.activation != "silu":
        return f"its activation is {config.kind.activation}, not silu"
    if config.kind.norms_behind:
        return "its norms are behind attention and mlp"
    if config.kind.qk_norm_whole:
        return "its q and k are normalised as a whole"
    if config.layers_without_rope:
        return f"{len(config.layers_without_rope)} of its layers have no RoPE"
    if config.long_rope is not None:
        return "its RoPE has other factors in long sequences"
    if config.rotary_dim != config.head_dim:
        return f"RoPE rotates {config.rotary_dim} of the {config.head_dim} numbers of a head"
    if config.head_dim not in WIDTHS:
        *others, last = WIDTHS
        return f"heads are {config.head_dim} wide, not {', '.join(map(str, others))} or {last}"
    groups = config.num_attention_heads // config.num_key_value_heads
    if groups > 16:
        return f"{groups} query heads share one key head, more than 16"
    return None


def _why_not(layer: nn.Module) -> str | None:
    assert isinstance(layer, Layer)
    attention, mlp = layer.attention, layer.mlp
    groups = (
        (attention.q, attention.k, attention.v),
        (attention.o,),
        (mlp.gate, mlp.up),
        (mlp.down,),
    )
    matrices = [each for group in groups for each in group]
    if all(type(each) is nn.Linear for each in matrices):
        return None
    if not all(isinstance(each, PackedLinear) for each in matrices):
        return "some matrices of a layer are in blocks and some are not"
    for group in groups:
        names = [each.packed.type.name for each in group if isinstance(each, PackedLinear)]
        if any(name not in TYPES for name in names):
            return f"a matrix is of {', '.join(names)}, not {', '.join(TYPES)}"
        if len(names) > 1 and names[0] != names[1]:
            return f"matrices of one input are of {' and '.join(names[:2])}"
    if len({getattr(each, "bias", None) is None for each in groups[0]}) > 1:
        return "some of q, k and v have biases and some have none"
    return None


def _why_not_head(decoder: Decoder) -> str | None:
    head = decoder.head
    if isinstance(head, PackedLinear) and head.packed.type.name not in TYPES:
        return f"the head is of {head.packed.type.name}, not {', '.join(TYPES)}"
    if head is None and not isinstance(decoder.embed, nn.Embedding):
        return "the head is an embedding in blocks"
    return None


def choose_cuda_graph(decoder: Decoder, rows: int, setting: GraphSetting = "auto") -> Decision:
    """Decide whether steps are replayed as a CUDA graph, with the reason."""
    knob = "--cuda-graph"
    why_not = coverage(decoder, rows)
    if why_not is not None:
        reason = f"{why_not}: the decoder makes each step"
        return Decision(knob=knob, choice="off", reason=reason, rejected=(("on", why_not),))
    if setting != "auto":
        return Decision(knob=knob, choice=setting, reason=SET_BY_USER, overridden=True)
    return Decision(
        knob=knob,
        choice="on",
        reason="launching the kernels of a step takes the host longer than their work takes the GPU",
        rejected=(("off", "the same tokens, more slowly"),),
    )
