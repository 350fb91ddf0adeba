"""Save and load a sharded model, its optimizer and the state of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from areal.engine.checkpoint.async_save import SaveTask
from areal.engine.checkpoint.checkpointer import EngineCheckpointer, RunInfo
from areal.engine.checkpoint.dcp import StagedPlanner, prepare_files, read_metadata
from areal.engine.checkpoint.run_tensors import EXCHANGING, check_weights
from areal.engine.checkpoint.tensor_layout import stored_tensors
from areal.engine.torch.dist_checkpoint import (
    CheckpointedOptimizer,
    checkpoint_tensors,
    read_model,
    read_optimizer,
)
from areal.engine.torch.model_chunks import ModelChunks
from areal.engine.torch.weights import ShardedWeights
from areal.utils.distributed import ControlPlane


class ShardedCheckpointer(EngineCheckpointer):
    """Checkpoints of one engine.

    Args:
        chunks: sharded and materialised model.
        optimizer: optimizer over the parameters of ``chunks``, or ``None``.
        run, control, source, options: as in :class:`~areal.engine.checkpoint.checkpointer.EngineCheckpointer`.
    """

    engine: ClassVar[str] = "fsdp"
    reads: ClassVar[frozenset[str]] = EXCHANGING

    def __init__(
        self,
        chunks: ModelChunks,
        optimizer: CheckpointedOptimizer | None,
        run: RunInfo,
        control: ControlPlane,
        source: str,
        **options: Any,
    ) -> None:
        kind = type(optimizer.inner).__name__ if optimizer else None
        super().__init__(optimizer, kind, ShardedWeights(chunks), run, control, source, **options)
        self._chunks = chunks
        self._optimizer = optimizer

    def _prepare_dcp(
        self, files: Mapping[str, bytes], draft: Path, *, with_optim: bool, asynchronous: bool, about: dict[str, Any]
    ) -> SaveTask:
        optimizer = self._optimizer if with_optim else None
        tensors = self._control.attempt(
            lambda: checkpoint_tensors(self._chunks.own(), optimizer.inner if optimizer else None)
        )
        return prepare_files(
            tensors, files, StagedPlanner(), self._control, draft, asynchronous=asynchronous, about=about
        )

    def _check_dcp(self, path: Path, about: Mapping[str, Any], *, with_optim: bool) -> Callable[[], None]:
        # Every rank compares the full model, so that all agree; only its own shards are read.
        metadata = read_metadata(path)
        check_weights(path, metadata, {name: x.shape for name, x in stored_tensors(self._chunks.full_model)})

        def read() -> None:
            stored = self._chunks.stored()
            read_model(path, metadata, stored)
            if with_optim and self._optimizer is not None:
                read_optimizer(path, metadata, stored, self._optimizer.inner)

        return read
