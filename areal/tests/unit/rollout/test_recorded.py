"""The test server answers as vLLM does: the same requests are sent to it, and the answers compared with recorded ones."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.inference.protocol import Sampling
from areal.tests.harness.servers.rollout_http import Process
from areal.tests.unit.inference.local.rollouts import plain_logprobs
from areal.tests.vllm.exchanges import PROMPT, TOPICS, Record, death, differences, generation, keys, reload
from areal.tests.vllm.server import CONTEXT, send, served_model

LONG, STEP_SECONDS = 60, 0.02


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    one = Process(served_model(), modern=True)
    yield one
    one.kill()


@pytest.fixture
def server(process: Process) -> Process:
    process.tell(reset=True, context=CONTEXT, step_seconds=STEP_SECONDS)
    return process


def record_of(server: Process, folder: Path, key: str | None = None) -> Record:
    return Record(partial(send, server.url, key=key), served_model(), folder, long=LONG)


@pytest.mark.parametrize("topic", TOPICS)
def test_answers_are_those_of_vllm(server: Process, tmp_path: Path, topic: str) -> None:
    record = record_of(server, tmp_path / "folders")
    TOPICS[topic](record)
    found = differences(topic, record.rows)
    assert not found, "\n".join(found)


def test_only_some_routes_need_the_key(server: Process, tmp_path: Path) -> None:
    server.tell(key="secret", without=["/inference/v1/generate"])
    record = record_of(server, tmp_path / "folders", "secret")
    keys(record, partial(send, server.url))
    found = differences("keys", record.rows)
    assert not found, "\n".join(found)


def test_failed_load_and_a_forward_end_the_server(tmp_path: Path) -> None:
    server = Process(served_model(), modern=True)

    def ended() -> bool:
        try:
            return server.ends(30)
        except subprocess.TimeoutExpired:
            return False

    try:
        record = record_of(server, tmp_path / "folders")
        death(record, ended)
    finally:
        server.kill()
    found = differences("death", record.rows)
    assert not found, "\n".join(found)


def test_label_of_each_token_is_that_of_its_weights(server: Process, tmp_path: Path) -> None:
    """Of a request that runs while the server is paused, loaded and resumed."""
    record = record_of(server, tmp_path / "folders")
    running = record.start("/inference/v1/generate", generation(max_tokens=LONG))
    time.sleep(0.5)
    record.call("/pause?mode=keep", {})
    record.call("/collective_rpc", reload(record.folders["good"]))
    record.call("/update_weight_version", {"new_version": "8"})
    record.call("/resume", {})
    choice = running.result()[1]["choices"][0]
    first, second = choice["weight_versions"]
    assert (first["version"], second["version"]) == ("default", "8")
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], LONG)
    logprobs = torch.tensor([each["logprob"] for each in choice["logprobs"]["content"]])
    for folder, part in ((served_model(), first), (record.folders["good"], second)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        wanted = plain_logprobs(model, PROMPT, choice["token_ids"], Sampling())
        of_part = slice(part["start"], part["end"])
        torch.testing.assert_close(logprobs[of_part], wanted[of_part], rtol=0, atol=1e-5)
