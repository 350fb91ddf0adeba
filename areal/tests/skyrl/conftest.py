"""Fixtures: backends behind SkyRL's interface, which the tests of a module use together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from areal.tests.grid.models import model_dir
from areal.tests.harness.world import one_rank

if TYPE_CHECKING:  # this module is imported without SkyRL, too
    from areal.integrations.skyrl.backend import ArealBackend

Start = Callable[..., "ArealBackend"]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Function that starts a backend on the tiny Qwen3 in float32. All of them are closed at the end of the module."""
    from areal.integrations.skyrl.backend import ArealBackend
    from areal.integrations.skyrl.config import ArealBackendConfig

    made: list[ArealBackend] = []

    def make(layout: str = "fsdp:d1", sampler: str | None = None, **settings: Any) -> ArealBackend:
        settings = {"dtype": "float32", **settings}
        config = ArealBackendConfig(backend=layout, backend_config=settings, sampler=sampler)
        made.append(ArealBackend(model_dir("qwen3"), config))
        return made[-1]

    with one_rank():
        yield make
        for each in made:
            each.close()


@pytest.fixture(scope="module")
def shared(start: Start) -> ArealBackend:
    """The backend of the module."""
    return start()


@pytest.fixture
def backend(shared: ArealBackend) -> ArealBackend:
    """The backend of the module, without models."""
    for model in list(shared.trainer.models):
        shared.delete_model(model)
    return shared
