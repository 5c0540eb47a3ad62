"""The second level of a block of 256: scales of sub-blocks as small integers times one half.

    Q4_K, Q5_K   s_j = d sc_j, m_j = -dmin mn_j    sc, mn in 0..63, 8 sub-blocks of 32
    Q6_K         s_j = d sc_j                      sc in -128..127, 16 sub-blocks of 16

Rounding s_j to a multiple of d moves it by up to d / 2, and the best q, m_j and d are other ones
then. So the parts are chosen in turn, each best for the others as they stand: the codes q; for each
sub-block the better of the two integers beside its best scale, with the best minimum for it; then d
and dmin, which are a least-squares problem over the whole block. A round that does not lower the
error of a block leaves that block as it was. d and dmin are rounded to half before anything is
divided by them.

Blocks lie in the last dimension: what a block has one of applies to all its parts as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quant.fit import exact_quotient, extreme, total

# Shapes: N blocks, S sub-blocks of a block, K values of a sub-block

HALF_MAX = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """Blocks as chosen so far. d and dmin are halves, scales, minima and codes whole numbers, all
    kept as float32."""

    d_N: Tensor
    dmin_N: Tensor | None
    scale_SN: Tensor
    min_SN: Tensor | None
    q_KSN: Tensor
    error_N: Tensor


def round_to_half(x: Tensor) -> Tensor:
    """The nearest half; never -0, which would make zeros of -0."""
    return x.clamp(-HALF_MAX, HALF_MAX).half().float() + 0.0


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b != 0, a / b, 0.0)


def share_affine(
    x_KSN: Tensor, w_KSN: Tensor, scale_SN: Tensor, low_SN: Tensor, levels: int, rounds: int
) -> Shared:
    """Blocks of Q4_K or Q5_K for sub-blocks whose best fit is x = scale q + low, low <= 0."""

    def encoded(d_N: Tensor, dmin_N: Tensor, scale_SN: Tensor, min_SN: Tensor) -> Shared:
        step_SN, drop_SN = d_N * scale_SN, dmin_N * min_SN
        q_KSN = ratio(x_KSN + drop_SN, step_SN).round_().clamp_(0, levels)
        rest_KSN = (q_KSN * step_SN).sub_(drop_SN).sub_(x_KSN)
        return Shared(
            d_N=d_N,
            dmin_N=dmin_N,
            scale_SN=scale_SN,
            min_SN=min_SN,
            q_KSN=q_KSN,
            error_N=total(total(rest_KSN.square_().mul_(w_KSN))),
        )

    def six_bits(x_SN: Tensor) -> Tensor:
        return x_SN.round().clamp_(0, 63)

    d_N, dmin_N = _unit(scale_SN.amax(0), 63), _unit(-low_SN.amin(0), 63)
    best = encoded(d_N, dmin_N, six_bits(ratio(scale_SN, d_N)), six_bits(ratio(-low_SN, dmin_N)))
    w_SN, x_SN = total(w_KSN), total(w_KSN * x_KSN)
    for _ in range(rounds):
        assert best.dmin_N is not None
        wq_KSN = best.q_KSN * w_KSN
        q_SN, q2_SN, qx_SN = total(wq_KSN), total(wq_KSN * best.q_KSN), total(wq_KSN * x_KSN)
        exact_SN = ratio(w_SN * qx_SN - x_SN * q_SN, w_SN * q2_SN - q_SN * q_SN)
        below_SN = ratio(exact_SN, best.d_N).floor_().clamp_(0, 62)
        choices = []
        for sc_SN in (below_SN, below_SN + 1):
            step_SN = sc_SN * best.d_N
            mn_SN = six_bits(ratio(ratio(step_SN * q_SN - x_SN, w_SN), best.dmin_N))
            drop_SN = mn_SN * best.dmin_N
            error_SN = step_SN * (step_SN * q2_SN - 2 * (drop_SN * q_SN + qx_SN))
            error_SN += drop_SN * (drop_SN * w_SN + 2 * x_SN)
            choices.append((error_SN, sc_SN, mn_SN))
        (error_SN, sc_SN, mn_SN), (upper_error_SN, upper_sc_SN, upper_mn_SN) = choices
        up_SN = upper_error_SN < error_SN
        sc_SN = torch.where(up_SN, upper_sc_SN, sc_SN)
        mn_SN = torch.where(up_SN, upper_mn_SN, mn_SN)
        # Least squares:  a d - c dmin = p,  -c d + b dmin = -r.
        a_N, b_N = total(sc_SN * sc_SN * q2_SN), total(mn_SN * mn_SN * w_SN)
        c_N, p_N = total(sc_SN * mn_SN * q_SN), total(sc_SN * qx_SN)
        r_N = total(mn_SN * x_SN)
        determinant_N = a_N * b_N - c_N * c_N
        solved_N = determinant_N > 1e-5 * a_N * b_N
        dmin_N = torch.where(solved_N, (c_N * p_N - a_N * r_N) / determinant_N, best.dmin_N)
        dmin_N = round_to_half(dmin_N.clamp(min=0))
        d_N = round_to_half(ratio(p_N + c_N * dmin_N, a_N).clamp(min=0))
        best = _better(best, encoded(d_N, dmin_N, sc_SN, mn_SN))
    return best


def share_symmetric(
    x_KSN: Tensor, w_KSN: Tensor, scale_SN: Tensor, levels: int, rounds: int
) -> Shared:
    """Blocks of Q6_K for sub-blocks whose best fit is x = scale q, q in -levels..levels-1."""

    def encoded(d_N: Tensor, scale_SN: Tensor) -> Shared:
        step_SN = d_N * scale_SN
        q_KSN = ratio(x_KSN, step_SN).round_().clamp_(-levels, levels - 1)
        rest_KSN = (q_KSN * step_SN).sub_(x_KSN)
        return Shared(
            d_N=d_N,
            dmin_N=None,
            scale_SN=scale_SN,
            min_SN=None,
            q_KSN=q_KSN,
            error_N=total(total(rest_KSN.square_().mul_(w_KSN))),
        )

    def eight_bits(x_SN: Tensor) -> Tensor:
        return x_SN.round().clamp_(-128, 127)

    # The scale of largest size becomes -128: its sign is free, and 127 is less.
    d_N = _unit(extreme(scale_SN), -128)
    best = encoded(d_N, eight_bits(ratio(scale_SN, d_N)))
    for _ in range(rounds):
        wq_KSN = best.q_KSN * w_KSN
        q2_SN, qx_SN = total(wq_KSN * best.q_KSN), total(wq_KSN * x_KSN)
        sc_SN = eight_bits(ratio(ratio(qx_SN, q2_SN), best.d_N))
        d_N = round_to_half(ratio(total(sc_SN * qx_SN), total(sc_SN * sc_SN * q2_SN)))
        best = _better(best, encoded(d_N, sc_SN))
    return best


def _unit(largest_N: Tensor, count: int) -> Tensor:
    """largest / count as a half; below 6e-5, where halves are coarse, of no smaller size, so that
    `largest` is not cut off."""
    unit_N = exact_quotient(largest_N, count).clamp(-HALF_MAX, HALF_MAX).half()
    short_N = (unit_N.float() * count).abs() < largest_N.abs() * (1 - 2**-10)
    # The next half of larger size has the next bit pattern, whatever the sign.
    next_N = (unit_N.view(torch.int16) + 1).view(torch.float16)
    return torch.where(short_N & (unit_N.abs() < HALF_MAX), next_N, unit_N).float() + 0.0


def _better(old: Shared, new: Shared) -> Shared:
    """Block by block, the one of less error."""
    less_N = new.error_N < old.error_N

    def pick(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else torch.where(less_N, a, b)

    return Shared(
        d_N=torch.where(less_N, new.d_N, old.d_N),
        dmin_N=pick(new.dmin_N, old.dmin_N),
        scale_SN=torch.where(less_N, new.scale_SN, old.scale_SN),
        min_SN=pick(new.min_SN, old.min_SN),
        q_KSN=torch.where(less_N, new.q_KSN, old.q_KSN),
        error_N=torch.where(less_N, new.error_N, old.error_N),
    )
