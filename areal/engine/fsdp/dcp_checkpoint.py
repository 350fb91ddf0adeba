"""A checkpoint that a run goes on from, in any layout: torch distributed checkpoint files, and the state of what is not a tensor.

The planners and storage classes of torch are driven step by step here, instead of by ``dcp.save``: planning is agreed over the control plane in
the calling thread, and writing needs no process group at all, so that it may go on in a thread while training uses the groups.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from areal.api.checkpoint import Stateful
from areal.engine.fsdp.naming import stored_tensors
from areal.engine.fsdp.shards import empty_like, reshard
from areal.engine.publish import FileRecord, record
from areal.engine.save_job import Work, Written
from areal.utils.distributed import ControlPlane, as_fault, raise_together

METADATA = ".metadata"
STATE_FILE = "state.pt"
_MODEL, _OPTIM = "model.", "optim."


class CheckpointedOptimizer(Protocol):
    """An optimizer as a checkpoint sees it: the torch optimizer with its moments, and the state of the schedule around it."""

    inner: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def rng_file(rank: int) -> str:
    """Where a rank's random state is kept."""
    return f"rng-{rank:05d}.pt"


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


def prepare_dcp(
    tensors: Mapping[str, Tensor],
    state: dict[str, Any],
    rng: dict[str, Any],
    control: ControlPlane,
    draft: Path,
    *,
    asynchronous: bool,
    about: dict[str, Any],
) -> Work:
    """Plan who writes what, and copy it if the save is ``asynchronous``. Collective.

    Args:
        tensors: from :func:`tensors_of`. state: what is no tensor; the first rank's is kept. rng: this rank's random state.
    """
    planner = _StagedPlanner()
    writer = FileSystemWriter(draft, sync_files=False)  # brought to the disk once, when the checksum is taken
    plan, metadata = _agree_on_plan(dict(tensors), planner, writer, control)
    if asynchronous:
        planner.stage(plan)
    files = {rng_file(control.rank): _to_bytes(rng)}
    if control.rank == 0:
        files[STATE_FILE] = _to_bytes(state)

    def write() -> Written:
        results = writer.write_data(plan, planner).value()
        for name, content in files.items():
            (draft / name).write_bytes(content)
        names = {result.storage_data.relative_path for result in results}
        return Written([record(draft, name) for name in sorted(names.union(files))], results)

    def finish(payloads: list[Any]) -> list[FileRecord]:
        writer.finish(metadata, payloads)
        return [record(draft, METADATA)]

    return Work(write, finish, about)


def _agree_on_plan(
    tensors: dict[str, Any], planner: DefaultSavePlanner, writer: FileSystemWriter, control: ControlPlane
) -> tuple[SavePlan, Metadata]:
    local, error = None, None
    try:
        writer.set_up_storage_writer(control.rank == 0)
        planner.set_up_planner(tensors, is_coordinator=control.rank == 0)
        local = writer.prepare_local_plan(planner.create_local_plan())
    except Exception as caught:
        error = caught
    answers = control.gather((as_fault(error), local))
    raise_together([fault for fault, _ in answers], error)
    agreed: tuple[list[SavePlan], Metadata] | None = None
    if control.rank == 0:
        try:
            plans, metadata = planner.create_global_plan([plan for _, plan in answers])
            agreed = writer.prepare_global_plan(plans), metadata
        except Exception as caught:
            error = caught
    decided = control.gather((as_fault(error), agreed))
    raise_together([fault for fault, _ in decided], error)
    plans, metadata = decided[0][1]
    return planner.finish_plan(plans[control.rank]), metadata


class _StagedPlanner(DefaultSavePlanner):
    """A planner that can copy what it will write, so that the tensors themselves may change meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[MetadataIndex, Any] | None = None

    def stage(self, plan: SavePlan) -> None:
        resolve = super().resolve_data
        self._staged = {item.index: _copy_to_host(resolve(item)) for item in plan.items}

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item) if self._staged is None else self._staged[write_item.index]
        return found.detach() if isinstance(found, Tensor) else found


def _copy_to_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().cpu()
    return copied.clone() if copied.data_ptr() == value.data_ptr() else copied


def read_metadata(path: Path) -> Metadata:
    """What a checkpoint holds.

    Raises:
        ValueError: its metadata is damaged.
    """
    try:
        return FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise ValueError(f"{path / METADATA} is damaged: {type(error).__name__}: {error}") from error


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


def read_tensors(path: Path, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors in place. Each rank reads what its shards need; no collective."""
    planner, reader = DefaultLoadPlanner(allow_partial_load=False), FileSystemReader(path)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


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


def state_of(stateful: Mapping[str, Stateful]) -> dict[str, Any]:
    """The states of named objects.

    Raises:
        ValueError: one holds something that can not be read again without running code.
    """
    states = {name: thing.state_dict() for name, thing in stateful.items()}
    for name, content in states.items():
        try:
            from_bytes(_to_bytes(content))
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"SaveLoadMeta.stateful[{name!r}].state_dict() holds something that is not a tensor, a number, text or a container "
                f"of them: {error}"
            ) from error
    return states


def from_bytes(content: bytes) -> Any:
    """What :func:`prepare_dcp` wrote to a file: tensors, numbers, text and containers of them."""
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


def read_state(file: Path) -> Any:
    """The content of a state file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return from_bytes(file.read_bytes())
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def _to_bytes(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in known}
