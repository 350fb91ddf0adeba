"""Significance of a rise in the number of right answers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def p_value_of_rise(before: Sequence[bool], after: Sequence[bool]) -> float:
    """Return the p-value of McNemar's exact one-sided test (1947) on problems that are answered twice.

    Under the null hypothesis, a problem whose result changed is equally likely to have become right or wrong. The number that became right is
    binomial with probability one half.

    Args:
        before: result of each problem, first time.
        after: result of each problem, second time.

    Returns:
        Probability that at least as many problems become right under the null hypothesis.
    """
    gained = sum(b and not a for a, b in zip(before, after, strict=True))
    lost = sum(a and not b for a, b in zip(before, after, strict=True))
    changed = gained + lost
    return sum(math.comb(changed, k) for k in range(gained, changed + 1)) / 2**changed
