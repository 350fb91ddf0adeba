"""PPO with a critic, on the problems of grpo.py and with its settings.

    torchrun --nproc-per-node 2 examples/ppo.py --backend fsdp:d2 --group-size 1 --groups 64

The critic is a second engine: the model after the warm-up, with a value head. The run writes the same files as grpo.py.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import tyro
from grpo import Run, main
from rl_settings import RLConfig

from areal.trainer.estimators import CriticBased
from areal.trainer.losses import PPOClip, policy_objective, value_objective
from areal.trainer.ppo import Critic, PPOTrainer
from areal.trainer.rollout import Runner
from areal.trainer.trackers import Tracker


class CriticRun(Run):
    """Advantages from a critic; the penalty on the distance to the model after the warm-up is part of the reward."""

    def trainer(self, runner: Runner, tracker: Tracker, stack: ExitStack) -> PPOTrainer:
        config = self.config
        critic = Critic(self.another_engine(stack, value_head=True), value_objective())
        return PPOTrainer(
            self.engine,
            policy_objective(PPOClip(0.2, 0.2), report_entropy=True),
            runner,
            self.sync,
            estimator=CriticBased(kl_coef=config.kl_coef),
            reference=self.another_engine(stack, trained=False) if config.kl_coef else None,
            critic=critic,
            updates=config.updates(),
            tracker=tracker,
            profile=config.profile,
        )


if __name__ == "__main__":
    sys.exit(main(tyro.cli(RLConfig, description=__doc__), CriticRun))
