"""Tokens, log-probs and versions of a session in front of a real model."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import torch
from transformers import Qwen3ForCausalLM

from areal.inference import LocalRollout, Sampling
from areal.inference.gateway import Gateway
from areal.inference.local.sampler import log_probs
from areal.tests.harness.limits import PROMPTLY
from areal.tests.unit.chat.chat_models import chat_model
from areal.tests.unit.inference.gateway.programs import USER, ask, tokenizer
from areal.weight_sync.apply import ModuleSource

SAMPLING = Sampling(24, temperature=0.8)


def model(seed: int) -> Qwen3ForCausalLM:
    return chat_model(seed, spread=0.3)


@torch.no_grad()
def errors(replica: Qwen3ForCausalLM, sampled: Any) -> torch.Tensor:
    """Return differences between recorded log-probs and those of one plain forward over the sequence."""
    ids = torch.tensor([[int(token) for each in sampled.segments for token in each.tokens]])
    plain = log_probs(replica(ids).logits[0, :-1], [SAMPLING] * (ids.shape[1] - 1)).gather(1, ids[0, 1:, None])[:, 0]
    found, place = [], 0
    for each in sampled.segments:
        if each.trainable:
            recorded = each.values["rollout_logprobs"]
            found.append(recorded - plain[place - 1 : place - 1 + len(recorded)])
        place += len(each.tokens)
    return torch.cat(found).abs()


def test_three_turns_of_parallel_sessions_have_the_log_probs_of_the_model() -> None:
    async def program(base_url: str, number: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {number}+2?"}]
        async with httpx2.AsyncClient(base_url=base_url, timeout=3 * PROMPTLY) as http:
            for turn in range(3):
                reply = await ask(http, *messages)
                messages += [reply["choices"][0]["message"], {"role": "user", "content": f"And turn {turn}?"}]

    async def work(rollout: LocalRollout) -> list[Any]:
        async with Gateway(tokenizer(), SAMPLING) as gateway:
            opened = [gateway.session(rollout) for _ in range(8)]
            sessions = [each.__enter__() for each in opened]
            await asyncio.gather(*(program(session.base_url, number) for number, session in enumerate(sessions)))
            for each in opened:
                each.__exit__(None, None, None)
        return [session.sequences() for session in sessions]

    with LocalRollout(model(0), max_context=512, max_requests=8) as rollout:
        recorded = asyncio.run(work(rollout))
    replica = model(0)
    for sequences in recorded:
        (sampled,) = sequences
        assert sum(each.trainable for each in sampled.segments) == 3
        assert errors(replica, sampled).max() < 5e-5


def test_update_between_turns_keeps_versions_per_token() -> None:
    async def work(rollout: LocalRollout) -> Any:
        async with Gateway(tokenizer(), SAMPLING) as gateway:
            with gateway.session(rollout) as session:
                async with httpx2.AsyncClient(base_url=session.base_url, timeout=3 * PROMPTLY) as http:
                    first = await ask(http, USER)
                    rollout.update(ModuleSource(model(1)).named_tensors(), 1)
                    await ask(http, USER, first["choices"][0]["message"], {"role": "user", "content": "More?"})
        return session.sequences()

    with LocalRollout(model(0), max_context=512, max_requests=8) as rollout:
        (sampled,) = asyncio.run(work(rollout))
    first, second = (each for each in sampled.segments if each.trainable)
    assert set(first.values["versions"].tolist()) == {0}
    assert set(second.values["versions"].tolist()) == {1}
    # Each answer has the log-probs of the weights that wrote it.
    old, new = errors(model(0), sampled), errors(model(1), sampled)
    length = len(first.tokens)
    assert max(old[:length].max(), new[length:].max()) < 5e-5
    assert min(new[:length].max(), old[length:].max()) > 1e-2
