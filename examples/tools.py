"""GRPO with a tool: a Python function that the model may call before it answers.

    python examples/tools.py Qwen/Qwen2.5-0.5B-Instruct 20

The types and the docstring of the function become the description that the model reads. A call that fails has the error as its
result. ``runs/tools/metrics.jsonl`` has ``rollout/tool_calls`` and ``rollout/tool_errors`` of each step, and the reward of held-out
rows is printed at the end. The chat template of the model must support tools.
"""

import calendar
import sys
from datetime import date, timedelta
from typing import Any

from areal.recipes import grpo

DATES = [date(1969, 7, 20) + timedelta(days=97 * number) for number in range(200)]
ROWS = [{"question": f"Which day of the week was {day}?", "answer": f"{day:%A}"} for day in DATES]


def weekday(day: str) -> str:
    """Return the day of the week of a date.

    Args:
        day: the date, such as 1969-07-20.
    """
    return f"{date.fromisoformat(day):%A}"


def reward(row: dict[str, Any], answer: str) -> float:
    """Return 1 for an answer that names the right day and no other."""
    return float([day for day in calendar.day_name if day in answer] == [row["answer"]])


def main(model: str, steps: str) -> None:
    run = grpo(
        model,
        ROWS,
        reward,
        tools=[weekday],
        steps=int(steps),
        held_out=32,
        max_turns=3,
        max_new_tokens=64,
        output="runs/tools",
    )
    print(f"held-out reward {run.train()['eval/reward']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
