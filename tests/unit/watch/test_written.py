"""Rules about text that a model writes: the fault, just below it, what only looks like it, and no input."""

from __future__ import annotations

import math
from typing import Any

from engine.log.events import DecisionMade, Wrote
from engine.watch.rules import written
from tests.support.diagnosing import LN_V, Log, quiet, raised, unknown
from tests.support.run_events import example_of

HEALTHY: dict[str, Any] = {
    "by": "student",
    "temperature": 1.0,
    "rows": 8,
    "tokens": 800,
    "shortest": 40,
    "longest": 128,
    "ended": 0.6,
    "entropy": 1.5,
    "cross_entropy": 1.5,
    "divergence": 0.4,
    "repeated": 0.05,
    "repeated_in_prompts": 0.02,
    "turn_end": "<|im_end|>",
    "turn_tokens": 60.0,
}


def log_of(count: int, first: dict[str, Any] | None = None, **late: Any) -> Any:
    """A run of `count` written steps; the first half has the values `first`, the second `late`."""
    log = Log(count=count)
    decision = example_of(DecisionMade, knob="student.precision", choice="fp32")
    events: list[Any] = [(6.5, decision)]
    for step in range(1, count + 1):
        values = {**HEALTHY, **(late if 2 * step > count else first or {})}
        events.append((10.1 + 0.5 * step, example_of(Wrote, step=step, **values)))
    log.extra = events
    return log.case()


def test_a_healthy_writer_is_left_alone_and_a_run_without_one_is_not_judged() -> None:
    for rule in (
        "written_text_never_ends",
        "written_entropy_collapsed",
        "written_text_repeats",
        "written_text_shrinks",
    ):
        quiet(rule, log_of(40))
        unknown(rule, Log(count=40).case(), "no model generates rows")
        unknown(rule, log_of(9), "steps with generated rows, 9 are done")
    quiet("written_text_is_noise", log_of(40, by="teacher"))


def test_rows_that_all_run_into_the_limit_are_named_where_turns_end() -> None:
    alert = raised("written_text_never_ends", log_of(40, ended=0.0))
    assert alert.flip == "--set rollout.by=teacher" and "'<|im_end|>'" in alert.text
    short = raised("written_text_never_ends", log_of(40, ended=0.0, longest=50))
    assert short.flip == "--set rollout.max_new_tokens=120" and "limit" in short.meaning
    quiet("written_text_never_ends", log_of(40, ended=0.01))
    texts = log_of(40, ended=0.0, turn_end="", turn_tokens=None)
    unknown("written_text_never_ends", texts, "need not end")
    fresh = log_of(40, ended=0.0, entropy=0.51 * LN_V)
    unknown("written_text_never_ends", fresh, "not learnt to generate")


def test_an_entropy_that_collapses_away_from_the_teacher_is_named() -> None:
    raised("written_entropy_collapsed", log_of(40, entropy=written.COLLAPSED - 0.01))
    quiet("written_entropy_collapsed", log_of(40, entropy=written.COLLAPSED))
    # A student that has learnt short right answers is as sure as its teacher.
    quiet("written_entropy_collapsed", log_of(40, entropy=0.01, divergence=0.1))
    # At temperature 0 all that is drawn is certain, from the first step on.
    quiet("written_entropy_collapsed", log_of(40, {"entropy": 0.0}, entropy=0.0))
    unknown("written_entropy_collapsed", log_of(40, by="teacher"), "does not change")
    broken = log_of(40, entropy=math.nan)
    unknown("written_entropy_collapsed", broken, "not finite")


def test_one_token_over_and_over_is_named_unless_the_corpus_has_it() -> None:
    raised("written_text_repeats", log_of(40, repeated=0.51))
    quiet("written_text_repeats", log_of(40, repeated=0.5))
    quiet("written_text_repeats", log_of(40, repeated=0.8, repeated_in_prompts=0.4))
    raised("written_text_repeats", log_of(40, repeated=0.81, repeated_in_prompts=0.4))


def test_rows_that_are_an_end_alone_are_named() -> None:
    alert = raised("written_text_shrinks", log_of(20, tokens=11, ended=1.0))
    assert "nothing else" in alert.text
    quiet("written_text_shrinks", log_of(40, {"tokens": 16}, tokens=16, ended=1.0))
    # One token is what `rollout.max_new_tokens` asks for.
    quiet("written_text_shrinks", log_of(40, {"tokens": 8, "ended": 0.1}, tokens=8, ended=0.1))


def test_lengths_that_collapse_are_named_unless_the_teacher_agrees() -> None:
    raised("written_text_shrinks", log_of(40, tokens=199))
    quiet("written_text_shrinks", log_of(40, tokens=200))
    quiet("written_text_shrinks", log_of(40, tokens=100, divergence=0.39))
    # A student that ran into the limit at first learns to end.
    quiet("written_text_shrinks", log_of(40, {"ended": 0.5}, tokens=100))


def test_noise_is_named_where_it_is_no_untaught_student() -> None:
    noise = {"entropy": 0.91 * LN_V}
    assert "guesses" in raised("written_text_is_noise", log_of(40, by="teacher", **noise)).meaning
    hot = raised("written_text_is_noise", log_of(40, temperature=3.0, **noise))
    assert hot.flip == "--set rollout.temperature=1"
    quiet("written_text_is_noise", log_of(40, by="teacher", entropy=0.89 * LN_V))
    unknown("written_text_is_noise", log_of(40, **noise), "not have learnt to generate")
