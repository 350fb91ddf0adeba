"""Whether more answers are right than before, beyond chance."""

from __future__ import annotations

import math
from collections.abc import Sequence


def p_value_of_rise(before: Sequence[bool], after: Sequence[bool]) -> float:
    """The exact one-sided test of McNemar (1947) on the same problems, examined twice.

    Where nothing has changed, a problem that is right once and wrong once is as likely to have become right as wrong: the number that became
    right is binomial, of the number that changed, with probability one half.

    Returns:
        The probability of as many problems becoming right, or more, if nothing had changed.
    """
    gained = sum(b and not a for a, b in zip(before, after, strict=True))
    lost = sum(a and not b for a, b in zip(before, after, strict=True))
    changed = gained + lost
    return sum(math.comb(changed, k) for k in range(gained, changed + 1)) / 2**changed
