"""Answers of SGLang are those on record, to which everyday tests hold the test server. The option ``--record-sglang`` writes the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.tests.sglang import server
from areal.tests.sglang.exchanges import RECORDED, TOPICS, death, record_of, sessions
from areal.tests.sglang.server import SGLangProcess
from areal.tests.vllm.exchanges import differences, write

pytestmark = server.marks


def check(request: pytest.FixtureRequest, topic: str, rows: dict[str, Any]) -> None:
    if request.config.getoption("record_sglang", default=False):
        write(topic, rows, RECORDED)
    found = differences(topic, rows, RECORDED)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("topic", [*TOPICS, "sessions"])
def test_answers_are_those_on_record(
    request: pytest.FixtureRequest, sglang: SGLangProcess, tmp_path: Path, topic: str
) -> None:
    record = record_of(sglang.call, sglang.model, tmp_path, long=490)
    ({**TOPICS, "sessions": sessions})[topic](record)
    check(request, topic, record.rows)


def test_load_of_another_shape_ends_the_server(
    request: pytest.FixtureRequest, sglang: SGLangProcess, tmp_path: Path
) -> None:
    record = record_of(sglang.call, sglang.model, tmp_path, long=490)
    death(record, lambda: sglang.ends(60))
    check(request, "death", record.rows)
