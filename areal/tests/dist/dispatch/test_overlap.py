"""Models on devices of their own compute at the same time: calls that wait for each other end only if they are made together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from areal.api import FinetuneSpec, TrainEngine
from areal.dispatch import InProcess, WorkerGroup
from areal.dispatch.executor import Reply, Work
from areal.engine.registry import create_engine
from areal.tests.dist.dispatch.overlap import check_overlap
from areal.tests.harness.tiny import config, global_batch, loss


class InThread(InProcess):
    """One rank in a thread, so that calls return before they end, as with a process."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1)

    def start(self, what: str, work: Work, arguments: Sequence[Any]) -> Future[list[Reply]]:
        run = super().start
        return self._thread.submit(lambda: run(what, work, arguments).result())


@pytest.mark.world(1)
@pytest.mark.parametrize("models", [("policy", "reference", "critic"), ("adapted", "critic")], ids="-".join)
def test_models_on_their_own_devices_score_and_train_together(models: tuple[str, ...], tmp_path: Path) -> None:
    check_overlap({name: InThread() for name in models}, tmp_path)


@pytest.mark.world(1)
def test_engine_has_the_futures_of_a_group() -> None:
    settings, batch = config("fsdp:d1"), global_batch(4)
    for engine in (create_engine(settings), WorkerGroup(settings), WorkerGroup(settings, InThread())):
        with engine:
            engine.initialize(FinetuneSpec(total_train_steps=10))
            pending = engine.start(TrainEngine.forward_batch, batch, outputs=("logprobs", "entropy"))
            assert set(pending.result()) == {"logprobs", "entropy"}
            assert pending.done()
            assert engine.start(TrainEngine.train_batch, batch, loss).result().update_successful
            with pytest.raises(ValueError, match="value"):
                engine.start(TrainEngine.forward_batch, batch, outputs=("values",)).result()
