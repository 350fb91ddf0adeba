"""Weight files that are copied, edited and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal.tests.grid.models import model_dir
from areal.tests.harness.world import world


def on_disk(folder: str | Path) -> dict[str, Tensor]:
    """Return all tensors of a model directory."""
    return {
        key: tensor
        for file in sorted(Path(folder).glob("model*.safetensors"))
        for key, tensor in load_file(file).items()
    }


def copied(family: str, tmp_path: Path) -> Path:
    """Return a copy of a model directory, made by the first rank."""
    folder = tmp_path / "model"
    if world().rank == 0:
        shutil.copytree(model_dir(family), folder)
    if dist.is_initialized():
        dist.barrier()
    return folder


def edit(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def dangling_index(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES = {
    "missing": (edit(lambda t: t.pop("model.norm.weight")), r"no 'model\.norm\.weight'"),
    "shape": (
        edit(lambda t: t.update({"model.norm.weight": torch.ones(7)})),
        r"model\.safetensors: 'model\.norm\.weight' has shape \[7\].*\[32\]",
    ),
    "extra": (edit(lambda t: t.update({"model.more": torch.ones(7)})), r"model\.safetensors has 'model\.more'"),
    "truncated": (truncate, r"model\.safetensors cannot be read.*damaged"),
    "pickled": (only_pickled, r"pytorch_model\.bin.*save_pretrained"),
    "index": (dangling_index, r"names model-00001-of-00002\.safetensors, which is not there"),
}
