"""Losses in the sum contract: pure per-token functions, and objectives built from them.

Per-token functions (``*_loss``) are for a loss of your own; an :class:`Objective` is for an engine's verbs.
"""

from areal.trainer.losses.aggregate import (
    Aggregation,
    FixedLength,
    GroupTokenMean,
    SequenceMean,
    SequenceMeanOfSums,
    TokenMean,
    trained_sequences,
)
from areal.trainer.losses.distill import Direction, DistillLoss, distill_objective, forward_kl_loss, reverse_kl_loss
from areal.trainer.losses.gspo import gspo_loss, gspo_token_loss
from areal.trainer.losses.kl import KL_ESTIMATORS, KLEstimator, KLTerm, kl_k1, kl_k2, kl_k3, kl_metrics
from areal.trainer.losses.mismatch import (
    ImportanceWeights,
    Level,
    Mismatch,
    MismatchCorrection,
    Mode,
    compare_logprobs,
    importance_weights,
    mismatch_metrics,
)
from areal.trainer.losses.numerics import LOG_RATIO_BOUND
from areal.trainer.losses.objective import Objective, mean_loss
from areal.trainer.losses.policy import (
    PolicyLoss,
    RatioStats,
    cispo_loss,
    importance_sampling_loss,
    policy_gradient_loss,
    ppo_clip_loss,
)
from areal.trainer.losses.policy_factory import policy_objective, ratio_metrics
from areal.trainer.losses.preference import (
    bradley_terry_loss,
    dpo_loss,
    dpo_objective,
    ipo_loss,
    ipo_objective,
    last_token,
    reward_objective,
    sequence_log_ratios,
)
from areal.trainer.losses.recipes import (
    cispo_objective,
    dapo_objective,
    decoupled_ppo_objective,
    dr_grpo_objective,
    dro_objective,
    grpo_objective,
    gspo_objective,
    ppo_objective,
    sapo_objective,
)
from areal.trainer.losses.sft import cross_entropy_loss, sft_objective
from areal.trainer.losses.soft import dro_loss, sapo_loss
from areal.trainer.losses.surrogate import (
    CISPO,
    DRO,
    GSPO,
    SAPO,
    ImportanceSampling,
    PolicyGradient,
    PPOClip,
    Surrogate,
)
from areal.trainer.losses.value import ValueLoss, value_loss, value_objective

__all__ = [
    "CISPO",
    "DRO",
    "GSPO",
    "KL_ESTIMATORS",
    "LOG_RATIO_BOUND",
    "SAPO",
    "Aggregation",
    "Direction",
    "DistillLoss",
    "FixedLength",
    "GroupTokenMean",
    "ImportanceSampling",
    "ImportanceWeights",
    "KLEstimator",
    "KLTerm",
    "Level",
    "Mismatch",
    "MismatchCorrection",
    "Mode",
    "Objective",
    "PPOClip",
    "PolicyGradient",
    "PolicyLoss",
    "RatioStats",
    "SequenceMean",
    "SequenceMeanOfSums",
    "Surrogate",
    "TokenMean",
    "ValueLoss",
    "bradley_terry_loss",
    "cispo_loss",
    "cispo_objective",
    "compare_logprobs",
    "cross_entropy_loss",
    "dapo_objective",
    "decoupled_ppo_objective",
    "distill_objective",
    "dpo_loss",
    "dpo_objective",
    "dr_grpo_objective",
    "dro_loss",
    "dro_objective",
    "forward_kl_loss",
    "grpo_objective",
    "gspo_loss",
    "gspo_objective",
    "gspo_token_loss",
    "importance_sampling_loss",
    "importance_weights",
    "ipo_loss",
    "ipo_objective",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_metrics",
    "last_token",
    "mean_loss",
    "mismatch_metrics",
    "policy_gradient_loss",
    "policy_objective",
    "ppo_clip_loss",
    "ppo_objective",
    "ratio_metrics",
    "reverse_kl_loss",
    "reward_objective",
    "sapo_loss",
    "sapo_objective",
    "sequence_log_ratios",
    "sft_objective",
    "trained_sequences",
    "value_loss",
    "value_objective",
]
