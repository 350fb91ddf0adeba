"""GRPO without a trainer: sample, reward, compare, update, in a loop that you can edit.

    python examples/own_loop.py Qwen/Qwen2.5-0.5B-Instruct 10

Prints the mean reward of each step.
"""

import asyncio
import sys
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal import FinetuneSpec, OptimizerConfig, TrainEngineConfig, create_engine
from areal.chat import Chat
from areal.inference import LocalRollout, Sampling
from areal.trainer.advantages import Groups, grpo, to_samples
from areal.trainer.losses import ImportanceSampling, TokenMean, policy_objective
from areal.trainer.rollout import Sequence

QUESTIONS = [f"Name an animal that begins with the letter {letter}." for letter in "abcdefgh"]
GROUP_SIZE = 8


async def play(rollout: LocalRollout, chat: Chat) -> list[Sequence]:
    """Return a group of answers to each question, with their rewards: short answers are better."""

    async def one(group: int) -> Sequence:
        prompt = chat.prompt([{"role": "user", "content": QUESTIONS[group]}])
        answer = await rollout.generate(prompt, Sampling(max_new_tokens=16, stop_token_ids=chat.stop_token_ids))
        reward = 1 - len(answer.tokens) / 16
        return replace(Sequence.single(prompt, answer, reward), group=group)

    return await asyncio.gather(*(one(group) for group in range(len(QUESTIONS)) for _ in range(GROUP_SIZE)))


def main(model: str, steps: int) -> None:
    chat = Chat(AutoTokenizer.from_pretrained(model))
    objective = policy_objective(ImportanceSampling(old="rollout_logprobs"), TokenMean())
    with create_engine(TrainEngineConfig(path=model, optimizer=OptimizerConfig(lr=1e-5))) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=steps))
        replica: Any = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
        with LocalRollout(replica.to(engine.device).eval(), max_context=256, seed=0) as rollout:
            for step in range(1, steps + 1):
                batch = [sequence.sample() for sequence in asyncio.run(play(rollout, chat))]
                rewards = torch.stack([sample["rewards"] for sample in batch])
                groups = Groups.local(torch.stack([sample["group_ids"] for sample in batch]))
                advantages = to_samples(grpo(rewards, groups), [sample["loss_mask"] for sample in batch])
                for sample, values in zip(batch, advantages, strict=True):
                    sample["advantages"] = values
                done = engine.train_batch(batch, objective)
                rollout.update(engine.named_tensors(), version=step)
                print(f"step {step}: reward {rewards.mean():.3f}, loss {done.loss:.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
