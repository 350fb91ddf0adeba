"""Save and load an engine: the steps that all engines have in common, around the tensors of each engine."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from areal.api.checkpoint import SaveLoadMeta, Stateful
from areal.api.parallel import ParallelDims
from areal.engine.agreement import check_equal
from areal.engine.checkpoint.async_save import CheckpointSaver, SaveTask
from areal.engine.checkpoint.atomic_dir import MANIFEST, Manifest, is_complete, verify
from areal.engine.checkpoint.huggingface import MAX_FILE_BYTES, Export, prepare_hf
from areal.engine.checkpoint.run_state import STATE_FILE, read_state, rng_file, state_of, to_bytes
from areal.engine.model.hub import model_folder
from areal.utils.distributed import ControlPlane
from areal.utils.seeding import rng_state, set_rng_state


class RunInfo(Protocol):
    """Attributes of an engine that a checkpoint contains in addition to model and optimizer."""

    version: int
    dims: ParallelDims


@runtime_checkable
class FolderWeights(Protocol):
    """Weights of a model that can be written to, and read from, a directory in the Hugging Face format."""

    def export(self) -> Export:
        """Return the tensors and settings to write. Collective."""

    def check(self, folder: Path) -> None:
        """Compare a model directory with the model, without changing the model. Not collective.

        Raises:
            ValueError: the directory is of another model. The error names file and key.
        """

    def read(self, folder: Path) -> None:
        """Load the weights of a directory that :meth:`check` has accepted. Collective."""


class EngineCheckpointer(ABC):
    """Checkpoints of one engine. Every method is collective, and errors are raised on every rank.

    ``"dcp"`` checkpoints contain the model, and with ``with_optim`` the optimizer's moments, the learning-rate schedule and
    the random state of each process. The random state is restored only into the layout and processes that saved it. Hyperparameters come from
    the configuration, except the base learning rate, which ``set_lr`` may have changed. ``"hf"`` checkpoints contain the
    trained weights in their own dtype, without rounding; ``config.json`` names that dtype.

    Args:
        schedule: state of the learning-rate schedule; ``None`` without training.
        optimizer_kind: name of the optimizer, or ``None``.
        weights: weights of the model.
        run: version and layout of the engine. Loading sets the version.
        control: control plane over all ranks.
        source: directory or hub name from which tokenizer files are copied.
        max_file_bytes: size of the largest weight file of an ``"hf"`` checkpoint.
    """

    engine: ClassVar[str]
    """Name of the engine, written to ``"dcp"`` checkpoints."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Engines whose ``"dcp"`` checkpoints can be loaded, because they have the same names for tensors. Empty: this engine only."""

    def __init__(
        self,
        schedule: Stateful | None,
        optimizer_kind: str | None,
        weights: FolderWeights,
        run: RunInfo,
        control: ControlPlane,
        source: str,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._schedule = schedule
        self._optimizer_kind = optimizer_kind
        self._folder = weights
        self._run = run
        self._source = source
        self._max_file_bytes = max_file_bytes
        self._control = control
        self._saver = CheckpointSaver(control, source)

    # ---- implemented by each engine

    @abstractmethod
    def _prepare_dcp(
        self, files: Mapping[str, bytes], draft: Path, *, with_optim: bool, asynchronous: bool, about: dict[str, Any]
    ) -> SaveTask:
        """Return the task that writes the engine's tensors and this rank's ``files``. Collective."""

    @abstractmethod
    def _check_dcp(self, path: Path, about: Mapping[str, Any], *, with_optim: bool) -> Callable[[], None]:
        """Compare a checkpoint with the model, without changing the model. Not collective.

        Args:
            path: directory of the checkpoint.
            about: entries of the manifest.
            with_optim: whether the optimizer is loaded, too.

        Returns:
            A function that reads the tensors into the engine.

        Raises:
            ValueError: the checkpoint is of another model. The error names file and key.
        """

    # ---- the interface

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint. See :class:`~areal.api.checkpoint.SaveLoadMeta`.

        Raises:
            ValueError: an argument differs between ranks.
        """
        described = {**_described(meta), "name of SaveLoadMeta.path": Path(meta.path).name}
        check_equal(self._control.gather(described), "save the same checkpoint on all ranks")
        prepare = {"hf": self._prepare_hf, "dcp": self._prepare_run}[meta.weight_format]
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
            ValueError: the checkpoint is missing, damaged, of another model, or not the one that another rank loads. Nothing was changed.
                The error names file and key.
        """
        self.wait()
        check_equal(
            self._control.attempt_and_gather(lambda: {**_described(meta), **_published(meta)}),
            "load the same checkpoint on all ranks; hosts may see a shared directory at different times",
        )
        # Every rank checks everything before any rank changes anything.
        check = self._check_run if meta.weight_format == "dcp" else self._check_folder
        apply = self._control.attempt(lambda: check(meta), "nothing was loaded")
        self._control.attempt(apply, "the engine holds parts of the checkpoint: load one again before going on")

    def wait(self) -> None:
        """Return when an asynchronous save is published. Raises the error of that save."""
        self._saver.wait()

    # ---- saving

    def _prepare_hf(self, meta: SaveLoadMeta, draft: Path) -> SaveTask:
        return prepare_hf(
            self._folder.export(),
            self._control,
            self._source,
            draft,
            asynchronous=meta.asynchronous,
            chat_template=meta.chat_template,
            max_file_bytes=self._max_file_bytes,
        )

    def _prepare_run(self, meta: SaveLoadMeta, draft: Path) -> SaveTask:
        with_optim = meta.with_optim and self._optimizer_kind is not None

        def collect_files() -> dict[str, bytes]:
            # Each rank saves its own random state; everything else of the run is the same on all ranks.
            files = {rng_file(self._control.rank): to_bytes(rng_state())}
            state = {
                "version": self._run.version,
                "schedule": self._schedule.state_dict() if with_optim and self._schedule is not None else None,
                "stateful": state_of(meta.stateful),
            }
            if self._control.rank == 0:
                files[STATE_FILE] = to_bytes(state)
            return files

        files = self._control.attempt(collect_files)
        about = {
            "engine": self.engine,
            "layout": str(self._run.dims),
            "world_size": self._control.size,
            "optimizer": self._optimizer_kind if with_optim else None,
        }
        return self._prepare_dcp(files, draft, with_optim=with_optim, asynchronous=meta.asynchronous, about=about)

    # ---- loading: each function checks everything first and returns a function that changes the engine

    def _check_folder(self, meta: SaveLoadMeta) -> Callable[[], None]:
        folder = model_folder(meta.path)
        if is_complete(folder):
            self._verify(folder, "hf")
        self._folder.check(folder)
        return lambda: self._folder.read(folder)

    def _check_run(self, meta: SaveLoadMeta) -> Callable[[], None]:
        path = Path(meta.path).resolve()
        # Files, engine and optimizer.
        about = self._verify(path, "dcp").about
        if (saved_by := about.get("engine", "fsdp")) not in (self.reads or {self.engine}):
            raise ValueError(
                f"{path} was saved with weight_format='dcp' by the engine {saved_by!r}, which names its tensors "
                f"otherwise than {self.engine!r}: save with weight_format='hf' there, and load that"
            )
        with_optim, saved = meta.with_optim and self._optimizer_kind is not None, about["optimizer"]
        if with_optim and saved != self._optimizer_kind:
            raise ValueError(
                f"{path} was saved with {f'the optimizer {saved}' if saved else 'no optimizer state'}, and this engine has "
                f"{self._optimizer_kind}: load with with_optim=False"
            )
        # Tensors: names, shapes and dtypes.
        read = self._check_dcp(path, about, with_optim=with_optim)
        # State of the run and of the user's objects.
        state = read_state(path / STATE_FILE)
        unknown = sorted(set(meta.stateful) - set(state["stateful"]))
        if unknown:
            raise ValueError(
                f"{path / STATE_FILE} has no state for SaveLoadMeta.stateful[{unknown[0]!r}]; it has {sorted(state['stateful'])}"
            )
        # Random state belongs to a process of a layout, which may have been on another number of them.
        same_layout = (about["layout"], about["world_size"]) == (str(self._run.dims), self._control.size)
        rng = read_state(path / rng_file(self._control.rank)) if with_optim and same_layout else None

        def apply() -> None:
            if with_optim and self._schedule is not None:
                self._schedule.load_state_dict(state["schedule"])
            read()
            if rng is not None:
                set_rng_state(rng)
            self._run.version = state["version"]
            for name, stateful in meta.stateful.items():
                stateful.load_state_dict(state["stateful"][name])

        return apply

    def _verify(self, path: Path, kind: str) -> Manifest:
        # Ranks divide the checksums of the files among them.
        manifest = verify(path, shard=self._control.rank, shards=self._control.size)
        if manifest.kind != kind:
            raise ValueError(f"{path} was saved with weight_format={manifest.kind!r}: load it with that")
        return manifest


def _described(meta: SaveLoadMeta) -> dict[str, Any]:
    """Return what all ranks must say of one checkpoint. They may have its directory at different places."""
    names = ("weight_format", "with_optim", "asynchronous", "keep_last")
    return {
        **{f"SaveLoadMeta.{name}": getattr(meta, name) for name in names},
        "names in SaveLoadMeta.stateful": sorted(meta.stateful),
    }


def _published(meta: SaveLoadMeta) -> dict[str, Any]:
    """Return what tells a checkpoint from others. A model directory of another program has no manifest."""
    path = Path(meta.path).resolve()
    if not is_complete(path):
        return {}
    return {"name of SaveLoadMeta.path": path.name, f"CRC-32 of {MANIFEST}": zlib.crc32((path / MANIFEST).read_bytes())}
