"""The scale of a few values that share one: what a quantizer searches for.

K values x with weights w are to be written as integers q with one scale s, and a minimum m in some
types, so that

    E = sum w (s q + m - x)^2,     w = |x| + 2 mean|x|,

is least. The weights let large values, which move an output most, count a few times as much as
small ones. With q given, s and m are a linear least-squares problem of five sums; with s and m
given, the best q is the nearest integer. Neither gives the joint optimum, so each of a few
candidate ranges (the whole range of x, and ones a little narrower and wider) is rounded, solved and
scored, and from the best one the two steps alternate. E never grows on the way.

Scores leave out the constant part of E, sum w x^2. x is shifted by its minimum first, so that in
float32 the sums do not cancel.

Values lie in the first dimension, (K, G): each sum then adds whole rows, which is what vector units
and GPUs are quick at. Every operation is rounded once and in a fixed order, so that a processor and
a GPU choose the same candidate. A group that no candidate fits (all zero, or too small for float32)
keeps the scale of its range: comparisons with NaN are false.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: K values of a group, G groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    candidates: int
    polish: int
    """Alternations of rounding and solving after the candidates."""
    rounds: int
    """Alternations between the scales of sub-blocks and the block's own (types of 256)."""

    def extra_steps(self, fewest: float, most: float) -> list[float]:
        """The candidates, evenly from `fewest` to `most`; a single one is the range itself."""
        if self.candidates == 1:
            return [0.0]
        step = (most - fewest) / (self.candidates - 1)
        return [fewest + index * step for index in range(self.candidates)]


EFFORTS = (
    Effort(candidates=1, polish=0, rounds=0),
    Effort(candidates=9, polish=2, rounds=2),
    Effort(candidates=21, polish=3, rounds=6),
)


def weights(x_KG: Tensor) -> Tensor:
    """How much an error of each value counts: |x| + 2 mean|x|."""
    size_KG = x_KG.abs()
    # The mean and not the root mean square: torch's square roots differ between devices.
    return size_KG + total(size_KG) * (2 / len(x_KG))


def total(x: Tensor) -> Tensor:
    """The sum over the first dimension, a power of two, by adding its halves again and again.

    Every device adds in this one order, which `sum` does not promise.
    """
    half = len(x) // 2
    x = x[:half] + x[half:]
    while half > 1:
        half //= 2
        x = x[:half].add_(x[half:])
    return x[0]


def exact_quotient(x: Tensor, count: int) -> Tensor:
    # By a tensor: on a GPU, a number as divisor becomes a product with its rounded inverse.
    return x / torch.full((), float(count), device=x.device)


def fit_affine(
    x_KG: Tensor,
    w_KG: Tensor,
    levels: int,
    extra: list[float],
    polish: int,
    *,
    low_below_zero: bool,
) -> tuple[Tensor, Tensor]:
    """(s, m) for x = s q + m with q in 0..levels, s >= 0; m <= 0 if `low_below_zero`."""
    low_G, high_G = torch.aminmax(x_KG, dim=0)
    if low_below_zero:
        low_G.clamp_(max=0)
    y_KG = x_KG - low_G
    span_G = high_G - low_G
    w_G, y_G = total(w_KG), total(w_KG * y_KG)
    scale_G, shift_G = exact_quotient(span_G, levels), torch.zeros_like(low_G)
    score_G = torch.full_like(low_G, torch.inf)
    for step in range(len(extra) + polish):
        q_KG = (
            y_KG * ((levels + extra[step]) / span_G)
            if step < len(extra)
            else (y_KG - shift_G).div_(scale_G)
        )
        q_KG.round_().clamp_(0, levels)
        wq_KG = q_KG * w_KG
        q_G, q2_G, qy_G = total(wq_KG), total(wq_KG * q_KG), total(wq_KG * y_KG)
        determinant_G = w_G * q2_G - q_G * q_G
        # Nearly equal codes say nothing about the minimum: it then stays where it was.
        solved = determinant_G > 1e-5 * w_G * q2_G
        m_G = torch.where(solved, (q2_G * y_G - q_G * qy_G) / determinant_G, 0.0)
        if low_below_zero:
            m_G = torch.minimum(m_G, -low_G)
        s_G = (qy_G - m_G * q_G) / q2_G
        new_G = s_G * (s_G * q2_G + 2 * (m_G * q_G - qy_G)) + m_G * (m_G * w_G - 2 * y_G)
        better = (new_G < score_G) & (s_G > 0)
        score_G = torch.where(better, new_G, score_G)
        scale_G = torch.where(better, s_G, scale_G)
        shift_G = torch.where(better, m_G, shift_G)
    return scale_G, low_G + shift_G


def fit_symmetric(
    x_KG: Tensor, w_KG: Tensor, levels: int, extra: list[float], polish: int
) -> Tensor:
    """s, of either sign, for x = s q with q in -levels..levels-1.

    The value of largest size becomes -levels, which has no counterpart: its sign is that of -s.
    """
    extreme_G = extreme(x_KG)
    scale_G = exact_quotient(extreme_G, -levels)
    score_G = torch.zeros_like(extreme_G)
    for step in range(len(extra) + polish):
        inverse_G = (levels + extra[step]) / -extreme_G if step < len(extra) else 1 / scale_G
        q_KG = (x_KG * inverse_G).round_().clamp_(-levels, levels - 1)
        wq_KG = q_KG * w_KG
        q2_G, qx_G = total(wq_KG * q_KG), total(wq_KG * x_KG)
        s_G = qx_G / q2_G
        new_G = s_G * qx_G  # what the fit takes off sum w x^2
        better = new_G > score_G
        score_G = torch.where(better, new_G, score_G)
        scale_G = torch.where(better, s_G, scale_G)
    return scale_G


def extreme(x_KG: Tensor) -> Tensor:
    """The first value of largest size, with its sign."""
    return x_KG.gather(0, x_KG.abs().argmax(0, keepdim=True))[0]
