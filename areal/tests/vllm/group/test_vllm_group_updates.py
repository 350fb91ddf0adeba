"""Weights over a process group into a real vLLM server: its routes, cutting, loading and life cycle, over gloo."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from areal.inference.http import VLLM
from areal.inference.http.group import GlooCarrier
from areal.inference.http.group.sender import GroupSender
from areal.tests.harness.limits import PROMPTLY, promptly
from areal.tests.harness.servers.group.sending import GroupSending
from areal.tests.vllm.group.engine import assert_served_after_each_step
from areal.tests.vllm.group.generating import TOLERANCE, Generated, differences, generate, served_error
from areal.tests.vllm.group.sources import Weights, stop_after
from areal.tests.vllm.server import PLUGIN, VLLMProcess, marks

pytestmark = marks

LONG_TOLERANCE = 3e-5
"""For answers of hundreds of tokens."""
ALL = 2**30

Make = Callable[..., GroupSending]


@pytest.fixture(scope="module")
def server_options() -> dict[str, Any]:
    flags = ["--weight-transfer-config", json.dumps({"backend": "gloo"})]
    return {"lora": False, "flags": flags, "environment": {"PYTHONPATH": str(PLUGIN)}}


@pytest.fixture
def make(vllm: VLLMProcess) -> Iterator[Make]:
    with ExitStack() as stack:

        def make_one(**options: Any) -> GroupSending:
            return stack.enter_context(GroupSending([vllm.url], VLLM(), GlooCarrier(), **{"timeout": 60, **options}))

        yield make_one


def test_backend_of_the_tests_runs_the_real_engine(vllm: VLLMProcess) -> None:
    assert vllm.call("/get_world_size") == (200, {"world_size": 1})
    assert vllm.call("/start_weight_update", method="POST")[0] == 200
    assert vllm.call("/finish_weight_update", {"weight_version": "default"})[0] == 200


@pytest.mark.parametrize(
    ("packed_bytes", "chunk_bytes"), [(None, ALL), (None, 1), (ALL, ALL), (30_000, ALL), (30_000, 200_000)]
)
def test_served_log_probs_are_those_of_the_model_after_each_update(
    vllm: VLLMProcess, make: Make, packed_bytes: int | None, chunk_bytes: int
) -> None:
    transport = make(packed_bytes=packed_bytes, chunk_bytes=chunk_bytes)
    for version in range(3):
        source = Weights(10 + version)
        transport.send(source, version)
        assert served_error(vllm.url, source.model, version) < TOLERANCE


@pytest.mark.parametrize(
    ("backend", "packed_bytes", "chunk_bytes"),
    [("fsdp:d1", 0, ALL), ("fsdp:d2", 30_000, 200_000), ("fsdp:t2", ALL, 1), ("megatron:p2", 30_000, ALL)],
)
def test_server_has_the_weights_of_an_engine_after_each_step(
    vllm: VLLMProcess, backend: str, packed_bytes: int, chunk_bytes: int
) -> None:
    assert_served_after_each_step(vllm.url, backend, str(packed_bytes), chunk_bytes)


def test_cast_weights_are_served(vllm: VLLMProcess, make: Make) -> None:
    source = Weights(3)
    make(cast=torch.bfloat16).send(source, 3)
    for parameter in source.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert served_error(vllm.url, source.model, 3) < TOLERANCE


def in_background(vllm: VLLMProcess, prompts: list[list[int]], length: int) -> Callable[[], list[Generated]]:
    """Start requests, and return when all are running. The result waits for the answers."""
    answers: list[Generated] = []

    def ask(prompt: list[int]) -> None:
        answers.append(generate(vllm.url, length, seed=prompt[0], prompt=prompt))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 30
    while vllm.metric("vllm:num_requests_running") < len(prompts) and time.monotonic() < end:
        time.sleep(0.02)

    def wait() -> list[Generated]:
        for thread in threads:
            thread.join()
        return answers

    return wait


def test_running_requests_go_on_with_the_new_weights(vllm: VLLMProcess, make: Make) -> None:
    transport = make()
    sources = {"5": Weights(5), "6": Weights(6)}
    transport.send(sources["5"], 5)
    prompts = [[1 + i, 2, 3] for i in range(8)]
    wait = in_background(vllm, prompts, 480)
    transport.send(sources["6"], 6)
    answers = wait()
    assert len(answers) == len(prompts)
    for answer in answers:
        assert len(answer.tokens) == len(answer.labels) == 480
        assert answer.labels == sorted(answer.labels)
        for label, source in sources.items():
            difference = differences(answer, source.model)
            own = torch.tensor([each.endswith(f"/{label}") for each in answer.labels])
            assert not own.any() or difference[own].max() < LONG_TOLERANCE
            assert own.all() or difference[~own].max() > 100 * TOLERANCE
    assert any(len(set(answer.labels)) > 1 for answer in answers)


def rename(ending: str) -> Callable[[str], str | None]:
    return lambda name: f"model.layers.9.{ending}" if name.endswith(f"layers.0.{ending}") else None


@pytest.mark.parametrize(
    "then",
    [
        stop_after("layers.0.self_attn.q_proj.weight"),
        stop_after("norm.weight"),
        rename("self_attn.k_proj.weight"),
        rename("mlp.up_proj.weight"),
    ],
    ids=["source-in-layer", "source-at-end", "name-in-attention", "name-in-mlp"],
)
def test_interrupted_server_is_healed_by_the_next_update(
    vllm: VLLMProcess, make: Make, then: Callable[[str], str | None]
) -> None:
    transport = make(packed_bytes=None, chunk_bytes=1)
    transport.send(Weights(0), 20)
    with promptly(), pytest.raises(RuntimeError, match=r"the source broke|no module or parameter named"):
        transport.send(Weights(1, then), 21)
    assert list(transport.faults) == [vllm.url]
    assert vllm.call("/weight_info") == (200, {"weight_version": "interrupted"})
    source = Weights(2)
    transport.send(source, 22)
    assert served_error(vllm.url, source.model, 22) < TOLERANCE
    assert not transport.faults


def test_without_recovery_the_next_update_fails(vllm: VLLMProcess, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of ``VLLMGroupRoutes.recover``. If this fails, vLLM has learned to start again."""
    transport = make(packed_bytes=None, chunk_bytes=1)
    with monkeypatch.context() as patch:
        patch.setattr(GroupSender, "_recover", lambda self, urls: None)
        with pytest.raises(RuntimeError, match="the source broke"):
            transport.send(Weights(1, stop_after("layers.0.self_attn.q_proj.weight")), 30)
        with pytest.raises(RuntimeError, match="a weight update is already active"):
            transport.send(Weights(2), 31)
    source = Weights(3)
    transport.send(source, 32)
    assert served_error(vllm.url, source.model, 32) < TOLERANCE


def test_forward_on_interrupted_weights_does_not_end_the_server(vllm: VLLMProcess, make: Make) -> None:
    transport = make(packed_bytes=None, chunk_bytes=1)
    with pytest.raises(RuntimeError, match="the source broke"):
        transport.send(Weights(1, stop_after("layers.0.self_attn.q_proj.weight")), 40)
    # Somebody else resumes it, and asks.
    assert vllm.call("/resume", method="POST")[0] == 200
    assert set(generate(vllm.url, 4).labels) == {"interrupted"}
    source = Weights(2)
    transport.send(source, 41)
    assert served_error(vllm.url, source.model, 41) < TOLERANCE


def test_killed_server_is_named_within_seconds_and_joins_again(vllm: VLLMProcess, make: Make) -> None:
    transport = make(packed_bytes=None, chunk_bytes=1)
    transport.send(Weights(0), 50)
    killed: list[float] = []

    def kill(name: str) -> None:
        if name.endswith("layers.1.self_attn.q_proj.weight"):
            vllm.kill()
            killed.append(time.monotonic())

    with pytest.raises(RuntimeError, match=rf"did not reach every server: {vllm.url}"):
        transport.send(Weights(1, kill), 51)
    assert time.monotonic() - killed[0] < PROMPTLY
    assert list(transport.faults) == [vllm.url]
    with pytest.raises(RuntimeError, match=vllm.url):
        transport.send(Weights(1), 51)
    vllm.start()
    source = Weights(2)
    transport.send(source, 52)
    assert served_error(vllm.url, source.model, 52) < TOLERANCE
    assert not transport.faults
