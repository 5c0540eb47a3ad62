"""Check the figures of `engine eval ppl` against other code: for some of the rows, and for all texts.

    tokens       of each document: every token of its text, and its end, but the first, is predicted once
    rows         as long as asked, and no longer than the positions of the models
    loss, KL     of the longest rows that the budget has room for, from the model's own hidden states, in float64;
                 the direction is KL(against || model)
    agreement    of the same rows, between its minimum and maximum when near ties may go either way
    forward      the loss of the same rows, by the plain forward pass of the audit (`engine.audit.reference`) from the
                 weights in the files
    record       every mean and interval of the output, from the sums of its documents

A figure that differs from the expected one raises `InternalError`.
"""

# Shapes: N tokens of some rows, or documents, K resamples, F figures, V vocabulary, D width, C tokens of a chunk,
# R rows of a head

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.audit import reference
from engine.audit.bounds import LOGITS
from engine.checks.weights import shape_of, weights_of
from engine.data.corpus import Document
from engine.errors import InternalError
from engine.evaluate.model import Model
from engine.evaluate.perplexity import Perplexity, RowLoss
from engine.models.head import operand_dtype
from engine.models.packed import head_of
from tests.support.model_files import open_files

LEAST_TOKENS, MOST_TOKENS, SHARE = 512, 4096, 32
"""Tokens that are recomputed: one in SHARE of all, between LEAST_TOKENS and MOST_TOKENS."""
WHOLE_CHARACTERS = 1 << 20
"""A text up to this long is encoded whole, where the evaluation encodes it in pieces."""
FP32 = 2.0**-24
"""Largest relative error of one rounding."""
LOSS_ALLOWED = 2e-5
"""Allowed difference of a loss from the same hidden states, in nats and relative to it."""
FORWARD_ALLOWED = 1e-3
"""Allowed relative difference of the loss of another forward pass in fp32; five roundings of 16 bits."""

OWN_DRAWS, DRAWS, SEED = 2_000, 8_000, 20
"""Resamples of an interval of the evaluation, those of the interval it is compared with, and the seed of both."""
SIGMAS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Number of rows and tokens that were recomputed with the same result."""

    rows: int
    tokens: int
    forward_pass: str
    """`plain`, or why the forward pass itself could not be checked."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A row as it is expected."""

    reported: RowLoss
    where: str
    ids: Tensor
    """The tokens, with the one before the first that is predicted."""


@torch.inference_mode()
def check_perplexity(
    found: Perplexity,
    documents: Sequence[Document],
    model: Model,
    against: Model | None = None,
    *,
    length: int,
) -> Checked:
    """Recompute the figures of some rows of this `length`. Raises `InternalError` for a figure that differs."""
    positions = [
        judged.decoder.config.max_position_embeddings for judged in (model, against or model)
    ]
    why = "as asked, and at most the positions of the models"
    _equal("tokens of a row", "all", min(length, *positions), found.length, why)
    _check_tokens(found, documents, model)
    rows = [_row(found, documents, model, reported) for reported in _chosen(found)]
    for row in rows:
        _check_row(row, model, against)
    unknown = _check_forward(rows, model, other=False)
    if against is not None:
        unknown = _check_forward(rows, against, other=True) or unknown
    return Checked(
        rows=len(rows),
        tokens=sum(row.reported.tokens for row in rows),
        forward_pass=f"unknown: {unknown}" if unknown else "plain",
    )


def fault_of_record(record: Mapping[str, Any], where: object, *, own: bool = False) -> str:
    """Return which mean or interval of the JSON value does not follow from its documents; empty for none. `own`
    says that the record was made in this process."""
    documents = record["documents"]
    tokens_N = [document["tokens"] for document in documents]
    tokens = sum(tokens_N)
    sums: dict[str, list[float]] = {}
    faults = [_fault("tokens", where, tokens, record["tokens"], "the sum over the documents")]
    for name, parts in (
        ("loss", ("nats",)),
        ("against_loss", ("against_nats",)),
        ("difference", ("nats", "against_nats")),
        ("kl", ("kl",)),
        ("top1_agreement", ("agreed",)),
    ):
        mean = None
        if all(document[part] is not None for document in documents for part in parts):
            first, *subtracted = parts
            sums[name] = [
                document[first] - sum(document[part] for part in subtracted)
                for document in documents
            ]
            mean = math.fsum(sums[name]) / tokens
        figure = None if record[name] is None else record[name]["value"]
        faults.append(_fault(name, where, mean, figure, "the mean over its documents", 1e-9))
    expected, why = math.exp(min(record["loss"]["value"], 700.0)), "the exponential of the loss"
    faults.append(_fault("perplexity", where, expected, record["perplexity"], why, 1e-9))
    if not any(faults):
        intervals = {name: record[name]["interval"] for name in sums}
        faults.append(_fault_of_intervals(intervals, where, sums, tokens_N, own=own))
    return next(filter(None, faults), "")


def _fault_of_intervals(
    intervals: Mapping[str, Sequence[float] | None],
    where: object,
    sums: Mapping[str, Sequence[float]],
    tokens_N: Sequence[int],
    *,
    own: bool,
) -> str:
    """Return which end of an interval does not follow from a bootstrap over documents; empty for none.

    Another generator draws other resamples, so that the ranks of a percentile p among the two differ, with the standard
    deviation sqrt(p (1 - p) (1 / draws + 1 / others)): an end has to be between the percentiles SIGMAS of these on
    either side, however the resamples are distributed. One of many documents that is never drawn moves the ends by
    less. So in the process that made the interval the resamples of its own seed are drawn once more too, and give the
    same ends; another version of numpy may draw others."""
    for name, given in intervals.items():
        if (given is None) != (len(tokens_N) < 2):
            return f"interval of {name}: {where} — expected one for two documents or more, found {given}"
    if len(tokens_N) < 2:
        return ""
    columns_NF = np.array([*sums.values(), tokens_N], dtype=np.float64).T
    ways: list[tuple[np.random.BitGenerator, int, float]] = [(np.random.PCG64(SEED), DRAWS, SIGMAS)]
    ways += [(np.random.Philox(SEED), OWN_DRAWS, 0.0)] if own else []
    for bits, draws, sigmas in ways:
        random, count = np.random.Generator(bits), len(tokens_N)
        totals_KF = np.array(
            [
                np.bincount(random.integers(count, size=count), minlength=count) @ columns_NF
                for _ in range(draws)
            ]
        )
        ratios_KF = totals_KF[:, :-1] / totals_KF[:, -1:]
        for place, (name, given) in enumerate(intervals.items()):
            assert given is not None
            for share, end in zip((0.025, 0.975), given, strict=True):
                apart = sigmas * math.sqrt(share * (1 - share) * (1 / OWN_DRAWS + 1 / draws))
                low, high = np.quantile(ratios_KF[:, place], (share - apart, share + apart))
                rounding = 1e-9 * (1 + abs(low))
                if not low - rounding <= end <= high + rounding:
                    return (
                        f"interval of {name}: {where} — expected its end at {share:.1%} between {low:.7g} and "
                        f"{high:.7g} (its documents resampled once more), found {end:.7g}"
                    )
    return ""


def _fault(
    what: str,
    where: object,
    expected: float | None,
    found: float | None,
    why: str,
    allowed: float = 0.0,
) -> str:
    """Return that a figure differs by more than `allowed`, absolute plus relative; empty if it does not."""
    if expected is None or found is None:
        if expected is found:
            return ""
    elif abs(found - expected) <= allowed * (1 + abs(expected)):
        return ""
    texts = ["none" if value is None else f"{value:,.7g}" for value in (expected, found)]
    return f"{what}: {where} — expected {texts[0]} ({why}), found {texts[1]}"


def _equal(*given: Any) -> None:
    """Raise InternalError for what `_fault` says."""
    if fault := _fault(*given):
        raise InternalError(fault)


def _check_tokens(found: Perplexity, documents: Sequence[Document], model: Model) -> None:
    encoded = model.tokenizer.encode_documents([document.text for document in documents])
    tokens_of = {number: len(ids) for number, ids in enumerate(encoded) if len(ids)}
    _equal("documents", "all", len(tokens_of), len(found.documents), "those with a token")
    in_rows: Counter[int] = Counter()
    rows = Counter(row.document for row in found.rows)
    for row in found.rows:
        in_rows[row.document] += row.tokens
    # All but the first, and the end of the text: as many as the text has.
    why = "every token of the text but the first, and its end"
    for (number, count), document in zip(tokens_of.items(), found.documents, strict=True):
        name = documents[number].name
        _equal("tokens predicted", name, count, document.tokens, why)
        _equal("tokens predicted", f"{name}, all rows", count, in_rows[number], why)
        full = f"of {found.length:,} tokens, and the rest"
        _equal("rows", name, math.ceil(count / found.length), rows[number], full)


def _chosen(found: Perplexity) -> list[RowLoss]:
    """Return the longest rows that the budget has room for; the shortest where it has room for none."""
    room = min(max(found.tokens // SHARE, LEAST_TOKENS), MOST_TOKENS)
    chosen = []
    for row in sorted(found.rows, key=lambda row: -row.tokens):
        if row.tokens <= room:
            chosen.append(row)
            room -= row.tokens
    return chosen or [min(found.rows, key=lambda row: row.tokens)]


def _row(found: Perplexity, documents: Sequence[Document], model: Model, reported: RowLoss) -> _Row:
    document, tokenizer = documents[reported.document], model.tokenizer
    if len(document.text) <= WHOLE_CHARACTERS:
        ids = tokenizer.encode_whole(document.text)
    else:
        (ids,) = tokenizer.encode_documents([document.text])
    first = reported.first
    row = [*ids.tolist(), tokenizer.end_of_text_id][first : first + found.length + 1]
    where = f"{document.name}, tokens {first + 2:,} to {first + len(row):,}"
    _equal("tokens predicted", where, len(row) - 1, reported.tokens, "the row's")
    return _Row(reported, where, torch.tensor(row))


# From the model's own hidden states


def _check_row(row: _Row, model: Model, against: Model | None) -> None:
    models = [model] if against is None else [model, against]
    labels_N, ids_T = row.ids[1:], row.ids[None, :-1]
    hidden = [one.decoder.hidden(ids_T.to(one.device)).flatten(0, 1) for one in models]
    width = max(head_of(one.decoder).vocab_size for one in models)
    size = max(1, LOGITS["cpu"] // width)
    nats, divergence, surely, perhaps, largest = [0.0] * len(models), 0.0, 0, 0, 0.0
    for first in range(0, len(labels_N), size):
        logits = [
            _logits(one, hidden_ND[first : first + size]).to(model.device)
            for one, hidden_ND in zip(models, hidden, strict=True)
        ]
        label_C = labels_N[first : first + size].to(model.device)
        largest = max(largest, *(float(logits_CV.abs().amax()) for logits_CV in logits))
        for index, logits_CV in enumerate(logits):
            nats[index] += float(F.cross_entropy(logits_CV, label_C, reduction="sum"))
        if against is not None:
            # Embeddings are padded to different sizes; the ids of the tokenizer are in both.
            shared = min(logits_CV.shape[1] for logits_CV in logits)
            q_CV, p_CV = (logits_CV[:, :shared] for logits_CV in logits)
            divergence += float(F.kl_div(q_CV.log_softmax(1), p_CV.softmax(1), reduction="sum"))
            at_least, at_most = _agreeing(q_CV, p_CV)
            surely, perhaps = surely + at_least, perhaps + at_most
    tokens, reported = row.reported.tokens, row.reported
    # A logit is a sum of products, each rounded.
    allowed = LOSS_ALLOWED + 8 * FP32 * largest
    why = "from the same hidden states, in float64"
    for name, wanted, found in (
        ("loss", nats[0], reported.nats),
        ("loss of the other model", nats[-1], reported.against_nats),
        ("KL(against || model)", divergence, reported.kl),
    ):
        if found is not None:
            _equal(name, row.where, wanted / tokens, found / tokens, why, allowed)
    if reported.agreed is not None and not surely <= reported.agreed <= perhaps:
        raise InternalError(
            f"top-1 agreement: {row.where} — expected {surely:,} to {perhaps:,} of {tokens:,} tokens ({why}), "
            f"found {reported.agreed:,}"
        )


def _logits(model: Model, hidden_CD: Tensor) -> Tensor:
    """Return the logits in float64; hidden states that are logits already have a head without rows."""
    head = head_of(model.decoder)
    parts = [
        hidden_CD.double() @ weight_RD.double().T
        for _, weight_RD in head.slices(head.vocab_size, operand_dtype(hidden_CD))
    ]
    return torch.cat(parts, 1) if parts else hidden_CD[:, : head.vocab_size].double()


def _agreeing(q_CV: Tensor, p_CV: Tensor) -> tuple[int, int]:
    """Return at how many positions both have one most probable id surely, and when rounding decides near ties."""
    near = [
        logits_CV >= (logits_CV.amax(1) - 32 * FP32 * logits_CV.abs().amax(1))[:, None]
        for logits_CV in (q_CV, p_CV)
    ]
    both_C = (near[0] & near[1]).any(1)
    alone_C = (near[0].sum(1) == 1) & (near[1].sum(1) == 1)
    return int((both_C & alone_C).sum()), int(both_C.sum())


# From the files


def _check_forward(rows: Sequence[_Row], model: Model, *, other: bool) -> str:
    """Hold the loss against a plain forward pass; return why that is not possible, empty when it was."""
    config = model.decoder.config
    if not config.native:
        return "no other forward pass of such a model is known"
    shape = shape_of(config)
    files = open_files(model.path)
    weight = (
        weights_of(model.decoder)
        if files is None or not files.count("norm.weight")
        else files.weight(model.device, model.decoder.dtype)
    )
    plain = reference.PlainDecoder(shape, weight)
    tokens_BT = torch.cat([row.ids[:-1] for row in rows])[None].to(model.device)
    labels_N = torch.cat([row.ids[1:] for row in rows]).to(model.device)
    lengths = torch.tensor([len(row.ids) - 1 for row in rows])
    # The rows follow each other as documents of one row.
    documents_BT = torch.arange(len(rows)).repeat_interleave(lengths)[None].to(model.device)
    head_VD = weight("embed.weight" if shape.tied else "head.weight")[: config.vocab_size]

    def losses(rounding: float = 0.0) -> Tensor:
        passed = plain.forward(tokens_BT, documents_BT, rounding=rounding)
        size = max(1, LOGITS["cpu"] // len(head_VD))
        parts = zip(torch.split(passed.hidden_ND, size), torch.split(labels_N, size), strict=True)
        return torch.cat(
            [
                F.cross_entropy((h_CD @ head_VD.to(h_CD).T).double(), label_C, reduction="none")
                for h_CD, label_C in parts
            ]
        )

    plain_N = losses()
    reported = [row.reported.against_nats if other else row.reported.nats for row in rows]
    found, wanted = math.fsum(one or 0.0 for one in reported) / len(labels_N), float(plain_N.mean())
    rounding = torch.finfo(model.decoder.dtype).eps / 2
    allowed = max(FORWARD_ALLOWED, 5 * rounding) * wanted
    if not abs(found - wanted) <= allowed:
        # Weights that carry rounding errors far carry those of another forward pass as far.
        allowed = max(allowed, 4 * float((losses(rounding) - plain_N).abs().mean()))
    if not abs(found - wanted) <= allowed:
        raise InternalError(
            f"loss: {model.path}, {len(labels_N):,} tokens — expected {wanted:.6g} nats a token (a plain forward pass "
            f"of its weights, within {allowed:.1g}), found {found:.6g}"
        )
    return ""
