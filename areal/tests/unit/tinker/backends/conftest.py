"""Fixtures: backends on an engine of one rank, which the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from areal.tests.grid.models import model_dir
from areal.tests.harness.world import one_rank
from areal.tinker.backends.training.engine_backend import EngineBackend, create

Start = Callable[..., EngineBackend]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Function that starts a backend on the tiny Qwen3 in float32. All of them are closed at the end of the module."""
    made: list[EngineBackend] = []

    def make(backend: str = "fsdp:d1", model: str | None = None, **config: Any) -> EngineBackend:
        made.append(create(model or model_dir("qwen3"), backend, {"dtype": "float32", **config}))
        return made[-1]

    with one_rank():
        yield make
        for each in made:
            each.close()


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
