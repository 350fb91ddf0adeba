"""Servers for the tests of this folder: one for each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.inference.http import VLLM, HTTPRollout
from areal.tests.vllm.answers import one_at_a_time
from areal.tests.vllm.server import VLLMProcess


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="write the answers of vLLM that the test server is compared with"
    )


@pytest.fixture(scope="module")
def server_options() -> dict[str, Any]:
    """Arguments of the module's :class:`~areal.tests.vllm.server.VLLMProcess`. A module may define another fixture of this name."""
    return {}


@pytest.fixture(scope="module")
def vllm(server_options: dict[str, Any]) -> Iterator[VLLMProcess]:
    """The module's server."""
    server = VLLMProcess(**server_options)
    yield server
    server.close()


@pytest.fixture
def connect(vllm: VLLMProcess, tmp_path: Path) -> Iterator[Callable[..., HTTPRollout]]:
    """Make a rollout on the module's server, and close the one before.

    ``model`` is the name of an adapter, ``adapter`` that of one to update, and the rest are options of the rollout.
    """
    defaults = {"model": vllm.model, "timeout": 120, "deadline": 120, "update_seconds": 30, "api_key": vllm.key}
    with one_at_a_time(vllm.url, folder=tmp_path / "weights", **defaults) as make:
        yield lambda model=None, *, adapter=None, **options: make(VLLM(model=model, adapter=adapter), **options)


@pytest.fixture
def fresh(vllm: VLLMProcess, connect: Callable[..., HTTPRollout]) -> HTTPRollout:
    """A rollout whose server has the weights of its start, as version 0."""
    rollout = connect()
    rollout.load(vllm.model, 0)
    return rollout
