"""Recipes: whole runs of supervised fine-tuning, preferences, reinforcement learning and distillation, from a few settings.

Each function assembles a run from objects of the library and returns it; ``train()`` runs it. The names below are imported when they are
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.recipes.assemble import distill as distill
    from areal.recipes.assemble import dpo as dpo
    from areal.recipes.assemble import grpo as grpo
    from areal.recipes.assemble import ppo as ppo
    from areal.recipes.assemble import reward_model as reward_model
    from areal.recipes.assemble import sft as sft
    from areal.recipes.config import DPOConfig as DPOConfig
    from areal.recipes.config import RewardModelConfig as RewardModelConfig
    from areal.recipes.config import SFTConfig as SFTConfig
    from areal.recipes.policy import DistillRun as DistillRun
    from areal.recipes.policy import GRPORun as GRPORun
    from areal.recipes.policy import PPORun as PPORun
    from areal.recipes.policy_config import DistillConfig as DistillConfig
    from areal.recipes.policy_config import GRPOConfig as GRPOConfig
    from areal.recipes.policy_config import PPOConfig as PPOConfig
    from areal.recipes.run import Run as Run
    from areal.recipes.supervised import DPORun as DPORun
    from areal.recipes.supervised import RewardModelRun as RewardModelRun
    from areal.recipes.supervised import SFTRun as SFTRun

_HOMES = {
    "DPOConfig": "areal.recipes.config",
    "DPORun": "areal.recipes.supervised",
    "DistillConfig": "areal.recipes.policy_config",
    "DistillRun": "areal.recipes.policy",
    "GRPOConfig": "areal.recipes.policy_config",
    "GRPORun": "areal.recipes.policy",
    "PPOConfig": "areal.recipes.policy_config",
    "PPORun": "areal.recipes.policy",
    "RewardModelConfig": "areal.recipes.config",
    "RewardModelRun": "areal.recipes.supervised",
    "Run": "areal.recipes.run",
    "SFTConfig": "areal.recipes.config",
    "SFTRun": "areal.recipes.supervised",
    "distill": "areal.recipes.assemble",
    "dpo": "areal.recipes.assemble",
    "grpo": "areal.recipes.assemble",
    "ppo": "areal.recipes.assemble",
    "reward_model": "areal.recipes.assemble",
    "sft": "areal.recipes.assemble",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal.recipes' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
