"""Published algorithms as combinations of a policy loss, an aggregation and a KL penalty. Advantages: :mod:`areal.trainer.advantages`.

===============  ===========================  =============================  ==========================  ========================
recipe           surrogate                    aggregation                    more                        advantages of the paper
===============  ===========================  =============================  ==========================  ========================
``ppo``          ``PPOClip(0.2, 0.2)``        ``TokenMean``                                              GAE
``decoupled``    ``PPOClip(0.2, 0.2)``        ``TokenMean``                  importance weights, capped  any
``grpo``         ``PPOClip(0.2, 0.2)``        ``SequenceMean``               k3, coefficient 0.04        group mean and deviation
``dr_grpo``      ``PPOClip(0.2, 0.2)``        ``FixedLength(max_tokens)``                                group mean
``dapo``         ``PPOClip(0.2, 0.28)``       ``TokenMean``                                              group mean and deviation
``gspo``         ``GSPO(3e-4, 4e-4)``         ``SequenceMean``                                           group mean and deviation
``cispo``        ``CISPO(inf, 4.0)``          ``TokenMean``                                              group mean and deviation
``sapo``         ``SAPO(1.0, 1.05)``          ``SequenceMean``                                           group mean and deviation
``dro``          ``DRO(beta, sequence=True)`` ``SequenceMeanOfSums``                                     reward less value
===============  ===========================  =============================  ==========================  ========================

Every recipe passes ``more`` on to :func:`policy_objective`. Call that function for any other combination.
"""

from __future__ import annotations

import math
from typing import Literal, TypedDict, Unpack

from areal.trainer.losses.aggregate import FixedLength, SequenceMean, SequenceMeanOfSums, TokenMean
from areal.trainer.losses.inputs import OldLogprobs
from areal.trainer.losses.kl import KLTerm
from areal.trainer.losses.mismatch import MismatchCorrection, Mode
from areal.trainer.losses.objective import Objective, policy_objective
from areal.trainer.losses.policy import CISPO, PPOClip
from areal.trainer.losses.policy_sequence import GSPO
from areal.trainer.losses.policy_smooth import DRO, SAPO


class Extras(TypedDict, total=False):
    """Keyword arguments that every recipe passes on to :func:`policy_objective`."""

    kl: KLTerm | None
    entropy_coef: float
    report_entropy: bool
    correction: MismatchCorrection | None


class PlainExtras(TypedDict, total=False):
    """Keyword arguments of a recipe that sets the correction itself."""

    kl: KLTerm | None
    entropy_coef: float
    report_entropy: bool


def ppo_objective(*, clip: float = 0.2, dual_clip: float | None = None, **more: Unpack[Extras]) -> Objective:
    """PPO (Schulman et al., 2017), optionally with dual clip (Ye et al., 2020); a mean over tokens."""
    return policy_objective(PPOClip(clip, clip, dual_clip), TokenMean(), **more)


def decoupled_ppo_objective(
    *,
    clip: float = 0.2,
    dual_clip: float | None = None,
    cap: float = math.inf,
    mode: Mode = "mask",
    **more: Unpack[PlainExtras],
) -> Objective:
    """Decoupled PPO (Hilton et al., 2021): the clip is around ``old_logprobs``, the importance weight corrects for ``rollout_logprobs``.

    A weight above ``cap`` becomes 0 (``mask``, as in AReaL, Fu et al., 2025) or the cap (``truncate``).
    """
    # The ratio of PPO's clip is to old_logprobs; this weight corrects from there to the rollout.
    correction = MismatchCorrection(level="token", mode=mode, cap=cap)
    return policy_objective(PPOClip(clip, clip, dual_clip), TokenMean(), correction=correction, **more)


def grpo_objective(
    *, clip: float = 0.2, kl_coef: float = 0.04, old: OldLogprobs = "old_logprobs", **more: Unpack[Extras]
) -> Objective:
    """GRPO (Shao et al., 2024), equations 3 and 4: the mean of sequences' means, and k3 to a reference.

    ``kl_coef = 0`` leaves out the penalty; ``kl`` replaces it. ``old`` is the denominator of the ratio.
    """
    # An explicit penalty, even None, takes precedence over the coefficient.
    if "kl" not in more and kl_coef != 0:
        more["kl"] = KLTerm(kl_coef, "k3")
    return policy_objective(PPOClip(clip, clip, old=old), SequenceMean(), **more)


def dr_grpo_objective(*, max_tokens: float, clip: float = 0.2, **more: Unpack[Extras]) -> Objective:
    """Dr.GRPO (Liu et al., 2025): token sums over a constant, ``max_tokens`` of a response, so that no length is favoured."""
    return policy_objective(PPOClip(clip, clip), FixedLength(max_tokens), **more)


def dapo_objective(*, clip_low: float = 0.2, clip_high: float = 0.28, **more: Unpack[Extras]) -> Objective:
    """DAPO (Yu et al., 2025): clip-higher, a mean over all tokens of the batch, no KL penalty."""
    return policy_objective(PPOClip(clip_low, clip_high), TokenMean(), **more)


def gspo_objective(
    *, clip_low: float = 3e-4, clip_high: float = 4e-4, per_token: bool = False, **more: Unpack[Extras]
) -> Objective:
    """GSPO (Zheng et al., 2025): sequence ratios; ``per_token`` for advantages that differ within a sequence."""
    return policy_objective(GSPO(clip_low, clip_high, per_token), SequenceMean(), **more)


def cispo_objective(*, clip_low: float = math.inf, clip_high: float = 4.0, **more: Unpack[Extras]) -> Objective:
    """CISPO (MiniMax-M1, 2025): clipped importance weights, a mean over tokens."""
    return policy_objective(CISPO(clip_low, clip_high), TokenMean(), **more)


def sapo_objective(*, tau_pos: float = 1.0, tau_neg: float = 1.05, **more: Unpack[Extras]) -> Objective:
    """SAPO (Gao et al., Qwen, 2025): soft gates, the mean of sequences' means."""
    return policy_objective(SAPO(tau_pos, tau_neg), SequenceMean(), **more)


def dro_objective(
    *,
    beta: float = 0.05,
    old: Literal["old_logprobs", "rollout_logprobs", "ref_logprobs"] = "ref_logprobs",
    **more: Unpack[Extras],
) -> Objective:
    """DRO (Richemond et al., 2024), the policy term: the square of a sequence's log-ratio to ``old``, summed over its tokens."""
    return policy_objective(DRO(beta, sequence=True, old=old), SequenceMeanOfSums(), **more)
