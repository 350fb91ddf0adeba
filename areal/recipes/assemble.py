"""The functions of the recipes, with settings as keywords."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areal.recipes.answer_reward import UserReward
from areal.recipes.config import DPOConfig, RewardModelConfig, SFTConfig
from areal.recipes.functions import function_name
from areal.recipes.policy import DistillRun, GRPORun, PPORun
from areal.recipes.policy_config import DistillConfig, GRPOConfig, PPOConfig
from areal.recipes.supervised import DPORun, RewardModelRun, SFTRun


def sft(model: str, dataset: Any, *, evaluation: Any = None, **settings: Any) -> SFTRun:
    """Return a run of supervised fine-tuning.

    Args:
        model: model directory or hub name.
        dataset: rows, or where they are: see "Dataset formats" of the documentation.
        evaluation: rows for evaluation, in the same forms.
        settings: fields of :class:`SFTConfig`.

    Raises:
        ValueError: a setting is unknown or wrong, or a row is.
    """
    config = SFTConfig(model=model, **_names(dataset=dataset, evaluation=evaluation), **settings)
    return SFTRun(config, _object(dataset), _object(evaluation))


def dpo(model: str, dataset: Any, *, evaluation: Any = None, **settings: Any) -> DPORun:
    """Return a run of direct preference optimisation. Arguments as for :func:`sft`, with fields of :class:`DPOConfig`."""
    config = DPOConfig(model=model, **_names(dataset=dataset, evaluation=evaluation), **settings)
    return DPORun(config, _object(dataset), _object(evaluation))


def reward_model(model: str, dataset: Any, *, evaluation: Any = None, **settings: Any) -> RewardModelRun:
    """Return a run that trains a reward model. Arguments as for :func:`sft`, with fields of :class:`RewardModelConfig`."""
    config = RewardModelConfig(model=model, **_names(dataset=dataset, evaluation=evaluation), **settings)
    return RewardModelRun(config, _object(dataset), _object(evaluation))


def grpo(
    model: str,
    dataset: Any,
    reward: UserReward | str,
    *,
    evaluation: Any = None,
    tools: Sequence[Callable[..., Any]] = (),
    **settings: Any,
) -> GRPORun:
    """Return a run of group-relative policy optimisation. To replace further parts, make a :class:`~areal.recipes.GRPORun`.

    Args:
        model: model directory or hub name.
        dataset: rows, or where they are: see "Dataset formats" of the documentation.
        reward: function of a row and the text of an answer (see :data:`~areal.recipes.answer_reward.UserReward`), or its name as
            ``module:function``.
        evaluation: rows for evaluation, in the same forms.
        tools: functions with types and docstrings that the model may call.
        settings: fields of :class:`GRPOConfig`.

    Raises:
        ValueError: a setting is unknown or wrong, or a row is.
    """
    config = GRPOConfig(model=model, **_policy_names(dataset, reward, evaluation, tools), **settings)
    return GRPORun(config, _object(dataset), _object(reward), _object(evaluation), tools=tools)


def ppo(
    model: str,
    dataset: Any,
    reward: UserReward | str,
    *,
    evaluation: Any = None,
    tools: Sequence[Callable[..., Any]] = (),
    **settings: Any,
) -> PPORun:
    """Return a run of PPO with a critic. Arguments as for :func:`grpo`, with fields of :class:`PPOConfig`."""
    config = PPOConfig(model=model, **_policy_names(dataset, reward, evaluation, tools), **settings)
    return PPORun(config, _object(dataset), _object(reward), _object(evaluation), tools=tools)


def distill(
    model: str,
    dataset: Any,
    teacher: str,
    reward: UserReward | str | None = None,
    *,
    evaluation: Any = None,
    tools: Sequence[Callable[..., Any]] = (),
    **settings: Any,
) -> DistillRun:
    """Return a run of distillation on policy. Arguments as for :func:`grpo`, with fields of :class:`DistillConfig`.

    Args:
        model: directory or hub name of the student.
        dataset: rows, or where they are.
        teacher: directory or hub name of the model to learn from, with the same tokenizer.
        reward: measured, and not trained on.
        evaluation: rows for evaluation, which measures the reward.
        tools: functions that the model may call.
        settings: fields of :class:`DistillConfig`.

    Raises:
        ValueError: a setting is unknown or wrong, or a row is; the teacher has another tokenizer.
    """
    names = _policy_names(dataset, reward, evaluation, tools)
    config = DistillConfig(model=model, teacher=teacher, **names, **settings)
    return DistillRun(config, _object(dataset), _object(reward), _object(evaluation), tools=tools)


def _object(value: Any) -> Any:
    """Return what is no name."""
    return None if isinstance(value, str) else value


def _names(**sources: Any) -> dict[str, Any]:
    """Return what is a name: the record of the run has it."""
    return {key: source for key, source in sources.items() if isinstance(source, str)}


def _policy_names(
    dataset: Any, reward: UserReward | str | None, evaluation: Any, tools: Sequence[Callable[..., Any]]
) -> dict[str, Any]:
    named = reward if isinstance(reward, str | None) else function_name(reward)
    return {
        **_names(dataset=dataset, evaluation=evaluation, reward=named),
        "tools": tuple(name for tool in tools if (name := function_name(tool)) is not None),
    }
