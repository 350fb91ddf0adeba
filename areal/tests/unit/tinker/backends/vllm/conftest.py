"""Fixtures: a vLLM server of the tests, and adapters for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.tests.harness.servers.vllm_server import VLLMServer
from areal.tests.unit.inference.local.rollouts import tokenizer
from areal.tests.unit.tinker.backends.sampling import trained_engine
from areal.tests.unit.tinker.backends.vllm.http_sampling import CONTEXT, MODEL


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """Folder with two adapters, and their engine."""
    folder = tmp_path_factory.mktemp("adapters")
    engine = trained_engine(MODEL, ("default", "second"))
    for name in ("default", "second"):
        engine.adapters.save(name, folder / name)
    yield folder, engine
    engine.destroy()


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(folder)
    server = VLLMServer(MODEL, context=CONTEXT, tokenizer=str(folder))
    yield server
    server.stop()


@pytest.fixture
def server(one_server: VLLMServer) -> VLLMServer:
    """The server of the module, as after a start."""
    one_server.stop()
    one_server.start()
    one_server.canned, one_server.calls = [], type(one_server.calls)()
    one_server.hidden, one_server.processed, one_server.step_seconds, one_server.ended = False, True, 0.0, 0
    return one_server
