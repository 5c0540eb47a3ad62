"""Defects of our own source that a check or the audit of a step must name, planted in the process of a test by
replacing one function of the engine while a context lasts. `tests/mutants` has those that runs or other tests notice.

Those of DEFECTS are in a part of training; those of BETWEEN_PARTS sit at the call of the loss, beyond the first chunk
or the first tokens, in the run's own optimizer, between micro-batches: where no check of the parts would look.
"""

# Shapes: B rows, T tokens, N = B*T, D width, E teacher width, V vocabulary

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.data import batches
from engine.data.batches import IGNORED, Batch
from engine.drills.planting import replaced
from engine.loss import kd_loss
from engine.loss.chunks import Job
from engine.loss.kd_loss import LossTerms
from engine.models import decoder
from engine.models.decoder import Attention, AttentionInputs, Decoder, RMSNorm
from engine.train import trainer
from engine.train.checkpoint import state
from engine.train.optimizer import UnwrappedOptimizer
from engine.train.step import Fetched, MicroBatch, TeacherOutput
from engine.train.trainer import Trainer

FAR = 16
"""Tokens from which on a row is far: who looks at the first ones alone does not see them."""


Plant = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Defect:
    plant: Plant
    named_by: str
    """The check that must name it; another may detect it too."""


DEFECTS: dict[str, Defect] = {}
BETWEEN_PARTS: dict[str, Defect] = {}
OTHER_ROWS: dict[str, Defect] = {}
"""Defects that the record of the rows shows: the step trains on other rows or labels than spec and seed prescribe."""


def _named(defects: dict[str, Defect], named_by: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        defects[plant.__name__] = Defect(plant, named_by)
        return plant

    return register


def _part(named_by: str) -> Callable[[Plant], Plant]:
    return _named(DEFECTS, named_by)


def _between(named_by: str) -> Callable[[Plant], Plant]:
    return _named(BETWEEN_PARTS, named_by)


# Models


@_part("step_teacher")
def rotary_neighbours() -> AbstractContextManager[None]:
    """Rotary positions turn neighbouring numbers of a head instead of its halves."""

    def neighbours(x_BTHE: Tensor, cos_XT1R: Tensor, sin_XT1R: Tensor) -> Tensor:
        even, odd = x_BTHE[..., 0::2], x_BTHE[..., 1::2]
        turned = (even * cos_XT1R - odd * sin_XT1R, odd * cos_XT1R + even * sin_XT1R)
        return torch.stack(turned, dim=-1).flatten(-2)

    return replaced(decoder, "rotate", lambda _: neighbours)


@_part("step_teacher")
def causal_mask_missing() -> AbstractContextManager[None]:
    """Tokens attend to the future."""

    def make(attention_inputs: Callable[..., AttentionInputs]) -> Callable[..., AttentionInputs]:
        def spoilt(config: Any, tokens_BT: Tensor, *given: Any, **named: Any) -> AttentionInputs:
            found = attention_inputs(config, tokens_BT, *given, **named)
            return found._replace(mask_B1TT=tokens_BT.new_zeros(len(tokens_BT), 1, 1, 1).float())

        return spoilt

    return replaced(decoder, "masked_attention_inputs", make)


@_part("step_student")
def norm_eps_fixed() -> AbstractContextManager[None]:
    """Every norm uses 1e-5 where config.json says 1e-6."""

    def spoilt(self: RMSNorm, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight.to(x_BTD.dtype), 1e-5)

    return replaced(RMSNorm, "forward", lambda _: spoilt)


@_part("step_teacher")
def qkv_bias_missing() -> AbstractContextManager[None]:
    """The biases of q, k and v are loaded and not added."""

    def make(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Attention, x_BTD: Tensor, attention_inputs: AttentionInputs) -> Tensor:
            layers: list[Any] = [self.q, self.k, self.v]
            handles = [
                layer.register_forward_hook(lambda module, _, output: output - module.bias)
                for layer in layers
                if layer.bias is not None
            ]
            try:
                return forward(self, x_BTD, attention_inputs)
            finally:
                for handle in handles:
                    handle.remove()

        return spoilt

    return replaced(Attention, "forward", make)


# Rows


def _rows(spoil: Callable[[Batch], Batch]) -> AbstractContextManager[None]:
    """Spoil every row of training and held-out text."""

    def make(gather: Callable[..., Batch]) -> Callable[..., Batch]:
        return lambda *arguments: spoil(gather(*arguments))

    return replaced(batches, "gather_rows", make)


@_part("padding_not_trained")
def padding_trained() -> AbstractContextManager[None]:
    """The last third of each row is padding with labels."""

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


@_part("end_is_learnt")
def ends_masked() -> AbstractContextManager[None]:
    """The token that ends a text is masked in the labels, as padding is."""

    def spoil(batch: Batch) -> Batch:
        # The demo's tokenizer, as many others, has its end of text first.
        labels_BT = np.where(batch.labels_BT == 0, IGNORED, batch.labels_BT)
        return dataclasses.replace(batch, labels_BT=labels_BT)

    return _rows(spoil)


# The loss and the update


def _loss(
    make: Callable[[Callable[..., LossTerms]], Callable[..., LossTerms]],
) -> AbstractContextManager[None]:
    """Replace the loss where the trainer calls it, and nowhere else."""
    return replaced(trainer, "distillation_loss", make)


@_part("step_gradients")
def t_squared_missing() -> AbstractContextManager[None]:
    """T^2 is in the logged loss and not in its gradient."""

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


@_part("step_gradients")
def denominator_per_pass() -> AbstractContextManager[None]:
    """Each pass of an accumulated step is divided by its own labels."""

    def make(loss: Callable[..., LossTerms]) -> Callable[..., LossTerms]:
        def spoilt(*tensors: Any, denominator: float, **others: Any) -> LossTerms:
            terms = loss(*tensors, denominator=denominator, **others)
            used = terms.loss * denominator / terms.labelled.clamp(min=1)
            return dataclasses.replace(terms, loss=used + (terms.loss - used).detach())

        return spoilt

    return _loss(make)


@_part("step_gradients")
def last_row_only() -> AbstractContextManager[None]:
    """All rows are in the loss and one in the gradient."""

    def make(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Decoder, *given: Any) -> Tensor:
            hidden_BTD = hidden(self, *given)
            return torch.cat([hidden_BTD[:-1].detach(), hidden_BTD[-1:]])

        return spoilt

    return replaced(Decoder, "hidden", make)


@_part("step_weights")
def frozen_embedding() -> AbstractContextManager[None]:
    """The optimizer does not hold the embedding."""

    def make(build: Callable[..., torch.optim.AdamW]) -> Callable[..., torch.optim.AdamW]:
        def spoilt(student: Decoder, *others: Any) -> torch.optim.AdamW:
            optimizer = build(student, *others)
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not student.embed.weight]
            return optimizer

        return spoilt

    return replaced(trainer, "build_optimizer", make)


@_part("checkpoint_reloads")
def small_checkpoint() -> AbstractContextManager[None]:
    """A checkpoint holds 200 bytes."""

    def make(pack: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def spoilt(captured: Any, **how: Any) -> dict[str, Any]:
            return {name: b"\0" * 50 for name in pack(captured, **how)}

        return spoilt

    return replaced(state, "pack", make)


# Between the parts: each part is right by itself, and what the trainer does with it is not


def _micro(spoil: Callable[[MicroBatch], MicroBatch]) -> AbstractContextManager[None]:
    def make(on_device: Callable[..., MicroBatch]) -> Callable[..., MicroBatch]:
        return lambda self, *given: spoil(on_device(self, *given))

    return replaced(Trainer, "_on_device", make)


@_between("step_teacher")
def device_copy_stale() -> AbstractContextManager[None]:
    """The last row on the device is the first one of the batch again."""

    def spoil(micro: MicroBatch) -> MicroBatch:
        tokens_BT = torch.cat([micro.tokens_BT[:-1], micro.tokens_BT[:1]])
        return micro._replace(tokens_BT=tokens_BT)

    return _micro(spoil)


@_named(OTHER_ROWS, "rows")
def labels_cut_off() -> AbstractContextManager[None]:
    """The second half of every row of the step has no labels."""

    def make(take: Callable[..., Fetched]) -> Callable[..., Fetched]:
        def spoilt(self: Trainer, *given: Any) -> Fetched:
            fetched = take(self, *given)
            labels_BT = fetched.batch.labels_BT.copy()
            labels_BT[:, labels_BT.shape[1] // 2 :] = IGNORED
            return fetched._replace(batch=dataclasses.replace(fetched.batch, labels_BT=labels_BT))

        return spoilt

    return replaced(Trainer, "_part_at", make)


@_named(OTHER_ROWS, "rows")
def second_pass_dropped() -> AbstractContextManager[None]:
    """Each step trains on the first of its micro-batches."""

    def make(fetch: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: Trainer) -> Any:
            fetched, labelled = fetch(self)
            return fetched[:1], labelled

        return spoilt

    return replaced(Trainer, "_fetch", make)


@_named(OTHER_ROWS, "rows")
def half_of_each_batch() -> AbstractContextManager[None]:
    """A batch has half of the rows that the spec asks for."""

    def make(take: Callable[..., Fetched]) -> Callable[..., Fetched]:
        def spoilt(self: Trainer, *given: Any) -> Fetched:
            fetched = take(self, *given)
            half = max(1, len(fetched.batch.row_ids) // 2)
            return fetched._replace(batch=next(fetched.batch.split(half)))

        return spoilt

    return replaced(Trainer, "_part_at", make)


def _teach(
    make: Callable[[Callable[..., TeacherOutput]], Callable[..., TeacherOutput]],
) -> AbstractContextManager[None]:
    return replaced(Trainer, "_teach", make)


@_between("step_teacher")
def teacher_sees_shifted_tokens() -> AbstractContextManager[None]:
    """The teacher is given the tokens one position late, in the step alone."""

    def make(teach: Callable[..., TeacherOutput]) -> Callable[..., TeacherOutput]:
        def spoilt(self: Trainer, micro: MicroBatch) -> TeacherOutput:
            return teach(self, micro._replace(tokens_BT=micro.tokens_BT.roll(1, dims=1)))

        return spoilt

    return _teach(make)


@_between("step_teacher")
def teacher_forgets_far_tokens() -> AbstractContextManager[None]:
    """The teacher's hidden states are wrong beyond the first tokens of a row."""

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


@_between("step_student")
def documents_merged_in_step() -> AbstractContextManager[None]:
    """The student's training pass sees each row as one document."""

    def make(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Trainer, tokens_BT: Tensor, documents_BT: Tensor, *others: Any) -> Tensor:
            merged_BT = documents_BT[:, :1].expand_as(documents_BT).contiguous()
            return hidden(self, tokens_BT, merged_BT, *others)

        return spoilt

    return _hidden(make)


@_between("step_student")
def student_rounded_in_step() -> AbstractContextManager[None]:
    """The student's hidden states are rounded to 8 bits on the way to the loss."""

    def make(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Trainer, *given: Any) -> Tensor:
            hidden_BTD = hidden(self, *given)
            rounded_BTD = hidden_BTD.detach().to(torch.float8_e4m3fn).to(hidden_BTD.dtype)
            return hidden_BTD + (rounded_BTD - hidden_BTD.detach())

        return spoilt

    return _hidden(make)


@_between("step_loss")
def temperature_at_the_call() -> AbstractContextManager[None]:
    """The loss is called at temperature 1."""
    return _loss(lambda loss: lambda *given, **how: loss(*given, **{**how, "temperature": 1.0}))


@_between("step_loss")
def alpha_at_the_call() -> AbstractContextManager[None]:
    """The loss is called with another weight of the cross entropy."""
    return _loss(lambda loss: lambda *given, **how: loss(*given, **{**how, "alpha": 0.8}))


@_between("step_loss")
def last_pass_uncounted() -> AbstractContextManager[None]:
    """The loss forgets the labels of the last row of each pass, and not in the denominator."""

    def make(loss: Callable[..., LossTerms]) -> Callable[..., LossTerms]:
        def spoilt(*given: Any, **how: Any) -> LossTerms:
            *tensors, labels_N = given
            kept_N = labels_N.clone()
            kept_N[-len(kept_N) // 4 :] = IGNORED
            return loss(*tensors, kept_N, **how)

        return spoilt

    return _loss(make)


@_between("step_gradients")
def later_chunks_without_gradient() -> AbstractContextManager[None]:
    """Only the first chunk of the loss leaves a gradient of the hidden states."""

    def make(all_chunks: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(
            h_MD: Tensor, w_VD: Tensor, dh_MD: Tensor | None, dw_VD: Tensor | None, job: Job
        ) -> Any:
            totals = all_chunks(h_MD, w_VD, dh_MD, dw_VD, dataclasses.replace(job, chunk_rows=32))
            if dh_MD is not None:
                dh_MD[32:] = 0
            return totals

        return spoilt

    return replaced(kd_loss, "_run_chunks", make)


@_between("step_gradients")
def gradients_never_cleared() -> AbstractContextManager[None]:
    """Every step adds its gradients to those of all steps before."""
    return replaced(UnwrappedOptimizer, "zero_grad", lambda _: lambda self, **how: None)


@_between("step_gradients")
def layer_cut_off() -> AbstractContextManager[None]:
    """No gradient flows through the student's first layer and its embedding lookup."""

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

    return _hidden(make)


@_between("step_weights")
def norm_of_half() -> AbstractContextManager[None]:
    """The norm leaves out every second gradient."""
    return replaced(
        trainer, "total_norm", lambda norm: lambda grads, **how: norm(grads[::2], **how)
    )


@_between("step_weights")
def clipped_twice_as_hard() -> AbstractContextManager[None]:
    """Gradients are clipped to half of train.clip_norm."""

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


@_between("step_weights")
def beta2_of_the_default() -> AbstractContextManager[None]:
    """The optimizer averages squares with 0.999, whatever train.beta2 says."""
    return _in_update(lambda group: group.update(betas=(group["betas"][0], 0.999)))


@_between("step_weights")
def decay_on_everything() -> AbstractContextManager[None]:
    """Weight decay acts on norms and biases too, from the first step on."""
    return _in_update(lambda group: group.update(weight_decay=0.1))


@_between("step_weights")
def rate_halved_in_step() -> AbstractContextManager[None]:
    """Updates are half as large as the logged rate says."""
    return _in_update(lambda group: group.update(lr=group["lr"] / 2))


@_between("step_weights")
def count_stands_still() -> AbstractContextManager[None]:
    """The optimizer's count of updates stays at 1: moments are never rightly corrected."""

    def make(finish: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: Trainer, *given: Any) -> Any:
            done = finish(self, *given)
            for held in self.optimizer.state.values():
                held["step"].zero_()
            return done

        return spoilt

    return replaced(Trainer, "finish", make)
