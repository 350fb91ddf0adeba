"""Normalisation of rewards or advantages: over the batch or over each group."""

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
    """Return ``(x - mean) / (std + eps)`` over the entries that the mask keeps, exact over data-parallel ranks.

    Mean and standard deviation are computed in float64 and two passes, with equal results on all ranks and for any distribution of the
    entries. A rank without entries takes part with an empty ``x``.

    Args:
        x: any shape: ``[T]`` packed, ``[B, S]`` padded, ``[n]`` per sequence.
        mask: of the shape of ``x``, such as a loss mask. Entries with 0 are excluded and may be NaN; all others count once.
        groups: normalise within each group; see ``Groups.of_tokens`` for tokens. By default the batch is one group.
        scale: False subtracts the mean only.
        ddof: the divisor of the variance is the count minus ``ddof``: 1 for the sample estimate, 0 for the population.
        eps: added to the standard deviation.
        sum_over_ranks: ``engine.global_sum``, for the batch of all ranks. Not with ``groups``, which have their own.

    Returns:
        Of the shape of ``x`` and its dtype, but at least float32. 0 where ``mask`` is 0, and if all entries are equal or there is one.

    Raises:
        ValueError: shapes do not match; ``groups`` and ``sum_over_ranks`` are both given; or an entry that counts is not finite
            (raised on all ranks).
    """
    check_ddof(ddof)
    # Groups bring their sum over ranks; the batch uses the caller's.
    if groups is None:
        groups = Groups.whole_batch(x, sum_over_ranks)
    elif sum_over_ranks is not None:
        raise ValueError(
            "normalize got groups and sum_over_ranks: groups that lie on several ranks are Groups.over_ranks(...)"
        )
    deviation, moments = groups.deviations(x, mask)
    if scale:
        # std 0 with eps = 0: the deviations are 0 and stay 0.
        spread = groups.pick(moments.std(ddof), x) + eps
        deviation = deviation / spread.masked_fill(spread == 0, 1)
    return deviation.to(result_dtype(x))
