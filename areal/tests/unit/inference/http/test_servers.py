"""Generation on servers in other processes: log-probs, versions across updates, and what happens when servers misbehave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.weights import NamedTensor
from areal.inference.http import VLLM, Dialect, HTTPRollout, SGLang
from areal.inference.protocol import Sampling
from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.harness.limits import promptly, wait_until
from areal.tests.harness.servers.rollout_http import (
    BAD_REPLIES,
    PROMPT,
    Background,
    Process,
    assert_drawn_from,
    plain,
    replica,
    run,
    sglang_reply,
    vllm_reply,
    weights,
)
from areal.tests.unit.inference.local.rollouts import endless

GENERATE = {"sglang": "/generate", "vllm": "/v1/completions"}
PAUSE = {"sglang": "/pause_generation", "vllm": "/pause"}
LOAD = {"sglang": "/update_weights_from_disk", "vllm": "/collective_rpc"}
DIALECTS: dict[str, Callable[[], Dialect]] = {"sglang": SGLang, "vllm": VLLM}

pytestmark = pytest.mark.parametrize("kind", sorted(DIALECTS))


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Process]]:
    both = [Process(), Process()]
    yield both
    for process in both:
        process.kill()


@pytest.fixture
def servers(processes: list[Process]) -> list[Process]:
    for process in processes:
        process.tell(reset=True)
    return processes


@pytest.fixture
def server(servers: list[Process]) -> Process:
    return servers[0]


@pytest.fixture
def doomed() -> Iterator[Process]:
    process = Process()
    yield process
    process.kill()


@pytest.fixture
def make(kind: str, tmp_path: Path) -> Iterator[Callable[..., HTTPRollout]]:
    made: list[HTTPRollout] = []

    def make_one(*servers: Process, **options: Any) -> HTTPRollout:
        # Some tests make another rollout while the first one lives.
        options = {"timeout": 30, "deadline": 30, "update_seconds": 20, "take_over": True, **options}
        options = {"model": model_dir("qwen3"), **options}
        made.append(HTTPRollout([s.url for s in servers], DIALECTS[kind](), folder=tmp_path / "weights", **options))
        return made[-1]

    yield make_one
    for rollout in made:
        rollout.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_equal_plain_forward(make: Callable[..., HTTPRollout], server: Process, temperature: float) -> None:
    rollout = make(server, version=4)
    first, again, other = run(*(rollout.generate(PROMPT, endless(20, temperature, seed=seed)) for seed in (5, 5, 6)))
    assert len(first.tokens) == 20
    assert (first.finish_reason, first.versions) == ("length", (4,) * 20)
    assert first == again
    assert (first.tokens == other.tokens) == (temperature == 0)
    assert_drawn_from(replica(), first, temperature)


@pytest.mark.parametrize("top", [0, 2])
def test_truncated_sampling_renormalizes_logprobs(make: Callable[..., HTTPRollout], server: Process, top: int) -> None:
    sampling = endless(20, top_k=3, seed=1, top_logprobs=top)
    (answer,) = run(make(server).generate(PROMPT, sampling))
    kept = plain(replica(), PROMPT, answer.tokens).topk(3)
    rank = (kept.indices == torch.tensor(answer.tokens)[:, None]).int().argmax(-1, keepdim=True)
    wanted = kept.values.log_softmax(-1)
    torch.testing.assert_close(torch.tensor(answer.logprobs), wanted.gather(1, rank)[:, 0], rtol=0, atol=1e-5)
    assert [each.ids for each in answer.top] == [tuple(row) for row in kept.indices[:, :top].tolist()] * bool(top)
    if top:
        found = torch.tensor([each.logprobs for each in answer.top])
        torch.testing.assert_close(found, wanted[:, :top], rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_most_likely_tokens_are_those_of_a_plain_forward(
    make: Callable[..., HTTPRollout], server: Process, temperature: float
) -> None:
    (answer,) = run(make(server).generate(PROMPT, endless(12, temperature, seed=1, top_logprobs=4)))
    best = plain(replica(), PROMPT, answer.tokens, temperature).topk(4)
    assert [each.ids for each in answer.top] == [tuple(row) for row in best.indices.tolist()]
    found = torch.tensor([each.logprobs for each in answer.top])
    torch.testing.assert_close(found, best.values, rtol=0, atol=1e-5)


def test_models_end_of_sequence_token_ends_a_completion_by_default(
    make: Callable[..., HTTPRollout], server: Process
) -> None:
    rollout = make(server)
    full = run(*(rollout.generate(PROMPT, endless(60, 3.0, seed=seed)) for seed in range(8)))
    answers = run(*(rollout.generate(PROMPT, Sampling(60, 3.0, seed=seed)) for seed in range(8)))
    # 1 is the end-of-sequence token of the tiny models.
    ends = [each.tokens.index(1) + 1 if 1 in each.tokens else 60 for each in full]
    assert min(ends) < 60
    for answer, whole, end in zip(answers, full, ends, strict=True):
        assert answer.tokens == whole.tokens[:end]
        assert answer.finish_reason == ("stop" if answer.tokens[-1] == 1 else "length")


def test_only_requested_stop_tokens_end_a_completion(
    make: Callable[..., HTTPRollout], server: Process, kind: str
) -> None:
    rollout = make(server)
    (full,) = run(rollout.generate(PROMPT, endless(20, 0)))
    stop = full.tokens[12]
    (answer,) = run(rollout.generate(PROMPT, endless(20, 0, stop_token_ids=(stop,))))
    assert answer.tokens == full.tokens[: full.tokens.index(stop) + 1]
    assert answer.finish_reason == "stop"
    # The server ends it at its end-of-sequence token.
    spans = [{"version": server.told()["label"], "start": 0, "end": 1}]
    meta = {"finish_reason": {"type": "stop", "matched": 1}, "output_token_logprobs": [[-1.5, full.tokens[0], None]]}
    meta |= {"weight_versions": spans}
    choice = {"finish_reason": "stop", "token_ids": [full.tokens[0]], "logprobs": {"token_logprobs": [-1.5]}}
    server.can(GENERATE[kind], body={"meta_info": meta} if kind == "sglang" else {"choices": [choice]})
    (answer,) = run(rollout.generate(PROMPT, endless(20, 0, stop_token_ids=(VOCAB - 1,))))
    assert answer.tokens == full.tokens
    assert answer.logprobs[0] == -1.5
    assert answer.finish_reason == "length"


def test_update_loads_new_weights(make: Callable[..., HTTPRollout], servers: list[Process], tmp_path: Path) -> None:
    rollout = make(*servers)
    for version in (1, 2, 3):
        rollout.update(weights(version), version)
        assert rollout.version == version
        answers = run(*(rollout.generate(PROMPT, endless(6, seed=i)) for i in range(4)))
        for answer in answers:
            assert answer.versions == (version,) * 6
            assert_drawn_from(replica(version), answer)
    assert [path.name for path in sorted((tmp_path / "weights").glob("version-*"))] == [
        "version-00000002",
        "version-00000003",
    ]


def test_generation_continues_across_an_update(
    make: Callable[..., HTTPRollout], servers: list[Process], kind: str
) -> None:
    rollout = make(*servers, version=3)
    for server in servers:
        server.tell(step_seconds=0.05)
    # Of two prompts: the answers of one prompt share a server.
    prompts = [[i % 2, *PROMPT] for i in range(4)]
    background = Background(*(rollout.generate(prompt, endless(40, seed=i)) for i, prompt in enumerate(prompts)))
    wait_until(lambda: all(server.calls(GENERATE[kind]) == 2 for server in servers))
    time.sleep(0.3)
    rollout.update(weights(1), 4)
    for prompt, answer in zip(prompts, background.result(), strict=True):
        older = answer.versions.count(3)
        assert 0 < older < 40
        assert answer.versions == (3,) * older + (4,) * (40 - older)
        assert len(answer.tokens) == 40
        old, new = plain(replica(), prompt, answer.tokens), plain(replica(1), prompt, answer.tokens)
        taken = torch.tensor(answer.tokens)[:, None]
        wanted = torch.cat([old.gather(1, taken)[:older], new.gather(1, taken)[older:]])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, rtol=0, atol=1e-5)
    seen = [body for server in servers for body in server.told()["seen"]]
    continued = [body for body in seen if len(body.get("input_ids") or body["prompt"]) > 1 + len(PROMPT)]
    # SGLang continues them by itself. Of vLLM, the same seed draws the same numbers again.
    assert len(continued) == (0 if kind == "sglang" else 4)
    assert not {body["seed"] for body in continued} & {0, 1, 2, 3}


def test_killed_server_raises_within_the_deadline(make: Callable[..., HTTPRollout], doomed: Process, kind: str) -> None:
    rollout = make(doomed, deadline=2)
    doomed.tell(step_seconds=0.1)
    background = Background(rollout.generate(PROMPT, endless(100)))
    wait_until(lambda: doomed.calls(GENERATE[kind]) == 1)
    doomed.kill()
    with promptly(), pytest.raises(RuntimeError, match=rf"within 2 s.*{doomed.url}"):
        background.result()


def test_requests_fail_over_from_killed_server(
    make: Callable[..., HTTPRollout], server: Process, doomed: Process, kind: str
) -> None:
    rollout = make(doomed, server)
    doomed.tell(step_seconds=0.1)
    background = Background(*(rollout.generate(PROMPT, endless(30, seed=i)) for i in range(2)))
    wait_until(lambda: doomed.calls(GENERATE[kind]) == 2)  # a common prompt goes to one server
    doomed.kill()
    answers = background.result()
    assert server.calls(GENERATE[kind]) == 2
    for answer in answers:
        assert_drawn_from(replica(), answer)
    assert rollout.counts["failed"] == 2
    rollout = make(doomed, server, update_seconds=1, drain_seconds=1)
    rollout.update(weights(1), 1)
    assert rollout.version == 1
    assert set(run(rollout.generate(PROMPT, endless(3)))[0].versions) == {1}


def test_hanging_server_raises_or_fails_over(
    make: Callable[..., HTTPRollout], servers: list[Process], kind: str
) -> None:
    servers[0].can("/health", body="late", delay=60, times=99)
    servers[0].can(GENERATE[kind], body="late", delay=60, times=3)
    with promptly(), pytest.raises(RuntimeError, match=rf"{servers[0].url}{GENERATE[kind]}: no answer within"):
        run(make(servers[0], timeout=0.3, deadline=0.7).generate(PROMPT, endless(3)))
    servers[0].can(GENERATE[kind], body="late", delay=4)
    (answer,) = run(make(*servers, timeout=0.5).generate(PROMPT, endless(3)))
    assert len(answer.tokens) == 3


def test_answer_of_a_healthy_server_may_take_longer_than_timeout_and_deadline(
    make: Callable[..., HTTPRollout], server: Process, kind: str
) -> None:
    rollout = make(server, timeout=0.5, deadline=1.0)
    server.tell(step_seconds=0.2)
    background = Background(rollout.generate(PROMPT, endless(12)))
    background.thread.join(60)
    assert [len(answer.tokens) for answer in background.answers] == [12]
    assert (server.calls(GENERATE[kind]), rollout.counts["failed"], rollout.counts["away"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("status", "error", "calls"),
    [
        (503, None, 3),
        (500, None, 3),
        (400, ValueError, 1),
        (422, ValueError, 1),
        (404, RuntimeError, 1),
        (302, RuntimeError, 1),
    ],
)
def test_only_server_errors_are_retried(
    make: Callable[..., HTTPRollout],
    server: Process,
    kind: str,
    status: int,
    error: type[Exception] | None,
    calls: int,
) -> None:
    rollout = make(server)
    server.can(GENERATE[kind], status=status, body="its own words", times=2)
    if error is None:
        (answer,) = run(rollout.generate(PROMPT, endless(3)))
        assert len(answer.tokens) == 3
    else:
        with pytest.raises(error, match=rf"{server.url}{GENERATE[kind]}: status {status}: its own words"):
            run(rollout.generate(PROMPT, endless(3)))
    assert server.calls(GENERATE[kind]) == calls


def test_malformed_reply_raises(make: Callable[..., HTTPRollout], server: Process, kind: str) -> None:
    rollout = make(server)
    for body, words in BAD_REPLIES[kind]:
        server.can(GENERATE[kind], body=body)
        with pytest.raises(RuntimeError, match=rf"{server.url}{GENERATE[kind]}: .*{words}"):
            run(rollout.generate(PROMPT, endless(3)))
    good = {**(sglang_reply(server.told()["label"]) if kind == "sglang" else vllm_reply()), "unknown": {"more": 1}}
    server.can(GENERATE[kind], body=good)
    (answer,) = run(rollout.generate(PROMPT, endless(3)))
    assert (answer.tokens, answer.logprobs) == ((5, 6), (-1.0, -2.0))
    assert server.calls(GENERATE[kind]) == len(BAD_REPLIES[kind]) + 1


@pytest.mark.parametrize("step", ["pause", "load"])
def test_partial_update_raises_with_server_versions(
    make: Callable[..., HTTPRollout], servers: list[Process], kind: str, step: str
) -> None:
    rollout = make(*servers)
    bad, good = servers
    bad.can((PAUSE if step == "pause" else LOAD)[kind], status=400, body='{"success": false, "message": "no"}')
    state = "serves version 0" if step == "pause" else "is left out"
    with pytest.raises(
        RuntimeError, match=rf"(?s)version 1 did not reach.*{bad.url} {state}, {good.url} serves version 1"
    ):
        rollout.update(weights(1), 1)
    assert rollout.version == (0 if step == "pause" else 1)
    # More than one server gets of one prompt.
    answers = run(*(rollout.generate(PROMPT, endless(5, seed=i)) for i in range(12)))
    assert {v for answer in answers for v in answer.versions} == ({0, 1} if step == "pause" else {1})
    for answer in answers:
        assert_drawn_from(replica(1) if answer.versions[0] else replica(), answer)
    rollout.update(weights(2), 2)
    answers = run(*(rollout.generate(PROMPT, endless(5, seed=i)) for i in range(12)))
    assert {v for answer in answers for v in answer.versions} == {2}
    assert bad.calls(GENERATE[kind]) >= 2


def test_no_server_with_known_weights_raises(make: Callable[..., HTTPRollout], server: Process, kind: str) -> None:
    rollout = make(server)
    nothing = {"sglang": {"success": False, "message": "no"}, "vllm": {"results": []}}
    server.can(LOAD[kind], body=nothing[kind])
    with pytest.raises(RuntimeError, match=r"the field '(success|results)' of the reply does not fit"):
        rollout.update(weights(1), 1)
    with pytest.raises(RuntimeError, match=rf"no server has known weights: {server.url}"):
        run(rollout.generate(PROMPT, endless(3)))
    rollout.update(weights(2), 2)
    (answer,) = run(rollout.generate(PROMPT, endless(3)))
    assert answer.versions == (2,) * 3


def test_failed_weight_write_keeps_old_weights(make: Callable[..., HTTPRollout], server: Process, kind: str) -> None:
    rollout, read = make(server), []

    def tensors() -> Iterator[NamedTensor]:
        for named in weights(1):
            read.append(named.name)
            yield named

    with pytest.raises(ValueError, match="version = -1"):
        rollout.update(tensors(), -1)
    assert len(read) == len(list(weights(1)))
    assert rollout.version == 0
    (answer,) = run(rollout.generate(PROMPT, endless(5)))
    assert_drawn_from(replica(), answer)
    assert server.calls(PAUSE[kind]) == 0


def test_cancelled_task_aborts_its_request(make: Callable[..., HTTPRollout], server: Process, kind: str) -> None:
    rollout = make(server)
    server.tell(step_seconds=0.1)

    async def cancel() -> None:
        task = asyncio.ensure_future(rollout.generate(PROMPT, endless(200)))
        await asyncio.to_thread(wait_until, lambda: server.calls(GENERATE[kind]) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    if kind == "sglang":
        wait_until(lambda: server.calls("/abort_request") == 1)
    server.tell(step_seconds=0)
    assert len(run(rollout.generate(PROMPT, endless(4)))[0].tokens) == 4


def test_close_aborts_running_requests(make: Callable[..., HTTPRollout], server: Process, kind: str) -> None:
    before = set(threading.enumerate())
    rollout = make(server)
    server.tell(step_seconds=0.05)
    drawn = server.drawn()  # when it was opened
    background = Background(rollout.generate(PROMPT, endless(100)))
    wait_until(lambda: server.drawn() >= drawn + 2)
    rollout.update(weights(1), 1)
    rollout.close()
    rollout.close()
    (answer,) = background.result()
    assert answer.finish_reason == "aborted"
    assert answer.versions == (0,) * len(answer.tokens)
    # The pause has returned some, unless the server keeps its requests.
    assert answer.tokens or kind == "sglang"
    for work in (lambda: run(rollout.generate(PROMPT, endless(3))), lambda: rollout.update(weights(2), 2)):
        with pytest.raises(RuntimeError, match="closed"):
            work()
    assert "rollout-http" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_invalid_arguments_raise(make: Callable[..., HTTPRollout], server: Process, kind: str) -> None:
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        run(make(server).generate([], endless(3)))
    for servers, options, words in (
        ((), {}, "urls"),
        ((server, server), {}, "urls"),
        ((server,), {"timeout": 0}, "timeout = 0"),
    ):
        with pytest.raises(ValueError, match=words):
            make(*servers, **options)
