"""Curves of trainings with one fault each, and of healthy ones that look like faults; seeds are fixed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from tests.support.foreign_logs import BEGAN_S, Point

COUNT = 600


class Fault(NamedTuple):
    """A training with one fault."""

    points: list[Point]
    id: str
    """Of the alert that names it."""
    step: int
    """The step at which it begins."""
    within: int = 12
    """By how many steps the one that is named may differ."""


def drawn(
    loss: Callable[[int, random.Random], float],
    *,
    seed: int = 0,
    count: int = COUNT,
    lr: Callable[[int], float] = lambda step: 1e-3,
    held_out: Callable[[int, random.Random], float | None] | None = None,
    grad_norm: Callable[[int], float] = lambda step: 1.0,
    step_s: Callable[[int], float] = lambda step: 0.5,
    every: int = 50,
) -> list[Point]:
    noise, now_s, points = random.Random(seed), BEGAN_S, []
    for step in range(1, count + 1):
        now_s += step_s(step) * (1 + 0.05 * noise.random())
        rates = (lr(step), grad_norm(step) * math.exp(noise.gauss(0, 0.1)))
        value = held_out(step, noise) if held_out and step % every == 0 else None
        points.append(
            Point(
                step,
                loss(step, noise),
                *rates,
                value,
                step_s(step) * (1 + 0.05 * noise.random()),
                now_s,
            )
        )
    return points


def learns(
    step: int, noise: random.Random, start: float = 4.5, end: float = 1.5, within: float = 80
) -> float:
    return (end + (start - end) * math.exp(-step / within)) * math.exp(noise.gauss(0, 0.02))


def _eval(step: int, noise: random.Random) -> float:
    return 1.65 + 3 * math.exp(-step / 80) + noise.gauss(0, 0.01)


def _after(
    step: int, at: int, then: Callable[[int, random.Random], float]
) -> Callable[[int, random.Random], float]:
    return lambda now, noise: then(now, noise) if now >= at else learns(now, noise)


def faults() -> dict[str, Fault]:
    nan, inf = math.nan, math.inf
    return {
        "nan": Fault(drawn(_after(0, 200, lambda s, n: nan)), "non_finite", 200, 0),
        "inf": Fault(drawn(_after(0, 320, lambda s, n: inf)), "non_finite", 320, 0),
        "nan_recovers": Fault(
            drawn(lambda s, n: nan if 150 <= s < 160 else learns(s, n)), "number loss", 150, 0
        ),
        "one_nan": Fault(
            drawn(lambda s, n: nan if s == 77 else learns(s, n)), "number loss", 77, 0
        ),
        "diverges": Fault(
            drawn(_after(0, 400, lambda s, n: learns(s, n) * min(8.0, 1.1 ** (s - 399)))),
            "loss_diverged",
            400,
        ),
        "diverges_at_once": Fault(
            drawn(_after(0, 300, lambda s, n: 7.5 + n.gauss(0, 0.1))), "loss_diverged", 300
        ),
        "diverges_half": Fault(
            drawn(_after(0, 300, lambda s, n: 3.6 + n.gauss(0, 0.05))), "loss_diverged", 300
        ),
        "rises_at_the_start": Fault(
            drawn(lambda s, n: 2.3 + 6 * min(1.0, (s - 1) / 8) + n.gauss(0, 0.1)),
            "loss_rose_for_good",
            2,
            20,
        ),
        "guesses": Fault(
            drawn(lambda s, n: math.log(50257) + n.gauss(0, 0.01)), "loss_flat_at_guessing", 1, 0
        ),
        "reference_is_the_policy": Fault(
            drawn(lambda s, n: 0.6931471824645996), "loss_is_constant", 1, 0
        ),
        "rate_ends_early": Fault(
            drawn(learns, lr=lambda s: max(0.0, 1e-3 * (1 - s / 300))), "rate_is_dead", 300, 1
        ),
        "spike": Fault(
            drawn(lambda s, n: learns(s, n) + (5.0 if s == 350 else 0.0)), "loss_spike", 350, 0
        ),
        "spike_decays": Fault(
            drawn(lambda s, n: learns(s, n) + (4 * math.exp(-(s - 420) / 8) if s >= 420 else 0.0)),
            "loss_spike",
            420,
            0,
        ),
        "overfits": Fault(
            drawn(
                lambda s, n: learns(s, n, end=0.2, within=150),
                held_out=lambda s, n: (
                    1.6 + 3 * math.exp(-s / 60) + max(0, s - 250) / 400 + n.gauss(0, 0.01)
                ),
            ),
            *("heldout_diverging", 250, 50),
        ),
        "leaks": Fault(
            drawn(learns, held_out=lambda s, n: 0.3 * learns(s, n)), "heldout_below_training", 50, 0
        ),
        "slow_steps": Fault(
            drawn(learns, step_s=lambda s: 4.0 if s % 10 == 0 else 0.4), "slow_steps_recur", 10, 10
        ),
        "slow_for_a_while": Fault(
            drawn(learns, step_s=lambda s: 5.0 if 200 <= s < 300 else 0.4),
            *("slow_steps_recur", 200, 0),
        ),
        "explodes_and_spikes": Fault(
            drawn(
                lambda s, n: (
                    1.3
                    if s == 1
                    else (25 * math.exp(-((s - 2) % 280) / 60) + 8) * math.exp(n.gauss(0, 0.15))
                )
            ),
            *("loss_rose_for_good", 2, 20),
        ),
        "slows_down": Fault(
            drawn(learns, step_s=lambda s: 0.4 if s < 300 else 1.0), "step_time_drift", 300, 120
        ),
        "stalls": Fault(
            drawn(learns, step_s=lambda s: 2500.0 if s == 333 else 0.5), "gap_in_time", 333, 0
        ),
        "gradient_explodes": Fault(
            drawn(learns, grad_norm=lambda s: 1.0 if s < 550 else 400.0),
            "gradient_exploding",
            550,
            60,
        ),
        "gradient_is_zero": Fault(
            drawn(
                _after(0, 300, lambda s, n: 1.57 + n.gauss(0, 0.01)),
                grad_norm=lambda s: 0.0 if s > 300 else 1.0,
            ),
            *("gradient_zero", 301, 60),
        ),
    }


def _warm_restarts(step: int) -> float:
    return 1e-3 * (1 + math.cos(math.pi * (step % 150) / 150)) / 2


def _cosine(step: int) -> float:
    return 1e-3 * min(step / 30, (1 + math.cos(math.pi * step / COUNT)) / 2)


def healthy() -> dict[str, list[Point]]:
    return {
        "constant_rate": drawn(learns, held_out=_eval),
        "cosine_to_0": drawn(learns, lr=_cosine, held_out=_eval),
        "warm_restarts": drawn(
            lambda s, n: learns(s, n) + 0.8 * math.exp(-(s % 150) / 25) * (s >= 150),
            lr=_warm_restarts,
        ),
        "curriculum": drawn(
            lambda s, n: learns(
                s % 200,
                n,
                start=3.0 + 0.3 * (s // 200) if s > 199 else 5.0,
                end=1.6 + 0.4 * (s // 200),
            )
        ),
        "small_noisy_set": drawn(
            learns, held_out=lambda s, n: _eval(s, n) + n.gauss(0, 0.15), every=10
        ),
        "tiny_batches": drawn(lambda s, n: learns(s, n) * math.exp(n.gauss(0, 0.35))),
        "batch_of_one": drawn(
            lambda s, n: learns(s, n, end=0.7) * n.expovariate(1.0) + 0.01, seed=3
        ),
        "diffusion": drawn(
            lambda s, n: learns(s, n, start=1.0, end=0.05, within=30) * math.exp(n.gauss(0, 0.5))
        ),
        "lbfgs": drawn(lambda s, n: 2.0 * math.exp(-s / 12) + 1e-8 * (1 + n.random())),
        "memorises_on_purpose": drawn(lambda s, n: learns(s, n, end=1e-4, within=60)),
        "fine_tuning": drawn(lambda s, n: learns(s, n, start=1.9, end=1.7)),
        "flat_from_the_start": drawn(lambda s, n: 2.31 + n.gauss(0, 0.05)),
        "plateau_then_falls": drawn(
            lambda s, n: 6.9 + n.gauss(0, 0.02) if s < 300 else learns(s - 300, n, start=6.9)
        ),
        "double_descent": drawn(
            lambda s, n: learns(s, n, end=0.1, within=100),
            held_out=lambda s, n: (
                1.6 + 3 * math.exp(-s / 60) + 0.3 * math.exp(-(((s - 250) / 80) ** 2)) - s / 900
            ),
        ),
        "dropout": drawn(learns, held_out=lambda s, n: 0.8 * learns(s, n)),
        "slow_evaluations": drawn(
            learns, held_out=_eval, step_s=lambda s: 40.0 if s % 50 == 0 else 0.5
        ),
        "rare_checkpoints": drawn(learns, step_s=lambda s: 8.0 if s % 200 == 0 else 0.5),
        "uneven_lengths": drawn(learns, step_s=lambda s: 0.3 + 0.4 * ((s * 7919) % 100) / 100),
        "exponential_decay": drawn(learns, lr=lambda s: 1e-3 * 0.99**s),
        "one_cycle": drawn(
            learns, lr=lambda s: 1e-3 * (s / 200 if s < 200 else max(1e-5, 1 - (s - 200) / 400))
        ),
        "full_batch_converged": drawn(lambda s, n: 0.3 + 2 * math.exp(-s / 5)),
        "losses_of_grpo": drawn(lambda s, n: 0.0),
        "short": drawn(learns, count=25),
        "bad_batch_at_the_start": drawn(lambda s, n: 60.0 if s == 2 else 2.31 + n.gauss(0, 0.05)),
        "starts_low": drawn(lambda s, n: 0.9 + n.gauss(0, 0.03) + 0.2 * math.exp(-s / 20)),
    }


def named(kind: str) -> list[dict[str, float]]:
    """Return the rows of a table of a training whose loss may rise as intended: `gan`, `policy` or `actor_critic`."""
    noise, rows = random.Random(5), []
    for step in range(1, COUNT + 1):
        row: dict[str, float] = {"step": step}
        if kind == "gan":
            row |= {
                "loss": 1.4 + step / 300 + noise.gauss(0, 0.2),
                "loss_d": 0.69 + noise.gauss(0, 0.05),
            }
            row |= {"loss_g": 1.0 + step / 300 + noise.gauss(0, 0.2)}
        elif kind == "policy":
            row |= {
                "loss": 0.1 + 0.004 * step * noise.random(),
                "reward": step / 10,
                "entropy": 2.0 - step / 500,
            }
        else:
            row |= {
                "loss": abs(noise.gauss(0, 1)) + step / 50,
                "critic_loss": step / 40,
                "episode_return": step,
            }
        rows.append(row)
    return rows
