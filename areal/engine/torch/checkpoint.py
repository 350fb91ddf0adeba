"""Save and load a sharded model, its optimizer and the state of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from areal.engine.checkpoint.async_save import SaveTask
from areal.engine.checkpoint.checkpointer import EngineCheckpointer, RunInfo
from areal.engine.checkpoint.dcp import StagedPlanner, prepare_files, read_metadata, read_tensors
from areal.engine.checkpoint.run_tensors import EXCHANGING, MODEL, OPTIM, check_weights
from areal.engine.checkpoint.tensor_layout import stored_tensors
from areal.engine.optimizer import ClippingOptimizer
from areal.engine.torch.model_chunks import ModelChunks
from areal.engine.torch.weights import ShardedWeights
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import empty_like


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
        optimizer: ClippingOptimizer[torch.optim.Optimizer] | None,
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


def checkpoint_tensors(
    stored: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Return all tensors of a run by their name in the checkpoint. Shards stay shards.

    Args:
        stored: pairs of name and tensor of the model, each name once.
        optimizer: optimizer to include, or ``None``.
    """
    tensors = {MODEL + name: tensor.detach() for name, tensor in stored}
    if optimizer is not None:
        for name, parameter in _optimized(stored, optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{OPTIM}{name}.{key}"] = value
                # Silently dropping a state would change the run after loading.
                elif value is not None:
                    raise ValueError(
                        f"optimizer state {key!r} of {name} is a {type(value).__name__}; only tensors are saved"
                    )
    return tensors


def read_model(path: Path, metadata: Metadata, stored: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the tensors of a model by those of a checkpoint. Names may be repeated."""
    for tensors in _each_name_once(stored):
        read_tensors(path, metadata, checkpoint_tensors(tensors, None))


def _each_name_once(stored: Iterable[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
    """Divide tensors into lists in which each name occurs once, because one read has one tensor per name."""
    rounds: list[dict[str, Tensor]] = []
    for name, tensor in stored:
        free = next((tensors for tensors in rounds if name not in tensors), None)
        if free is None:
            rounds.append(free := {})
        free[name] = tensor
    return [list(tensors.items()) for tensors in rounds]


def _empty_optimizer_state(
    metadata: Metadata, optimized: Iterable[tuple[str, Tensor]]
) -> dict[Tensor, dict[str, Tensor]]:
    """Return empty tensors for the optimizer state in a checkpoint, sharded like the parameters."""
    state: dict[Tensor, dict[str, Tensor]] = {}
    saved = metadata.state_dict_metadata
    for name, parameter in optimized:
        prefix = f"{OPTIM}{name}."
        for key, entry in saved.items():
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
                dtype = entry.properties.dtype
                # Moments are sharded like the parameter; scalars such as the step are replicated.
                like_parameter = entry.size == parameter.shape
                empty = empty_like(parameter, dtype=dtype) if like_parameter else torch.empty(entry.size, dtype=dtype)
                state.setdefault(parameter, {})[key.removeprefix(prefix)] = empty
    return state


def read_optimizer(
    path: Path, metadata: Metadata, stored: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer
) -> None:
    """Replace an optimizer's state by that of a checkpoint. Hyperparameters are kept. Names may be repeated."""
    state: dict[Tensor, dict[str, Tensor]] = {}
    for optimized in _each_name_once(_optimized(stored, optimizer)):
        # Read into empty tensors: before its first step an optimizer does not have any.
        empty = _empty_optimizer_state(metadata, optimized)
        names = {parameter: name for name, parameter in optimized}
        flat = {f"{OPTIM}{names[p]}.{key}": value for p, values in empty.items() for key, value in values.items()}
        read_tensors(path, metadata, flat)
        state |= empty
    # torch's optimizers store state by the index of the parameter.
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    content = optimizer.state_dict()
    content["state"] = {i: state[parameter] for i, parameter in enumerate(order) if parameter in state}
    optimizer.load_state_dict(content)


def _optimized(stored: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return the tensors that the optimizer updates."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [(name, tensor) for name, tensor in stored if id(tensor) in known]
