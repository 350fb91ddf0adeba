"""Saves and loads a sharded model, its optimizer and the state of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from areal.api.checkpoint import SaveLoadMeta
from areal.api.parallel import ParallelDims
from areal.engine.fsdp.dcp_checkpoint import (
    STATE_FILE,
    CheckpointedOptimizer,
    check_tensors,
    prepare_dcp,
    read_metadata,
    read_optimizer,
    read_state,
    read_tensors,
    rng_file,
    state_of,
    tensors_of,
)
from areal.engine.fsdp.hf_checkpoint import MAX_FILE_BYTES, prepare_hf
from areal.engine.fsdp.weights import FSDPWeights, check_weights, model_folder, read_weights
from areal.engine.model import PackedCausalLM
from areal.engine.publish import Manifest, is_complete, verify
from areal.engine.save_job import Observe, Saver, Work, ignore
from areal.utils.distributed import ControlPlane
from areal.utils.seeding import rng_state, set_rng_state


class Run(Protocol):
    """What a checkpoint keeps of an engine beside its model and optimizer."""

    version: int
    dims: ParallelDims


class FSDPCheckpointer:
    """Checkpoints of one engine. Every method is collective, and errors are raised on every rank.

    ``"hf"`` checkpoints hold the master weights in their own dtype, so that nothing is lost; ``config.json`` names that dtype. ``"dcp"`` ones
    hold the model, and with ``with_optim`` the optimizer's moments, the schedule and each rank's random state, which is brought back
    where the layout is the one that saved it and left alone elsewhere. Hyperparameters
    come from the configuration, but for the base learning rate, which ``set_lr`` may have changed.

    Args:
        model: sharded and materialised.
        optimizer: made over the parameters of ``model``, or None.
        run: gives and takes the version; its layout is noted.
        control: over all ranks.
        source: directory or hub name from which tokenizer files are copied.
        observe: told of every stage of a save.
        max_file_bytes: largest weight file of an ``"hf"`` checkpoint.
    """

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
        self._model = model
        self._optimizer = optimizer
        self._run = run
        self._control = control
        self._source = source
        self._observe = observe
        self._max_file_bytes = max_file_bytes
        self._saver = Saver(control, observe)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint. See :class:`~areal.api.checkpoint.SaveLoadMeta`."""
        prepare = {"hf": self._prepare_hf, "dcp": self._prepare_dcp}[meta.weight_format]
        self._saver.save(
            Path(meta.path),
            meta.weight_format,
            lambda draft: prepare(meta, draft),
            keep_last=meta.keep_last,
            asynchronous=meta.asynchronous,
        )

    def load(self, meta: SaveLoadMeta) -> None:
        """Load a checkpoint written in any layout, or with ``"hf"`` any model directory of the same architecture.

        Raises:
            ValueError: there is none, or it is damaged or of another model; nothing was changed. Names file and key.
        """
        self.wait()
        error, apply = None, None
        try:
            apply = self._check_dcp(meta) if meta.weight_format == "dcp" else self._check_hf(meta)
        except Exception as caught:
            error = caught
        self._control.settle(error, "nothing was loaded")
        try:
            if apply is not None:
                apply()
        except Exception as caught:
            error = caught
        self._control.settle(error, "the engine holds parts of the checkpoint: load one again before going on")

    def wait(self) -> None:
        """Return when an asynchronous save is published; raise what it raised."""
        self._saver.wait()

    # ---- saving

    def _prepare_hf(self, meta: SaveLoadMeta, draft: Path) -> Work:
        return prepare_hf(
            self._model,
            FSDPWeights(self._model).stored(),
            self._control,
            self._source,
            draft,
            asynchronous=meta.asynchronous,
            observe=self._observe,
            max_file_bytes=self._max_file_bytes,
        )

    def _prepare_dcp(self, meta: SaveLoadMeta, draft: Path) -> Work:
        optimizer = self._optimizer if meta.with_optim else None
        error: Exception | None = None
        tensors, state = {}, {}
        try:
            tensors = tensors_of(self._model, optimizer.inner if optimizer else None)
            state = {
                "version": self._run.version,
                "schedule": optimizer.state_dict() if optimizer else None,
                "stateful": state_of(meta.stateful),
            }
        except Exception as caught:
            error = caught
        self._control.settle(error)
        return prepare_dcp(
            tensors,
            state,
            rng_state(),
            self._control,
            draft,
            asynchronous=meta.asynchronous,
            about={
                "layout": str(self._run.dims),
                "world_size": self._control.size,
                "optimizer": type(optimizer.inner).__name__ if optimizer else None,
            },
        )

    # ---- loading: first everything that can be wrong, then a function that changes the engine

    def _check_hf(self, meta: SaveLoadMeta) -> Callable[[], None]:
        folder = model_folder(meta.path)
        if is_complete(folder):
            self._verify(folder, "hf")
        check_weights(self._model, folder)
        return lambda: read_weights(self._model, folder)

    def _check_dcp(self, meta: SaveLoadMeta) -> Callable[[], None]:
        path = Path(meta.path).resolve()
        manifest = self._verify(path, "dcp")
        optimizer = self._optimizer if meta.with_optim else None
        saved = manifest.about["optimizer"]
        if optimizer is not None and saved != type(optimizer.inner).__name__:
            raise ValueError(
                f"{path} was saved with {f'the optimizer {saved}' if saved else 'no optimizer state'}, and this engine has "
                f"{type(optimizer.inner).__name__}: load with with_optim=False"
            )
        metadata = read_metadata(path)
        check_tensors(path, metadata, tensors_of(self._model, None))
        state = read_state(path / STATE_FILE)
        unknown = sorted(set(meta.stateful) - set(state["stateful"]))
        if unknown:
            raise ValueError(
                f"{path / STATE_FILE} has no state for SaveLoadMeta.stateful[{unknown[0]!r}]; it has {sorted(state['stateful'])}"
            )
        same_layout = manifest.about["layout"] == str(self._run.dims)
        rng = read_state(path / rng_file(self._control.rank)) if optimizer is not None and same_layout else None

        def apply() -> None:
            read_tensors(path, metadata, tensors_of(self._model, None))
            if optimizer is not None:
                read_optimizer(path, metadata, self._model, optimizer.inner)
                optimizer.load_state_dict(state["schedule"])
            if rng is not None:
                set_rng_state(rng)
            self._run.version = state["version"]
            for name, thing in meta.stateful.items():
                thing.load_state_dict(state["stateful"][name])

        return apply

    def _verify(self, path: Path, kind: str) -> Manifest:
        manifest = verify(path, part=self._control.rank, parts=self._control.size)
        if manifest.kind != kind:
            raise ValueError(f"{path} was saved with weight_format={manifest.kind!r}: load it with that")
        return manifest
