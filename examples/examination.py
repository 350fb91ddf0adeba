"""A model's answers to held-out problems, from the rollout that serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from chat import ChatFormat
from tasks import Problem, Task

from areal.trainer.rollout.exchange import gather
from areal.trainer.rollout.protocol import RolloutClient, Sampling
from areal.utils.seeding import mixed


async def answer_all(
    client: RolloutClient, chat: ChatFormat, problems: Mapping[int, Problem], sampling: Sampling, seed: int
) -> list[str]:
    """The answers to numbered problems, each with noise of its own, in order."""
    requests = (
        client.generate(chat.prompt_ids(problem), replace(sampling, seed=mixed(seed, number)))
        for number, problem in problems.items()
    )
    return [chat.text(completion.tokens) for completion in await asyncio.gather(*requests)]


def examine(client: RolloutClient, chat: ChatFormat, task: Task, sampling: Sampling, seed: int) -> list[bool]:
    """Which held-out problems are answered right. Every rank answers its share; the same on every rank.

    Args:
        seed: of the noise; with the same one, two models are told apart by their weights alone.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    share = dict(list(enumerate(task.held_out))[rank::size])
    written = asyncio.run(answer_all(client, chat, share, sampling, seed))
    mine = [task.is_right(answer, problem) for answer, problem in zip(written, share.values(), strict=True)]
    right = [False] * len(task.held_out)
    for other, found in enumerate(gather(mine)):
        right[other::size] = found
    return right
