"""The settings of a run of reinforcement learning, as the command line takes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from settings import TaskConfig

from areal import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.trainer.ppo import Updates
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.protocol import Sampling


@dataclass(frozen=True)
class RLConfig(TaskConfig):
    """One run of reinforcement learning."""

    output: Path = Path("runs/grpo")
    """Directory of what the run leaves."""
    seed: int = 0
    """Of the problems, of their order, and of every answer."""

    warmup_steps: int = 2
    """Supervised steps before."""
    warmup_batch_size: int = 32
    """Problems in a batch of these."""
    warmup_lr: float = 2e-5
    """Learning rate of these."""

    steps: int = 16
    """Batches of rollouts."""
    groups: int = 24
    """Problems in a batch."""
    group_size: int = 4
    """Answers to each problem."""
    max_staleness: int = 0
    """Updates by which the weights that began an answer may be older than those it trains; above 0 the next batch is written while
    this one trains."""
    minibatches: int = 1
    """Optimizer steps for each batch."""
    skip_flat: bool = False
    """Leave out groups of which all answers are right, or all wrong, when updating."""
    lr: float = 1e-5
    """Learning rate of AdamW."""
    kl_coef: float = 0.0
    """Weight of the distance to the model after the warm-up; 0 keeps no second copy of it."""
    temperature: float = 1.0
    """Of the answers that are learned from."""
    max_new_tokens: int = 8
    """Longest answer."""
    max_tokens_per_mb: int = 1024
    """Tokens in a packed micro-batch."""
    shuffle_rewards: bool = False
    """A control: every answer gets the reward of a random one, so that there is nothing to learn."""

    eval_size: int = 400
    """Held-out problems."""
    eval_temperature: float = 1.0
    """Of the answers to these, drawn with the same noise before and after; 0 takes the most likely tokens."""
    max_p_value: float | None = None
    """Fail unless accuracy on held-out problems rises above that after the warm-up with a smaller p-value than this."""
    min_p_value: float | None = None
    """Fail if it rises with a smaller one than this: for the control."""

    def engine(
        self, *, path: str, lr: float | None = None, trained: bool = True, value_head: bool = False
    ) -> TrainEngineConfig:
        """What of it is an engine's."""
        return TrainEngineConfig(
            path=path,
            backend=self.backend,
            dtype=self.compute_dtype,
            seed=self.seed,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=self.max_tokens_per_mb, share_prefixes=True),
            optimizer=OptimizerConfig(lr=self.lr if lr is None else lr) if trained else None,
            temperature=self.temperature,
            value_head=value_head,
            lora=self.lora if trained and not value_head else None,
        )

    def plan(self) -> Plan:
        """What of it is the runner's."""
        return Plan(groups=self.groups, group_size=self.group_size, max_staleness=self.max_staleness, seed=self.seed)

    def updates(self) -> Updates:
        """How a batch becomes optimizer steps. With one of them, on what the same weights wrote, the rollout's log-probs are the old ones."""
        off_policy = self.minibatches > 1 or self.max_staleness > 0
        return Updates(minibatches=self.minibatches, recompute_logprobs=off_policy, skip_flat=self.skip_flat)

    def sampling(self, end: int, *, temperature: float | None = None) -> Sampling:
        """How answers are drawn, in training where no temperature is given."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature if temperature is None else temperature,
            stop_token_ids=(end,),
        )
