"""Answers of vLLM are those on record, to which everyday tests hold the test server. The option ``--record`` writes the record."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from areal.tests.vllm import server
from areal.tests.vllm.exchanges import TOPICS, Record, death, differences, keys, write
from areal.tests.vllm.server import VLLMProcess

pytestmark = server.marks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


def check(request: pytest.FixtureRequest, topic: str, rows: dict[str, Any]) -> None:
    if request.config.getoption("record", default=False):
        write(topic, rows)
    assert not differences(topic, rows), "\n".join(differences(topic, rows))


def record_of(vllm: VLLMProcess, folder: Path) -> Record:
    return Record(vllm.call, vllm.model, folder, long=300)


@pytest.mark.parametrize("topic", TOPICS)
def test_answers_are_those_on_record(
    request: pytest.FixtureRequest, vllm: VLLMProcess, tmp_path: Path, topic: str
) -> None:
    record = record_of(vllm, tmp_path / "folders")
    TOPICS[topic](record)
    check(request, topic, record.rows)


def test_failed_load_and_a_forward_end_the_server(
    request: pytest.FixtureRequest, vllm: VLLMProcess, tmp_path: Path
) -> None:
    record = record_of(vllm, tmp_path / "folders")
    death(record, lambda: vllm.ends(30))
    check(request, "death", record.rows)
    # No other server runs next to those of the following tests.
    vllm.close()


def test_only_some_routes_need_the_key(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    vllm = VLLMProcess(scale_out=False, lora=False, environment={"VLLM_API_KEY": "secret"})
    try:
        record = record_of(vllm, tmp_path / "folders")
        keys(record, partial(server.send, vllm.url))
    finally:
        vllm.close()
    check(request, "keys", record.rows)
