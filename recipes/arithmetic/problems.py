"""Sums of two numbers of one or two digits, from reasoning-gym, with its verifier. No question is in two of the parts."""

from __future__ import annotations

from functools import cache
from typing import Any

import reasoning_gym

from areal.trainer.rewards.reasoning_gym_score import reasoning_gym_reward

Entry = dict[str, Any]

HELD_OUT, SHOWN = 400, 64

_score = reasoning_gym_reward(text=str)


def reward(row: Entry, answer: str) -> float:
    """Return 1 for a right answer, else 0. The verifier gives less than 1 to a text that contains it."""
    return float(_score(row, answer) >= 1)


def held_out() -> list[Entry]:
    """Return the problems of the evaluation."""
    return _problems()[:HELD_OUT]


def shown() -> list[Entry]:
    """Return answered problems for the first supervised steps."""
    return _answered(_problems()[HELD_OUT : HELD_OUT + SHOWN])


def train() -> list[Entry]:
    """Return problems for training."""
    return _problems()[HELD_OUT + SHOWN :]


def answered() -> list[Entry]:
    """Return the problems for training with their answers."""
    return _answered(train())


def answered_held_out() -> list[Entry]:
    """Return the problems of the evaluation with their answers."""
    return _answered(held_out())


def _answered(problems: list[Entry]) -> list[Entry]:
    return [{"prompt": each["question"], "completion": f" {each['answer']}"} for each in problems]


@cache
def _problems() -> list[Entry]:
    data = reasoning_gym.create_dataset(
        "chain_sum", seed=0, size=4000, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    # An entry has the columns question, answer and metadata. Some questions are drawn twice.
    different = {entry["question"]: entry for entry in data}
    return [entry | {"question": f"{question}\nAnswer:"} for question, entry in different.items()]
