"""Check that a directory has all weights of a model before servers load it: they keep the old values of what is missing, without a word."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from areal.engine.checkpoint.safetensors import TensorFiles
from areal.engine.model.hub import read_config
from areal.weight_sync.apply import Replica


class Completeness:
    """Names of the weights of a model.

    Args:
        model: directory or hub name of the model; ``None`` if unknown. Nothing is checked then.
    """

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._replica: Replica | None = None

    def check(self, folder: Path) -> None:
        """Raise if a directory lacks a weight.

        A directory with names that the model does not have is left to the server, which says what does not fit.

        Raises:
            ValueError: it does; names the first one.
        """
        if self._model is None or not folder.is_dir():
            return
        if self._replica is None:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(read_config(self._model))
            self._replica = Replica(model)
        known, found = set(self._replica), set[str]()
        with TensorFiles.of_model(folder) as files:
            for name in files:
                try:
                    found.add(self._replica.resolve(name, files.shape(name)))
                except ValueError:
                    return
        missing = sorted(known - found)
        if missing:
            raise ValueError(
                f"{folder} lacks {missing[0]!r} and {len(missing) - 1} others: servers would keep their old values; send all tensors"
            )
