"""Questions with two operations, and a calculator that computes one at a time."""

from __future__ import annotations

import random
from typing import Any

from areal.chat import ToolCall

Row = dict[str, Any]

SHOWN, HELD_OUT, TRAIN = 24, 60, 96


def calculate(a: int, operation: str, b: int) -> str:
    """Compute with two numbers.

    Args:
        a: first number.
        operation: plus, minus or times.
        b: second number.
    """
    if max(abs(a), abs(b)) >= 10**6:
        raise ValueError("numbers have at most six digits")
    return str({"plus": a + b, "minus": a - b, "times": a * b}[operation])


def reward(row: Row, answer: str) -> float:
    """Return 1 if the last answer is the number."""
    return float(answer.strip() == row["answer"])


def shown() -> list[Row]:
    """Return conversations with both calls and the answer."""
    return [{"messages": _solved(row)} for row in _questions(SHOWN, seed=0)]


def train() -> list[Row]:
    """Return questions for training."""
    return _questions(TRAIN, seed=1)


def held_out() -> list[Row]:
    """Return questions for the evaluation."""
    return _questions(HELD_OUT, seed=2)


def _questions(number: int, seed: int) -> list[Row]:
    draw = random.Random(seed)
    rows = []
    for _ in range(number):
        a, b, c = draw.randint(10, 99), draw.randint(10, 99), draw.randint(2, 9)
        first, second = draw.choice(("plus", "minus")), draw.choice(("times", "plus"))
        middle = calculate(a, first, b)
        steps = [(a, first, b, middle), (int(middle), second, c, calculate(int(middle), second, c))]
        question = f"What is {a} {first} {b}, and that {second} {c}?"
        rows.append({"question": question, "answer": steps[-1][-1], "steps": steps})
    return rows


def _solved(row: Row) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    for a, operation, b, result in row["steps"]:
        call = ToolCall("calculate", {"a": a, "operation": operation, "b": b})
        messages += [{"role": "assistant", "content": "", "tool_calls": [call.message()]}, call.result(result)]
    return [*messages, {"role": "assistant", "content": row["answer"]}]
