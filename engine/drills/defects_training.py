"""Defects of a training run, each as it really happened.

A defect is planted by replacing one function of the engine within a `with` block; everything else is the real
run. An object that was built inside keeps the defect if the defect is in the object.

    with defect("rotary_neighbours").plant():
        ...build and train...

`named_by` is the check that must name the defect; another may detect it too. The list loads without torch:
the function that plants a defect has its id as name and is in another module.

Three defects need a special run: `identical_teacher` needs a student of the teacher's shape, and
`optimizer_lost` and `position_lost` act when a run is resumed.
"""

from __future__ import annotations

from engine.drills.planting import Defect

MODELS, STEPS = "defects_models", "defects_steps"


def _defect(id: str, module: str, named_by: str, what: str, happened: str) -> Defect:
    return Defect(id=id, module=module, what=what, happened=happened, named_by=named_by)


DEFECTS: tuple[Defect, ...] = (
    _defect(
        "rotary_neighbours",
        MODELS,
        "forward_is_the_model",
        "rotary positions turn neighbouring numbers of a head instead of its halves",
        "aprender #2252: the CUDA forward of every distillation run; position 0 hides it",
    ),
    _defect(
        "rotary_missing",
        MODELS,
        "positions_matter",
        "rotary positions are left out",
        "entrenar #270: the first CUDA forward had none",
    ),
    _defect(
        "causal_mask_missing",
        MODELS,
        "causal_mask",
        "tokens attend to the future",
        "entrenar #310: validation perplexity 50 and 729 without and with the mask missing",
    ),
    _defect(
        "document_mask_missing",
        MODELS,
        "documents_isolated",
        "packed documents attend to each other",
        "packing without a mask, the default of several trainers",
    ),
    _defect(
        "norm_eps_fixed",
        MODELS,
        "forward_is_the_model",
        "every norm uses 1e-5 where config.json says 1e-6",
        "aprender #1606: 2.25 % drift of every norm of Qwen2",
    ),
    _defect(
        "qkv_bias_missing",
        MODELS,
        "forward_is_the_model",
        "the biases of q, k and v are loaded and not added",
        "aprender #1604: validation loss 18.55 instead of 17.22, both above ln V",
    ),
    _defect(
        "random_teacher",
        MODELS,
        "teacher_knows_text",
        "the teacher has fresh weights",
        "Megatron-Bridge #1422: training ran",
    ),
    _defect(
        "zero_teacher",
        MODELS,
        "weights_alive",
        "the teacher's matrices are zero",
        "Megatron-Bridge #1422: weights that were never read",
    ),
    _defect(
        "teacher_ids_differ",
        MODELS,
        "teacher_knows_text",
        "the teacher's ids are other tokens at the same width",
        "trl #4562, unsloth-zoo PR #965: equal width is not sufficient",
    ),
    _defect(
        "identical_teacher",
        MODELS,
        "teacher_not_student",
        "student and teacher are one model",
        "aprender: a smoke default that ran for 25 and 5 hours",
    ),
    _defect(
        "labels_unshifted",
        STEPS,
        "labels_are_next_tokens",
        "a label is the token itself",
        "ms-swift PR #8436: logits and labels were never shifted",
    ),
    _defect(
        "labels_shifted_twice",
        STEPS,
        "labels_are_next_tokens",
        "a label is the token after the next",
        "rows that were shifted by the loader and again by the loss",
    ),
    _defect(
        "degenerate_batch",
        STEPS,
        "batch_not_degenerate",
        "row i is token i repeated, and so are its labels",
        "aprender: the synthetic batches that a first end-to-end run was proved with",
    ),
    _defect(
        "padding_trained",
        STEPS,
        "padding_not_trained",
        "the last third of each row is padding with labels",
        "optipfair #34: padding trained as text",
    ),
    _defect(
        "t_squared_missing",
        STEPS,
        "loss_gradient",
        "T^2 is in the logged loss and not in its gradient",
        "axolotl kd_temperature: 1/4 of the gradient at T = 2",
    ),
    _defect(
        "denominator_per_pass",
        STEPS,
        "rows_in_update",
        "each pass of an accumulated step is divided by its own labels",
        "trl #4719, #6452: the denominator under gradient accumulation",
    ),
    _defect(
        "nan_masked",
        STEPS,
        "nan_not_masked",
        "NaN logits have a loss of ln V",
        "aprender: a softmax that falls back to uniform when its sum is not above 0",
    ),
    _defect(
        "last_row_only",
        STEPS,
        "rows_in_update",
        "all rows are in the loss and one in the gradient",
        "aprender S-R6: 1 of B rows was trained on, the log averaged B",
    ),
    _defect(
        "last_position_only",
        STEPS,
        "rows_in_update",
        "all positions are in the loss and the last of each row in the gradient",
        "aprender: one target of 256 was trained on; at length 1 it cannot be seen",
    ),
    _defect(
        "rate_lost",
        STEPS,
        "effective_learning_rate",
        "the learning rate never reaches the optimizer",
        "aprender DBH-006: recorded 1.5e-5, trained at 1e-3",
    ),
    _defect(
        "frozen_embedding",
        STEPS,
        "tensors_moved",
        "the optimizer does not hold the embedding",
        "aprender DBH-007: its gradient was summed for ever",
    ),
    _defect(
        "small_checkpoint",
        STEPS,
        "checkpoint_reloads",
        "a checkpoint holds 200 bytes",
        "aprender #1856: what a run of 25 hours left",
    ),
    _defect(
        "optimizer_lost",
        STEPS,
        "resume_continues",
        "a resumed run begins with a cold optimizer",
        "checkpoints of weights alone",
    ),
    _defect(
        "position_lost",
        STEPS,
        "resume_continues",
        "a resumed run meets the first rows again",
        "loaders that are not part of the checkpoint",
    ),
)


def defect(id_: str) -> Defect:
    """Return the defect of that id. Raises KeyError when there is none."""
    return {one.id: one for one in DEFECTS}[id_]
