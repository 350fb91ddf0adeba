"""Normalisation of rewards or advantages: over the batch, over each group, or of the mean alone."""

from __future__ import annotations

from torch import Tensor

from areal.trainer.advantages.groups import Groups, SumOverRanks, check_ddof, result_dtype


def normalize(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    groups: Groups | None = None,
    scale: bool = True,
    ddof: int = 1,
    eps: float = 1e-8,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """``(x - mean) / (std + eps)`` over what the mask keeps, exact over data-parallel ranks.

    The moments are float64 sums in two passes, the same on every rank: where the numbers lie does not matter. A rank that has
    none takes part with an empty ``x``.

    Args:
        x: of any shape: ``[T]`` packed, ``[B, S]`` padded, ``[n]`` for sequences.
        mask: of the same shape, such as a loss mask; where it is 0, ``x`` is left out, whatever it is. Each other entry counts
            once, whatever its mask is.
        groups: normalise each group by itself; ``Groups.of_tokens`` for tokens. By default the batch is one group.
        scale: ``False`` to take off the mean alone.
        ddof: the divisor of the variance is the count less this. 1, the default here and for groups, is the estimate from a
            sample; 0 the spread of the numbers themselves.
        eps: added to the standard deviation.
        sum_over_ranks: ``engine.global_sum``, for the batch of all ranks; ``groups`` bring their own.

    Returns:
        Of the shape of ``x`` and its dtype, but no narrower than float32. 0 where ``mask`` is 0, and where all numbers are
        equal or there is only one.

    Raises:
        ValueError: shapes do not agree, both ``groups`` and ``sum_over_ranks`` are given; or a number that counts is not
            finite, on every rank.
    """
    check_ddof(ddof)
    if groups is None:
        groups = Groups.whole_batch(x, sum_over_ranks)
    elif sum_over_ranks is not None:
        raise ValueError(
            "normalize got groups and sum_over_ranks: groups that lie on several ranks are Groups.over_ranks(...)"
        )
    deviation, moments = groups.deviations(x, mask)
    if scale:
        spread = groups.pick(moments.std(ddof), x) + eps
        deviation = deviation / spread.masked_fill(spread == 0, 1)
    return deviation.to(result_dtype(x))
