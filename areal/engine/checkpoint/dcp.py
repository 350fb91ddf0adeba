"""Write and read files of torch.distributed.checkpoint (DCP) without a process group.

This module calls torch's planners and storage classes step by step instead of ``dcp.save``. Planning runs over the control
plane in the calling thread. Writing needs no communication, so that it can run in a thread while training uses the groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType

from areal.engine.checkpoint.async_save import SaveTask, WrittenFiles
from areal.engine.checkpoint.atomic_dir import FileRecord, record
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import Box

METADATA = ".metadata"


class StagedPlanner(DefaultSavePlanner):
    """A save planner that can copy the planned tensors in advance, so that training may change them during the save."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._staged: dict[MetadataIndex, Any] | None = None

    def stage(self, plan: SavePlan) -> None:
        """Copy all items of ``plan`` to host memory."""
        resolve = super().resolve_data
        self._staged = {item.index: _copy_to_host(resolve(item)) for item in plan.items}
        # References to the tensors would keep memory that their owner replaces in the next step.
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item) if self._staged is None else self._staged[write_item.index]
        return data.detach() if isinstance(data, Tensor) else data


@dataclass(frozen=True)
class TensorPlace:
    """Position of a box in a tensor of a checkpoint.

    Attributes:
        key: key of the tensor.
        offsets: first index of the box in each dimension.
        shape: shape of the full tensor.
    """

    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def item(self, values: Tensor) -> WriteItem:
        """Return the entry of a save plan that writes ``values``, in as many dimensions, to this position."""
        chunk, size = ChunkStorageMetadata(torch.Size(self.offsets), values.shape), torch.Size(self.shape)
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(values), size)
        return WriteItem(MetadataIndex(self.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


@dataclass(frozen=True)
class AliasedItem(WriteItem):
    """Entry of a save plan for values that are read under several names, and written once.

    Attributes:
        aliases: entries for the other names.
    """

    aliases: tuple[WriteItem, ...] = ()


@dataclass(frozen=True)
class TensorBoxes:
    """Boxes of a tensor in a checkpoint, for engines whose tensors are not torch's distributed ones.

    Attributes:
        boxes: bounds within the full tensor, each with its values, to write or to fill. Ranks may have equal boxes: one of them
            is written.
        shape: shape of the full tensor.
        aliases: for each box, its places in other tensors. Empty: none.
    """

    boxes: Sequence[tuple[Box, Tensor]]
    shape: tuple[int, ...]
    aliases: Sequence[Sequence[TensorPlace]] = ()

    def size(self) -> torch.Size:
        """Return the shape of the full tensor."""
        return torch.Size(self.shape)

    def at(self, offsets: torch.Size | None) -> Tensor:
        """Return the values of the box that begins at some offsets."""
        return next(values for box, values in self.boxes if _offsets(box) == offsets)

    # Names of torch's protocol for objects that its planners divide into files.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(_offsets(box), torch.Size(values.shape)) for box, values in self.boxes]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        items: list[WriteItem] = []
        for (box, values), places in zip(self.boxes, self.aliases or [()] * len(self.boxes), strict=True):
            item = TensorPlace(fqn, _offsets(box), self.shape).item(values)
            aliases = tuple(place.item(values) for place in places)
            items.append(AliasedItem(item.index, item.type, tensor_data=item.tensor_data, aliases=aliases))
        return items


def _offsets(box: Box) -> torch.Size:
    return torch.Size(s.start for s in box)


class BoxSavePlanner(StagedPlanner):
    """A planner that writes boxes, and plain tensors."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        # Aliases of the boxes that are written, of which several ranks may have had the same.
        aliases = SavePlan([alias for plan in plans for item in plan.items for alias in _aliases(item)])
        _, named = create_default_global_save_plan([aliases])
        metadata.state_dict_metadata.update(named.state_dict_metadata)
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.at(index.offset) if isinstance(value, TensorBoxes) else value


class BoxLoadPlanner(DefaultLoadPlanner):
    """A planner that fills boxes, and plain tensors."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise ValueError("metadata = None: set up the planner with those of a checkpoint")
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        return value.at(index.offset) if isinstance(value, TensorBoxes) else value


def prepare_files(
    tensors: Mapping[str, Any],
    files: Mapping[str, bytes],
    planner: StagedPlanner,
    control: ControlPlane,
    draft: Path,
    *,
    asynchronous: bool,
    about: dict[str, Any],
) -> SaveTask:
    """Plan which rank writes which tensors, and copy them if the save is ``asynchronous``. Collective.

    Args:
        tensors: name -> tensor of this rank, in a form that ``planner`` supports.
        files: name -> content of this rank's other files.
        planner: planner of the engine.
        control: control plane over all ranks.
        draft: directory to write into.
        asynchronous: whether the tensors may change before they are written.
        about: entries for the manifest.
    """
    writer = FileSystemWriter(draft, sync_files=False)  # record() syncs each file when it computes the checksum
    plan, metadata = _agree_on_plan(dict(tensors), planner, writer, control)
    if asynchronous:
        control.attempt(lambda: planner.stage(plan))

    def write() -> WrittenFiles:
        # Tensors of the plan, then the other files. The first rank needs the results to write the metadata.
        results = writer.write_data(plan, planner).value()
        aliases = {item.index: _aliases(item) for item in plan.items}
        results += [replace(it, index=alias.index) for it in results for alias in aliases[it.index]]
        for name, content in files.items():
            (draft / name).write_bytes(content)
        names = {result.storage_data.relative_path for result in results}
        return WrittenFiles([record(draft, name) for name in sorted(names.union(files))], results)

    def finish(payloads: list[Any]) -> list[FileRecord]:
        writer.finish(metadata, payloads)
        return [record(draft, METADATA)]

    return SaveTask(write, finish, about)


def _agree_on_plan(
    tensors: dict[str, Any], planner: DefaultSavePlanner, writer: FileSystemWriter, control: ControlPlane
) -> tuple[SavePlan, Metadata]:
    """Return this rank's plan, and the metadata of all tensors. Collective over the control plane."""
    is_first = control.rank == 0

    def plan_locally() -> SavePlan:
        writer.set_up_storage_writer(is_first)
        planner.set_up_planner(tensors, is_coordinator=is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    # Each rank plans for its own shards.
    local_plans = control.attempt_and_gather(plan_locally)

    def plan_globally() -> tuple[list[SavePlan], Metadata]:
        plans, metadata = planner.create_global_plan(local_plans)
        return writer.prepare_global_plan(plans), metadata

    # The first rank merges the plans of all ranks: replicated tensors are written once.
    plans, metadata = control.attempt_and_gather(lambda: plan_globally() if is_first else ([], Metadata({})))[0]
    return planner.finish_plan(plans[control.rank]), metadata


def _aliases(item: WriteItem) -> tuple[WriteItem, ...]:
    return item.aliases if isinstance(item, AliasedItem) else ()


def _copy_to_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # cpu() returns the tensor itself if it is already on the CPU.
    copied = value.detach().cpu()
    return copied.clone() if copied.data_ptr() == value.data_ptr() else copied


def read_metadata(path: Path) -> Metadata:
    """Read the metadata of a checkpoint: names, shapes and files of its tensors.

    Raises:
        ValueError: the metadata is damaged.
    """
    try:
        return FileSystemReader(path).read_metadata()
    # A damaged pickle may be any program: it fails in any way, also for lack of memory.
    except Exception as error:
        raise ValueError(f"{path / METADATA} is damaged: {type(error).__name__}: {error}") from error


def read_tensors(
    path: Path, metadata: Metadata, tensors: Mapping[str, Any], planner: DefaultLoadPlanner | None = None
) -> None:
    """Read tensors in place. Each rank reads the data of its shards. Not collective."""
    # Every rank is its own coordinator, so that torch neither gathers nor scatters plans.
    planner, reader = planner or DefaultLoadPlanner(allow_partial_load=False), FileSystemReader(path)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
