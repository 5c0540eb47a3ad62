"""Defects between the parts of a step: each part is right by itself, and what the trainer does with it is not.

They sit at the call of the loss, beyond the first chunk or the first tokens, in the run's own optimizer, between
micro-batches: where no check of the parts would look.
"""

# Shapes: B rows, T tokens, N = B*T, D width, E teacher width

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.data import batches
from engine.data.batches import IGNORED, Batch
from engine.drills.planting import replaced
from engine.loss import objective
from engine.loss.chunks import Job
from engine.loss.objective import LossTerms
from engine.models.config import ModelConfig
from engine.train import trainer
from engine.train.optimizer import Uncompiled
from engine.train.step import MicroBatch, TeacherOutput
from engine.train.trainer import Trainer

FAR = 16
"""Tokens from which on a row is far: who looks at the first ones alone does not see them."""


# Rows and labels


def _micro(spoil: Callable[[MicroBatch], MicroBatch]) -> AbstractContextManager[None]:
    def make(on_device: Callable[..., MicroBatch]) -> Callable[..., MicroBatch]:
        return lambda self, *given: spoil(on_device(self, *given))

    return replaced(Trainer, "_on_device", make)


def device_copy_stale() -> AbstractContextManager[None]:
    def spoil(micro: MicroBatch) -> MicroBatch:
        tokens_BT = torch.cat([micro.tokens_BT[:-1], micro.tokens_BT[:1]])
        return micro._replace(tokens_BT=tokens_BT)

    return _micro(spoil)


def labels_cut_off() -> AbstractContextManager[None]:
    def make(take: Callable[..., tuple[Batch, int]]) -> Callable[..., tuple[Batch, int]]:
        def spoilt(self: Trainer, *given: Any) -> tuple[Batch, int]:
            batch, position = take(self, *given)
            labels_BT = batch.labels_BT.copy()
            labels_BT[:, labels_BT.shape[1] // 2 :] = IGNORED
            return dataclasses.replace(batch, labels_BT=labels_BT), position

        return spoilt

    return replaced(Trainer, "_part_at", make)


def second_pass_dropped() -> AbstractContextManager[None]:
    def make(fetch: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: Trainer) -> Any:
            fetched, labelled = fetch(self)
            return fetched[:1], labelled

        return spoilt

    return replaced(Trainer, "_fetch", make)


def half_of_each_batch() -> AbstractContextManager[None]:
    def make(take: Callable[..., tuple[Batch, int]]) -> Callable[..., tuple[Batch, int]]:
        def spoilt(self: Trainer, *given: Any) -> tuple[Batch, int]:
            batch, position = take(self, *given)
            return next(batch.split(max(1, len(batch.row_ids) // 2))), position

        return spoilt

    return replaced(Trainer, "_part_at", make)


def rows_drawn_with_replacement() -> AbstractContextManager[None]:
    def make(order: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(rows: int, seed: int, epoch: int) -> Any:
            return np.random.default_rng([seed, epoch]).integers(0, rows, rows)

        return spoilt

    return replaced(batches, "epoch_order", make)


# Models


def rotary_base_doubled() -> AbstractContextManager[None]:
    def make(from_dict: Callable[..., ModelConfig]) -> Callable[..., ModelConfig]:
        def spoilt(*given: Any) -> ModelConfig:
            config = from_dict(*given)
            return dataclasses.replace(config, rope_theta=2 * config.rope_theta)

        return spoilt

    return replaced(ModelConfig, "from_dict", make)


def _teach(
    make: Callable[[Callable[..., TeacherOutput]], Callable[..., TeacherOutput]],
) -> AbstractContextManager[None]:
    return replaced(Trainer, "_teach", make)


def teacher_sees_shifted_tokens() -> AbstractContextManager[None]:
    def make(teach: Callable[..., TeacherOutput]) -> Callable[..., TeacherOutput]:
        def spoilt(self: Trainer, micro: MicroBatch) -> TeacherOutput:
            return teach(self, micro._replace(tokens_BT=micro.tokens_BT.roll(1, dims=1)))

        return spoilt

    return _teach(make)


def teacher_forgets_far_tokens() -> AbstractContextManager[None]:
    def make(teach: Callable[..., TeacherOutput]) -> Callable[..., TeacherOutput]:
        def spoilt(self: Trainer, micro: MicroBatch) -> TeacherOutput:
            found = teach(self, micro)
            if found.hidden_NE is None:
                return found
            hidden_BTE = found.hidden_NE.view(*micro.tokens_BT.shape, -1).clone()
            hidden_BTE[:, FAR:] *= 0.9
            return found._replace(hidden_NE=hidden_BTE.flatten(0, 1))

        return spoilt

    return _teach(make)


def _hidden(
    make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
) -> AbstractContextManager[None]:
    return replaced(Trainer, "hidden", make)


def documents_merged_in_step() -> AbstractContextManager[None]:
    def make(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Trainer, tokens_BT: Tensor, documents_BT: Tensor, *others: Any) -> Tensor:
            merged_BT = documents_BT[:, :1].expand_as(documents_BT).contiguous()
            return hidden(self, tokens_BT, merged_BT, *others)

        return spoilt

    return _hidden(make)


def student_rounded_in_step() -> AbstractContextManager[None]:
    def make(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Trainer, *given: Any) -> Tensor:
            hidden_BTD = hidden(self, *given)
            rounded_BTD = hidden_BTD.detach().to(torch.float8_e4m3fn).to(hidden_BTD.dtype)
            return hidden_BTD + (rounded_BTD - hidden_BTD.detach())

        return spoilt

    return _hidden(make)


# Loss


def _loss(
    make: Callable[[Callable[..., LossTerms]], Callable[..., LossTerms]],
) -> AbstractContextManager[None]:
    """Replace the loss where the trainer calls it, and nowhere else."""
    return replaced(trainer, "distillation_loss", make)


def temperature_at_the_call() -> AbstractContextManager[None]:
    return _loss(lambda loss: lambda *given, **how: loss(*given, **{**how, "temperature": 1.0}))


def alpha_at_the_call() -> AbstractContextManager[None]:
    return _loss(lambda loss: lambda *given, **how: loss(*given, **{**how, "alpha": 0.8}))


def last_pass_uncounted() -> AbstractContextManager[None]:
    def make(loss: Callable[..., LossTerms]) -> Callable[..., LossTerms]:
        def spoilt(*given: Any, **how: Any) -> LossTerms:
            *tensors, labels_N = given
            kept_N = labels_N.clone()
            kept_N[-len(kept_N) // 4 :] = IGNORED
            return loss(*tensors, kept_N, **how)

        return spoilt

    return _loss(make)


# Gradients


def later_chunks_without_gradient() -> AbstractContextManager[None]:
    def make(all_chunks: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(
            h_MD: Tensor, w_VD: Tensor, dh_MD: Tensor | None, dw_VD: Tensor | None, job: Job
        ) -> Any:
            totals = all_chunks(h_MD, w_VD, dh_MD, dw_VD, dataclasses.replace(job, chunk_rows=32))
            if dh_MD is not None:
                dh_MD[32:] = 0
            return totals

        return spoilt

    return replaced(objective, "_all_chunks", make)


def passes_overwritten() -> AbstractContextManager[None]:
    def make(forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: Trainer, *given: Any) -> Any:
            for parameter in self.parameters:
                parameter.grad = None
            return forward_backward(self, *given)

        return spoilt

    return replaced(Trainer, "_forward_backward", make)


def gradients_never_cleared() -> AbstractContextManager[None]:
    return replaced(Uncompiled, "zero_grad", lambda _: lambda self, **how: None)


@contextlib.contextmanager
def layer_cut_off() -> Iterator[None]:
    """Cut where the trainer starts, so that whoever runs the student otherwise finds it whole."""

    def make(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Trainer, *given: Any) -> Tensor:
            def cut(_layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
                # The value passes, its gradient does not; the layer's own tensors still have one, of zero.
                return output.detach() + 0 * output

            handle = self.student.layers[0].register_forward_hook(cut)
            try:
                return hidden(self, *given)
            finally:
                handle.remove()

        return spoilt

    with _hidden(make):
        yield


# The update


def norm_of_half() -> AbstractContextManager[None]:
    return replaced(
        trainer, "total_norm", lambda norm: lambda grads, **how: norm(grads[::2], **how)
    )


def clipped_twice_as_hard() -> AbstractContextManager[None]:
    def make(update: Callable[..., None]) -> Callable[..., None]:
        return lambda *given, clip_norm: update(*given, clip_norm=clip_norm / 2)

    return replaced(trainer, "update_if_finite", make)


def _in_update(change: Callable[[dict[str, Any]], None]) -> AbstractContextManager[None]:
    """Change the optimizer's groups when an update begins, and put them back after it."""

    def make(update: Callable[..., None]) -> Callable[..., None]:
        def spoilt(optimizer: torch.optim.Optimizer, *given: Any, **how: Any) -> None:
            before = [dict(group) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                change(group)
            update(optimizer, *given, **how)
            for group, kept in zip(optimizer.param_groups, before, strict=True):
                group.update(kept)

        return spoilt

    return replaced(trainer, "update_if_finite", make)


def beta2_of_the_default() -> AbstractContextManager[None]:
    return _in_update(lambda group: group.update(betas=(group["betas"][0], 0.999)))


def decay_on_everything() -> AbstractContextManager[None]:
    return _in_update(lambda group: group.update(weight_decay=0.1))


def rate_halved_in_step() -> AbstractContextManager[None]:
    return _in_update(lambda group: group.update(lr=group["lr"] / 2))


def warmup_forgotten() -> AbstractContextManager[None]:
    return replaced(trainer, "learning_rate", lambda _: lambda step, train: train.lr)


# Between two steps


def _after_update(
    change: Callable[[torch.optim.Optimizer], None],
) -> AbstractContextManager[None]:
    def make(finish: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: Trainer, *given: Any) -> Any:
            done = finish(self, *given)
            with torch.no_grad():
                change(self.optimizer)
            return done

        return spoilt

    return replaced(Trainer, "finish", make)


def optimizer_begins_anew() -> AbstractContextManager[None]:
    return _after_update(lambda optimizer: optimizer.state.clear())


def count_stands_still() -> AbstractContextManager[None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["step"].zero_()

    return _after_update(change)
