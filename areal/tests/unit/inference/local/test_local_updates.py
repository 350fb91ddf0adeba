"""New weights while answers are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel

from areal.api.weights import NamedTensor
from areal.inference.local.sampler import log_probs
from areal.inference.protocol import Completion, Sampling
from areal.tests.unit.inference.local.rollouts import (
    PROMPT,
    Reading,
    after_forwards,
    assert_logprobs,
    endless,
    model,
    plain_logprobs,
    rollout,
    run,
    weights,
)
from areal.weight_sync.apply import ModuleSource


def test_update_during_generation_switches_weights() -> None:
    replica, sampling = model(), endless(100, temperature=0.7, seed=0)
    half = after_forwards(replica, 30)
    with rollout(replica) as engine:

        async def generate() -> list[Completion]:
            long = asyncio.ensure_future(engine.generate(PROMPT, sampling))
            await asyncio.to_thread(half.wait, 60)
            engine.update(weights(1), 1)
            # Keys and values of the old weights, also those that a running answer adds later, are not shared with new requests.
            same = await engine.generate(PROMPT, endless(5, seed=1))
            first = await long
            later = await engine.generate([*PROMPT, *first.tokens], endless(5, seed=2))
            return [first, same, later]

        first, same, later = asyncio.run(generate())
        assert engine.version == 1
    switch = first.versions.index(1)
    assert 20 < switch < 95
    assert first.versions == (0,) * switch + (1,) * (100 - switch)
    assert_logprobs(first, mixed_logprobs(PROMPT, first.tokens, switch, sampling))
    new = model(1)
    for answer, prompt in [(same, PROMPT), (later, [*PROMPT, *first.tokens])]:
        assert answer.versions == (1,) * 5
        assert_logprobs(answer, plain_logprobs(new, prompt, answer.tokens, endless()))


@torch.no_grad()
def mixed_logprobs(prompt: Sequence[int], tokens: Sequence[int], switch: int, sampling: Sampling) -> Tensor:
    """Of an answer whose weights changed before token ``switch`` was drawn, by plain forwards over a kept cache."""
    read = len(prompt) + switch - 1  # tokens that went through the old weights
    ids = torch.tensor([[*prompt, *tokens]])
    old = model(0)(ids[:, :read], use_cache=True)
    new = model(1)(ids[:, read:], past_key_values=old.past_key_values)
    logits = torch.cat([old.logits[0], new.logits[0]])[len(prompt) - 1 : -1]
    return log_probs(logits, [sampling] * len(tokens)).gather(1, torch.tensor([[t] for t in tokens])).squeeze(1)


def test_update_invalidates_cached_prompts() -> None:
    with rollout() as engine:
        run(engine.generate(PROMPT, endless(5)))
        engine.update(weights(1), 1)  # idle
        (answer,) = run(engine.generate(PROMPT, endless(5, seed=0)))
    with rollout(model(1)) as fresh:
        (wanted,) = run(fresh.generate(PROMPT, endless(5, seed=0)))
    assert answer.tokens == wanted.tokens
    assert answer.versions == (1,) * 5
    assert_logprobs(answer, torch.tensor(wanted.logprobs))


def spoiled(at: int) -> Reading:
    """The weights of another model, of which tensor ``at`` has another name."""
    return Reading(
        NamedTensor(f"{named.name}s", named.tensor) if i == at else named for i, named in enumerate(weights(1))
    )


def test_mismatched_update_keeps_old_weights() -> None:
    with rollout() as engine:
        tensors = spoiled(0)
        with pytest.raises(ValueError, match="the replica"):
            engine.update(tensors, 1)
        assert tensors.ended
        assert engine.version == 0
        (answer,) = run(engine.generate(PROMPT, endless(5, seed=0)))
    assert_logprobs(answer, plain_logprobs(model(0), PROMPT, answer.tokens, endless()))


def test_partial_update_fails_requests_until_complete_update() -> None:
    replica = model()
    started = after_forwards(replica, 5)
    with rollout(replica) as engine:

        async def generate() -> None:
            long = asyncio.ensure_future(engine.generate(PROMPT, endless(100)))
            await asyncio.to_thread(started.wait, 60)
            tensors = spoiled(3)
            with pytest.raises(ValueError, match="the replica"):
                engine.update(tensors, 1)
            assert tensors.ended
            with pytest.raises(RuntimeError, match="weights are mixed"):
                await asyncio.wait_for(long, 60)
            with pytest.raises(RuntimeError, match="version 1 ended half-way"):
                await engine.generate(PROMPT, endless(5))

        asyncio.run(generate())
        assert engine.version == 0
        engine.update(weights(2), 2)
        (answer,) = run(engine.generate(PROMPT, endless(5, seed=0)))
    assert answer.versions == (2,) * 5
    assert_logprobs(answer, plain_logprobs(model(2), PROMPT, answer.tokens, endless()))


def test_update_that_fails_after_the_last_tensor_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are new then, and the old version must not be theirs."""

    def fail() -> None:
        raise OSError("spoiled")

    with rollout() as engine:
        monkeypatch.setattr(engine, "_forget_prefixes", fail)
        with pytest.raises(OSError, match="spoiled"):
            engine.update(weights(1), 1)
        with pytest.raises(RuntimeError, match="version 1 ended half-way"):
            run(engine.generate(PROMPT, endless(5)))
        monkeypatch.undo()
        engine.update(weights(1), 1)
        (answer,) = run(engine.generate(PROMPT, endless(5)))
    assert answer.versions == (1,) * 5


def adapted(seed: int) -> PreTrainedModel:
    """A model of which only the adapter depends on ``seed``."""
    replica = model()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        replica.add_adapter(LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return replica.eval()


def test_adapter_only_update() -> None:
    pytest.importorskip("peft", minversion="0.18.2", reason="transformers adds adapters of no older peft")
    new = adapted(1)
    tensors = [named for named in ModuleSource(new).named_tensors() if ".lora_" in named.name]
    assert len(tensors) == 2 * 2 * 2
    with rollout(adapted(0)) as engine:
        (before,) = run(engine.generate(PROMPT, endless(5, seed=0)))
        engine.update(iter(tensors), 1, complete=False)
        (answer,) = run(engine.generate(PROMPT, endless(5, seed=0)))
    assert answer.versions == (1,) * 5
    assert_logprobs(before, plain_logprobs(adapted(0), PROMPT, before.tokens, endless()))
    assert_logprobs(answer, plain_logprobs(new, PROMPT, answer.tokens, endless()))
    new.add_adapter(LoraConfig(r=3, target_modules=["q_proj"]), adapter_name="second")
    with pytest.raises(ValueError, match=r"two adapters"):
        ModuleSource(new)
