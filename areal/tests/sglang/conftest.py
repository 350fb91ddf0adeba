"""The server of the tests of this folder: one for all of them, as a start takes a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal.inference.http import HTTPRollout, SGLang
from areal.tests.sglang.server import SGLangProcess
from areal.tests.vllm.answers import one_at_a_time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-sglang", action="store_true", help="write the answers of SGLang that the test server is compared with"
    )


@pytest.fixture(scope="session")
def process() -> Iterator[SGLangProcess]:
    server = SGLangProcess()
    yield server
    server.close()


@pytest.fixture
def sglang(process: SGLangProcess) -> SGLangProcess:
    """The server, started anew if an earlier test ended it."""
    if process.process.poll() is not None or not process.healthy():
        process.restart()
    return process


@pytest.fixture
def connect(sglang: SGLangProcess, tmp_path: Path) -> Iterator[Callable[..., HTTPRollout]]:
    """Make a rollout on the server, and close the one before. ``adapter`` is the name of one to update; the rest are options."""
    defaults = {"model": sglang.model, "timeout": 120, "deadline": 120, "update_seconds": 60}
    with one_at_a_time(sglang.url, folder=tmp_path / "weights", **defaults) as make:
        yield lambda *, adapter=None, **options: make(SGLang(adapter=adapter), **options)


@pytest.fixture
def fresh(sglang: SGLangProcess, connect: Callable[..., HTTPRollout]) -> HTTPRollout:
    """A rollout whose server has the weights of its start, as version 0."""
    rollout = connect()
    rollout.load(sglang.model, 0)
    return rollout
