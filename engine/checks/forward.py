"""Checks of the forward pass: what a token may attend to, and whether it is the model that config.json
describes.

The student runs with its fp32 master weights and without autocast: these checks look for a wrong formula,
which rounding would only hide. The teacher runs as it does in training.
"""

# Shapes: B rows, T tokens, N tokens, V vocabulary, D width

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.audit.reference import HEAD_ROWS, forward
from engine.checks.check import Answer, Numbers, failed
from engine.checks.context import Context
from engine.checks.logits import Hidden
from engine.checks.weights import held, rows_of, shape_of, weights_of
from engine.models.decoder import Decoder, RMSNorm
from engine.models.head import Head, logits_of
from engine.models.packed import head_of

ROWS, LENGTH = 2, 24
OF_TRANSFORMERS = "not proved: transformers runs every model, and there is no other forward pass to compare it with"
LEAK = 1e-4
"""Largest allowed change of tokens that must not change, relative to the change of those that may. Masked
tokens have a weight of exactly 0, and equal shapes give equal sums, so a correct model has no leak at
all.
"""

# One rounding in each dtype, and the largest change of attention that counts as none.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}
NO_CHANGE = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float64: 1e-12}
TF32_ROUNDING = 2.0**-11
FP8_ROUNDING = 2.0**-4
"""One rounding of e4m3 activations; the weights are already rounded, and the reference uses the same ones."""


@dataclass(frozen=True, slots=True)
class Side:
    whose: str
    decoder: Decoder
    hidden: Hidden
    head: Head
    rounding: float

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype


def sides(context: Context) -> Iterator[Side]:
    student = context.student
    yield Side("student", student, student.hidden, head_of(student), ROUNDING[torch.float32])
    teacher, decoder = context.teacher, context.teacher_decoder
    if teacher is not None and decoder is not None:
        rounding = ROUNDING[decoder.dtype]
        if context.spec.teacher.precision == "tf32":
            rounding = TF32_ROUNDING
        elif context.spec.teacher.precision == "fp8":
            rounding = FP8_ROUNDING
        yield Side("teacher", decoder, teacher.hidden, head_of(decoder), rounding)


def _probe(context: Context) -> tuple[Tensor, Tensor]:
    """Return some rows of held-out text, (B, T), each split into two documents of 1/3 and 2/3."""
    batch = context.heldout[0]
    tokens_BT = torch.from_numpy(batch.tokens_BT[:ROWS, :LENGTH]).to(context.device)
    documents_BT = torch.zeros_like(tokens_BT)
    documents_BT[:, max(1, tokens_BT.shape[1] // 3) :] = 1
    return tokens_BT, documents_BT


def _other(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return a different token for each position, away from the special tokens at the ends of the vocabulary."""
    return (tokens + vocabulary // 2) % vocabulary


def _leaks(
    context: Context,
    numbers: Numbers,
    tokens_BT: Tensor,
    changed_BT: Tensor,
    own_BT: Tensor,
    documents_BT: Tensor,
) -> Iterator[tuple[str, float]]:
    """Yield the models in which tokens outside `own_BT` change, and by how much.

    Only tokens in `own_BT` may change. The leak is relative to their change, and infinite if they do not
    change.
    """
    for side in sides(context):
        before_BTD = side.hidden(tokens_BT, documents_BT)
        moved_BT = (side.hidden(changed_BT, documents_BT) - before_BTD).float().norm(dim=2)
        own = float(moved_BT[own_BT].norm())
        leak = float(moved_BT[~own_BT].norm()) / own if own else math.inf
        numbers[f"{side.whose}_leak"] = leak
        if not leak <= LEAK:
            yield side.whose, leak


@torch.no_grad()
def causal_mask(context: Context) -> Answer:
    tokens_BT, documents_BT = _probe(context)
    middle = tokens_BT.shape[1] // 2
    changed_BT = tokens_BT.clone()
    changed_BT[:, middle] = _other(tokens_BT[:, middle], context.student.config.vocab_size)
    own_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    own_BT[:, middle:] = True
    numbers = Numbers()
    for whose, leak in _leaks(
        context, numbers, tokens_BT, changed_BT, own_BT, torch.zeros_like(documents_BT)
    ):
        text = f"tokens before a changed one move by {leak:.1e} of what it moves"
        return numbers.failed(
            f"{whose}: {'a changed token changes nothing' if leak == math.inf else text}"
        )
    return numbers.passed("a changed token moves none before it")


@torch.no_grad()
def documents_isolated(context: Context) -> Answer:
    tokens_BT, documents_BT = _probe(context)
    own_BT = documents_BT == 0
    changed_BT = torch.where(
        own_BT, _other(tokens_BT, context.student.config.vocab_size), tokens_BT
    )
    numbers = Numbers()
    for whose, leak in _leaks(context, numbers, tokens_BT, changed_BT, own_BT, documents_BT):
        return numbers.failed(
            f"{whose}: another document in the row moves a token by {leak:.1e} of its own change"
        )
    return numbers.passed("another document in the row changes nothing")


@torch.no_grad()
def positions_matter(context: Context) -> Answer:
    """Check that exchanging the first two of four tokens changes the attention output of the last one.

    Only the first layer's attention is compared: after it, even a model without positions has some
    information about the order, from what each token could attend to.
    """
    row_T = torch.from_numpy(context.heldout[0].tokens_BT[:1].ravel()).to(context.device)
    distinct = torch.unique(row_T)
    count = len(distinct) // 4
    if count == 0:
        return failed("a held-out row has fewer than four distinct tokens", distinct=len(distinct))
    tokens_B4 = distinct[: 4 * count].view(count, 4)
    exchanged_B4 = tokens_B4[:, [1, 0, 2, 3]]
    documents_B4 = torch.zeros_like(tokens_B4)
    numbers = Numbers()
    for side in sides(context):
        if not side.decoder.config.native:
            continue
        answers: list[Tensor] = []

        def keep(
            _module: object, _inputs: object, output: Tensor, into: list[Tensor] = answers
        ) -> None:
            into.append(output[:, -1].float())

        handle = side.decoder.layers[0].attention.register_forward_hook(keep)  # type: ignore[union-attr]
        try:
            side.hidden(tokens_B4, documents_B4)
            side.hidden(exchanged_B4, documents_B4)
        finally:
            handle.remove()
        one_BD, other_BD = answers
        change = float((one_BD - other_BD).norm() / one_BD.norm())
        numbers[f"{side.whose}_change"] = change
        if not change > NO_CHANGE[side.dtype]:
            return numbers.failed(
                f"{side.whose}: exchanging two earlier tokens changes attention by {change:.1e}"
            )
    if not numbers:
        return numbers.unknown(OF_TRANSFORMERS)
    return numbers.passed("exchanging two earlier tokens changes what attention answers")


@torch.no_grad()
def forward_is_the_model(context: Context) -> Answer:
    tokens_BT, documents_BT = _probe(context)
    numbers = Numbers()
    for side in sides(context):
        config = side.decoder.config
        if not config.native:
            continue
        eps = _worst_eps(side.decoder)
        numbers[f"{side.whose}_eps"] = eps
        if not 0.9 < eps / config.rms_norm_eps < 1.1:
            return numbers.failed(
                f"{side.whose}: a norm behaves as with eps {eps:.1e}, config.json says "
                f"{config.rms_norm_eps:.1e}"
            )
        hidden_ND = side.hidden(tokens_BT, documents_BT).flatten(0, 1)
        logits_NV = logits_of(hidden_ND, side.head, config.vocab_size).float()
        wanted_NV = plain_logits(side.decoder, tokens_BT, documents_BT)
        # A constant added to all logits of a token makes no difference.
        logits_NV -= logits_NV.mean(dim=1, keepdim=True)
        wanted_NV -= wanted_NV.mean(dim=1, keepdim=True)
        error_N = (logits_NV - wanted_NV).norm(dim=1) / wanted_NV.norm(dim=1)
        error, aside = (
            _relative(logits_NV, wanted_NV, torch.ones_like(error_N, dtype=torch.bool)),
            0,
        )
        agreement = float((logits_NV.argmax(1) == wanted_NV.argmax(1)).float().mean())
        # Each layer adds two rounded branches to the residual, and rounding errors add up like a random
        # walk.
        allowed = max(2e-4, 4 * side.rounding * math.sqrt(2 * config.num_hidden_layers))
        if not error <= allowed:
            moved_NV = plain_logits(side.decoder, tokens_BT, documents_BT, side.rounding)
            moved_NV -= moved_NV.mean(dim=1, keepdim=True)
            decided_N = (moved_NV - wanted_NV).norm(dim=1) > allowed * wanted_NV.norm(dim=1)
            beyond_N = error_N > 4 * allowed
            kept_N = ~(decided_N | beyond_N)
            # Some models, of random weights above all, choose between two answers by less than rounding.
            if int(beyond_N.sum()) <= 4 * int(decided_N.sum()):
                aside = int((~kept_N).sum())
                if 2 * aside > len(kept_N):
                    return numbers.unknown(
                        f"{side.whose}: rounding decides the logits of {aside} of {len(kept_N)} tokens"
                    )
                error = _relative(logits_NV, wanted_NV, kept_N)
        numbers |= {
            f"{side.whose}_decided_by_rounding": aside,
            f"{side.whose}_error": error,
            f"{side.whose}_allowed": allowed,
            f"{side.whose}_agreement": agreement,
        }
        if not error <= allowed:
            first = (
                int((error_N > allowed).nonzero()[0]) % tokens_BT.shape[1]
                if (error_N > allowed).any()
                else -1
            )
            return numbers.failed(
                f"{side.whose}: logits are {error:.2g} (relative) from a plain forward pass, "
                f"{allowed:.1g} is allowed; first at position {first} of a row, {agreement:.0%} "
                "agreement"
            )
    if not numbers:
        return numbers.unknown(OF_TRANSFORMERS)
    return numbers.passed(
        "logits are those of a plain forward pass: "
        + ", ".join(
            f"{whose} within {numbers[f'{whose}_error']:.1e}"
            for whose in ("student", "teacher")
            if f"{whose}_error" in numbers
        )
    )


def _relative(found_NV: Tensor, wanted_NV: Tensor, kept_N: Tensor) -> float:
    return float((found_NV - wanted_NV)[kept_N].norm() / wanted_NV[kept_N].norm())


def plain_logits(
    decoder: Decoder, tokens_BT: Tensor, documents_BT: Tensor, rounding: float = 0.0
) -> Tensor:
    """Return the logits (N, V) of the audit's reference with the decoder's weights; see there for `rounding`."""
    hidden_ND = forward(
        shape_of(decoder.config), weights_of(decoder), tokens_BT, documents_BT, rounding=rounding
    ).hidden_ND
    head = held(decoder, "head.weight")
    count = head.shape[0]
    parts = [
        hidden_ND @ rows_of(head, first, min(HEAD_ROWS, count - first)).T
        for first in range(0, count, HEAD_ROWS)
    ]
    return torch.cat(parts, dim=1)


def _worst_eps(decoder: Decoder) -> float:
    """Return the effective eps of the decoder's norms: the one furthest from the config's.

    In a row whose mean square is eps, eps is half of the sum under the root, so y = w / sqrt(2).
    """
    wanted = decoder.config.rms_norm_eps
    worst = wanted
    for name, module in decoder.named_modules():
        if not isinstance(module, RMSNorm):
            continue
        decoder.reach(name)
        weight_D = module.factor_D
        row_D = torch.full_like(weight_D, math.sqrt(wanted))[None, None, None]
        answer_D = module(row_D).float().flatten()
        share = float((answer_D * weight_D.float()).sum() / weight_D.float().square().sum())
        # y = x / sqrt(x^2 + eps) with x^2 = wanted
        found = wanted * (1 / share**2 - 1) if share > 0 else math.inf
        if abs(math.log(max(found, 1e-30) / wanted)) > abs(math.log(worst / wanted)):
            worst = found
    return worst
