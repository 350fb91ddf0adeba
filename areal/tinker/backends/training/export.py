"""Files of an adapter for download, as the hosted Tinker service names them."""

from __future__ import annotations

import shutil
from pathlib import Path

from areal.engine.lora.adapter_set import peft_format
from areal.utils.new_folder import new_folder


def export_adapter(source: Path, folder: Path, model: str) -> None:
    """Move an adapter from peft's format to a folder for download, which appears complete or not at all.

    Args:
        source: folder in peft's format, which is removed.
        folder: new folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        model: directory or hub name of the base model.

    Raises:
        ValueError: the adapter or the model cannot be read.
    """
    try:
        with new_folder(folder) as draft:
            for name, content in peft_format().service_files(source, model).items():
                (draft / name).write_bytes(content)
    finally:
        shutil.rmtree(source, ignore_errors=True)
