"""An adapter as files: peft's own, and one more for what training needs to go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from areal.engine.checkpoint.async_save import Work, Written
from areal.engine.checkpoint.atomic_dir import record
from areal.engine.checkpoint.gather_slices import SliceGatherer
from areal.engine.checkpoint.run_state import read_state, to_bytes
from areal.engine.lora.adapter import Adapter
from areal.engine.lora.plan import AdapterPlan
from areal.utils.distributed import ControlPlane

TRAINING_FILE = "training.pt"
"""Optimizer state beside an adapter, which peft does not look at."""


def adapter_files(
    adapter: Adapter, peft_format: Any, base: str, control: ControlPlane, *, with_optim: bool
) -> dict[str, bytes]:
    """The files of an adapter, by name, on the first rank; none elsewhere. Collective."""
    full = _gather_full_tensors(adapter, control, with_optim=with_optim)
    if control.rank > 0:
        return {}
    weights = {name: full.pop(name) for name in adapter.plan.shapes}
    files = peft_format.encode_files(adapter.plan, weights, base)
    if with_optim and adapter.optimizer is not None:
        files[TRAINING_FILE] = to_bytes({"schedule": adapter.optimizer.state_dict(), "moments": full})
    return files


def write_files(files: Mapping[str, bytes], draft: Path, about: dict[str, Any]) -> Work:
    """Writes this rank's files, by their names within the draft.

    Args:
        about: goes into the manifest.
    """

    def write() -> Written:
        for name, content in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(content)
        return Written([record(draft, name) for name in files])

    return Work(write, finish=lambda payloads: [], about=about)


def _gather_full_tensors(adapter: Adapter, control: ControlPlane, *, with_optim: bool) -> dict[str, Tensor]:
    """Full tensors on the first rank, in host memory of their own; none elsewhere."""
    local = list(adapter.local_slices(with_optim=with_optim))
    specs = {spec.name: spec for others in control.gather([spec for spec, _ in local]) for spec in others}
    collector = SliceGatherer((entry for _, entry in local), control)
    full = {name: collector.collect(spec, writer=0) for name, spec in specs.items()}
    return {name: x for name, x in full.items() if x is not None}


def read_training(folder: Path, plan: AdapterPlan) -> Mapping[str, Any]:
    """What :func:`adapter_files` wrote with the optimizer.

    Raises:
        ValueError: there is none, it is damaged, or of another adapter.
    """
    file = folder / TRAINING_FILE
    if not file.is_file():
        raise ValueError(f"{folder} was saved without optimizer state: load it with with_optim=False")
    state = read_state(file)
    shapes = plan.shapes
    for name, x in state["moments"].items():
        shape = shapes.get(name.rpartition(".")[0])
        if shape is None or (x.dim() and tuple(x.shape) != shape):
            raise ValueError(
                f"{file} has {name!r} of shape {list(x.shape)}, which the adapter has not: it is of another one"
            )
    return state
