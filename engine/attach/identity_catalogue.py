"""What has to hold in every healthy training, and what it means where it does not: the identities that the probe of
`engine watch` looks at on a few steps (`apr_watch/identities.py`), and the lines in which every surface shows what was
seen of them. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.log.events import FACT, FAIL, IDENTITY, LEVELS, PASS, SUSPICION, UNKNOWN, Judged
from engine.log.text import LEVEL_WORDS, UNSEEN_COMMAND, one_line
from engine.log.view import RunView

PLAIN = ""
TRANSFORMERS = "transformers"
LIGHTNING = "lightning"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One outcome that is looked for."""

    id: str
    identity: str
    """`update`, `gradient`, `loss`, `data` or `ranks`."""
    level: str
    """The worst that it can be."""
    question: str
    means: str
    plain: str
    """What to do in a loop of one's own."""
    transformers: str = ""
    lightning: str = ""
    """The same where it differs with the Trainer of transformers or of Lightning."""

    def remedy(self, framework: str) -> str:
        found = {TRANSFORMERS: self.transformers, LIGHTNING: self.lightning}.get(framework)
        return found or self.plain


IDENTITIES: tuple[Row, ...] = (
    Row(
        id="update",
        identity="update",
        level=FAIL,
        question="Are the new weights what AdamW, Adam or SGD by the textbook makes of the old, from gradient, state, "
        "rate and decay?",
        means="Something else moves the weights too, or the optimizer does not do what its settings say.",
        plain="compare the step with foreach=False and fused=False; look for code that writes weights, states or "
        "gradients while optimizer.step() runs",
        transformers='set optim="adamw_torch" and look at callbacks that write weights or gradients',
    ),
    Row(
        id="outside_writes",
        identity="update",
        level=SUSPICION,
        question="Are the weights in front of a step those that the step before left?",
        means="Something else trains too: a decay by hand, a restored copy, a clamp, an average; or it is meant.",
        plain="look for code that writes p.data or uses no_grad() between steps, and hooks on the optimizer",
        transformers="look at callbacks that write weights in on_step_end or on_step_begin",
        lightning="look at callbacks and at on_before_zero_grad, on_train_batch_end",
    ),
    Row(
        id="vanishing_updates",
        identity="update",
        level=FAIL,
        question="Do 16-bit weights that have a gradient move, or is the update less than their type holds?",
        means="The loss may fall by the few weights that move; the others stay as they were for the whole run.",
        plain="keep the weights in fp32 and run the forward pass under torch.autocast, or raise the rate",
        transformers="load the model with dtype=torch.float32 and set bf16=True",
        lightning='load the model in fp32 and set precision="bf16-mixed", not "bf16-true"',
    ),
    Row(
        id="stale_parameters",
        identity="update",
        level=FAIL,
        question="Are the parameters that the optimizer holds those of the model that trains?",
        means="The optimizer steps parameters of another model, or of layers that were replaced, and the new ones stay "
        "as they were made.",
        plain="make the optimizer last: after replaced layers, copies, .to(), sharding and wrapping",
        transformers="give the Trainer the model in its last form, without an optimizer made before",
        lightning="replace layers before configure_optimizers runs, in configure_model or __init__",
    ),
    Row(
        id="lost_gradients",
        identity="gradient",
        level=FAIL,
        question="Are the gradients of the backward passes there when the optimizer steps?",
        means="Something removes the gradients in between, and the optimizer does nothing at all.",
        plain="call optimizer.zero_grad() after optimizer.step(), or in front of the backward pass",
    ),
    Row(
        id="kept_gradients",
        identity="gradient",
        level=FAIL,
        question="Do the gradients of a step hold nothing of the step before?",
        means="Each step is along the sum of all gradients so far, as with a momentum that never fades.",
        plain="call zero_grad() of every optimizer once for each of its steps, in front of the first backward pass",
        transformers="leave zero_grad() to the Trainer: look at what overrides training_step or wraps the model",
        lightning="with manual optimization call zero_grad() of every optimizer once for each of its steps",
    ),
    Row(
        id="accumulation_windows",
        identity="gradient",
        level=SUSPICION,
        question="Does each backward pass count in one step, and each step in one accumulation window?",
        means="Where the data ends within a window, its gradients are dropped, or added to a window that is scaled as "
        "if it were whole.",
        plain="step behind the last batch of a pass over the data too, with its loss divided by as many batches as "
        "there are; or let drop_last and the window fit the data",
    ),
    Row(
        id="accumulated_mean",
        identity="gradient",
        level=SUSPICION,
        question="Where a step sums the gradients of several batches, is each loss divided by their number once?",
        means="The gradients are as many times too large or too small; clipping and SGD see that, Adam's eps too.",
        plain="divide each loss by the number of backward passes that a step sums, in one place",
        transformers="compute_loss gives the sum over num_items_in_batch; a mean is divided by the Trainer only where "
        "the model takes no num_items_in_batch",
        lightning="Lightning divides by accumulate_grad_batches; training_step gives the mean of its batch",
    ),
    Row(
        id="clipping",
        identity="gradient",
        level=SUSPICION,
        question="Are gradients clipped in front of the step, once they are unscaled?",
        means="Clipping has no effect, or clips nearly every step to almost nothing.",
        plain="loss.backward(), scaler.unscale_(optimizer) where there is a scaler, clip_grad_norm_, optimizer.step()",
        transformers="set max_grad_norm and leave clipping to the Trainer",
        lightning="set gradient_clip_val, or clip in configure_gradient_clipping",
    ),
    Row(
        id="loss_scale",
        identity="gradient",
        level=SUSPICION,
        question="Is the loss scaled where its backward pass is in fp16?",
        means="Gradients below 6e-8 are 0 in fp16: the layers far from the loss learn less, or nothing.",
        plain="use torch.amp.GradScaler, or bf16 instead of fp16",
        transformers="set fp16=True, which scales, with weights in fp32; or bf16=True",
        lightning='set precision="16-mixed", not "16-true"',
    ),
    Row(
        id="schedule",
        identity="update",
        level=SUSPICION,
        question="Is the schedule called once for each step of its optimizer, and does the rate stay above 0?",
        means="The rate falls too early, comes to 0 or rises again, or stays as it was.",
        plain="call schedule.step() where optimizer.step() is called, count its length in those calls, and make it of "
        "the optimizer that steps",
        transformers="leave the schedule to the Trainer, or give optimizers=(optimizer, its schedule)",
        lightning='return {"scheduler": ..., "interval": "step"} where its length is in steps',
    ),
    Row(
        id="label_shift",
        identity="loss",
        level=SUSPICION,
        question="Are the labels of a language model the tokens that follow the ones it reads?",
        means="The model learns to repeat what it reads, or to skip a token: the loss falls, and the text is bad.",
        plain="shift once: logits[:, :-1] against tokens[:, 1:], or inputs and labels cut from one row a token apart",
        transformers="give labels = input_ids and let the model shift them; a collator that shifts too shifts twice",
    ),
    Row(
        id="causality",
        identity="loss",
        level=SUSPICION,
        question="With --ask causality: does no place of a language model see the tokens behind it?",
        means="The model reads the answer: the loss falls far below what it can reach when it writes by itself.",
        plain="give attention its causal mask, or is_causal=True; look at means, norms and convolutions over places",
        transformers="set config.is_decoder=True, look at the attention mask; or the model is an encoder",
    ),
    Row(
        id="label_coverage",
        identity="loss",
        level=SUSPICION,
        question="How many places have a label?",
        means="A loss without a label is NaN or 0, and the step moves by decay and momentum alone.",
        plain="look at what masks the labels; a row that is cut off may lose all that is to be learnt",
        transformers="look at max_length and at assistant_only_loss or completion_only_loss",
    ),
    Row(
        id="padding_labels",
        identity="loss",
        level=SUSPICION,
        question="Has padding no label?",
        means="Most of the loss may be of padding, which is learnt at once, and the loss looks better than it is.",
        plain="set the labels of padding to -100, or mask the loss",
        transformers="let the collator pad labels with -100, as DataCollatorForLanguageModeling does",
    ),
    Row(
        id="end_of_text",
        identity="loss",
        level=SUSPICION,
        question="Is the token that ends a text a label?",
        means="The model is never taught to stop, and writes on when it is done.",
        plain="give pad another token than the end of text, or mask by the attention mask and not by the token",
        transformers="set tokenizer.pad_token to another token than eos_token: the collator masks every pad_token",
    ),
    Row(
        id="rows_left_out",
        identity="loss",
        level=SUSPICION,
        question="Do all rows of a batch reach the loss?",
        means="Rows that are read from the data are not trained on, and the log counts them.",
        plain="look for an index where a slice is meant, as in logits[0] or batch[:1]",
    ),
    Row(
        id="double_softmax",
        identity="loss",
        level=SUSPICION,
        question="Is the softmax taken once?",
        means="The cross entropy of a softmax of probabilities is nearly flat: it cannot fall far.",
        plain="give cross_entropy the logits, or nll_loss their log_softmax",
    ),
    Row(
        id="distillation",
        identity="loss",
        level=FACT,
        question="Which divergence from a teacher is trained, at which temperature, and how far apart are the two?",
        means="What is distilled; at the start of a run some nats.",
        plain="compare it with the recipe",
    ),
    Row(
        id="teacher_is_student",
        identity="loss",
        level=SUSPICION,
        question="Are teacher and student different models?",
        means="The divergence is 0 from the start and stays there: there is nothing to learn from the teacher.",
        plain="look at what the teacher is loaded from, and that it is no reference or copy of the student",
    ),
    Row(
        id="teacher_mode",
        identity="loss",
        level=SUSPICION,
        question="Is the teacher in eval mode?",
        means="Its answers to the same tokens are drawn anew at each step, and the student learns their noise.",
        plain="call teacher.eval() after it is loaded, and after anything that calls train() on what holds it",
        transformers="load it apart from the model that the Trainer gets, and call eval() on it",
        lightning="call eval() on it where it is made: Lightning keeps the modes that modules have (before 2.2 it "
        "calls train() on all that the LightningModule holds, and the teacher has to be in a list)",
    ),
    Row(
        id="temperature_squared",
        identity="loss",
        level=SUSPICION,
        question="Is a divergence at a temperature multiplied by its square?",
        means="Its gradient is T^2 times smaller than that of the cross entropy beside it, so that the teacher hardly "
        "counts.",
        plain="multiply the divergence by T * T",
    ),
    Row(
        id="divergence_mean",
        identity="loss",
        level=SUSPICION,
        question="Is the divergence summed over the vocabulary before a mean is taken?",
        means="It is as many times too small as there are tokens.",
        plain='give kl_div reduction="batchmean" and logits of shape (places, vocabulary), or sum over the last axis',
    ),
    Row(
        id="broadcast_loss",
        identity="loss",
        level=SUSPICION,
        question="Have predictions and targets of a loss the same shape?",
        means="Shapes (N, 1) and (N,) make a table of all pairs: each prediction is drawn to the mean of all targets.",
        plain="squeeze the last axis of the predictions, or unsqueeze the targets: both (N,) or both (N, 1)",
    ),
    Row(
        id="bounded_logits",
        identity="loss",
        level=SUSPICION,
        question="Are the logits of a cross entropy as a layer gives them, without an activation?",
        means="Probabilities cannot come near 0 and 1: the loss cannot fall far.",
        plain="give the loss what the last layer gives: no ReLU, sigmoid or tanh behind it",
    ),
    Row(
        id="one_class",
        identity="data",
        level=SUSPICION,
        question="Are the labels of a batch of several classes?",
        means="The data is sorted by class: the model learns to answer the class that it saw last.",
        plain="shuffle: DataLoader(..., shuffle=True), or shuffle a stream in front of the batches",
    ),
    Row(
        id="training_mode",
        identity="data",
        level=SUSPICION,
        question="Are dropout and batch norm of the model that is trained in training mode?",
        means="Nothing drops out and no statistics are taken: an evaluation left the model in eval mode, or it was "
        "loaded so.",
        plain="call model.train() in front of each epoch, and behind each evaluation",
        transformers="the Trainer calls model.train() in each training_step: look at what overrides it, and at "
        "callbacks",
        lightning="Lightning keeps the modes that modules have: call .train() on what was loaded, as from_pretrained "
        "gives it in eval mode",
    ),
    Row(
        id="evaluation_mode",
        identity="data",
        level=SUSPICION,
        question="Are they in eval mode while an evaluation runs?",
        means="Each evaluation is of a model with parts dropped out, and the statistics of batch norm move by held-out "
        "data. A model without dropout and batch norm is the same in both modes.",
        plain="call model.eval() in front of the evaluation, and model.train() behind it",
        lightning="with loops of your own call .eval() in front of them; Trainer.validate() does it by itself",
    ),
    Row(
        id="held_out",
        identity="data",
        level=SUSPICION,
        question="Are the samples that evaluations read others than those that are trained on?",
        means="The evaluation tells how well the training data is learnt by heart, and no overfitting shows in it.",
        plain="split once, before anything is repeated, copied or augmented, and give each loader its own part",
        transformers="give eval_dataset another part than train_dataset: dataset.train_test_split(seed=...)",
        lightning="return the loader of the validation part from val_dataloader",
    ),
    Row(
        id="data_order",
        identity="data",
        level=SUSPICION,
        question="Is the order of the data another one in each pass, where it is to be shuffled?",
        means="Each epoch has the same batches: the generator is seeded anew, or a sampler is not told its epoch.",
        plain="seed once, in front of the first epoch; of a DistributedSampler call set_epoch(epoch) in front of each",
    ),
    Row(
        id="cut_passes",
        identity="data",
        level=SUSPICION,
        question="Do passes over a data loader come to their end?",
        means="An iterator that is made anew gives the first batch again; without shuffling it is the same one, and "
        "the rest of the data is never read.",
        plain="make the iterator once for each epoch, for batch in loader, instead of next(iter(loader))",
        lightning="look at limit_train_batches and overfit_batches",
    ),
    Row(
        id="repeated_samples",
        identity="data",
        level=SUSPICION,
        question="Is each sample handed out once in a pass?",
        means="Some are trained on twice and others not at all, unless that is what the sampler is for.",
        plain="look at what the sampler, or the batch sampler, yields; draw from randperm, not from randint",
    ),
    Row(
        id="repeated_batches",
        identity="data",
        level=SUSPICION,
        question="Do batches that follow each other differ?",
        means="The same data is trained on several times in a row.",
        plain="of an IterableDataset with several workers give each its part by get_worker_info(); else look at what "
        "__getitem__ does with its index",
    ),
    Row(
        id="no_gradient",
        identity="update",
        level=SUSPICION,
        question="Has each parameter of the optimizer had a gradient by its third step?",
        means="A part of the model is not used, or is cut off by detach() or no_grad(); an expert that no token chose "
        "yet looks the same.",
        plain="look for detach(), .data, torch.no_grad() and layers that forward() does not call",
    ),
    Row(
        id="unowned_parameters",
        identity="update",
        level=SUSPICION,
        question="Is each parameter that gets a gradient held by an optimizer?",
        means="It stays as it was made, though its gradient is computed: it was forgotten, or it is to stay as it is.",
        plain="give the optimizer all of them; if they are to stay, set requires_grad_(False), which also saves the "
        "time and memory of their gradients",
    ),
    Row(
        id="rank_drift",
        identity="ranks",
        level=FAIL,
        question="Do all ranks begin a step with the same weights?",
        means="Each rank trains a model of its own, and what is saved is that of one rank, trained on its part of the "
        "data alone.",
        plain="call the wrapped model, model(x), never model.module(x); wrap it after its last change (layers, "
        "requires_grad, loaded weights), and write weights on all ranks alike. Without a wrapper average the gradients "
        "of all parameters in front of each step. Local SGD, DiLoCo and ensembles are meant to differ",
        transformers="look at what overrides training_step or compute_loss and calls model.module, and at callbacks "
        "that write weights on one rank",
        lightning="call self(x) or self.model(x) in training_step, and write no weights under rank_zero_only",
    ),
    Row(
        id="rank_data",
        identity="ranks",
        level=SUSPICION,
        question="Do ranks that train one model read different data?",
        means="They compute the same gradients: as many GPUs as there are do the work of one. It is meant where each "
        "takes its part of a batch later, as with context parallelism.",
        plain="give the DataLoader a DistributedSampler; of an IterableDataset let each rank read its part",
        transformers="leave get_train_dataloader to the Trainer; split a stream with split_dataset_by_node",
        lightning="leave use_distributed_sampler on; split a stream by the rank",
    ),
)
BY_ID = {row.id: row for row in IDENTITIES}

SIGNS = {
    FAIL: "x CONTRADICTION",
    SUSPICION: "! suspicion",
    UNKNOWN: "? unknown",
    FACT: "- fact",
    PASS: "+ pass",
}
"""In the order in which they are shown."""


@dataclass(frozen=True)
class Outcome:
    """What was seen of an identity in one run."""

    id: str
    row: Row | None
    """None where another version wrote it."""
    seen: Judged | None
    """The worst of what was seen; None where nothing was."""

    @property
    def level(self) -> str:
        return self.seen.level if self.seen is not None and self.seen.level in SIGNS else UNKNOWN

    @property
    def text(self) -> str:
        if self.seen is not None:
            return one_line(f"{self.seen.text} (step {self.seen.step})")
        return f"not judged: {self.row.question if self.row is not None else ''}"

    @property
    def means(self) -> str:
        return self.row.means if self.row is not None else ""

    @property
    def remedy(self) -> str:
        framework = self.seen.framework if self.seen is not None else PLAIN
        return self.row.remedy(framework) if self.row is not None else ""


def outcomes(view: RunView) -> list[Outcome]:
    """What was seen of each identity: contradictions, suspicions, what is unknown, facts, what holds.

    The log has each outcome of an identity once, at the first step that had it, so the worst of them counts: a
    contradiction is not undone by a later step.
    """
    worst: dict[str, Judged] = {}
    for one in view.identities:
        if one.id not in worst or _badness(one) > _badness(worst[one.id]):
            worst[one.id] = one
    ids = [*BY_ID, *(id for id in worst if id not in BY_ID)]
    found = [Outcome(id, BY_ID.get(id), worst.get(id)) for id in ids]
    return sorted(found, key=lambda one: list(SIGNS).index(one.level))


def _badness(one: Judged) -> int:
    return LEVELS.index(one.level) if one.level in LEVELS else -1


def identity_lines(view: RunView) -> list[str]:
    """Render every identity with its level, and of those that may be wrong what that means and what to do."""
    if view.watched is None:
        return [UNSEEN_COMMAND]
    found = outcomes(view)
    lines = [
        ", ".join(
            f"{sum(one.level == level for one in found)} {LEVEL_WORDS.get((IDENTITY, level), level)}"
            for level in SIGNS
        )
    ]
    for one in found:
        lines.append(f"{SIGNS[one.level]} {one.id}: {one.text}")
        if one.level in (FAIL, SUSPICION) and one.row is not None:
            lines += [f"  means: {one.means}", f"  do: {one.remedy}"]
    return lines
