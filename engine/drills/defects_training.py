"""Defects of a training run, each as it really happened.

A defect is planted by replacing one function of the engine within a `with` block; everything else is the real
run. An object that was built inside keeps the defect if the defect is in the object.

    with planted("rotary_neighbours").plant():
        ...build and train...

`named_by` is the check that must name the defect; another may detect it too. The list loads without torch:
the function that plants a defect has its id as name and is in another module.

Three defects need a special run: `identical_teacher` needs a student of the teacher's shape, and
`optimizer_lost` and `position_lost` act when a run is resumed.
"""

from __future__ import annotations

from engine.drills.planting import Defect

MODELS, STEPS, BETWEEN = "defects_models", "defects_steps", "defects_between"


def _defect(id: str, module: str, named_by: str, what: str, happened: str) -> Defect:
    return Defect(id=id, module=module, what=what, happened=happened, named_by=named_by)


DEFECTS: tuple[Defect, ...] = (
    _defect(
        "rotary_neighbours",
        MODELS,
        "step_teacher",
        "rotary positions turn neighbouring numbers of a head instead of its halves",
        "aprender #2252: the CUDA forward of every distillation run; position 0 hides it",
    ),
    _defect(
        "rotary_missing",
        MODELS,
        "step_teacher",
        "rotary positions are left out",
        "entrenar #270: the first CUDA forward had none",
    ),
    _defect(
        "causal_mask_missing",
        MODELS,
        "step_teacher",
        "tokens attend to the future",
        "entrenar #310: validation perplexity 50 and 729 without and with the mask missing",
    ),
    _defect(
        "document_mask_missing",
        MODELS,
        "step_teacher",
        "packed documents attend to each other",
        "packing without a mask, the default of several trainers",
    ),
    _defect(
        "norm_eps_fixed",
        MODELS,
        "step_student",
        "every norm uses 1e-5 where config.json says 1e-6",
        "aprender #1606: 2.25 % drift of every norm of Qwen2",
    ),
    _defect(
        "qkv_bias_missing",
        MODELS,
        "step_teacher",
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
        "step_labels",
        "a label is the token itself",
        "ms-swift PR #8436: logits and labels were never shifted",
    ),
    _defect(
        "labels_shifted_twice",
        STEPS,
        "step_labels",
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
        "ends_masked",
        STEPS,
        "end_is_learnt",
        "the token that ends a text is masked in the labels, as padding is",
        "pad_token = eos_token with a collator that masks by id: models that never stop",
    ),
    _defect(
        "t_squared_missing",
        STEPS,
        "step_gradients",
        "T^2 is in the logged loss and not in its gradient",
        "axolotl kd_temperature: 1/4 of the gradient at T = 2",
    ),
    _defect(
        "denominator_per_pass",
        STEPS,
        "step_gradients",
        "each pass of an accumulated step is divided by its own labels",
        "trl #4719, #6452: the denominator under gradient accumulation",
    ),
    _defect(
        "last_row_only",
        STEPS,
        "step_gradients",
        "all rows are in the loss and one in the gradient",
        "aprender S-R6: 1 of B rows was trained on, the log averaged B",
    ),
    _defect(
        "last_position_only",
        STEPS,
        "step_gradients",
        "all positions are in the loss and the last of each row in the gradient",
        "aprender: one target of 256 was trained on; at length 1 it cannot be seen",
    ),
    _defect(
        "rate_lost",
        STEPS,
        "step_weights",
        "the learning rate never reaches the optimizer",
        "aprender DBH-006: recorded 1.5e-5, trained at 1e-3",
    ),
    _defect(
        "frozen_embedding",
        STEPS,
        "step_weights",
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


BETWEEN_PARTS: tuple[Defect, ...] = (
    _defect(
        "device_copy_stale",
        BETWEEN,
        "step_rows",
        "the last row on the device is the first one of the batch again",
        "pinned buffers that are written anew while their copy is still under way",
    ),
    _defect(
        "labels_cut_off",
        BETWEEN,
        "step_labels",
        "the second half of every row of the step has no labels",
        "completion masks that are cut to a maximum length, and rows that are not",
    ),
    _defect(
        "second_pass_dropped",
        BETWEEN,
        "step_rows",
        "each step trains on the first of its micro-batches",
        "micro-batches dropped under CPU offload",
    ),
    _defect(
        "half_of_each_batch",
        BETWEEN,
        "step_rows",
        "a batch has half of the rows that the spec asks for",
        "loaders that split a batch which was split already",
    ),
    _defect(
        "rows_drawn_with_replacement",
        BETWEEN,
        "step_rows",
        "rows are drawn with replacement: a third of the corpus is never met in an epoch",
        "samplers whose seed or generator is made anew at each draw",
    ),
    _defect(
        "rotary_base_doubled",
        BETWEEN,
        "step_teacher",
        "rotary positions have twice the base of config.json",
        "aprender: a wrong rotary embedding, in teacher and reference alike",
    ),
    _defect(
        "teacher_sees_shifted_tokens",
        BETWEEN,
        "step_teacher",
        "the teacher is given the tokens one position late, in the step alone",
        "teachers behind a collator of their own, with another padding side",
    ),
    _defect(
        "teacher_forgets_far_tokens",
        BETWEEN,
        "step_teacher",
        "the teacher's hidden states are wrong beyond the first tokens of a row",
        "rotary tables and caches that were made for a shorter length",
    ),
    _defect(
        "documents_merged_in_step",
        BETWEEN,
        "step_student",
        "the student's training pass sees each row as one document",
        "packing whose mask reaches evaluation and not the compiled training step",
    ),
    _defect(
        "student_rounded_in_step",
        BETWEEN,
        "step_student",
        "the student's hidden states are rounded to 8 bits on the way to the loss",
        "autocast around the wrong half of a step",
    ),
    _defect(
        "temperature_at_the_call",
        BETWEEN,
        "step_loss_parts",
        "the loss is called at temperature 1",
        "aprender: temperatures of the recipe and of the run differed",
    ),
    _defect(
        "last_pass_uncounted",
        BETWEEN,
        "step_loss_parts",
        "the loss forgets the labels of the last row of each pass, and not in the denominator",
        "aprender S-R6: one row of a batch trained, all rows in the record",
    ),
    _defect(
        "alpha_at_the_call",
        BETWEEN,
        "step_loss",
        "the loss is called with another weight of the cross entropy",
        "a default argument in the place of the recipe's setting",
    ),
    _defect(
        "later_chunks_without_gradient",
        BETWEEN,
        "step_gradients",
        "only the first chunk of the loss leaves a gradient of the hidden states",
        "kernels whose launch covers the first block of rows",
    ),
    _defect(
        "passes_overwritten",
        BETWEEN,
        "step_gradients",
        "each micro-batch overwrites the gradients of the one before",
        "transformers #34191: accumulation that counted passes wrongly; zero_grad inside the loop",
    ),
    _defect(
        "gradients_never_cleared",
        BETWEEN,
        "step_gradients",
        "every step adds its gradients to those of all steps before",
        "zero_grad missing, or on another optimizer",
    ),
    _defect(
        "layer_cut_off",
        BETWEEN,
        "step_gradients",
        "no gradient flows through the student's first layer and its embedding lookup",
        "checkpointing of frozen inputs: torch drops the gradient with a warning",
    ),
    _defect(
        "norm_of_half",
        BETWEEN,
        "step_clipping",
        "the norm leaves out every second gradient",
        "norms over one of several parameter groups, or one shard",
    ),
    _defect(
        "clipped_twice_as_hard",
        BETWEEN,
        "step_moments",
        "gradients are clipped to half of train.clip_norm",
        "clipping before unscaling, or twice",
    ),
    _defect(
        "beta2_of_the_default",
        BETWEEN,
        "step_moments",
        "the optimizer averages squares with 0.999, whatever train.beta2 says",
        "settings that are logged and not passed on",
    ),
    _defect(
        "decay_on_everything",
        BETWEEN,
        "step_weights",
        "weight decay acts on norms and biases too, from the first step on",
        "one parameter group for everything",
    ),
    _defect(
        "rate_halved_in_step",
        BETWEEN,
        "step_weights",
        "updates are half as large as the logged rate says",
        "a second scheduler, or a rate scaled by the number of ranks",
    ),
    _defect(
        "optimizer_begins_anew",
        BETWEEN,
        "step_moments",
        "the optimizer's state is lost after every step",
        "an optimizer that is made inside the loop",
    ),
    _defect(
        "count_stands_still",
        BETWEEN,
        "step_moments",
        "the optimizer's count of updates stays at 1: moments are never rightly corrected",
        "step counters that are restored, or shared, wrongly",
    ),
    _defect(
        "warmup_forgotten",
        BETWEEN,
        "step_weights",
        "the rate has no warm-up",
        "schedulers that are never stepped",
    ),
)  # fmt: skip
"""Defects between the parts of a step, where a check of the parts would not look."""
