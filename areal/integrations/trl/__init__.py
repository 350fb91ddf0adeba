"""TRL: its asynchronous GRPO on rollouts of this package, and its GRPO on an engine."""

from areal.integrations.trl.grpo import EngineGRPOTrainer
from areal.integrations.trl.rollout_worker import RolloutWorker, rewarded_answer

__all__ = ["EngineGRPOTrainer", "RolloutWorker", "rewarded_answer"]
