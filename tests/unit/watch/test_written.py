"""Rules about text that a model writes: the fault, just below it, and no input."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.log.events import DataReady, Wrote
from engine.watch.rules import written
from tests.support.diagnosing import Log, quiet, raised, unknown
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
}


def log_of(count: int, labelled: int | None = 5000, **late: Any) -> Any:
    """A run of `count` written steps; the second half has the values `late`."""
    log = Log(count=count)
    data = msgspec.structs.replace(example_of(DataReady), labelled_tokens=labelled)
    events: list[Any] = [(6.5, data)]
    for step in range(1, count + 1):
        values = {**HEALTHY, **(late if 2 * step > count else {})}
        events.append((10.1 + 0.5 * step, example_of(Wrote, step=step, **values)))
    log.extra = events
    return log.case()


def test_a_healthy_writer_is_left_alone_and_a_run_without_one_is_not_judged() -> None:
    for rule in (
        "written_text_never_ends",
        "written_entropy_collapsed",
        "written_text_repeats",
        "written_text_shrinks",
        "writer_is_another_model",
    ):
        quiet(rule, log_of(40))
        unknown(rule, Log(count=40).case(), "no model writes rows")
        unknown(rule, log_of(9), "steps with written rows, 9 are done")


def test_rows_that_all_run_into_the_limit_are_named_where_turns_end() -> None:
    alert = raised("written_text_never_ends", log_of(40, ended=0.0))
    assert alert.flip == "--set rollout.max_new_tokens=256"
    quiet("written_text_never_ends", log_of(40, ended=0.01))
    unknown("written_text_never_ends", log_of(40, labelled=None, ended=0.0), "need not end")


def test_an_entropy_that_collapses_is_named() -> None:
    raised("written_entropy_collapsed", log_of(40, entropy=written.COLLAPSED - 0.01))
    quiet("written_entropy_collapsed", log_of(40, entropy=written.COLLAPSED))


def test_one_token_over_and_over_is_named() -> None:
    raised("written_text_repeats", log_of(40, repeated=0.51))
    quiet("written_text_repeats", log_of(40, repeated=0.5))


def test_lengths_that_collapse_are_named() -> None:
    raised("written_text_shrinks", log_of(40, tokens=199))
    quiet("written_text_shrinks", log_of(40, tokens=200))


def test_a_writer_that_is_not_the_model_that_trains_is_named() -> None:
    raised("writer_is_another_model", log_of(40, cross_entropy=1.56))
    quiet("writer_is_another_model", log_of(40, cross_entropy=1.54))
    unknown("writer_is_another_model", log_of(40, by="teacher"), "only a student that writes")
    unknown("writer_is_another_model", log_of(40, temperature=0.7), "only a student that writes")
