"""Generation in this process: log-probs, independence of concurrent requests, updates during generation, and every way to end."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from transformers.generation import ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import Scheduler

from areal.inference.protocol import Completion, Sampling
from areal.tests.grid.models import FAMILIES, VOCAB, tiny_model
from areal.tests.unit.inference.local.rollouts import (
    CONTEXT,
    PROMPT,
    WAYS,
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


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_logprobs_equal_plain_forward(family: str) -> None:
    replica = tiny_model(FAMILIES[family](), 0).eval()
    with rollout(replica, version=4) as engine:
        asked = [endless(25, s.temperature, s.top_p, s.top_k, seed=i) for i, s in enumerate(WAYS)]
        answers = run(*(engine.generate(PROMPT[: 20 + i], s) for i, s in enumerate(asked)))
    for i, (answer, sampling) in enumerate(zip(answers, asked, strict=True)):
        assert len(answer.tokens) == 25
        assert answer.finish_reason == "length"
        assert answer.versions == (4,) * 25
        assert_logprobs(answer, plain_logprobs(replica, PROMPT[: 20 + i], answer.tokens, sampling))


@pytest.mark.parametrize(
    "options",
    [{}, {"max_requests": 3}, {"max_batch_tokens": 24}, {"cache_tokens": CONTEXT, "page_size": 4}],
    ids=["all-at-once", "few-at-once", "split-prompts", "full-cache"],
)
def test_completion_does_not_depend_on_concurrent_requests(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back: list[str] = []
    again = RequestState.create_equivalent_initial_request
    monkeypatch.setattr(
        RequestState,
        "create_equivalent_initial_request",
        lambda state: (put_back.append(state.request_id), again(state))[1],
    )
    asked = [(PROMPT[i % 3 : 20 + i], endless(30, 1.0 + i % 2, seed=i)) for i in range(21)]
    with rollout(**options) as engine:
        together = run(*(engine.generate(*one) for one in asked))
    with rollout() as engine:
        for one, answer in list(zip(asked, together, strict=True))[::4]:
            (alone,) = run(engine.generate(*one))
            assert alone.tokens == answer.tokens
            assert_logprobs(alone, torch.tensor(answer.logprobs))
    assert len({answer.tokens for answer in together}) == 21
    assert bool(put_back) == ("cache_tokens" in options)


def test_answer_that_was_put_back_goes_on_after_the_others_are_cancelled() -> None:
    with rollout(cache_tokens=CONTEXT, page_size=4) as engine:

        async def generate() -> list[Any]:
            asked = [asyncio.create_task(engine.generate(PROMPT[i:], endless(100))) for i in range(3)]
            while (processor := engine._manager.batch_processor) is None or not processor.scheduler.block_new_requests:
                await asyncio.sleep(0.001)
            for name in list(processor.scheduler.active_requests):
                asked[int(name.removeprefix("request "))].cancel()
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)

        answers = asyncio.run(generate())
    assert sorted({type(each).__name__ for each in answers}) == ["CancelledError", "Completion"]


def test_shared_prompt_is_prefilled_once() -> None:
    replica, read = model(), []
    replica.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with rollout(replica) as engine:
        run(*(engine.generate(PROMPT, endless(2)) for _ in range(3)))
        run(engine.generate(PROMPT, endless(2)))
    # 41 tokens once; then 9 for each of the others, as two pages of 16 are kept; and one more token for each.
    assert sum(read) == 41 + 3 * 9 + 4


def test_next_turn_reads_only_what_is_new() -> None:
    """A turn goes on from the cache of the answers before it, in each episode of a group."""
    replica, read = model(), []
    replica.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with rollout(replica) as engine:
        first = run(*(engine.generate(PROMPT, endless(24, seed=seed)) for seed in range(3)))
        spent = sum(read)
        turns = [[*PROMPT, *answer.tokens, 5, 6, 7] for answer in first]
        run(*(engine.generate(turn, endless(1)) for turn in turns))
    # 68 tokens, of which four pages of 16 are kept: 64 of the 65 that were sampled or given before, and 4 are read.
    assert sum(read) - spent == 3 * 4


def test_waiting_request_survives_cancelled_prefill() -> None:
    with rollout() as engine:

        async def generate() -> Completion:
            first, second = (asyncio.ensure_future(engine.generate(PROMPT, endless(5, seed=i))) for i in range(2))
            await asyncio.sleep(0)  # both have asked
            first.cancel()
            return await asyncio.wait_for(second, 60)

        assert len(asyncio.run(generate()).tokens) == 5
        assert not engine._requests._waiting


def test_request_without_seed_gets_engine_seed() -> None:
    answers = []
    for seed in (1, 1, 2):
        with rollout(seed=seed) as engine:
            answers.append([run(engine.generate(PROMPT, endless(20)))[0].tokens for _ in range(2)])
    assert answers[0] == answers[1]
    assert len({*answers[0], *answers[2]}) == 4


def test_stop_token_ends_completion_and_is_included() -> None:
    with rollout() as engine:
        (full,) = run(engine.generate(PROMPT, endless(20, seed=0)))
        stop = full.tokens[6]
        (answer,) = run(engine.generate(PROMPT, endless(20, seed=0, stop_token_ids=(stop, VOCAB + 5))))
    assert answer.tokens == full.tokens[: full.tokens.index(stop) + 1]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("listed", [False, True])
def test_models_end_of_sequence_tokens_end_a_completion_by_default(listed: bool) -> None:
    replica = model()
    with rollout(replica) as engine:
        (full,) = run(engine.generate(PROMPT, endless(20, seed=0)))
    ends = (full.tokens[9], full.tokens[6]) if listed else (full.tokens[6],)
    assert replica.generation_config is not None
    replica.generation_config.eos_token_id = list(ends) if listed else ends[0]
    with rollout(replica) as engine:
        (answer,) = run(engine.generate(PROMPT, Sampling(20, seed=0)))
        (without,) = run(engine.generate(PROMPT, endless(20, seed=0)))
    assert answer.tokens == full.tokens[: min(map(full.tokens.index, ends)) + 1]
    assert answer.finish_reason == "stop"
    assert without.tokens == full.tokens


def test_concurrent_event_loops_get_correct_completions() -> None:
    answers: dict[int, Completion] = {}
    with rollout() as engine:

        def ask(seed: int) -> None:
            answers[seed] = run(engine.generate(PROMPT, endless(20, seed=seed)))[0]

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for seed in range(6):
            assert answers[seed].tokens == run(engine.generate(PROMPT, endless(20, seed=seed)))[0].tokens


@pytest.mark.parametrize(
    ("prompt", "sampling", "match"),
    [
        ([], endless(), "prompt_ids is empty"),
        ("What is 2 + 2?", endless(), "prompt_ids is the text 'What is 2"),
        ([1, VOCAB], endless(), f"token {VOCAB}"),
        ([1, -1], endless(), "token -1"),
        ([1] * 100, endless(CONTEXT - 99), "max_context = 160"),
    ],
)
def test_invalid_requests_raise(prompt: list[int], sampling: Sampling, match: str) -> None:
    with rollout() as engine:
        with pytest.raises(ValueError, match=match):
            run(engine.generate(prompt, sampling))
        assert len(run(engine.generate([1] * 100, endless(CONTEXT - 100)))[0].tokens) == CONTEXT - 100


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_context": 1000}, "max_context = 1000.*at most 256"),
        ({"page_size": 2}, "page_size = 2"),
        ({"max_requests": 0}, "max_requests = 0"),
        ({"max_batch_tokens": 23}, "max_batch_tokens = 23.*at least 24"),
        ({"cache_tokens": CONTEXT - 1}, "cache_tokens = 159"),
    ],
)
def test_invalid_sizes_raise(options: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        rollout(**options)


def test_generation_thread_error_fails_all_requests() -> None:
    replica = model()
    started = after_forwards(replica, 5)

    def fail(*_: Any) -> None:
        if started.is_set():
            raise OSError("the disk is on fire")

    replica.register_forward_pre_hook(fail)
    with rollout(replica, max_requests=3) as engine:

        async def generate() -> list[Any]:
            asked = (engine.generate(PROMPT, endless(50)) for _ in range(6))
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)

        for error in asyncio.run(generate()):
            assert isinstance(error, RuntimeError)
            assert "the disk is on fire" in str(error)
        with pytest.raises(RuntimeError, match="OSError: the disk is on fire"):
            run(engine.generate(PROMPT, endless(5)))
        tensors = Reading(weights(1))
        with pytest.raises(RuntimeError, match="the disk is on fire"):
            engine.update(tensors, 1)
        assert tensors.ended


def test_close_returns_partial_completions_and_frees_memory() -> None:
    threads, replica = threading.active_count(), model()
    started = after_forwards(replica, 10)
    engine = rollout(replica, max_requests=1)

    async def generate() -> list[Completion]:
        asked = [asyncio.ensure_future(engine.generate(PROMPT, endless(110, seed=i))) for i in range(2)]
        await asyncio.to_thread(started.wait, 60)
        cache = weakref.ref(engine._manager.batch_processor.cache.cache_tensor)
        await asyncio.to_thread(engine.close)
        answers = await asyncio.wait_for(asyncio.gather(*asked), 60)
        gc.collect()
        assert cache() is None
        return answers

    first, second = asyncio.run(generate())
    assert (first.finish_reason, second.finish_reason) == ("aborted", "aborted")
    assert 5 < len(first.tokens) < 110
    assert second.tokens == ()
    assert_logprobs(first, plain_logprobs(replica, PROMPT, first.tokens, endless()))
    engine.close()
    assert threading.active_count() <= threads + 1  # asyncio may keep its own
    with pytest.raises(RuntimeError, match="was closed"):
        run(engine.generate(PROMPT, endless(5)))
    tensors = Reading(weights(1))
    with pytest.raises(RuntimeError, match="was closed"):
        engine.update(tensors, 1)
    assert tensors.ended


def test_cancelled_request_frees_its_slot() -> None:
    replica = model()
    started, full = after_forwards(replica, 5), after_forwards(replica, 100)
    with rollout(replica, max_requests=1) as engine:

        async def generate() -> Completion:
            long = asyncio.ensure_future(engine.generate(PROMPT, endless(110)))
            await asyncio.to_thread(started.wait, 60)
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            answer = await asyncio.wait_for(engine.generate(PROMPT, endless(5)), 60)
            assert "request 0" not in engine._manager.batch_processor.scheduler.active_requests
            assert not engine._requests
            assert not engine._requests._waiting
            assert not engine._sampler._requests
            return answer

        assert len(asyncio.run(generate()).tokens) == 5
        assert not full.is_set()


SCRIPT = """
from areal.tests.unit.inference.local.rollouts import rollout
engine = rollout()
raise SystemExit(3)
"""


def test_process_exits_without_close() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], timeout=200, check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3, done.stderr


def test_transformers_internals_in_use_exist() -> None:
    """Each name here is used in a way that its documentation does not promise."""
    with rollout() as engine:
        run(engine.generate(PROMPT, endless(2)))
        processor = engine._manager.batch_processor
        assert processor.logit_processor is engine._sampler
        assert processor.model_runner.logit_processor is engine._sampler
        # Replaced or overridden by our manager.
        theirs = vars(ContinuousBatchingManager)
        assert {"_run_generation_loop", "_create_batch_processor", "start", "join"} <= set(theirs)
        assert processor.output_router is engine._manager.output_router
        assert "_wake_up_loop.wait(" in inspect.getsource(theirs["_generation_loop_body"])
        assert "self._run_generation_loop" in inspect.getsource(theirs["start"])
        assert "self.join(" in inspect.getsource(theirs["stop"])
        assert ".cache.search_prefix_match(" in inspect.getsource(Scheduler)
        assert ".cache.mark_complete_blocks(" in inspect.getsource(ContinuousBatchProcessor)
        assert processor.model_runner.supports_logits_to_keep(engine.model) == engine._router._head_has_last_tokens
        assert not processor.use_async_batching
        assert not processor.do_sample
        assert not any(processor.cb_config.cuda_graph_booleans)
        assert processor.cache.use_prefix_sharing
        for allocator in processor.cache.cache_allocators.values():
            assert allocator.ledger.hash_to_block
            assert allocator.ledger.block_to_hash
            assert allocator.ledger.cached_blocks
        assert processor.scheduler.active_requests == {}
        with engine._paused():
            engine._forget_prefixes()
        for allocator in processor.cache.cache_allocators.values():
            assert not allocator.ledger.hash_to_block
            assert not allocator.ledger.cached_blocks
