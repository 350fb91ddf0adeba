"""Pairs of answers to sums: the bare number is preferred to a sentence."""

from __future__ import annotations

import random
from functools import cache

Pair = dict[str, str]

HELD_OUT = 128


def train() -> list[Pair]:
    """Return pairs for training."""
    return _pairs()[HELD_OUT:]


def held_out() -> list[Pair]:
    """Return pairs for the evaluation."""
    return _pairs()[:HELD_OUT]


@cache
def _pairs() -> list[Pair]:
    sums = [(a, b) for a in range(1, 40) for b in range(1, 40)]
    random.Random(0).shuffle(sums)
    return [
        {"prompt": f"What is {a} + {b}?", "chosen": f"{a + b}", "rejected": f"The sum of {a} and {b} is {a + b}."}
        for a, b in sums
    ]
