"""Advantages of sequences against the others of their group: no critic, several responses to a prompt.

All return one advantage for each sequence, ``[n]``; :func:`~areal.trainer.advantages.tokens.to_tokens` and
:func:`~areal.trainer.advantages.tokens.to_samples` bring them to the tokens. A group that says nothing has advantages of
exactly 0: one whose rewards are all equal, and a group of one, whose only reward has nothing to be compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.trainer.advantages.groups import Groups, check_ddof, result_dtype


def grpo(rewards: Tensor, groups: Groups, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages, ``(r_i - mean) / (std + eps)`` (GRPO; Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    Args:
        rewards: ``[n]``.
        groups: which of them are compared; groups may lie on several ranks (then collective).
        ddof: the divisor of the variance is the group's size less this. The paper does not say; 1 is what
            most implementations take.
        eps: added to the standard deviation.

    Returns:
        ``[n]``, of the dtype of ``rewards``, but no narrower than float32.

    Raises:
        ValueError: shapes do not agree, or a reward is not finite (on every rank).
    """
    check_ddof(ddof)
    deviation, moments = groups.deviations(rewards)
    scale = groups.pick(moments.std(ddof), rewards) + eps
    # A group without spread has std 0: with eps = 0 as well, its zeros stay zeros.
    return (deviation / scale.masked_fill(scale == 0, 1)).to(result_dtype(rewards))


def dr_grpo(rewards: Tensor, groups: Groups) -> Tensor:
    """``r_i - mean`` of the group (Dr. GRPO; Liu et al. 2025, arXiv:2503.20783): no division by the spread,
    which would weigh questions that are very easy or very hard the most.

    Args, Returns and Raises: as :func:`grpo`.
    """
    return groups.deviations(rewards)[0].to(result_dtype(rewards))


def rloo(rewards: Tensor, groups: Groups) -> Tensor:
    """Leave-one-out: ``r_i`` less the mean of the *others* of its group, ``n / (n - 1) * (r_i - mean)``
    (RLOO; Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019).

    A group of one has no others, and advantage 0.

    Args, Returns and Raises: as :func:`grpo`.
    """
    deviation, moments = groups.deviations(rewards)
    others = moments.count - 1
    factor = torch.where(others > 0, moments.count / others.clamp(min=1), 0)
    return (deviation * groups.pick(factor, rewards)).to(result_dtype(rewards))
