"""The table of automatic choices: every such setting has one row, and a row says what its choice depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.decision import SET_BY_USER, Decision, decide
from engine.errors import BadInput
from engine.plan.knobs import KNOBS, SETTINGS, Knob
from engine.plan.memory import MemoryPlan
from engine.plan.run_plan import RunFacts
from engine.spec import KEYS, RunSpec, options

BY_NUMBER = {"loss.chunk_rows", "compute.threads"}
"""Settings that are numbers: 0 asks the engine to choose."""


def test_every_setting_that_may_be_auto_is_a_row_and_no_other() -> None:
    automatic = {option.key for option in options() if "auto" in (option.allowed or ())}
    assert automatic | BY_NUMBER == KNOBS.keys()
    assert all(KNOBS[key].option.doc for key in KNOBS)


@pytest.mark.parametrize("key", [key for key in KNOBS if key.split(".")[0] not in ("compute",)])
def test_the_facts_of_a_choice_are_known_of_a_run_or_computed_for_it(key: str) -> None:
    """None is a name that nobody gives: of a run, of its memory, or in bytes and rows for one decision."""
    known = {name for kind in (RunFacts, MemoryPlan) for name in dir(kind)}
    known |= {"packed", "checkpointing", "quantised_blocks", "facts", "compute_device", *KEYS}
    names = SETTINGS | dict(KNOBS[key].known_as)
    facts = {names.get(fact, fact) for fact in KNOBS[key].facts}
    assert {f for f in facts if not f.endswith(("_bytes", "_rows"))} <= known


@dataclass
class Known:
    spec: RunSpec
    colour: str


def test_a_row_is_all_that_a_new_choice_needs() -> None:
    def choose(wanted: str, *, hue: str, size: int) -> Decision:
        return decide(
            "student.graphs",
            wanted,
            "on" if hue == "red" and size > 1 else "off",
            {"on": f"it is {hue}", "off": "it is pale"},
            against={"on": "too pale", "off": "too slow"},
            refused={"on": ("a colour", hue, "paint it")} if hue == "none" else None,
        )

    knob = Knob("student.graphs", choose, (("hue", "colour"),))
    assert knob.facts == {"hue", "size"}
    found = knob.decide(Known(RunSpec(), "red"), size=2)
    assert (found.choice, found.reason, found.overridden) == ("on", "it is red", False)
    assert found.rejected == (("off", "too slow"),) and found.override.endswith("graphs=off")
    assert found.impossible == ()
    assert knob.decide(Known(RunSpec(), "none"), size=2).impossible == ("on",)


def test_the_override_names_a_value_that_is_possible_where_there_is_one() -> None:
    rejected = (("a", "none here"), ("b", "slower"))
    found = Decision(knob="x.y", choice="c", reason="-", rejected=rejected, impossible=("a",))
    assert found.override == "--set x.y=b"
    assert replace(found, rejected=rejected[:1]).override == "--set x.y=a"


def test_what_the_user_set_is_taken_or_refused_and_never_replaced() -> None:
    def settle(wanted: str, **how: Any) -> Decision:
        against = {"a": "not a", "b": "not b"}
        return decide("s.k", wanted, "a", {"a": "why a", "b": "why b"}, against=against, **how)

    assert settle("auto").reason == "why a" and not settle("auto").overridden
    assert settle("b").reason == SET_BY_USER and settle("b").overridden
    assert settle("b", explained=True).reason == "why b"
    refused = {"b": ("something", "nothing", "do so")}
    assert settle("a", refused=refused).choice == "a"
    with pytest.raises(BadInput, match=r"s\.k: b — expected something, found nothing") as caught:
        settle("b", refused=refused)
    assert caught.value.hint == "do so"
