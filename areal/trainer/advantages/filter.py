"""Dynamic sampling: which groups a policy can learn from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from areal.trainer.advantages.groups import Groups


@dataclass(frozen=True)
class FilterStats:
    """What became of the groups that have members, over all ranks that share them; the same on each.

    Every dropped group is counted for one reason, the first that holds.

    Attributes:
        groups, sequences: before the filter. kept_groups, kept_sequences: after it.
        single: groups of one, which nothing compares with.
        no_spread: groups whose rewards do not differ (enough).
        out_of_bounds: groups whose mean reward is out of bounds.
    """

    groups: int
    sequences: int
    kept_groups: int
    kept_sequences: int
    single: int
    no_spread: int
    out_of_bounds: int


@dataclass(frozen=True)
class Filtered:
    """``keep``, bool ``[n]`` for this rank's sequences, and what the filter did."""

    keep: Tensor
    stats: FilterStats


def filter_groups(
    rewards: Tensor,
    groups: Groups,
    *,
    min_std: float = 0.0,
    low: float = -math.inf,
    high: float = math.inf,
) -> Filtered:
    """Keep the groups whose rewards differ: from the others a group-relative advantage learns nothing
    (dynamic sampling; DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2: ``0 < number of right answers < G``).

    Filter by what says whether an answer is right, before shaping: a penalty for length makes groups differ that are all
    wrong.

    Args:
        rewards: ``[n]``.
        groups: which of them are compared; groups may lie on several ranks (then collective), and are kept or dropped as a
            whole.
        min_std: a group is dropped unless its standard deviation (``ddof`` 0) is above this.
        low, high: and unless its mean reward is within these, both included.

    Raises:
        ValueError: shapes do not agree, a bound is out of range, or a reward is not finite (on every rank).
    """
    if min_std < 0 or not low <= high:
        raise ValueError(
            f"min_std = {min_std}, low = {low}, high = {high}: min_std is 0 or more, and low not above high"
        )
    moments = groups.moments(rewards)
    present = moments.count > 0
    single = moments.count == 1
    flat = present & ~single & ~(moments.std(0) > min_std)
    # The mean of equal rewards may differ from them in its last bit, so that a bound need not be hit exactly.
    slack = 1e-12 * moments.mean.abs()
    inside = (moments.mean >= low - slack) & (moments.mean <= high + slack)
    outside = present & ~single & ~flat & ~inside
    kept = present & ~single & ~flat & inside
    stats = FilterStats(
        groups=int(present.sum()),
        sequences=int(moments.count.sum()),
        kept_groups=int(kept.sum()),
        kept_sequences=int(moments.count[kept].sum()),
        single=int(single.sum()),
        no_spread=int(flat.sum()),
        out_of_bounds=int(outside.sum()),
    )
    return Filtered(groups.pick(kept, rewards), stats)
