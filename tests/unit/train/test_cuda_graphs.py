"""Layers that are launched as CUDA graphs: when they are, that they answer as layers launched one by one,
whatever documents a batch has, and that a run goes on without them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.data.batches import Batches
from engine.errors import BadInput, InternalError, TrainingFailed
from engine.formats.safetensors import tensors_sha256
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.text import decision_lines
from engine.log.write import LogWriter
from engine.models.adapter_targets import trained_parameters
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.plan.knobs import choose_graphs
from engine.spec.sections import StudentSection
from engine.train import cuda_graphs
from engine.train.background import ModelHash
from engine.train.capture_student import capture_student, log_no_graphs
from engine.train.cuda_graphs import MIN_CAPACITY, Graphs, NotCaptured, _capture
from engine.train.to_events import write
from engine.train.trainer import Trainer
from tests.support.budgets import budget_of, config, item, spec_of
from tests.support.gpu_trainers import gpu_trainer
from tests.support.kit import Kit
from tests.support.paths import ROOT
from tests.support.running import environment
from tests.support.trainers import build, run_ahead, snapshot

GPU: dict[str, Any] = dict(
    config=config(), device="cuda", packed=True, checkpointing=False, adapted=False, tokens=2048, accumulation=1,
    ranks=1, allocator="native", layers=24, needed_bytes=3 << 30, given_bytes=1 << 30, available_bytes=4 << 30,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "CPU"),
        ({"ranks": 2}, "several GPUs"),
        ({"accumulation": 2}, "cannot accumulate"),
        ({"packed": False}, "packed"),
        (
            {"config": config(family="gemma3_text", layers_without_window=(1,), sliding_window=5)},
            "without one",
        ),
        ({"checkpointing": True}, "recompute"),
        ({"allocator": "managed"}, "managed"),
    ],
)
def test_layers_are_not_captured_where_they_cannot_be(changes: dict[str, Any], words: str) -> None:
    found = choose_graphs("auto", **GPU | changes)
    assert found.choice == "off" and words in found.reason
    with pytest.raises(BadInput, match=words):
        choose_graphs("on", **GPU | changes)


def test_layers_are_captured_where_that_is_asked_for() -> None:
    left = choose_graphs("auto", **GPU)
    assert left.choice == "off" and "3.0 GiB instead of 1.0 GiB" in left.reason
    assert choose_graphs("off", **GPU).choice == "off"
    decision = choose_graphs("on", **GPU)
    assert decision.choice == "on" and decision.overridden


def test_layers_with_adapters_are_captured_where_the_host_is_slower_than_the_gpu_and_memory_allows() -> (
    None
):
    adapted = GPU | {"adapted": True}
    found = choose_graphs("auto", **adapted)
    assert found.choice == "on" and "does not wait until the host" in found.reason
    for changes in ({"tokens": 8192}, {"available_bytes": 2 << 30}, {"available_bytes": None}):
        assert choose_graphs("auto", **adapted | changes).choice == "off"
    assert choose_graphs("off", **adapted).choice == "off"


def test_gradients_of_captured_adapters_are_in_the_plan() -> None:
    shape = config(896, 4864, 24, 14, 2, 32_000)
    spec = spec_of(student__path="base", student__config="", student__adapter="lora")
    budget = budget_of(spec, shape, student__attention="packed", student__graphs="on")
    wanted = 4 * trained_parameters(shape, spec.student)
    assert item(budget, "gradients in the graph") == item(budget, "gradients") == wanted


@pytest.mark.parametrize("tied", [True, False])
def test_captured_layers_keep_activations_and_gradients_in_memory(tied: bool) -> None:
    shape = config(896, 4864, 24, 14, 2, 32_000, tied=tied)
    plain, captured = (
        budget_of(spec_of(), shape, student__attention="packed", student__graphs=graphs)
        for graphs in ("off", "on")
    )
    inside = sum(p.numel() for p in layers_of(shape).parameters())
    assert item(captured, "gradients in the graph") == 4 * inside
    assert captured.total_bytes > plain.total_bytes


def layers_of(shape: ModelConfig) -> torch.nn.Module:
    with torch.device("meta"):
        decoder = Decoder(shape)
    return torch.nn.ModuleList([decoder.layers, decoder.norm])


def test_steps_of_a_run_whose_layers_cannot_be_captured_are_those_of_layers_launched_one_by_one(
    kit: Kit,
) -> None:
    """A CPU has no graphs, so this capture fails in earnest, in the middle of the run."""
    plain, other = build(kit), build(kit)
    wanted = list(plain.steps())
    said: list[str] = []
    found = []
    for step in other.steps():
        found.append(step)
        if step.step == 3:
            other.graphs = Graphs(other.student, 4, 32, torch.float32, said.append)
    assert len(said) == 1 and "requires CUDA" in said[0] and f"{MIN_CAPACITY} documents" in said[0]
    assert other.graphs is None
    keys = ("step", "loss", "grad_norm", "lr", "position", "updated")
    of = [[[getattr(s, key) for key in keys] for s in steps] for steps in (wanted, found)]
    assert of[0] == of[1] and len(found) > 4
    pairs = zip(snapshot(plain).values(), snapshot(other).values(), strict=True)
    assert all(torch.equal(one, another) for one, another in pairs)


def test_a_failed_capture_leaves_gradients_weights_and_random_numbers_as_they_were(
    kit: Kit,
) -> None:
    trainer = build(kit)
    next(iter(trainer.steps()))
    said: list[str] = []
    batch = trainer.batches.take(0, 4)
    tokens_BT, documents_BT, _ = batch.to_torch("cpu")
    names = dict(trainer.student.named_parameters())
    grads = {n: p.grad.clone() for n, p in names.items() if p.grad is not None}
    weights, random = snapshot(trainer), torch.get_rng_state()
    graphs = Graphs(trainer.student, 4, 32, torch.float32, said.append)
    embedded_BTD = trainer.student.embed(tokens_BT)
    assert graphs.hidden(embedded_BTD, documents_BT) is None and len(said) == 1
    assert grads and all(torch.equal(names[n].grad, g) for n, g in grads.items())  # type: ignore[arg-type]
    assert all(torch.equal(p, weights[n]) for n, p in names.items())
    assert torch.equal(torch.get_rng_state(), random)


def test_layers_that_cannot_be_captured_are_launched_one_by_one_and_the_log_says_so(
    kit: Kit, tmp_path: Path
) -> None:
    trainer, run = build(kit), RunFolder(tmp_path)
    with LogWriter(run.events, writer="trainer") as log:
        write(log, choose_graphs("on", **GPU))

        def given_up(why: str) -> None:
            log_no_graphs(7, why, partial(write, log))

        capture_student(trainer, length=32, given_up=given_up)
        assert trainer.graphs is None
    assert trainer.graphs is None and next(iter(trainer.steps())).updated
    follower = Follower(run)
    follower.read_all()
    first, then = follower.view.decisions
    assert (first.choice, then.choice) == ("on", "off") and first.knob == then.knob
    words = "\n".join(decision_lines(then))
    assert "from step 7 on" in words and "not on: they could not be captured: room for" in words
    (note,) = follower.view.notes
    assert note.level == "warning" and "requires CUDA" in note.text


class _Graph:
    """What torch does around a capture, on a machine that has none."""

    def __init__(self, *, begins: bool = True, ends: bool = True, fits: bool = True) -> None:
        self.begins, self.ends, self.fits, self.ended = begins, ends, fits, False

    @contextlib.contextmanager
    def __call__(self, graph: _Graph, pool: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        if not self.begins:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        try:
            yield
        finally:
            graph.ended = True
            if not self.ends:
                raise RuntimeError("operation failed due to a previous error during capture")

    def instantiate(self) -> None:
        assert self.ended
        if not self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.\nAdvice")


def _out_of_memory() -> str:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried 2.00 GiB.\nAdvice")


@pytest.mark.parametrize(
    ("graph", "launch", "error", "words"),
    [
        (_Graph(), _out_of_memory, NotCaptured, "^CUDA out of memory. Tried 2.00 GiB.$"),
        (_Graph(fits=False), lambda: "made", NotCaptured, "^CUDA out of memory.$"),
        (_Graph(ends=False), _out_of_memory, TrainingFailed, "Tried 2.00 GiB"),
        (_Graph(ends=False), lambda: "made", TrainingFailed, "previous error"),
        (_Graph(begins=False), lambda: "made", RuntimeError, "illegal memory access"),
    ],
    ids=["under capture", "instantiating", "invalidated by it", "invalidated", "before it"],
)
def test_a_run_goes_on_only_after_a_capture_that_ended_whole(
    graph: _Graph,
    launch: Any,
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(error, match=words):
        _capture(graph, None, launch)
    assert graph.ended == graph.begins


def test_memory_that_runs_out_before_a_capture_leaves_a_run_that_goes_on(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_Captured", lambda *_: _out_of_memory())
    trainer, said = build(kit), list[str]()
    trainer.graphs = Graphs(trainer.student, 4, 32, torch.float32, said.append)
    assert next(iter(trainer.steps())).updated and trainer.graphs is None
    assert said == [f"room for {MIN_CAPACITY} documents: CUDA out of memory. Tried 2.00 GiB."]


def with_documents(trainer: Trainer, every: int) -> Trainer:
    """Rows of documents of so many tokens."""
    stream = trainer.batches._stream
    cut = replace(stream, starts=np.array([*range(0, len(stream), every), len(stream)]))
    trainer.batches = Batches(cut, seq_len=256, rows_per_batch=4, seed=0)
    return trainer


def outputs_of(trainer: Trainer) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the hidden states of the first batch, and every gradient under a fixed upstream gradient."""
    given = trainer._on_device(trainer._part_at(0, 0))
    with trainer.autocast():
        hidden_BTD = trainer.hidden(given.tokens_BT, given.documents_BT)
    generator = torch.Generator("cuda").manual_seed(0)
    upstream_BTD = torch.randn(
        hidden_BTD.shape, generator=generator, device="cuda", dtype=hidden_BTD.dtype
    )
    torch.autograd.backward(hidden_BTD, upstream_BTD)
    gradients = [p.grad.clone() for p in trainer.parameters if p.grad is not None]
    trainer.optimizer.zero_grad(set_to_none=True)
    return hidden_BTD.detach().clone(), gradients


def assert_outputs_agree(plain: Trainer, captured: Trainer) -> None:
    """The weights of both are equal. Tiny gradients are noise: they are compared with the whole gradient."""
    wanted, found = outputs_of(plain), outputs_of(captured)
    assert torch.equal(found[0], wanted[0])
    whole = torch.stack([gradient.norm() for gradient in wanted[1]]).norm()
    for one, other in zip(found[1], wanted[1], strict=True):
        assert (one - other).norm() / other.norm().clamp(min=0.01 * whole) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("update", ["torch", "fused"])
@pytest.mark.parametrize("tied", [True, False])
def test_steps_of_captured_layers_are_those_of_layers_launched_one_by_one(
    update: str, tied: bool
) -> None:
    plain, captured = gpu_trainer(update, tied=tied), gpu_trainer(update, tied=tied)
    capture_student(captured, length=256)
    assert_outputs_agree(plain, captured)
    assert captured.graphs is not None and captured.graphs.captures == 1
    for one, other in zip(run_ahead(plain), run_ahead(captured), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=2e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("targets", ["all", "attention"])
def test_steps_of_captured_layers_with_adapters_are_those_of_layers_launched_one_by_one(
    targets: str,
) -> None:
    adapter = StudentSection(path="base", adapter="lora", adapter_rank=32, adapter_targets=targets)
    plain, captured = (gpu_trainer("fused", adapter=adapter) for _ in range(2))
    capture_student(captured, length=256)
    assert_outputs_agree(plain, captured)
    assert captured.graphs is not None and captured.graphs.pool_bytes > 0
    for one, other in zip(run_ahead(plain), run_ahead(captured), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=2e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=2e-2)


@pytest.mark.gpu
def test_a_batch_of_more_documents_than_there_is_room_for_is_captured_anew() -> None:
    trainer = with_documents(gpu_trainer("fused"), 200)
    capture_student(trainer, length=256)
    assert trainer.graphs is not None
    for every, captures in ((40, 1), (1024 // (2 * MIN_CAPACITY), 2), (200, 2)):
        with_documents(trainer, every)
        trainer._ahead = None
        given = trainer._on_device(trainer._part_at(0, 0))
        with trainer.autocast():
            # Without its graph: one that lives on knows weights from outside of a capture.
            wanted = trainer.student.hidden(given.tokens_BT, given.documents_BT).detach()
            found = trainer.hidden(given.tokens_BT, given.documents_BT)
        assert torch.equal(found, wanted), every
        assert trainer.graphs.captures == captures, every


@pytest.mark.gpu
def test_what_a_graph_cannot_do_is_refused_or_done_by_the_layers_themselves() -> None:
    trainer = gpu_trainer("fused")
    capture_student(trainer, length=256)
    kept = trainer.graphs
    assert kept is not None
    # Another shape, and no gradient.
    batch = trainer.batches.take(0, 2)
    tokens_BT = batch.to_torch("cuda").tokens_BT
    assert not kept.takes(tokens_BT)
    with torch.no_grad():
        assert not kept.takes(tokens_BT.repeat(2, 1))
    next(iter(trainer.steps()))
    # A second backward pass would be added to a gradient that it overwrites.
    with trainer.autocast():
        hidden_BTD = trainer.hidden(*trainer.batches.take(0, 4).to_torch("cuda")[:2])
    with pytest.raises(InternalError, match="no gradients before the backward pass"):
        torch.autograd.backward(hidden_BTD.float().sum())
    # And weights that moved would be the old ones.
    weight = trainer.student.norm.weight
    weight.data = weight.data.clone()
    with pytest.raises(InternalError, match="some moved"):
        trainer.hidden(*trainer.batches.take(0, 4).to_torch("cuda")[:2])


class _Read(dict[str, torch.Tensor]):
    """Tensors that are read only once a capture is under way."""

    def __init__(self, given: dict[str, torch.Tensor]) -> None:
        super().__init__(given)
        self.captures = threading.Event()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.captures.wait()
        return super().__getitem__(name)


class _WaitsForHash(torch.nn.Module):
    """A layer that returns under a capture only after the hash of `tensors` is known."""

    def __init__(self, layer: torch.nn.Module, tensors: _Read, known: ModelHash) -> None:
        super().__init__()
        self.layer, self.tensors, self.known = layer, tensors, known

    def forward(self, *given: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            self.tensors.captures.set()
            self.known.result()
        return self.layer(*given)


@pytest.mark.gpu
def test_weights_are_hashed_while_layers_are_captured() -> None:
    trainer = gpu_trainer("fused")
    # More tensors than torch has streams.
    tensors = _Read({f"x{n}": torch.arange(1 << 10, device="cuda") for n in range(40)})
    known = ModelHash(tensors, cast(Any, str), lambda _: None)
    trainer.student.layers[1] = _WaitsForHash(trainer.student.layers[1], tensors, known)
    capture_student(trainer, length=256)
    assert trainer.graphs is not None
    assert known.result() == tensors_sha256({f"x{n}": torch.arange(1 << 10) for n in range(40)})


class _Greedy(torch.nn.Module):
    """A layer that wants more memory than there is, once it is told to and a capture is under way."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.wants_too_much = layer, False

    def forward(self, *given: Any) -> Any:
        if self.wants_too_much and torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
        return self.layer(*given)


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("update", ["torch", "fused"])
def test_memory_that_runs_out_under_a_capture_leaves_a_run_that_goes_on(update: str) -> None:
    plain, other = gpu_trainer(update), gpu_trainer(update)
    other.student.layers[1] = greedy = _Greedy(other.student.layers[1])
    said: list[str] = []
    stream, random = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    capture_student(other, length=256, given_up=said.append)
    assert other.graphs is not None and not said
    # The next batch is captured anew, and now there is no memory for it.
    other.graphs._capacity = 0
    greedy.wants_too_much = True
    for one, another in zip(plain.steps(), other.steps(), strict=True):
        assert another.loss == pytest.approx(one.loss, rel=2e-3)
        assert another.grad_norm == pytest.approx(one.grad_norm, rel=2e-2)
    assert other.graphs is None and len(said) == 1 and "out of memory" in said[0]
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.cuda.get_rng_state(), random)
    # Nothing of the failed capture holds memory, and another one can be made.
    greedy.wants_too_much = False
    other.optimizer.zero_grad(set_to_none=True)
    capture_student(other, length=256)
    found_BTD, _ = outputs_of(other)
    assert other.graphs is not None
    other.graphs = None
    assert torch.equal(found_BTD, outputs_of(other)[0])


ASKS = """
import torch
from tests.support.gpu_trainers import gpu_trainer
from engine.train.background import ModelHash
from engine.train.capture_student import capture_student
from engine.errors import TrainingFailed

class Asks(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
    def forward(self, x_BTD, *given):
        if torch.cuda.is_current_stream_capturing():
            x_BTD.sum().item()
        return self.layer(x_BTD, *given)

trainer = gpu_trainer("torch")
trainer.student.layers[1] = Asks(trainer.student.layers[1])
try:
    capture_student(trainer, length=256)
except TrainingFailed as failed:
    print(failed, flush=True)
"""


@pytest.mark.gpu
def test_a_layer_that_waits_for_the_device_under_a_capture_is_refused_before_the_first_step() -> (
    None
):
    # In a process of its own, which nothing can capture in afterwards.
    path = ":".join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ASKS],
        capture_output=True,
        text=True,
        env=environment() | {"PYTHONPATH": path},
        cwd=ROOT,
    )
    assert "student.graphs: the layers could not be captured" in done.stdout, done.stderr[-2000:]
    assert "student.graphs=off" in done.stdout
