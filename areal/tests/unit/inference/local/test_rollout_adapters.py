"""Adapters in a rollout: requests of several adapters and of the model itself are generated together, each with its own weights."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal.api import LoRAConfig
from areal.engine.lora import peft_format
from areal.inference.local.shared_prompts import keyed_tokens
from areal.inference.protocol import Completion, Sampling
from areal.tests.grid.models import VOCAB, adapter_dir, model_dir
from areal.tests.unit.inference.local.rollouts import (
    CONTEXT,
    PROMPT,
    after_forwards,
    assert_logprobs,
    endless,
    plain_logprobs,
    rollout,
    run,
    run_in_step,
)

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 3, "alpha": 6.0, "head": True},
    "queries": {"rank": 2, "alpha": 8.0, "target_modules": ("q_proj", "v_proj")},
    "other": {"rank": 4, "alpha": 8.0, "rslora": True, "head": True},
}
TIED = {"tied": True, "untied": False}


def replica(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def folder(path: str, name: str) -> Path:
    settings = {"target_modules": "all-linear", **ADAPTERS[name]}
    head = settings.pop("head", False)
    return Path(adapter_dir(path, LoRAConfig(**settings), seed=list(ADAPTERS).index(name), head=head))


def adapted(path: str, name: str | None) -> PreTrainedModel:
    """Return the model with an adapter, as peft applies it."""
    return replica(path) if name is None else PeftModel.from_pretrained(replica(path), str(folder(path, name))).eval()  # type: ignore[return-value]


def tied_dir(tied: bool) -> str:
    return model_dir("qwen3", tie_word_embeddings=tied)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("tied", {}, id="tied"),
        pytest.param("untied", {}, id="untied"),
        pytest.param("untied", {"max_batch_tokens": 24}, id="split-prompts"),
        pytest.param("untied", {"max_requests": 3}, id="few-at-once"),
        pytest.param("tied", {"cache_tokens": CONTEXT, "page_size": 4}, id="full-cache"),
    ],
)
def test_each_request_has_the_weights_of_its_adapter(family: str, options: dict[str, Any]) -> None:
    path = tied_dir(TIED[family])
    names = [None, *ADAPTERS]
    # The same prompt under each adapter, and others of several lengths.
    asked = [(PROMPT[: 41 - 9 * (i % 3)], names[i % 4], endless(20, 1.0 + i % 2, seed=i)) for i in range(16)]
    with rollout(replica(path), **options) as engine:
        for name in ADAPTERS:
            engine.add_adapter(name, folder(path, name))
        assert engine.adapters == tuple(ADAPTERS)
        answers = run(*(engine.generate(prompt, sampling, name) for prompt, name, sampling in asked))
        # Again, when all prompts are in the cache.
        again = run(*(engine.generate(prompt, sampling, name) for prompt, name, sampling in asked[:5]))
    models = {name: adapted(path, name) for name in names}
    for (prompt, name, sampling), answer in zip([*asked, *asked[:5]], [*answers, *again], strict=True):
        assert_logprobs(answer, plain_logprobs(models[name], prompt, answer.tokens, sampling))
    assert [each.tokens for each in again] == [each.tokens for each in answers[:5]]


@pytest.mark.parametrize(
    ("family", "dtype", "atol"),
    [
        ("gemma3_text", torch.float32, 1e-5),
        pytest.param("qwen3_moe", torch.float32, 1e-5),
        pytest.param("llama", torch.float32, 1e-5),
        pytest.param("qwen3", torch.bfloat16, 0.2),
    ],
)
def test_other_families_and_dtypes(family: str, dtype: torch.dtype, atol: float) -> None:
    """Sliding windows, experts, and weights in bfloat16."""
    path = model_dir(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with rollout(model) as engine:
        engine.add_adapter("all", folder(path, "all"))
        answers = run(*(engine.generate(PROMPT, endless(12, seed=1), name) for name in (None, "all", None, "all")))
    for name, answer in zip((None, "all") * 2, answers, strict=True):
        expected = plain_logprobs(adapted(path, name).to(dtype), PROMPT, answer.tokens, endless())
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=atol)
    assert answers[0].tokens != answers[1].tokens


def test_prompt_logprobs_are_those_of_the_adapter() -> None:
    path = tied_dir(True)
    # The head reads 30 of the 40 positions first.
    with rollout(replica(path), max_batch_tokens=30) as engine:
        for name in ADAPTERS:
            engine.add_adapter(name, folder(path, name))

        async def score() -> list[Any]:
            generated = [engine.generate(PROMPT, endless(30, seed=1), name) for name in ADAPTERS]
            scored = [engine.prompt_logprobs(PROMPT, Sampling(), name) for name in (None, *ADAPTERS)]
            return await asyncio.gather(*generated, *scored)

        results = asyncio.run(score())
    for name, answer in zip(ADAPTERS, results, strict=False):
        assert_logprobs(answer, plain_logprobs(adapted(path, name), PROMPT, answer.tokens, endless()))
    for name, scores in zip((None, *ADAPTERS), results[3:], strict=True):
        expected = plain_logprobs(adapted(path, name), PROMPT[:1], PROMPT[1:], Sampling())
        torch.testing.assert_close(torch.tensor(scores.logprobs), expected, rtol=0, atol=1e-5)


def test_prompt_is_shared_by_requests_of_one_adapter_only() -> None:
    path, read = tied_dir(True), []
    model = replica(path)
    model.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True)
    with rollout(model) as engine:
        for name in ("all", "other"):
            engine.add_adapter(name, folder(path, name))
        run(*(engine.generate(PROMPT, endless(1), name) for name in ("all", "other", None) for _ in range(3)))
        # 41 tokens for each adapter, then 9 for each of the others: two pages of 16 are kept.
        assert sum(read) == 3 * (41 + 2 * 9)
        # The same name with other weights is another adapter.
        engine.remove_adapter("all")
        engine.add_adapter("all", folder(path, "other"))
        answers = run(*(engine.generate(PROMPT, endless(1, seed=3), name) for name in ("all", "other")))
        assert sum(read) == 4 * 41 + 7 * 9
    assert answers[0].logprobs == pytest.approx(answers[1].logprobs, abs=1e-5)


def test_keyed_tokens_differ_by_number_and_tokens() -> None:
    base = 2**31 // VOCAB
    numbers = (0, 1, 2, base - 1, base, base + 1, base**2, base**3 + 5)
    prompts = ([5, 6, 7, 8, 9], [5, 6, 7, 8, 10], [4, 6, 7, 8, 9], [VOCAB - 1] * 5)
    keyed = {tuple(keyed_tokens(list(tokens), number, VOCAB)) for tokens in prompts for number in numbers}
    assert len(keyed) == len(numbers) * len(prompts)
    assert all(0 <= token < 2**31 for tokens in keyed for token in tokens)
    assert keyed_tokens([1], base + 1, VOCAB) == [1 + VOCAB]


def test_request_without_adapter_keeps_its_bits() -> None:
    """In forwards of the same shapes, other requests' adapters change no bit of its log-probs, and no layer has a hook without them."""
    path = tied_dir(True)
    model = replica(path)
    with rollout(model) as engine:
        engine.add_adapter("all", folder(path, "all"))

        def together(name: str | None) -> tuple[Completion, bool]:
            hooked = [False]
            count = model.register_forward_hook(
                lambda *_: hooked.__setitem__(0, any(x._forward_hooks for x in model.modules() if x is not model))
            )
            mine, _ = run_in_step(
                engine,
                engine.generate(PROMPT, endless(20, seed=1)),
                engine.generate(PROMPT[1:], endless(20, seed=2), name),
            )
            count.remove()
            with engine._paused():
                engine._forget_prefixes()
            return mine, hooked[0]

        (alone, hooks), (beside, more_hooks), (after, no_hooks) = together(None), together("all"), together(None)
        # Between requests, and after the end, the model is not adapted.
        run(engine.generate(PROMPT, endless(2, seed=1), "all"))
        assert_logprobs(alone, plain_logprobs(model, PROMPT, alone.tokens, endless()))
    assert not any(x._forward_hooks for x in model.modules())
    assert alone.logprobs == beside.logprobs == after.logprobs
    assert alone.tokens == beside.tokens
    assert (hooks, more_hooks, no_hooks) == (False, True, False)


def test_removed_adapter_serves_running_requests_and_frees_its_memory() -> None:
    path = tied_dir(True)
    model = replica(path)
    started = after_forwards(model, 5)
    with rollout(model) as engine:
        engine.add_adapter("all", folder(path, "all"))
        factors = [weakref.ref(x) for x in engine._adapters.tensors()]

        async def generate() -> Completion:
            running = asyncio.ensure_future(engine.generate(PROMPT, endless(60, seed=1), "all"))
            await asyncio.to_thread(started.wait, 60)
            engine.remove_adapter("all")
            assert engine.adapters == ()
            with pytest.raises(ValueError, match="there is no adapter 'all': add it, or choose one of none"):
                await engine.generate(PROMPT, endless(2), "all")
            assert not running.done()
            return await running

        answer = asyncio.run(asyncio.wait_for(generate(), 60))
        gc.collect()
        assert factors
        assert not any(ref() is not None for ref in factors)
    assert_logprobs(answer, plain_logprobs(adapted(path, "all"), PROMPT, answer.tokens, endless()))


def test_cancelled_request_leaves_no_keys_and_values_of_the_model() -> None:
    """A forward that a cancelled request is still part of computes its tokens with its adapter, and shares them with it only."""
    path = tied_dir(True)
    model = replica(path)
    with rollout(model) as engine:
        engine.add_adapter("all", folder(path, "all"))
        begun, ended = threading.Event(), threading.Event()

        def wait(*_: Any) -> None:
            """Hold the first forward until the request in it is removed."""
            begun.set()
            ended.wait(60)

        model.register_forward_pre_hook(wait)

        async def generate() -> None:
            task = asyncio.ensure_future(engine.generate(PROMPT, endless(30), "all"))
            await asyncio.to_thread(begun.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            ended.set()

        asyncio.run(asyncio.wait_for(generate(), 60))
        answers = run(*(engine.generate(PROMPT, endless(5, seed=1), name) for name in (None, "all")))
    for name, answer in zip((None, "all"), answers, strict=True):
        assert_logprobs(answer, plain_logprobs(adapted(path, name), PROMPT, answer.tokens, endless()))


def test_adapters_sleep_and_wake() -> None:
    path = tied_dir(True)
    with rollout(replica(path)) as engine:
        before = engine.awake_bytes
        engine.add_adapter("all", folder(path, "all"))
        assert engine.awake_bytes > before
        (expected,) = run(engine.generate(PROMPT[:10], endless(8, seed=1), "all"))
        engine.sleep()
        assert not any(x.untyped_storage().nbytes() for x in engine._adapters.tensors())
        with pytest.raises(RuntimeError, match="asleep"):
            engine.add_adapter("other", folder(path, "other"))
        engine.wake()
        assert run(engine.generate(PROMPT[:10], endless(8, seed=1), "all")) == [expected]


def test_bad_adapters_are_refused(tmp_path: Path) -> None:
    path = tied_dir(True)
    with rollout(replica(path)) as engine:
        engine.add_adapter("all", folder(path, "all"))
        with pytest.raises(ValueError, match="there is an adapter 'all'"):
            engine.add_adapter("all", folder(path, "other"))
        with pytest.raises(ValueError, match="no adapter that peft can read"):
            engine.add_adapter("none", tmp_path)
        wide = folder(model_dir("qwen3", intermediate_size=96), "all")
        with pytest.raises(ValueError, match="has shape"):
            engine.add_adapter("wide", wide)
        for work in (engine.generate(PROMPT, endless(2), "none"), engine.prompt_logprobs(PROMPT, Sampling(), "none")):
            with pytest.raises(ValueError, match="there is no adapter 'none': add it, or choose one of all"):
                asyncio.run(work)
        assert engine.adapters == ("all",)
        assert len(run(engine.generate(PROMPT, endless(2), "all"))[0].tokens) == 2


def test_adapters_of_one_configuration_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes most of the time of reading an adapter of a large model."""
    path, planned = tied_dir(True), []
    plan = peft_format._plan_with_peft
    monkeypatch.setattr(peft_format, "_plan_with_peft", lambda *args: (planned.append(args[1].r), plan(*args))[1])
    seeds = [adapter_dir(path, LoRAConfig(rank=2, alpha=8.0, target_modules=("q_proj",)), seed=i) for i in range(3)]
    with rollout(replica(path)) as engine:
        for number, each in enumerate(seeds):
            engine.add_adapter(f"seed {number}", each)
        engine.add_adapter("other", folder(path, "other"))
        answers = run(*(engine.generate(PROMPT, endless(4, seed=1), name) for name in engine.adapters))
    assert planned == [2, 4]
    assert len({answer.logprobs for answer in answers}) == 4
