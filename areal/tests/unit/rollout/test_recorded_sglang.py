"""The test server answers as SGLang does: the same requests are sent to it, and the answers compared with recorded ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from areal.tests.harness.servers.rollout_http import Process
from areal.tests.sglang.exchanges import RECORDED, TOPICS, death, record_of
from areal.tests.vllm.exchanges import differences
from areal.tests.vllm.server import CONTEXT, send, served_model

LONG, STEP_SECONDS = 60, 0.02


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    one = Process(served_model())
    yield one
    one.kill()


@pytest.fixture
def server(process: Process) -> Process:
    process.tell(reset=True, context=CONTEXT, step_seconds=STEP_SECONDS)
    return process


@pytest.mark.parametrize("topic", TOPICS)
def test_answers_are_those_of_sglang(server: Process, tmp_path: Path, topic: str) -> None:
    record = record_of(partial(send, server.url), served_model(), tmp_path, long=LONG)
    TOPICS[topic](record)
    found = differences(topic, record.rows, RECORDED)
    assert not found, "\n".join(found)


def test_load_of_another_shape_ends_the_server(tmp_path: Path) -> None:
    server = Process(served_model())
    try:
        record = record_of(lambda *sent: send(server.url, *sent), served_model(), tmp_path, long=LONG)
        death(record, lambda: server.ends(30))
    finally:
        server.kill()
    found = differences("death", record.rows, RECORDED)
    assert not found, "\n".join(found)
