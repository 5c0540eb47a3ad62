"""Texts of everything that is judged: checks, stages of the audit, alerts, and the identities of a watched script:
relations that hold in every healthy training step. Each has its question, what a failure means, and what to do. This
module does not import torch.

A check or stage is judged by the function of the same name in `engine.checks` or `engine.audit.judge`, an alert by the
one in `engine.watch.rules`, an identity by the probe (`engine/attach/probe/apr_watch`).

The question of a check, a stage or an identity is answered by yes when all is well; that of an alert by no.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum
from functools import partial

from engine.errors import SpecError
from engine.log.events import ALERT, CHECK, FACT, FAIL, IDENTITY, SUSPICION

TRANSFORMERS, LIGHTNING = "transformers", "lightning"


class When(Enum):
    """Time at which a check runs."""

    BEFORE = "before"
    """Before a model runs: settings and data."""
    AT_START = "at_start"
    """Before the first step of a session."""
    FIRST_STEPS = "first_steps"
    """After one of the first steps, as soon as there is a result."""
    AT_STEP = "at_step"
    """At an audited step: the first of a session, some later ones, the last."""
    AT_CHECKPOINT = "at_checkpoint"
    """After each checkpoint."""
    AT_END = "at_end"
    """After the last step, once the student is saved."""
    ALWAYS = "always"
    """After the first steps, and again whenever the result changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """One thing that can be judged."""

    by: str
    """`check`, `alert` or `identity`."""
    id: str
    question: str
    wrong: str = ""
    """Problem on failure, in a few words for the verdict line; empty for an alert, which has a title."""
    means: str = ""
    """Meaning of a failure; empty for an alert, whose text explains it with numbers."""
    remedy: str = ""
    """Remedy for a failure; for an identity, in a plain training loop; empty for an alert, which names a flip."""
    transformers: str = ""
    """Remedy with the Trainer of transformers, if different."""
    lightning: str = ""
    """Remedy with the Trainer of Lightning, if different."""
    level: str = FAIL
    """Worst possible level."""
    when: When = When.ALWAYS
    stops: bool = False
    """Whether a failure makes the run worthless; the run is then stopped, unless checks.on_fail is report."""
    group: str = ""
    """Subject of an identity: `update`, `gradient`, `loss`, `data` or `ranks`."""

    def remedy_with(self, framework: str) -> str:
        """Return the remedy in a script that trains with `framework`, or without one if it is empty."""
        found = {TRANSFORMERS: self.transformers, LIGHTNING: self.lightning}.get(framework)
        return found or self.remedy


_check = partial(About, by=CHECK, stops=True)
_stage = partial(_check, when=When.AT_STEP)
_identity = partial(About, by=IDENTITY)


def _alert(id: str, level: str, question: str) -> About:
    return About(by=ALERT, id=id, level=level, question=question)


STAGES: tuple[About, ...] = (
    _stage(
        id="step_teacher",
        wrong="the teacher's outputs are not those of the weights in its files",
        question="Do the teacher's hidden states in the step equal those of a plain forward pass over its tokens?",
        means="The teacher runs with wrong weights or a wrong forward pass, or it gets wrong tokens or positions, or "
        "attends to neighbouring documents.",
        remedy="Flip teacher.backend or teacher.precision to see which of them causes it.",
    ),
    _stage(
        id="step_student",
        wrong="the student's outputs are not those of its weights",
        question="Do the student's hidden states in the step equal those of a plain forward pass with its weights?",
        means="The forward pass that trains is not the model that is saved.",
        remedy="Flip kernels.layers or student.precision to see which of them causes it.",
    ),
    _stage(
        id="step_loss",
        wrong="the logged loss is not that of the batch",
        question="Are the logged loss and its parts those computed from the step's hidden states and labels, with the "
        "spec's weights?",
        means="Tokens or rows are left out of the loss or counted twice, or the loss uses other settings than the "
        "spec's.",
        remedy="Flip loss.kernel and loss.chunk_rows to see whether a kernel or a compiler is wrong.",
    ),
    _stage(
        id="step_gradients",
        wrong="the gradients are not those of the loss",
        question="Are the gradients those of the logged loss, over all rows and micro-batches of the step?",
        means="The run minimises a different objective from the one it logs: rows or micro-batches are left out or "
        "weighted wrongly.",
        remedy="The numbers show where the difference begins: in the hidden states, in the loss, or in the named "
        "tensor. Flip loss.kernel, kernels.layers, student.checkpointing or student.graphs.",
    ),
    _stage(
        id="step_weights",
        wrong="the weights do not move as AdamW would move them",
        question="Did every moment and weight move as AdamW moves it by the clipped gradients, with the logged "
        "learning rate and the weight decay, betas and epsilon of the spec?",
        means="The optimizer gets gradients that are not those of the loss, clips them differently, uses other "
        "settings than the recorded ones, or leaves out a part of the student.",
        remedy="Flip train.update; `engine tail RUN` shows whether steps were skipped.",
    ),
)
"""The stages of a training step, in the order in which data flows through them: teacher, student, loss, gradients,
weights."""

CHECKS: tuple[About, ...] = (
    _check(
        id="vocabulary_by_bytes",
        wrong="teacher and student do not have the same tokens",
        question="Does every token id mean the same token to the teacher, the student and the training data, and do "
        "both models tokenize a text alike?",
        means="Probabilities are compared id by id, so the student learns a different token from the one the teacher "
        "meant, or a model reads text that is not tokenized as in its training.",
        remedy="Use a teacher and a student of one model family, with the tokenizer that belongs to them.",
        when=When.BEFORE,
    ),
    _check(
        id="batch_not_degenerate",
        wrong="the batch has too little varied text",
        question="Does a batch hold different rows of varied text?",
        means="There is nothing to learn from the batch, however well its loss falls.",
        remedy="`engine data SPEC` shows the rows: point data.corpus at varied text, and remove duplicates.",
        when=When.BEFORE,
    ),
    _check(
        id="padding_not_trained",
        wrong="padding is trained on",
        question="Are rows free of labels on padding?",
        means="Part of the loss is the easy prediction of padding, and the student learns to generate padding.",
        remedy="Set the labels of padding to -100, or pack documents instead of padding them.",
        when=When.BEFORE,
    ),
    _check(
        id="end_is_learnt",
        wrong="no end-of-text token is trained on",
        question="Is a special token that ends a text or a turn among the labels?",
        means="The student never learns to stop: its generations go on until they are cut off.",
        remedy="Give the end of each text or answer a label; if the pad token is the same token, mask padding by "
        "position, not by id.",
        when=When.BEFORE,
        stops=False,
    ),
    _check(
        id="weights_alive",
        wrong="a model has weights that were never loaded",
        question="Are all tensors of both models finite, and is no matrix constant?",
        means="A model still has its allocated or initial values: its file was not loaded into it.",
        remedy="Load the file again; if the check still fails, fetch the file again.",
        when=When.AT_START,
    ),
    _check(
        id="no_token_leaks",
        wrong="the model sees the tokens that it should predict",
        question="Does a token affect only later positions of its own document, in a model that transformers runs?",
        means="The model sees the tokens that it should predict, or other documents of its row, so its losses mean "
        "nothing.",
        remedy="Use another version of transformers, `model.engine=native` where the family allows it, or "
        "`data.packing=documents`.",
        when=When.AT_START,
    ),
    _check(
        id="teacher_knows_text",
        wrong="the teacher guesses",
        question="Does the teacher predict held-out text better than token frequencies do?",
        means="The teacher guesses: its weights are random, or its tokenizer or forward pass is wrong. The student "
        "would learn noise.",
        remedy="Check the teacher's file, tokenizer and model family; a good teacher's loss is far below ln V, with V "
        "the size of the vocabulary.",
        when=When.AT_START,
    ),
    _check(
        id="teacher_fp8_within_noise_floor",
        wrong="fp8 changes the teacher's outputs too much",
        question="Are the outputs of the fp8 teacher as close to the exact ones as those of 4-bit weights would be?",
        means="The student learns from outputs whose rounding error is larger than that of 4-bit weights.",
        remedy="Set teacher.precision=bf16, which rounds less and is slower.",
        when=When.AT_START,
    ),
    _check(
        id="stored_outputs",
        wrong="the stored outputs are not those of the teacher",
        question="In some rows of the run, do the stored teacher outputs equal those that the teacher computes?",
        means="The student learns from outputs of another model or of other rows, or from altered ones.",
        remedy="Make the store again with `engine prepare`, from the teacher that the spec names.",
        when=When.AT_START,
    ),
    _check(
        id="teacher_not_student",
        wrong="teacher and student are the same model",
        question="Are teacher and student different models, with a KL above zero at the start?",
        means="The student has nothing to learn: the KL is zero from the first step on and stays there.",
        remedy="Set student.path to other weights, or teacher.context to a text that changes what the teacher says.",
        when=When.AT_START,
    ),
    *STAGES,
    _check(
        id="split_disjoint",
        wrong="held-out text is also trained on",
        question="Is held-out text absent from the text that is trained on?",
        means="The held-out loss measures how well the student memorises the training set, not how well it predicts "
        "new text.",
        remedy="`engine data SPEC` names the copies: remove them from the corpus, or split by document.",
        when=When.FIRST_STEPS,
        stops=False,
    ),
    _check(
        id="memory_as_planned",
        wrong="peak memory is not near the planned one",
        question="Is the measured peak memory near the planned one?",
        means="The plan cannot be trusted to refuse a run that does not fit.",
        remedy="`engine doctor` shows what else uses the device. Set memory.limit_gib to plan for less memory, or "
        "memory.budget=report to be warned only.",
        when=When.FIRST_STEPS,
        stops=False,
    ),
    _check(
        id="no_late_compile",
        wrong="a step waited for a compiler",
        question="Was every kernel compiled before the steps that are timed?",
        means="A step waited for a compiler. If the kernel's key changes with every step, every step will wait.",
        remedy="`engine tail RUN` names the kernel and what changed. Set kernels.prewarm=true to compile it before "
        "training, or kernels.layers=torch to use PyTorch's operations in the layers.",
        when=When.ALWAYS,
        stops=False,
    ),
    _check(
        id="checkpoint_reloads",
        wrong="a checkpoint, read back, differs from what was written",
        question="Is a checkpoint, read back, byte for byte as it was written, and can a run resume from it?",
        means="The disk returns other bytes than were written; the run cannot be resumed from this checkpoint.",
        remedy="Check the disk (`dmesg`, `df`), or use another one, and resume: the previous checkpoint is kept.",
        when=When.AT_CHECKPOINT,
    ),
    _check(
        id="artefact",
        wrong="the saved student is not the one that was trained",
        question="Is the saved student, read back from its files, the trained one in student.save_as, bit for bit?",
        means="The model that is evaluated, published and used is not the one that was trained.",
        remedy="The last checkpoint has the trained weights: check the disk (`dmesg`, `df`) and the version of "
        "transformers, then resume to save the student again.",
        when=When.AT_END,
    ),
)
"""Checks and stages, in the order in which they are asked."""

ALERTS: tuple[About, ...] = (
    _alert(
        "nobody_works",
        SUSPICION,
        "Has a process that was already running when watching began used neither the CPU nor the GPU?",
    ),
    _alert("stalled_at_start", FAIL, "Is the run silent before its first step?"),
    _alert("stalled", FAIL, "Has the run stopped making steps?"),
    _alert("gpu_idle", FAIL, "Is the GPU idle while a model should be computing?"),
    _alert(
        "cpu_bound_teacher",
        FAIL,
        "Is the teacher computed by the CPU although the run is on a GPU?",
    ),
    _alert("throttled", SUSPICION, "Are the GPU's clocks throttled by heat or the power supply?"),
    _alert("gpu_lost", FAIL, "Has the driver lost the GPU?"),
    _alert("memory_ceiling", FAIL, "Does memory use grow from step to step towards the limit?"),
    _alert("memory_pressure", FAIL, "Do all processes wait for memory?"),
    _alert(
        "slow_part",
        SUSPICION,
        "Does one part of the step take many times what its arithmetic needs on this machine?",
    ),
    _alert("data_wait", SUSPICION, "Do steps wait for data?"),
    _alert(
        "unaccounted",
        SUSPICION,
        "Is much of the time between two steps spent on no part of the step?",
    ),
    _alert(
        "seldom_training", SUSPICION, "Does most of the time go into something other than training?"
    ),
    _alert("step_time_drift", SUSPICION, "Does a step take longer than it did at the beginning?"),
    _alert("compile_after_warm_up", SUSPICION, "Did a step wait for a compiler?"),
    _alert("non_finite", FAIL, "Was a loss, gradient or weight NaN or infinite?"),
    _alert("loss_not_below_guessing", FAIL, "Is the student no better than uniform guessing?"),
    _alert("loss_stays_at_guessing", SUSPICION, "Does the loss stay at that of uniform guessing?"),
    _alert(
        "loss_is_constant", SUSPICION, "Is the loss the same whatever the batch and the weights?"
    ),
    _alert("loss_rose_for_good", SUSPICION, "Has the loss risen at the start without recovering?"),
    _alert("teacher_off_text", SUSPICION, "Is the teacher used on text that it cannot predict?"),
    _alert("loss_spike", SUSPICION, "Did the loss jump?"),
    _alert(
        "heldout_diverging", SUSPICION, "Does the held-out loss rise while the training loss falls?"
    ),
    _alert("loss_diverged", FAIL, "Did the loss in a log rise again after it had fallen?"),
    _alert("loss_flat_at_guessing", SUSPICION, "Does the loss in a log stay at that of guessing?"),
    _alert(
        "rate_is_dead",
        SUSPICION,
        "Is the learning rate in a log 0 long before the end?",
    ),
    _alert(
        "heldout_below_training", SUSPICION, "Is the held-out loss far below the training loss?"
    ),
    _alert("logged_memory_grows", SUSPICION, "Does the memory use in a log grow until its end?"),
    _alert(
        "slow_steps_recur",
        SUSPICION,
        "Are steps slow at regular intervals, or were they slow for a while?",
    ),
    _alert("gap_in_time", SUSPICION, "Is there a long gap between two rows of a log?"),
    _alert("gradient_zero", FAIL, "Is the gradient zero?"),
    _alert("gradient_exploding", FAIL, "Does the gradient explode?"),
    _alert(
        "update_too_large", SUSPICION, "Is a step large relative to the weights that it changes?"
    ),
    _alert(
        "written_text_is_noise",
        SUSPICION,
        "Does the model that generates text draw tokens at random?",
    ),
    _alert(
        "written_text_never_ends",
        SUSPICION,
        "Does no text that the model generates end by itself?",
    ),
    _alert(
        "written_entropy_collapsed",
        SUSPICION,
        "Has the entropy of the texts that the student generates collapsed?",
    ),
    _alert(
        "written_text_repeats",
        SUSPICION,
        "Does the generated text repeat tokens more than the corpus does?",
    ),
    _alert(
        "written_text_shrinks",
        SUSPICION,
        "Are generated texts empty, or shorter than the teacher prefers?",
    ),
)
"""The rules of the supervisor, in the order in which they are listed."""

IDENTITIES: tuple[About, ...] = (
    _identity(
        id="outside_writes",
        wrong="something besides the optimizer changes the weights",
        group="update",
        level=SUSPICION,
        question="Are the weights before a step those that the previous step left?",
        means="Something else also changes the weights: manual weight decay, a restored copy, a clamp, an average. It "
        "may be intended.",
        remedy="look for code that writes p.data or updates weights under no_grad() between steps, and for hooks on "
        "the optimizer",
        transformers="look for callbacks that write weights in on_step_end or on_step_begin",
        lightning="look for code that writes weights in callbacks, on_before_zero_grad or on_train_batch_end",
    ),
    _identity(
        id="vanishing_updates",
        wrong="16-bit weights do not move: the updates are too small for their dtype",
        group="update",
        level=FAIL,
        question="Do 16-bit weights with a gradient move, or is the update too small for their dtype?",
        means="The loss may fall through the few weights that move; the others keep their values for the whole run.",
        remedy="keep the weights in fp32 and run the forward pass under torch.autocast, or raise the learning rate",
        transformers="load the model with dtype=torch.float32 and set bf16=True",
        lightning='load the model in fp32 and set precision="bf16-mixed", not "bf16-true"',
    ),
    _identity(
        id="weights_move",
        wrong="weights do not move",
        group="update",
        level=FAIL,
        question="After 16 steps, has each tensor with a gradient changed in its sampled elements?",
        means="A tensor that does not move is not trained: the optimizer holds other tensors than the model uses, no "
        "gradient reaches it, each update is rounded away, or the learning rate of its group is 0.",
        remedy="create the optimizer from model.parameters() after the model has been moved, wrapped or sharded; keep "
        "weights in fp32 under torch.autocast where 16 bits round the updates away",
        transformers="let the Trainer create the optimizer, in create_optimizer; load the model with "
        "dtype=torch.float32 and set bf16=True",
        lightning="create the optimizer in configure_optimizers, from parameters that exist once configure_model has "
        'run; set precision="bf16-mixed", not "bf16-true"',
    ),
    _identity(
        id="zero_gradient",
        wrong="gradients are always exactly 0",
        group="update",
        level=SUSPICION,
        question="Has each tensor with a gradient had one other than 0 at some sampled step?",
        means="The loss does not depend on it: units that are never active, an argmax, round or comparison before the "
        "loss, a factor or mask of 0, a hinge loss whose margin is always met, or an underflow in fp16.",
        remedy="look at what lies between the named tensors and the loss: activations that are all 0, argmax(), masks; "
        "in fp16 scale the loss with torch.amp.GradScaler",
    ),
    _identity(
        id="frozen_weights",
        wrong="the optimizer moves frozen weights",
        group="update",
        level=SUSPICION,
        question="Does the optimizer leave weights with requires_grad=False unchanged?",
        means="A left-over gradient, momentum or weight decay moves them, although no backward pass reaches them.",
        remedy="set their .grad to None when you freeze them, or leave them out of the optimizer",
        transformers="freeze them before trainer.train(), which gives the optimizer only parameters that require "
        "gradients",
        lightning="freeze them before configure_optimizers runs, and give the optimizer only the others, as "
        "BaseFinetuning does",
    ),
    _identity(
        id="finite_weights",
        wrong="weights are NaN",
        group="update",
        level=FAIL,
        question="Are the weights free of NaN?",
        means="Every later loss is NaN: the model learns nothing any more.",
        remedy="resume from the last checkpoint without NaN, with gradient clipping or a lower learning rate; "
        "torch.autograd.set_detect_anomaly(True) names the operation that gave NaN",
        transformers="resume from an earlier checkpoint with a lower learning_rate or max_grad_norm; "
        'debug="underflow_overflow" names the layer',
        lightning="resume from an earlier checkpoint with gradient_clip_val or a lower learning rate; "
        "Trainer(detect_anomaly=True) names the operation",
    ),
    _identity(
        id="update_size",
        wrong="a step overwrites the weights",
        group="update",
        level=FACT,
        question="Does a step change the weight matrices by a tenth of their size or more?",
        means="The weights are overwritten within a few steps, which works only for small problems. If the loss does "
        "not fall either, an alert is raised.",
        remedy="lower the learning rate if the loss does not fall",
    ),
    _identity(
        id="stale_parameters",
        wrong="the optimizer holds parameters that are no longer in the model",
        group="update",
        level=FAIL,
        question="Are the parameters that the optimizer holds those of the model that trains?",
        means="The optimizer updates parameters of another model, or of layers that were replaced, and the new ones "
        "keep their initial values.",
        remedy="create the optimizer after everything that replaces parameters: new layers, copies, .to(), sharding "
        "and wrapping",
        transformers="give the Trainer the model in its final form, without an optimizer created before",
        lightning="replace layers before configure_optimizers runs, in configure_model or __init__",
    ),
    _identity(
        id="lost_gradients",
        wrong="gradients are gone before the optimizer steps",
        group="gradient",
        level=FAIL,
        question="Are the gradients of the backward passes still there when the optimizer steps?",
        means="Something removes the gradients in between, so the optimizer's step does nothing.",
        remedy="call optimizer.zero_grad() after optimizer.step(), or before the backward pass",
    ),
    _identity(
        id="kept_gradients",
        wrong="gradients are not zeroed between steps",
        group="gradient",
        level=FAIL,
        question="Are the gradients of a step free of those of the step before?",
        means="Each step follows the sum of all gradients so far, like a momentum that never decays.",
        remedy="call zero_grad() of every optimizer once per step, before the first backward pass",
        transformers="leave zero_grad() to the Trainer: check code that overrides training_step or wraps the model",
        lightning="with manual optimization, call zero_grad() of every optimizer once per step",
    ),
    _identity(
        id="accumulation_windows",
        wrong="an accumulation window is cut short or mixed with another",
        group="gradient",
        level=SUSPICION,
        question="Does each backward pass count towards exactly one step, and does each step take one whole "
        "accumulation window?",
        means="Where the data ends inside a window, its gradients are dropped, or added to another window, whose "
        "losses are divided as if it had only its own.",
        remedy="also step after the last batch of an epoch, with its losses divided by the number of batches in its "
        "window; or use drop_last and a number of batches that the window divides",
    ),
    _identity(
        id="accumulated_mean",
        wrong="accumulated losses are not divided exactly once by their number",
        group="gradient",
        level=SUSPICION,
        question="Where a step sums the gradients of several batches, is each loss divided exactly once by their "
        "number?",
        means="The gradients are too large or too small by that factor, which affects clipping, SGD and Adam's eps.",
        remedy="divide each loss once by the number of backward passes per optimizer step",
        transformers="let compute_loss return the summed loss divided by num_items_in_batch; the Trainer divides a "
        "mean only where the model takes no num_items_in_batch",
        lightning="return the mean loss of the batch from training_step: Lightning divides it by "
        "accumulate_grad_batches",
    ),
    _identity(
        id="token_weights",
        wrong="labels of one step do not have equal weight",
        group="gradient",
        level=SUSPICION,
        question="Where a step sums gradients of several batches, or averages those of ranks, does every label have "
        "the same weight?",
        means="Each loss is the mean over its own labels: where their counts differ, tokens of a batch with few labels "
        "count more, and the objective depends on how the data is split into batches.",
        remedy="first count the labels of all batches of a step, after the shift and without ignored ones, and divide "
        "each batch's summed loss by that number; with DDP, by the mean of the ranks' numbers",
        transformers="let the model return its loss, or let compute_loss divide the sum by num_items_in_batch",
        lightning="use manual optimization, and divide summed losses by the number of labels of the whole step",
    ),
    _identity(
        id="clipping",
        wrong="gradient clipping has no effect, or clips nearly everything",
        group="gradient",
        level=SUSPICION,
        question="Are gradients first unscaled, then clipped, before the optimizer steps?",
        means="Clipping has no effect, or clips nearly every step to almost nothing.",
        remedy="call loss.backward(), then scaler.unscale_(optimizer) if there is a scaler, then clip_grad_norm_(), "
        "then step",
        transformers="set max_grad_norm and leave clipping to the Trainer",
        lightning="set gradient_clip_val, or clip in configure_gradient_clipping",
    ),
    _identity(
        id="loss_scale",
        wrong="fp16 gradients are not scaled",
        group="gradient",
        level=SUSPICION,
        question="Is the loss scaled where its backward pass is in fp16?",
        means="Gradients below 6e-8 are 0 in fp16: the layers far from the loss learn less, or nothing.",
        remedy="use torch.amp.GradScaler, or bf16 instead of fp16",
        transformers="set fp16=True, which scales the loss, and keep the weights in fp32; or set bf16=True",
        lightning='set precision="16-mixed", not "16-true"',
    ),
    _identity(
        id="schedule",
        wrong="the learning rate schedule is out of step with the optimizer",
        group="update",
        level=SUSPICION,
        question="Is the scheduler stepped once for each step of its optimizer, and does the learning rate stay above "
        "0?",
        means="The learning rate falls too early, reaches 0 or rises again, or never changes.",
        remedy="call scheduler.step() once after each optimizer.step(), give its length as the number of "
        "scheduler.step() calls, and create it with the optimizer that steps",
        transformers="leave the scheduler to the Trainer, or pass optimizers=(optimizer, its scheduler)",
        lightning='return {"scheduler": ..., "interval": "step"} from configure_optimizers if its length is in steps',
    ),
    _identity(
        id="label_shift",
        wrong="labels are not the tokens that follow",
        group="loss",
        level=SUSPICION,
        question="Are the labels of a language model the tokens that follow the ones it reads?",
        means="The model learns to repeat what it reads, or to skip a token: the loss falls, but the generated text is "
        "bad.",
        remedy="shift once: compare logits[:, :-1] with tokens[:, 1:], or cut inputs and labels from one row, one "
        "token apart",
        transformers="pass labels = input_ids and let the model shift them; with a collator that also shifts, they are "
        "shifted twice",
    ),
    _identity(
        id="causality",
        wrong="the model sees the tokens that it should predict",
        group="loss",
        level=SUSPICION,
        question="In a model trained on next tokens, are the outputs of a position independent of the tokens after it?",
        means="The model reads the answer: its loss falls far below what it can reach when it generates text.",
        remedy="give attention a causal mask or is_causal=True; check means, norms and convolutions over positions",
        transformers="set config.is_decoder=True and check the attention mask, unless the model is meant to be an "
        "encoder",
    ),
    _identity(
        id="padding_seen",
        wrong="padding changes what the model computes elsewhere",
        group="loss",
        level=SUSPICION,
        question="Are all other outputs independent of the padding tokens?",
        means="A row's outputs depend on how long the other rows of its batch are.",
        remedy="pass the attention mask to the attention layers, leave padding out of means and norms over positions, "
        "and count positions from the first token after the padding; unless you intended this",
        transformers="pass attention_mask to the model and make its forward pass use it; with padding on the left, "
        "pass position_ids, too",
    ),
    _identity(
        id="documents_mixed",
        wrong="documents of a packed row see each other",
        group="loss",
        level=SUSPICION,
        question="Are the outputs of a document independent of the other documents in its packed row?",
        means="A document is predicted from the ones before it, which are not there when the model is used.",
        remedy="give attention a block-diagonal mask per document, or pass cu_seqlens to a kernel that takes them; "
        "unless you intended this",
        transformers="use attn_implementation='flash_attention_2' for packing, or pass a 4D attention mask",
    ),
    _identity(
        id="rows_mixed",
        wrong="rows of a batch mix in the model",
        group="loss",
        level=SUSPICION,
        question="If the second row of the input changes, do the outputs of the first stay the same? If two rows of "
        "the input are swapped, are their outputs swapped?",
        means="A row's output depends on other rows, so a label may be compared with the output of another row.",
        remedy="look for a view or reshape where a transpose is meant, and for a softmax or norm over the batch "
        "dimension; unless you intended this",
    ),
    _identity(
        id="eval_is_random",
        wrong="dropout is active in eval mode",
        group="loss",
        level=SUSPICION,
        question="Does the model in eval mode give the same outputs for the same input?",
        means="Evaluations and generated samples are computed with dropout, and differ from call to call.",
        remedy="pass training=self.training to F.dropout, and dropout_p=0.0 to attention in eval mode; unless you "
        "intended this",
    ),
    _identity(
        id="questions",
        wrong="the extra forward passes of --ask were not possible",
        group="loss",
        level=FACT,
        question="Could the probe call the model again with changed inputs?",
        means="Whether rows, padding, documents or later tokens affect outputs that they must not affect is unknown.",
        remedy="no action is needed",
    ),
    _identity(
        id="label_coverage",
        wrong="few positions have a label",
        group="loss",
        level=SUSPICION,
        question="How many positions have a label?",
        means="A batch without labels has a loss of NaN or 0, and its step applies only weight decay and momentum.",
        remedy="check what masks the labels; a truncated row may lose all of its labels",
        transformers="check max_length, and assistant_only_loss or completion_only_loss",
    ),
    _identity(
        id="padding_labels",
        wrong="padding is trained on",
        group="loss",
        level=SUSPICION,
        question="Are padding positions left out of the labels, and of a divergence from a teacher?",
        means="Most of the loss may come from padding, which is learnt at once, so the loss looks better than it is.",
        remedy="set the labels of padding to -100, or mask the loss",
        transformers="let the collator pad labels with -100, as DataCollatorForLanguageModeling does",
    ),
    _identity(
        id="end_of_text",
        wrong="no end-of-text token is trained on",
        group="loss",
        level=SUSPICION,
        question="Is the end-of-text token among the labels?",
        means="The model never learns to stop, and goes on generating when it is done.",
        remedy="use a pad token other than the end-of-text token, or mask labels by the attention mask and not by "
        "token id",
        transformers="set tokenizer.pad_token to a token other than eos_token: the collator masks every pad_token",
    ),
    _identity(
        id="rows_left_out",
        wrong="rows of the batch do not reach the loss",
        group="loss",
        level=SUSPICION,
        question="Do all rows of a batch reach the loss?",
        means="Some rows that are read from the data are not trained on, although the log counts them.",
        remedy="look for an index where a slice is meant, as in logits[0] or batch[:1]",
    ),
    _identity(
        id="double_softmax",
        wrong="softmax is applied twice",
        group="loss",
        level=SUSPICION,
        question="Is softmax applied only once?",
        means="cross_entropy applies softmax itself: on probabilities it is nearly flat, so the loss cannot fall far.",
        remedy="give cross_entropy the logits, or give nll_loss their log_softmax",
    ),
    _identity(
        id="log_probabilities",
        wrong="the loss does not get log-probabilities over the classes",
        group="loss",
        level=SUSPICION,
        question="Do the probabilities whose logarithms nll_loss gets sum to 1 over the classes?",
        means="nll_loss only selects a number for each label: without log_softmax over the classes it can fall without "
        "end, or compares samples with each other.",
        remedy="call cross_entropy on the logits, or nll_loss on log_softmax(logits, dim=1); with (batch, length, "
        "classes) take dim=-1 and flatten before the loss",
    ),
    _identity(
        id="distillation",
        wrong="the loss contains a divergence from a teacher",
        group="loss",
        level=FACT,
        question="Which divergence from a teacher is minimised, at which temperature, and how large is it?",
        means="This is the objective of the distillation; at the start of a run the divergence is usually a few nats.",
        remedy="compare it with your recipe",
    ),
    _identity(
        id="teacher_is_student",
        wrong="teacher and student are the same model",
        group="loss",
        level=SUSPICION,
        question="Are teacher and student different models?",
        means="The divergence is 0 from the start and stays there: there is nothing to learn from the teacher.",
        remedy="check what the teacher is loaded from, and that it is not a reference to the student or a copy of it",
    ),
    _identity(
        id="teacher_mode",
        wrong="the teacher is not in eval mode",
        group="loss",
        level=SUSPICION,
        question="Is the teacher in eval mode?",
        means="The teacher's output for the same tokens differs at each step, and the student learns the noise.",
        remedy="call teacher.eval() after you load it, and after any train() call on a module that contains it",
        transformers="keep the teacher outside the model that the Trainer gets, and call teacher.eval()",
        lightning="call teacher.eval() where you create it: Lightning keeps the modes of modules (before 2.2 it calls "
        "train() on every submodule, so keep the teacher in a plain list)",
    ),
    _identity(
        id="teacher_alignment",
        wrong="the teacher's logits are not aligned with the student's",
        group="loss",
        level=SUSPICION,
        question="Does a divergence compare the same positions and token ids of teacher and student?",
        means="The student learns to predict a different position, or a different token, from the one it is used for.",
        remedy="slice both logits alike: take [:, :-1] of both, and only the first ids of the larger vocabulary",
    ),
    _identity(
        id="divergence_arguments",
        wrong="a divergence confuses probabilities with log-probabilities",
        group="loss",
        level=SUSPICION,
        question="Does a divergence get probabilities and log-probabilities where it expects them?",
        means="The result is not a divergence: it may be negative, and it has another minimum.",
        remedy="call F.kl_div(student_log_probs, teacher_probs), or set log_target=True with log-probabilities of both",
    ),
    _identity(
        id="divergence_axis",
        wrong="a divergence takes its softmax over positions",
        group="loss",
        level=SUSPICION,
        question="Is the softmax of a divergence taken over the classes?",
        means="Each class is normalised over the positions of a row, so no position has a distribution that the "
        "student could learn.",
        remedy="call log_softmax and softmax with dim=-1",
    ),
    _identity(
        id="teacher_trained",
        wrong="the teacher gets gradients from the divergence",
        group="loss",
        level=SUSPICION,
        question="Does a divergence between two models train one of them alone?",
        means="The teacher moves towards the student: both can agree without learning anything from the data.",
        remedy="compute the teacher's outputs under torch.no_grad(), and keep its parameters out of the optimizer; "
        "unless you intended that both learn",
    ),
    _identity(
        id="divergence_temperature",
        wrong="teacher and student have different temperatures in a divergence",
        group="loss",
        level=SUSPICION,
        question="Do teacher and student have the same temperature in a divergence?",
        means="A student with the teacher's logits would not reach divergence 0: the student learns a flatter or "
        "sharper distribution.",
        remedy="divide both logits by the same temperature, unless you intended this",
    ),
    _identity(
        id="temperature_squared",
        wrong="the divergence is not multiplied by the square of its temperature",
        group="loss",
        level=SUSPICION,
        question="Is a divergence at a temperature multiplied by the square of that temperature?",
        means="Its gradient is T^2 times too small relative to the cross entropy, so the teacher hardly counts.",
        remedy="multiply the divergence by T * T",
    ),
    _identity(
        id="divergence_mean",
        wrong="the divergence is not a mean over positions",
        group="loss",
        level=SUSPICION,
        question="Is the divergence summed over the vocabulary and averaged over positions?",
        means="It is too small by the size of the vocabulary, or too large by the number of positions in a row.",
        remedy='give kl_div reduction="batchmean" and logits of shape (positions, vocabulary), or sum over the last '
        "axis and take the mean",
    ),
    _identity(
        id="broadcast_loss",
        wrong="predictions and targets of the loss have different shapes",
        group="loss",
        level=SUSPICION,
        question="Do predictions and targets of a loss have the same shape?",
        means="Shapes (N, 1) and (N,) broadcast to (N, N): each prediction is pulled to the mean of all targets.",
        remedy="squeeze the last axis of the predictions, or unsqueeze the targets: both (N,) or both (N, 1)",
    ),
    _identity(
        id="bounded_logits",
        wrong="an activation is applied to the logits",
        group="loss",
        level=SUSPICION,
        question="Are the logits of a cross entropy the output of a layer, without an activation after it?",
        means="The probabilities cannot come near 0 or 1, so the loss cannot fall far.",
        remedy="give the loss the output of the last layer: no ReLU, sigmoid or tanh after it",
    ),
    _identity(
        id="one_class",
        wrong="every label of a batch is the same class",
        group="data",
        level=SUSPICION,
        question="Do the labels of a batch have more than one class?",
        means="The data is sorted by class: the model learns to predict the class that it saw last.",
        remedy="shuffle: DataLoader(..., shuffle=True), or shuffle a stream before batching",
    ),
    _identity(
        id="not_frozen",
        wrong="a module was meant to be frozen and is trained",
        group="data",
        level=SUSPICION,
        question="Is no module with trained parameters marked as frozen by an attribute that has no effect?",
        means="A module has no requires_grad of its own: setting it to False changes nothing.",
        remedy="call module.requires_grad_(False), before the optimizer is created",
    ),
    _identity(
        id="seeded_again",
        wrong="the random state is the same in each step",
        group="data",
        level=SUSPICION,
        question="Does dropout draw new random numbers in each step?",
        means="Each step drops the same elements, so that a part of the model is never trained.",
        remedy="seed once, before the first step",
    ),
    _identity(
        id="training_mode",
        wrong="the model is trained in eval mode",
        group="data",
        level=SUSPICION,
        question="Are the dropout and batch norm layers in training mode while the model trains?",
        means="Dropout is off and batch norm updates no statistics: an evaluation left the model in eval mode, or it "
        "was loaded in eval mode.",
        remedy="call model.train() before each epoch, and after each evaluation",
        transformers="the Trainer calls model.train() in each training_step: check callbacks and code that overrides "
        "it",
        lightning="call .train() on a model that was loaded, because from_pretrained returns it in eval mode and "
        "Lightning keeps the modes of modules",
    ),
    _identity(
        id="evaluation_mode",
        wrong="the model is evaluated in training mode",
        group="data",
        level=SUSPICION,
        question="Are dropout and batch norm in eval mode while an evaluation runs?",
        means="Each evaluation runs with dropout, and held-out data changes the statistics of batch norm. A model "
        "without dropout and batch norm is the same in both modes.",
        remedy="call model.eval() before the evaluation, and model.train() after it",
        lightning="call .eval() before your own evaluation loops; Trainer.validate() does it by itself",
    ),
    _identity(
        id="held_out",
        wrong="the evaluation reads samples that are trained on",
        group="data",
        level=SUSPICION,
        question="Are the evaluation samples different from the training samples?",
        means="The evaluation measures how well the model memorises the training set, and hides overfitting.",
        remedy="split once, before anything is repeated, copied or augmented, and give each loader its own part",
        transformers="use different parts for train_dataset and eval_dataset: dataset.train_test_split(seed=...)",
        lightning="return the loader of the validation part from val_dataloader",
    ),
    _identity(
        id="data_order",
        wrong="two epochs have the same order although the data is shuffled",
        group="data",
        level=SUSPICION,
        question="Is shuffled data in a different order in each epoch?",
        means="Each epoch has the same batches: the generator is seeded again, or set_epoch() of a sampler is not "
        "called.",
        remedy="seed once, before the first epoch; call set_epoch(epoch) of a DistributedSampler before each epoch",
    ),
    _identity(
        id="cut_passes",
        wrong="epochs end before their data does",
        group="data",
        level=SUSPICION,
        question="Does each pass over a DataLoader reach its end?",
        means="A new iterator starts at the first batch again; without shuffling, the rest of the data is never read.",
        remedy="create the iterator once per epoch, by for batch in loader, instead of calling next(iter(loader))",
        lightning="check limit_train_batches and overfit_batches",
    ),
    _identity(
        id="repeated_batches",
        wrong="consecutive batches are the same",
        group="data",
        level=SUSPICION,
        question="Do consecutive batches differ?",
        means="The same data is trained on several times in a row.",
        remedy="with an IterableDataset and several workers, split the data by get_worker_info(); otherwise check what "
        "__getitem__ does with its index",
    ),
    _identity(
        id="no_gradient",
        wrong="parameters of the optimizer get no gradient",
        group="update",
        level=SUSPICION,
        question="Has each parameter of the optimizer had a gradient by its third step?",
        means="A part of the model is not used, or is cut off by detach() or no_grad(); an expert to which no token "
        "has been routed yet looks the same.",
        remedy="look for detach(), .data, torch.no_grad() and layers that forward() does not call, or leave a frozen "
        "part out of the optimizer; with gradient checkpointing set use_reentrant=False",
        transformers='with gradient_checkpointing set gradient_checkpointing_kwargs={"use_reentrant": False}, or call '
        "model.enable_input_require_grads() if the embedding is frozen; else look for detach(), torch.no_grad() and "
        "layers that forward() does not call",
    ),
    _identity(
        id="decay_groups",
        wrong="weight decay is for biases and norms alone",
        group="update",
        level=SUSPICION,
        question="Does the weight decay reach the matrices of the model?",
        means="The groups of the optimizer are swapped: the matrices are not regularised, and biases and norms shrink.",
        remedy="give weight_decay to the group of parameters with two or more dimensions, and 0 to the others; unless "
        "you intended this",
    ),
    _identity(
        id="unowned_parameters",
        wrong="parameters with gradients are in no optimizer",
        group="update",
        level=SUSPICION,
        question="Is each parameter that gets a gradient held by an optimizer?",
        means="The parameter keeps its initial value although its gradient is computed: it was forgotten, or it is "
        "meant to be frozen.",
        remedy="give all of them to the optimizer; to freeze them, call requires_grad_(False), which also saves the "
        "time and memory of their gradients",
    ),
    _identity(
        id="rank_drift",
        wrong="ranks train different weights",
        group="ranks",
        level=FAIL,
        question="Do all ranks begin a step with the same weights?",
        means="Each rank trains its own model, and the saved one is that of one rank, trained on its part of the data "
        "alone.",
        remedy="call the wrapped model, model(x), never model.module(x); wrap it after its last change (layers, "
        "requires_grad, loaded weights), and write weights on all ranks alike. Without DDP or FSDP, all-reduce the "
        "gradients of all parameters before each step. Local SGD, DiLoCo and ensembles differ on purpose",
        transformers="look for callbacks that write weights on one rank, and for a training_step or compute_loss that "
        "calls model.module",
        lightning="call self(x) or self.model(x) in training_step, and write no weights under rank_zero_only",
    ),
    _identity(
        id="rank_data",
        wrong="ranks read the same data",
        group="ranks",
        level=SUSPICION,
        question="Do ranks that train one model read different data?",
        means="They compute the same gradients, so all GPUs together do the work of one. This is intended where each "
        "rank takes its part of a batch later, as with context parallelism.",
        remedy="give the DataLoader a DistributedSampler; with an IterableDataset, let each rank read its part",
        transformers="leave get_train_dataloader to the Trainer; split a stream with split_dataset_by_node",
        lightning="leave use_distributed_sampler on; split a stream by the rank",
    ),
)
"""Identities that hold in every healthy training run of a watched script."""

BY_ID: dict[str, dict[str, About]] = {
    CHECK: {one.id: one for one in CHECKS},
    ALERT: {one.id: one for one in ALERTS},
    IDENTITY: {one.id: one for one in IDENTITIES},
}
"""All rows, by kind and by id."""


RETIRED = {
    "causal_mask": "no_token_leaks",
    "documents_isolated": "no_token_leaks",
    "forward_is_the_model": "no_token_leaks",
    "positions_matter": "step_student",
    "shift_proof": "step_loss",
    "student_shift": "step_loss",
    "labels_are_next_tokens": "step_loss",
    "nan_not_masked": "",
    "effective_settings": "step_weights",
    "ignored_rows_have_no_part": "step_gradients",
    "loss_invariants": "step_loss",
    "loss_gradient": "step_gradients",
    "gradient_above_rounding": "step_gradients",
    "rows_in_update": "step_gradients",
    "tensors_moved": "step_weights",
    "effective_learning_rate": "step_weights",
    "step_work": "",
    "reported_loss": "",
    "receipt_agrees": "",
}
"""Ids of checks of earlier versions, with the check that replaced each; empty where none did."""


def skipped_ids(text: str) -> frozenset[str]:
    """Return the ids in a `checks.skip` setting. Raises SpecError for an id that is unknown or was replaced by another
    check; one that was removed without a replacement is accepted."""
    ids = [part.strip() for part in text.split(",") if part.strip()]
    problems = []
    for name in ids:
        if name in RETIRED:
            if now := RETIRED[name]:
                problems.append(
                    f"checks.skip: expected ids of checks, found {name!r}, which is now {now}"
                )
        elif name not in BY_ID[CHECK]:
            near = difflib.get_close_matches(name, BY_ID[CHECK], n=1)
            did_you_mean = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"checks.skip: expected ids of checks, found {name!r}{did_you_mean}")
    if problems:
        raise SpecError(problems, hint="`engine checks --list` has the ids")
    return frozenset(ids)
