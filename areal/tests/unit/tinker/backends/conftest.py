"""Fixtures: backends on an engine of one rank, which the tests of a module share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from areal.tests.grid.models import model_dir
from areal.tinker.backends.training.engine_backend import EngineBackend, create

Start = Callable[..., EngineBackend]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Function that starts a backend on the tiny Qwen3 in float32. All of them are closed at the end of the module."""
    if "WORLD_SIZE" in os.environ:
        pytest.skip("starts an engine of one rank")
    made = []

    def make(backend: str = "fsdp:d1", model: str | None = None, **config: Any) -> EngineBackend:
        made.append(create(model or model_dir("qwen3"), backend, {"dtype": "float32", **config}))
        return made[-1]

    yield make
    for each in made:
        each.close()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def shared(start: Start) -> EngineBackend:
    """The backend of the module."""
    return start(max_tokens_per_mb=64)


@pytest.fixture
def backend(shared: EngineBackend) -> EngineBackend:
    """The backend of the module, without models."""
    for model_id in list(shared.models):
        shared.delete(model_id)
    return shared
