"""The tensors of a sharded model and its optimizer in a checkpoint that a run goes on from, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from areal.engine.dcp_files import METADATA, read_tensors
from areal.engine.disk_layout import stored_tensors
from areal.engine.fsdp.shards import empty_like, reshard

_MODEL, _OPTIM = "model.", "optim."


class CheckpointedOptimizer(Protocol):
    """An optimizer as a checkpoint sees it: the torch optimizer with its moments, and the state of the schedule around it."""

    inner: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Everything of a run that is a tensor, by the name in the checkpoint: shards stay shards."""
    reshard(model)
    tensors = {_MODEL + name: tensor.detach() for name, tensor in stored_tensors(model)}
    if optimizer is not None:
        for name, parameter in _optimized(model, optimizer).items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{_OPTIM}{name}.{key}"] = value
                elif value is not None:
                    raise ValueError(
                        f"optimizer state {key!r} of {name} is a {type(value).__name__}; only tensors are saved"
                    )
    return tensors


def check_tensors(path: Path, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    """Compare a checkpoint with the tensors of a model, reading no values.

    Args:
        tensors: the model's, from :func:`tensors_of` without an optimizer.

    Raises:
        ValueError: it is a checkpoint of another model; names file and key.
    """
    saved = {key: value for key, value in metadata.state_dict_metadata.items() if key.startswith(_MODEL)}
    for key, tensor in tensors.items():
        found = saved.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(
                f"{path / METADATA} has no {key.removeprefix(_MODEL)!r}, which the model needs: it is of another model"
            )
        if found.size != tensor.shape:
            raise ValueError(
                f"{path / METADATA}: {key.removeprefix(_MODEL)!r} has shape {list(found.size)}, but the model needs {list(tensor.shape)}"
            )
    extra = sorted(set(saved) - set(tensors))
    if extra:
        raise ValueError(
            f"{path / METADATA} has {extra[0].removeprefix(_MODEL)!r}, which the model has not: it is of another model"
        )


def empty_optimizer_state(
    metadata: Metadata, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Tensors for the optimizer state that a checkpoint holds, laid out like the parameters."""
    state: dict[nn.Parameter, dict[str, Tensor]] = {}
    saved = metadata.state_dict_metadata
    for name, parameter in _optimized(model, optimizer).items():
        prefix = f"{_OPTIM}{name}."
        for key, found in saved.items():
            if key.startswith(prefix) and isinstance(found, TensorStorageMetadata):
                dtype = found.properties.dtype
                like_parameter = found.size == parameter.shape
                empty = empty_like(parameter, dtype=dtype) if like_parameter else torch.empty(found.size, dtype=dtype)
                state.setdefault(parameter, {})[key.removeprefix(prefix)] = empty
    return state


def read_optimizer(path: Path, metadata: Metadata, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace an optimizer's state by that of a checkpoint. Its hyperparameters stay."""
    names = {parameter: name for name, parameter in _optimized(model, optimizer).items()}
    state = empty_optimizer_state(metadata, model, optimizer)
    flat = {f"{_OPTIM}{names[p]}.{key}": value for p, values in state.items() for key, value in values.items()}
    read_tensors(path, metadata, flat)
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    content = optimizer.state_dict()
    content["state"] = {i: state[parameter] for i, parameter in enumerate(order) if parameter in state}
    optimizer.load_state_dict(content)


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in known}
