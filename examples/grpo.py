"""Reinforcement learning by GRPO on a task of your own: rows, and a reward.

    python examples/grpo.py Qwen/Qwen2.5-0.5B-Instruct 20

The reward of held-out rows is computed before the first step and after every fifth, and printed at the end. ``runs/grpo`` has curves,
answers of each step (``samples.html``), checkpoints and, in ``model``, the trained model. The same command continues a run that was
stopped; with a larger number of steps it continues a run that has ended.
"""

import sys
from typing import Any

from areal.recipes import grpo

TOPICS = ("the sea", "a cat", "snow", "trains", "bread", "the moon", "music", "a garden")
ROWS = [{"prompt": f"Write exactly {n} words about {topic}.", "words": n} for n in range(3, 13) for topic in TOPICS]


def reward(row: dict[str, Any], answer: str) -> float:
    """Return 1 for an answer with the right number of words, and less the further away it is."""
    return max(0.0, 1 - abs(len(answer.split()) - row["words"]) / row["words"])


if __name__ == "__main__":
    model, steps = sys.argv[1:]
    run = grpo(
        model,
        ROWS,
        reward,
        steps=int(steps),
        held_out=16,
        eval_every=5,
        checkpoint_every=5,
        max_new_tokens=32,
        resume=True,
    )
    print(f"held-out reward {run.train()['eval/reward']:.4f}")
