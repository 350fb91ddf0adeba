"""Log-probs of prompts, and of the most likely tokens: those of a plain forward, at the temperature of the request."""

from __future__ import annotations

import asyncio

import pytest
import torch

from areal.inference.local.prompt_logprobs import PromptLogprobs
from areal.inference.local.rollout import LocalRollout
from areal.inference.local.sampler import log_probs
from areal.inference.protocol import Completion, Sampling
from areal.tests.unit.inference.local.rollouts import (
    CONTEXT,
    PROMPT,
    WAYS,
    endless,
    model,
    plain_logprobs,
    rollout,
    run,
)


@pytest.mark.parametrize("sampling", WAYS)
def test_prompt_logprobs_are_those_of_a_plain_forward(sampling: Sampling) -> None:
    replica = model()
    sampling = Sampling(**{**vars(sampling), "top_logprobs": 5})
    with rollout(replica) as engine:
        before = engine.model.config._attn_implementation
        result = asyncio.run(engine.prompt_logprobs(PROMPT, sampling))
        assert engine.model.config._attn_implementation == before
        assert asyncio.run(engine.prompt_logprobs(PROMPT[:1], sampling)) == PromptLogprobs(())
    expected = plain_logprobs(replica, PROMPT[:1], PROMPT[1:], sampling)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        rows = log_probs(replica(torch.tensor([PROMPT])).logits[0, :-1], [sampling] * (len(PROMPT) - 1))
    for top, row in zip(result.top, rows, strict=True):
        assert top.ids == tuple(row.topk(5).indices.tolist())
        torch.testing.assert_close(torch.tensor(top.logprobs), row.topk(5).values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampling", WAYS)
def test_answer_has_the_most_likely_tokens_of_the_distribution(sampling: Sampling) -> None:
    sampling = Sampling(**{**vars(sampling), "top_logprobs": 3, "max_new_tokens": 9, "stop_token_ids": (), "seed": 3})
    replica = model()
    with rollout(replica) as engine:
        answer, other = run(engine.generate(PROMPT, sampling), engine.generate(PROMPT, endless(9)))
    assert other.top == ()
    ids = torch.tensor([[*PROMPT, *answer.tokens]])
    with torch.no_grad():
        rows = log_probs(replica(ids).logits[0, len(PROMPT) - 1 : -1], [sampling] * 9)
    assert len(answer.top) == 9
    for top, row, token, logprob in zip(answer.top, rows, answer.tokens, answer.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(top.logprobs), row.topk(3).values, rtol=0, atol=1e-5)
        assert sorted(top.logprobs, reverse=True) == list(top.logprobs)
        if token in top.ids:
            assert top.logprobs[top.ids.index(token)] == pytest.approx(logprob, abs=1e-6)


def test_running_answers_are_not_changed_by_prompt_logprobs() -> None:
    replica = model()
    with rollout(replica) as engine:
        [expected] = run(engine.generate(PROMPT, endless(80, seed=1)))

        async def together() -> tuple[Completion, list[PromptLogprobs]]:
            answer = asyncio.create_task(engine.generate(PROMPT, endless(80, seed=1)))
            scores = [await engine.prompt_logprobs(PROMPT, Sampling()) for _ in range(5)]
            return await answer, scores

        answer, scores = asyncio.run(asyncio.wait_for(together(), 60))
    assert answer.tokens == expected.tokens
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert len(set(scores)) == 1


def test_bad_prompts_and_states_raise() -> None:
    def score(engine: LocalRollout, prompt: list[int]) -> PromptLogprobs:
        return asyncio.run(engine.prompt_logprobs(prompt, Sampling()))

    with rollout() as engine:
        with pytest.raises(ValueError, match="prompt_ids is empty"):
            score(engine, [])
        with pytest.raises(ValueError, match="max_context"):
            score(engine, [1] * (CONTEXT + 1))
        # Scoring needs no room for an answer.
        assert len(score(engine, [1] * CONTEXT).logprobs) == CONTEXT - 1
        engine.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            score(engine, PROMPT)
    with pytest.raises(RuntimeError, match="closed"):
        score(engine, PROMPT)
    with pytest.raises(ValueError, match="top_logprobs = -1: it must be at least 0"):
        Sampling(top_logprobs=-1)


@pytest.mark.parametrize("most", [24, 7])
def test_logits_of_a_prompt_are_computed_a_few_at_a_time(most: int) -> None:
    """The layers run once, and no forward computes more rows of logits than ``max_batch_tokens``."""
    replica, rows, layers = model(), [], []
    prompt = PROMPT * 3
    with rollout(replica, max_batch_tokens=most, max_requests=4) as engine:
        hooks = [
            replica.get_output_embeddings().register_forward_hook(lambda _, args, out: rows.append(out.shape[:-1])),
            replica.get_input_embeddings().register_forward_pre_hook(lambda _, args: layers.append(args[0].shape)),
        ]
        scores = asyncio.run(engine.prompt_logprobs(prompt, Sampling(top_logprobs=2)))
        for hook in hooks:
            hook.remove()
    assert layers == [(1, len(prompt))]
    assert sum(count for _, count in rows) == len(prompt) - 1
    assert max(count for _, count in rows) <= most
    expected = plain_logprobs(replica, prompt[:1], prompt[1:], Sampling())
    torch.testing.assert_close(torch.tensor(scores.logprobs), expected, rtol=0, atol=1e-5)
    assert len(scores.top) == len(prompt) - 1
    # The replica is as before: its own forward computes all logits.
    assert replica(torch.tensor([PROMPT])).logits.shape[1] == len(PROMPT)


def test_prompts_that_wait_are_computed_together() -> None:
    """Of several lengths, sampling parameters and numbers of top tokens. One that is cancelled, and one that fails, change no other."""
    replica, shapes = model(), []
    read = replica.get_input_embeddings().register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    asked = [(PROMPT[i : 20 + 2 * i], Sampling(temperature=1 + i % 2, top_logprobs=i % 3)) for i in range(10)]
    with rollout(replica, max_batch_tokens=100) as engine:

        async def together() -> list[PromptLogprobs]:
            with engine._updating:  # holds the scores back until all have asked
                first = asyncio.ensure_future(engine.prompt_logprobs(PROMPT, Sampling()))
                await asyncio.sleep(0.05)
                tasks = [asyncio.ensure_future(engine.prompt_logprobs(*each)) for each in asked]
                cancelled = asyncio.ensure_future(engine.prompt_logprobs(PROMPT[:30], Sampling()))
                await asyncio.sleep(0)
                cancelled.cancel()
            await first
            return await asyncio.gather(*tasks)

        scores = asyncio.run(asyncio.wait_for(together(), 60))
        read.remove()
        assert shapes[0] == (1, 41)
        # Sorted by length, and at most 100 tokens with padding.
        assert shapes[1:] == [(4, 23), (3, 26), (3, 29)]
        for (prompt, sampling), score in zip(asked, scores, strict=True):
            expected = plain_logprobs(replica, prompt[:1], prompt[1:], sampling)
            torch.testing.assert_close(torch.tensor(score.logprobs), expected, rtol=0, atol=1e-5)
            assert [len(top.ids) for top in score.top] == [sampling.top_logprobs] * bool(sampling.top_logprobs) * (
                len(prompt) - 1
            )
        calls = []

        def fail(_: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
            calls.append(len(kwargs["input_ids"]))
            if len(kwargs["input_ids"]) > 1 or kwargs["input_ids"][0, 0] == 9:
                raise MemoryError("no memory for this one")

        hook = replica.register_forward_pre_hook(fail, with_kwargs=True)

        async def one_fails() -> list[object]:
            with engine._updating:
                tasks = [asyncio.ensure_future(engine.prompt_logprobs([5 + i, 6, 7], Sampling())) for i in range(6)]
                await asyncio.sleep(0.05)
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = asyncio.run(asyncio.wait_for(one_fails(), 60))
        hook.remove()
    assert [isinstance(each, MemoryError) for each in results] == [False] * 4 + [True] + [False]
    assert sum(isinstance(each, PromptLogprobs) for each in results) == 5
