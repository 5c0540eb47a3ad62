"""One token of each row at once, on a GPU, without asking the host for anything.

A step is the decoder's own weights in few kernels: products (`engine.kernels.small_m`, or the library's
for floats), and what stands between them (`decode_step.py`). `engine.models.decoder` is the
oracle, and runs the prompts. Lengths, positions and tokens are on the device, so that all steps are the
same work at the same addresses: they are captured once, as a CUDA graph, and replayed. The host then
launches one thing a token where it would launch 230, which take longer than their work.

    start    a prompt into a row, run by itself: what it gets depends on nothing else
    step     one token of every row; rows that nobody uses are run along
    chosen   the tokens of a step, when the device gets there: the host may be some steps ahead

A row's bits are the same whatever the number of rows: with weights in blocks the kernels see to that;
products of floats are of 8 rows always, which takes as long as one.

Covered: CUDA with bf16, up to 8 rows, heads 32, 64 or 128 wide, all matrices in K-quants or all in
floats. `coverage` says why not; then, and on a CPU, the decoder itself makes the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from engine.decision import SET_BY_USER, Decision
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, Layer, Past
from engine.models.packed import PackedLinear

if TYPE_CHECKING:
    from engine.models.generate import Sampling

# Shapes: M rows of a step, T tokens of a prompt, D model width, V vocabulary, K key/value heads,
# E width of a head

ROWS = 8
"""Rows of a step, at most; those of every product of floats."""
LEAST_CAPABILITY = (8, 0)
WIDTHS = (32, 64, 128)
"""Of a head. Keys and values of a chunk of wider ones do not fit into the shared memory of all GPUs."""
HISTORY = 32
"""Steps and starts whose tokens may wait for the host."""
TYPES = ("Q4_K", "Q5_K", "Q6_K")

GraphSetting = Literal["auto", "on", "off"]


def coverage(decoder: Decoder, rows: int) -> str | None:
    """Why the steps of this decoder cannot be made here; None where they can."""
    from engine.kernels.dequantize import has_triton

    like = decoder.norm.weight
    config = decoder.config
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


class Chosen(NamedTuple):
    """The tokens of one step, on their way to the host."""

    pinned_M: Tensor
    arrived: torch.cuda.Event | None
    """None where they are there."""

    def wait(self) -> list[int]:
        """Each row's token; where its logits are not finite, how many are, negative."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [int(one) for one in self.pinned_M.tolist()]


class DecodeSteps:
    """The rows of one generation: their caches and what runs them.

    `capacity` is how many tokens a row may have. With `graph`, steps are replays. With `early` kernels begin
    before the one ahead has ended, where the GPU can; the bits are the same. Whether the decoder is
    one of those that it can run, `coverage` says; without a graph also on a CPU, in Triton's interpreter.
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
        from engine.kernels.decode_choose import empty_best
        from engine.kernels.dependent_launch import can_be_early
        from engine.models.decode_step import Step

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
        """A number for each draw of each row, of which `_count` were taken."""
        self._count = torch.zeros(rows, dtype=torch.int64, device=device)
        if sampling is not None and sampling.temperature > 0:
            self._uniform = torch.zeros(rows, capacity, dtype=torch.float64, device=device)
        self._pinned = deque(
            torch.empty(rows, dtype=torch.int32, pin_memory=on_gpu) for _ in range(HISTORY)
        )
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if on_gpu:
            self._warm_up()
        if graph:
            self._capture()

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def vocab_size(self) -> int:
        return self._decoder.config.vocab_size

    def uniform(self, random: torch.Generator, count: int) -> Tensor | None:
        """The numbers of `count` draws, as they are drawn one by one; None where tokens are not drawn."""
        if self._uniform is None:
            return None
        drawn = [torch.rand((), generator=random, dtype=torch.float64) for _ in range(count)]
        return torch.stack(drawn)

    @property
    def cache_bytes(self) -> int:
        """Of all rows."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._step.caches)

    def start(self, row: int, prompt: Sequence[int], uniform: Tensor | None = None) -> Chosen:
        """Puts a prompt into a row, and chooses what follows it. `uniform` are the numbers of its draws,
        float64 on the host, where tokens are drawn."""
        config, decoder = self._decoder.config, self._decoder
        tokens_BT = torch.tensor([list(prompt)], device=self._device)
        position_BT = torch.arange(len(prompt), device=self._device)[None]
        # As long as the prompt, whatever the rows have room for: a length is part of a shape.
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
        # Into buffers of its own, aligned as kernels want them, and from there into its row.
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
        """One token of every row."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        return self._sent()

    def logits(self) -> Tensor:
        """Those of the last step, (M, V)."""
        assert self._logits is not None
        return self._logits

    def _sent(self) -> Chosen:
        # The oldest of HISTORY: whoever asked for it has read it long ago.
        pinned_M = self._pinned.popleft()
        self._pinned.append(pinned_M)
        pinned_M.copy_(self._chosen, non_blocking=True)
        if self._device.type != "cuda":
            return Chosen(pinned_M, None)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return Chosen(pinned_M, arrived)

    def _warm_up(self) -> None:
        """Compiles all kernels of a step, several at a time."""
        from engine.kernels.prewarm import warm_up
        from engine.kernels.registry import REGISTRY

        with REGISTRY.noting() as wanted:
            self._run()
        warm_up(wanted)

    def _capture(self) -> None:
        """Runs a step, so that everything is allocated and loaded, and captures the next."""
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
        """Into token, position and chosen, of all rows or of one."""
        from engine.kernels.decode_choose import Best
        from engine.kernels.decode_choose import choose as launch_choose

        launch_choose(logits, Best(*best), token, position, chosen, self._capacity - 1)
        if self._uniform is None or self._sampling is None:
            return
        # Row by row: a sum over a row is another sum where it is one of many.
        for at in range(len(logits)):
            where = at if row is None else row
            uniform = self._uniform[where].gather(0, self._count[where : where + 1])
            drawn = draw(logits[at], self._sampling, uniform)
            drawn = torch.where(chosen[at] < 0, chosen[at].long(), drawn)
            chosen[at] = drawn.int()
            token[at] = drawn.clamp(min=0)
            self._count[where].add_(1).clamp_(max=self._capacity - 1)


def draw(logits_V: Tensor, sampling: Sampling, uniform_1: Tensor) -> Tensor:
    """The id that `engine.models.generate.next_token` draws with this uniform number, without asking
    the host: int64, no dimension."""
    scores_V, ids_V = (logits_V.double() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        scores_V = scores_V[: sampling.top_k]
    p_V = scores_V.softmax(0)
    before_V = p_V.cumsum(0) - p_V
    if sampling.top_p < 1:
        p_V = torch.where(before_V < sampling.top_p, p_V, 0.0)
    at_1 = torch.searchsorted(p_V.cumsum(0), uniform_1 * p_V.sum(), right=True)
    # A draw of the very end lies beyond the last that has a share; where logits are NaN, none has.
    at_1 = torch.minimum(at_1, (p_V > 0).sum() - 1).clamp(min=0)
    return ids_V.gather(0, at_1)[0]


def choose_cuda_graph(decoder: Decoder, rows: int, setting: GraphSetting = "auto") -> Decision:
    """Whether steps are replayed as a CUDA graph, and why."""
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
