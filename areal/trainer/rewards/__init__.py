"""Rewards: verifiers and judges that work as the ``reward`` of an episode.

The names below are imported when they are first used: some need packages of the extra ``rewards``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.trainer.rewards.answer_text import decoded as decoded
    from areal.trainer.rewards.answer_text import last_content as last_content
    from areal.trainer.rewards.judge import Judge as Judge
    from areal.trainer.rewards.math_answer import MathReward as MathReward
    from areal.trainer.rewards.python_checker import PythonChecker as PythonChecker
    from areal.trainer.rewards.reasoning_gym_score import reasoning_gym_reward as reasoning_gym_reward

_HOMES = {
    "Judge": "areal.trainer.rewards.judge",
    "MathReward": "areal.trainer.rewards.math_answer",
    "PythonChecker": "areal.trainer.rewards.python_checker",
    "decoded": "areal.trainer.rewards.answer_text",
    "last_content": "areal.trainer.rewards.answer_text",
    "reasoning_gym_reward": "areal.trainer.rewards.reasoning_gym_score",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal.trainer.rewards' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
