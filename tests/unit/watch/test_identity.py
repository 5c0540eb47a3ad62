"""The rule of the identities of a script that is watched: a contradiction is an alarm, and nothing else is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engine.log.events import Judged, Watched
from engine.watch.rules.rule import Case
from tests.support.diagnosing import START, Log, quiet, raised, unknown
from tests.support.judged import identity_event, numbers_of
from tests.support.run_events import example_of


def case(*identities: Judged, watched: bool = True) -> Case:
    made = Log(count=5).case()
    one: Any = example_of(Watched) if watched else None
    view = dataclasses.replace(made.view, watched=one, identities=identities)
    return dataclasses.replace(made, view=view)


def seen(id: str, degree: str, step: int = 3, **more: Any) -> Judged:
    return identity_event(
        id=id, level=degree, step=step, text=f"{id} of numbers", t_s=float(step), **more
    )


def test_a_contradiction_is_an_alarm_with_its_numbers_and_what_to_do() -> None:
    alert = raised(
        "identity_fails",
        case(
            seen("label_shift", "suspicion"),
            seen("kept_gradients", "fail", 3, numbers={"steps": 2.0, "of": None}),
            seen("weights_move", "fail", 8),
        ),
    )
    assert alert.text == "kept_gradients (and weights_move): kept_gradients of numbers"
    assert [(name, value) for name, value, _ in numbers_of(alert)] == [
        ("step", 3.0),
        ("steps", 2.0),
    ]
    assert (alert.first_step, alert.step) == (3, 8) and alert.from_unix_s >= START
    assert "zero_grad()" in alert.no_flip and "momentum" in alert.meaning


def test_what_to_do_is_said_in_the_words_of_the_framework() -> None:
    alert = raised("identity_fails", case(seen("kept_gradients", "fail", framework="transformers")))
    assert "Trainer" in alert.no_flip


@pytest.mark.parametrize("level", ["suspicion", "fact", "unknown", "pass"])
def test_nothing_else_is_an_alarm(level: str) -> None:
    quiet("identity_fails", case(seen("weights_move", level)))


def test_a_run_of_ours_and_a_script_that_has_not_stepped_are_not_judged() -> None:
    unknown("identity_fails", case(watched=False), "audit")
    unknown("identity_fails", case(), "no identity has been checked yet")
