"""pass@k: the chance that at least one of k programs for a problem is right.

From n programs of which c are right, without bias (Chen et al. 2021, arXiv:2107.03374, eq. 1):

    pass@k = 1 - C(n - c, k) / C(n, k)

the share of the ways to pick k of the n that have a right one among them. Picking k of the n once, or
1 - (1 - c/n)^k, is noisier or biased. The figure of a set is the mean over its problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


# contract: eval-no-fake-pass-v1
def pass_at_k(count: int, right: int, k: int) -> float:
    """Of one problem: `right` of `count` programs are right; k is at most `count`."""
    assert 0 <= right <= count and 1 <= k <= count
    # Of integers, rounded once.
    return 1 - math.comb(count - right, k) / math.comb(count, k)


# contract: eval-no-fake-pass-v1
def mean_pass_at_k(results: Sequence[tuple[int, int]], k: int) -> float | None:
    """Of pairs (count, right), one for each problem; None without a problem, and where one has fewer
    than k programs: neither is a share of nothing.
    """
    if not results or any(count < k for count, _ in results):
        return None
    return sum(pass_at_k(count, right, k) for count, right in results) / len(results)
