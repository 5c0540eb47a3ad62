"""Judge the text that a model writes in each step (on-policy distillation).

ended      0 though turns end in the corpus: the model was taught another end, or the limit is too low
entropy    near 0: it writes one text, from which nothing more is learnt
repeated   one token over and over
length     a fraction of what it was: it learns to stop at once
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.log.events import Wrote
from engine.watch.rules.rule import CannotJudge, Case, Span, Symptom, median, rule

NEWEST = 10
"""Number of newest records that are judged, and of first ones that they are compared with."""
COLLAPSED, COLLAPSED_SHARE = 0.1, 0.2
"""Entropy in nats per token, and its ratio to that of the first records, below which it has collapsed."""
REPEATED = 0.5
"""Share of tokens that equal the one before them."""
SHORTER = 0.25
"""Ratio of the newest to the first lengths."""
APART, APART_SHARE = 0.05, 0.02
"""Distance of entropy and cross entropy beyond rounding: in nats, and relative."""


def _wrote(case: Case, least: int = NEWEST) -> Sequence[Wrote]:
    found = case.view.wrote
    if not found:
        raise CannotJudge("no model writes rows of this run")
    if len(found) < least:
        raise CannotJudge(f"needs {least} steps with written rows, {len(found)} are done")
    return found


def _span(case: Case, wrote: Sequence[Wrote]) -> Span:
    recent = case.recent(0.0)
    return Span(
        first_step=wrote[0].step,
        last_step=wrote[-1].step,
        from_unix_s=recent.from_unix_s,
        to_unix_s=recent.to_unix_s,
    )


@rule(
    reads=("wrote", "labelled_tokens"),
    threshold=f"no row of {NEWEST} steps ends by itself, though turns end in the corpus",
)
def written_text_never_ends(case: Case) -> Symptom | None:
    newest = _wrote(case)[-NEWEST:]
    data = case.view.data
    if data is None or data.labelled_tokens is None:
        raise CannotJudge("the corpus is of texts, which need not end")
    if any(one.ended or 0.0 for one in newest):
        return None
    longest = max(one.longest for one in newest)
    return Symptom(
        f"no written row of the last {NEWEST} steps ends by itself",
        [("ended, share of rows", 0.0, "turns end in the corpus")],
        _span(case, newest),
        meaning="the model was taught another end of turn than that of the template, or the limit is too low for an "
        "answer",
        flip=f"--set rollout.max_new_tokens={2 * longest}",
    )


@rule(
    reads=("wrote",),
    threshold=f"median entropy of {NEWEST} steps under {COLLAPSED:g} nats and {COLLAPSED_SHARE:g} times that of the "
    f"first {NEWEST}",
)
def written_entropy_collapsed(case: Case) -> Symptom | None:
    wrote = _wrote(case, 2 * NEWEST)
    first, now = (
        median([one.entropy or 0.0 for one in some]) for some in (wrote[:NEWEST], wrote[-NEWEST:])
    )
    if now >= COLLAPSED or now >= COLLAPSED_SHARE * first:
        return None
    return Symptom(
        f"the entropy of what the model writes fell to {now:.3g} nats per token",
        [("entropy, median", now, f"{first:.3g} in the first {NEWEST} steps")],
        _span(case, wrote[-NEWEST:]),
        meaning="it writes almost the same text each time: a divergence that covers the teacher's other modes, or a "
        "lower learning rate, keeps it from that",
        flip="--set rollout.divergence=jsd",
    )


@rule(
    reads=("wrote",),
    threshold=f"median share of tokens that equal the one before them over {REPEATED:g} in {NEWEST} steps",
)
def written_text_repeats(case: Case) -> Symptom | None:
    newest = _wrote(case)[-NEWEST:]
    repeated = median([one.repeated or 0.0 for one in newest])
    if repeated <= REPEATED:
        return None
    return Symptom(
        f"{repeated:.0%} of the written tokens repeat the one before them",
        [("repeated, median share", repeated, f"at most {REPEATED:g}")],
        _span(case, newest),
        meaning="the model writes one token over and over, so that the teacher scores nothing else",
        flip="--set rollout.share=0",
    )


@rule(
    reads=("wrote",),
    threshold=f"median length of {NEWEST} steps under {SHORTER:g} times that of the first {NEWEST}",
)
def written_text_shrinks(case: Case) -> Symptom | None:
    wrote = _wrote(case, 2 * NEWEST)
    first, now = (
        median([one.tokens / max(one.rows, 1) for one in some])
        for some in (wrote[:NEWEST], wrote[-NEWEST:])
    )
    if now >= SHORTER * first:
        return None
    return Symptom(
        f"written rows have {now:.3g} tokens, {first:.3g} in the first {NEWEST} steps",
        [("tokens of a row, median", now, f"at least {SHORTER:g} x {first:.3g}")],
        _span(case, wrote[-NEWEST:]),
        meaning="the model learns to stop at once: a mean over tokens gives short rows little weight",
        flip="--set rollout.divergence=forward_kl",
    )


@rule(
    reads=("wrote",),
    threshold=f"entropy as drawn and cross entropy of the step over {APART:g} nats and {APART_SHARE:.0%} apart, at "
    "temperature 1",
)
def writer_is_another_model(case: Case) -> Symptom | None:
    newest = _wrote(case)[-NEWEST:]
    if newest[-1].by != "student" or newest[-1].temperature != 1:
        raise CannotJudge("only a student that writes at temperature 1 is compared with itself")
    drawn = median([one.entropy or 0.0 for one in newest])
    trained = median([one.cross_entropy or 0.0 for one in newest])
    if abs(drawn - trained) <= max(APART, APART_SHARE * abs(trained)):
        return None
    return Symptom(
        f"the step gives its own text {trained:.4g} nats per token, the generator {drawn:.4g}",
        [("cross entropy, median", trained, f"{drawn:.4g} as drawn")],
        _span(case, newest),
        meaning="what writes and what trains are not one model: another precision, dropout in the model's own code, or "
        "stale weights",
        flip="--set student.precision=fp32",
    )
