"""Saves and loads a sharded model, its optimizer and the state of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from areal.api.checkpoint import SaveLoadMeta
from areal.engine.checkpointer import EngineCheckpointer, Run
from areal.engine.dcp_files import StagedPlanner, prepare_files, read_metadata, read_tensors
from areal.engine.fsdp.dcp_checkpoint import CheckpointedOptimizer, check_tensors, read_optimizer, tensors_of
from areal.engine.fsdp.weights import FSDPWeights, check_weights, read_weights
from areal.engine.hf_checkpoint import MAX_FILE_BYTES
from areal.engine.model import PackedCausalLM
from areal.engine.save_job import Observe, Work, ignore
from areal.utils.distributed import ControlPlane


class FSDPCheckpointer(EngineCheckpointer):
    """Checkpoints of one engine. Every method is collective, and errors are raised on every rank.

    ``"hf"`` checkpoints hold the master weights in their own dtype, so that nothing is lost; ``config.json`` names that dtype.

    Args:
        model: sharded and materialised.
        optimizer: made over the parameters of ``model``, or None.
        run: gives and takes the version; its layout is noted.
        control: over all ranks.
        source: directory or hub name from which tokenizer files are copied.
        observe: told of every stage of a save.
        max_file_bytes: largest weight file of an ``"hf"`` checkpoint.
    """

    engine: ClassVar[str] = "fsdp"

    def __init__(
        self,
        model: PackedCausalLM,
        optimizer: CheckpointedOptimizer | None,
        run: Run,
        control: ControlPlane,
        source: str,
        *,
        observe: Observe = ignore,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        kind = type(optimizer.inner).__name__ if optimizer else None
        super().__init__(optimizer, kind, run, control, observe=observe)
        self._model = model
        self._optimizer = optimizer
        self._source = source
        self._max_file_bytes = max_file_bytes

    def _prepare_hf(self, meta: SaveLoadMeta, draft: Path) -> Work:
        return FSDPWeights(self._model).prepare_hf(
            self._control,
            self._source,
            draft,
            asynchronous=meta.asynchronous,
            observe=self._observe,
            max_file_bytes=self._max_file_bytes,
        )

    def _prepare_dcp(
        self, files: Mapping[str, bytes], draft: Path, *, with_optim: bool, asynchronous: bool, about: dict[str, Any]
    ) -> Work:
        optimizer = self._optimizer if with_optim else None
        tensors, error = {}, None
        try:
            tensors = tensors_of(self._model, optimizer.inner if optimizer else None)
        except Exception as caught:
            error = caught
        self._control.settle(error)
        return prepare_files(
            tensors, files, StagedPlanner(), self._control, draft, asynchronous=asynchronous, about=about
        )

    def _check_hf(self, folder: Path) -> Callable[[], None]:
        check_weights(self._model, folder)
        return lambda: read_weights(self._model, folder)

    def _check_dcp(self, path: Path, about: Mapping[str, Any], *, with_optim: bool) -> Callable[[], None]:
        metadata = read_metadata(path)
        check_tensors(path, metadata, tensors_of(self._model, None))

        def read() -> None:
            read_tensors(path, metadata, tensors_of(self._model, None))
            if with_optim and self._optimizer is not None:
                read_optimizer(path, metadata, self._model, self._optimizer.inner)

        return read
