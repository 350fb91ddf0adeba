"""Rollouts as a trainer sees them: episodes, the runner that plays them, and what it plays next."""

from areal.trainer.rollout.episodes import Episode, SingleTurn
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.rewards import RewardPool
from areal.trainer.rollout.runner import Runner
from areal.trainer.rollout.sequence import Sequence

__all__ = ["Episode", "Plan", "RewardPool", "Runner", "Sequence", "SingleTurn"]
