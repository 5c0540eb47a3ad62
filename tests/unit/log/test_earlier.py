"""Lines of earlier versions are read as what is logged in their place now."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.log.events import Judged
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.read import decode_line

EVIDENCE = Path(__file__).parents[3] / "evidence" / "2026-11-27-hang-at-step-zero"


def read(kind: str, **fields: Any) -> Judged:
    line = json.dumps({"v": 1, "seq": 3, "t_s": 2.5, "kind": kind, **fields})
    found = decode_line(line.encode(), "log")
    assert isinstance(found, Judged) and (found.v, found.seq, found.t_s) == (1, 3, 2.5)
    return found


def test_a_check_keeps_its_numbers_also_those_that_are_not_finite() -> None:
    found = read(
        "check",
        id="step_loss",
        level="fail",
        reason="the sum is another",
        numbers={"a": 1.0, "b": None},
        nf={"numbers/b": "nan"},
        cost_s=0.5,
        step=1,
    )
    assert (found.by, found.id, found.level, found.step) == ("check", "step_loss", "fail", 1)
    assert found.text == "the sum is another" and found.cost_s == 0.5
    assert found.numbers["a"] == 1.0 and math.isnan(found.numbers["b"] or 0.0)


@pytest.mark.parametrize(
    ("degree", "level"), [("contradiction", "fail"), ("suspicion", "suspicion"), ("fact", "fact")]
)
def test_an_identity_has_the_level_of_its_degree(degree: str, level: str) -> None:
    found = read(
        "identity", id="weights_move", degree=degree, step=2, text="t", framework="transformers"
    )
    assert (found.by, found.level, found.framework) == ("identity", level, "transformers")


def test_an_alert_keeps_every_number_and_what_it_is_compared_with() -> None:
    found = read(
        "alert",
        id="stalled",
        severity="warning",
        title="no step",
        numbers=[["loss", 5.0, "frequencies 4"], ["loss", 5.0, "ln V 6"], ["s", None, "30"]],
        nf={"numbers/2/1": "+inf"},
        first_step=1,
        last_step=4,
        from_unix_s=10.0,
        to_unix_s=20.0,
        meaning="m",
        flip="--set a.b=1",
    )
    assert found.raises_alert and (found.level, found.text) == ("suspicion", "no step")
    assert found.numbers == {"loss": 5.0, "s": math.inf}
    assert found.compared == {"loss": "frequencies 4; ln V 6", "s": "30"}
    assert (found.first_step, found.step, found.to_unix_s) == (1, 4, 20.0)
    assert (found.meaning, found.flip, found.no_flip) == ("m", "--set a.b=1", "")


def test_the_end_of_an_alert_and_a_number_that_is_not_finite() -> None:
    over = read("alert_cleared", id="stalled", stood_s=3.0)
    assert (over.by, over.level, over.numbers) == ("alert", "pass", {"active_s": 3.0})
    number = read("non_finite", step=7, field="loss", value="nan")
    assert (number.by, number.id, number.text, number.step) == ("number", "loss", "nan", 7)


def test_a_log_that_an_earlier_version_wrote_has_its_alerts() -> None:
    lines = (EVIDENCE / "observed" / "watch.jsonl").read_text().splitlines()
    alerts = [one for one in map(json.loads, lines) if one["kind"] == "alert"]
    view = Follower(RunFolder(EVIDENCE / "observed")).read_all()
    assert alerts and view.alert_count == len(alerts)
    assert {one["title"] for one in alerts} >= {one.text for one in view.alerts.values()}
