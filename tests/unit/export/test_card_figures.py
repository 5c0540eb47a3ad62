"""Figures that a card derives from others."""

from __future__ import annotations

import math

from engine.export.card import _with_perplexity
from engine.export.required_evidence import Metric


def test_perplexity_is_the_exponential_of_a_loss_in_nats_with_its_interval() -> None:
    loss = Metric(name="loss", value=2.0, low=1.5, high=2.5, subject="student")
    rate = Metric(name="pass@1", value=0.5, subject="student")
    first, perplexity, other = _with_perplexity([loss, rate])
    assert (first, other) == (loss, rate)
    assert (perplexity.name, perplexity.subject) == ("perplexity", "student")
    assert perplexity.value == math.exp(2.0)
    assert (perplexity.low, perplexity.high) == (math.exp(1.5), math.exp(2.5))
