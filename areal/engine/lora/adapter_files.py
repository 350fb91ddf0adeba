"""Files of an adapter: peft's own, and one with the training state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from areal.engine.checkpoint.async_save import SaveTask, WrittenFiles
from areal.engine.checkpoint.atomic_dir import record
from areal.engine.checkpoint.gather_slices import SliceGatherer
from areal.engine.checkpoint.run_state import read_state, to_bytes
from areal.engine.lora.adapter import Adapter
from areal.engine.lora.adapter_plan import AdapterPlan
from areal.utils.distributed import ControlPlane

TRAINING_FILE = "training.pt"
"""Optimizer state next to an adapter; peft ignores it."""


def adapter_files(
    adapter: Adapter, peft_format: Any, base: str, control: ControlPlane, *, with_optim: bool
) -> dict[str, bytes]:
    """Return the files of an adapter by name, on the first rank; other ranks return an empty dict. Collective."""
    full = _gather_full_tensors(adapter, control, with_optim=with_optim)
    if control.rank > 0:
        return {}
    # The remaining tensors are the moments of the optimizer.
    weights = {name: full.pop(name) for name in adapter.plan.shapes}
    files = peft_format.encode_files(adapter.plan, weights, base)
    if with_optim and adapter.optimizer is not None:
        files[TRAINING_FILE] = to_bytes({"schedule": adapter.optimizer.state_dict(), "moments": full})
    return files


def write_files(files: Mapping[str, bytes], draft: Path, about: dict[str, Any]) -> SaveTask:
    """Return the work that writes this rank's files, by their names within the draft.

    Args:
        files: content by name.
        draft: directory to write to.
        about: dict of fields for the manifest.
    """

    def write() -> WrittenFiles:
        for name, content in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(content)
        return WrittenFiles([record(draft, name) for name in files])

    return SaveTask(write, finish=lambda payloads: [], about=about)


def _gather_full_tensors(adapter: Adapter, control: ControlPlane, *, with_optim: bool) -> dict[str, Tensor]:
    """Gather full tensors to host memory of the first rank; other ranks return an empty dict."""
    local = list(adapter.local_slices(with_optim=with_optim))
    # Every rank must gather the same tensors in the same order: take the union over ranks.
    specs = {spec.name: spec for others in control.gather([spec for spec, _ in local]) for spec in others}
    gatherer = SliceGatherer((entry for _, entry in local), control)
    full = {name: gatherer.gather(spec, writer=0) for name, spec in specs.items()}
    return {name: x for name, x in full.items() if x is not None}


def read_training(folder: Path, plan: AdapterPlan, optimizer: str) -> Mapping[str, Any]:
    """Read the training state that :func:`adapter_files` has written.

    Args:
        folder: directory of the adapter.
        plan: its layers.
        optimizer: type of the optimizer that goes on with it.

    Raises:
        ValueError: the file is missing, damaged, or of another adapter or type of optimizer.
    """
    file = folder / TRAINING_FILE
    if not file.is_file():
        raise ValueError(f"{folder} was saved without optimizer state: load it with with_optim=False")
    state = read_state(file)
    # States of earlier releases are without settings.
    saved = state["schedule"].get("settings", {}).get("type", optimizer)
    if saved != optimizer:
        raise ValueError(
            f"{file} is of the optimizer {saved!r}, and this run has {optimizer!r}: load it with with_optim=False"
        )
    shapes = plan.shapes
    # Moments have the shapes of their weights; scalars such as the step are exempt.
    for name, x in state["moments"].items():
        shape = shapes.get(name.rpartition(".")[0])
        if shape is None or (x.dim() and tuple(x.shape) != shape):
            raise ValueError(
                f"{file} has {name!r} of shape {list(x.shape)}, which the adapter has not: it is of another one"
            )
    return state
