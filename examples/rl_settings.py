"""Settings of a run of reinforcement learning, parsed from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from settings import TaskConfig

from areal import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.inference import Sampling
from areal.trainer.ppo import Updates
from areal.trainer.rollout import Plan


@dataclass(frozen=True)
class RLConfig(TaskConfig):
    """One run of reinforcement learning."""

    output: Path = Path("runs/grpo")
    """Output directory."""
    seed: int = 0
    """Seed of the problems, their order, and every answer."""

    warmup_steps: int = 2
    """Supervised steps before reinforcement learning."""
    warmup_batch_size: int = 32
    """Problems in a batch of the warm-up."""
    warmup_lr: float = 2e-5
    """Learning rate of the warm-up."""

    steps: int = 16
    """Batches of rollouts."""
    groups: int = 24
    """Problems in a batch."""
    group_size: int = 4
    """Answers to each problem."""
    max_staleness: int = 0
    """Maximum number of updates between the weights that begin an answer and the weights trained on it. Above 0, the next batch is
    generated while this one is trained on."""
    minibatches: int = 1
    """Optimizer steps for each batch."""
    skip_flat: bool = False
    """Exclude groups whose answers are all right or all wrong from training."""
    lr: float = 1e-5
    """Learning rate of AdamW."""
    kl_coef: float = 0.0
    """Coefficient of the KL penalty against the model after the warm-up; 0 needs no reference model."""
    temperature: float = 1.0
    """Temperature of the answers to train on."""
    max_new_tokens: int = 8
    """Maximum tokens of an answer."""
    max_tokens_per_mb: int = 1024
    """Maximum tokens in a packed micro-batch."""
    shuffle_rewards: bool = False
    """Control experiment: shuffle the rewards of each batch, so that nothing can be learned from them."""

    eval_size: int = 400
    """Held-out problems."""
    eval_temperature: float = 1.0
    """Temperature of the answers to held-out problems, with the same noise before and after; 0 is greedy."""
    max_p_value: float | None = None
    """Fail unless accuracy on held-out problems rises above that after the warm-up with a smaller p-value than this."""
    min_p_value: float | None = None
    """Fail if accuracy rises with a smaller p-value than this: for the control experiment."""

    def engine(
        self, *, path: str, lr: float | None = None, trained: bool = True, value_head: bool = False
    ) -> TrainEngineConfig:
        """Return the configuration of an engine."""
        return TrainEngineConfig(
            path=path,
            backend=self.backend,
            dtype=self.compute_dtype,
            seed=self.seed,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=self.max_tokens_per_mb, share_prefixes=True),
            optimizer=OptimizerConfig(lr=self.lr if lr is None else lr) if trained else None,
            value_head=value_head,
            lora=self.lora if trained and not value_head else None,
        )

    def plan(self) -> Plan:
        """Return the plan of the runner."""
        return Plan(groups=self.groups, group_size=self.group_size, max_staleness=self.max_staleness, seed=self.seed)

    def updates(self) -> Updates:
        """Return the optimizer steps per batch. For a single on-policy step, the rollout's log-probs serve as old log-probs."""
        off_policy = self.minibatches > 1 or self.max_staleness > 0
        return Updates(minibatches=self.minibatches, recompute_logprobs=off_policy, skip_flat=self.skip_flat)

    def sampling(self, end: int, *, temperature: float | None = None) -> Sampling:
        """Return sampling parameters. ``end`` is the stop token; the default temperature is that of training."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature if temperature is None else temperature,
            stop_token_ids=(end,),
        )
