"""Recipes of reinforcement learning: GRPO, PPO with a critic, and distillation on policy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from transformers import AutoTokenizer

from areal.api import TrainEngine
from areal.chat.answer import Message
from areal.chat.pictures import pictures_of
from areal.inference import RolloutClient
from areal.recipes.answer_reward import UserReward, answer_reward
from areal.recipes.data.formats import prompt_messages
from areal.recipes.data.rows import DataRows
from areal.recipes.data.text import Text
from areal.recipes.evaluation import PolicyEvaluation, reward_scalars
from areal.recipes.functions import load_function
from areal.recipes.generation.context import model_context, needed_context
from areal.recipes.generation.rollouts import check_pictures, make_rollout, sync_of
from areal.recipes.group_rewards import has_contrast, shuffled
from areal.recipes.policy_config import DistillConfig, GRPOConfig, PolicyConfig, PPOConfig
from areal.recipes.record.evaluations import add_evaluation
from areal.recipes.record.samples import SampleLog
from areal.recipes.run import Run
from areal.recipes.setup import decoder, own_rows, renderer
from areal.trainer.advantages import dr_grpo, grpo, rloo
from areal.trainer.advantages.shaping import overlong_penalty
from areal.trainer.estimators import CriticBased, Estimator, GroupRelative, OnPolicyDistillation, Sample, Shape
from areal.trainer.grpo import grpo_trainer
from areal.trainer.losses import (
    KLTerm,
    MismatchCorrection,
    Objective,
    PPOClip,
    grpo_objective,
    policy_objective,
    value_objective,
)
from areal.trainer.ppo import Critic, PPOOptions, PPOTrainer, Sync
from areal.trainer.rollout import Episode, RewardPool, Runner, SingleTurn
from areal.trainer.rollout.plan import Keep
from areal.trainer.rollout.tool_episode import ToolEpisode
from areal.trainer.trackers import Tracker
from areal.utils.data import Segment
from areal.utils.data.image_prompt import Prompt, prompt_tokens

C = TypeVar("C", bound=PolicyConfig)
_ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


class PolicyRun(Run[C], Generic[C]):
    """A run of reinforcement learning. What is passed replaces what the settings would make.

    Args:
        config: settings.
        dataset: rows; ``None`` reads ``config.dataset``.
        reward: function of a row and the text of an answer; see :data:`~areal.recipes.answer_reward.UserReward`. ``None`` loads
            ``config.reward``.
        evaluation: rows for evaluation; ``None`` reads ``config.evaluation``, or holds rows out.
        tools: functions that the model may call; ``()`` loads ``config.tools``.
        engine: engine to train, not initialized.
        rollout: generates answers.
        sync: sends weights to ``rollout``; ``None`` calls its ``sync`` or ``update``.
        episode: plays a row; it has the reward.
        eval_episode: plays a row of the evaluation; ``None`` takes ``episode``, or makes one with the settings of the evaluation.
        objective: loss to minimise.
        estimator: computes advantages.
        keep: returns False for groups to replace.
        tracker: receives the numbers.

    Attributes:
        rollout: rollout engine of this rank.
        sync: sends it weights.
        rows: rows to train on.
        held_out: rows for evaluation; ``None`` without any.
        runner: plays episodes.
        episode: plays a row of the data set.
        evaluation: evaluates on held-out rows; ``None`` without any.
    """

    judged_by = "eval/reward"
    larger_is_better = True
    shown: ClassVar[tuple[str, ...]] = (
        "rollout/reward",
        "rollout/tokens",
        "rollout/logprob_error",
        "actor/grad_norm",
        "time/step",
    )
    """Numbers of a step on the console."""

    trainer: PPOTrainer

    def __init__(
        self,
        config: C,
        dataset: Any = None,
        reward: UserReward | None = None,
        evaluation: Any = None,
        *,
        tools: Sequence[Callable[..., Any]] = (),
        engine: TrainEngine | None = None,
        rollout: RolloutClient | None = None,
        sync: Sync | None = None,
        episode: Episode | None = None,
        eval_episode: Episode | None = None,
        objective: Objective | None = None,
        estimator: Estimator | None = None,
        keep: Keep | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        self._dataset, self._reward, self._evaluation_rows, self._tools = dataset, reward, evaluation, tuple(tools)
        self._engine, self._rollout, self._sync, self._episode = engine, rollout, sync, episode
        self._eval_episode = eval_episode
        self._objective, self._estimator, self._keep = objective, estimator, keep
        super().__init__(config, tracker)

    @abstractmethod
    def _make_trainer(self, sync: Sync, options: PPOOptions) -> PPOTrainer:
        """Return the trainer."""

    def _prepare(self) -> None:
        config = self.config
        if self._episode is None:
            self._judge = answer_reward(self._user_reward(), self.text, self.messages)
        self._tools = self._tools or tuple(map(load_function, config.tools))
        for name in ("max_turns", "max_episode_tokens") if not self._tools else ():
            if getattr(config, name) != type(config).model_fields[name].default:
                raise ValueError(
                    f"{name} = {getattr(config, name)} without tools: an episode has one answer; leave it out"
                )
        if config.overlong_tokens is not None and (self._tools or self._episode is not None):
            raise ValueError(
                f"overlong_tokens = {config.overlong_tokens} with {'tools' if self._tools else 'an episode'}: the penalty is of one answer; "
                "leave it out, and let the reward judge the length"
            )
        for name in ("overlong_tokens", "shuffle_rewards") if self._estimator is not None else ():
            if getattr(config, name):
                raise ValueError(
                    f"{name} = {getattr(config, name)} with an estimator: it shapes the rewards itself; leave {name} out"
                )
        self.rows, self.held_out = own_rows(config, "prompts", self._dataset, self._evaluation_rows)
        self.chat = renderer(config, self.tokenizer, self._tools)
        rows = chain(self.rows, self.held_out or ())
        if self._rollout is None and any(pictures_of(self.messages(row)) for row in rows):
            check_pictures(config)
        self._max_context = self._needed_context()

    def _build(self) -> None:
        config = self.config
        # 1. Policy and rollout.
        self.steps = config.steps_of(len(self.rows) / config.groups)
        self.engine = self._engine or self.engines.create(config.engine_config())
        self.engine.initialize(config.spec(self.steps * config.minibatches))
        self.rollout = self._rollout or make_rollout(config, self.engine, self._max_context, self.closing)
        self.sync = self._sync or sync_of(self.rollout)
        # 2. Episodes.
        self.episode = self._episode or self._make_episode(config.temperature)
        keep = self._keep or (has_contrast if config.replace_flat else None)
        self.runner = Runner(self.rollout, self.episode, self.rows, config.plan(), keep=keep)
        self.closing.callback(self.runner.close)
        self.evaluation = None if self.held_out is None else self._make_evaluation(self.held_out)
        # 3. Trainer.
        self._start_tracking()
        self.trainer = self._make_trainer(
            self.sync,
            {
                "estimator": self._estimator,
                "updates": config.updates(),
                "tracker": self.tracker,
                "checkpoints": self.checkpoints,
                "inspect": self._make_sample_log(),
                "profile": config.profile,
            },
        )

    def first_sample(self) -> tuple[Segment, ...]:
        """Return the first prompt."""
        return (Segment(list(prompt_tokens(self.prompt(self.rows[0]))), trainable=False),)

    def evaluate(self) -> dict[str, float]:
        """Send the engine's weights to the rollout, and play the held-out rows; empty without any. Collective."""
        if self.evaluation is None:
            return {}
        self.trainer.send_weights()
        rewards = self.evaluation.rewards()
        if self.speaks:
            add_evaluation(self.config.output, self.trainer.step, rewards)
        return reward_scalars(rewards, self.config.pass_reward)

    # ---- parts

    def _user_reward(self) -> UserReward:
        if self._reward is not None:
            return self._reward
        if self.config.reward is None:
            raise ValueError("reward = None: pass a function of a row and an answer, or name one as 'module:function'")
        return load_function(self.config.reward)

    def messages(self, row: Any) -> list[Message]:
        """Return the first messages of a row."""
        return prompt_messages(row, self.config.system)

    def prompt(self, row: Any) -> Prompt:
        """Return the prompt of a row."""
        return self.chat.rollout_prompt(self.messages(row))

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer."""
        return self.chat.parse(tokens).content

    def _needed_context(self) -> int | None:
        """Return the maximum number of tokens of a prompt with its answers; ``None`` if only the episodes know it.

        Raises:
            ValueError: ``max_context`` or the model's context is too short.
        """
        config = self.config
        if self._episode is not None:
            model_context(config)  # refuses a larger max_context
            return config.max_context
        # An episode of the evaluation may shorten its prompts.
        held_out = () if config.max_context and self._eval_episode is not None else self.held_out or ()
        return needed_context(config, map(self.prompt, chain(self.rows, held_out)), tools=bool(self._tools))

    def _make_episode(self, temperature: float) -> Episode:
        config = self.config
        reward = RewardPool(self._judge, seconds=config.reward_seconds)
        sampling = config.sampling(self.chat.stop_token_ids, temperature=temperature)
        if isinstance(self.chat, Text) or not self._tools:
            return SingleTurn(self.prompt, reward, sampling)
        return ToolEpisode(
            self.chat,
            self._tools,
            self.messages,
            reward,
            sampling,
            max_turns=config.max_turns,
            max_tokens=config.max_episode_tokens,
        )

    def _make_sample_log(self) -> SampleLog | None:
        config = self.config
        if not (self.speaks and config.logged_groups):
            return None
        log = SampleLog(config.output, config.logged_groups, decoder(self.tokenizer), append=config.resume)
        self.closing.callback(log.close)
        return log

    def _make_evaluation(self, rows: DataRows) -> PolicyEvaluation:
        """Return the evaluation.

        Raises:
            ValueError: the runner enters the episode, so that another one is needed.
        """
        config = self.config
        episode = self._eval_episode or self._episode
        if episode is None:
            episode = self._make_episode(config.eval_temperature)
            self.closing.callback(getattr(episode, "close", lambda: None))
        elif episode is self._episode and isinstance(episode, AbstractAsyncContextManager):
            raise ValueError(
                f"episode = {type(episode).__name__}, which the runner enters, with rows for evaluation: pass another one as eval_episode"
            )
        return PolicyEvaluation(
            self.rollout,
            episode,
            rows,
            samples=config.eval_samples,
            seed=config.seed,
            gather=self.engine.control.gather,
            episode_seconds=config.episode_seconds,
        )

    def _shape(self) -> Shape | None:
        """Return the shaping of rewards: shuffled for a control experiment, or with a penalty of long answers, of all their tokens."""
        config = self.config

        def shape(rewards: Tensor, samples: list[Sample]) -> Tensor:
            if config.overlong_tokens is not None:
                lengths = torch.stack([x.get("sampled_tokens", x["loss_mask"].count_nonzero()) for x in samples])
                rewards = rewards + overlong_penalty(
                    lengths, max_length=config.max_new_tokens, cache_length=config.overlong_tokens
                )
            return shuffled(rewards, samples, config.seed) if config.shuffle_rewards else rewards

        return shape if config.shuffle_rewards or config.overlong_tokens is not None else None

    def _correction(self) -> MismatchCorrection | None:
        return MismatchCorrection() if self.config.max_staleness else None

    def _reference(self) -> TrainEngine | None:
        """Return the engine of the KL penalty; ``None`` without one."""
        if not self.config.kl_coef:
            return None
        if self.engine.config.lora is not None:
            return self.engine
        return self.engines.make(self.config.engine_config(optimizer=None), self.steps)


class GRPORun(PolicyRun[GRPOConfig]):
    """Group-relative policy optimisation."""

    recipe = "grpo"

    def _make_trainer(self, sync: Sync, options: PPOOptions) -> PPOTrainer:
        config = self.config
        if options["estimator"] is None:
            options["estimator"] = GroupRelative(_ADVANTAGES[config.advantage], self._shape())
        objective = self._objective or grpo_objective(
            kl_coef=config.kl_coef, report_entropy=True, correction=self._correction()
        )
        reference = self._reference()
        return grpo_trainer(self.engine, self.runner, sync, objective=objective, reference=reference, **options)


class PPORun(PolicyRun[PPOConfig]):
    """PPO with a critic; the KL penalty is part of the reward.

    Attributes:
        critic: engine of the critic.
    """

    recipe = "ppo"

    def _make_trainer(self, sync: Sync, options: PPOOptions) -> PPOTrainer:
        config = self.config
        its = config.engine_config(
            path=config.critic or config.model,
            value_head=True,
            lora=None,
            optimizer=config.optimizer_config(lr=config.critic_lr),
        )
        self.critic = self.engines.make(its, self.steps * config.minibatches)
        if options["estimator"] is None:
            options["estimator"] = CriticBased(
                gamma=config.gamma, lam=config.lam, kl_coef=config.kl_coef, shape=self._shape()
            )
        objective = self._objective or policy_objective(
            PPOClip(0.2, 0.2), report_entropy=True, correction=self._correction()
        )
        options["critic"] = Critic(self.critic, value_objective())
        return PPOTrainer(self.engine, objective, self.runner, sync, reference=self._reference(), **options)


class DistillRun(PolicyRun[DistillConfig]):
    """Distillation on policy: a teacher judges each token of the student's own answers. A reward is measured, and not trained on.

    Attributes:
        teacher: engine of the teacher.
    """

    recipe = "distill"
    shown = ("actor/kl_ref/k1", *PolicyRun.shown)

    def _prepare(self) -> None:
        super()._prepare()
        measures = (self._reward, self.config.reward, self._episode, self._eval_episode)
        if self.held_out is not None and all(each is None for each in measures):
            raise ValueError(
                "held_out or evaluation without reward: an evaluation measures it; set one, or leave the rows of the evaluation out"
            )
        theirs = AutoTokenizer.from_pretrained(self.config.teacher)
        if theirs.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                f"teacher = {self.config.teacher!r}: its tokenizer has other tokens than that of {self.config.model!r}, which it is to "
                "judge: choose a teacher of the same family"
            )

    def _user_reward(self) -> UserReward:
        if self._reward is None and self.config.reward is None:
            return lambda row, answer: 0.0
        return super()._user_reward()

    def _make_trainer(self, sync: Sync, options: PPOOptions) -> PPOTrainer:
        config = self.config
        its = config.engine_config(path=config.teacher, optimizer=None, lora=None)
        self.teacher = self.engines.make(its, self.steps)
        options["estimator"] = self._estimator or OnPolicyDistillation()
        # The penalty of weight 0 reports the divergence.
        objective = self._objective or policy_objective(
            PPOClip(0.2, 0.2), kl=KLTerm(0.0, "k1"), report_entropy=True, correction=self._correction()
        )
        return PPOTrainer(self.engine, objective, self.runner, sync, reference=self.teacher, **options)
