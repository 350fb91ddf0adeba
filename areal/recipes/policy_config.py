"""Settings of reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from areal.api import MicroBatchSpec
from areal.inference import Sampling
from areal.recipes.config import RunConfig
from areal.trainer.rollout import Plan
from areal.trainer.updates import Updates


class PolicyConfig(RunConfig):
    """Settings that GRPO and PPO have."""

    reward: str | None = Field(
        default=None,
        description="`module:function` or `file.py:function` of a row and the answer's text. None: it is passed.",
    )
    reward_seconds: float | None = Field(default=None, gt=0, description="Time limit of a reward; None for no limit.")
    max_turns: int = Field(default=8, gt=0, description="Maximum number of answers of an episode with tools.")
    max_episode_tokens: int | None = Field(
        default=None, gt=0, description="Maximum number of sampled tokens of an episode with tools; None for no limit."
    )

    groups: int = Field(default=16, gt=0, description="Rows in a batch, over all ranks.")
    group_size: int = Field(default=8, gt=0, description="Answers to each row.")
    minibatches: int = Field(default=1, gt=0, description="Optimizer steps for each batch.")
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="Maximum number of updates between the weights that begin an answer and those trained on it.",
    )
    in_order: bool = Field(
        default=True,
        description="Train on groups in the order in which they begin; False: on those that are complete, short answers first.",
    )
    oversample: int = Field(
        default=0, ge=0, description="Groups that are generated in addition, with `in_order = false`, over all ranks."
    )
    partial_answers: bool = Field(
        default=False,
        description="With `in_order = false`: train on the newer tokens of answers beyond `max_staleness`, which are cancelled otherwise.",
    )
    max_failed_share: float | None = Field(
        default=0.1, ge=0, le=1, description="Fraction of the episodes of a batch that may fail; None for no limit."
    )
    episode_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Time limit of an episode; None for no limit. In an evaluation, a longer one is an error.",
    )
    shuffle: bool = Field(
        default=True, description="Draw a new order of the rows in each epoch; False keeps a curriculum."
    )
    replace_flat: bool = Field(
        default=False,
        description="Replace groups whose rewards are all equal by groups of the next rows (dynamic sampling).",
    )
    skip_flat: bool = Field(default=False, description="Do not train on groups whose rewards are all equal.")
    mask_truncated: bool = Field(
        default=False, description="Do not train on answers that were cut at their maximum length."
    )
    overlong_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Width in tokens of a penalty that rises to 1 at `max_new_tokens`; None for none. Not with tools or an own episode.",
    )
    shuffle_rewards: bool = Field(
        default=False,
        description="Control experiment: shuffle the rewards of each batch, so that nothing can be learned from them.",
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="Weight of the KL penalty against the first model; 0 needs no reference."
    )

    max_new_tokens: int = Field(default=256, gt=0, description="Maximum tokens of an answer.")
    temperature: float = Field(default=1.0, gt=0, description="Temperature of the answers that are trained on.")
    max_context: int | None = Field(
        default=None,
        gt=0,
        description="Maximum tokens of a prompt with its answers; None: what the rows need, and with tools as much again as the answers; "
        "with an own episode what the model takes, at most 32,768.",
    )
    eval_samples: int = Field(default=1, gt=0, description="Answers to each row of an evaluation, for pass@k.")
    eval_temperature: float = Field(default=1.0, ge=0, description="Temperature of an evaluation; 0 is greedy.")
    pass_reward: float = Field(default=1.0, description="Reward from which an answer passes, for pass@k.")
    logged_groups: int = Field(
        default=2, ge=0, description="Groups of each batch that are written to `samples.jsonl`; 0 for none."
    )

    servers: tuple[str, ...] = Field(
        default=(), description="URLs of inference servers that generate; empty: a replica of the model on each rank."
    )
    server_kind: Literal["vllm", "sglang"] = Field(default="vllm", description="Kind of the servers.")
    start_server: str | None = Field(
        default=None,
        description="Command of a server that the run starts and stops, such as 'vllm serve'; gets model and port.",
    )
    routing_replay: bool = Field(
        default=False,
        description="Train tokens with the experts that computed them on the servers, which return them; of a model with experts.",
    )
    rollout: dict[str, Any] = Field(default={}, description="Further options of LocalRollout or HTTPRollout.")

    @model_validator(mode="after")
    def _rollout_settings_agree(self) -> PolicyConfig:
        if self.servers and self.start_server is not None:
            raise ValueError(
                f"servers = {list(self.servers)} with start_server = {self.start_server!r}: both generate; leave one of them out"
            )
        if self.routing_replay and not self.servers and self.start_server is None:
            raise ValueError(
                "routing_replay = True without servers: a replica in this process returns no experts; set servers or start_server"
            )
        if self.overlong_tokens is not None and self.overlong_tokens > self.max_new_tokens:
            raise ValueError(
                f"overlong_tokens = {self.overlong_tokens} with max_new_tokens = {self.max_new_tokens}: it is at most that"
            )
        self.plan(), self.updates()
        return self

    def micro_batches(self) -> MicroBatchSpec:
        """Return rules that compute common prompts once."""
        return MicroBatchSpec(max_tokens_per_mb=self.max_tokens_per_mb, overlong="alone", share_prefixes=True)

    def plan(self) -> Plan:
        """Return the plan of the runner."""
        return Plan(
            groups=self.groups,
            group_size=self.group_size,
            max_staleness=self.max_staleness,
            in_order=self.in_order,
            oversample=self.oversample,
            partial_answers=self.partial_answers,
            max_failed_share=self.max_failed_share,
            episode_seconds=self.episode_seconds,
            seed=self.seed,
            shuffle=self.shuffle,
        )

    def updates(self) -> Updates:
        """Return the optimizer steps of a batch. The trainer's log-probs are always computed, so that an error of the rollout is seen."""
        return Updates(minibatches=self.minibatches, skip_flat=self.skip_flat, mask_truncated=self.mask_truncated)

    def sampling(self, stop_token_ids: tuple[int, ...], *, temperature: float | None = None) -> Sampling:
        """Return sampling parameters, by default those of training."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature if temperature is None else temperature,
            stop_token_ids=stop_token_ids,
        )


class GRPOConfig(PolicyConfig):
    """Settings of group-relative policy optimisation."""

    output: Path = Field(default=Path("runs/grpo"), description="Directory of the run.")
    advantage: Literal["grpo", "dr_grpo", "rloo"] = Field(
        default="grpo", description="Advantage of an answer within its group."
    )

    @model_validator(mode="after")
    def _groups_compare(self) -> GRPOConfig:
        if self.group_size < 2:
            raise ValueError(f"group_size = {self.group_size}: answers are compared within a group: set at least 2")
        return self


class DistillConfig(PolicyConfig):
    """Settings of distillation on policy."""

    output: Path = Field(default=Path("runs/distill"), description="Directory of the run.")
    teacher: str = Field(min_length=1, description="Model that is learned from, with the tokenizer of `model`.")
    groups: int = Field(default=64, gt=0, description="Rows in a batch, over all ranks.")
    group_size: int = Field(default=1, gt=0, description="Answers to each row.")

    @model_validator(mode="after")
    def _reward_is_measured_only(self) -> DistillConfig:
        for name in ("kl_coef", "replace_flat", "skip_flat", "shuffle_rewards", "overlong_tokens"):
            if value := getattr(self, name):
                raise ValueError(
                    f"{name} = {value}: distillation follows the teacher, and not the reward; leave it out"
                )
        if self.routing_replay:
            raise ValueError("routing_replay = True: the teacher's experts are others; leave it out")
        return self


class PPOConfig(PolicyConfig):
    """Settings of PPO with a critic."""

    output: Path = Field(default=Path("runs/ppo"), description="Directory of the run.")
    groups: int = Field(default=64, gt=0, description="Rows in a batch, over all ranks.")
    group_size: int = Field(default=1, gt=0, description="Answers to each row.")
    critic: str | None = Field(
        default=None, description="Model of the critic; None takes `model`. Its value head is new unless it has one."
    )
    critic_lr: float = Field(default=1e-5, gt=0, description="Peak learning rate of the critic.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(default=0.95, ge=0, le=1, description="Decay of generalised advantage estimation.")

    @model_validator(mode="after")
    def _critic_replays_nothing(self) -> PPOConfig:
        if self.routing_replay:
            raise ValueError("routing_replay = True with a critic, whose experts are others: leave it out")
        return self
