"""Files of a model: its directory or hub download, its configuration, and everything that belongs to it except weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from torch import nn
from transformers import AutoConfig, PretrainedConfig

MODEL_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tekken.json",
)
"""Files of a model other than weights and configuration. A checkpoint gets copies from the model's source."""


_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

_WINDOW_OF_ALL_LAYERS = frozenset({"mistral", "qwen3_moe"})
_WINDOW_BY_KIND = frozenset({"qwen2", "qwen3"})
"""Families whose layers have the window, all of them or those that ``layer_types`` names. Others ignore both fields."""

Windows = tuple[int | None, ...]
"""For each layer of a model, the number of keys that a token attends to, its own included, or ``None`` for all."""


def model_folder(path: str | Path) -> Path:
    """Return the directory of a model: ``path`` itself, or the local download of the hub model of that name.

    Raises:
        ValueError: ``path`` is not a directory, and the hub does not have such a model or cannot be reached.
    """
    if Path(path).is_dir():
        return Path(path)
    # The download is cached. Only safetensors and text files are needed, not weights in other formats.
    try:
        return Path(
            snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"path = {str(path)!r}: neither a directory nor a model that the hub gives: {error}"
        ) from error


def read_config(path: str) -> PretrainedConfig:
    """Read the configuration of a model.

    Raises:
        ValueError: ``path`` does not contain a readable configuration.
    """
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"path = {path!r}: no model configuration can be read there: {error}") from error


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the length of the sequences for which a model was made, in tokens; ``None`` if its configuration does not tell it."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_rope(config: PretrainedConfig) -> None:
    """Raise a ``ValueError`` if the rotary frequencies of a token depend on the rest of its batch."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # Families with several kinds of layers have parameters for each.
    for each in (parameters, *(its for its in parameters.values() if isinstance(its, dict))):
        rope = each.get("rope_type")
        if rope in _BATCH_DEPENDENT_ROPE:
            raise ValueError(
                f"rope_type = {rope!r}: its frequencies depend on the longest sequence beside a token, so that the "
                "gradient would depend on how a batch is cut; choose a fixed rope_type in config.json (such as 'yarn')"
            )


def layer_windows(config: PretrainedConfig) -> Windows:
    """Return the sliding window of each layer of a model whose layers are not transformers' own, as transformers reads it.

    A configuration may have fields that its family ignores.

    Raises:
        ValueError: a layer is neither of the two kinds that the families have.
    """
    window, number = getattr(config, "sliding_window", None) or None, config.num_hidden_layers
    if config.model_type in _WINDOW_OF_ALL_LAYERS:
        return (window,) * number
    if config.model_type not in _WINDOW_BY_KIND:
        return (None,) * number
    unknown = sorted(set(config.layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"layer_types has {unknown[0]!r} in config.json: {config.model_type} has full_attention and sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def copy_model_files(source: str, draft: Path) -> list[str]:
    """Copy :data:`MODEL_FILES`, code and additional chat templates of the model ``source`` to the directory ``draft``.

    Returns:
        Paths of the files, relative to ``draft``.
    """
    folder = model_folder(source)
    # Known files that the model has, and the Python files of a model with code.
    names = [name for name in MODEL_FILES if (folder / name).is_file()]
    names += sorted(code.name for code in folder.glob("*.py"))
    for name in names:
        shutil.copyfile(folder / name, draft / name)
    # A model with several chat templates keeps them in a directory.
    if (folder / "additional_chat_templates").is_dir():
        shutil.copytree(folder / "additional_chat_templates", draft / "additional_chat_templates")
        names += [str(p.relative_to(draft)) for p in sorted((draft / "additional_chat_templates").iterdir())]
    return names


def experts_per_layer(config: PretrainedConfig) -> int:
    """Return the number of experts in each layer that has experts, else 0."""
    return getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None) or 0


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give all floating-point parameters of a model on the meta device one dtype, in place. Buffers keep theirs.

    Some families make parameters of recurrent layers in float32, whatever the model's dtype is.
    """
    cast: dict[int, nn.Parameter] = {}  # a parameter may have several owners
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                if id(parameter) not in cast:
                    cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = cast[id(parameter)]
