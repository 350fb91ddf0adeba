"""Accuracy on held-out problems, with answers from a rollout engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from chat import ChatFormat
from tasks import Problem, Task

from areal.inference import RolloutClient, Sampling
from areal.trainer.rollout.exchange import gather
from areal.utils.seeding import mixed


async def answer_all(
    client: RolloutClient, chat: ChatFormat, problems: Mapping[int, Problem], sampling: Sampling, seed: int
) -> list[str]:
    """Return the answers to numbered problems, in order. The seed of an answer depends on its number."""
    requests = (
        client.generate(chat.prompt_ids(problem), replace(sampling, seed=mixed(seed, number)))
        for number, problem in problems.items()
    )
    return [chat.text(completion.tokens) for completion in await asyncio.gather(*requests)]


def examine(client: RolloutClient, chat: ChatFormat, task: Task, sampling: Sampling, seed: int) -> list[bool]:
    """Return for each held-out problem whether the answer is right. Every rank answers a slice; the result is equal on all ranks.

    Args:
        client: rollout engine.
        chat: conversion to token ids.
        task: problems and verifier.
        sampling: sampling parameters.
        seed: seed of the sampling. With the same seed, two models differ in their weights only.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = dict(list(enumerate(task.held_out))[rank::size])
    written = asyncio.run(answer_all(client, chat, mine, sampling, seed))
    my_results = [task.is_right(answer, problem) for answer, problem in zip(written, mine.values(), strict=True)]
    right = [False] * len(task.held_out)
    for other_rank, results in enumerate(gather(my_results)):
        right[other_rank::size] = results
    return right
