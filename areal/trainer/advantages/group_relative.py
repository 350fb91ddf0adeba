"""Advantages relative to the other sequences of a group: without a critic, for several responses to a prompt.

All functions return one advantage per sequence, ``[n]``. :func:`~areal.trainer.advantages.tokens.to_tokens` and
:func:`~areal.trainer.advantages.tokens.to_samples` assign them to tokens. A group of one, and a group whose rewards are all equal,
has advantages of exactly 0.

Members of a group are its sequences, or its episodes if the groups have them. The reward of an episode is the mean of its sequences' rewards:
an episode with many sequences counts once in the mean and the deviation of its group. A sequence is compared with its own reward, so that
sequences of one episode with different rewards (of two players, for example) have different advantages.
"""

from __future__ import annotations

from torch import Tensor

from areal.trainer.advantages.groups import Groups, check_ddof, result_dtype


def grpo(rewards: Tensor, groups: Groups, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Return ``(r_i - mean) / (std + eps)`` (GRPO; Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    Args:
        rewards: ``[n]``.
        groups: partition of the sequences. Collective if groups span ranks.
        ddof: the divisor of the variance is the group's size minus ``ddof``. The paper leaves it open; most implementations use 1.
        eps: added to the standard deviation.

    Returns:
        ``[n]``, of the dtype of ``rewards`` but at least float32.

    Raises:
        ValueError: shapes do not agree, or a reward is not finite (on every rank).
    """
    check_ddof(ddof)
    # Deviations are exactly 0 in a group without spread, so that eps does not amplify rounding.
    deviation, moments = groups.deviations(rewards)
    scale = groups.pick(moments.std(ddof), rewards) + eps
    # A group without spread has std 0: with eps = 0 as well, its zeros stay zeros.
    return (deviation / scale.masked_fill(scale == 0, 1)).to(result_dtype(rewards))


def dr_grpo(rewards: Tensor, groups: Groups) -> Tensor:
    """Return ``r_i - mean`` of the group (Dr. GRPO; Liu et al. 2025, arXiv:2503.20783).

    Without the division by the standard deviation, which weights very easy and very hard questions most.

    Args, Returns and Raises: as :func:`grpo`.
    """
    return groups.deviations(rewards)[0].to(result_dtype(rewards))


def rloo(rewards: Tensor, groups: Groups) -> Tensor:
    """Return ``r_i`` minus the mean of the rewards of the *other* members of its group, ``n / (n - 1) * (r_i - mean)``.

    RLOO (leave-one-out; Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019). A group of one has advantage 0.

    Args, Returns and Raises: as :func:`grpo`.
    """
    deviation, moments = groups.deviations(rewards)
    # Without the member's own reward, the mean is lower by its deviation over n - 1. In a group of one all deviations are 0.
    others = groups.pick((moments.count - 1).clamp(min=1), rewards)
    return (deviation + groups.episode_means(deviation) / others).to(result_dtype(rewards))
