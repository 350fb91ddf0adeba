"""A model's answers to held-out problems, from the rollout that serves it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import torch.distributed as dist
from chat import ChatFormat
from tasks import Problem, Task

from areal.trainer.rollout.exchange import gather
from areal.trainer.rollout.protocol import RolloutClient, Sampling


async def answer_all(
    client: RolloutClient, chat: ChatFormat, problems: Sequence[Problem], sampling: Sampling
) -> list[str]:
    """The answers to problems, in order."""
    written = await asyncio.gather(*(client.generate(chat.prompt_ids(problem), sampling) for problem in problems))
    return [chat.text(completion.tokens) for completion in written]


def examine(client: RolloutClient, chat: ChatFormat, task: Task, sampling: Sampling) -> list[bool]:
    """Which held-out problems are answered right, greedily. Every rank answers its share; the same on every rank.

    Args:
        sampling: its temperature is left out.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    share = task.held_out[rank::size]
    written = asyncio.run(answer_all(client, chat, share, dataclasses.replace(sampling, temperature=0.0)))
    mine = [task.is_right(answer, problem) for answer, problem in zip(written, share, strict=True)]
    right = [False] * len(task.held_out)
    for other, found in enumerate(gather(mine)):
        right[other::size] = found
    return right
