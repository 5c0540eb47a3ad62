"""The learning rate of each optimizer step: a linear warm-up, then a cosine or a constant.

With w = warm-up steps, N = total_steps and s the step counted from 0:

    s <  w            peak * (s + 1) / w            never 0; s = w - 1 is the first step at the peak
    s >= w, cosine    peak * (1 - (1 - final_ratio) * (1 - cos(pi x)) / 2),   x = (s + 1 - w) / (N - w)
    s >= w, constant  peak

With a cosine, the last step, s = N - 1, has x = 1, so its learning rate is exactly peak * final_ratio, which later
steps keep. The learning rate is a pure function of the step, so a resumed run needs only its step number.
"""

from __future__ import annotations

import math

from engine.spec import TrainSection


def learning_rate(step: int, train: TrainSection) -> float:
    """Return the learning rate of `step`, counted from 0.

    `train.final_lr_ratio` is the last learning rate divided by the peak; the constant schedule ignores it.
    """
    peak, warmup_steps, total_steps = train.lr, train.warmup, train.steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if train.schedule == "constant":
        return peak
    if step >= total_steps - 1:
        return peak * train.final_lr_ratio  # exact, where the formula would round
    progress = (step + 1 - warmup_steps) / (total_steps - warmup_steps)
    return peak * (1 - (1 - train.final_lr_ratio) * (1 - math.cos(math.pi * progress)) / 2)
