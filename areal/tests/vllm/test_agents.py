"""Sessions of the gateway in front of vLLM, whose weights are updated between the turns."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import torch

from areal.inference.gateway import Gateway
from areal.inference.http import HTTPRollout
from areal.inference.protocol import Sampling
from areal.tests.unit.inference.gateway.programs import ask, tokenizer
from areal.tests.unit.inference.local.rollouts import plain_logprobs
from areal.tests.vllm import server
from areal.tests.vllm.answers import TOLERANCE
from areal.tests.vllm.server import replica, weights

pytestmark = server.marks
SAMPLING = Sampling(24, temperature=0.8)
TURNS = 3


def test_turns_have_the_log_probs_of_their_versions(fresh: HTTPRollout) -> None:
    async def program(base_url: str, number: int, turn_ends: asyncio.Barrier) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {number}+2?"}]
        async with httpx2.AsyncClient(base_url=base_url, timeout=120) as http:
            for _ in range(TURNS):
                reply = await ask(http, *messages)
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "More?"}]
                await turn_ends.wait()
                await turn_ends.wait()

    async def work() -> list[Any]:
        ends = asyncio.Barrier(5)
        async with Gateway(tokenizer(), SAMPLING) as gateway:
            opened = [gateway.session(fresh) for _ in range(4)]
            sessions = [each.__enter__() for each in opened]
            programs = [asyncio.ensure_future(program(s.base_url, i, ends)) for i, s in enumerate(sessions)]
            for version in range(1, TURNS + 1):
                await ends.wait()
                await asyncio.to_thread(fresh.update, weights(version), version)
                await ends.wait()
            await asyncio.gather(*programs)
            for each in opened:
                each.__exit__(None, None, None)
        return [session.sequences() for session in sessions]

    models = {version: replica(version or None) for version in range(TURNS)}
    for sequences in asyncio.run(work()):
        (sampled,) = sequences
        before: list[int] = []
        versions = []
        for segment in sampled.segments:
            tokens = [int(token) for token in segment.tokens]
            if segment.trainable:
                (version,) = set(segment.values["versions"].tolist())
                versions.append(version)
                wanted = plain_logprobs(models[version], before, tokens, SAMPLING)
                torch.testing.assert_close(segment.values["rollout_logprobs"], wanted, rtol=0, atol=TOLERANCE / 0.8)
            before += tokens
        assert versions == list(range(TURNS))
