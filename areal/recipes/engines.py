"""The engines of a run: on the ranks of `torchrun`, or in Ray actors that all engines of the run share."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module

from areal.api import TrainEngine, TrainEngineConfig
from areal.dispatch import Executor, WorkerGroup
from areal.engine.registry import create_engine
from areal.recipes.config import RunConfig
from areal.utils.distributed import init_default_group, rank_in_world


class Engines:
    """Makes engines, which are closed with ``closing``.

    Args:
        config: settings of the run.
        closing: stack of the run.

    Attributes:
        speaks: True on the one rank that writes files and lines.

    Raises:
        ValueError: Ray is not installed, or its workers are not as the layout needs them.
    """

    def __init__(self, config: RunConfig, closing: ExitStack) -> None:
        self._config, self._closing = config, closing
        self._executor: Executor | None = None
        self._groups: list[WorkerGroup] = []
        if config.workers == "ranks":
            init_default_group()
        self.speaks = rank_in_world() == 0

    def make(self, config: TrainEngineConfig, optimizer_steps: int) -> TrainEngine:
        """Return an initialized engine. Collective."""
        engine = self.create(config)
        engine.initialize(self._config.spec(optimizer_steps))
        return engine

    def create(self, config: TrainEngineConfig) -> TrainEngine:
        """Return an engine that is not initialized."""
        if self._config.workers == "ranks":
            return self._closing.enter_context(create_engine(config))
        name = f"engine-{len(self._groups)}"
        group = WorkerGroup(config, self._workers(config), name=name, shared_folder=self._config.output)
        self._groups.append(self._closing.enter_context(group))
        return group

    def restart(self) -> None:
        """Start new processes after the loss of one, with the same engines."""
        for group in self._groups:
            group.restart()

    def _workers(self, config: TrainEngineConfig) -> Executor:
        """Start the processes for the first engine, and return them."""
        if self._executor is None:
            try:
                ray = import_module("areal.dispatch.ray")
            except ModuleNotFoundError as error:
                raise ValueError(f"workers = 'ray': {error.name} is not installed: pip install 'areal[ray]'") from None
            workers = ray.RayWorkers(config.dims.world_size, **self._config.ray)
            self._executor = self._closing.enter_context(workers)
        return self._executor
