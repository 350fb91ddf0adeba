"""Answers of SGLang: log-probs of the model, seeds, stop tokens, lengths, cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from areal.inference.http import HTTPRollout
from areal.inference.local.sampler import log_probs
from areal.inference.protocol import Sampling
from areal.tests.harness.limits import wait_until
from areal.tests.sglang import server
from areal.tests.sglang.server import SGLangProcess
from areal.tests.vllm.answers import TOLERANCE, endless, prompt, run
from areal.tests.vllm.server import CONTEXT, VOCABULARY, replica

pytestmark = server.marks

WAYS: dict[str, dict[str, Any]] = {
    "T=1": {},
    **{f"T={t:g}": {"temperature": t} for t in (0.5, 2.0)},
    **{f"top_p={p:g}": {"top_p": p} for p in (0.9, 0.1)},
    **{f"top_k={k}": {"top_k": k} for k in (1, 5, 300)},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_log_probs_are_those_of_the_model(fresh: HTTPRollout, way: str) -> None:
    """Of the sampled tokens and of the most likely ones."""
    prompts = [prompt(i, 4 + i) for i in range(6)]
    # Rounding errors of logits are divided by the temperature.
    tolerance = TOLERANCE / min(1.0, WAYS[way].get("temperature") or 1.0)
    asked = [endless(24, seed=i, top_logprobs=3, **WAYS[way]) for i in range(6)]
    answers = run(*(fresh.generate(each, how) for each, how in zip(prompts, asked, strict=True)))
    model = replica()
    for given, how, answer in zip(prompts, asked, answers, strict=True):
        assert len(answer.tokens) == 24
        with torch.no_grad():
            logits = model(torch.tensor([[*given, *answer.tokens]])).logits[0, len(given) - 1 : -1]
        drawn = log_probs(logits, [how] * 24)
        wanted = drawn.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, rtol=0, atol=tolerance)
        for row, top in zip(drawn, answer.top, strict=True):
            best = row.topk(len(top.ids)).values
            torch.testing.assert_close(torch.tensor(top.logprobs), best, rtol=0, atol=tolerance)


def test_answers_of_a_seed_do_not_depend_on_other_requests(fresh: HTTPRollout) -> None:
    together = run(*(fresh.generate(prompt(i), endless(24, seed=i)) for i in range(16)))
    in_turn = [run(fresh.generate(prompt(i), endless(24, seed=i)))[0] for i in range(16)]
    assert [each.tokens for each in together] == [each.tokens for each in in_turn]
    several = run(*(fresh.generate(prompt(1), endless(24, seed=i)) for i in range(8)))
    assert len({each.tokens for each in several}) == 8


def test_stop_tokens_end_answers_and_are_their_last_token(fresh: HTTPRollout) -> None:
    (full,) = run(fresh.generate(prompt(2), endless(40, seed=5)))
    stop = full.tokens[20]
    (answer,) = run(fresh.generate(prompt(2), Sampling(40, seed=5, stop_token_ids=(stop, 255))))
    end = full.tokens.index(stop) + 1
    assert (answer.tokens, answer.finish_reason) == (full.tokens[:end], "stop")
    assert answer.logprobs == pytest.approx(full.logprobs[:end], abs=TOLERANCE)


def test_the_models_own_end_of_sequence_ends_answers(fresh: HTTPRollout) -> None:
    end = replica().generation_config.eos_token_id
    answers = run(*(fresh.generate(prompt(i), Sampling(200, 2.0, seed=i)) for i in range(12)))
    whole = run(*(fresh.generate(prompt(i), endless(200, 2.0, seed=i)) for i in range(12)))
    for answer, full in zip(answers, whole, strict=True):
        length = full.tokens.index(end) + 1 if end in full.tokens else None
        assert answer.tokens == full.tokens[:length]
        assert answer.finish_reason == ("length" if length is None else "stop")
    assert any(answer.finish_reason == "stop" for answer in answers)


def test_cancelled_requests_leave_client_and_server(fresh: HTTPRollout, sglang: SGLangProcess) -> None:
    aborts, drawn = sglang.asked("/abort_request"), sglang.metric("sglang:generation_tokens_total")

    async def cancel() -> None:
        tasks = [asyncio.ensure_future(fresh.generate(prompt(i), endless(450))) for i in range(8)]
        await asyncio.to_thread(wait_until, lambda: sglang.metric("sglang:num_running_reqs") > 4)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(cancel())
    wait_until(lambda: sglang.asked("/abort_request") - aborts >= 8)
    assert len(run(fresh.generate(prompt(1), endless(3)))[0].tokens) == 3
    # The server did not finish them.
    assert sglang.metric("sglang:generation_tokens_total") - drawn < 8 * 450


@pytest.mark.parametrize(("length", "tokens"), [(CONTEXT, 1), (CONTEXT + 1, 1), (CONTEXT - 8, 3)])
def test_answer_that_does_not_fit_is_a_value_error(fresh: HTTPRollout, length: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=r"context of 506"):
        run(fresh.generate(prompt(1, length), endless(tokens)))
    assert len(run(fresh.generate(prompt(1, CONTEXT - 10), endless(4)))[0].tokens) == 4


@pytest.mark.parametrize("token", [VOCABULARY, 10**6])
def test_token_outside_the_vocabulary_is_a_value_error(fresh: HTTPRollout, sglang: SGLangProcess, token: int) -> None:
    """It would have another embedding, or end a server without adapters."""
    with pytest.raises(ValueError, match=rf"{token}, .*{VOCABULARY}"):
        run(fresh.generate([5, token], endless(4)))
    assert len(run(fresh.generate(prompt(1), endless(3)))[0].tokens) == 3
    assert sglang.healthy()
