"""Perplexity on held-out text: cross entropy in nats per token, and its exponential, the perplexity.

The end-of-text token is appended to each document, which is then cut into rows in each of which `length` tokens
are predicted. Rows overlap by one token, so every token except a document's first is predicted once, from the
tokens before it in its row. Every document is read, whatever its name: that the text is held out is up to the user.

    loss     sum of -log p(token) / tokens, over all documents
    KL       mean over the same tokens of sum_v p(v) (log p(v) - log q(v)), with p from the model named by
             `against`: the quantity that a student distilled from it minimises
    top-1    the fraction of tokens for which both models have the same most probable token

The interval is a percentile bootstrap over documents (`engine.evaluate.statistics`), because the tokens of
one document are not independent. Two models with the same tokenizer are evaluated on the same tokens; the interval
of their difference resamples the same documents for both. Logits are accumulated in fp32.

A non-finite loss raises `NoAnswer`. So do logits that are equal over the whole vocabulary at every position of a
document: for example, a sum that overflows in a norm makes the norm's output zero, and the loss is then ln V, which
is finite but meaningless.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import limits
from engine.data.corpus import Document
from engine.data.left_out import Skipped
from engine.data.sources import list_pieces
from engine.errors import BadInput, CorpusError, NoAnswer
from engine.evaluate.model import Model
from engine.evaluate.statistics import Interval, bootstrap
from engine.models.head import Head, logits_of
from engine.models.packed import head_of
from engine.teachers.vocabulary import compare

# Shapes: B rows, T tokens, N of them predicted, V vocabulary, D width

CHUNK = 1024
"""Number of tokens whose logits are computed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLoss:
    """Sums over the tokens of one document."""

    name: str
    tokens: int
    nats: float
    against_nats: float | None = None
    kl: float | None = None
    agreed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """Sums over the predicted tokens of one row."""

    document: int
    """Index of the document in the input."""
    first: int
    """Position of the row's first token in the document."""
    tokens: int
    nats: float
    against_nats: float | None
    kl: float | None
    agreed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A mean over tokens with its interval, which is None with fewer than two documents."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    documents: tuple[DocumentLoss, ...]
    rows: tuple[RowLoss, ...]
    skipped: tuple[Skipped, ...]
    length: int
    """Number of predicted tokens per row. Losses of different lengths are not comparable, because a longer context
    predicts better."""
    loss: Figure
    against: Figure | None
    difference: Figure | None
    """The loss minus that of `against`."""
    kl: Figure | None
    agreement: Figure | None

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.documents)


def read_documents(source: str) -> tuple[list[Document], list[Skipped]]:
    """Read every document of a file or folder (`engine.data.sources`). Raises `CorpusError`."""
    documents: list[Document] = []
    skipped: list[Skipped] = []
    size = 0
    for item in list_pieces(source):
        if isinstance(item, Skipped):
            skipped.append(item)
            continue
        if item.is_chat:
            raise CorpusError.expected("documents", source, "plain text", "a conversation")
        size += item.size_bytes
        if size > limits.JUDGED_TEXT.most:
            raise CorpusError.expected("documents", source, str(limits.JUDGED_TEXT), "more")
        documents.append(Document(name=item.name, text=item.text))
    if not documents:
        if (fault := next((skip.fault for skip in skipped if skip.fault), None)) is not None:
            raise fault
        raise CorpusError.expected("documents", source, "at least one", "none")
    return documents, skipped


def documents_sha256(documents: Sequence[Document]) -> str:
    """Return one hash over the names and contents of the documents, in their order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.name, document.text]).encode() + b"\n")
    return digest.hexdigest()


@torch.inference_mode()
def perplexity(
    model: Model,
    documents: Sequence[Document],
    *,
    against: Model | None = None,
    length: int = 1024,
    skipped: Sequence[Skipped] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Evaluate one model, or two on the same tokens.

    Raises `BadInput` if the tokenizers of the two models differ, and `NoAnswer` if the loss is not finite or all
    logits are equal.
    """
    models = [model] if against is None else [model, against]
    if against is not None and model.tokenizer.sha256 != against.tokenizer.sha256:
        differing = model.tokenizer.first_differing_id(against.tokenizer)
        if differing is not None:
            raise BadInput.expected(
                "tokenizer",
                against.path,
                f"the vocabulary of {model.path}: both models must be evaluated on the same tokens",
                f"a different token at id {differing:,}",
            )
        compared = compare(model.tokenizer, against.tokenizer, model.tokenizer.vocab_size)
        if compared.split:
            raise BadInput.expected(
                "tokenizer",
                against.path,
                f"the tokens of {model.path}: both models must be evaluated on the same tokens",
                f"{len(compared.split):,} of {compared.texts:,} probe strings tokenised differently: "
                f"{compared.split[0].describe('the first', 'the second')}",
            )
    positions = min(one.decoder.config.max_position_embeddings for one in models)
    length = min(length, positions)
    encoded = model.tokenizer.encode_documents([document.text for document in documents])
    end = model.tokenizer.end_of_text_id
    losses: list[DocumentLoss] = []
    rows: list[RowLoss] = []
    done, total = 0, sum(len(ids) for ids in encoded)
    for number, (document, ids) in enumerate(zip(documents, encoded, strict=True)):
        tokens = torch.tensor([*ids.tolist(), end])
        sums = _Sums(len(models))
        for start in range(0, len(tokens) - 1, length):
            _row(tokens[start : start + length + 1], models, sums)
            done += min(length, len(tokens) - 1 - start)
            if progress is not None:
                progress(done, total)
            rows.append(sums.row(number, start))
        if sums.count:
            losses.append(sums.of(document.name, models))
    if not losses:
        raise CorpusError.expected("documents", "all", "a token to predict", "none")
    counts = [one.tokens for one in losses]

    def figure(sums: Sequence[float | None]) -> Figure | None:
        known = [one for one in sums if one is not None]
        return _figure(known, counts) if known else None

    return Perplexity(
        documents=tuple(losses),
        rows=tuple(rows),
        skipped=tuple(skipped),
        length=length,
        loss=_figure([one.nats for one in losses], counts),
        against=figure([one.against_nats for one in losses]),
        difference=figure(
            [None if one.against_nats is None else one.nats - one.against_nats for one in losses]
        ),
        kl=figure([one.kl for one in losses]),
        agreement=figure([one.agreed for one in losses]),
    )


class _Sums:
    """Running sums over the tokens of one document."""

    def __init__(self, models: int) -> None:
        self.nats = [0.0] * models
        self.divergence, self.agreed, self.count = 0.0, 0, 0
        self.logits_differ = [False] * models
        """Whether each model's logits have differed within the vocabulary at any position so far."""
        self._before = (0, *self.nats, 0.0, 0)

    def row(self, document: int, first: int) -> RowLoss:
        """Return the sums added since the previous row."""
        current = (self.count, *self.nats, self.divergence, self.agreed)
        tokens, nats, *others = (
            x - previous for x, previous in zip(current, self._before, strict=True)
        )
        self._before = current
        against_nats, kl, agreed = others if len(self.nats) == 2 else (None, None, None)
        return RowLoss(
            document=document,
            first=first,
            tokens=int(tokens),
            nats=nats,
            against_nats=against_nats,
            kl=kl,
            agreed=None if agreed is None else int(agreed),
        )

    def of(self, name: str, models: Sequence[Model]) -> DocumentLoss:
        """Return the sums. Raises `NoAnswer` if a sum is not finite, or if a model's logits were all equal."""
        for model, value in zip((*models, models[0]), (*self.nats, self.divergence), strict=True):
            if not math.isfinite(value):
                raise NoAnswer(
                    f"loss: {name} — expected a finite number, found {value} from {model.path}"
                )
        for model, differ in zip(models, self.logits_differ, strict=True):
            if not differ:
                raise NoAnswer(
                    f"logits: {name} — expected some that differ, found one value for all ids of the vocabulary "
                    f"at every position, computed by {model.path}",
                    hint="look for weights that are zero, or so large that a norm's sum overflows",
                )
        has_other = len(models) == 2
        return DocumentLoss(
            name=name,
            tokens=self.count,
            nats=self.nats[0],
            against_nats=self.nats[1] if has_other else None,
            kl=self.divergence if has_other else None,
            agreed=self.agreed if has_other else None,
        )


def _row(row_T: Tensor, models: Sequence[Model], sums: _Sums) -> None:
    """Add to `sums` each model's losses of all tokens of a row except its first."""
    hidden = [
        model.decoder.hidden(row_T[None, :-1].to(model.device)).flatten(0, 1) for model in models
    ]
    heads = [head_of(model.decoder) for model in models]
    for start in range(0, len(row_T) - 1, CHUNK):
        label_N = row_T[1 + start : 1 + start + CHUNK]
        logs = [
            log_probabilities(hidden_ND[start : start + CHUNK], head, head.vocab_size)
            for head, hidden_ND in zip(heads, hidden, strict=True)
        ]
        for index, log_NV in enumerate(logs):
            picked = F.nll_loss(log_NV, label_N.to(log_NV.device), reduction="none")
            sums.nats[index] += float(picked.double().sum())
            if not sums.logits_differ[index]:
                # The first position suffices for a working model; a broken one is checked at all positions.
                sums.logits_differ[index] = _differ(log_NV[:1]) or _differ(log_NV)
        if len(logs) == 2:
            ours_NV, theirs_NV = _same_width(logs[0], logs[1])
            p_NV = theirs_NV.exp()
            # p log p -> 0 as p -> 0, but 0 * inf would be NaN.
            terms_NV = torch.where(p_NV > 0, p_NV * (theirs_NV - ours_NV), 0.0)
            sums.divergence += float(terms_NV.double().sum())
            sums.agreed += int((ours_NV.argmax(-1) == theirs_NV.argmax(-1)).sum())
        sums.count += len(label_N)


def _differ(log_NV: Tensor) -> bool:
    """Return whether the logits of any position differ. NaN differs from itself; it is rejected later as
    non-finite."""
    return bool((log_NV.amax(-1) != log_NV.amin(-1)).any())


def log_probabilities(hidden_ND: Tensor, head: Head, columns: int) -> Tensor:
    """Return the log probabilities of the first `columns` ids of the vocabulary, renormalised, (N, columns); fp32
    or wider."""
    return logits_of(hidden_ND, head, columns).log_softmax(-1)


def _same_width(first_NV: Tensor, second_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Cut both to the smaller vocabulary and renormalise: models with one tokenizer may pad their embeddings to
    different sizes."""
    width = min(first_NV.shape[1], second_NV.shape[1])
    if first_NV.shape[1] == second_NV.shape[1]:
        return first_NV, second_NV.to(first_NV.device)
    cut = [one[:, :width].log_softmax(-1).to(first_NV.device) for one in (first_NV, second_NV)]
    return cut[0], cut[1]


def _figure(sums: Sequence[float], counts: Sequence[float]) -> Figure:
    return Figure(value=sum(sums) / sum(counts), interval=bootstrap(sums, counts))
