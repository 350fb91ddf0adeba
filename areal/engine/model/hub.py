"""Where a model's files are, and its configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, PretrainedConfig

BESIDE_WEIGHTS = (
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
)
"""What belongs to a model beside its weights and its configuration, copied from where the model came from."""


def model_folder(path: str | Path) -> Path:
    """The directory of a model: ``path`` itself, or where the hub's files for that name are kept.

    Raises:
        ValueError: it is no directory, and the hub has no model of that name or cannot be reached.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(
            snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"path = {str(path)!r}: neither a directory nor a model that the hub gives: {error}"
        ) from error


def read_config(path: str) -> PretrainedConfig:
    """The configuration of a model.

    Raises:
        ValueError: none can be read there.
    """
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"path = {path!r}: no model configuration can be read there: {error}") from error


def copy_beside(source: str, draft: Path) -> list[str]:
    """Copy :data:`BESIDE_WEIGHTS`, code and further chat templates of the model ``source`` to ``draft``.

    Returns:
        The names of the files, within ``draft``.
    """
    folder = model_folder(source)
    names = [name for name in BESIDE_WEIGHTS if (folder / name).is_file()]
    names += sorted(code.name for code in folder.glob("*.py"))
    for name in names:
        shutil.copyfile(folder / name, draft / name)
    if (folder / "additional_chat_templates").is_dir():
        shutil.copytree(folder / "additional_chat_templates", draft / "additional_chat_templates")
        names += [str(p.relative_to(draft)) for p in sorted((draft / "additional_chat_templates").iterdir())]
    return names
