"""GRPO in an environment of your own: a game of several turns.

    python examples/environment.py Qwen/Qwen2.5-0.5B-Instruct 20

The model guesses a number and is told whether it is higher or lower. The reward of an episode is the sum over its steps.
``runs/environment/metrics.jsonl`` has ``rollout/turns`` and ``rollout/done`` of each step, and the reward of held-out rows is printed
at the end.
"""

import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from areal.chat import Chat, ParsedAnswer
from areal.inference import Sampling
from areal.recipes import GRPOConfig, GRPORun
from areal.trainer.rollout.environment_episode import EnvironmentEpisode, Step

PROMPT = "I have a number from 1 to 50. Answer with a guess, only the number."
ROWS = [{"prompt": PROMPT, "number": number} for number in range(1, 51)]


class Guess:
    """Reward 1 for the right guess, and -0.1 for any other answer."""

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self.number = row["number"]
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, answer: ParsedAnswer) -> Step:
        text = answer.content.strip()
        if not text.isdecimal():
            hint = "Only the number, please."
        elif int(text) == self.number:
            return Step(reward=1.0, done=True)
        else:
            hint = "It is higher." if int(text) < self.number else "It is lower."
        return Step([{"role": "user", "content": hint}], reward=-0.1)


def main(model: str, steps: str) -> None:
    chat = Chat(AutoTokenizer.from_pretrained(model))
    episode = EnvironmentEpisode(chat, Guess, Sampling(max_new_tokens=8), max_turns=6)
    config = GRPOConfig(model=model, steps=int(steps), held_out=8, max_context=512, output=Path("runs/environment"))
    run = GRPORun(config, ROWS, episode=episode)
    print(f"held-out reward {run.train()['eval/reward']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
