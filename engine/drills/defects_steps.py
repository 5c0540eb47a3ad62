"""Defects of a step: of its input rows, of its loss and update, and of its checkpoint."""

# Shapes: B rows, T tokens, N tokens of a micro-batch, D width, V vocabulary

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.data import batches as batches_module
from engine.data.batches import IGNORED, Batch
from engine.drills.planting import replaced
from engine.loss.objective import LossTerms
from engine.models.decoder import Decoder
from engine.train import trainer
from engine.train.checkpoint import keeper as keep
from engine.train.checkpoint import state
from engine.train.trainer import Trainer

# Rows


def _rows(spoil: Callable[[Batch], Batch]) -> AbstractContextManager[None]:
    """Spoil every row of training and held-out text."""

    def make(gather: Callable[..., Batch]) -> Callable[..., Batch]:
        return lambda *arguments: spoil(gather(*arguments))

    return replaced(batches_module, "gather_rows", make)


def labels_unshifted() -> AbstractContextManager[None]:
    def spoil(batch: Batch) -> Batch:
        labels_BT = np.where(batch.labels_BT == IGNORED, IGNORED, batch.tokens_BT)
        return dataclasses.replace(batch, labels_BT=labels_BT)

    return _rows(spoil)


def labels_shifted_twice() -> AbstractContextManager[None]:
    def spoil(batch: Batch) -> Batch:
        labels_BT = np.full_like(batch.labels_BT, IGNORED)
        labels_BT[:, :-1] = np.where(
            batch.labels_BT[:, :-1] == IGNORED, IGNORED, batch.labels_BT[:, 1:]
        )
        return dataclasses.replace(batch, labels_BT=labels_BT)

    return _rows(spoil)


def degenerate_batch() -> AbstractContextManager[None]:
    def spoil(batch: Batch) -> Batch:
        tokens_BT = np.repeat((batch.row_ids % 3)[:, None], batch.tokens_BT.shape[1], axis=1)
        return dataclasses.replace(
            batch,
            tokens_BT=tokens_BT,
            labels_BT=tokens_BT.copy(),
            documents_BT=np.zeros_like(tokens_BT),
        )

    return _rows(spoil)


def padding_trained() -> AbstractContextManager[None]:
    def spoil(batch: Batch) -> Batch:
        tokens_BT, labels_BT = batch.tokens_BT.copy(), batch.labels_BT.copy()
        documents_BT = batch.documents_BT.copy()
        begin = 2 * tokens_BT.shape[1] // 3
        tokens_BT[:, begin:], labels_BT[:, begin - 1 :] = 0, 0
        documents_BT[:, begin:] = documents_BT[:, begin - 1 : begin]
        return dataclasses.replace(
            batch, tokens_BT=tokens_BT, labels_BT=labels_BT, documents_BT=documents_BT
        )

    return _rows(spoil)


def ends_masked() -> AbstractContextManager[None]:
    def spoil(batch: Batch) -> Batch:
        # The demo's tokenizer, as many others, has its end of text first.
        labels_BT = np.where(batch.labels_BT == 0, IGNORED, batch.labels_BT)
        return dataclasses.replace(batch, labels_BT=labels_BT)

    return _rows(spoil)


# The loss and the update


def _loss(
    make: Callable[[Callable[..., LossTerms]], Callable[..., LossTerms]],
) -> AbstractContextManager[None]:
    return replaced(trainer, "distillation_loss", make)


def t_squared_missing() -> AbstractContextManager[None]:
    """T^2 is in the logged loss and not in the gradient."""

    def make(loss: Callable[..., LossTerms]) -> Callable[..., LossTerms]:
        def spoilt(*tensors: Any, alpha: float, temperature: float, **others: Any) -> LossTerms:
            terms = loss(*tensors, alpha=alpha, temperature=temperature, **others)
            if terms.kd is None:
                return terms
            ce = loss(*tensors, alpha=1.0, temperature=temperature, **others).loss
            kd = loss(*tensors, alpha=0.0, temperature=temperature, **others).loss
            used = alpha * ce + (1 - alpha) * kd / temperature**2
            return dataclasses.replace(terms, loss=used + (terms.loss - used).detach())

        return spoilt

    return _loss(make)


def denominator_per_pass() -> AbstractContextManager[None]:
    """Each micro-batch of an accumulated step divides its gradient by its own number of labels."""

    def make(loss: Callable[..., LossTerms]) -> Callable[..., LossTerms]:
        def spoilt(*tensors: Any, denominator: float, **others: Any) -> LossTerms:
            terms = loss(*tensors, denominator=denominator, **others)
            used = terms.loss * denominator / terms.labelled.clamp(min=1)
            return dataclasses.replace(terms, loss=used + (terms.loss - used).detach())

        return spoilt

    return _loss(make)


def last_row_only() -> AbstractContextManager[None]:
    """All rows are in the loss, only the last one in the gradient."""

    def make(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Decoder, *given: Any) -> Tensor:
            hidden_BTD = hidden(self, *given)
            return torch.cat([hidden_BTD[:-1].detach(), hidden_BTD[-1:]])

        return spoilt

    return replaced(Decoder, "hidden", make)


def last_position_only() -> AbstractContextManager[None]:
    """All positions are in the loss, only the last one of each row in the gradient."""

    def make(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Decoder, *given: Any) -> Tensor:
            hidden_BTD = hidden(self, *given)
            return torch.cat([hidden_BTD[:, :-1].detach(), hidden_BTD[:, -1:]], dim=1)

        return spoilt

    return replaced(Decoder, "hidden", make)


def rate_lost() -> AbstractContextManager[None]:
    """The recorded learning rate is set on the optimizer and never used: every update uses 1e-3."""

    def make(build: Callable[..., torch.optim.AdamW]) -> Callable[..., torch.optim.AdamW]:
        def spoilt(*arguments: Any) -> torch.optim.AdamW:
            optimizer = build(*arguments)
            real = optimizer.step

            def step(*given: Any) -> Any:
                asked = [group["lr"] for group in optimizer.param_groups]
                for group in optimizer.param_groups:
                    group["lr"] = 1e-3
                answer = real(*given)
                for group, rate in zip(optimizer.param_groups, asked, strict=True):
                    group["lr"] = rate
                return answer

            optimizer.step = step  # type: ignore[assignment, method-assign]
            return optimizer

        return spoilt

    return replaced(trainer, "build_optimizer", make)


def frozen_embedding() -> AbstractContextManager[None]:
    """The embedding has a gradient, but the optimizer does not hold it."""

    def make(build: Callable[..., torch.optim.AdamW]) -> Callable[..., torch.optim.AdamW]:
        def spoilt(student: Decoder, *others: Any) -> torch.optim.AdamW:
            optimizer = build(student, *others)
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not student.embed.weight]
            return optimizer

        return spoilt

    return replaced(trainer, "build_optimizer", make)


# Checkpoints


def small_checkpoint() -> AbstractContextManager[None]:
    def make(pack: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def spoilt(captured: Any, **how: Any) -> dict[str, Any]:
            return {name: b"\0" * 50 for name in pack(captured, **how)}

        return spoilt

    return replaced(state, "pack", make)


def optimizer_lost() -> AbstractContextManager[None]:
    def make(restore: Callable[..., None]) -> Callable[..., None]:
        def spoilt(found: Any, model: Any, optimizer: torch.optim.Optimizer) -> None:
            restore(found, model, optimizer)
            optimizer.state.clear()

        return spoilt

    return replaced(state, "restore", make)


def position_lost() -> AbstractContextManager[None]:
    def make(restore: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: Any, resumed: Trainer, *others: Any) -> Any:
            answer = restore(self, resumed, *others)
            resumed.position = 0
            return answer

        return spoilt

    return replaced(keep.Keeper, "restore", make)
