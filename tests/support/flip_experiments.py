"""A simulated experiment: pairs are drawn with noise and judged as they arrive."""

from __future__ import annotations

import math

import numpy as np

from engine.flips.judge import Judgement, judge
from engine.flips.pair import Pair
from engine.flips.plan import Plan
from tests.support.flip_pairs import outcome, pair, plan


def judged(plan: Plan, pairs: list[Pair], ended: str = "") -> Judgement:
    judgement = judge(plan, pairs, ended)
    assert judgement is not None
    return judgement


class Machine:
    """Run medians with the noise of a real host: each process has its own speed (1.5 %), steps are
    autocorrelated with rare long ones, and the machine drifts by 5 % over the experiment."""

    def __init__(self, seed: int, drift: str, process_deviation: float = 0.015) -> None:
        self.random = np.random.default_rng(seed)
        self.drift, self.done, self.walk = drift, 0, 0.0
        self.process_deviation = process_deviation

    def run(self, log_effect: float) -> float:
        random, steps = self.random, 20
        noise = np.empty(steps)
        noise[0] = random.normal(0, 0.01)
        for i in range(1, steps):
            noise[i] = 0.5 * noise[i - 1] + random.normal(0, 0.01)
        spikes = (random.random(steps) < 0.02) * random.exponential(1.0, steps)
        self.walk += random.normal(0, 0.005)
        drift = 0.05 * self.done / 40 if self.drift == "ramp" else self.walk
        self.done += 1
        level = log_effect + drift + random.normal(0, self.process_deviation)
        return float(np.median(np.exp(level + noise + spikes)))


def experiment(
    seed: int, ratio: float, drift: str, *, process_deviation: float = 0.015
) -> tuple[str, int]:
    """Simulate a whole flip as the engine runs it: the plan's coins, and a look after every pair."""
    machine = Machine(seed, drift, process_deviation)
    registered = plan(order_seed=seed)
    pairs: list[Pair] = []
    for number, b_first in enumerate(registered.order(), start=1):
        values = {b: machine.run(math.log(ratio) * b) for b in (b_first, not b_first)}
        a, b = outcome("A", values[False]), outcome("B", values[True])
        pairs.append(pair(number, a, b, b_first=b_first))
        if (said := judge(registered, pairs)) is not None:
            return said.verdict, number
    return judged(registered, pairs, "no more pairs").verdict, len(pairs)
