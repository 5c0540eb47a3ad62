"""The checks of what a run reports: its receipt, and its held-out losses. Of each of these, when it is known:

    rows     what was evaluated is the held-out text, token by token and label by label: `eval.rows` of its rows, evenly
             spread; every label is counted, of student, start and teacher alike
    model    the evaluated weights are those that it is said to be of
    again    evaluated at one step twice, as the last student and the saved one, a model has one loss

Of the saved student at the end, by the audit's references:

    loss     of the saved tensors, read by the library of their format, in a plain forward pass

All rows are computed where the budget has room for them, else some: of those the loss is asked of the run's own
evaluation once more.
"""

# Shapes: B rows, T tokens, N = B*T

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.audit import reference
from engine.audit.bounds import LOGITS, group_tokens
from engine.audit.files import Files, open_files
from engine.audit.judge import first_difference
from engine.audit.observed import CorpusRows
from engine.checks.check import Answer, Numbers, unknown
from engine.checks.context import Context
from engine.checks.weights import shape_of, weights_of
from engine.data.batches import IGNORED, Batch, Int64Array
from engine.log.events import Evaluated
from engine.models.config import ModelConfig, count_parameters
from engine.models.decoder import Decoder

FLOPS = {"cpu": 1e11, "cuda": 5e13}
"""Of the plain forward passes: some seconds on two cores, or on one GPU."""
SOME_FLOPS = {"cpu": 1e10, "cuda": 2e13}
"""Of those at the first evaluation of a model: less than a second."""
SOME_ALLOWED = 1e-3
"""Relative difference that is allowed of few labels in fp32; five roundings of 16 bits and less."""
FP32_SUMS = {"cpu": 1e-5, "cuda": 1e-4}
"""The same of a loss over all labels, and of a device: rounding a student to 16 bits moves it by as much as 1e-5."""
FP32 = 1e-4
"""Relative difference that is allowed of sums in fp32. In 16 bits it is one rounding of a number: a mean over many
tokens differs by far less (1e-6 to 1e-3, the more the sharper the model)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What a run reports of its saved student, and the held-out text."""

    folder: Path
    loss: float
    """Nats per token."""
    labelled: int
    evaluate: Callable[[Sequence[Batch]], float]
    """The run's evaluation of the saved student on some rows."""
    rows: Callable[[Batch], CorpusRows]
    """What the held-out text has in the place of the rows of a batch."""
    rounding: float
    """Largest relative error of one rounding in the evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """How a loss came about."""

    subject: str
    decoder: Decoder
    evaluate: Callable[[Sequence[Batch]], float]
    """Of some rows, as it was of all."""
    vocabulary: int
    """Ids that may be predicted."""
    rounding: float
    """Largest relative error of one rounding in it."""
    prompt: Sequence[int]
    sample: Sequence[int]
    """What the model is said to find most likely after the prompt, token by token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """What was evaluated so far."""

    made: Sequence[Evaluated]
    """By this session."""
    before: Sequence[Evaluated]
    """By earlier ones, up to the step that this one began after."""
    row_ids: Int64Array
    """The rows of the held-out text that are to be evaluated."""
    rows: Callable[[Batch], CorpusRows]
    """What the held-out text has in the place of the rows of a batch."""
    other: str
    """Which model was not the one that it was said to be; empty when all were."""
    computed: Computed | None
    """How the newest was computed; None where that is not looked at."""
    rounding: float
    """Largest relative error of one rounding, of the evaluation and of saved weights."""


def receipt_agrees(context: Context, wrong: Sequence[str]) -> Answer:
    """Judge the receipt by what it says and log, files or settings do not."""
    numbers = Numbers(wrong=len(wrong))
    if not wrong:
        return numbers.passed("the receipt says what log, files and settings say")
    more = f", and {len(wrong) - 1} more" if wrong[1:] else ""
    return numbers.failed(f"the receipt contradicts the run: {wrong[0]}{more}")


@torch.no_grad()
def reported_loss(context: Context, given: Reported | Evaluations) -> Answer:
    """Judge what is reported of the saved student, or the evaluations before."""
    if isinstance(given, Reported):
        return _of_files(context, given)
    numbers = Numbers(evaluations=len(given.made), rows=len(given.row_ids))
    ids = np.concatenate([batch.row_ids for batch in context.heldout])
    if wrong := _not_the_text(context, given.rows, [one.labelled for one in given.made]):
        return numbers.failed(wrong)
    if not np.array_equal(ids, given.row_ids):
        return numbers.failed(
            f"{len(ids):,} rows are evaluated, from {ids.min():,} to {ids.max():,}; by eval.rows it is "
            f"{len(given.row_ids):,}, from {given.row_ids.min():,} to {given.row_ids.max():,}, evenly spread"
        )
    if given.other:
        return numbers.failed(given.other)
    if given.computed is not None and (wrong := _otherwise(context, given.computed, given.rows)):
        return numbers.failed(wrong)
    known: dict[tuple[str, int], float] = {}
    allowed = max(FP32, 4 * given.rounding)
    # The teacher of another session may be held in another form.
    for one in (*(e for e in given.before if e.subject != "teacher"), *given.made):
        place = one.subject, one.step
        if one.loss is None:
            continue
        if abs(one.loss - (first := known.setdefault(place, one.loss))) > allowed * first:
            of = "" if one.subject == "teacher" else f" of step {one.step}"
            again = ", read back from its files," if one.saved else ""
            return numbers.failed(
                f"the {one.subject}{of}{again} has a held-out loss of {one.loss:.4f}, and had one of {first:.4f} "
                "before",
                allowed=allowed,
            )
    return numbers.passed(
        f"{len(given.made)} evaluations, each of all labels of {len(ids):,} held-out rows"
    )


def _otherwise(context: Context, computed: Computed, rows: Callable[[Batch], CorpusRows]) -> str:
    """Say that the loss of some rows is not that of a plain forward pass of the model; empty when it is."""
    config = computed.decoder.config
    if not config.native or computed.decoder.shards is not None:
        return ""
    chosen, _ = _chosen(context, config, SOME_FLOPS, by_documents=True)
    runs = reference.PlainDecoder(shape_of(config), weights_of(computed.decoder))
    expected, _ = _plain_loss(context, runs, map(rows, chosen), computed.vocabulary)
    loss, allowed = computed.evaluate(chosen), max(SOME_ALLOWED, 5 * computed.rounding)
    if not abs(loss - expected) <= allowed * expected:
        return (
            f"the {computed.subject} is evaluated on some rows as {loss:.4f}, a plain forward pass of its weights has "
            f"{expected:.4f}"
        )
    if not computed.sample:
        return ""
    text_BT = torch.tensor([[*computed.prompt, *computed.sample]], device=context.device)
    hidden_ND = runs.forward(text_BT, torch.zeros_like(text_BT)).hidden_ND
    logits_NV = hidden_ND[len(computed.prompt) - 1 : -1] @ _head(runs, computed.vocabulary).T
    behind_N = (
        logits_NV.amax(1) - logits_NV.gather(1, text_BT[0, len(computed.prompt) :, None])[:, 0]
    )
    places = (behind_N > 2 * allowed * logits_NV.abs().amax()).nonzero()
    if not len(places):
        return ""
    place = int(places[0])
    return (
        f"token {place + 1} of what the {computed.subject} is said to write after the prompt is "
        f"{computed.sample[place]}, a plain forward pass of its weights finds {int(logits_NV[place].argmax())} most "
        "likely there"
    )


def _not_the_text(
    context: Context, rows: Callable[[Batch], CorpusRows], means_over: Sequence[int | None]
) -> str:
    """Say what of the evaluated rows is not the held-out text, or which of some means is one over other labels than
    all of them; empty when nothing is."""
    there = len(context.heldout_stream) // context.heldout[0].tokens_BT.shape[1]
    ids = np.concatenate([batch.row_ids for batch in context.heldout])
    twice, beyond = len(ids) - len(np.unique(ids)), int((ids >= there).sum())
    if twice or beyond:
        return (
            f"of {len(ids):,} rows that are evaluated {twice:,} are there twice, and {beyond:,} are none of the "
            f"{there:,} of the held-out text"
        )
    labels = 0
    for number, batch in enumerate(context.heldout):
        wanted = rows(batch)
        labels_BT = wanted.labels_BT
        labels += int((labels_BT != IGNORED).sum())
        for what, found_BT, there_BT in (
            ("token", batch.tokens_BT, wanted.tokens_BT),
            ("label", batch.labels_BT, labels_BT),
        ):
            if first := first_difference(torch.from_numpy(found_BT), there_BT):
                return (
                    f"batch {number + 1}, row {first.row + 1}, token {first.token + 1}: {what} {first.found} is "
                    f"evaluated, the held-out text has {first.wanted}; {first.differing:,} differ"
                )
    if other := [one for one in means_over if one not in (None, labels)]:
        return f"the loss is a mean over {other[0]:,} labels, the held-out rows have {labels:,}"
    return ""


def _of_files(context: Context, reported: Reported) -> Answer:
    config = context.student.config
    numbers = Numbers(reported=reported.loss, labelled=reported.labelled)
    if wrong := _not_the_text(context, reported.rows, [reported.labelled]):
        return numbers.failed(wrong)
    files = open_files(reported.folder) if config.native else None
    if files is None:
        return unknown("no other forward pass is known for such a model", **numbers)
    chosen, whole = _chosen(context, config, FLOPS)
    runs = reference.PlainDecoder(shape_of(config), _held(files, context.device))
    expected, count = _plain_loss(context, runs, map(reported.rows, chosen), config.vocab_size)
    found = reported.loss if whole else reported.evaluate(chosen)
    allowed = max(FP32_SUMS[context.device.type], reported.rounding)
    numbers |= dict(reference=expected, compared=count, found=found, allowed=allowed)
    of = "all" if whole else f"{count:,} of {reported.labelled:,}"
    if not abs(found - expected) <= allowed * expected:
        which = "reported as" if whole else f"evaluated on {of} labels as"
        return numbers.failed(
            f"the held-out loss is {which} {found:.4f}, a plain forward pass of the saved files has {expected:.4f}"
        )
    return numbers.passed(
        f"over {of} labels {found:.4f} is within {abs(found - expected):.1g} of a plain forward pass of the saved files"
    )


def _held(files: Files, device: torch.device) -> reference.Weight:
    """Return the tensors, each read once: in fp32, as large as one of the optimizer's moments, which are gone."""
    read, held = files.weight(device), dict[str, Tensor]()

    def weight(name: str, rows_N: Tensor | None = None) -> Tensor:
        if name not in held:
            held[name] = read(name)
        return held[name] if rows_N is None else held[name][rows_N]

    return weight


def _chosen(
    context: Context, config: ModelConfig, flops: Mapping[str, float], *, by_documents: bool = False
) -> tuple[list[Batch], bool]:
    """Return the held-out rows that the budget has room for, spread evenly or `by_documents` those with the most, in
    groups that are run at a time; and whether they are all."""
    rows = sum(len(batch.row_ids) for batch in context.heldout)
    length = context.heldout[0].tokens_BT.shape[1]
    each = 2 * count_parameters(config) * length
    room = min(rows, max(1, int(flops[context.device.type] // each)))
    wanted = {place * rows // room for place in range(room)}
    if by_documents:
        documents_BT = np.concatenate([batch.documents_BT for batch in context.heldout])
        wanted = {*np.argsort(documents_BT[:, 0] - documents_BT[:, -1], kind="stable")[:room]}
    size = max(1, group_tokens(config.intermediate_size) // length)
    chosen, place = [], 0
    for batch in context.heldout:
        inside = [row for row in range(len(batch.row_ids)) if place + row in wanted]
        place += len(batch.row_ids)
        for first in range(0, len(inside), size):
            part = inside[first : first + size]
            chosen.append(
                replace(
                    batch,
                    tokens_BT=batch.tokens_BT[part],
                    documents_BT=batch.documents_BT[part],
                    labels_BT=batch.labels_BT[part],
                    row_ids=batch.row_ids[part],
                )
            )
    return chosen, room == rows


def _head(runs: reference.PlainDecoder, vocabulary: int) -> Tensor:
    return runs.weight("embed.weight" if runs.shape.tied else "head.weight")[:vocabulary]


def _plain_loss(
    context: Context, runs: reference.PlainDecoder, texts: Iterable[CorpusRows], vocabulary: int
) -> tuple[float, int]:
    """Return the mean cross entropy over the labels of some rows, and how many there are."""
    device, total, count = context.device, 0.0, 0
    for text in texts:
        labels_N = text.labels_BT.flatten().to(device)
        hidden_ND = runs.forward(text.tokens_BT.to(device), text.documents_BT.to(device)).hidden_ND
        # Read for each: held, it would be beside the layers of the next forward pass.
        head_VD = _head(runs, vocabulary)
        places = (labels_N != IGNORED).nonzero().squeeze(1)
        count += len(places)
        for part in torch.split(places, max(LOGITS // vocabulary, 16)):
            logits_CV = hidden_ND[part] @ head_VD.T
            total += float(F.cross_entropy(logits_CV.double(), labels_N[part], reduction="sum"))
        del head_VD
    return total / max(count, 1), count
