"""Model directories with a tokenizer, for servers and their clients."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from areal.tests.grid.models import model_dir
from areal.tests.unit.inference.local.rollouts import tokenizer


def with_tokenizer(folder: Path, *, reversed_ids: bool = False) -> str:
    """Write a copy of the servers' model with a tokenizer. Returns its path.

    Args:
        folder: directory to create.
        reversed_ids: give the same texts other ids.
    """
    shutil.copytree(model_dir("qwen3"), folder)
    tokenizer().save_pretrained(folder)
    if reversed_ids:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        ids = content["model"]["vocab"]
        content["model"]["vocab"] = {text: len(ids) - 1 - number for text, number in ids.items()}
        file.write_text(json.dumps(content))
    return str(folder)
