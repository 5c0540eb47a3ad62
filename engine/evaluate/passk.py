"""pass@k: the probability that at least one of k programs for a problem is right.

The unbiased estimate from n programs of which c are right (Chen et al. 2021, arXiv:2107.03374, eq. 1):

    pass@k = 1 - C(n - c, k) / C(n, k)

is the fraction of the k-subsets of the n programs that contain a right program. Drawing k of the n programs
once is noisier, and 1 - (1 - c/n)^k is biased. The pass@k of a benchmark is the mean over its problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


# contract: eval-no-fake-pass-v1
def pass_at_k(count: int, right: int, k: int) -> float:
    """Return pass@k of one problem with `right` right programs of `count`; k is at most `count`."""
    assert 0 <= right <= count and 1 <= k <= count
    # Exact in integers; only the final division rounds.
    return 1 - math.comb(count - right, k) / math.comb(count, k)


# contract: eval-no-fake-pass-v1
def mean_pass_at_k(results: Sequence[tuple[int, int]], k: int) -> float | None:
    """Return the mean pass@k over pairs (count, right), one for each problem. None if there is no problem, or if
    a problem has fewer than k programs: pass@k is then undefined."""
    if not results or any(count < k for count, _ in results):
        return None
    return sum(pass_at_k(count, right, k) for count, right in results) / len(results)
