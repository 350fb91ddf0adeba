"""Save and load an engine's adapters with their training state, in the same files on every engine and layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from areal.api.checkpoint import SaveLoadMeta
from areal.engine.checkpoint.async_save import SaveTask
from areal.engine.checkpoint.checkpointer import EngineCheckpointer, FolderWeights, RunInfo
from areal.engine.lora.adapter_files import write_files
from areal.engine.lora.adapter_set import AdapterSet
from areal.utils.distributed import ControlPlane

_FOLDER = "adapters"


class AdapterCheckpointer(EngineCheckpointer):
    """Checkpoints of an engine with adapters.

    A ``"dcp"`` checkpoint contains each adapter in ``adapters/NAME``, in peft's format. It does not contain the
    model, which never changes. Loading it replaces all adapters. ``"hf"`` saves the model with the selected adapter
    merged into it.

    Args:
        adapters: adapters of the engine.
        weights: weights of the model, with the selected adapter merged.
        trained: bool. True if adapters have optimizers.
    """

    engine: ClassVar[str] = "lora"

    def __init__(
        self,
        adapters: AdapterSet,
        weights: FolderWeights,
        run: RunInfo,
        control: ControlPlane,
        source: str,
        trained: bool,
        **options: Any,
    ) -> None:
        super().__init__(None, "adapters" if trained else None, weights, run, control, source, **options)
        self._adapters = adapters

    def _prepare_dcp(
        self, files: Mapping[str, bytes], draft: Path, *, with_optim: bool, asynchronous: bool, about: dict[str, Any]
    ) -> SaveTask:
        everything = dict(files)
        # Gathering an adapter's files is collective: all ranks go through all adapters.
        for name in self._adapters.names:
            for file, content in self._adapters.files(name, with_optim=with_optim).items():
                everything[f"{_FOLDER}/{name}/{file}"] = content

        about |= {"adapters": list(self._adapters.names), "selected": self._adapters.selected}
        return write_files(everything, draft, about)

    def _check_dcp(self, path: Path, about: Mapping[str, Any], *, with_optim: bool) -> Callable[[], None]:
        # Read everything now, so that damaged files are found before any adapter is replaced.
        adapters = {
            name: self._adapters.read(path / _FOLDER / name, with_optim=with_optim) for name in about["adapters"]
        }
        return lambda: self._adapters.replace(adapters, about["selected"])

    def _check_folder(self, meta: SaveLoadMeta) -> Callable[[], None]:
        # The base weights of an engine with adapters never change.
        raise ValueError(
            f"SaveLoadMeta.weight_format = 'hf' to load {meta.path} into an engine with adapters, whose model does not change: load an "
            "adapter with engine.adapters.load, or make an engine with this path"
        )
