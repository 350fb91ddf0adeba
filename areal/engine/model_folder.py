"""Where a model's files are, and its configuration."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, PretrainedConfig


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
