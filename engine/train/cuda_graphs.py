"""The student's layers, forward and backward, as two CUDA graphs.

A pass of a small student, forward and backward, is some 1,700 kernels of ten microseconds each. Launched
eagerly, each starts about a microsecond after the previous one has ended, and the host is busy throughout.
A graph replays the same kernels with the same arguments in one call.

A captured graph uses fixed addresses:

    inputs       embedded tokens, rotary tables, document starts     copied in before each replay
    outputs      hidden states, gradients of the weights             overwritten by the next replay
    weights      must not move; this is checked

The number of documents varies from batch to batch. A graph has a capacity for documents, and unused
entries are empty documents at the end. A batch that exceeds the capacity triggers a new capture with the
next power of two that holds it.

autograd sees one function from embedded tokens to hidden states. Its backward pass sets `.grad` itself:
the gradients lie in the graph's memory, and copying them would cost what the graph saves. So they are
valid only until the next backward pass, and gradients cannot be accumulated. Tests compare it with
eager launches.

A capture can fail in the middle of a run, when a batch needs a larger capacity than the GPU has memory
for. It is made before anything of the step depends on it: it writes to its own tensors, accumulates no
gradient and draws no random number. So the step, and all later ones, can continue with eager launches,
provided that nothing of the failed capture remains:

    a pass before the capture failed, or instantiating after it     nothing was being captured
    a pass under capture failed, and the capture ended cleanly      the graph is dropped with its memory
    CUDA reports that the capture was invalidated (for example by   the run ends: torch leaves its allocators
    a device sync inside it)                                        and its current stream in capture mode

The cause of the last case is in the captured code, so it shows before the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.errors import InternalError, TrainingFailed
from engine.kernels.cudnn_attention import Ragged
from engine.models.attention import LENGTH_STEP, Packing
from engine.models.decoder import AttentionInputs, Decoder, packed_attention_inputs

# Shapes: B rows, T tokens, N = B*T, D student width, S capacity for documents

MIN_CAPACITY = 32
"""Smallest capacity of a graph, in documents. An unused entry costs some microseconds a layer."""
WARM_UP = 3
"""Number of passes before a capture, in which libraries allocate workspaces and compilers compile."""

_Result = TypeVar("_Result")


class NotCaptured(Exception):
    """The reason why there is no graph; nothing of the attempt remains on the device."""


class Graphs:
    """CUDA graphs for training batches of `rows` rows of `length` tokens, in `dtype` under autocast."""

    def __init__(
        self,
        student: Decoder,
        rows: int,
        length: int,
        dtype: torch.dtype,
        given_up: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`given_up` is called with the reason when graphs are disabled for the rest of the session."""
        self.given_up = given_up
        self.shape = (rows, length)
        self.captures = 0
        """Number of captures so far."""
        self.pool_bytes = 0
        """Memory of the graphs in which no tensor lies between steps: torch does not count it as allocated."""
        self._student, self._dtype = student, dtype
        self._weights = [
            p
            for part in (student.layers, student.norm)
            for p in part.parameters()
            if p.requires_grad
        ]
        self._capacity = 0
        self._captured: _Captured | None = None

    def takes(self, tokens_BT: Tensor) -> bool:
        """Return whether the graphs apply to this batch."""
        return tokens_BT.shape == self.shape and torch.is_grad_enabled()

    def hidden(self, embedded_BTD: Tensor, documents_BT: Tensor) -> Tensor | None:
        """Return the hidden states (B, T, D) after the last norm, valid until the next call.

        Returns None when the layers could not be captured and nothing of the attempt remains. Raises
        TrainingFailed when something does.
        """
        attention_inputs = packed_attention_inputs(self._student.config, documents_BT, self._dtype)
        assert attention_inputs.packing is not None
        documents = len(attention_inputs.packing.starts_S) - 1
        if self._captured is None or documents > self._capacity:
            self._capacity = max(MIN_CAPACITY, 1 << (documents - 1).bit_length())
            # The old graph's memory is freed first: both would not always fit.
            self._captured = None
            try:
                self._captured = _Captured(
                    self._student,
                    self._weights,
                    embedded_BTD,
                    attention_inputs,
                    self._capacity,
                    self._dtype,
                )
            except (NotCaptured, torch.OutOfMemoryError) as failed:
                if embedded_BTD.is_cuda:
                    # This raises when the device itself is broken; then nothing can continue.
                    torch.cuda.synchronize(embedded_BTD.device)
                why = f"room for {self._capacity} documents: {_brief(failed)}"
            if self._captured is None:
                # Free memory here, where no exception still references what the attempt allocated.
                if embedded_BTD.is_cuda:
                    torch.cuda.empty_cache()
                self.given_up(why)
                return None
            self.captures += 1
            self.pool_bytes = self._captured.pool_bytes()
            # The difference is the memory that the capture allocated in the pool.
            torch.cuda.reset_peak_memory_stats(embedded_BTD.device)
        self._captured.copy_inputs(attention_inputs)
        if not embedded_BTD.requires_grad:
            # Frozen embeddings: without an input that wants its gradient there would be no backward pass.
            embedded_BTD = embedded_BTD.detach().requires_grad_()
        hidden_BTD: Tensor = _Launched.apply(embedded_BTD, self._captured)  # type: ignore[no-untyped-call]
        return hidden_BTD


class _Launched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedded_BTD: Tensor, captured: _Captured) -> Tensor:
        ctx.captured = captured
        return captured.forward(embedded_BTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BTD: Tensor) -> Any:
        return ctx.captured.backward(upstream_BTD), None


def _gradients(output: Tensor, inputs: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    with warnings.catch_warnings():
        # At a second capture the weights' AccumulateGrad nodes still hold the first one's stream. Nothing
        # is accumulated here: the gradients are returned.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream", UserWarning)
        return torch.autograd.grad(output, inputs, upstream)


def _warm_up(run: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """Run some warm-up passes, forward and backward, on a side stream; return a zero upstream gradient.

    Raises NotCaptured when a pass fails.
    """
    device = inputs[0].device
    try:
        side_stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side_stream):
            for _ in range(WARM_UP):
                hidden_BTD = run()
                upstream_BTD = torch.zeros_like(hidden_BTD)
                _gradients(hidden_BTD, inputs, upstream_BTD)
        torch.cuda.current_stream(device).wait_stream(side_stream)
    except RuntimeError as error:
        raise NotCaptured(_brief(error)) from error
    return upstream_BTD


def _capture(graph: Any, pool: Any, launch: Callable[[], _Result]) -> _Result:
    """Capture `launch` and return its result.

    Raises NotCaptured when it fails and the capture ends cleanly, TrainingFailed when CUDA
    invalidates the capture, and RuntimeError when an operation before the capture failed.
    """
    failure, result, begun = None, None, False
    try:
        # Other threads may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            begun = True
            try:
                result = launch()
            except RuntimeError as error:
                # Do not raise inside the capture: if it ends cleanly, the state is as before.
                failure = _brief(error)
    except RuntimeError as error:
        if not begun:
            # An earlier operation failed, and the sync at the start of the capture reported it.
            raise
        raise TrainingFailed(
            f"student.graphs: the layers could not be captured: {failure or _brief(error)}; CUDA has ended "
            "the capture itself, and torch cannot go on after that",
            hint="--set student.graphs=off launches them one by one",
        ) from error
    if failure is None:
        try:
            graph.instantiate()
        except RuntimeError as error:
            failure = _brief(error)
    if failure is not None or result is None:
        raise NotCaptured(failure)
    return result


def _brief(error: Exception) -> str:
    """Return the first line of a message: the further lines of CUDA's messages are general advice."""
    return str(error).partition("\n")[0] or type(error).__name__


class _Captured:
    def __init__(
        self,
        student: Decoder,
        weights: list[nn.Parameter],
        embedded_BTD: Tensor,
        attention_inputs: AttentionInputs,
        capacity: int,
        dtype: torch.dtype,
    ) -> None:
        device, length = embedded_BTD.device, embedded_BTD.shape[1]
        self._weights, self._addresses = weights, [p.data_ptr() for p in weights]
        self._x_BTD = embedded_BTD.detach().clone().requires_grad_()
        longest = -(-length // LENGTH_STEP) * LENGTH_STEP
        self._attention_inputs = AttentionInputs(
            attention_inputs.cos_XT1R.clone(),
            attention_inputs.sin_XT1R.clone(),
            None,
            Packing(torch.zeros(capacity + 1, dtype=torch.int32, device=device), longest),
        )
        self.copy_inputs(attention_inputs)

        def run() -> Tensor:
            attention_inputs = self._attention_inputs
            packing = attention_inputs.packing
            if student.cudnn and packing is not None:
                # Within the capture: offsets are computed again at each replay.
                packing = packing._replace(ragged=Ragged(packing.starts_S, length))
                attention_inputs = attention_inputs._replace(packing=packing)
            # No autocast cache: casts of weights made outside would be captured with their old values.
            with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
                x_BTD: Tensor = self._x_BTD
                for layer in student.layers:
                    x_BTD = student.run_layer(layer, x_BTD, attention_inputs)
                hidden_BTD: Tensor = student.norm(x_BTD)
            return hidden_BTD

        inputs = [self._x_BTD, *weights]
        # Casts made before the capture would keep old autograd nodes of the weights, whose stream is not
        # captured.
        torch.clear_autocast_cache()
        self._upstream_BTD = _warm_up(run, inputs)

        def run_back() -> list[Tensor]:
            return [_aligned(g) for g in _gradients(hidden_BTD, inputs, self._upstream_BTD)]

        # Graphs are instantiated after the capture, so that a failure there is not part of a capture.
        self._graphs: list[Any] = [torch.cuda.CUDAGraph(keep_graph=True) for _ in range(2)]
        hidden_BTD = _capture(self._graphs[0], None, run)
        self._embedded_grad_BTD, *self._grads = _capture(
            self._graphs[1], self._graphs[0].pool(), run_back
        )
        self._hidden_BTD = hidden_BTD.detach()

    def pool_bytes(self) -> int:
        """Return the bytes of the graphs' own memory in which no tensor lies."""
        device = self._x_BTD.device
        pool = tuple(self._graphs[0].pool())
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in segments
            if tuple(segment["segment_pool_id"]) == pool and segment["device"] == device.index
        )

    def copy_inputs(self, attention_inputs: AttentionInputs) -> None:
        """Copy the rotary tables and document starts of a batch to the addresses of the graph."""
        assert attention_inputs.packing is not None and self._attention_inputs.packing is not None
        starts_S = attention_inputs.packing.starts_S
        captured_starts_S = self._attention_inputs.packing.starts_S
        self._attention_inputs.cos_XT1R.copy_(attention_inputs.cos_XT1R)
        self._attention_inputs.sin_XT1R.copy_(attention_inputs.sin_XT1R)
        captured_starts_S[: len(starts_S)].copy_(starts_S)
        captured_starts_S[len(starts_S) :].fill_(self._x_BTD.shape[0] * self._x_BTD.shape[1])

    def forward(self, embedded_BTD: Tensor) -> Tensor:
        if [p.data_ptr() for p in self._weights] != self._addresses:
            raise InternalError(
                "CUDA graph of the student: expected the weights at the addresses of the capture, found some moved"
            )
        with torch.no_grad():
            self._x_BTD.copy_(embedded_BTD)
        self._graphs[0].replay()
        return self._hidden_BTD.detach()

    def backward(self, upstream_BTD: Tensor) -> Tensor:
        if any(p.grad is not None for p in self._weights):
            raise InternalError(
                "CUDA graph of the student: expected no gradients before the backward pass, found some"
            )
        self._upstream_BTD.copy_(upstream_BTD)
        self._graphs[1].replay()
        for parameter, grad in zip(self._weights, self._grads, strict=True):
            parameter.grad = grad
        return self._embedded_grad_BTD


def _aligned(grad: Tensor) -> Tensor:
    """Return the gradient contiguous and 16-byte aligned, as the optimizer's kernels need it."""
    return grad.clone() if grad.is_contiguous() and grad.data_ptr() % 16 else grad.contiguous()
