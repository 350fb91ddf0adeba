"""Advantages from rewards: pure functions of packed, padded or per-sequence tensors.

Index ``t`` refers to the prediction made at position ``t`` (of token ``t + 1``). Functions that are exact over data-parallel ranks take
``sum_over_ranks``, for which ``engine.global_sum`` is meant. They are collective: ranks without sequences call them too.
"""

from areal.trainer.advantages.gae import GAE, gae
from areal.trainer.advantages.group_relative import dr_grpo, grpo, rloo
from areal.trainer.advantages.groups import Groups, Moments, SumOverRanks
from areal.trainer.advantages.normalize import normalize
from areal.trainer.advantages.reinforce import discounted_returns, reinforce_plus_plus, reinforce_plus_plus_baseline
from areal.trainer.advantages.shaping import kl_penalized, overlong_penalty
from areal.trainer.advantages.tokens import at_last_action, join, split, to_samples, to_tokens

__all__ = [
    "GAE",
    "Groups",
    "Moments",
    "SumOverRanks",
    "at_last_action",
    "discounted_returns",
    "dr_grpo",
    "gae",
    "grpo",
    "join",
    "kl_penalized",
    "normalize",
    "overlong_penalty",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "split",
    "to_samples",
    "to_tokens",
]
