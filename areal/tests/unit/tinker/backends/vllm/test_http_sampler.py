"""The sampler on a vLLM server: results, snapshots, refusals, failures of the server, cancellation."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal.tests.grid.models import VOCAB
from areal.tests.harness.servers.vllm_server import KEY, VLLMServer
from areal.tests.unit.inference.local.rollouts import shortest, tokenizer
from areal.tests.unit.tinker.backends.sampling import engine_logprobs
from areal.tests.unit.tinker.backends.vllm.http_sampling import CONTEXT, MODEL, PROMPT, asked, serve
from areal.tinker.backends.backend_registry import create_sampling_backend
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.sampling.vllm.http_sampler import VLLMSampler

# ---- results


def test_two_snapshots_and_the_model_at_once_have_the_log_probs_of_the_engine(
    server: VLLMServer, adapters: tuple[Path, Any]
) -> None:
    folder, engine = adapters
    names = ("default", "second")

    async def work(sampler: VLLMSampler) -> list[Any]:
        await asyncio.gather(*(sampler.open(name, folder / name) for name in names))
        await sampler.open("default", folder / "second")  # has no effect
        assert len(server.adapters) == 2
        request = asked(num_samples=2, prompt_logprobs=True)
        results = await asyncio.gather(*(sampler.sample(name, request) for name in ("base", *names)))
        await sampler.release("default")
        assert len(server.adapters) == 1
        with pytest.raises(UserError, match="'default' is not served any more"):
            await sampler.sample("default", request)
        return results

    for name, result in zip(("base", *names), serve(server, work), strict=True):
        for answer in result.answers:
            tokens = [*PROMPT, *answer.tokens.tolist()]
            if name == "base":
                with engine.reference():
                    expected = engine_logprobs(engine, tokens)
            else:
                engine.adapters.select(name)
                expected = engine_logprobs(engine, tokens)
            of_all = np.concatenate([result.prompt_logprobs[1:], answer.logprobs])
            torch.testing.assert_close(torch.from_numpy(of_all), expected, rtol=0, atol=1e-4)
    assert not server.adapters


def test_answer_of_a_seed_is_the_same_whatever_else_runs(server: VLLMServer) -> None:
    async def work(sampler: VLLMSampler) -> None:
        async def tokens(seed: int | None, count: int) -> list[list[int]]:
            result = await sampler.sample("base", asked(num_samples=count, seed=seed, max_tokens=12))
            return [answer.tokens.tolist() for answer in result.answers]

        alone = await tokens(5, 3)
        together = await asyncio.gather(tokens(5, 2), tokens(None, 2), tokens(-3, 1))
        assert together[0] == alone[:2]
        rest = [*alone, *together[1], *together[2]]
        assert len({tuple(each) for each in rest}) == len(rest)

    serve(server, work, max_requests=2)


def test_arrays_have_the_shapes_and_values_of_the_protocol(server: VLLMServer) -> None:
    async def work(sampler: VLLMSampler) -> None:
        limits = sampler.limits()
        assert (limits.vocab_size, limits.max_tokens, limits.max_rank) == (VOCAB, CONTEXT, 16)
        request = asked(prompt_logprobs=True, prompt_top_k=3, sample_top_k=4, top_k=2)
        result = await sampler.sample("base", request)
        scores, top = result.prompt_logprobs, result.prompt_top
        assert scores is not None
        assert top is not None
        assert (scores.shape, scores.dtype, top.ids.shape, top.ids.dtype) == ((11,), np.float32, (11, 3), np.int32)
        assert np.isnan(scores).tolist() == [True] + [False] * 10
        assert np.isnan(top.logprobs[0]).all()
        assert (np.diff(top.logprobs[1:], axis=1) <= 0).all()
        assert (top.logprobs[1:, 0] >= scores[1:]).all()
        (answer,) = result.answers
        assert answer.top is not None
        assert answer.top.ids.shape == (8, 4)
        # Two tokens are left to draw, and others have no probability.
        np.testing.assert_allclose(np.exp(answer.top.logprobs).sum(1), 1, atol=1e-5)
        assert (answer.top.logprobs[:, 2:] == -np.inf).all()
        for row, logprobs, token, own in zip(
            answer.top.ids, answer.top.logprobs, answer.tokens, answer.logprobs, strict=True
        ):
            assert logprobs[row.tolist().index(token)] == own
        # A request that does not ask for them gets none.
        bare = await sampler.sample("base", asked())
        assert (bare.prompt_logprobs, bare.prompt_top, bare.answers[0].top) == (None, None, None)
        (whole,) = (await sampler.sample("base", asked(max_tokens=None))).answers
        assert (len(whole.tokens), whole.stop_reason) == (CONTEXT - len(PROMPT), "length")
        only = await sampler.sample("base", asked(prompt=[5], prompt_logprobs=True, prompt_top_k=2))
        assert only.prompt_top is not None
        assert only.prompt_top.ids.tolist() == [[0, 0]]

    serve(server, work)


def test_stops_and_temperature_reach_the_server(server: VLLMServer) -> None:
    async def work(sampler: VLLMSampler) -> None:
        (whole,) = (await sampler.sample("base", asked(max_tokens=40))).answers
        text = tokenizer().decode(whole.tokens.tolist())
        word, token = text[11:16], int(whole.tokens[6])
        by_word = shortest(tuple(whole.tokens.tolist()), (word,))
        by_token = whole.tokens.tolist().index(token) + 1
        for stops, count in (
            ({"stop_strings": (word,), "stop_token_ids": None}, by_word),
            ({"stop_token_ids": (token,)}, by_token),
        ):
            (answer,) = (await sampler.sample("base", asked(max_tokens=40, **stops))).answers
            assert (answer.tokens.tolist(), answer.stop_reason) == (whole.tokens[:count].tolist(), "stop")
        # The model's own end token is 1. At this temperature it comes soon.
        hot = asked(num_samples=8, max_tokens=50, temperature=3.0, stop_token_ids=None)
        ends = [(a.stop_reason, 1 in a.tokens.tolist()) for a in (await sampler.sample("base", hot)).answers]
        assert ("stop", True) in ends
        assert set(ends) <= {("stop", True), ("length", False)}
        greedy = [
            (await sampler.sample("base", asked(temperature=0.0, seed=s, top_k=k))).answers[0]
            for s, k in ((1, 1), (2, -1))
        ]
        assert greedy[0].tokens.tolist() == greedy[1].tokens.tolist()
        np.testing.assert_array_equal(greedy[0].logprobs, greedy[1].logprobs)
        assert (greedy[0].logprobs < -1e-3).all()  # of temperature 1

    serve(server, work)


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"temperature": 0.5, "prompt_logprobs": True}, "temperature = 0.5 with log-probs of the prompt"),
        ({"temperature": 0.001}, "temperature = 0.001: it must be at least 0.01"),
        ({"sample_top_k": 21}, "topk_sample_logprobs = 21"),
        ({"max_tokens": 60}, "max_tokens = 60: after a prompt of 11 tokens"),
        ({"prompt": [5, VOCAB]}, "refuses the request: Token id 112 is out of vocabulary"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_by_name(
    server: VLLMServer, fields: dict[str, Any], match: str
) -> None:
    async def work(sampler: VLLMSampler) -> None:
        with pytest.raises(UserError, match=match):
            await sampler.sample("base", asked(**fields))

    serve(server, work)


def test_damaged_and_refused_adapters(server: VLLMServer, adapters: tuple[Path, Any], tmp_path: Path) -> None:
    def variant(name: str, scale: float = 1.0, **fields: Any) -> Path:
        folder = shutil.copytree(adapters[0] / "default", tmp_path / name)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
        weights = folder / "adapter_model.safetensors"
        save_file({key: value * scale for key, value in load_file(weights).items()}, weights)
        return folder

    cut, narrow = variant("cut"), variant("narrow")
    weights = load_file(narrow / "adapter_model.safetensors")
    save_file({key: value[:, :-1].contiguous() for key, value in weights.items()}, narrow / "adapter_model.safetensors")
    (cut / "adapter_model.safetensors").write_bytes(b"1234567890")
    cases = [
        (variant("base", base_model_name_or_path="x/other"), "is of the base model 'x/other'"),
        (variant("pattern", rank_pattern={"q_proj": 2}), "rank_pattern in adapter_config.json is not empty"),
        (variant("large", r=32), "its rank is 32, and the sampler's max_rank is 16"),
        (variant("refused", r=12), "refuses the adapter: LoRA rank 12 is greater than max_lora_rank 8"),
        (variant("diverged", scale=float("nan")), "the log-probs are not finite"),
        (narrow, "refuses the adapter: Call to add_lora method failed"),
        (cut, "adapter_model.safetensors is damaged"),
        (tmp_path / "missing", "No such file"),
    ]

    async def work(sampler: VLLMSampler) -> None:
        for folder, match in cases:
            with pytest.raises(UserError, match=match):
                await sampler.open("one", folder)
        server.hidden = True
        with pytest.raises(ServerError, match=r"No adapter found for .*--enable-lora.*setting 'folder'"):
            await sampler.open("one", adapters[0] / "default")
        assert not server.adapters
        server.hidden = False
        await sampler.open("one", adapters[0] / "default")

    serve(server, work)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"adress": 1}, "sampler_config has 'adress', which is no setting of the vllm sampler: choose among url"),
        ({"url": "ftp://x"}, "sampler_config.url = 'ftp://x'"),
        ({"url": ["http://x", "http://x"]}, "sampler_config.url = .*give each server once"),
        ({"timeout": 0}, "sampler_config.timeout = 0"),
        ({"served_name": "other"}, "served_name = 'other'"),
        ({"url": "http://127.0.0.1:9"}, "127.0.0.1:9.*Start vLLM there"),
        ({"api_key_file": "/no/file"}, "api_key_file = '/no/file' cannot be read"),
    ],
)
def test_bad_settings_are_refused_by_name(server: VLLMServer, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        create_sampling_backend(MODEL, "vllm", {"url": server.url, **settings})


def test_servers_that_do_not_fit_are_refused(server: VLLMServer, tmp_path: Path) -> None:
    other = shutil.copytree(MODEL, tmp_path / "other")
    with pytest.raises(ValueError, match=r"has the model .*name it by served_name"):
        create_sampling_backend(str(other), "vllm", {"url": server.url})
    server.processed = False
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        create_sampling_backend(MODEL, "vllm", {"url": server.url})


def test_key_is_sent(server: VLLMServer, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("wrong\n")
    with pytest.raises(ValueError, match="status 401"):
        create_sampling_backend(MODEL, "vllm", {"url": server.url, "api_key_file": str(file)})
    file.write_text(f"{KEY}\n")
    serve(server, lambda sampler: sampler.sample("base", asked()), api_key_file=str(file))
