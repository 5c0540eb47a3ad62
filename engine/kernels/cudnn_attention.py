"""Compute attention over packed documents by cuDNN: the same result as torch's variable-length flash attention, in
about half the time on GPUs of compute capability 9.0 and later.

`nvidia-cudnn-frontend` (the module `cudnn`) builds a graph for one set of shapes, which takes 40 ms; the graph is then
reused. So shapes must not change from batch to batch: the number of documents is padded to a power of two by empty
documents at the end, and the longest document is assumed to be as long as a row. Both cost next to nothing.

A document's position in a tensor is given as an offset in elements: its first token times the number of elements of a
row. The offsets of a batch are computed once and used by every layer (`Ragged`).

The gradient of the queries is summed by atomic additions in varying order, so that the last bits of a step are not
reproducible, as with torch's kernel. cuDNN has a deterministic form, whose memory grows with the number of documents
times the longest; it is not used.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Shapes: N tokens of a batch, S documents, H query heads, K key/value heads, E width of a head

LEAST_CAPABILITY = (9, 0)
MOST_HEAD_DIM = 128
"""Maximum width of a head for which cuDNN has a backward pass on every supported GPU."""
LEAST_DOCUMENTS = 16
MOST_OFFSET = 2**31 - 1
"""Maximum offset, since offsets are int32."""
MOST_GRAPHS = 128
"""Maximum number of cached graphs of forward passes, and of backward passes."""


@functools.cache
def is_installed() -> bool:
    """Return whether the module `cudnn` is installed."""
    return importlib.util.find_spec("cudnn") is not None


class Ragged:
    """The documents of a batch in the form that cuDNN reads."""

    def __init__(self, starts_S: Tensor, longest: int) -> None:
        """`starts_S`: int32, the first token of each document, and the end. `longest` is the length of a row."""
        documents = len(starts_S) - 1
        self.documents = max(LEAST_DOCUMENTS, 1 << (documents - 1).bit_length())
        self.longest = longest
        empty = starts_S[-1:].expand(self.documents - documents)
        self._starts_S = torch.cat([starts_S, empty])
        self.lengths_S = self._starts_S.diff()
        self._offsets: dict[int, Tensor] = {}

    def offsets(self, row: int) -> Tensor:
        """Return the first element of each document in a tensor with `row` elements from a token to the next."""
        if row not in self._offsets:
            self._offsets[row] = self._starts_S * row
        return self._offsets[row]


def takes(q_NHE: Tensor, k_NKE: Tensor) -> bool:
    """Whether these queries and keys are supported."""
    width = q_NHE.shape[2]
    last = max(each.stride(0) * len(each) for each in (q_NHE, k_NKE))
    return width % 8 == 0 and width <= MOST_HEAD_DIM and last <= MOST_OFFSET


def attend(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    ragged: Ragged,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return causal attention within each document, (N, H, E), contiguous.

    Scores are multiplied by `scale`, or 1/sqrt(E); a token attends to at most `window` tokens, itself included.
    """
    scale = 1 / math.sqrt(q_NHE.shape[2]) if scale is None else scale
    tensors = (q_NHE, k_NKE, v_NKE)
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        # The backward pass writes wrong gradients if tokens are not adjacent in memory.
        whole = (each.contiguous() for each in tensors)
        found: Tensor = _Attention.apply(*whole, ragged, scale, window)  # type: ignore[no-untyped-call]
        return found
    # One token's heads are adjacent in memory. Tokens need not be: q, k and v may be slices of one matmul's output.
    q_NHE, k_NKE, v_NKE = (
        each if each.stride()[1:] == (each.shape[2], 1) else each.contiguous() for each in tensors
    )
    out_NHE, _ = _forward(q_NHE, k_NKE, v_NKE, ragged, scale, window, keep=False)
    return out_NHE


def why_not(
    heads: tuple[int, int, int],
    tokens: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    trained: bool,
) -> str | None:
    """Build the graphs for (query heads, key heads, width of a head) in batches of (rows, length), and return why that
    is impossible, or None. The first graph of a process takes a second.
    """
    queries, keys, width = heads
    rows, length = tokens
    if width % 8 or width > MOST_HEAD_DIM:
        return f"heads of {width} numbers: it takes up to {MOST_HEAD_DIM}, in multiples of 8"
    shape = _Shape(
        documents=LEAST_DOCUMENTS,
        longest=length,
        tokens=rows * length,
        heads=queries,
        shared_heads=keys,
        width=width,
        rows=(queries * width, keys * width, keys * width),
        dtype=dtype,
        device=device,
        scale=1 / math.sqrt(width),
        window=None,
    )
    try:
        _forward_graph(shape, trained)
        if trained:
            _backward_graph(shape)
    except (RuntimeError, ImportError, OSError) as error:
        # The extension raises RuntimeError if cuDNN rejects the graph or has an incompatible version.
        return str(error).partition("\n")[0] or type(error).__name__
    return None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_NHE: Tensor,
        k_NKE: Tensor,
        v_NKE: Tensor,
        ragged: Ragged,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out_NHE, stats_NH = _forward(q_NHE, k_NKE, v_NKE, ragged, scale, window, keep=True)
        # Build it in this thread: the thread of the backward pass may have no CUDA context yet.
        ctx.graph = _backward_graph(_shape_of(q_NHE, k_NKE, v_NKE, ragged, scale, window))
        ctx.save_for_backward(q_NHE, k_NKE, v_NKE, out_NHE, stats_NH)
        ctx.ragged = ragged
        return out_NHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NHE: Tensor) -> Any:
        q_NHE, k_NKE, v_NKE, out_NHE, stats_NH = ctx.saved_tensors
        given = (q_NHE, k_NKE, v_NKE, out_NHE, dout_NHE.contiguous(), stats_NH)
        slopes = tuple(
            torch.empty(each.shape, dtype=each.dtype, device=each.device)
            for each in (q_NHE, k_NKE, v_NKE)
        )
        _execute(ctx.graph, (*given, *slopes), ctx.ragged)
        return *slopes, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Sizes and layout that a graph is built for."""

    documents: int
    longest: int
    tokens: int
    heads: int
    shared_heads: int
    width: int
    rows: tuple[int, int, int]
    """Strides of q, k and v from one token to the next, in elements."""
    dtype: torch.dtype
    device: torch.device
    scale: float
    window: int | None


def _shape_of(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, ragged: Ragged, scale: float, window: int | None
) -> _Shape:
    tokens, heads, width = q_NHE.shape
    return _Shape(
        documents=ragged.documents,
        longest=ragged.longest,
        tokens=tokens,
        heads=heads,
        shared_heads=k_NKE.shape[1],
        width=width,
        rows=(q_NHE.stride(0), k_NKE.stride(0), v_NKE.stride(0)),
        dtype=q_NHE.dtype,
        device=q_NHE.device,
        scale=scale,
        window=window,
    )


def _forward(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    ragged: Ragged,
    scale: float,
    window: int | None,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return the attention, and the logsumexp of each query's scores if a backward pass needs them."""
    graph = _forward_graph(_shape_of(q_NHE, k_NKE, v_NKE, ragged, scale, window), keep)
    out_NHE = torch.empty(q_NHE.shape, dtype=q_NHE.dtype, device=q_NHE.device)
    stats_NH = q_NHE.new_empty(q_NHE.shape[:2] if keep else (0,), dtype=torch.float32)
    tensors = (q_NHE, k_NKE, v_NKE, out_NHE, stats_NH) if keep else (q_NHE, k_NKE, v_NKE, out_NHE)
    _execute(graph, tensors, ragged)
    return out_NHE, stats_NH


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    tensors: tuple[Any, ...]
    """The graph's tensors, in the order in which they are given at an execution."""
    offsets: tuple[tuple[int, Any], ...]
    """Elements of a row, and the graph's tensor of offsets in such rows."""
    lengths: Any
    workspace_bytes: int


def _execute(built: _Graph, tensors: tuple[Tensor, ...], ragged: Ragged) -> None:
    device = tensors[0].device
    workspace = torch.empty(max(built.workspace_bytes, 1), dtype=torch.uint8, device=device)
    given = dict(zip(built.tensors, tensors, strict=True))
    given |= {tensor: ragged.offsets(row) for row, tensor in built.offsets}
    given[built.lengths] = ragged.lengths_S
    import cudnn

    stream = torch.cuda.current_stream(device)
    if not torch.cuda.is_current_stream_capturing():
        # cuDNN launches by the driver API, which needs a current context; a call of the runtime API makes it current.
        stream.query()
    with _LOCK:
        handle = _handle(device)
        cudnn.set_stream(handle=handle, stream=stream.cuda_stream)
        built.graph.execute(given, workspace, handle=handle)


_LOCK = threading.Lock()
"""Lock that a thread holds while it uses a handle."""


@functools.cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


class _Builder:
    """Builder of a graph."""

    def __init__(self, shape: _Shape) -> None:
        import cudnn

        self.shape, self._cudnn = shape, cudnn
        kinds = {
            torch.bfloat16: cudnn.data_type.BFLOAT16,
            torch.float16: cudnn.data_type.HALF,
        }
        self._kind = kinds[shape.dtype]
        self.graph = cudnn.pygraph(
            io_data_type=self._kind,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        self.tensors: list[Any] = []
        self._offsets: dict[int, Any] = {}
        one = (shape.documents, 1, 1, 1)
        self.lengths = self.graph.tensor(
            name="lengths", dim=one, stride=(1, 1, 1, 1), data_type=cudnn.data_type.INT32
        )

    def options(self) -> dict[str, Any]:
        """Return the arguments that the forward and the backward pass have in common."""
        shape = self.shape
        found = {
            "attn_scale": shape.scale,
            "use_padding_mask": True,
            "seq_len_q": self.lengths,
            "seq_len_kv": self.lengths,
            "use_causal_mask": True,
        }
        if shape.window is not None:
            found["sliding_window_length"] = shape.window
        return found

    def _layout(self, heads: int, row: int) -> dict[str, Any]:
        shape = self.shape
        return {
            "dim": (shape.documents, heads, shape.longest, shape.width),
            "stride": (shape.longest * row, shape.width, row, 1),
        }

    def _stats_layout(self) -> dict[str, Any]:
        shape, heads = self.shape, self.shape.heads
        return {
            "dim": (shape.documents, heads, shape.longest, 1),
            "stride": (shape.longest * heads, 1, heads, 1),
        }

    def given(self, name: str, heads: int, row: int | None = None) -> Any:
        """Return an input tensor of the graph, with a stride of `row` elements from one token to the next."""
        row = heads * self.shape.width if row is None else row
        layout = self._layout(heads, row)
        tensor = self.graph.tensor(name=name, data_type=self._kind, **layout)
        return self._placed(tensor, row)

    def inputs(self) -> tuple[Any, ...]:
        """Return queries, keys and values."""
        shape = self.shape
        heads = (shape.heads, shape.shared_heads, shape.shared_heads)
        each = zip(("q", "k", "v"), heads, shape.rows, strict=True)
        return tuple(self.given(*one) for one in each)

    def given_stats(self) -> Any:
        kind = self._cudnn.data_type.FLOAT
        tensor = self.graph.tensor(name="stats", data_type=kind, **self._stats_layout())
        return self._placed(tensor, self.shape.heads)

    def found(self, tensor: Any, heads: int) -> None:
        """Mark a computed tensor as an output of the graph; it is contiguous."""
        row = heads * self.shape.width
        layout = self._layout(heads, row)
        tensor.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
        self._placed(tensor.set_data_type(self._kind), row)

    def found_stats(self, tensor: Any) -> None:
        layout = self._stats_layout()
        tensor.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
        self._placed(tensor.set_data_type(self._cudnn.data_type.FLOAT), self.shape.heads)

    def _placed(self, tensor: Any, row: int) -> Any:
        if row not in self._offsets:
            self._offsets[row] = self.graph.tensor(
                name=f"offsets {row}",
                dim=(self.shape.documents + 1, 1, 1, 1),
                stride=(1, 1, 1, 1),
                data_type=self._cudnn.data_type.INT32,
            )
        tensor.set_ragged_offset(self._offsets[row])
        self.tensors.append(tensor)
        return tensor

    def build(self) -> _Graph:
        self.graph.build([self._cudnn.heur_mode.A])
        return _Graph(
            self.graph,
            tuple(self.tensors),
            tuple(self._offsets.items()),
            self.lengths,
            self.graph.get_workspace_size(),
        )


@functools.lru_cache(MOST_GRAPHS)
def _forward_graph(shape: _Shape, keep: bool) -> _Graph:
    builder = _Builder(shape)
    q, k, v = builder.inputs()
    out, stats = builder.graph.sdpa(q=q, k=k, v=v, generate_stats=keep, **builder.options())
    builder.found(out, shape.heads)
    if keep:
        builder.found_stats(stats)
    return builder.build()


@functools.lru_cache(MOST_GRAPHS)
def _backward_graph(shape: _Shape) -> _Graph:
    builder = _Builder(shape)
    q, k, v = builder.inputs()
    out, dout = builder.given("out", shape.heads), builder.given("dout", shape.heads)
    stats = builder.given_stats()
    dq, dk, dv = builder.graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=out,
        dO=dout,
        stats=stats,
        max_total_seq_len_q=shape.tokens,
        max_total_seq_len_kv=shape.tokens,
        **builder.options(),
    )
    builder.found(dq, shape.heads)
    builder.found(dk, shape.shared_heads)
    builder.found(dv, shape.shared_heads)
    return builder.build()
