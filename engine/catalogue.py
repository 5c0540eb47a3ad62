"""Texts of everything that is judged: checks, stages of the audit, alerts, and the identities of a watched script. Each
has its question, what a failure means, and what to do. No torch.

The judge has the same id: a function of `engine.checks` or `engine.audit.judge` for a check or stage, one of
`engine.watch.rules` for an alert, and the probe (`engine/attach/probe/apr_watch`) for an identity.
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
    BEFORE_RESUMED_STEP = "before_resumed_step"
    """In a resumed session, right before its first step, after everything else that could change the state."""
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
        id="step_rows",
        wrong="a step trained on other rows than those of the corpus",
        question="Did the step train on the next rows of the corpus in order, each once?",
        means="Rows are met twice, left out or altered between the corpus and the models.",
        remedy="`engine data RUN --step N` shows the rows of the step; see that nothing writes to the corpus, and "
        "empty the cache of tokens (`apr-workbench/tokens` of the user's cache).",
    ),
    _stage(
        id="step_labels",
        wrong="labels are not the next tokens of their documents",
        question="Is every label of the step the next token of its document, and every such token a label?",
        means="The student learns to repeat or skip tokens, is trained on what is not to be predicted, or misses "
        "a part.",
        remedy="`engine data RUN --step N` shows which tokens have labels; compare them with the chat template and "
        "data.turns.",
    ),
    _stage(
        id="step_teacher",
        wrong="the teacher's outputs are not those of the weights in its files",
        question="Are the teacher's hidden states in the step those of a plain forward pass over its tokens?",
        means="The teacher runs with wrong weights or a wrong forward pass, or sees wrong tokens, neighbouring "
        "documents or positions.",
        remedy="Flip teacher.backend or teacher.precision to see which of them causes it. With stored outputs "
        "(teacher.cache), run without them, and `engine prepare` a new store at the temperature of the loss.",
    ),
    _stage(
        id="step_student",
        wrong="the student's outputs are not those of its weights",
        question="Are the student's hidden states in the step those of a plain forward pass with its weights?",
        means="The forward pass that trains is not the model that is saved.",
        remedy="Flip kernels.layers or student.precision to see which of them causes it.",
    ),
    _stage(
        id="step_loss_parts",
        wrong="the loss leaves out or repeats a part of the batch",
        question="Are the logged cross entropy, divergence and agreement those of the step's hidden states and labels?",
        means="Tokens or rows are left out of the loss, counted twice, or compared at other settings than the spec's.",
        remedy="Flip loss.kernel and loss.chunk_rows to see whether a kernel or a compiler is wrong.",
    ),
    _stage(
        id="step_loss",
        wrong="the loss has other weights than the spec",
        question="Is the logged loss the sum of its parts with the weights that the spec gives?",
        means="The run trains with another weight of the teacher than it records.",
        remedy="Compare loss.alpha and loss.temperature in `resolved.json` with the spec.",
    ),
    _stage(
        id="step_gradients",
        wrong="the gradients are not those of the loss",
        question="Are the gradients those of the logged loss, over all rows and passes of the step?",
        means="The run descends another objective than the one it logs: rows or passes are left out or weighted "
        "wrongly.",
        remedy="The numbers say where the difference begins: at the hidden states, in the loss, else in the "
        "tensor named. Flip loss.kernel, kernels.layers, student.checkpointing or student.graphs.",
    ),
    _stage(
        id="step_clipping",
        wrong="gradients are clipped by a wrong norm",
        question="Is the logged gradient norm that of the gradients?",
        means="Gradients are clipped by a wrong norm, and the chart shows that wrong norm.",
        remedy="Flip train.update: its fused kernel sums the squares in a different way.",
    ),
    _stage(
        id="step_moments",
        wrong="the moments of the optimizer are not AdamW's",
        question="Are the optimizer's moments those that AdamW makes of the clipped gradients?",
        means="The optimizer gets other gradients than those of the loss, clips them differently, or has other betas.",
        remedy="Flip train.update, and compare train.clip_norm, beta1 and beta2 in `resolved.json` with the spec.",
    ),
    _stage(
        id="step_weights",
        wrong="the weights do not move as AdamW would move them",
        question="Did every weight move as AdamW says, at the rate, decay and epsilon of the spec?",
        means="The rate or decay that trains is not the one that is recorded, or a part of the student is not trained.",
        remedy="Flip train.update; see in `engine tail RUN` whether steps were skipped.",
    ),
)
"""The stages of a training step, in the order in which data flows through them: rows, labels, teacher, student, loss
parts, loss, gradients, clipping, moments, weights."""

CHECKS: tuple[About, ...] = (
    _check(
        id="vocabulary_by_bytes",
        wrong="teacher and student do not have the same tokens",
        question="Is every id the same token to the teacher, to the student and in the training text, and every text "
        "the same ids?",
        means="Probabilities are compared id by id, so the student is taught another word than the teacher meant, or "
        "a model reads its text cut in places where it was not trained to.",
        remedy="Take teacher and student of one family, and the tokenizer that belongs to them.",
        when=When.BEFORE,
    ),
    _check(
        id="batch_not_degenerate",
        wrong="the batch has hardly any varied text",
        question="Does a step hold different rows of varied text?",
        means="There is nothing to learn from the batch, however well its loss falls.",
        remedy="`engine data SPEC` shows the rows: point data.corpus at varied text, and leave copies out.",
        when=When.BEFORE,
    ),
    _check(
        id="documents_in_rows",
        wrong="the rows are not those of the corpus",
        question="Are documents that are read and tokenized again in the rows of their split, whole?",
        means="The rows are not of this corpus and tokenizer: text is lost, cut, altered, or in both splits.",
        remedy="Empty the cache of tokens (`apr-workbench/tokens` of the user's cache); see that nothing writes to the "
        "corpus, and that tokenizer.json truncates nothing.",
        when=When.BEFORE,
    ),
    _check(
        id="padding_not_trained",
        wrong="padding is trained on",
        question="Are rows free of labels on padding?",
        means="Part of the loss is the easy prediction of padding, and the student learns to answer with it.",
        remedy="Give padding the label -100, or pack documents instead of padding them.",
        when=When.BEFORE,
    ),
    _check(
        id="end_is_learnt",
        wrong="no end of a text is trained on",
        question="Is any of the special tokens that end a text or a turn a label?",
        means="The student is never taught to stop: what it generates goes on until it is cut off.",
        remedy="Give the end of each text or answer a label; if padding is the same token, mask by position, not id.",
        when=When.BEFORE,
        stops=False,
    ),
    _check(
        id="resume_continues",
        wrong="the resumed run does not go on from its checkpoint",
        question="Is the state that a resumed run continues from, bit for bit, the one in its checkpoint's files?",
        means="It continues from a different state: old weights, moments that are zero or of other tensors, rows that "
        "are trained on twice. Each rank compares its shards of tensors and moments, counters, generators, step and "
        "row.",
        remedy="The reason names what differs. The checkpoint stays as it is: resume again, with the versions of torch "
        "and the engine that wrote it if they have changed.",
        when=When.BEFORE_RESUMED_STEP,
    ),
    _check(
        id="weights_alive",
        wrong="a model has weights that were never loaded",
        question="Are the tensors of both models finite, and no matrix constant?",
        means="A model was left as it was allocated or initialised; its file was not read into it.",
        remedy="Load the file again and compare with `engine inspect --values`.",
        when=When.AT_START,
    ),
    _check(
        id="no_token_leaks",
        wrong="the model sees the tokens that it is to predict",
        question="Does a token move only later ones of its document, in a model that transformers runs?",
        means="It sees the tokens that it is to predict, or other documents of its row: its losses mean nothing.",
        remedy="Take another version of transformers, `model.engine=native` where the family allows it, or "
        "`data.packing=documents`.",
        when=When.AT_START,
    ),
    _check(
        id="teacher_knows_text",
        wrong="the teacher guesses",
        question="Does the teacher predict held-out text better than token frequencies do?",
        means="It guesses: its weights are random, or its tokenizer or forward pass is wrong. It teaches noise.",
        remedy="Check the file, the tokenizer and the family; a good teacher is far below ln V.",
        when=When.AT_START,
    ),
    _check(
        id="eval_baseline",
        wrong="the evaluation praises a model that knows nothing",
        question="Does the evaluation give a model that knows nothing no better than token frequencies?",
        means="The evaluation praises anything, so no held-out loss of this run means something.",
        remedy="`engine data SPEC` shows the held-out rows and which tokens have labels; take more with eval.rows.",
        when=When.AT_START,
        stops=False,
    ),
    _check(
        id="teacher_fp8_within_noise_floor",
        wrong="8-bit floats change the teacher's answers too much",
        question="Is a teacher in 8-bit floats as near to its exact self as one with 4-bit weights would be?",
        means="The student learns from answers that rounding has moved by more than people accept of 4-bit files.",
        remedy="Take teacher.precision=bf16, which rounds less and takes longer.",
        when=When.AT_START,
    ),
    _check(
        id="stored_outputs",
        wrong="the stored outputs are not those of the teacher",
        question="Are the stored teacher outputs of some rows of the run those that the teacher computes?",
        means="The student learns from outputs of another model, of other rows, or altered ones.",
        remedy="Make the store again with `engine prepare`, from the teacher that the spec names.",
        when=When.AT_START,
    ),
    _check(
        id="teacher_not_student",
        wrong="teacher and student are the same model",
        question="Are teacher and student different models, with a KL above zero at the start?",
        means="The student has nothing to learn: the KL is zero from the first step on and stays there.",
        remedy="Give student.path other weights.",
        when=When.AT_START,
    ),
    *STAGES,
    _check(
        id="split_disjoint",
        wrong="held-out text is also trained on",
        question="Is held-out text absent from the text that is trained on?",
        means="The held-out loss measures how well the student memorises the training set, not how it fares on new "
        "text.",
        remedy="Remove copies from the corpus, or split by document; `engine data SPEC` names them.",
        when=When.FIRST_STEPS,
        stops=False,
    ),
    _check(
        id="memory_as_planned",
        wrong="the run takes another amount of memory than planned",
        question="Is the measured peak of memory near the one that was planned?",
        means="The plan cannot be trusted to refuse a run that does not fit.",
        remedy="See what else uses the device (`engine doctor`); memory.limit_gib plans for less, memory.budget=report "
        "goes on.",
        when=When.FIRST_STEPS,
        stops=False,
    ),
    _check(
        id="no_late_compile",
        wrong="a step waited for a compiler",
        question="Was every kernel compiled before the steps that are timed?",
        means="A step waited for a compiler; a key may change with every step.",
        remedy="`engine tail RUN` names the kernel and what changed: kernels.prewarm=true compiles it before, or "
        "kernels.layers=torch does without it in layers.",
        when=When.ALWAYS,
        stops=False,
    ),
    _check(
        id="checkpoint_reloads",
        wrong="a checkpoint, read back, differs from what was written",
        question="Is a checkpoint, read back, byte for byte as it was written, and would a resume take it?",
        means="The disk returns other bytes than were written; the run could not be resumed from this checkpoint.",
        remedy="Check the disk (`dmesg`, `df`), or use another one, and resume: the previous checkpoint is kept.",
        when=When.AT_CHECKPOINT,
    ),
    _check(
        id="artefact",
        wrong="the saved student is not the one that was trained",
        question="Is the saved student, read back from its files, the trained one in student.save_as, bit for bit?",
        means="What is evaluated, published and used is another model than the one that was trained.",
        remedy="The last checkpoint has the trained weights: look at the disk (`dmesg`, `df`) and at the version of "
        "transformers, and resume, to save it again.",
        when=When.AT_END,
    ),
)
"""Checks and stages, in the order in which they are asked."""

ALERTS: tuple[About, ...] = (
    _alert(
        "nobody_works",
        SUSPICION,
        "Does a process that was already running when watching began use the CPU or the GPU at all?",
    ),
    _alert(
        "stalled_at_start", FAIL, "Is the run silent before its first step, and in which phase?"
    ),
    _alert("stalled", FAIL, "Has the run stopped making steps?"),
    _alert("identity_fails", FAIL, "Does an identity that holds in every healthy training fail?"),
    _alert("gpu_idle", FAIL, "Is the GPU idle while a model should be at work?"),
    _alert(
        "cpu_bound_teacher",
        FAIL,
        "Is the teacher computed by the CPU although the run is on a GPU?",
    ),
    _alert("busy_without_work", SUSPICION, "Does a GPU that reads busy do any work?"),
    _alert("throttled", SUSPICION, "Do heat or the power supply hold the clocks down?"),
    _alert("gpu_lost", FAIL, "Is the GPU still there?"),
    _alert("memory_ceiling", FAIL, "Does memory grow from step to step towards its end?"),
    _alert("memory_pressure", FAIL, "Do all processes wait for memory?"),
    _alert("allocator_ceiling", FAIL, "Was an allocation refused although there was memory?"),
    _alert(
        "slow_part",
        SUSPICION,
        "Does one part of the step take many times what its arithmetic needs on this machine?",
    ),
    _alert(
        "slow_machine",
        SUSPICION,
        "Is this machine as fast as it was when `engine doctor` measured it?",
    ),
    _alert("data_wait", SUSPICION, "Do steps wait for data?"),
    _alert("unaccounted", SUSPICION, "Is the time between two steps spent on training?"),
    _alert("seldom_training", SUSPICION, "Does most of the time go into training?"),
    _alert("step_time_bimodal", SUSPICION, "Are there two kinds of step?"),
    _alert("step_time_drift", SUSPICION, "Does a step take longer than it did at the beginning?"),
    _alert(
        "slower_than_before",
        SUSPICION,
        "Do steps take longer than in earlier runs of the same settings on this machine?",
    ),
    _alert("compile_after_warm_up", SUSPICION, "Did a step wait for a compiler?"),
    _alert("non_finite", FAIL, "Was a loss, gradient or weight NaN or infinite?"),
    _alert("loss_not_below_guessing", FAIL, "Is the student worse than guessing?"),
    _alert("loss_stays_at_guessing", SUSPICION, "Has the loss left the level of guessing?"),
    _alert("loss_is_constant", SUSPICION, "Does the loss depend on what is read and trained?"),
    _alert("loss_rose_for_good", SUSPICION, "Did the loss come back from a rise at the start?"),
    _alert("teacher_off_text", SUSPICION, "Does the teacher know the text that it is asked about?"),
    _alert("loss_at_alpha_ln_v", FAIL, "Is the loss that of a uniform student?"),
    _alert("kl_near_zero", FAIL, "Is there anything to learn from the teacher?"),
    _alert("loss_spike", SUSPICION, "Did the loss jump?"),
    _alert(
        "heldout_diverging", SUSPICION, "Does the held-out loss rise while the training loss falls?"
    ),
    _alert("loss_diverged", FAIL, "Did the loss of a log rise again after it had fallen?"),
    _alert("loss_flat_at_guessing", SUSPICION, "Is the loss of a log that of guessing all along?"),
    _alert(
        "rate_is_dead",
        SUSPICION,
        "Does the learning rate in a log stay above 0 until near the end?",
    ),
    _alert(
        "heldout_below_training", SUSPICION, "Are held-out and training loss the same quantity?"
    ),
    _alert("logged_memory_grows", SUSPICION, "Does the memory in a log grow to its end?"),
    _alert(
        "slow_steps_recur",
        SUSPICION,
        "Is one step in so many slow, or were steps slow for a while?",
    ),
    _alert("gap_in_time", SUSPICION, "Is there a gap in the times of a log?"),
    _alert("gradient_zero", FAIL, "Is there a gradient at all?"),
    _alert("gradient_exploding", FAIL, "Does the gradient explode?"),
    _alert(
        "update_too_large", SUSPICION, "Is a step small relative to the weights that it changes?"
    ),
    _alert("always_clipped", SUSPICION, "Is every gradient clipped, and by much?"),
    _alert("written_text_is_noise", SUSPICION, "Does the model that writes draw tokens at random?"),
    _alert(
        "written_text_never_ends",
        SUSPICION,
        "Does a text that the model writes ever end by itself?",
    ),
    _alert(
        "written_entropy_collapsed",
        SUSPICION,
        "Does the student still write different texts, or is it as sure as its teacher?",
    ),
    _alert(
        "written_text_repeats",
        SUSPICION,
        "Does the model repeat a token more than the corpus does?",
    ),
    _alert(
        "written_text_shrinks",
        SUSPICION,
        "Do written texts have more than an end, and the length that the teacher gives them?",
    ),
    _alert(
        "writer_is_another_model",
        FAIL,
        "Is the model that writes the one that trains, within rounding?",
    ),
    _alert("learning_rate", FAIL, "Is the learning rate that of the schedule, and not 0?"),
    _alert(
        "batch_not_as_set",
        FAIL,
        "Are the rows and tokens of a step, and the position in the data, what they should be?",
    ),
    _alert("run_not_as_set", FAIL, "Did every setting reach the run?"),
    _alert(
        "schedule_not_as_set",
        FAIL,
        "Was the run evaluated, saved and ended at the steps that the settings say?",
    ),
    _alert(
        "resumed_as_another",
        FAIL,
        "Does a resumed session begin with the models, the data and the settings of the one before it?",
    ),
)
"""The rules of the supervisor, in the order in which they are listed."""

IDENTITIES: tuple[About, ...] = (
    _identity(
        id="update",
        wrong="the weights do not move as the optimizer would move them",
        group="update",
        level=FAIL,
        question="Are the new weights what AdamW, Adam or SGD by the textbook makes of the old, from gradient, state, "
        "rate and decay?",
        means="Something else moves the weights too, or the optimizer does not do what its settings say.",
        remedy="compare the step with foreach=False and fused=False; look for code that writes weights, states or "
        "gradients while optimizer.step() runs",
        transformers='set optim="adamw_torch" and look at callbacks that write weights or gradients',
    ),
    _identity(
        id="outside_writes",
        wrong="something besides the optimizer changes the weights",
        group="update",
        level=SUSPICION,
        question="Are the weights before a step those that the previous step left?",
        means="Something else trains too: a decay by hand, a restored copy, a clamp, an average; or it is meant.",
        remedy="look for code that writes p.data or uses no_grad() between steps, and hooks on the optimizer",
        transformers="look at callbacks that write weights in on_step_end or on_step_begin",
        lightning="look at callbacks and at on_before_zero_grad, on_train_batch_end",
    ),
    _identity(
        id="vanishing_updates",
        wrong="16-bit weights do not move: the updates are too small for their type",
        group="update",
        level=FAIL,
        question="Do 16-bit weights that have a gradient move, or is the update less than their type holds?",
        means="The loss may fall by the few weights that move; the others stay as they were for the whole run.",
        remedy="keep the weights in fp32 and run the forward pass under torch.autocast, or raise the rate",
        transformers="load the model with dtype=torch.float32 and set bf16=True",
        lightning='load the model in fp32 and set precision="bf16-mixed", not "bf16-true"',
    ),
    _identity(
        id="weights_move",
        wrong="weights do not move",
        group="update",
        level=FAIL,
        question="Has each tensor with a gradient changed after 16 steps, counted in sampled elements?",
        means="What does not move is not trained: the optimizer holds other tensors than the model uses, no gradient "
        "reaches it, each update is rounded away, or the learning rate of its group is 0.",
        remedy="create the optimizer from model.parameters() after the model has been moved, wrapped or sharded; keep "
        "weights in fp32 under torch.autocast where 16 bits round the updates away",
        transformers="let the Trainer create the optimizer, in create_optimizer; load the model with "
        "dtype=torch.float32 and set bf16=True",
        lightning="create the optimizer in configure_optimizers, from parameters that exist once configure_model has "
        'run; set precision="bf16-mixed", not "bf16-true"',
    ),
    _identity(
        id="frozen_weights",
        wrong="the optimizer moves frozen weights",
        group="update",
        level=SUSPICION,
        question="Does the optimizer leave weights alone whose requires_grad is False?",
        means="A gradient that was left, momentum or weight decay moves them, though no backward pass does.",
        remedy="set their .grad to None when you freeze them, or leave them out of the optimizer",
        transformers="freeze them before the Trainer is made: it gives the optimizer what requires gradients",
        lightning="freeze them before configure_optimizers, and give it the others; BaseFinetuning does so",
    ),
    _identity(
        id="finite_weights",
        wrong="weights are NaN",
        group="update",
        level=FAIL,
        question="Are the weights free of NaN?",
        means="Every later loss is NaN: nothing is learnt any more.",
        remedy="start again from the last checkpoint before it, with gradient clipping or a lower learning rate; "
        "torch.autograd.set_detect_anomaly(True) names the operation that gave NaN",
        transformers="resume from an earlier checkpoint with a lower learning_rate or max_grad_norm; "
        'debug="underflow_overflow" names the layer',
        lightning="resume from an earlier checkpoint with gradient_clip_val or a lower rate; Trainer("
        "detect_anomaly=True) names the operation",
    ),
    _identity(
        id="update_size",
        wrong="a step overwrites the weights",
        group="update",
        level=FACT,
        question="How large is a step compared with the matrices that it moves, if it is at least a tenth of them?",
        means="The weights are overwritten within a few steps, which trains only small problems. If the loss does not "
        "fall either, there is an alert.",
        remedy="lower the learning rate if the loss does not fall",
    ),
    _identity(
        id="stale_parameters",
        wrong="the optimizer holds parameters that are no longer in the model",
        group="update",
        level=FAIL,
        question="Are the parameters that the optimizer holds those of the model that trains?",
        means="The optimizer steps parameters of another model, or of layers that were replaced, and the new ones stay "
        "as they were made.",
        remedy="create the optimizer after everything that replaces parameters: new layers, copies, .to(), sharding "
        "and wrapping",
        transformers="give the Trainer the model in its last form, without an optimizer made before",
        lightning="replace layers before configure_optimizers runs, in configure_model or __init__",
    ),
    _identity(
        id="lost_gradients",
        wrong="gradients are gone before the optimizer steps",
        group="gradient",
        level=FAIL,
        question="Are the gradients of the backward passes there when the optimizer steps?",
        means="Something removes the gradients in between, and the optimizer does nothing at all.",
        remedy="call optimizer.zero_grad() after optimizer.step(), or before the backward pass",
    ),
    _identity(
        id="kept_gradients",
        wrong="gradients are not zeroed between steps",
        group="gradient",
        level=FAIL,
        question="Do the gradients of a step hold nothing of the step before?",
        means="Each step is along the sum of all gradients so far, as with a momentum that never fades.",
        remedy="call zero_grad() of every optimizer once for each of its steps, before the first backward pass",
        transformers="leave zero_grad() to the Trainer: look at what overrides training_step or wraps the model",
        lightning="with manual optimization call zero_grad() of every optimizer once for each of its steps",
    ),
    _identity(
        id="accumulation_windows",
        wrong="an accumulation window is cut short or mixed with another",
        group="gradient",
        level=SUSPICION,
        question="Does each backward pass count in one step, and each step in one accumulation window?",
        means="Where the data ends within a window, its gradients are dropped, or added to a window that is scaled as "
        "if it were whole.",
        remedy="also step after the last batch of an epoch, with its losses divided by the number of batches in its "
        "window; or let drop_last and the window fit the data",
    ),
    _identity(
        id="accumulated_mean",
        wrong="accumulated losses are not divided by their number once",
        group="gradient",
        level=SUSPICION,
        question="Where a step sums the gradients of several batches, is each loss divided by their number once?",
        means="The gradients are as many times too large or too small; clipping and SGD see that, Adam's eps too.",
        remedy="divide each loss by the number of backward passes that a step sums, in one place",
        transformers="compute_loss gives the sum over num_items_in_batch; a mean is divided by the Trainer only where "
        "the model takes no num_items_in_batch",
        lightning="Lightning divides by accumulate_grad_batches; training_step gives the mean of its batch",
    ),
    _identity(
        id="token_weights",
        wrong="labels of one step weigh differently",
        group="gradient",
        level=SUSPICION,
        question="Where a step sums gradients of several batches, or averages those of ranks, does a label of each "
        "weigh the same?",
        means="Each loss is the mean over its own labels: where their counts differ, tokens of a batch with few labels "
        "count more, and the objective depends on how batches are cut.",
        remedy="count the labels of all batches of a step first, after the shift and without ignored ones, and divide "
        "each batch's summed loss by that number; with DDP, by the mean of the ranks' numbers",
        transformers="let the model return its loss, or let compute_loss divide the sum by num_items_in_batch",
        lightning="use manual optimization, and divide summed losses by the number of labels of the whole step",
    ),
    _identity(
        id="clipping",
        wrong="gradient clipping has no effect, or clips nearly everything",
        group="gradient",
        level=SUSPICION,
        question="Are gradients clipped before the step, once they are unscaled?",
        means="Clipping has no effect, or clips nearly every step to almost nothing.",
        remedy="loss.backward(), scaler.unscale_(optimizer) where there is a scaler, clip_grad_norm_, optimizer.step()",
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
        transformers="set fp16=True, which scales, with weights in fp32; or bf16=True",
        lightning='set precision="16-mixed", not "16-true"',
    ),
    _identity(
        id="schedule",
        wrong="the learning rate schedule does not go with the steps",
        group="update",
        level=SUSPICION,
        question="Is the schedule called once for each step of its optimizer, and does the rate stay above 0?",
        means="The rate falls too early, comes to 0 or rises again, or stays as it was.",
        remedy="call schedule.step() where optimizer.step() is called, count its length in those calls, and make it of "
        "the optimizer that steps",
        transformers="leave the schedule to the Trainer, or give optimizers=(optimizer, its schedule)",
        lightning='return {"scheduler": ..., "interval": "step"} where its length is in steps',
    ),
    _identity(
        id="label_shift",
        wrong="labels are not the tokens that follow",
        group="loss",
        level=SUSPICION,
        question="Are the labels of a language model the tokens that follow the ones it reads?",
        means="The model learns to repeat what it reads, or to skip a token: the loss falls, and the text is bad.",
        remedy="shift once: logits[:, :-1] against tokens[:, 1:], or inputs and labels cut from one row a token apart",
        transformers="give labels = input_ids and let the model shift them; a collator that shifts too shifts twice",
    ),
    _identity(
        id="causality",
        wrong="the model sees the tokens that it is to predict",
        group="loss",
        level=SUSPICION,
        question="Does no position of a model that is trained on next tokens see the tokens after it?",
        means="The model reads the answer: the loss falls far below what it can reach when it writes by itself.",
        remedy="give attention its causal mask, or is_causal=True; look at means, norms and convolutions over "
        "positions",
        transformers="set config.is_decoder=True, look at the attention mask; or the model is an encoder",
    ),
    _identity(
        id="padding_seen",
        wrong="padding changes what the model computes elsewhere",
        group="loss",
        level=SUSPICION,
        question="Do the tokens of padding leave all other outputs as they are?",
        means="A row's outputs depend on how long the other rows of its batch are.",
        remedy="pass the mask on to attention, and leave padding out of means and norms over positions",
        transformers="the model's forward pass must use attention_mask",
    ),
    _identity(
        id="documents_mixed",
        wrong="documents of a packed row see each other",
        group="loss",
        level=SUSPICION,
        question="Do the documents of a packed row leave each other's outputs as they are?",
        means="A document is predicted from the ones before it, which it never has when the model is used.",
        remedy="give attention a mask by documents, or cu_seqlens to a kernel that reads them; unless you intended "
        "this",
        transformers="packing needs attn_implementation='flash_attention_2' or a 4-dimensional mask",
    ),
    _identity(
        id="rows_mixed",
        wrong="rows of a batch mix in the model",
        group="loss",
        level=SUSPICION,
        question="If the second row of the input changes, do the outputs of the first stay the same? If two rows of "
        "the input are swapped, are their outputs swapped?",
        means="A row's output is computed from other rows, and a label meets the output of another row.",
        remedy="look for a view or reshape where a transpose is meant, and for a softmax or norm over the rows; unless "
        "you intended this",
    ),
    _identity(
        id="eval_is_random",
        wrong="dropout acts in eval mode",
        group="loss",
        level=SUSPICION,
        question="Does the model in eval mode give the same outputs for the same input?",
        means="Evaluations and samples are computed with dropout, and differ from call to call.",
        remedy="pass training=self.training to F.dropout, and dropout_p=0.0 to attention in eval mode; unless you "
        "intended this",
    ),
    _identity(
        id="questions",
        wrong="the extra forward passes of --ask were not possible",
        group="loss",
        level=FACT,
        question="Could the model be called again, with changed inputs?",
        means="Whether rows, padding, documents or later tokens affect outputs that they must not affect is unknown.",
        remedy="nothing",
    ),
    _identity(
        id="label_coverage",
        wrong="few positions have a label",
        group="loss",
        level=SUSPICION,
        question="How many positions have a label?",
        means="A loss without a label is NaN or 0, and the step moves by decay and momentum alone.",
        remedy="look at what masks the labels; a row that is cut off may lose all that is to be learnt",
        transformers="look at max_length and at assistant_only_loss or completion_only_loss",
    ),
    _identity(
        id="padding_labels",
        wrong="padding is trained on",
        group="loss",
        level=SUSPICION,
        question="Has padding no label?",
        means="Most of the loss may be of padding, which is learnt at once, and the loss looks better than it is.",
        remedy="set the labels of padding to -100, or mask the loss",
        transformers="let the collator pad labels with -100, as DataCollatorForLanguageModeling does",
    ),
    _identity(
        id="end_of_text",
        wrong="no end of a text is trained on",
        group="loss",
        level=SUSPICION,
        question="Is the token that ends a text a label?",
        means="The model is never taught to stop, and writes on when it is done.",
        remedy="give pad another token than the end of text, or mask by the attention mask and not by the token",
        transformers="set tokenizer.pad_token to another token than eos_token: the collator masks every pad_token",
    ),
    _identity(
        id="rows_left_out",
        wrong="rows of the batch do not reach the loss",
        group="loss",
        level=SUSPICION,
        question="Do all rows of a batch reach the loss?",
        means="Rows that are read from the data are not trained on, and the log counts them.",
        remedy="look for an index where a slice is meant, as in logits[0] or batch[:1]",
    ),
    _identity(
        id="double_softmax",
        wrong="softmax is taken twice",
        group="loss",
        level=SUSPICION,
        question="Is the softmax taken once?",
        means="The cross entropy of a softmax of probabilities is nearly flat: it cannot fall far.",
        remedy="give cross_entropy the logits, or nll_loss their log_softmax",
    ),
    _identity(
        id="distillation",
        wrong="a divergence from a teacher is trained",
        group="loss",
        level=FACT,
        question="Which divergence from a teacher is trained, at which temperature, and how far apart are the two?",
        means="This is the objective of the distillation; at the start of a run the divergence is usually some nats.",
        remedy="compare it with the recipe",
    ),
    _identity(
        id="teacher_is_student",
        wrong="teacher and student are the same model",
        group="loss",
        level=SUSPICION,
        question="Are teacher and student different models?",
        means="The divergence is 0 from the start and stays there: there is nothing to learn from the teacher.",
        remedy="look at what the teacher is loaded from, and that it is no reference or copy of the student",
    ),
    _identity(
        id="teacher_mode",
        wrong="the teacher is not in eval mode",
        group="loss",
        level=SUSPICION,
        question="Is the teacher in eval mode?",
        means="Its output for the same tokens differs at each step, and the student learns the noise.",
        remedy="call teacher.eval() after it is loaded, and after anything that calls train() on what holds it",
        transformers="load it apart from the model that the Trainer gets, and call eval() on it",
        lightning="call eval() on it where it is made: Lightning keeps the modes that modules have (before 2.2 it "
        "calls train() on all that the LightningModule holds, and the teacher has to be in a list)",
    ),
    _identity(
        id="teacher_alignment",
        wrong="the teacher's logits do not meet the student's",
        group="loss",
        level=SUSPICION,
        question="Does a divergence compare the same positions and ids of teacher and student?",
        means="The student learns to predict another position, or another token, than it is used for.",
        remedy="slice both in the same way: [:, :-1] of both, and the first ids of the larger vocabulary",
    ),
    _identity(
        id="divergence_arguments",
        wrong="a divergence confuses probabilities with their logarithms",
        group="loss",
        level=SUSPICION,
        question="Does a divergence get probabilities and their logarithms where it expects them?",
        means="What is computed is no divergence: it may be below zero, and it has another minimum.",
        remedy="F.kl_div(student_log_probabilities, teacher_probabilities), or log_target=True with logarithms of both",
    ),
    _identity(
        id="divergence_axis",
        wrong="a divergence has a softmax over positions",
        group="loss",
        level=SUSPICION,
        question="Is the softmax of a divergence over the classes?",
        means="Each class is shared out over the positions of a row: no position has a distribution, and the student "
        "learns none.",
        remedy="take log_softmax and softmax with dim=-1",
    ),
    _identity(
        id="divergence_temperature",
        wrong="teacher and student have different temperatures in a divergence",
        group="loss",
        level=SUSPICION,
        question="Have teacher and student the same temperature in a divergence?",
        means="A student with the teacher's logits would not have divergence 0: it learns a flatter or sharper model.",
        remedy="divide both logits by the same temperature, unless you intended this",
    ),
    _identity(
        id="temperature_squared",
        wrong="the divergence is not multiplied by the square of its temperature",
        group="loss",
        level=SUSPICION,
        question="Is a divergence at a temperature multiplied by its square?",
        means="Its gradient is T^2 times too small relative to the cross entropy, so the teacher hardly counts.",
        remedy="multiply the divergence by T * T",
    ),
    _identity(
        id="divergence_mean",
        wrong="the divergence is no mean over positions",
        group="loss",
        level=SUSPICION,
        question="Is the divergence summed over the vocabulary, and a mean over positions?",
        means="It is as many times too small as there are tokens in the vocabulary, or too large as there are "
        "positions in a row.",
        remedy='give kl_div reduction="batchmean" and logits of shape (positions, vocabulary), or sum over the last '
        "axis and take the mean",
    ),
    _identity(
        id="broadcast_loss",
        wrong="predictions and targets of the loss have different shapes",
        group="loss",
        level=SUSPICION,
        question="Have predictions and targets of a loss the same shape?",
        means="Shapes (N, 1) and (N,) make a table of all pairs: each prediction is drawn to the mean of all targets.",
        remedy="squeeze the last axis of the predictions, or unsqueeze the targets: both (N,) or both (N, 1)",
    ),
    _identity(
        id="bounded_logits",
        wrong="an activation is applied to the logits",
        group="loss",
        level=SUSPICION,
        question="Are the logits of a cross entropy as a layer gives them, without an activation?",
        means="Probabilities cannot come near 0 and 1: the loss cannot fall far.",
        remedy="give the loss the output of the last layer: no ReLU, sigmoid or tanh after it",
    ),
    _identity(
        id="untrained_term",
        wrong="a term of the loss has no gradient",
        group="loss",
        level=SUSPICION,
        question="Has each term of a sum of losses a gradient?",
        means="It is in the loss that is shown, and trains nothing: it was detached, or computed without gradients.",
        remedy="compute the term from what the model gives, without detach(), .data, .item() and torch.no_grad()",
    ),
    _identity(
        id="one_class",
        wrong="every label of a batch is the same class",
        group="data",
        level=SUSPICION,
        question="Are the labels of a batch of several classes?",
        means="The data is sorted by class: the model learns to answer the class that it saw last.",
        remedy="shuffle: DataLoader(..., shuffle=True), or shuffle a stream before batching",
    ),
    _identity(
        id="training_mode",
        wrong="the model is trained in eval mode",
        group="data",
        level=SUSPICION,
        question="Are dropout and batch norm of the model that is trained in training mode?",
        means="Nothing drops out and no statistics are taken: an evaluation left the model in eval mode, or it was "
        "loaded so.",
        remedy="call model.train() before each epoch, and after each evaluation",
        transformers="the Trainer calls model.train() in each training_step: look at what overrides it, and at "
        "callbacks",
        lightning="Lightning keeps the modes that modules have: call .train() on what was loaded, as from_pretrained "
        "gives it in eval mode",
    ),
    _identity(
        id="evaluation_mode",
        wrong="the model is evaluated in training mode",
        group="data",
        level=SUSPICION,
        question="Are dropout and batch norm in eval mode while an evaluation runs?",
        means="Each evaluation is of a model with parts dropped out, and the statistics of batch norm move by held-out "
        "data. A model without dropout and batch norm is the same in both modes.",
        remedy="call model.eval() before the evaluation, and model.train() after it",
        lightning="call .eval() before your own loops; Trainer.validate() does it by itself",
    ),
    _identity(
        id="held_out",
        wrong="the evaluation reads samples that are trained on",
        group="data",
        level=SUSPICION,
        question="Are the samples that evaluations read others than those that are trained on?",
        means="The evaluation measures how well the model memorises the training set, and shows no overfitting.",
        remedy="split once, before anything is repeated, copied or augmented, and give each loader its own part",
        transformers="give eval_dataset another part than train_dataset: dataset.train_test_split(seed=...)",
        lightning="return the loader of the validation part from val_dataloader",
    ),
    _identity(
        id="data_order",
        wrong="the data is not shuffled",
        group="data",
        level=SUSPICION,
        question="Is shuffled data in a different order in each epoch?",
        means="Each epoch has the same batches: the generator is seeded again, or a sampler's set_epoch is not called.",
        remedy="seed once, before the first epoch; call set_epoch(epoch) of a DistributedSampler before each epoch",
    ),
    _identity(
        id="seeded_again",
        wrong="the random state is set back to the same seed",
        group="data",
        level=SUSPICION,
        question="Does the script draw random numbers that it has not drawn before?",
        means="What is drawn after the seed repeats: the order of the data, dropout, augmentation.",
        remedy="seed once, before the first step; where an evaluation needs a seed, call it in torch.random.fork_rng()",
    ),
    _identity(
        id="cut_passes",
        wrong="epochs end before their data does",
        group="data",
        level=SUSPICION,
        question="Do passes over a data loader come to their end?",
        means="A new iterator yields the first batch again; without shuffling it is the same one, and the rest of the "
        "data is never read.",
        remedy="make the iterator once for each epoch, for batch in loader, instead of next(iter(loader))",
        lightning="look at limit_train_batches and overfit_batches",
    ),
    _identity(
        id="repeated_samples",
        wrong="samples are repeated within an epoch",
        group="data",
        level=SUSPICION,
        question="Is each sample handed out once in a pass?",
        means="Some are trained on twice and others not at all, unless that is what the sampler is for.",
        remedy="look at what the sampler, or the batch sampler, yields; draw from randperm, not from randint",
    ),
    _identity(
        id="repeated_batches",
        wrong="the same batch comes again and again",
        group="data",
        level=SUSPICION,
        question="Do batches that follow each other differ?",
        means="The same data is trained on several times in a row.",
        remedy="with an IterableDataset and several workers, give each worker its part by get_worker_info(); otherwise "
        "check what __getitem__ does with its index",
    ),
    _identity(
        id="no_gradient",
        wrong="parameters of the optimizer get no gradient",
        group="update",
        level=SUSPICION,
        question="Has each parameter of the optimizer had a gradient by its third step?",
        means="A part of the model is not used, or is cut off by detach() or no_grad(); an expert that no token chose "
        "yet looks the same.",
        remedy="look for detach(), .data, torch.no_grad() and layers that forward() does not call; with gradient "
        "checkpointing set use_reentrant=False",
        transformers='with gradient_checkpointing set gradient_checkpointing_kwargs={"use_reentrant": False}, or call '
        "model.enable_input_require_grads(), as a frozen embedding gives inputs without gradients; else look for "
        "detach(), torch.no_grad() and layers that forward() does not call",
    ),
    _identity(
        id="unowned_parameters",
        wrong="parameters with gradients are in no optimizer",
        group="update",
        level=SUSPICION,
        question="Is each parameter that gets a gradient held by an optimizer?",
        means="It stays as it was made, though its gradient is computed: it was forgotten, or it is to stay as it is.",
        remedy="give the optimizer all of them; if they are to stay, set requires_grad_(False), which also saves the "
        "time and memory of their gradients",
    ),
    _identity(
        id="rank_drift",
        wrong="ranks train different weights",
        group="ranks",
        level=FAIL,
        question="Do all ranks begin a step with the same weights?",
        means="Each rank trains a model of its own, and what is saved is that of one rank, trained on its part of the "
        "data alone.",
        remedy="call the wrapped model, model(x), never model.module(x); wrap it after its last change (layers, "
        "requires_grad, loaded weights), and write weights on all ranks alike. Without a wrapper average the gradients "
        "of all parameters before each step. Local SGD, DiLoCo and ensembles are meant to differ",
        transformers="look at what overrides training_step or compute_loss and calls model.module, and at callbacks "
        "that write weights on one rank",
        lightning="call self(x) or self.model(x) in training_step, and write no weights under rank_zero_only",
    ),
    _identity(
        id="rank_data",
        wrong="ranks read the same data",
        group="ranks",
        level=SUSPICION,
        question="Do ranks that train one model read different data?",
        means="They compute the same gradients: as many GPUs as there are do the work of one. It is meant where each "
        "takes its part of a batch later, as with context parallelism.",
        remedy="give the DataLoader a DistributedSampler; with an IterableDataset, let each rank read its part",
        transformers="leave get_train_dataloader to the Trainer; split a stream with split_dataset_by_node",
        lightning="leave use_distributed_sampler on; split a stream by the rank",
    ),
)
"""Identities that hold in every healthy training of a watched script."""

BY_ID: dict[str, dict[str, About]] = {
    CHECK: {one.id: one for one in CHECKS},
    ALERT: {one.id: one for one in ALERTS},
    IDENTITY: {one.id: one for one in IDENTITIES},
}
"""The rows by what judges and by their ids."""


RETIRED = {
    "causal_mask": "no_token_leaks",
    "documents_isolated": "no_token_leaks",
    "forward_is_the_model": "no_token_leaks",
    "positions_matter": "step_student",
    "shift_proof": "step_labels",
    "student_shift": "step_labels",
    "labels_are_next_tokens": "step_labels",
    "nan_not_masked": "",
    "effective_settings": "step_weights",
    "ignored_rows_have_no_part": "step_gradients",
    "loss_invariants": "step_loss_parts",
    "loss_gradient": "step_gradients",
    "gradient_above_rounding": "step_gradients",
    "rows_in_update": "step_gradients",
    "tensors_moved": "step_weights",
    "effective_learning_rate": "step_weights",
    "step_work": "",
    "reported_loss": "",
    "receipt_agrees": "",
}
"""Checks that runs of earlier versions have results of, each with the check that asks its question now, if any."""


def skipped_ids(text: str) -> frozenset[str]:
    """Return the ids in a `checks.skip` setting. Raises SpecError for one that names no check, and for one whose
    question another check asks; one whose question is asked no more is skipped already."""
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
