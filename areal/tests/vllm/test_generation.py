"""Answers of vLLM: log-probs of the engine, seeds, stop tokens, frequencies, many requests, cancellation."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import MicroBatchSpec, TrainEngine
from areal.inference.http import HTTPRollout
from areal.inference.local.sampler import log_probs
from areal.inference.protocol import Completion, Sampling
from areal.tests.harness.limits import wait_until
from areal.tests.harness.tiny import started
from areal.tests.vllm import server
from areal.tests.vllm.answers import TOLERANCE, endless, prompt, run
from areal.tests.vllm.server import CONTEXT, VLLMProcess, replica, served_model
from areal.trainer.rollout.sequence import Sequence

pytestmark = server.marks

WAYS: dict[str, dict[str, Any]] = {
    "T=1": {},
    **{f"T={t:g}": {"temperature": t} for t in (0.5, 0.7, 1.3, 2.0)},
    **{f"top_p={p:g}": {"top_p": p} for p in (0.9, 0.5, 0.1)},
    **{f"top_k={k}": {"top_k": k} for k in (1, 5, 300)},
    "all": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "greedy": {"temperature": 0.0},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[TrainEngine]:
    with started("fsdp:d1", path=served_model(), mb_spec=MicroBatchSpec(max_tokens_per_mb=2048)) as one:
        yield one


def engine_logprobs(engine: TrainEngine, prompts: list[list[int]], answers: list[Completion]) -> list[Tensor]:
    """Return the engine's log-probs of answers, as a trainer computes them; if sampling was truncated, from its logits."""
    pairs = list(zip(prompts, answers, strict=True))
    sampling = answers[0].sampling
    assert sampling is not None
    if sampling.top_p == 1 and not sampling.top_k:
        samples = [Sequence.single(given, answer, 0.0).sample() for given, answer in pairs]
        batch = [{name: each[name] for name in ("input_ids", "temperature") if name in each} for each in samples]
        rows = engine.forward_batch(
            [each if sampling.temperature else {"input_ids": each["input_ids"]} for each in batch]
        )
        return [row[len(given) - 1 : -1] for row, given in zip(rows, prompts, strict=True)]
    rows = engine.forward_batch(
        [{"input_ids": torch.tensor([*given, *answer.tokens])} for given, answer in pairs], outputs=("logits",)
    )
    drawn = [
        log_probs(row[len(given) - 1 : -1], [sampling] * len(answer.tokens))
        for row, (given, answer) in zip(rows, pairs, strict=True)
    ]
    return [
        row.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0] for row, answer in zip(drawn, answers, strict=True)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_log_probs_are_those_of_the_engine(connect: Callable[..., HTTPRollout], engine: TrainEngine, way: str) -> None:
    rollout, prompts = connect(), [prompt(i, 4 + i) for i in range(6)]
    # Rounding errors of logits are divided by the temperature.
    tolerance = TOLERANCE / min(1.0, WAYS[way].get("temperature") or 1.0)
    answers = run(*(rollout.generate(each, endless(32, seed=i, **WAYS[way])) for i, each in enumerate(prompts)))
    for wanted, answer in zip(engine_logprobs(engine, prompts, answers), answers, strict=True):
        assert len(answer.tokens) == 32
        torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, rtol=0, atol=tolerance)


def test_greedy_tokens_are_the_most_likely(connect: Callable[..., HTTPRollout], engine: TrainEngine) -> None:
    (answer,) = run(connect().generate(prompt(1), endless(40, 0.0)))
    ids = torch.tensor([*prompt(1), *answer.tokens])
    (logits,) = engine.forward_batch([{"input_ids": ids}], outputs=("logits",))
    assert logits[5:-1].argmax(-1).tolist() == list(answer.tokens)


@pytest.mark.parametrize("way", ["T=0.7", "top_k=5", "greedy"])
def test_most_likely_tokens_are_those_of_the_model(connect: Callable[..., HTTPRollout], way: str) -> None:
    sampling = endless(16, seed=1, top_logprobs=3, **WAYS[way])
    (answer,) = run(connect().generate(prompt(1), sampling))
    with torch.no_grad():
        logits = replica()(torch.tensor([[*prompt(1), *answer.tokens]])).logits[0, len(prompt(1)) - 1 : -1]
    best = log_probs(logits, [sampling] * 16).topk(3)
    found = torch.tensor([each.logprobs for each in answer.top])
    torch.testing.assert_close(found, best.values, rtol=0, atol=2 * TOLERANCE)
    assert [each.ids for each in answer.top] == [tuple(row) for row in best.indices.tolist()]


def test_answers_of_a_seed_do_not_depend_on_other_requests(connect: Callable[..., HTTPRollout]) -> None:
    rollout = connect()

    def ask(number: int) -> list[Completion]:
        return run(rollout.generate(prompt(number), endless(24, seed=number)))

    together = run(*(rollout.generate(prompt(i), endless(24, seed=i)) for i in range(32)))
    in_turn = [ask(i)[0] for i in range(32)]
    assert [each.tokens for each in together] == [each.tokens for each in in_turn]
    assert in_turn[3] == ask(3)[0]
    assert (
        len({each.tokens for each in run(*(rollout.generate(prompt(1), endless(24, seed=i)) for i in range(8)))}) == 8
    )


def test_stop_tokens_end_answers_and_are_their_last_token(connect: Callable[..., HTTPRollout]) -> None:
    rollout = connect()
    (full,) = run(rollout.generate(prompt(2), endless(40, seed=5)))
    stop = full.tokens[20]
    (answer,) = run(rollout.generate(prompt(2), Sampling(40, seed=5, stop_token_ids=(stop, 255))))
    end = full.tokens.index(stop) + 1
    assert (answer.tokens, answer.finish_reason) == (full.tokens[:end], "stop")
    assert answer.logprobs == pytest.approx(full.logprobs[:end], abs=TOLERANCE)


def test_the_models_own_end_of_sequence_ends_answers(connect: Callable[..., HTTPRollout]) -> None:
    rollout = connect()
    # vLLM adds the one of the tokenizer, which is 0 where a directory has no tokenizer.
    ends = {replica().generation_config.eos_token_id, 0}
    answers = run(*(rollout.generate(prompt(i), Sampling(400, 2.0, seed=i)) for i in range(24)))
    endless_answers = run(*(rollout.generate(prompt(i), endless(400, 2.0, seed=i)) for i in range(24)))
    for answer, whole in zip(answers, endless_answers, strict=True):
        length = next((i + 1 for i, token in enumerate(whole.tokens) if token in ends), None)
        assert answer.tokens == whole.tokens[:length]
        assert answer.finish_reason == ("length" if length is None else "stop")
    assert {answer.tokens[-1] for answer in answers} > ends


def test_first_tokens_have_the_frequencies_of_the_engine(
    connect: Callable[..., HTTPRollout], engine: TrainEngine
) -> None:
    rollout, count, given = connect(), 1500, prompt(3)
    (logits,) = engine.forward_batch([{"input_ids": torch.tensor(given)}], outputs=("logits",))
    answers = run(*(rollout.generate(given, endless(1, seed=i)) for i in range(count)))
    seen = Counter(answer.tokens[0] for answer in answers)
    expected = count * logits[-1].double().softmax(-1)
    # Tokens that are expected less than ten times are counted together.
    rare = expected < 10
    cells = [(float(expected[i]), seen[int(i)]) for i in (~rare).nonzero()[:, 0]]
    cells.append((float(expected[rare].sum()), sum(seen[int(i)] for i in rare.nonzero()[:, 0])))
    chi_square = sum((number - wanted) ** 2 / wanted for wanted, number in cells)
    freedom = len(cells) - 1
    print(f"chi square {chi_square:.1f} on {freedom} degrees of freedom")
    assert freedom > 10
    # Above by chance once in a million runs.
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_many_requests_at_once_are_all_answered(connect: Callable[..., HTTPRollout]) -> None:
    rollout = connect()
    answers = run(*(rollout.generate(prompt(i, 3 + i % 9), endless(1 + i % 12, seed=i)) for i in range(400)))
    assert [len(each.tokens) for each in answers] == [1 + i % 12 for i in range(400)]


def test_cancelled_requests_leave_client_and_server(connect: Callable[..., HTTPRollout], vllm: VLLMProcess) -> None:
    rollout, before = connect(), vllm.metric("vllm:generation_tokens_total")

    async def cancel() -> None:
        tasks = [asyncio.ensure_future(rollout.generate(prompt(i), endless(450))) for i in range(20)]
        await asyncio.to_thread(wait_until, lambda: vllm.metric("vllm:num_requests_running") > 10)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert sum(task.cancelled() for task in tasks) > 10

    asyncio.run(cancel())
    wait_until(lambda: vllm.metric("vllm:num_requests_running") == 0)
    # The server did not finish them.
    assert vllm.metric("vllm:generation_tokens_total") - before < 20 * 450
    assert len(run(rollout.generate(prompt(1), endless(3)))[0].tokens) == 3


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_prompt_that_does_not_fit_is_a_value_error(connect: Callable[..., HTTPRollout], length: int) -> None:
    rollout = connect()
    with pytest.raises(ValueError, match=r"max|context"):
        run(rollout.generate(prompt(1, length), endless(1)))
    assert len(run(rollout.generate(prompt(1, CONTEXT - 4), endless(4)))[0].tokens) == 4
