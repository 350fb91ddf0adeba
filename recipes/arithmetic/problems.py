"""Sums of two numbers of one or two digits, from reasoning-gym, with its verifier. No question is in two of the parts."""

from __future__ import annotations

from functools import cache
from typing import Any

import reasoning_gym

from areal.trainer.rewards.reasoning_gym_score import reasoning_gym_reward

Entry = dict[str, Any]

HELD_OUT, SHOWN = 400, 64

reward = reasoning_gym_reward(text=str)
"""1 for a right answer, else 0."""


def held_out() -> list[Entry]:
    """Return the problems of the evaluation."""
    return _problems()[:HELD_OUT]


def shown() -> list[Entry]:
    """Return problems for the first supervised steps."""
    return _problems()[HELD_OUT : HELD_OUT + SHOWN]


def train() -> list[Entry]:
    """Return problems for training."""
    return _problems()[HELD_OUT + SHOWN :]


@cache
def _problems() -> list[Entry]:
    data = reasoning_gym.create_dataset(
        "chain_sum", seed=0, size=4000, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    # An entry has the columns question, answer and metadata. Some questions are drawn twice.
    return list({entry["question"]: entry for entry in data}.values())
