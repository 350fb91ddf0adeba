"""Servers as vLLM 0.32 and SGLang 0.5.23, and rollouts on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.inference.http import VLLM, Dialect, HTTPRollout
from areal.tests.grid.models import model_dir
from areal.tests.harness.servers.rollout_http import Process

Make = Callable[..., HTTPRollout]


@pytest.fixture(scope="module")
def modern_process() -> Iterator[Process]:
    one = Process(modern=True)
    yield one
    one.kill()


@pytest.fixture
def vllm(modern_process: Process) -> Process:
    modern_process.tell(reset=True)
    return modern_process


@pytest.fixture(scope="module")
def modern_processes() -> Iterator[list[Process]]:
    three = [Process(modern=True) for _ in range(3)]
    yield three
    for process in three:
        process.kill()


@pytest.fixture
def vllms(modern_processes: list[Process]) -> list[Process]:
    """Three servers. A test that kills one starts it again."""
    for process in modern_processes:
        process.tell(reset=True)
    return modern_processes


@pytest.fixture(scope="module")
def older_process() -> Iterator[Process]:
    """A server as SGLang 0.5.23, and as a vLLM without labels."""
    one = Process()
    yield one
    one.kill()


@pytest.fixture
def sglang(older_process: Process) -> Process:
    older_process.tell(reset=True)
    return older_process


@pytest.fixture
def make_vllm(tmp_path: Path) -> Iterator[Make]:
    """Returns a function that makes a rollout on servers. All are closed at the end."""
    made: list[HTTPRollout] = []

    def make(*servers: Process, dialect: Dialect | None = None, **options: Any) -> HTTPRollout:
        options = {
            "folder": tmp_path / "weights",
            "model": model_dir("qwen3"),
            "timeout": 30,
            "deadline": 30,
            "update_seconds": 20,
            **options,
        }
        made.append(HTTPRollout([server.url for server in servers], dialect or VLLM(), **options))
        return made[-1]

    yield make
    for rollout in made:
        rollout.close()
