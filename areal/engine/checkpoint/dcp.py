"""Files of torch's distributed checkpoint, written and read without a process group.

The planners and storage classes of torch are driven step by step here, instead of by ``dcp.save``: planning is agreed over the control plane in
the calling thread, and writing needs no process group at all, so that it may go on in a thread while training uses the groups.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from areal.engine.checkpoint.async_save import SaveTask, WrittenFiles
from areal.engine.checkpoint.atomic_dir import FileRecord, record
from areal.utils.distributed import ControlPlane

METADATA = ".metadata"


class StagedPlanner(DefaultSavePlanner):
    """A planner that can copy what it will write, so that the tensors themselves may change meanwhile."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._staged: dict[MetadataIndex, Any] | None = None

    def stage(self, plan: SavePlan) -> None:
        """Copy what ``plan`` writes to host memory."""
        resolve = super().resolve_data
        self._staged = {item.index: _copy_to_host(resolve(item)) for item in plan.items}

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item) if self._staged is None else self._staged[write_item.index]
        return found.detach() if isinstance(found, Tensor) else found


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
    """Plan who writes what, and copy it if the save is ``asynchronous``. Collective.

    Args:
        tensors: this rank's, by the name in the checkpoint, in a form that ``planner`` knows.
        files: this rank's other files, by name.
        about: goes into the manifest.
    """
    writer = FileSystemWriter(draft, sync_files=False)  # brought to the disk once, when the checksum is taken
    plan, metadata = _agree_on_plan(dict(tensors), planner, writer, control)
    if asynchronous:
        planner.stage(plan)

    def write() -> WrittenFiles:
        results = writer.write_data(plan, planner).value()
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
    is_first = control.rank == 0

    def plan_locally() -> SavePlan:
        writer.set_up_storage_writer(is_first)
        planner.set_up_planner(tensors, is_coordinator=is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    local_plans = control.attempt_and_gather(plan_locally)

    def plan_globally() -> tuple[list[SavePlan], Metadata]:
        plans, metadata = planner.create_global_plan(local_plans)
        return writer.prepare_global_plan(plans), metadata

    # The first rank plans for all.
    plans, metadata = control.attempt_and_gather(lambda: plan_globally() if is_first else ([], Metadata({})))[0]
    return planner.finish_plan(plans[control.rank]), metadata


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


def read_tensors(
    path: Path, metadata: Metadata, tensors: Mapping[str, Any], planner: DefaultLoadPlanner | None = None
) -> None:
    """Fill tensors in place. Each rank reads what its shards need; no collective."""
    planner, reader = planner or DefaultLoadPlanner(allow_partial_load=False), FileSystemReader(path)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
