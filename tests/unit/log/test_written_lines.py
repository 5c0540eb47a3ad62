"""The pane of samples begins with what a model wrote for training."""

from __future__ import annotations

from engine.log.events import Wrote
from engine.log.text import WRITTEN, event_text, sample_lines
from engine.log.view import RunView
from tests.support.run_events import example_of, fold_events


def test_the_first_and_the_newest_texts_are_shown_with_their_numbers() -> None:
    events = [
        example_of(
            Wrote,
            step=step,
            by="student",
            rows=4,
            tokens=100 * step,
            shortest=3,
            longest=9,
            ended=0.5,
            repeated=0.1,
            entropy=1.5,
            divergence=0.25,
            prompt="a\n",
            sample=f"text {step}",
        )
        for step in range(1, 41)
    ]
    lines = sample_lines(fold_events(RunView(), "events", events))
    assert lines[0] == (
        "step 1: the student wrote 100 tokens in 4 rows of 3 to 9, 50% ended, 10% repeated; entropy 1.500, "
        "divergence 0.250 nats"
    )
    assert lines[WRITTEN - 1].startswith("step 40: the student wrote 4,000 tokens")
    assert lines[WRITTEN:] == ['  "a\\n"', '  "text 40"', ""]
    assert event_text(events[0]) == lines[0] + '; "a\\n" -> "text 1"'
