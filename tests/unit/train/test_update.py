"""What makes an update of gradients: which it is, and that the fast one does what torch's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import BadInput
from engine.plan.knobs import choose_update
from engine.train.checkpoint import state
from engine.train.optimizer import AdamW, EmbeddingRows, FusedAdamW, update_if_finite
from engine.train.trainer import Trainer
from tests.support.gpu_trainers import gpu_trainer
from tests.support.kit import Kit
from tests.support.trainers import TRAIN, build, run_ahead

GPU: dict[str, Any] = dict(device="cuda", capability=(9, 0), has_triton=True, ranks=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu", "capability": None}, "a CPU"),
        ({"capability": (7, 5)}, "7.5"),
        ({"has_triton": False}, "triton"),
        ({"ranks": 4}, "4 ranks"),
    ],
)
def test_torch_updates_where_the_kernels_cannot(changes: dict[str, Any], words: str) -> None:
    found = choose_update("auto", **GPU | changes)
    assert found.choice == "torch" and words in str(found.rejected)
    with pytest.raises(BadInput, match=words):
        choose_update("fused", **GPU | changes)


def test_one_gpu_updates_by_the_kernels_unless_told_otherwise() -> None:
    assert choose_update("auto", **GPU).choice == "fused"
    decision = choose_update("torch", **GPU)
    assert decision.choice == "torch" and decision.overridden


def test_torchs_update_without_its_compiler_is_torchs_to_the_bit() -> None:
    """The same weights and moments after updates, one that is left out, and going on from a state."""
    ended = []
    for kind in (torch.optim.AdamW, AdamW):
        weight = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        optimizer = kind([{"params": [weight], "weight_decay": 0.1}], lr=0.01, fused=True)
        for step in range(4):
            optimizer.zero_grad(set_to_none=True)
            (weight**3).sum().backward()  # type: ignore[no-untyped-call]
            norm = torch.tensor(float("nan") if step == 2 else 2.0)
            update_if_finite(optimizer, torch.tensor(1.0), norm, clip_norm=1.0)
            again = kind([{"params": [weight], "weight_decay": 0.1}], lr=0.01, fused=True)
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
        ended.append([weight.detach(), *optimizer.state[weight].values()])
    assert len(ended[0]) == 4 and ended[0][1] == 3, "step, and two moments"
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(*ended, strict=True))


def test_a_tied_embedding_gets_the_gradient_that_autograd_gives_it(kit: Kit) -> None:
    slopes = []
    for looks in (False, True):
        trainer = build(kit)
        student = trainer.student
        batch = trainer.batches.take(0, 4)
        tokens_BT, documents_BT, _ = batch.to_torch("cpu")
        looked = EmbeddingRows(student, tokens_BT) if looks else None
        rows = None if looked is None else looked.rows_BTD
        hidden_BTD = student.hidden(tokens_BT, documents_BT, rows)
        torch.autograd.backward(student.logits_of(hidden_BTD).logsumexp(-1).sum())
        if looked is not None:
            looked.add_gradient()
        slopes.append({n: p.grad for n, p in student.named_parameters()})
    assert EmbeddingRows.applies_to(trainer.student)
    for name, grad in slopes[0].items():
        assert grad is not None
        torch.testing.assert_close(slopes[1][name], grad, rtol=1e-5, atol=1e-6, msg=name)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainer.student.named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_steps_of_the_kernels_are_those_of_torch(accumulation: int, tied: bool) -> None:
    runs = [
        gpu_trainer(update, accumulation=accumulation, tied=tied) for update in ("torch", "fused")
    ]
    assert isinstance(runs[1].optimizer, FusedAdamW)
    steps = [list(run_ahead(trainer)) for trainer in runs]
    for one, other in zip(*steps, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=2e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=2e-2)
    # Of one step, where nothing has grown apart yet: an update is of the size of the rate.
    first = [
        gpu_trainer(update, accumulation=accumulation, tied=tied) for update in ("torch", "fused")
    ]
    for trainer in first:
        next(iter(trainer.steps()))
    rate = first[0].optimizer.param_groups[0]["lr"]
    wanted, found = (weights(trainer) for trainer in first)
    apart = torch.cat([(found[n] - wanted[n]).abs().flatten() for n in wanted])
    assert float(apart.mean()) < 0.02 * rate


@pytest.mark.gpu
def test_a_run_goes_on_with_the_other_update_where_one_left_it() -> None:
    for before, after in (("torch", "fused"), ("fused", "torch")):
        one, other = gpu_trainer(before), gpu_trainer(after)
        steps = one.steps()
        for _ in range(4):
            next(steps)
        kept = state.capture(
            one.student,
            one.optimizer,
            step=one.step,
            seed=0,
            spec_sha256="",
            position={"rows": one.position},
            best_held_out_loss=None,
        )
        state.restore(kept, other.student, other.optimizer)
        other.step, other.position = one.step, one.position
        for mine, its in zip(list(steps), other.steps(), strict=True):
            assert its.loss == pytest.approx(mine.loss, rel=2e-3)
        counts = {float(s["step"]) for s in other.optimizer.state.values()}
        assert counts == {float(TRAIN.steps) * 2}
