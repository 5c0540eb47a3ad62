"""pass@k: the probability that at least one of k programs for a problem is right.

The unbiased estimate from n programs of which c are right (Chen et al. 2021, arXiv:2107.03374, eq. 1):

    pass@k = 1 - C(n - c, k) / C(n, k)

is the fraction of the k-subsets of the n programs that contain a right one. Picking k of the n once, or 1 -
(1 - c/n)^k, is noisier or biased. The figure of a set is the mean over its problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


# contract: eval-no-fake-pass-v1
def pass_at_k(count: int, right: int, k: int) -> float:
    """pass@k of one problem: `right` of `count` programs are right; k is at most `count`."""
    assert 0 <= right <= count and 1 <= k <= count
    # Computed on integers and rounded once.
    return 1 - math.comb(count - right, k) / math.comb(count, k)


# contract: eval-no-fake-pass-v1
def mean_pass_at_k(results: Sequence[tuple[int, int]], k: int) -> float | None:
    """Mean pass@k over pairs (count, right), one for each problem. None without a problem, and when a problem
    has fewer than k programs, because then pass@k is undefined."""
    if not results or any(count < k for count, _ in results):
        return None
    return sum(pass_at_k(count, right, k) for count, right in results) / len(results)
