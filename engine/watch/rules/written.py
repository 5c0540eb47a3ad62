"""Judge the text that a model writes in each step (on-policy distillation).

Each rule compares what is written with the teacher's opinion of it, with the corpus, or with the first steps, because
short, confident or repetitive texts may be right:

noise      entropy near ln V, as of random tokens: the teacher is untrained, or the temperature is too high
ended      no row ends although turns end in the corpus: the model was trained with another end token, or the
           length limit is too low
entropy    near 0 while the teacher disagrees: always the same text, from which nothing more is learnt
repeated   one token over and over, although the corpus does not repeat it
length     only the end token; or much shorter than at first, while the teacher agrees no better
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from engine.log.events import Wrote
from engine.log.view import WROTE_FIRST
from engine.watch.rules.rule import CannotJudge, Case, Span, Symptom, median, rule

NEWEST = WROTE_FIRST
"""Number of newest records that are judged, and number of first records that they are compared with."""
UNTAUGHT = 0.5
"""Ratio of the entropy to ln V above which the model has not learnt to generate text; a language model is below
0.4."""
NOISE = 0.9
"""Ratio of the entropy to ln V above which tokens are drawn almost at random."""
COLLAPSED, COLLAPSED_RATIO = 0.1, 0.2
"""Entropy in nats per token, and its ratio to the entropy of the first records, below which it has collapsed. The
teacher disagrees if the divergence in nats is above the first limit."""
REPEATED, REPEATED_RATIO = 0.5, 2.0
"""Share of tokens that equal the preceding token, and ratio of that share to the prompts' share."""
EMPTY = 1.5
"""Median tokens of a row below which most rows consist of the end token alone."""
SHORTER = 0.25
"""Ratio of the newest to the first lengths below which generated rows have become too short."""
BY_ITSELF = 0.5
"""Share of the rows that end with an end token, above which their lengths are those of the texts and not of the
limit."""


def _records(case: Case, least: int = NEWEST) -> Sequence[Wrote]:
    """Return the records of generated text. Raises CannotJudge for fewer than `least`."""
    wrote = case.view.wrote
    if not wrote:
        raise CannotJudge("no model generates rows in this run")
    if len(wrote) < least:
        raise CannotJudge(f"needs {least} steps with generated rows, {len(wrote)} are done")
    return wrote


def _median(wrote: Sequence[Wrote], number: Callable[[Wrote], float]) -> float:
    finite = [value for record in wrote if math.isfinite(value := number(record))]
    if not finite:
        raise CannotJudge("the numbers of the generated rows are not finite")
    return median(finite)


def _length(record: Wrote) -> float:
    return record.tokens / max(record.rows, 1)


def _ended(wrote: Sequence[Wrote]) -> float:
    """Return the share of all rows that end with an end token."""
    return sum(r.ended * r.rows for r in wrote) / max(sum(r.rows for r in wrote), 1)


def _span(case: Case, wrote: Sequence[Wrote]) -> Span:
    recent = case.recent(0.0)
    return Span(
        first_step=wrote[0].step,
        last_step=wrote[-1].step,
        from_unix_s=recent.from_unix_s,
        to_unix_s=recent.to_unix_s,
    )


@rule(
    reads=("wrote",),
    threshold=f"median entropy of {NEWEST} steps over {NOISE:g} ln V, of the teacher or at a temperature above 1",
)
def written_text_is_noise(case: Case) -> Symptom | None:
    newest = _records(case)[-NEWEST:]
    by, temperature = newest[-1].by, newest[-1].temperature
    if by == "student" and temperature <= 1:
        raise CannotJudge("a student may not have learnt to generate text yet")
    entropy, chance = _median(newest, lambda one: one.entropy), case.vocabulary_nats
    if entropy <= NOISE * chance:
        return None
    return Symptom(
        f"the {by} generates noise: its tokens have an entropy of {entropy:.2f} nats",
        [("entropy, median", entropy, f"at most {NOISE:g} ln V = {NOISE * chance:.4f}")],
        _span(case, newest),
        meaning="the temperature makes all tokens about equally likely"
        if temperature > 1
        else "the teacher guesses: its weights are untrained, or belong to another tokenizer",
        flip="--set rollout.temperature=1" if temperature > 1 else "--set rollout.share=0",
    )


@rule(
    reads=("wrote",),
    threshold=f"no row of {NEWEST} steps ends by itself, though turns end in the corpus; median entropy at most "
    f"{UNTAUGHT:g} ln V",
)
def written_text_never_ends(case: Case) -> Symptom | None:
    newest = _records(case)[-NEWEST:]
    end, turn = newest[-1].turn_end, newest[-1].turn_tokens
    if not end or turn is None:
        raise CannotJudge("the corpus has texts without turns, which need not end")
    if _ended(newest) > 0:
        return None
    entropy = _median(newest, lambda one: one.entropy)
    if entropy > UNTAUGHT * case.vocabulary_nats:
        raise CannotJudge(
            f"the model has not learnt to generate text: its entropy is {entropy:.2f} nats"
        )
    longest = max(one.longest for one in newest)
    fits = turn <= longest
    return Symptom(
        f"no generated row of the last {NEWEST} steps ends with {end!r} or the model's own end of text",
        [
            ("ended, share of rows", 0.0, "turns end in the corpus"),
            ("longest row, tokens", longest, f"turns of the corpus have {turn:g}, median"),
        ],
        _span(case, newest),
        meaning="the model was trained with another end of turn than that of the corpus's template"
        if fits
        else "the limit of new tokens is too low for an answer",
        flip=(
            f"--set rollout.by={'student' if newest[-1].by == 'teacher' else 'teacher'}"
            if fits
            else f"--set rollout.max_new_tokens={math.ceil(2 * turn)}"
        ),
    )


@rule(
    reads=("wrote",),
    threshold=f"median entropy of {NEWEST} steps under {COLLAPSED:g} nats and {COLLAPSED_RATIO:g} times that of the "
    f"first {NEWEST}, divergence from the teacher above {COLLAPSED:g} nats",
)
def written_entropy_collapsed(case: Case) -> Symptom | None:
    wrote = _records(case, 2 * NEWEST)
    newest = wrote[-NEWEST:]
    if newest[-1].by != "student":
        raise CannotJudge("the teacher generates the text, and does not change")
    first, now = (_median(some, lambda one: one.entropy) for some in (wrote[:NEWEST], newest))
    divergence = _median(newest, lambda one: one.divergence)
    # A student as certain as its teacher has learnt the answer: a short correct answer has almost no entropy.
    if now >= COLLAPSED or now >= COLLAPSED_RATIO * first or divergence <= COLLAPSED:
        return None
    return Symptom(
        f"the entropy of the student's generated text fell to {now:.3g} nats per token, and the teacher would "
        "generate something else",
        [
            ("entropy, median", now, f"{first:.3g} in the first {NEWEST} steps"),
            (
                "divergence, median",
                divergence,
                f"at most {COLLAPSED:g} if the teacher is as certain",
            ),
        ],
        _span(case, newest),
        meaning="it generates almost the same text each time: the learning rate is too high, or the divergence lets it "
        "ignore the other texts that the teacher would generate",
        flip=f"--set train.lr={case.started.peak_lr / 10:g}",
    )


@rule(
    reads=("wrote",),
    threshold=f"median share of tokens that equal the one before them over {REPEATED:g} in {NEWEST} steps, and "
    f"{REPEATED_RATIO:g} times that in the prompts",
)
def written_text_repeats(case: Case) -> Symptom | None:
    newest = _records(case)[-NEWEST:]
    repeated = _median(newest, lambda one: one.repeated)
    usual = _median(newest, lambda one: one.repeated_in_prompts or 0.0)
    if repeated <= max(REPEATED, REPEATED_RATIO * usual):
        return None
    return Symptom(
        f"{repeated:.0%} of the generated tokens repeat the one before them",
        [("repeated, median share", repeated, f"over {REPEATED:g}; {usual:.3g} in the prompts")],
        _span(case, newest),
        meaning="the model generates one token over and over, so the teacher scores nothing else",
        flip="--set rollout.share=0",
    )


@rule(
    reads=("wrote",),
    threshold=f"median row of {NEWEST} steps under {EMPTY:g} tokens, ended by itself; or under {SHORTER:g} times that "
    f"of the first {NEWEST}, which ended by themselves, and no lower divergence",
)
def written_text_shrinks(case: Case) -> Symptom | None:
    wrote = _records(case)
    first, newest = wrote[:NEWEST], wrote[-NEWEST:]
    now = _median(newest, _length)
    flip = f"--set rollout.by={'student' if newest[-1].by == 'teacher' else 'teacher'}"
    if now < EMPTY and _ended(newest) > BY_ITSELF:
        return Symptom(
            "most generated rows are an end of text and nothing else",
            [("tokens of a row, median", now, f"at least {EMPTY:g}")],
            _span(case, newest),
            meaning="the model ends a row at once: the template differs from the one that it was trained with, or "
            "the teacher also ends "
            "at once",
            flip=flip,
        )
    if len(wrote) < 2 * NEWEST:
        raise CannotJudge(f"needs {2 * NEWEST} steps with generated rows, {len(wrote)} are done")
    was = _median(first, _length)
    before, after = (_median(some, lambda one: one.divergence) for some in (first, newest))
    # Rows that reached the limit do not show the length of a text, and a student that comes nearer to the teacher may
    # be learning the teacher's length.
    if now >= SHORTER * was or _ended(first) <= BY_ITSELF or after < before:
        return None
    return Symptom(
        f"generated rows have {now:.3g} tokens, {was:.3g} in the first {NEWEST} steps, and are no closer to the "
        "teacher",
        [
            ("tokens of a row, median", now, f"at least {SHORTER:g} x {was:.3g}"),
            ("divergence, median", after, f"{before:.3g} in the first {NEWEST} steps"),
        ],
        _span(case, newest),
        meaning="the student learns to stop where the teacher would go on: cross entropy on shorter texts, or a "
        "learning rate too high",
        flip=flip,
    )
