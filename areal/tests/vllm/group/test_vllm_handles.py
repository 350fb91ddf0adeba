"""Weights by handles of memory into a real vLLM server: its engine ``ipc``, with files in place of GPU memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from areal.inference.http import VLLM, HTTPRollout
from areal.tests.harness.servers.group.memory import FileCarrier
from areal.tests.harness.servers.group.sending import GroupSending
from areal.tests.vllm.group.engine import assert_served_after_each_step
from areal.tests.vllm.group.generating import TOLERANCE, served_error
from areal.tests.vllm.group.sources import Weights, stop_after
from areal.tests.vllm.server import PLUGIN, VLLMProcess, marks

pytestmark = marks

ALL = 2**30
GPU = "gpu-0"

Make = Callable[..., GroupSending]


@pytest.fixture(scope="module")
def server_options() -> dict[str, Any]:
    flags = ["--weight-transfer-config", json.dumps({"backend": "files"})]
    environment = {"PYTHONPATH": str(PLUGIN), "AREAL_TEST_GPU": GPU, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    return {"lora": False, "flags": flags, "environment": environment}


@pytest.fixture
def make(vllm: VLLMProcess) -> Iterator[Make]:
    with ExitStack() as stack:

        def make_one(chunk_bytes: int, gpu: str = GPU, **options: Any) -> GroupSending:
            carrier = FileCarrier(gpu, chunk_bytes)
            return stack.enter_context(GroupSending([vllm.url], VLLM(), carrier, **{"timeout": 60, **options}))

        yield make_one


@pytest.mark.parametrize("chunk_bytes", [ALL, 200_000, 1])
def test_served_log_probs_are_those_of_the_model_after_each_update(
    vllm: VLLMProcess, make: Make, chunk_bytes: int
) -> None:
    transport = make(chunk_bytes)
    for version in range(3):
        source = Weights(10 + version)
        transport.send(source, version)
        assert served_error(vllm.url, source.model, version) < TOLERANCE


@pytest.mark.parametrize(
    ("backend", "chunk_bytes"), [("fsdp:d1", ALL), ("fsdp:d2", 200_000), ("fsdp:t2", 1), ("megatron:p2", 200_000)]
)
def test_server_has_the_weights_of_an_engine_after_each_step(vllm: VLLMProcess, backend: str, chunk_bytes: int) -> None:
    assert_served_after_each_step(vllm.url, backend, "files", chunk_bytes)


def test_rollout_sends_by_handles(vllm: VLLMProcess) -> None:
    carrier = FileCarrier(GPU, 200_000)
    with HTTPRollout([vllm.url], VLLM(), carrier=carrier, update_seconds=60, take_over=True) as rollout:
        for version in (1, 2):
            source = Weights(version)
            rollout.update(source.named_tensors(), version)
            assert rollout.version == version
            assert served_error(vllm.url, source.model, version) < TOLERANCE


def test_interrupted_server_is_healed_by_the_next_update(vllm: VLLMProcess, make: Make) -> None:
    transport = make(1)
    with pytest.raises(RuntimeError, match="the source broke"):
        transport.send(Weights(1, stop_after("layers.0.self_attn.q_proj.weight")), 21)
    assert list(transport.faults) == [vllm.url]
    source = Weights(2)
    transport.send(source, 22)
    assert served_error(vllm.url, source.model, 22) < TOLERANCE


def test_worker_without_a_rank_on_its_gpu_is_named(vllm: VLLMProcess, make: Make) -> None:
    with pytest.raises(RuntimeError, match=f"{vllm.url}.*IPC handle not found for GPU UUID {GPU}"):
        make(ALL, gpu="gpu-1").send(Weights(1), 31)
    source = Weights(2)
    make(ALL).send(source, 32)
    assert served_error(vllm.url, source.model, 32) < TOLERANCE


def test_server_that_refuses_pickles_says_so(vllm: VLLMProcess, make: Make) -> None:
    del vllm.variables["VLLM_ALLOW_INSECURE_SERIALIZATION"]
    vllm.restart()
    with pytest.raises(RuntimeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        make(ALL).send(Weights(1), 41)
