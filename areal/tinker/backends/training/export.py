"""Files of an adapter for download, as the hosted Tinker service names them."""

from __future__ import annotations

import shutil
from pathlib import Path

from areal.engine.lora.adapter_set import peft_format


def export_adapter(source: Path, folder: Path, model: str) -> None:
    """Move an adapter from peft's format to a folder for download, which appears complete or not at all.

    Args:
        source: folder in peft's format, which is removed.
        folder: new folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        model: directory or hub name of the base model.

    Raises:
        ValueError: the adapter or the model cannot be read.
    """
    draft = folder.with_name(f"{folder.name}.draft")
    try:
        files = peft_format().service_files(source, model)
        draft.mkdir()
        for name, content in files.items():
            (draft / name).write_bytes(content)
        draft.rename(folder)
    finally:
        for path in (source, draft):
            shutil.rmtree(path, ignore_errors=True)
