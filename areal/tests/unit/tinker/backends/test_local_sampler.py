"""The local sampler: distributions, seeds, ends of answers, prompts and top tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal.tests.grid.models import VOCAB
from areal.tests.unit.inference.local.rollouts import shortest, tokenizer
from areal.tests.unit.tinker.backends.sampling import (
    CONTEXT,
    ENDLESS,
    PROMPT,
    base_model,
    engine_logprobs,
    sampled,
    serve,
    trained_engine,
    with_tokenizer,
)
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.prepared import SampledAnswer, SamplingRequest, SamplingResult
from areal.tinker.backends.sampling.local_sampler import LocalSampler, create


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_are_those_of_the_engine(tied: bool, tmp_path: Path) -> None:
    """Of two adapters with a head, and of the model itself; of answers and of the prompt; at several temperatures, all at once."""
    path = base_model(tied=tied)
    engine = trained_engine(path, ("default", "second"))
    for name in engine.adapters.names:
        engine.adapters.save(name, tmp_path / name)
    requests = [
        SamplingRequest(PROMPT, 2, 12, seed=seed, temperature=t, prompt_logprobs=True, **ENDLESS)
        for seed, t in enumerate((1.0, 0.5, 1.7))
    ]
    served = ("base", *engine.adapters.names)

    async def work(sampler: LocalSampler) -> list[SamplingResult]:
        for name in engine.adapters.names:
            await sampler.open(name, tmp_path / name)
        return await asyncio.gather(*(sampler.sample(name, request) for name in served for request in requests))

    results = iter(serve(work, path))
    of_base = []
    for name in served:
        for request in requests:
            result = next(results)
            for answer in result.answers:
                tokens = [*PROMPT, *answer.tokens.tolist()]
                if name == "base":
                    with engine.reference():
                        expected = engine_logprobs(engine, tokens, request.temperature)
                else:
                    engine.adapters.select(name)
                    expected = engine_logprobs(engine, tokens, request.temperature)
                of_all = np.concatenate([result.prompt_logprobs[1:], answer.logprobs])
                torch.testing.assert_close(torch.from_numpy(of_all), expected, rtol=0, atol=1e-4)
            of_base.append(result.prompt_logprobs[1:])
    # The adapters differ from the model and from each other by more than rounding.
    apart = [np.abs(of_base[i] - of_base[j]).max() for i, j in ((0, 3), (0, 6), (3, 6))]
    assert min(apart) > 0.1
    engine.destroy()


def test_temperatures_obey_their_law_and_one_token_at_a_time_agrees() -> None:
    async def work(sampler: LocalSampler) -> None:
        first = SamplingRequest(PROMPT, 1, 1, seed=1, sample_top_k=VOCAB, **ENDLESS)
        logprobs = {}
        for temperature in (1.0, 0.5, 2.0):
            result = await sampler.sample("base", SamplingRequest(**{**vars(first), "temperature": temperature}))
            top = result.answers[0].top
            assert top is not None
            logprobs[temperature] = np.zeros(VOCAB)
            logprobs[temperature][top.ids[0]] = top.logprobs[0]
        for temperature, each in logprobs.items():
            np.testing.assert_allclose(each - each[0], (logprobs[1.0] - logprobs[1.0][0]) / temperature, atol=1e-4)
        # Greedy, so that both see the same tokens.
        whole = (await sampler.sample("base", SamplingRequest(PROMPT, 1, 10, temperature=0.0, **ENDLESS))).answers[0]
        tokens = list(PROMPT)
        for token, logprob in zip(whole.tokens, whole.logprobs, strict=True):
            (one,) = (await sampler.sample("base", SamplingRequest(tokens, 1, 1, temperature=0.0, **ENDLESS))).answers
            assert one.tokens.tolist() == [token]
            np.testing.assert_allclose(one.logprobs, [logprob], atol=1e-5)
            tokens.append(int(token))

    serve(work)


def test_answer_of_a_seed_is_the_same_whatever_else_runs() -> None:
    async def work(sampler: LocalSampler) -> None:
        async def tokens(seed: int | None, count: int, prompt: list[int] = PROMPT) -> list[list[int]]:
            result = await sampler.sample("base", SamplingRequest(prompt, count, 20, seed=seed, **ENDLESS))
            return [answer.tokens.tolist() for answer in result.answers]

        alone = await tokens(5, 4)
        together = await asyncio.gather(tokens(5, 2), tokens(6, 3), tokens(None, 3, PROMPT[3:]), tokens(5, 4))
        assert together[0] == alone[:2]
        assert together[3] == alone
        # Others, and those without a seed, differ.
        rest = [*alone, *together[1], *together[2], *await tokens(None, 2), *await tokens(-3, 1)]
        assert len({tuple(each) for each in rest}) == len(rest)

    serve(work)


def test_prompt_of_several_samples_is_computed_once() -> None:
    async def work(sampler: LocalSampler) -> list[int]:
        read: list[int] = []
        sampler.rollout.model.register_forward_pre_hook(
            lambda _, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        await sampler.sample("base", SamplingRequest(PROMPT, 5, 1, **ENDLESS))
        return read

    # Then the tokens after its full pages.
    assert sum(serve(work)) == len(PROMPT) + 4 * (len(PROMPT) % 16)


def test_arrays_have_the_shapes_and_dtypes_of_the_protocol() -> None:
    result = sampled(num_samples=2, max_tokens=5, seed=1, prompt_logprobs=True, prompt_top_k=3, sample_top_k=2)
    scores, top = result.prompt_logprobs, result.prompt_top
    assert scores is not None
    assert top is not None
    assert (scores.shape, scores.dtype) == ((len(PROMPT),), np.float32)
    assert np.isnan(scores).tolist() == [True] + [False] * (len(PROMPT) - 1)
    assert (top.ids.shape, top.ids.dtype, top.logprobs.dtype) == ((len(PROMPT), 3), np.int32, np.float32)
    assert np.isnan(top.logprobs[0]).all()
    assert top.ids[0].tolist() == [0, 0, 0]
    assert (np.diff(top.logprobs[1:], axis=1) <= 0).all()
    for position in range(1, len(PROMPT)):
        if PROMPT[position] in top.ids[position]:
            mine = top.ids[position].tolist().index(PROMPT[position])
            assert top.logprobs[position, mine] == scores[position]
    for answer in result.answers:
        assert (answer.tokens.shape, answer.tokens.dtype) == ((5,), np.int32)
        assert (answer.logprobs.shape, answer.logprobs.dtype) == ((5,), np.float32)
        assert answer.stop_reason == "length"
        assert answer.top is not None
        assert answer.top.ids.shape == answer.top.logprobs.shape == (5, 2)
    assert sampled(max_tokens=2).prompt_logprobs is None
    only = sampled(prompt=[5], max_tokens=2, prompt_logprobs=True, prompt_top_k=4)
    assert only.prompt_logprobs is not None
    assert only.prompt_top is not None
    assert np.isnan(only.prompt_logprobs).tolist() == [True]
    assert only.prompt_top.ids.tolist() == [[0, 0, 0, 0]]


def test_top_k_and_top_p_exclude_tokens_of_answers_and_none_of_the_prompt() -> None:
    for limits in ({"top_k": 1}, {"top_p": 1e-6}):
        result = sampled(max_tokens=8, seed=3, prompt_logprobs=True, **limits)
        greedy = sampled(max_tokens=8, temperature=0.0)
        assert result.answers[0].tokens.tolist() == greedy.answers[0].tokens.tolist()
        np.testing.assert_allclose(result.answers[0].logprobs, 0.0, atol=1e-6)
        assert result.prompt_logprobs is not None
        assert np.isfinite(result.prompt_logprobs[1:]).all()
    everything = [sampled(max_tokens=8, seed=3, top_k=k).answers[0].tokens.tolist() for k in (-1, 0, VOCAB)]
    assert everything[0] == everything[1] == everything[2]


def test_answer_without_a_maximum_ends_with_the_context() -> None:
    (answer,) = sampled(max_tokens=None).answers
    assert (len(answer.tokens), answer.stop_reason) == (CONTEXT - len(PROMPT), "length")


def test_a_prompt_that_fills_the_context_is_scored_only() -> None:
    prompt = [(5 * i + 2) % VOCAB for i in range(CONTEXT)]
    result = sampled(prompt=prompt, max_tokens=0, num_samples=2, prompt_logprobs=True)
    assert [(len(answer.tokens), answer.stop_reason) for answer in result.answers] == [(0, "length")] * 2
    shorter = sampled(prompt=prompt[:-1], max_tokens=1, prompt_logprobs=True)
    assert result.prompt_logprobs is not None
    assert shorter.prompt_logprobs is not None
    assert result.prompt_logprobs.shape == (CONTEXT,)
    np.testing.assert_allclose(result.prompt_logprobs[1:-1], shorter.prompt_logprobs[1:], atol=1e-4)
    with pytest.raises(UserError, match="no room"):
        sampled(prompt=prompt, max_tokens=None, prompt_logprobs=True)


# ---- ends of answers


def test_stops_end_an_answer(tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path)
    (whole,) = sampled(path, max_tokens=40, seed=5).answers
    text = tokenizer().decode(whole.tokens.tolist())
    word, token = text[11:18], int(whole.tokens[6])
    # The model ends with the same token, unless the request names its own ends.
    (Path(path) / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    at_token = whole.tokens.tolist().index(token) + 1
    at_word = shortest(tuple(whole.tokens.tolist()), (word,))
    cases: list[tuple[dict[str, Any], int]] = [
        ({"stop_strings": (word, "not there"), "stop_token_ids": None}, at_word),
        ({"stop_strings": None, "stop_token_ids": (token, VOCAB - 1)}, at_token),
        ({"stop_strings": None, "stop_token_ids": None}, at_token),
        ({"stop_strings": (), "stop_token_ids": None}, 40),
        ({"stop_strings": None, "stop_token_ids": ()}, 40),
    ]

    async def work(sampler: LocalSampler) -> list[SampledAnswer]:
        requests = [SamplingRequest(PROMPT, 1, 40, seed=5, **stop) for stop, _ in cases]
        return [each.answers[0] for each in await asyncio.gather(*(sampler.sample("base", r) for r in requests))]

    for (stop, count), answer in zip(cases, serve(work, path), strict=True):
        assert answer.tokens.tolist() == whole.tokens[:count].tolist(), stop
        assert answer.stop_reason == ("length" if count == 40 else "stop"), stop


# ---- settings


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"max_contxt": 5}, "sampler_config has 'max_contxt', which is no setting.*: choose among dtype, device"),
        ({"dtype": "int8"}, "sampler_config.dtype = 'int8'"),
        ({"max_requests": 0}, "sampler_config.max_requests = 0"),
        ({"page_size": 2}, "sampler_config.page_size = 2"),
        ({"max_context": 1000}, "max_context = 1000: it must be at least 2 and at most 256"),
        ({"max_context": 128, "cache_tokens": 100}, "cache_tokens = 100: it must be at least 128"),
    ],
)
def test_bad_settings_are_refused_by_name(config: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        create(base_model(), config)


def test_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"model = '{tmp_path}' cannot be read"):
        create(str(tmp_path), {})


def test_sizes_follow_from_the_model() -> None:
    sampler = create(base_model(), {})
    limits = sampler.limits()
    assert (limits.vocab_size, limits.max_tokens) == (VOCAB, 256)
    asyncio.run(sampler.close())


def test_snapshots_are_opened_after_a_failure_and_leave_nothing_if_they_are_not(tmp_path: Path) -> None:
    engine = trained_engine(base_model(), ("default",), rank=2)
    engine.adapters.save("default", tmp_path / "adapter")
    request = SamplingRequest(PROMPT, 1, 4, seed=1, **ENDLESS)

    async def work(sampler: LocalSampler) -> list[SamplingResult]:
        def fail(*_: Any) -> None:
            raise OSError("one forward ran out of something")

        hook = sampler.rollout.model.register_forward_pre_hook(fail)
        with pytest.raises(ServerError, match="sampling failed"):
            await sampler.sample("base", request)
        hook.remove()
        await sampler.open("after a failure", tmp_path / "adapter")
        assert sampler.healthy()
        kept = list(sampler.rollout.adapters)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler.rollout, "prompt_logprobs", no_memory)
            for number in range(3):
                with pytest.raises(ServerError, match="no device memory for one more snapshot, after"):
                    await sampler.open(f"{number}", tmp_path / "adapter")
        assert list(sampler.rollout.adapters) == kept
        return [await sampler.sample("after a failure", request)]

    async def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert serve(work)
