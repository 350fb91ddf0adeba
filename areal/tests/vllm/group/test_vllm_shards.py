"""Shards of trainer ranks into real vLLM servers: their engine ``nccl_m2n`` over gloo, with one worker and with two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from areal.inference.http import VLLM
from areal.tests.harness.servers.group.resharding import GlooReshardCarrier
from areal.tests.harness.servers.group.sending import GroupSending
from areal.tests.harness.tiny import started
from areal.tests.vllm.group.engine import assert_served_after_each_step
from areal.tests.vllm.group.generating import TOLERANCE, served_error
from areal.tests.vllm.server import PLUGIN, VLLMProcess, marks, replica, served_model
from areal.weight_sync import load_named

pytestmark = marks


@pytest.fixture(scope="module", params=[1, 2], ids=["one-worker", "two-workers"])
def vllm(request: pytest.FixtureRequest) -> Iterator[VLLMProcess]:
    flags = [
        "--weight-transfer-config",
        json.dumps({"backend": "shards"}),
        "--tensor-parallel-size",
        str(request.param),
    ]
    environment = {"PYTHONPATH": str(PLUGIN), "AREAL_TEST_PLAIN_WEIGHTS": "1"}
    server = VLLMProcess(lora=False, flags=flags, environment=environment)
    yield server
    server.close()


@pytest.mark.parametrize("backend", ["fsdp:d1", "fsdp:d2", "fsdp:t2", "megatron:p2", "fsdp:d2t2"])
def test_server_has_the_weights_of_an_engine_after_each_step(vllm: VLLMProcess, backend: str) -> None:
    assert_served_after_each_step(vllm.url, backend, "shards", 1)


class Misnamed:
    """An engine with another name of a tensor."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def local_tensors(self) -> Iterator[Any]:
        for part in self._engine.local_tensors():
            yield part._replace(name=part.name.replace("layers.0.mlp.up_proj", "layers.9.mlp.up_proj"))


def test_refused_update_is_healed_by_the_next(vllm: VLLMProcess) -> None:
    model = replica()
    with (
        started("fsdp:d1", path=served_model(), dtype="float32") as engine,
        GroupSending([vllm.url], VLLM(), GlooReshardCarrier(), timeout=20) as sending,
    ):
        with pytest.raises(RuntimeError, match=f"{vllm.url}.*'layers.9'"):
            sending.send(Misnamed(engine), 1)
        assert list(sending.faults) == [vllm.url]
        load_named(model, engine.named_tensors())
        sending.send(engine, 2)
        assert not sending.faults
        assert served_error(vllm.url, model, 2) < TOLERANCE


def test_workers_receive_into_their_weights(vllm: VLLMProcess) -> None:
    """vLLM's own plan has matrices that shards are written into, and others that it loads itself."""
    plans = [line.split("destination plan: ")[1] for line in vllm.log.splitlines() if "destination plan: " in line]
    direct = [int(plan.split("/")[0]) for plan in plans]
    assert min(direct, default=0) > 0, plans
