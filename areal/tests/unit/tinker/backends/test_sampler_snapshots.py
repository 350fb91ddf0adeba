"""Snapshots and faults of the local sampler: each session keeps its weights, and a request that cannot be served fails alone."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.unit.inference.local.rollouts import after_forwards
from areal.tests.unit.tinker.backends.sampling import (
    CONTEXT,
    ENDLESS,
    PROMPT,
    base_model,
    sampled,
    serve,
    trained_engine,
)
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.prepared import SamplingRequest
from areal.tinker.backends.sampling.local_sampler import LocalSampler


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders ``first`` and ``second``: one adapter before and after it was trained further, as an engine saves them."""
    folder = tmp_path_factory.mktemp("adapters")
    engine = trained_engine(base_model(), ("default", "second"), rank=2)
    for name, file in (("default", "first"), ("second", "second")):
        engine.adapters.save(name, folder / file)
    engine.destroy()
    yield folder
    shutil.rmtree(folder)


def scored(**fields: Any) -> SamplingRequest:
    return SamplingRequest(
        **{"prompt": PROMPT, "max_tokens": 12, "seed": 1, "prompt_logprobs": True, **ENDLESS, **fields}
    )


async def scores(sampler: LocalSampler, snapshot: str) -> np.ndarray:
    """Return the log-probs of a prompt and of an answer."""
    result = await sampler.sample(snapshot, scored())
    assert result.prompt_logprobs is not None
    return np.concatenate([result.prompt_logprobs[1:], result.answers[0].logprobs])


def test_session_keeps_the_weights_that_it_was_created_from(adapters: Path, tmp_path: Path) -> None:
    """Later changes of the folder and further snapshots under other names change nothing; a second open does nothing."""

    async def work(sampler: LocalSampler) -> None:
        folder = tmp_path / "adapter"
        shutil.copytree(adapters / "first", folder)
        await asyncio.gather(*(sampler.open("old", folder) for _ in range(3)))
        before = await scores(sampler, "old")
        shutil.rmtree(folder)
        shutil.copytree(adapters / "second", folder)
        await sampler.open("old", folder)
        await sampler.open("new", folder)
        old, new, base = await asyncio.gather(*(scores(sampler, name) for name in ("old", "new", "base")))
        np.testing.assert_allclose(old, before, atol=1e-5)
        for other in (new, base):
            assert np.abs(other[: len(PROMPT) - 1] - old[: len(PROMPT) - 1]).max() > 0.1

    serve(work)


def test_released_snapshot_ends_after_its_running_requests(adapters: Path) -> None:
    async def work(sampler: LocalSampler) -> None:
        await sampler.open("one", adapters / "first")
        alone = await sampler.sample("one", scored(max_tokens=60))
        running = asyncio.ensure_future(sampler.sample("one", scored(max_tokens=60)))
        await asyncio.sleep(0.01)
        assert not running.done()
        await sampler.release("one")
        await sampler.release("one")
        await sampler.release("never opened")
        np.testing.assert_allclose((await running).answers[0].logprobs, alone.answers[0].logprobs, atol=1e-5)
        assert not list(sampler.rollout._adapters.tensors())
        with pytest.raises(UserError, match="snapshot 'one' is not served any more: create another sampling client"):
            await sampler.sample("one", scored())
        # The base model is a snapshot as any other.
        await sampler.release("base")
        with pytest.raises(UserError, match="'base' is not served"):
            await sampler.sample("base", scored())
        await sampler.open("one", adapters / "second")
        await sampler.sample("one", scored())

    serve(work)


def test_many_snapshots_are_served_at_once(adapters: Path) -> None:
    async def work(sampler: LocalSampler) -> None:
        folders = {f"snapshot {i}": adapters / ("first", "second")[i % 2] for i in range(6)}
        for name, folder in folders.items():
            await sampler.open(name, folder)
        alone = {name: await scores(sampler, name) for name in (*list(folders)[:2], "base")}
        names = [*folders, "base"] * 3
        for name, each in zip(names, await asyncio.gather(*(scores(sampler, name) for name in names)), strict=True):
            expected = alone["base" if name == "base" else list(folders)[list(folders).index(name) % 2]]
            np.testing.assert_allclose(each, expected, atol=1e-5)

    serve(work)


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_snapshot_of_a_diverged_adapter_is_refused(value: float, adapters: Path, tmp_path: Path) -> None:
    """Its keys and values would break answers of others in the same forward."""
    folder = tmp_path / "diverged"
    shutil.copytree(adapters / "first", folder)
    file = folder / "adapter_model.safetensors"
    save_file({name: torch.full_like(x, value) for name, x in load_file(file).items()}, file)

    async def work(sampler: LocalSampler) -> None:
        running = asyncio.ensure_future(sampler.sample("base", scored(max_tokens=60)))
        with pytest.raises(UserError, match=r"log-probs are not finite. Training has diverged: go back to an earlier"):
            await sampler.open("diverged", folder)
        with pytest.raises(UserError, match="'diverged' is not served"):
            await sampler.sample("diverged", scored())
        assert np.isfinite((await running).answers[0].logprobs).all()
        assert not list(sampler.rollout._adapters.tensors())

    serve(work)


def test_request_without_a_distribution_fails_alone() -> None:
    """Its logits are not finite in one forward, or in the one over its prompt."""

    async def work(sampler: LocalSampler) -> None:
        model, prompt = sampler.rollout.model, [1, 2, 3, 4, 5]
        started = after_forwards(model, 2)
        running = asyncio.ensure_future(sampler.sample("base", scored(max_tokens=80, prompt_logprobs=False)))
        await asyncio.to_thread(started.wait, 60)
        broken: list[list[int]] = [prompt]

        def break_last(_: object, args: object, kwargs: dict[str, torch.Tensor], out: Any) -> None:
            if broken and kwargs["input_ids"][0].tolist()[-5:] == broken[0]:
                out.logits[:, -1] = torch.nan
                broken.clear()

        first = model.register_forward_hook(break_last, with_kwargs=True)
        with pytest.raises(ServerError, match=r"send the request again: .*not finite"):
            await sampler.sample("base", scored(prompt=prompt, prompt_logprobs=False))
        first.remove()
        assert len((await sampler.sample("base", scored(prompt=prompt))).answers[0].tokens) == 12

        def break_all(_: object, args: object, kwargs: dict[str, Any], out: Any) -> None:
            if "cache" not in kwargs:  # the forward over the prompt
                out.logits.fill_(torch.nan)

        second = model.register_forward_hook(break_all, with_kwargs=True)
        with pytest.raises(UserError, match="the log-probs of the prompt are not finite: the weights have diverged"):
            await sampler.sample("base", scored(prompt=prompt))
        second.remove()
        assert len((await running).answers[0].tokens) == 80
        assert sampler.healthy()

    serve(work)


def test_cancelled_open_leaves_nothing(adapters: Path) -> None:
    async def work(sampler: LocalSampler) -> None:
        opening = asyncio.ensure_future(sampler.open("one", adapters / "first"))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await sampler.open("one", adapters / "second")
        for _ in range(200):
            if len(sampler.rollout.adapters) == 1:
                break
            await asyncio.sleep(0.01)
        assert len(sampler.rollout.adapters) == 1
        await sampler.sample("one", scored())

    serve(work)


def damage(folder: Path, how: str) -> None:
    """Damage a copy of an adapter."""
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    content = json.loads(config.read_text())
    if how == "gone":
        shutil.rmtree(folder)
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "not json":
        config.write_text("{")
    elif how == "of another base":
        config.write_text(json.dumps({**content, "base_model_name_or_path": "org/other"}))
    else:
        config.write_text(json.dumps({**content, "r": 7}))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("gone", "adapter_config.json"),
        ("cut", "no adapter that peft can read"),
        ("not json", "weights cannot be sampled from"),
        ("of another base", "is of the base model 'org/other', and this server samples from"),
        ("of another rank", "has shape"),
    ],
)
def test_bad_snapshots_are_user_errors(how: str, match: str, adapters: Path, tmp_path: Path) -> None:
    async def work(sampler: LocalSampler) -> None:
        folder = tmp_path / "bad"
        shutil.copytree(adapters / "first", folder)
        damage(folder, how)
        with pytest.raises(UserError, match=match):
            await sampler.open("bad", folder)
        with pytest.raises(UserError, match="'bad' is not served"):
            await sampler.sample("bad", scored())
        # The name is free, and others are served.
        await sampler.open("bad", adapters / "first")
        await asyncio.gather(sampler.sample("bad", scored()), sampler.sample("base", scored()))

    serve(work)


def test_adapter_of_another_shape_is_a_user_error(tmp_path: Path) -> None:
    wide = model_dir("qwen3", intermediate_size=96)
    engine = trained_engine(wide)
    engine.adapters.save("default", tmp_path / "wide")
    engine.destroy()
    file = tmp_path / "wide" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base_model()}))

    async def work(sampler: LocalSampler) -> None:
        with pytest.raises(UserError, match=r"has shape \[.*, but the model needs"):
            await sampler.open("wide", tmp_path / "wide")

    serve(work)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"prompt": []}, "prompt_ids is empty"),
        ({"prompt": [1, VOCAB]}, f"token {VOCAB}"),
        ({"prompt": [1] * CONTEXT}, "prompt has 128 tokens: the context of 128 tokens has no room for an answer"),
        (
            {"max_tokens": 0, "prompt_logprobs": False, "prompt_top_k": 0},
            "max_tokens = 0: .* at least 1 and at most 87",
        ),
        ({"max_tokens": CONTEXT}, "max_tokens = 128: after a prompt of 41 tokens .* at most 87"),
        ({"num_samples": 0}, "num_samples = 0: it must be at least 1 and at most 1024"),
        ({"temperature": -0.5}, "temperature = -0.5"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_k": -2}, "top_k = -2"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": 1e-30}, "temperature = 1e-30: it must be at least 1e-05, or 0"),
        ({"sample_top_k": -1}, "topk_sample_logprobs = -1: it must be at least 0 and at most 128"),
        ({"prompt_top_k": 129}, "topk_prompt_logprobs = 129"),
        ({"num_samples": 1025}, "num_samples = 1025"),
        ({"stop_strings": ("",)}, "not empty"),
        ({"stop_strings": ("x",)}, "text needs a tokenizer"),
    ],
)
def test_bad_requests_are_user_errors_and_fail_alone(fields: dict[str, Any], match: str) -> None:
    async def work(sampler: LocalSampler) -> None:
        good = asyncio.ensure_future(sampler.sample("base", scored()))
        with pytest.raises(UserError, match=match):
            await sampler.sample("base", scored(**fields))
        assert len((await good).answers[0].tokens) == 12
        assert sampler.healthy()

    serve(work)


def test_cancelling_ends_all_answers_of_a_request() -> None:
    async def work(sampler: LocalSampler) -> None:
        started = after_forwards(sampler.rollout.model, 6)
        task = asyncio.ensure_future(sampler.sample("base", scored(num_samples=4, max_tokens=80)))
        await asyncio.to_thread(started.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(sampler.rollout._requests) == 0
        assert len((await sampler.sample("base", scored(max_tokens=3))).answers[0].tokens) == 3

    serve(work)


def test_failed_generation_is_a_server_error(adapters: Path) -> None:
    """The next request starts the generator again, with all snapshots."""

    async def work(sampler: LocalSampler) -> None:
        await sampler.open("one", adapters / "first")
        before = await scores(sampler, "one")
        assert sampler.healthy()

        def fail(*_: Any) -> None:
            raise OSError("the disk is on fire")

        hook = sampler.rollout.model.register_forward_pre_hook(fail)
        for _ in range(2):
            with pytest.raises(ServerError, match=r"send the request again: .*the disk is on fire"):
                await sampler.sample("base", scored(num_samples=3, prompt_logprobs=False))
            assert not sampler.healthy()
        hook.remove()
        of_base, after = await asyncio.gather(scores(sampler, "base"), scores(sampler, "one"))
        assert sampler.healthy()
        np.testing.assert_allclose(after, before, atol=1e-5)
        assert np.abs(of_base - after).max() > 0.1

    serve(work)


def test_close_fails_running_requests() -> None:
    async def work(sampler: LocalSampler) -> None:
        started = after_forwards(sampler.rollout.model, 3)
        running = asyncio.ensure_future(sampler.sample("base", scored(prompt_logprobs=False, max_tokens=80)))
        await asyncio.to_thread(started.wait, 60)
        await sampler.close()
        with pytest.raises(ServerError, match="the server is stopping"):
            await running
        assert not sampler.healthy()
        await sampler.close()
        with pytest.raises(ServerError, match="was closed"):
            await sampler.sample("base", scored())

    serve(work)


def test_idle_generator_does_nothing() -> None:
    async def work(sampler: LocalSampler) -> int:
        await sampler.sample("base", scored(max_tokens=16, prompt_logprobs=False))
        # Count the turns of the generation loop.
        turns = 0
        processor = sampler.rollout._manager.batch_processor
        assert processor is not None
        prepare = processor.prepare_next_batch

        def counted() -> bool:
            nonlocal turns
            turns += 1
            return prepare()

        await asyncio.sleep(0.05)
        processor.prepare_next_batch = counted  # type: ignore[method-assign]
        await asyncio.sleep(0.5)
        return turns

    assert serve(work) == 0


def test_result_without_seed_differs_each_time() -> None:
    answers = {tuple(sampled(max_tokens=12).answers[0].tokens.tolist()) for _ in range(2)}
    assert len(answers) == 2
