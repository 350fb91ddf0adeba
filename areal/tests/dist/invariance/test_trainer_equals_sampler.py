"""Log-probs of answers of ``LocalRollout`` and of the trainer's forward: the same bits with ``batch_invariant`` on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.api import LoRAConfig, MicroBatchSpec
from areal.inference.local.rollout import LocalRollout
from areal.inference.protocol import Completion, Sampling
from areal.tests.grid.models import VOCAB, adapter_dir
from areal.tests.harness.tiny import family_dir, started

TEMPERATURE = 0.7
ADAPTER = LoRAConfig(rank=3, alpha=6.0)

Request = tuple[list[int], int]
"""Prompt, and number of new tokens."""


def requests() -> list[Request]:
    """Return requests with prompts on both sides of the borders of tiles, three equal ones, and one that begins as they do."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (1, 17, 33, 64)]
    common = torch.randint(3, VOCAB, (50,), generator=generator).tolist()
    prompts += [common, common, common, [*common[:40], 5, 6]]
    return [(prompt, (3, 14, 9, 5)[i % 4]) for i, prompt in enumerate(prompts)]


def rollout(path: str, dtype: str, *, invariant: bool, **options: Any) -> LocalRollout:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
    return LocalRollout(model, max_context=128, batch_invariant=invariant, **options)


def answers(
    engine: LocalRollout, asked: Sequence[Request], adapter: str | None = None, *, one_by_one: bool = False
) -> list[Completion]:
    def answer(number: int) -> Any:
        prompt, count = asked[number]
        sampling = Sampling(max_new_tokens=count, temperature=TEMPERATURE, seed=number, stop_token_ids=())
        return engine.generate(prompt, sampling, adapter)

    async def together() -> list[Completion]:
        if one_by_one:
            return [await answer(i) for i in range(len(asked))]
        return await asyncio.wait_for(asyncio.gather(*(answer(i) for i in range(len(asked)))), 120)

    return asyncio.run(together())


def differing(engine: Any, asked: Sequence[Request], given: Sequence[Completion]) -> int:
    """Return the number of answers whose log-probs have other bits in the trainer's forward over all of them."""
    batch = [
        {"input_ids": torch.tensor([*prompt, *answer.tokens])} for (prompt, _), answer in zip(asked, given, strict=True)
    ]
    count = 0
    for (prompt, _), answer, logprobs in zip(asked, given, engine.forward_batch(batch), strict=True):
        trained: Tensor = logprobs[len(prompt) - 1 : len(prompt) - 1 + len(answer.tokens)]
        count += not torch.equal(torch.tensor(answer.logprobs), trained)
    return count


def trainer(path: str, dtype: str, *, invariant: bool, share: bool = False, **changes: Any) -> Any:
    spec = MicroBatchSpec(max_tokens_per_mb=500, share_prefixes=share)
    fields: dict[str, Any] = {"dtype": dtype, "temperature": TEMPERATURE, "optimizer": None, "mb_spec": spec, **changes}
    return started("fsdp:d1", path=path, fsdp={"batch_invariant": invariant}, **fields)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", "float32"), ("qwen3", "bfloat16"), ("llama", "float32"), ("qwen2", "float32"), ("qwen3_moe", "float32")],
)
def test_answers_have_the_log_probs_of_the_trainer(family: str, dtype: str) -> None:
    path, asked = family_dir(family), requests()
    with rollout(path, dtype, invariant=True) as engine:
        given = answers(engine, asked)
    for share in (False, True):
        with trainer(path, dtype, invariant=True, share=share) as policy:
            assert differing(policy, asked, given) == 0


@pytest.mark.world(1)
def test_without_the_option_log_probs_differ() -> None:
    path, asked = family_dir("qwen3"), requests()[:3]
    with rollout(path, "float32", invariant=False) as engine, trainer(path, "float32", invariant=False) as policy:
        assert differing(policy, asked, answers(engine, asked)) > 0


@pytest.mark.world(1)
def test_answers_do_not_depend_on_how_they_are_batched() -> None:
    path, asked = family_dir("qwen3"), requests()[2:7]
    given = []
    # A cache with room for one answer and a half pauses some, which continue later. Prompts are computed in chunks of 12 tokens.
    ways: list[dict[str, Any]] = [{}, {"max_requests": 2, "max_batch_tokens": 12}, {"cache_tokens": 192}]
    for options in ways:
        with rollout(path, "float32", invariant=True, **options) as engine:
            given.append(answers(engine, asked))
            # Prompts that are in the cache by now.
            if not options:
                given.append(answers(engine, asked, one_by_one=True))
    for others in given[1:]:
        assert [(x.tokens, x.logprobs) for x in others] == [(x.tokens, x.logprobs) for x in given[0]]


@pytest.mark.world(1)
def test_scored_prompts_have_the_log_probs_of_the_trainer() -> None:
    path, asked = family_dir("qwen3"), [prompt for prompt, _ in requests() if len(prompt) > 1]
    sampling = Sampling(temperature=TEMPERATURE)
    with rollout(path, "float32", invariant=True) as engine:

        async def together() -> Any:
            return await asyncio.gather(*(engine.prompt_logprobs(prompt, sampling) for prompt in asked))

        scored = asyncio.run(together())
    with trainer(path, "float32", invariant=True) as policy:
        expected = policy.forward_batch([{"input_ids": torch.tensor(prompt)} for prompt in asked])
    assert all(torch.equal(torch.tensor(a.logprobs), b[:-1]) for a, b in zip(scored, expected, strict=True))


@pytest.mark.world(1)
def test_answers_of_an_adapter_have_the_log_probs_of_its_trainer() -> None:
    path, asked = family_dir("qwen3"), requests()
    folder = adapter_dir(path, ADAPTER)
    with ExitStack() as stack:
        engine = stack.enter_context(rollout(path, "float32", invariant=True))
        policy = stack.enter_context(trainer(path, "float32", invariant=True, lora=ADAPTER))
        engine.add_adapter("mine", folder)
        policy.adapters.load(policy.adapters.selected, folder)
        given = answers(engine, asked, "mine")
        assert differing(policy, asked, given) == 0
        with policy.reference():
            assert differing(policy, asked, given) > 0


@pytest.mark.world(1)
def test_adapters_of_the_head_are_refused_by_name() -> None:
    path = family_dir("qwen3")
    with (
        rollout(path, "float32", invariant=True) as engine,
        pytest.raises(ValueError, match="adapter of the output head"),
    ):
        engine.add_adapter("mine", adapter_dir(path, ADAPTER, head=True))


@pytest.mark.parametrize(
    ("family", "dtype", "text"),
    [
        ("gemma3_text", "float32", "model_type = 'gemma3_text'"),
        ("qwen3", "float64", "dtype = float64"),
    ],
)
def test_replicas_that_are_not_supported_are_refused_by_name(family: str, dtype: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"batch_invariant = True with {text}"):
        rollout(family_dir(family), dtype, invariant=True)
