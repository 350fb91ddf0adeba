"""Copy of a model with tied embeddings in which embedding and output head are separate weights, to merge adapters of the head into."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from areal.engine.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, TensorFiles
from areal.engine.checkpoint.tensor_layout import disk_layout
from areal.engine.model.hub import copy_model_files, model_folder, read_config
from areal.engine.model.media import model_factory
from areal.utils.dtensor import full_box
from areal.utils.new_folder import new_folder

_BODY_FILE, _HEAD_FILE = "model-body.safetensors", "model-head.safetensors"


def write_untied_copy(path: str, folder: Path) -> None:
    """Write a copy of a model with tied embeddings that has the same logits, and in which embedding and head are separate weights.

    Args:
        path: directory or hub name of the model.
        folder: new directory, which appears complete or not at all.

    Raises:
        ValueError: the embeddings of the model are not tied, its files cannot be read, or ``folder`` exists.
    """
    if folder.exists():
        raise ValueError(f"folder = {str(folder)!r} exists: remove it, or name another one")
    source = model_folder(path)
    tied, head = _tied_names(path)
    with new_folder(folder) as draft:
        # Configuration and files without weights.
        config = json.loads((source / "config.json").read_text())
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
        (draft / "config.json").write_text(json.dumps(config, indent=2))
        copy_model_files(path, draft)
        with TensorFiles.of_model(source) as tensors:
            # Files of weights. The single file gets another name: transformers would read it instead of the index.
            weight_map = {key: tensors.file_of(key).name for key in tensors}
            files = {file: _BODY_FILE if file == SINGLE_FILE else file for file in weight_map.values()}
            for file, name in files.items():
                shutil.copyfile(source / file, draft / name)
            weight_map = {key: files[file] for key, file in weight_map.items()}
            # The head.
            if head not in weight_map:
                key = next((name for name in tied if name in tensors), None)
                if key is None:
                    raise ValueError(f"path = {path!r}: its files have none of {tied}")
                weight = tensors.read(key, full_box(tensors.shape(key)))
                save_file({head: weight.contiguous()}, draft / _HEAD_FILE, {"format": "pt"})
                weight_map[head] = _HEAD_FILE
        size = sum((draft / name).stat().st_size for name in set(weight_map.values()))
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (draft / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True))


def _tied_names(path: str) -> tuple[list[str], str]:
    """Return the names on disk of the weight that a model's embedding and head have in common, and of the head of an untied model."""
    config = read_config(path)
    model = _without_values(config)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        raise ValueError(f"path = {path!r}: its embeddings are not tied: use the model as it is")
    tied = {name for name, x in model.named_parameters(remove_duplicate=False) if x is head.weight}
    stored = [piece.name for name, pieces in disk_layout(model).items() if name in tied for piece in pieces]
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    untied = _without_values(config)
    name = next(f"{name}.weight" for name, x in untied.named_modules() if x is untied.get_output_embeddings())
    # Files may have the weight under another of its names.
    return [*stored, *sorted(tied - set(stored))], disk_layout(untied)[name][0].name


def _without_values(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return model_factory(config).from_config(config)
