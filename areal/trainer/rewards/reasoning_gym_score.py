"""Scores of reasoning-gym's procedural data sets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import reasoning_gym

from areal.trainer.rewards.answer_text import AnswerText, last_content


def reasoning_gym_reward(text: AnswerText = last_content) -> Callable[[Mapping[str, Any], Any], float]:
    """Return a reward for items that are entries of reasoning-gym's data sets, by the verifier of the data set that an item names.

    Args:
        text: function from an answer to the text of the final answer, without reasoning. The verifier gets this text without
            leading and trailing white space.

    Returns:
        Function from an item and an answer to a score in 0 to 1. It raises a ``ValueError`` for an item without
        ``metadata["source_dataset"]``.
    """

    def reward(item: Mapping[str, Any], answer: Any) -> float:
        name = item.get("metadata", {}).get("source_dataset")
        if name is None:
            raise ValueError(f"item = {item!r:.200}: an entry of reasoning-gym has metadata['source_dataset']")
        return float(_scorer(name)(answer=text(answer).strip(), entry=item))

    return reward


@functools.cache
def _scorer(name: str) -> Callable[..., float]:
    """Return the verifier of a data set."""
    return reasoning_gym.get_score_answer_fn(name)
