"""Layers that are launched as CUDA graphs: when they are, and that they answer as layers launched one by
one, whatever documents a batch has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_memory_budget import budget_of, config, item, spec_of
from test_update import gpu_trainer

from engine.data.batches import Batches
from engine.data.tokens import TokenStream
from engine.distill.checking import step_gradients
from engine.distill.choices import choose_graphs
from engine.distill.graphed import LEAST_ROOM
from engine.distill.student import put_into_graphs
from engine.distill.trainer import Trainer
from engine.errors import BadInput, InternalError
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder

GPU: dict[str, Any] = dict(
    device="cuda", packed=True, checkpointing=False, accumulation=1, ranks=1, allocator="native",
    layers=24, needed_bytes=3 << 30, given_bytes=1 << 30,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "CPU"),
        ({"ranks": 2}, "several GPUs"),
        ({"accumulation": 2}, "accumulates"),
        ({"packed": False}, "packed"),
        ({"checkpointing": True}, "again"),
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
    assert left.choice == "off" and "3.0 GiB in the place of 1.0 GiB" in left.reason
    assert choose_graphs("off", **GPU).choice == "off"
    told = choose_graphs("on", **GPU)
    assert told.choice == "on" and told.overridden


@pytest.mark.parametrize("tied", [True, False])
def test_captured_layers_keep_activations_and_gradients_in_memory(tied: bool) -> None:
    shape = config(896, 4864, 24, 14, 2, 32_000, tied=tied)
    plain, captured = (
        budget_of(spec_of(), student=shape, packed=True, graphs=graphs) for graphs in (False, True)
    )
    inside = sum(p.numel() for p in layers_of(shape).parameters())
    assert item(captured, "gradients in the graph") == 4 * inside
    assert captured.total_bytes > plain.total_bytes


def layers_of(shape: ModelConfig) -> torch.nn.Module:
    with torch.device("meta"):
        decoder = Decoder(shape)
    return torch.nn.ModuleList([decoder.layers, decoder.norm])


def with_documents(trainer: Trainer, every: int) -> Trainer:
    """Rows of documents of so many tokens."""
    stream = trainer.batches._stream
    cut = TokenStream(
        tokens=stream.tokens,
        documents=(torch.arange(len(stream.tokens)) // every).int().numpy(),
        sha256="",
    )
    trainer.batches = Batches(cut, seq_len=256, rows_per_batch=4, seed=0)
    return trainer


@pytest.mark.gpu
@pytest.mark.parametrize("update", ["torch", "fused"])
@pytest.mark.parametrize("tied", [True, False])
def test_steps_of_captured_layers_are_those_of_layers_launched_one_by_one(
    update: str, tied: bool
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    plain, captured = gpu_trainer(update, tied=tied), gpu_trainer(update, tied=tied)
    agreement = put_into_graphs(captured, length=256)
    assert agreement.hidden == 0 and agreement.worst < 0.02
    assert captured.graphs is not None and captured.graphs.captures == 1
    for one, other in zip(
        plain.steps(lambda step: True), captured.steps(lambda step: True), strict=True
    ):
        assert other.loss == pytest.approx(one.loss, rel=2e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=2e-2)


@pytest.mark.gpu
def test_a_batch_of_more_documents_than_there_is_room_for_is_captured_anew() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    trainer = with_documents(gpu_trainer("fused"), 200)
    put_into_graphs(trainer, length=256)
    assert trainer.graphs is not None
    for every, captures in ((40, 1), (1024 // (2 * LEAST_ROOM), 2), (200, 2)):
        with_documents(trainer, every)
        trainer._next = None
        given = trainer._give(*trainer._part_at(0, 0))
        with trainer.autocast():
            # Without its graph: one that lives on knows weights from outside of a capture.
            wanted = trainer.student.hidden(given.tokens_BT, given.documents_BT).detach()
            found = trainer.hidden(given.tokens_BT, given.documents_BT)
        assert torch.equal(found, wanted), every
        assert trainer.graphs.captures == captures, every


@pytest.mark.gpu
def test_what_a_graph_cannot_do_is_refused_or_done_by_the_layers_themselves() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    trainer = gpu_trainer("fused")
    put_into_graphs(trainer, length=256)
    kept = trainer.graphs
    assert kept is not None
    # Another shape, and no gradient.
    batch = trainer.batches.take(0, 2)
    tokens_BT = batch.to_torch("cuda").tokens_BT
    assert not kept.takes(tokens_BT)
    with torch.no_grad():
        assert not kept.takes(tokens_BT.repeat(2, 1))
    # Gradients that a check compares are its own.
    loss = step_gradients(trainer, [trainer.batches.take(0, 4)])
    before = {
        n: p.grad.clone() for n, p in trainer.student.named_parameters() if p.grad is not None
    }
    names = dict(trainer.student.named_parameters())
    kept_grads = {n: names[n].grad for n in before}
    trainer.optimizer.zero_grad(set_to_none=True)
    step = next(iter(trainer.steps()))
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert all(torch.equal(grad, before[n]) for n, grad in kept_grads.items() if grad is not None)
    # A second backward pass would be added to a gradient that it overwrites.
    with trainer.autocast():
        hidden_BTD = trainer.hidden(*trainer.batches.take(0, 4).to_torch("cuda")[:2])
    with pytest.raises(InternalError, match="no gradient from before"):
        torch.autograd.backward(hidden_BTD.float().sum())
    # And weights that moved would be the old ones.
    weight = trainer.student.norm.weight
    weight.data = weight.data.clone()
    with pytest.raises(InternalError, match="some moved"):
        trainer.hidden(*trainer.batches.take(0, 4).to_torch("cuda")[:2])
